"""The table of activations, which the package, the tests and the benchmarks read.

`csrc/activations.h` has the table of their kernels, and determines the default numbers of bits.
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

MaskSave = Literal["mask", "output"]  # one bit determines the derivative
OutputSave = Literal["output", "derivative"]  # all others

Errors = Mapping[torch.dtype, Mapping[int, float]]


@dataclass(frozen=True, eq=False)
class Activation:
    """An activation: its functions, ops, arguments, save modes and errors.

    Attributes:
        function: The name of this package's function.
        torch_module: PyTorch's module. This package's module has the same name.
        torch_function: PyTorch's out-of-place function of the input and the scalar arguments.
        torch_inplace: PyTorch's in-place function; None if there is none.
        torch_backward: PyTorch's backward as a function of the incoming gradient, the output and
            the scalar arguments, if PyTorch's in-place function saves its output. None if it saves
            a clone of its input, and if there is none.
        ops: The compiled ops.
        aten: The name in torch.ops.aten of the operation that PyTorch's function calls, and its
            first scalar arguments; empty if the operation has the function's name.
        variant: The keyword arguments of the function and the module that select this activation.
        constants: The attributes of PyTorch's module that must have these values, because its
            forward reads them and the ops do not.
        scalars: The names of the scalar arguments, which are attributes of the module too.
        allows_output: Whether backward can be computed from the output, given the scalars.
        takes_integers: Whether PyTorch's function supports integers; it is then called for them.
        arithmetic_error: The largest absolute error of a derivative that is computed in float32,
            here and in PyTorch.
        output_errors: The largest absolute error of the derivative with save="output", by dtype and
            bits; 0 if the input is recovered exactly.
        save_modes: The save modes. The first one is the default, and packs bits.
    """

    function: str
    torch_module: type[nn.Module]
    torch_function: Callable[..., Tensor]
    torch_inplace: Callable[..., Tensor] | None
    ops: _ops.Ops
    torch_backward: Callable[..., Tensor] | None = None
    aten: tuple[object, ...] = ()
    variant: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    scalars: tuple[str, ...] = ()
    allows_output: Callable[..., bool] = lambda: True
    takes_integers: bool = False
    arithmetic_error: float = 1e-6
    output_errors: Errors = field(default_factory=dict)
    # Read by every call: not properties.
    save_modes: tuple[Save, ...] = field(init=False)
    name: str = field(init=False)
    is_piecewise_linear: bool = field(init=False)

    def __post_init__(self) -> None:
        """Set the attributes that follow from the others."""
        modes = tuple(self.ops.default_bits)
        for attribute, value in (
            ("save_modes", modes),
            ("name", self.torch_module.__name__),
            ("is_piecewise_linear", "mask" in modes),
        ):
            object.__setattr__(self, attribute, value)

    @property
    def torch_name(self) -> str:
        """The name in torch.nn.functional of the function that PyTorch's module calls."""
        return str(self.aten[0]) if self.aten else self.function.removesuffix("_")

    @property
    def torch_saves_output(self) -> bool:
        """Whether PyTorch's in-place function saves its output, and not a clone of its input."""
        return self.torch_backward is not None

    def default_bits(self, save: Save, dtype: torch.dtype) -> int:
        """Return the default number of packed bits per element that a save mode saves.

        For a dtype without kernels the number has no meaning: the op, or its fake, rejects the
        dtype.
        """
        return self.ops.default_bits[save].get(dtype, 8)

    def derivative_error(self, save: Save, dtype: torch.dtype, bits: int) -> float | None:
        """Return the largest absolute error of the derivative, or None.

        None means that the gradient passes torch.testing's default tolerances against PyTorch's,
        if the incoming gradient is at most 1.
        """
        if save == "derivative":
            arithmetic = 0.0 if dtype == torch.float64 else self.arithmetic_error
            return 0.5 / self.ops.derivative_steps[bits] + arithmetic
        if save == "output" and bits < self.default_bits(save, dtype):
            return self.output_errors[dtype][bits]
        return None


