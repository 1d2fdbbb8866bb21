"""Test that every activation is in all lists, with the same defaults everywhere."""

from __future__ import annotations

import inspect

import pytest
import torch
from _support.cases import FLOATS
from _support.smooth_references import SMOOTH_ACTIVATIONS

import inplace_ops
from inplace_ops import _ops
from inplace_ops.activations import (
    ACTIVATIONS,
    GELU,
    GELU_TANH,
    HARDSWISH,
    MISH,
    SILU,
    Activation,
    Save,
)
from inplace_ops.autograd import FUNCTIONS

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.ops.name)


def test_every_activation_of_the_kernels_is_in_all_lists() -> None:
    assert [activation.ops for activation in ACTIVATIONS] == list(_ops.ALL.values())
    assert set(FUNCTIONS) == {(a, save) for a in ACTIVATIONS for save in a.save_modes}
    assert {smooth.entry for smooth in SMOOTH_ACTIVATIONS} == {
        a for a in ACTIVATIONS if not a.is_piecewise_linear
    }


@each_activation
def test_functions_and_modules_have_the_same_defaults(activation: Activation) -> None:
    module = getattr(inplace_ops, activation.name)
    for target in (getattr(inplace_ops, activation.function), module):
        parameters = inspect.signature(target).parameters
        assert parameters["save"].default == activation.save_modes[0]
        assert ("bits" in parameters) == (not activation.is_piecewise_linear)
    assert issubclass(module, activation.torch_module)


@each_activation
def test_default_save_mode_packs_bits(activation: Activation) -> None:
    save: Save = activation.save_modes[0]
    assert save in activation.ops.save_in_place
    assert all(activation.default_bits(save, dtype) for dtype in FLOATS)


@pytest.mark.parametrize(
    ("activation", "errors", "documented"),
    [
        (SILU, ("2.4e-03", "9.2e-06", "1.4e-10"), (2.4e-3, 1e-5, 1.4e-10)),
        (MISH, ("2.4e-03", "9.2e-06", "1.4e-10"), (2.4e-3, 1e-5, 1.4e-10)),
        (GELU, ("2.5e-03", "9.6e-06", "1.5e-10"), (2.5e-3, 1e-5, 1.5e-10)),
        (GELU_TANH, ("2.5e-03", "9.6e-06", "1.5e-10"), (2.5e-3, 1e-5, 1.5e-10)),
        (HARDSWISH, ("4.0e-03", "1.5e-05", "2.3e-10"), (4e-3, 1.6e-5, 2.4e-10)),
    ],
    ids=lambda value: value.ops.name if isinstance(value, Activation) else "",
)
def test_derivative_grid_errors_match_documentation(
    activation: Activation, errors: tuple[str, ...], documented: tuple[float, ...]
) -> None:
    """Check the grids of 8, 16 and 32 bits, without errors of the arithmetic."""
    for bits, expected, limit in zip((8, 16, 32), errors, documented, strict=True):
        error = activation.derivative_error("derivative", torch.float64, bits)
        assert f"{error:.1e}" == expected
        assert 0.9 * limit <= error <= limit


def written(number: float) -> str:
    """Return a number as the documentation writes it: 3.5e-6."""
    return f"{number:g}".replace("e-0", "e-")


@pytest.mark.parametrize(
    "activation", [SILU, GELU, GELU_TANH, HARDSWISH, MISH], ids=lambda a: a.ops.name
)
def test_documented_bits_and_errors_are_those_of_the_table(activation: Activation) -> None:
    own = " ".join(str(getattr(inplace_ops, activation.function).__doc__).split())
    general = " ".join(str(inplace_ops.silu_.__doc__).split())
    bits = {dtype: activation.default_bits("output", dtype) for dtype in FLOATS}
    if activation is HARDSWISH:
        assert f'None with "output" is {bits[torch.float16]} in float16' in own
        bits[torch.float16] = SILU.default_bits("output", torch.float16)
    f64, f32, f16, b16 = bits.values()
    assert f"{f64} in float64, {f32} in float32, {f16} in float16 and {b16} in bfloat16" in general
    f64, f32, f16, b16 = (activation.default_bits("derivative", dtype) for dtype in FLOATS)
    assert f16 == b16
    assert f"{f16} in float16 and bfloat16, {f32} in float32 and {f64} in float64" in general
    error = activation.output_errors[torch.float32][bits[torch.float32]]
    assert f"{written(error)} in float32" in own
