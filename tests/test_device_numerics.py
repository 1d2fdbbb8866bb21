"""Smooth activations as a GPU computes them, with the errors that the PTX ISA allows.

device_numerics.cpp compiles the device's branches of the mathematics for the host, and
emulated_hardware.h gives each of the hardware's functions as its exact value and an error: the
largest that is documented, with every combination of signs, or shares of it by chance, or a
multiple of it. What is checked is what docs/accuracy.md states, against float64.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from comparison import patterns
from selection import exhaustive
from smooth_activations import (
    CPU,
    HALVES,
    SMOOTH_ACTIVATIONS,
    Numerics,
    SmoothActivation,
    all_finite,
    dense,
    id_of,
)
from torch import Tensor

SILU = SMOOTH_ACTIVATIONS[0]
all_smooth = pytest.mark.parametrize(
    "smooth", SMOOTH_ACTIVATIONS, ids=[smooth.name for smooth in SMOOTH_ACTIVATIONS]
)
all_dtypes = pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=id_of)
halves = pytest.mark.parametrize("dtype", HALVES, ids=id_of)


class Errors(NamedTuple):
    """Multiples of the documented errors; with a seed the largest that an argument may have."""

    exp2: float = 0.0
    log2: float = 0.0
    reciprocal: float = 0.0
    sqrt: float = 0.0
    seed: int = 0


SIGNS = list(itertools.product((-1, 1), repeat=4))
# Of the smooth activations but SiLU, unless the slow tests are asked for.
FEW_SIGNS = [(-1, -1, -1, -1), (1, 1, 1, 1), (1, -1, -1, 1), (-1, 1, 1, -1)]


def by_chance(multiple: float, seed: int) -> Iterator[Errors]:
    """Shares between -1 and 1 by chance (an even seed), and -1 or 1 by chance."""
    for own_seed in (2 * seed + 2, 2 * seed + 3):
        yield Errors(*[multiple] * 4, own_seed)


class Device(Numerics):
    """The emulated mathematics of a smooth over tensors."""

    def set(self, errors: Errors) -> None:
        self.module.set_errors(errors[:4], errors.seed)

    def all_signs(self, multiple: float) -> Iterator[Errors]:
        every = self.smooth is SILU or os.environ.get("INPLACE_OPS_LARGE") == "1"
        for signs in SIGNS if every else FEW_SIGNS:
            yield Errors(*(sign * multiple for sign in signs))

    def keep_derivative(self, x: Tensor, bits: int) -> Tensor:
        slope = torch.full(x.shape, torch.nan)
        self.module.keep_derivative(
            self.smooth.name, id_of(x.dtype), x.data_ptr(), bits, slope.data_ptr(), x.numel()
        )
        return slope


# Sums of products rounded twice for SiLU alone: they take longer than all others.
SUMS = [("contracted", smooth) for smooth in SMOOTH_ACTIVATIONS]
SUMS_OF_SILU = [("contracted", SILU), pytest.param(("separate", SILU), marks=exhaustive)]


def id_of_sums(sums: tuple[str, SmoothActivation]) -> str:
    return f"{sums[0]}-{sums[1].name}"


@pytest.fixture(params=[*SUMS, SUMS_OF_SILU[1]], ids=id_of_sums)
def device(
    request: pytest.FixtureRequest, device_numerics: Callable[[str], ModuleType]
) -> Iterator[Device]:
    sums, smooth = request.param
    module = device_numerics(sums)
    yield Device(module, smooth)
    module.set_errors(Errors()[:4], 0)


of_silu = pytest.mark.parametrize("device", SUMS_OF_SILU, ids=id_of_sums, indirect=True)


def largest_error(actual: Tensor, smooth: SmoothActivation, x: Tensor) -> float:
    error = (actual.double() - smooth.derivative(x.double())).abs().max().item()
    assert error == error
    return error


def rounding(smooth: SmoothActivation, dtype: torch.dtype) -> float:
    """The largest that rounding the derivative to the dtype makes."""
    slope = smooth.derivative(all_finite(dtype, CPU).double())
    return (slope.to(dtype).double() - slope).abs().max().item()


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether it passes torch.testing's default tolerances."""
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError:
        return False
    return True


