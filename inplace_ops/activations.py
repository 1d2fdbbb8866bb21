"""The activations, one entry each: what the rest of the package, tests and benchmarks know of them.

The kernels' list is `csrc/activations.h`, and the numbers of bits come from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _ops
from ._ops import Save as Save

MaskSave = Literal["mask", "output", "recompute"]  # where one bit tells the derivative
OutputSave = Literal["output", "derivative", "recompute"]  # elsewhere

Errors = Mapping[torch.dtype, Mapping[int, float]]


@dataclass(frozen=True, eq=False)
class Activation:
    """What is known of an activation.

    Attributes:
        function: The name of its function.
        torch_module: PyTorch's module, and ours has its name.
        torch_function: PyTorch's function, out of place, of the input and the scalar arguments.
        torch_inplace: The same in place; None where PyTorch has none.
        torch_saves: What PyTorch's keeps for backward: its output, or its input, of which its
            in-place form makes a clone.
        ops: The compiled ops.
        aten: The operation that PyTorch's function calls, by its name in torch.ops.aten and its
            first scalars; empty where it is named as the function.
        variant: Arguments of the function and the module, by name, that make it this activation.
        scalars: The names of its scalar arguments, attributes of the module too.
        allows_output: Whether, with these scalars, the output tells what backward needs.
        takes_integers: Whether PyTorch's function does; integers are left to it.
        arithmetic_error: How far the derivative may be off that is computed in float32, here and
            by PyTorch.
        output_errors: The largest absolute error of the derivative with save="output", by dtype and
            bits; 0 where the input comes back exactly.
        save_modes: What may be kept for backward, the default first; that packs bits. Any activation may
            also keep nothing, with "recompute".
    """

    function: str
    torch_module: type[nn.Module]
    torch_function: Callable[..., Tensor]
    torch_inplace: Callable[..., Tensor] | None
    torch_saves: Literal["input", "output"]
    ops: _ops.Ops
    aten: tuple[object, ...] = ()
    variant: Mapping[str, str] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()
    allows_output: Callable[..., bool] = lambda: True
    takes_integers: bool = False
    arithmetic_error: float = 1e-6
    output_errors: Errors = field(default_factory=dict)
    save_modes: tuple[Save, ...] = field(init=False)  # no property, as each call asks for it

    def __post_init__(self) -> None:
        """Take from the ops what may be kept."""
        object.__setattr__(self, "save_modes", tuple(self.ops.default_bits))

    @property
    def name(self) -> str:
        """The name of the module, ours and PyTorch's."""
        return self.torch_module.__name__

    @property
    def is_piecewise_linear(self) -> bool:
        """Whether one bit tells the derivative: values and gradients are PyTorch's, to the bit."""
        return "mask" in self.save_modes

    def default_bits(self, save: Save, dtype: torch.dtype) -> int:
        """The packed bits per element that `save` keeps unless it is told.

        For a dtype without kernels any number: the op, or its fake, refuses it.
        """
        return 0 if save == "recompute" else self.ops.default_bits[save].get(dtype, 8)

    def is_exact(self, save: Save, dtype: torch.dtype, bits: int) -> bool:
        """Whether backward has the derivative of the very input."""
        if save == "output":
            return self.is_piecewise_linear or self.output_errors.get(dtype, {}).get(bits) == 0
        return save in ("mask", "recompute")

    def derivative_error(self, save: Save, dtype: torch.dtype, bits: int) -> float | None:
        """The largest absolute error of the derivative.

        None: the gradient, of an incoming one of at most 1, passes torch.testing's default
        tolerances against PyTorch's.
        """
        if save == "derivative":
            arithmetic = 0.0 if dtype == torch.float64 else self.arithmetic_error
            return 0.5 / self.ops.derivative_steps[bits] + arithmetic
        if save == "output" and bits < self.default_bits(save, dtype):
            return self.output_errors[dtype][bits]
        return None


