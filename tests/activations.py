"""The list of what is tested: one row an activation, what it saves, its bits and slope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inplace_ops

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SLOPES = (-1.5, -0.01, 0.0, 0.01, 1.0, 2.0)

# The README's table: the largest absolute error of silu' with 1 to 8 bits; 0: exact.
SILU_ERROR: Mapping[torch.dtype, Sequence[float]] = {
    torch.float32: [4.5e-5, 5.6e-5, 2.8e-5, 1.4e-5, 7e-6, 3.5e-6, 2.5e-6, 1.9e-6],
    torch.float16: [3.9e-3, 4.1e-3, 4.1e-3, 3.6e-3, 3.8e-3, 7.2e-3, 0, 0],
    torch.bfloat16: [1.2e-2, 1.5e-2, 1.5e-2, 1.6e-2, 0, 0, 0, 0],
    torch.float64: [5e-9, 3.5e-9, 1.7e-9, 9e-10, 5e-10, 2.1e-10, 1.1e-10, 6e-11],
}
SILU_DEFAULT_BITS = {torch.float64: 1, torch.float32: 6, torch.float16: 7, torch.bfloat16: 5}

# Half a step of the grid that the derivative is rounded to.
DERIVATIVE_ERROR = {8: 0.5 / 212, 16: 0.5 / 54610, 32: 0.5 / (48 * 2**26)}
DERIVATIVE_DEFAULT_BITS = {
    torch.float64: 32,
    torch.float32: 16,
    torch.float16: 8,
    torch.bfloat16: 8,
}


@dataclass(frozen=True)
class Activation:
    name: str
    call: Callable[[Tensor], Tensor]
    module: Callable[..., nn.Module]  # takes inplace=
    reference: Callable[[Tensor], Tensor]  # PyTorch's, out of place
    torch_inplace: Callable[[Tensor], Tensor]
    allows_later_writes: bool
    keeps_output: bool
    packed_bits: Mapping[torch.dtype, int]  # an element, kept for backward
    is_exact: bool = True  # values and gradients equal PyTorch's to the bit
    is_twice_differentiable: bool = True
    # The largest absolute error of the derivative; none for a dtype: the gradient at an incoming
    # gradient of at most 1 passes torch.testing's default tolerances.
    derivative_error: Mapping[torch.dtype, float] = field(default_factory=dict)


def _relu(save: str) -> Activation:
    return Activation(
        name=f"relu-{save}",
        call=partial(inplace_ops.relu_, save=save),
        module=partial(inplace_ops.ReLU, save=save),
        reference=torch.relu,
        torch_inplace=torch.relu_,
        allows_later_writes=save == "mask",
        keeps_output=save == "output",
        packed_bits=dict.fromkeys(FLOATS, int(save == "mask")),
    )


def leaky_relu(slope: float, save: str) -> Activation:
    return Activation(
        name=f"leaky_relu-{slope}-{save}",
        call=partial(inplace_ops.leaky_relu_, negative_slope=slope, save=save),
        module=partial(inplace_ops.LeakyReLU, slope, save=save),
        reference=partial(F.leaky_relu, negative_slope=slope),
        torch_inplace=partial(F.leaky_relu_, negative_slope=slope),
        allows_later_writes=save == "mask",
        keeps_output=save == "output",
        packed_bits=dict.fromkeys(FLOATS, int(save == "mask")),
    )


def _silu(bits: int | None) -> Activation:
    kept = SILU_DEFAULT_BITS if bits is None else dict.fromkeys(FLOATS, bits)
    return Activation(
        name=f"silu-output-{bits or 'default'}",
        call=partial(inplace_ops.silu_, bits=bits),
        module=partial(inplace_ops.SiLU, bits=bits),
        reference=F.silu,
        torch_inplace=partial(F.silu, inplace=True),
        allows_later_writes=False,
        keeps_output=True,
        packed_bits=kept,
        is_exact=False,
        derivative_error={
            dtype: SILU_ERROR[dtype][kept[dtype] - 1]
            for dtype in FLOATS
            if kept[dtype] < SILU_DEFAULT_BITS[dtype]
        },
    )


def _silu_derivative(bits: int | None) -> Activation:
    kept = DERIVATIVE_DEFAULT_BITS if bits is None else dict.fromkeys(FLOATS, bits)
    return Activation(
        name=f"silu-derivative-{bits or 'default'}",
        call=partial(inplace_ops.silu_, save="derivative", bits=bits),
        module=partial(inplace_ops.SiLU, save="derivative", bits=bits),
        reference=F.silu,
        torch_inplace=partial(F.silu, inplace=True),
        allows_later_writes=True,
        keeps_output=False,
        packed_bits=kept,
        is_exact=False,
        is_twice_differentiable=False,
        # Beside the grid's error that of silu' itself: computed in float32, PyTorch's too is 1e-6.
        derivative_error={
            dtype: DERIVATIVE_ERROR[kept[dtype]] + (0 if dtype == torch.float64 else 1e-6)
            for dtype in FLOATS
        },
    )


ACTIVATIONS: tuple[Activation, ...] = (
    *(_relu(save) for save in ("mask", "output")),
    *(leaky_relu(slope, "mask") for slope in SLOPES),
    *(leaky_relu(slope, "output") for slope in SLOPES if slope >= 0),
    *(_silu(bits) for bits in (None, *range(1, 9))),
    *(_silu_derivative(bits) for bits in (None, 8, 16, 32)),
)

# One row for each way of saving, for tests whose subject is not the numbers.
ONE_OF_EACH: tuple[Activation, ...] = tuple(
    activation
    for activation in ACTIVATIONS
    if activation.name
    in (
        "relu-mask",
        "relu-output",
        "leaky_relu-0.01-mask",
        "leaky_relu-0.01-output",
        "silu-output-default",
        "silu-output-1",
        "silu-derivative-default",
    )
)


def activation_id(activation: Activation) -> str:
    return activation.name
