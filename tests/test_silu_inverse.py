"""SiLU's gradient from its output and a few bits, over all of float16 and bfloat16, and densely."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activations import (
    DERIVATIVE_DEFAULT_BITS,
    DERIVATIVE_ERROR,
    FLOATS,
    SILU_DEFAULT_BITS,
    SILU_ERROR,
)
from comparison import assert_identical, gradient, patterns
from torch import Tensor

from inplace_ops import _ops, silu_

MINIMUM = -1.2784645427610738
HALVES = (torch.float16, torch.bfloat16)
all_bits = pytest.mark.parametrize("bits", range(1, 9))


def id_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def all_finite(dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()].to(device)


def derivative(x: Tensor) -> Tensor:
    """silu' in float64."""
    x = x.double()
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def near(center: float, widest: float, dtype: torch.dtype) -> Tensor:
    """Values on both sides of center, at distances from `widest` down to one spacing."""
    distances = torch.logspace(math.log10(widest), -17, 20_000, dtype=torch.float64)
    return (center + torch.cat([distances, -distances])).to(dtype)


def dense(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every region of the inverse: the minimum, 0, both tails, subnormals."""
    finfo = torch.finfo(dtype)
    sizes = torch.logspace(
        math.log10(finfo.smallest_normal),
        math.log10(finfo.max) * 0.999,
        20_000,
        dtype=torch.float64,
    )
    subnormals = torch.arange(1, 1000, dtype=torch.float64) * (finfo.smallest_normal / 1000)
    magnitudes = torch.cat([sizes, subnormals]).to(dtype)
    lines = [torch.linspace(-end, end, 200_001, dtype=torch.float64) for end in (2, 25, 120, 800)]
    values = [near(MINIMUM, 1, dtype), near(0, 1, dtype), magnitudes, -magnitudes]
    return torch.cat([*values, *(line.to(dtype) for line in lines)]).to(device)


def largest_error(x: Tensor, **arguments: object) -> float:
    return (gradient(partial(silu_, **arguments), x).double() - derivative(x)).abs().max().item()


def pytorchs_error(x: Tensor) -> float:
    """PyTorch's own: of rounding to the dtype, and in float32 1e-6 of its formula at x = 16."""
    return (gradient(F.silu, x).double() - derivative(x)).abs().max().item()


@all_bits
@pytest.mark.parametrize("dtype", HALVES, ids=id_of)
def test_every_16_bit_value(dtype: torch.dtype, bits: int, device: torch.device) -> None:
    x = all_finite(dtype, device)
    limit = SILU_ERROR[dtype][bits - 1] or pytorchs_error(x)
    assert largest_error(x, bits=bits) <= limit


@pytest.mark.parametrize("dtype", HALVES, ids=id_of)
def test_default_bits_give_pytorchs_gradient(dtype: torch.dtype, device: torch.device) -> None:
    x = all_finite(dtype, device)
    for scale in (1, 4):
        if scale > 1:
            # Below, float16's output is its smallest value or two, and some inputs are lost.
            x = x[x > -20.125]
        incoming = scale * (torch.ones_like(x) if scale == 1 else 2 * torch.rand_like(x) - 1)
        actual = gradient(silu_, x, incoming)
        expected = gradient(F.silu, x, incoming)
        ulps = (patterns(actual).int() - patterns(expected).int()).abs()
        zeros = (actual == 0) & (expected == 0)
        assert ulps[~zeros].max() <= 1
        assert int((ulps > 0).sum()) * 500 < x.numel()
        torch.testing.assert_close(actual, expected)


def recovered(x: Tensor, bits: int) -> Tensor:
    """silu'' / silu' at the x that backward recovers, through the op."""
    y = x.clone()
    packed = _ops.empty_bits(y, bits)
    _ops.silu_with_bits_(y, packed, [])
    ones = torch.ones_like(y)
    return _ops.silu_double_backward(ones, ones, y, packed, [])


@pytest.mark.parametrize("dtype", HALVES, ids=id_of)
def test_default_bits_recover_the_input(dtype: torch.dtype, device: torch.device) -> None:
    # The ratio tells an x from its neighbours everywhere but far to the right, and best next to the
    # minimum, where the float32 arithmetic leaves silu' an absolute error of 2e-7.
    x = all_finite(dtype, device)
    # Below, so many inputs share a subnormal output that the bits do not tell them apart, or all 0.
    x = x[x > (-20.125 if dtype == torch.float16 else -89)]
    exact = x.double()
    s = torch.sigmoid(exact)
    first = s * (1 + exact * (1 - s))
    ratio = s * (1 - s) * (2 + exact * (1 - 2 * s)) / first
    actual = recovered(x, SILU_DEFAULT_BITS[dtype]).double()
    error = (actual - ratio).abs()
    relative = torch.where(exact < -2, 1e-5, 2e-7 / first.abs().clamp(max=1))
    limit = (torch.finfo(dtype).eps / 2 + relative) * ratio.abs() + 1e-6
    assert (error <= limit).all()


@all_bits
def test_float32_around_the_minimum(bits: int, device: torch.device) -> None:
    exhaustive = bits in (1, 6, 8)
    pattern = torch.arange(2**23, dtype=torch.int32)[:: 1 if exhaustive else 7] + 0x3F800000
    x = -pattern.view(torch.float32).to(device)
    assert x.max() == -1
    assert x.min() > -2.000001
    assert largest_error(x, bits=bits) <= SILU_ERROR[torch.float32][bits - 1]


@all_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=id_of)
def test_dense_samples(dtype: torch.dtype, bits: int, device: torch.device) -> None:
    x = dense(dtype, device)
    assert largest_error(x, bits=bits) <= SILU_ERROR[dtype][bits - 1]
    if bits >= SILU_DEFAULT_BITS[dtype]:
        torch.testing.assert_close(gradient(partial(silu_, bits=bits), x), gradient(F.silu, x))