RELU = Activation(
    "relu_", nn.ReLU, F.relu, F.relu_, "output", _ops.ALL["relu"], takes_integers=True
)
LEAKY_RELU = Activation(
    "leaky_relu_",
    nn.LeakyReLU,
    F.leaky_relu,
    F.leaky_relu_,
    "output",
    _ops.ALL["leaky_relu"],
    scalars=("negative_slope",),
    allows_output=lambda negative_slope: negative_slope >= 0,
)
RELU6 = Activation(
    "relu6_",
    nn.ReLU6,
    F.relu6,
    lambda x: F.relu6(x, inplace=True),
    "input",
    _ops.ALL["relu6"],
    aten=("hardtanh", 0, 6),
    takes_integers=True,
)
SILU = Activation(
    "silu_",
    nn.SiLU,
    F.silu,
    lambda x: F.silu(x, inplace=True),
    "input",
    _ops.ALL["silu"],
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 4.5e-5, 6: 3.5e-6, 8: 1.9e-6},
        torch.float16: {1: 3.91e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.22e-2, 5: 0, 8: 0},
    },
)

GELU = Activation(
    "gelu_",
    nn.GELU,
    F.gelu,
    None,
    "input",
    _ops.ALL["gelu"],
    variant={"approximate": "none"},
    arithmetic_error=2e-6,
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 4.3e-5, 6: 3.8e-6, 8: 2.2e-6},
        torch.float16: {1: 6.1e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.1e-2, 5: 0, 8: 0},
    },
)
GELU_TANH = Activation(
    "gelu_",
    nn.GELU,
    partial(F.gelu, approximate="tanh"),
    None,
    "input",
    _ops.ALL["gelu_tanh"],
    variant={"approximate": "tanh"},
    arithmetic_error=2e-6,  # its formula cancels on the left
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 4.4e-5, 6: 3.8e-6, 8: 2.2e-6},
        torch.float16: {1: 3.7e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.1e-2, 5: 0, 8: 0},
    },
)
HARDSWISH = Activation(
    "hardswish_",
    nn.Hardswish,
    F.hardswish,
    lambda x: F.hardswish(x, inplace=True),
    "input",
    _ops.ALL["hardswish"],
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 6.6e-5, 6: 5.2e-6, 8: 1.6e-6},
        torch.float16: {1: 4.7e-3, 6: 0, 8: 0},
        torch.bfloat16: {1: 1.3e-2, 5: 0, 8: 0},
    },
)
MISH = Activation(
    "mish_",
    nn.Mish,
    F.mish,
    lambda x: F.mish(x, inplace=True),
    "input",
    _ops.ALL["mish"],
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 6.5e-5, 6: 4.5e-6, 8: 2.4e-6},
        torch.float16: {1: 4.5e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.27e-2, 5: 0, 8: 0},
    },
)

ACTIVATIONS = (RELU, LEAKY_RELU, RELU6, SILU, GELU, GELU_TANH, HARDSWISH, MISH)


def check_save(activation: Activation, save: str) -> None:
    """Raise ValueError unless the activation may keep `save`."""
    if save not in activation.save_modes and save != "recompute":
        expected = ", ".join(f'"{choice}"' for choice in activation.save_modes) + ' or "recompute"'
        raise ValueError(f"{activation.function}: save must be {expected}, got {save!r}")


def check_bits(name: str, save: str, bits: int | None) -> None:
    """Raise ValueError unless `save`, of an activation without a mask, takes so many bits."""
    if bits is None:
        return
    if save == "recompute":
        raise ValueError(f'{name}: save="recompute" keeps no bits, got bits={bits!r}')
    choices, expected = ((1, 8), "1, 8") if save == "output" else ((8, 16, 32), "8, 16, 32")
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in choices:
        raise ValueError(
            f'{name}: bits must be {expected} or None with save="{save}", got {bits!r}'
        )