def recovered_inputs(smooth: SmoothActivation, dtype: torch.dtype) -> Tensor:
    """Those that come back, and, for what is large, stand for themselves."""
    x = all_finite(dtype, CPU)
    return x[(x > smooth.recovered_above[dtype]) & (x < 20)]


def values_are_right(device: Device, x: Tensor) -> bool:
    return is_close(device.forward(x), device.smooth.exact(x.double()).to(x.dtype))


def inputs_are_recovered(device: Device, x: Tensor) -> bool:
    x = recovered_inputs(device.smooth, x.dtype)
    return torch.equal(device.recover(x, device.smooth.default_bits(x.dtype))[0], x.float())


def gradients_are_right(device: Device, x: Tensor) -> bool:
    slope = device.recover(x, device.smooth.default_bits(x.dtype))[1]
    return is_close(slope.to(x.dtype), device.smooth.derivative(x.double()).to(x.dtype))


def one_bit_is_in_the_table(device: Device, x: Tensor) -> bool:
    slope = device.recover(x, 1)[1]
    return largest_error(slope, device.smooth, x) <= device.smooth.error(x.dtype, 1)


def default_is_in_the_table(device: Device, x: Tensor) -> bool:
    bits = device.smooth.default_bits(x.dtype)
    return device.error(x, bits) <= device.smooth.error(x.dtype, bits)


def around_the_minimum(smooth: SmoothActivation, step: int = 1) -> Tensor:
    """Every float32 between 1.4 and 0.75 of the minimum, or each `step`th."""
    first, last = (
        torch.tensor([x], dtype=torch.float32).view(torch.int32).item()
        for x in (0.75 * smooth.minimum, 1.4 * smooth.minimum)
    )
    return torch.arange(first, last, step, dtype=torch.int32).view(torch.float32)


def inputs(smooth: SmoothActivation, dtype: torch.dtype) -> Tensor:
    """All values of 16 bits; float32 sampled, more densely around the minimum."""
    if dtype in HALVES:
        x = all_finite(dtype, CPU)
    else:
        x = torch.cat([around_the_minimum(smooth, 191), dense(dtype, CPU, smooth.minimum)[::23]])
    # Hardswish is inf above the largest value over 6, as PyTorch's.
    return x[x < torch.finfo(dtype).max / 7]


# What docs/accuracy.md states, and how many times the documented errors it survives at least: SiLU,
# and every smooth.
GUARANTEES: list[tuple[Callable[[Device, Tensor], bool], torch.dtype, int, int]] = [
    (values_are_right, torch.float32, 64, 1),
    (values_are_right, torch.float16, 512, 64),
    (values_are_right, torch.bfloat16, 512, 64),
    (inputs_are_recovered, torch.float16, 32, 8),
    (inputs_are_recovered, torch.bfloat16, 512, 64),
    (gradients_are_right, torch.float32, 8, 1),
    (gradients_are_right, torch.float16, 64, 8),
    (gradients_are_right, torch.bfloat16, 128, 64),
    (default_is_in_the_table, torch.float32, 1, 1),
    (one_bit_is_in_the_table, torch.float32, 4, 1),
    (one_bit_is_in_the_table, torch.float16, 4, 1),
    (one_bit_is_in_the_table, torch.bfloat16, 4, 1),
]


@pytest.mark.parametrize(
    ("holds", "dtype", "of_silu", "of_any"),
    GUARANTEES,
    ids=[f"{holds.__name__}-{id_of(dtype)}" for holds, dtype, *_ in GUARANTEES],
)
def test_multiples_that_are_survived(
    device: Device,
    holds: Callable[[Device, Tensor], bool],
    dtype: torch.dtype,
    of_silu: int,
    of_any: int,
    seed: int,
) -> None:
    stated = of_silu if device.smooth is SILU else of_any
    x = inputs(device.smooth, dtype)
    for errors in itertools.chain(device.all_signs(stated), by_chance(stated, seed)):
        device.set(errors)
        assert holds(device, x), errors