def test_default_bits_of_float32_near_the_minimum(device: torch.device) -> None:
    x = torch.cat([near(MINIMUM, 1e-2, torch.float32), near(MINIMUM, 1, torch.float32)]).to(device)
    torch.testing.assert_close(gradient(silu_, x), gradient(F.silu, x))


@pytest.mark.parametrize("dtype", FLOATS, ids=id_of)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_against_lambert_w(dtype: torch.dtype, left: bool, device: torch.device) -> None:
    # x = y + W(y exp(-y)), from the outputs, without a look at the input.
    special = pytest.importorskip("scipy.special")
    x = (torch.linspace(-9, -1.5, 500) if left else torch.linspace(-1, 8, 500)).to(dtype).to(device)
    y = silu_(x.clone()).cpu()
    exact = y.double().numpy()
    inverse = exact + special.lambertw(exact * np.exp(-exact), -1 if left else 0).real
    inverse[exact == 0] = 0.0  # of either sign
    expected = derivative(torch.from_numpy(inverse))
    actual = gradient(partial(silu_, bits=1), x).cpu().double()
    # 16-bit kernels fit the derivative to 3.5e-4, and the gradient is rounded to the dtype.
    limit = {
        torch.float64: 1e-13,
        torch.float32: 2e-6,
        torch.float16: 8.5e-4,
        torch.bfloat16: 4.6e-3,
    }
    # Where silu is flat y's rounding moves the inverse: the branch is cut off at 0.2 from there.
    assert (actual - expected).abs().max() <= limit[dtype]


def test_float64_against_mpmath(device: torch.device) -> None:
    with mpmath.workdps(40):
        points = [-700.5, -87.25, -40.0, -5.5, MINIMUM - 1e-5, MINIMUM + 1e-4, -1.25, -1e-300, 0.0]
        points += [1e-12, 0.75, 3.0, 36.5, 700.0]
        x = torch.tensor(points, dtype=torch.float64, device=device)
        expected = []
        for point in points:
            s = 1 / (1 + mpmath.exp(-mpmath.mpf(point)))
            expected.append(float(s * (1 + mpmath.mpf(point) * (1 - s))))
    actual = gradient(silu_, x).cpu()
    assert (actual - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 5e-11


@pytest.mark.parametrize("dtype", FLOATS, ids=id_of)
def test_left_tail_to_underflow(dtype: torch.dtype, device: torch.device) -> None:
    end = {torch.float16: -20.0, torch.bfloat16: -88.0, torch.float32: -87.0, torch.float64: -700.0}
    x = torch.linspace(end[dtype], -3, 5000, dtype=torch.float64).to(dtype).to(device)
    actual = gradient(silu_, x).double()
    expected = derivative(x)
    torch.testing.assert_close(actual.to(dtype), gradient(F.silu, x))
    if dtype != torch.float32:
        # x is exact: the relative error is the dtype's, but where the result is subnormal.
        relative = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
        limit = relative * expected.abs() + torch.finfo(dtype).smallest_normal * 1e-3
        assert ((actual - expected).abs() <= limit).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=id_of)
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_derivative_codes(dtype: torch.dtype, bits: int, device: torch.device) -> None:
    x = all_finite(dtype, device) if dtype in HALVES else dense(dtype, device)
    error = largest_error(x, save="derivative", bits=bits)
    assert error <= DERIVATIVE_ERROR[bits] + 1.01 * pytorchs_error(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=id_of)