RELU = Activation(
    function="relu_",
    torch_module=nn.ReLU,
    torch_function=F.relu,
    torch_inplace=F.relu_,
    ops=_ops.ALL["relu"],
    torch_backward=lambda grad, output: torch.ops.aten.threshold_backward(grad, output, 0),
    takes_integers=True,
)
LEAKY_RELU = Activation(
    function="leaky_relu_",
    torch_module=nn.LeakyReLU,
    torch_function=F.leaky_relu,
    torch_inplace=F.leaky_relu_,
    ops=_ops.ALL["leaky_relu"],
    torch_backward=lambda grad, output, slope: torch.ops.aten.leaky_relu_backward(
        grad, output, slope, True
    ),
    scalars=("negative_slope",),
    allows_output=lambda negative_slope: negative_slope >= 0,
)
RELU6 = Activation(
    function="relu6_",
    torch_module=nn.ReLU6,
    torch_function=F.relu6,
    torch_inplace=lambda x: F.relu6(x, inplace=True),
    ops=_ops.ALL["relu6"],
    aten=("hardtanh", 0, 6),
    constants={"min_val": 0.0, "max_val": 6.0},
    takes_integers=True,
)
SILU = Activation(
    function="silu_",
    torch_module=nn.SiLU,
    torch_function=F.silu,
    torch_inplace=lambda x: F.silu(x, inplace=True),
    ops=_ops.ALL["silu"],
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 4.5e-5, 6: 3.5e-6, 8: 1.9e-6},
        torch.float16: {1: 3.91e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.22e-2, 5: 0, 8: 0},
    },
)

GELU = Activation(
    function="gelu_",
    torch_module=nn.GELU,
    torch_function=F.gelu,
    torch_inplace=None,
    ops=_ops.ALL["gelu"],
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
    function="gelu_",
    torch_module=nn.GELU,
    torch_function=partial(F.gelu, approximate="tanh"),
    torch_inplace=None,
    ops=_ops.ALL["gelu_tanh"],
    variant={"approximate": "tanh"},
    arithmetic_error=2e-6,  # the formula suffers from cancellation for negative inputs
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 4.4e-5, 6: 3.8e-6, 8: 2.2e-6},
        torch.float16: {1: 3.7e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.1e-2, 5: 0, 8: 0},
    },
)
HARDSWISH = Activation(
    function="hardswish_",
    torch_module=nn.Hardswish,
    torch_function=F.hardswish,
    torch_inplace=lambda x: F.hardswish(x, inplace=True),
    ops=_ops.ALL["hardswish"],
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 6.6e-5, 6: 5.2e-6, 8: 1.6e-6},
        torch.float16: {1: 4.7e-3, 6: 0, 8: 0},
        torch.bfloat16: {1: 1.3e-2, 5: 0, 8: 0},
    },
)
MISH = Activation(
    function="mish_",
    torch_module=nn.Mish,
    torch_function=F.mish,
    torch_inplace=lambda x: F.mish(x, inplace=True),
    ops=_ops.ALL["mish"],
    output_errors={
        torch.float64: {1: 5e-9, 8: 8e-11},
        torch.float32: {1: 6.5e-5, 6: 4.5e-6, 8: 2.4e-6},
        torch.float16: {1: 4.5e-3, 7: 0, 8: 0},
        torch.bfloat16: {1: 1.27e-2, 5: 0, 8: 0},
    },
)

ACTIVATIONS = (RELU, LEAKY_RELU, RELU6, SILU, GELU, GELU_TANH, HARDSWISH, MISH)


def check_save(activation: Activation, save: str) -> None:
    """Raise ValueError unless `save` is a save mode of the activation.

    Raises:
        TypeError: If `save` is "recompute", which was a save mode once.
    """
    if save not in activation.save_modes:
        if save == "recompute":
            raise TypeError(
                f'{activation.function}: save="recompute" was removed: inplace_ops.convert(model) '
                f"recomputes torch.nn.{activation.name} after a norm"
            )
        expected = " or ".join(f'"{choice}"' for choice in activation.save_modes)
        raise ValueError(f"{activation.function}: save must be {expected}, got {save!r}")


def check_bits(name: str, save: str, bits: int | None) -> None:
    """Raise ValueError unless a smooth activation supports `bits` with the save mode `save`."""
    if bits is None:
        return
    choices, expected = ((1, 8), "1, 8") if save == "output" else ((8, 16, 32), "8, 16, 32")
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in choices:
        raise ValueError(
            f'{name}: bits must be {expected} or None with save="{save}", got {bits!r}'
        )
