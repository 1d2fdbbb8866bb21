"""The configurations under test: a row for each activation, save mode, `bits` and slope."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inplace_ops
from inplace_ops import activations as table

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SLOPES = (-1.5, -0.01, 0.0, 0.01, 1.0, 2.0)
GRAD_MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
SCALARS = {"negative_slope": 0.2}  # a value of each scalar argument, for tests of the private ops


@dataclass(frozen=True)
class ActivationCase:
    entry: table.Activation
    save: table.Save
    bits: int | None = None
    scalars: tuple[float, ...] = ()
    is_rounded: bool = False  # whether a test's other operations round their results

    @property
    def name(self) -> str:
        bits = [] if self.entry.is_piecewise_linear else [self.bits or "default"]
        parts = [self.function, *self.entry.variant.values(), *self.scalars, self.save, *bits]
        return "-".join(map(str, parts))

    @property
    def function(self) -> str:
        """The name of the function, without its underscore."""
        return self.entry.function.removesuffix("_")

    @property
    def arguments(self) -> dict[str, Any]:
        bits = {} if self.entry.is_piecewise_linear else {"bits": self.bits}
        scalars = dict(zip(self.entry.scalars, self.scalars, strict=True))
        return {**self.entry.variant, **scalars, "save": self.save, **bits}

    @property
    def call(self) -> Callable[[Tensor], Tensor]:
        return partial(getattr(inplace_ops, self.entry.function), **self.arguments)

    @property
    def module(self) -> Callable[..., nn.Module]:  # takes inplace=
        return partial(getattr(inplace_ops, self.entry.name), **self.arguments)

    @property
    def reference(self) -> Callable[[Tensor], Tensor]:
        """PyTorch's function, out of place."""
        scalars = dict(zip(self.entry.scalars, self.scalars, strict=True))
        return partial(self.entry.torch_function, **scalars)

    @property
    def copied(self) -> Callable[[Tensor], Tensor]:
        """PyTorch's function of a clone, copied to the input, whatever PyTorch saves."""
        return lambda x: x.copy_(self.reference(x.clone()))

    @property
    def torch_inplace(self) -> Callable[[Tensor], Tensor]:
        """PyTorch's in-place function, or a function that copies the result to the input."""
        scalars = dict(zip(self.entry.scalars, self.scalars, strict=True))
        if self.entry.torch_inplace is None:
            return self.copied
        return partial(self.entry.torch_inplace, **scalars)

    @property
    def saves_output(self) -> bool:
        return self.save == "output"

    @property
    def allows_later_writes(self) -> bool:
        return not self.saves_output

    @property
    def packed_bits(self) -> Mapping[torch.dtype, int]:
        """The number of packed bits per element that are saved for backward, by dtype."""
        return {d: self.bits or self.entry.default_bits(self.save, d) for d in FLOATS}

    @property
    def is_exact(self) -> bool:
        """Whether values and gradients equal PyTorch's bit for bit."""
        return self.entry.is_piecewise_linear and not self.is_rounded

    @property
    def nan_gradient(self) -> float | None:
        """The gradient at NaN, or None if it equals PyTorch's.

        PyTorch's gradients of ReLU6 and Hardswish at NaN vary: see test_gradient_at_nan.
        """
        return {"relu6": 1.0, "hardswish": math.nan}.get(self.function)

    def own_edges(self, dtype: torch.dtype) -> Mapping[float, tuple[float, float]]:
        """Our value and gradient at each input where PyTorch's formulas of GELU overflow."""
        if self.function != "gelu":
            return {}
        largest = torch.finfo(dtype).max
        return {math.inf: (math.inf, math.nan), largest: (largest, 1.0), -largest: (-0.0, 0.0)}

    @property
    def is_twice_differentiable(self) -> bool:
        return self.save != "derivative"

    @property
    def derivative_error(self) -> Mapping[torch.dtype, float]:
        """The largest absolute error of the derivative, by dtype.

        A dtype is missing if the gradient, at an incoming gradient of at most 1, passes
        torch.testing's default tolerances.
        """
        errors = {d: self.entry.derivative_error(self.save, d, self.packed_bits[d]) for d in FLOATS}
        return {dtype: error for dtype, error in errors.items() if error is not None}


def leaky_relu(slope: float, save: table.MaskSave) -> ActivationCase:
    return ActivationCase(table.LEAKY_RELU, save, scalars=(slope,))


def _rows(entry: table.Activation) -> list[ActivationCase]:
    if entry is table.LEAKY_RELU:
        rows = [leaky_relu(slope, "mask") for slope in SLOPES]
        return rows + [leaky_relu(slope, "output") for slope in SLOPES if slope >= 0]
    if entry.is_piecewise_linear:
        return [ActivationCase(entry, save) for save in entry.save_modes]
    # Only SiLU has rows for further bits: test_smooth_activations.py tests the others' accuracy.
    output, derivative = (None, 1), (None,)
    if entry is table.SILU:
        output, derivative = (None, 1, 8), (None, 8, 16, 32)
    rows = [ActivationCase(entry, "output", bits) for bits in output]
    return rows + [ActivationCase(entry, "derivative", bits) for bits in derivative]


ACTIVATIONS = tuple(row for entry in table.ACTIVATIONS for row in _rows(entry))

# Rows that cover the save modes, for tests of what all activations have in common.
SAVE_MODES = tuple(
    row
    for row in ACTIVATIONS
    if row.name
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

# The rows of SAVE_MODES, and one for each other activation: for tests that are not about accuracy.
ONE_OF_EACH = SAVE_MODES + tuple(
    row
    for row in ACTIVATIONS
    if row.save == row.entry.save_modes[0]
    and row.bits is None
    and row.entry not in {other.entry for other in SAVE_MODES}
)


# A row for each kind of autograd Function and for what it saves: bits, its output, both, or the
# derivative. For tests that depend on no activation's formula and no scalar argument.
ONE_OF_EACH_FUNCTION = tuple(
    row
    for row in SAVE_MODES
    if row.name in ("relu-mask", "relu-output", "silu-output-default", "silu-derivative-default")
)

# A row for each function of the input and the scalars, for tests in which nothing is saved.
ONE_OF_EACH_FORWARD = tuple({(row.entry, row.scalars): row for row in ACTIVATIONS}.values())


def activation_id(activation: ActivationCase) -> str:
    return activation.name


def call_id(function: Callable[..., object], arguments: Mapping[str, object]) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{function.__name__}({given})"


all_activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=activation_id)
one_of_each = pytest.mark.parametrize("activation", ONE_OF_EACH, ids=activation_id)
all_floats = pytest.mark.parametrize("dtype", FLOATS)
