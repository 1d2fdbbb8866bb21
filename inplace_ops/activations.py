"""The activations, one entry each: what functions, modules, conversion, the command line, tests and
benchmarks know of them.

The kernels' list is `csrc/activations.h`, and the numbers of bits come from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _ops

MaskSave = Literal["mask", "output"]  # where one bit tells the derivative
OutputSave = Literal["output", "derivative"]  # elsewhere
Save = Literal["mask", "output", "derivative"]


@dataclass(frozen=True, eq=False)
class Activation:
    """What is known of an activation.

    Attributes:
        name: Of its ops; its function's, in place, has an underscore more.
        torch_module: PyTorch's module.
        torch_function: PyTorch's function, out of place, of the input and the arguments.
        torch_inplace: The same in place; None where PyTorch has none.
        torch_saves: What PyTorch's in-place form keeps for backward: its output, or a clone of the
            input.
        arguments: Its scalar arguments, attributes of the module too.
        takes_integers: Whether PyTorch's function does; integers are left to it.
        output_errors: The largest absolute error of the derivative with save="output", by dtype and
            bits; 0 where the input comes back exactly.
    """

    name: str
    torch_module: type[nn.Module]
    torch_function: Callable[..., Tensor]
    torch_inplace: Callable[..., Tensor] | None
    torch_saves: Literal["input", "output"]
    arguments: tuple[str, ...] = ()
    takes_integers: bool = False
    output_errors: Mapping[torch.dtype, Mapping[int, float]] = field(default_factory=dict)

    @property
    def ops(self) -> _ops.Ops:
        """The compiled ops."""
        return _ops.ALL[self.name]

    @property
    def saves(self) -> tuple[Save, ...]:
        """What may be kept for backward, the default first."""
        return tuple(_ops.DEFAULT_BITS[self.name])

    @property
    def is_exact(self) -> bool:
        """Whether one bit tells the derivative: values and gradients are PyTorch's, to the bit."""
        return "mask" in self.saves

    def default_bits(self, save: Save, dtype: torch.dtype) -> int:
        """The packed bits per element that `save` keeps unless it is told."""
        return _ops.DEFAULT_BITS[self.name][save].get(dtype, 8)

    def derivative_error(self, save: Save, dtype: torch.dtype, bits: int) -> float | None:
        """The largest absolute error of the derivative.

        None: the gradient, at an incoming one of at most 1, passes torch.testing's default
        tolerances against PyTorch's.
        """
        if save == "derivative":
            # Beside half a step of its grid: computed in float32, PyTorch's derivative too is
            # within 1e-6.
            arithmetic = 0.0 if dtype == torch.float64 else 1e-6
            return 0.5 / _ops.DERIVATIVE_STEPS[self.name][bits] + arithmetic
        if save == "output" and bits < self.default_bits(save, dtype):
            return self.output_errors[dtype][bits]
        return None


RELU = Activation("relu", nn.ReLU, F.relu, F.relu_, "output", takes_integers=True)
LEAKY_RELU = Activation(
    "leaky_relu", nn.LeakyReLU, F.leaky_relu, F.leaky_relu_, "output", ("negative_slope",)
)
RELU6 = Activation(
    "relu6",
    nn.ReLU6,
    F.relu6,
    lambda x: F.relu6(x, inplace=True),
    "output",
    takes_integers=True,
)
SILU = Activation(
    "silu",
    nn.SiLU,
    F.silu,
    lambda x: F.silu(x, inplace=True),
    "input",
    output_errors={
        torch.float64: {1: 5e-9, 8: 6e-11},
        torch.float32: {1: 4.5e-5, 6: 3.5e-6, 8: 1.9e-6},
        torch.float16: {1: 3.9e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.2e-2, 5: 0, 8: 0},
    },
)

ACTIVATIONS = (RELU, LEAKY_RELU, RELU6, SILU)


def check_save(activation: Activation, save: str) -> None:
    """Raise ValueError unless `save` is one of the activation's."""
    if save not in activation.saves:
        expected = " or ".join(f'"{choice}"' for choice in activation.saves)
        raise ValueError(f"{activation.name}_: save must be {expected}, got {save!r}")


def check_bits(activation: Activation, save: str, bits: int | None) -> None:
    """Raise ValueError unless `save` may keep so many bits per element."""
    check_save(activation, save)
    if bits is None:
        return
    choices, expected = (
        ((1, 8), '1 or 8, or None for the default, with save="output"')
        if save == "output"
        else ((8, 16, 32), '8, 16 or 32, or None for the default, with save="derivative"')
    )
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in choices:
        raise ValueError(f"{activation.name}_: bits must be {expected}, got {bits!r}")