@halves
def test_last_bits_of_the_default(device: Device, dtype: torch.dtype) -> None:
    """One unit at most between it and the rounded derivative, and that in few places."""
    x = recovered_inputs(device.smooth, dtype)
    exact = device.smooth.derivative(x.double())
    expected = exact.to(dtype)
    for errors in device.all_signs(1):
        device.set(errors)
        slope = device.recover(x, device.smooth.default_bits(dtype))[1]
        units = (patterns(slope.to(dtype)).int() - patterns(expected).int()).abs()
        # Where the derivative goes through 0.
        units[(slope.double() - exact).abs() <= 2e-6] = 0
        assert units.max() <= 1, errors
        assert int((units > 0).sum()) * 500 < x.numel(), errors
        limit = 1.001 * rounding(device.smooth, dtype)
        assert largest_error(slope.to(dtype), device.smooth, x) <= limit, errors


@all_dtypes
def test_each_branch_keeps_its_side(device: Device, dtype: torch.dtype) -> None:
    """And the second derivative over the first, which double backward forms, is bounded."""
    x = inputs(device.smooth, dtype)
    x = x[(x > {"silu": -20, "mish": -20, "hardswish": -2.999}.get(device.smooth.name, -4))]
    x = x[x < 20]
    left = x.double() < device.smooth.minimum
    for bits in device.smooth.all_bits(dtype)[: None if dtype in HALVES else 1]:
        for errors in device.all_signs(1):
            device.set(errors)
            _, slope, second = device.points(x, bits)
            assert ((slope < 0) == left).all(), errors
            of_float16 = {"gelu_tanh": 6e4, "mish": 2.5e4}.get(device.smooth.name, 7000)
            most = {torch.float16: of_float16, torch.bfloat16: 1000, torch.float32: 3e4}[dtype]
            # At Hardswish's very minimum it is larger, and finite where double backward needs it.
            away = (slope != 0) & (x.double() != device.smooth.minimum)
            assert (second / slope)[away].abs().max() <= most


@halves
def test_one_bit_has_no_bias(device: Device, dtype: torch.dtype) -> None:
    """The errors of inputs from N(0, 1) add up to much less than what rounding makes of each."""
    quantiles = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    x = torch.special.ndtri(quantiles).to(dtype)
    exact = device.smooth.derivative(x.double())
    error = device.recover(x, 1)[1].double() - exact
    typical_rounding = (exact.to(dtype).double() - exact).square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * typical_rounding


@halves
def test_what_is_not_recovered(device: Device, dtype: torch.dtype) -> None:
    """Where the output underflows the gradient is off by little."""
    smooth = device.smooth
    x = all_finite(dtype, CPU)
    x = x[x <= smooth.recovered_above[dtype]]
    for errors in device.all_signs(1):
        device.set(errors)
        slope = device.recover(x, smooth.default_bits(dtype))[1].to(dtype)
        # A subnormal and what is lost to rounding; in bfloat16 all of it.
        of_float16 = 9e-8 if smooth is SILU else 6e-7
        limit = of_float16 if dtype == torch.float16 else 3e-34
        assert largest_error(slope, smooth, x) <= limit, errors


@pytest.mark.parametrize("bits", [1, None])
def test_every_float32_around_the_minimum(device: Device, bits: int | None, seed: int) -> None:
    """Within 1/64 of it, at a few combinations, forward and backward each of their own."""
    smooth = device.smooth
    bits = bits or smooth.default_bits(torch.float32)
    x = around_the_minimum(smooth)
    x = x[(x - smooth.minimum).abs() < 1 / 64]
    exact = smooth.exact(x.double())
    signs = [Errors(-1, -1, -1, -1), Errors(1, 1, 1, 1), Errors(1, -1, -1, 1), Errors(-1, 1, 1, -1)]
    for part, values in zip(x.split(2**15), exact.split(2**15), strict=True):
        for forward, backward in itertools.product(signs[:2], [*signs, *by_chance(1, seed)]):
            device.set(forward)
            y = device.forward(part)
            assert (y.double() - values).abs().max() <= 0.65 * smooth.unit
            device.set(backward)
            assert device.error(part, bits, y) <= smooth.error(torch.float32, bits)


@pytest.mark.parametrize("bits", [1, None, 8])
def test_float32_everywhere(device: Device, bits: int | None, seed: int) -> None:
    bits = bits or device.smooth.default_bits(torch.float32)
    x = inputs(device.smooth, torch.float32)
    for errors in itertools.chain(device.all_signs(1), by_chance(1, seed)):
        device.set(errors)
        assert device.error(x, bits) <= device.smooth.error(torch.float32, bits)