@pytest.mark.parametrize("bits", [None, 8, 16, 32])
def test_derivative_codes_of_zero_one_and_nan(
    dtype: torch.dtype, bits: int | None, device: torch.device
) -> None:
    x = torch.tensor([-900.0, 900.0, torch.nan, -torch.inf, torch.inf], dtype=dtype, device=device)
    actual = gradient(partial(silu_, save="derivative", bits=bits), x)
    # PyTorch's gradient at +inf is NaN, as inf * 0.
    expected = torch.tensor([0, 1, torch.nan, torch.nan, torch.nan], dtype=dtype, device=device)
    assert_identical(actual + 0.0, expected)
    torch.testing.assert_close(actual, gradient(F.silu, x), rtol=0, atol=0, equal_nan=True)


def test_derivative_codes_are_the_nearest(device: torch.device) -> None:
    # 8 bits: every value is on the grid of steps of 1/212, and the nearest one of it.
    x = dense(torch.float64, device)
    actual = gradient(partial(silu_, save="derivative", bits=8), x) * 212
    torch.testing.assert_close(actual, actual.round(), rtol=0, atol=1e-12)
    exact = derivative(x) * 212
    nearest = exact.round()
    is_clear = (exact - exact.floor() - 0.5).abs() > 1e-6
    assert torch.equal(actual.round()[is_clear], nearest[is_clear])
    assert nearest.min() >= -21
    assert nearest.max() <= 233


@pytest.mark.parametrize("dtype", FLOATS, ids=id_of)
def test_default_derivative_bits(dtype: torch.dtype, device: torch.device) -> None:
    x = dense(dtype, device).clamp(-1000, 1000)
    given = gradient(partial(silu_, save="derivative"), x)
    asked = gradient(partial(silu_, save="derivative", bits=DERIVATIVE_DEFAULT_BITS[dtype]), x)
    assert_identical(given, asked)


# One check of each kind, in a process that runs another instruction set.
CHECKS = [
    f"{test}[{parameters}]"
    for test, parameters in [
        ("test_silu_inverse.py::test_every_16_bit_value", "cpu-float16-1"),
        ("test_silu_inverse.py::test_every_16_bit_value", "cpu-bfloat16-5"),
        ("test_silu_inverse.py::test_default_bits_give_pytorchs_gradient", "cpu-float16"),
        ("test_silu_inverse.py::test_default_bits_give_pytorchs_gradient", "cpu-bfloat16"),
        ("test_silu_inverse.py::test_float32_around_the_minimum", "cpu-6"),
        ("test_silu_inverse.py::test_dense_samples", "cpu-float32-1"),
        ("test_silu_inverse.py::test_dense_samples", "cpu-float32-8"),
        ("test_silu_inverse.py::test_dense_samples", "cpu-float64-1"),
        ("test_silu_inverse.py::test_left_tail_to_underflow", "cpu-float32"),
        ("test_silu_inverse.py::test_derivative_codes", "cpu-8-float16"),
        ("test_silu_inverse.py::test_derivative_codes", "cpu-16-float32"),
    ]
]


CHECKS += [
    f"test_values.py::{test}"
    for test in ("test_every_length", "test_edge_values", "test_edge_gradients")
]


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2"])
def test_instruction_sets(instruction_set: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS],
        cwd=os.path.dirname(__file__),
        env={**os.environ, "INPLACE_OPS_CPU": instruction_set},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    assert "passed" in result.stdout