@pytest.mark.parametrize("bits", [1, None])
def test_float32_in_the_far_left(device: Device, bits: int | None) -> None:
    """Relatively, too: float32's unit is 1.2e-7, and y's own last bit moves x by as much."""
    bits = bits or device.smooth.default_bits(torch.float32)
    if device.smooth.name == "hardswish":
        return  # which is 0 there
    x = torch.linspace(-80, -4, 100_001)
    x = x[device.smooth.exact(x.double()) < -4e-36]
    expected = device.smooth.derivative(x.double())
    for errors in device.all_signs(1):
        device.set(errors)
        error = (device.recover(x, bits)[1].double() / expected - 1).abs()
        limit = 1e-4 if device.smooth.name.startswith("gelu") else 4e-6
        assert error.max() <= limit, errors


@all_dtypes
@pytest.mark.parametrize("bits", [8, 16])
def test_derivative_codes(device: Device, dtype: torch.dtype, bits: int, seed: int) -> None:
    smooth = device.smooth
    x = inputs(smooth, dtype)
    limit = smooth.entry.derivative_error("derivative", dtype, bits)
    for errors in itertools.chain(device.all_signs(1), by_chance(1, seed)):
        device.set(errors)
        assert largest_error(device.keep_derivative(x, bits), smooth, x) <= limit, errors


@all_dtypes
def test_not_finite(device: Device, dtype: torch.dtype) -> None:
    """As on the CPU: the value is NaN but at inf, where it is inf; the gradient NaN, of Hardswish 0
    at -inf and 1 at inf."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    slopes = [1, 0, torch.nan] if device.smooth.name == "hardswish" else [torch.nan] * 3
    for errors in device.all_signs(1):
        device.set(errors)
        y = device.forward(x)
        assert y[0] == torch.inf
        assert y[1:].isnan().all()
        # A GPU's own NaN.
        y[1:] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).to(dtype)
        for bits in (0, *device.smooth.all_bits(dtype)):
            slope = device.recover(x, bits, y)[1]
            torch.testing.assert_close(slope, torch.tensor(slopes), equal_nan=True)


@of_silu
@halves
def test_conversions(device: Device, dtype: torch.dtype) -> None:
    pattern = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64)
    x = pattern.to(torch.int32).view(torch.float32)
    values = all_finite(dtype, CPU)
    ties = (values[:-1].float() + values[1:].float()) / 2
    x = torch.cat([x[~x.isnan()], ties[ties.isfinite()], values.float()])
    rounded = [device.module.rounded(id_of(dtype), value) for value in x.tolist()]
    actual = torch.from_numpy(np.array(rounded, dtype=np.uint32).view(np.float32))
    assert torch.equal(actual.view(torch.int32), x.to(dtype).float().view(torch.int32))


DOCUMENTED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    # Its error counts from the rounded value.
    "exp2": (torch.exp2, lambda x, y: 2.5 * unit(y)),
    "log2": (torch.log2, lambda x, y: 2**-22 * torch.where((x > 0.5) & (x < 2), 1, y.abs())),
    "reciprocal": (torch.reciprocal, lambda x, y: unit(y)),
    "sqrt": (torch.sqrt, lambda x, y: 2**-23 * y),
}


def unit(y: Tensor) -> Tensor:
    """The spacing of float32 at y."""
    return torch.exp2(torch.floor(torch.log2(y.abs())) - 23)


@pytest.mark.parametrize("function", DOCUMENTED)
@pytest.mark.parametrize("sign", [-1, 1])
@of_silu
def test_the_emulated_errors(device: Device, function: str, sign: int) -> None:
    """They are as large as documented, and not larger."""
    exact_function, largest = DOCUMENTED[function]
    x = torch.cat([torch.logspace(-30, 30, 5000), torch.linspace(0.3, 3, 5000)])
    x = x.log2().abs() + 0.01 if function == "exp2" else x
    exact = exact_function(x.double())
    device.set(Errors(**{function: sign}))
    emulated = [device.module.approximation(function, value) for value in x.tolist()]
    error = sign * (torch.tensor(emulated, dtype=torch.float64) - exact)
    limit = largest(x.double(), exact)
    assert (error <= limit * (1 + 1e-9)).all()
    assert (error / limit).mean() >= 0.45
