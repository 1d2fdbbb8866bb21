"""Gradients from the output and a few bits: all 16-bit inputs, and dense inputs of other dtypes.

Values, derivatives and second derivatives against float64.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _support.assertions import assert_identical, gradient, patterns
from _support.cases import FLOATS, ONE_OF_EACH_FUNCTION
from _support.smooth_references import (
    HALVES,
    SILU,
    SmoothActivation,
    all_finite,
    all_smooth,
    dense,
    id_of,
    inputs_of,
)
from torch import Tensor

from inplace_ops import silu_

derivative = SILU.derivative
with_all_bits = pytest.mark.parametrize("which", [0, 1, 2], ids=["one", "default", "eight"])


def bits_of(smooth: SmoothActivation, dtype: torch.dtype, which: int) -> tuple[int | None, int]:
    """Return the `bits` argument, and the number of bits that this argument saves."""
    bits = (1, None, 8)[which]
    return bits, bits or smooth.default_bits(dtype)


def largest_error(smooth: SmoothActivation, x: Tensor, **arguments: object) -> float:
    actual = gradient(partial(smooth.call, **arguments), x).double()
    error = (actual - smooth.derivative(x.double())).abs().max().item()
    assert error == error
    return error


def rounding(smooth: SmoothActivation, x: Tensor) -> float:
    """Return the largest error of rounding the derivative to x's dtype."""
    exact = smooth.derivative(x.double())
    return (exact.to(x.dtype).double() - exact).abs().max().item()


@all_smooth
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_match_float64(
    smooth: SmoothActivation, dtype: torch.dtype, device: torch.device
) -> None:
    """Values in the left tail have a small relative error until they underflow."""
    x = inputs_of(smooth, dtype, device)
    # Above the dtype's maximum over 6 Hardswish overflows to inf, as PyTorch's does.
    x = x[x < torch.finfo(dtype).max / 7]
    actual, exact = smooth.call(x.clone()), smooth.exact(x.double())
    torch.testing.assert_close(actual, exact.to(dtype))
    assert torch.equal(actual.signbit(), x.signbit())
    if dtype not in HALVES:
        in_tail = (x > -80) & (x < -1) & (exact < -1e-35)
        error = actual[in_tail].double() / exact[in_tail] - 1
        assert error.abs().max() <= (1e-11 if dtype == torch.float64 else 2e-5)


@all_smooth
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_second_derivatives_match_differences(
    smooth: SmoothActivation, dtype: torch.dtype, device: torch.device
) -> None:
    """Second derivatives match differences of the exact first derivatives.

    The op divides by the first derivative: next to its zero float32 does not suffice.
    """
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64).to(device, dtype)
    x = x[(x.double().abs() - 3).abs() > 0.01] if smooth.name == "hardswish" else x
    if dtype == torch.float32:
        x = x[(x - smooth.minimum).abs() > 0.1]
    step = 1e-5
    below, above = (smooth.derivative(x.double() + side) for side in (-step, step))
    leaf = x.clone().requires_grad_()
    first = torch.autograd.grad(smooth.call(leaf * 1, bits=8).sum(), leaf, create_graph=True)[0]
    (second,) = torch.autograd.grad(first.sum(), leaf)
    error = (second.double() - (above - below) / (2 * step)).abs().max()
    assert error <= (5e-6 if dtype != torch.float64 else 1e-8)


@all_smooth
@with_all_bits
@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_value_within_documented_error(
    smooth: SmoothActivation, dtype: torch.dtype, which: int, device: torch.device
) -> None:
    x = all_finite(dtype, device)
    bits, num_bits = bits_of(smooth, dtype, which)
    limit = smooth.error(dtype, num_bits) or 1.001 * rounding(smooth, x)
    assert largest_error(smooth, x, bits=bits) <= limit


@all_smooth
@pytest.mark.parametrize("dtype", HALVES)
def test_default_bits_match_pytorchs_gradient(
    smooth: SmoothActivation, dtype: torch.dtype, device: torch.device
) -> None:
    """Gradients are within one unit in the last place of PyTorch's, or within 2e-6.

    SiLU's are within one unit or 3e-7, and nearly all of them equal PyTorch's bit for bit.
    """
    x = all_finite(dtype, device)
    x = x[x.abs() < 1e15]  # PyTorch's tanh form of GELU is NaN from 2^64 on
    for scale in (1, 4):
        if scale > 1:
            # Below this input the output is subnormal, and some inputs are not recovered.
            x = x[x > smooth.recovered_above[dtype]]
        incoming = scale * (torch.ones_like(x) if scale == 1 else 2 * torch.rand_like(x) - 1)
        actual = gradient(smooth.call, x, incoming)
        expected = gradient(smooth.entry.torch_function, x, incoming)
        units = (patterns(actual).int() - patterns(expected).int()).abs()
        if smooth is SILU:
            units[(actual == 0) & (expected == 0)] = 0
            assert int((units > 0).sum()) * 500 < x.numel()
        # Near its zero the derivative's rounding in float32 is more than a unit of float16.
        arithmetic = 3e-7 if smooth is SILU else 2e-6
        units[(actual.double() - expected.double()).abs() <= arithmetic * scale] = 0
        assert units.max() <= 1
        torch.testing.assert_close(actual, expected)


def recovered_ratio(x: Tensor, bits: int) -> Tensor:
    """Return silu'' / silu' at the x that backward recovers, computed by the op."""
    ops = SILU.entry.ops
    y = x.clone()
    packed = ops.save_in_place["output"](y, bits, None)
    ones = torch.ones_like(y)
    assert ops.double_backward is not None
    return ops.double_backward(ones, ones, y, packed, None)


@pytest.mark.parametrize("dtype", HALVES)
def test_default_bits_recover_the_input(dtype: torch.dtype, device: torch.device) -> None:
    # The ratio distinguishes an x from its neighbors everywhere except far to the right, and best
    # near the minimum, where float32 arithmetic gives silu' an absolute error of 2e-7.
    x = all_finite(dtype, device)
    # Below these inputs the bits do not distinguish all inputs that share an output, which is
    # subnormal or 0.
    x = x[x > (-20.125 if dtype == torch.float16 else -89)]
    exact = x.double()
    s = torch.sigmoid(exact)
    first = s * (1 + exact * (1 - s))
    ratio = s * (1 - s) * (2 + exact * (1 - 2 * s)) / first
    actual = recovered_ratio(x, SILU.default_bits(dtype)).double()
    error = (actual - ratio).abs()
    relative = torch.where(exact < -2, 1e-5, 2e-7 / first.abs().clamp(max=1))
    limit = (torch.finfo(dtype).eps / 2 + relative) * ratio.abs() + 1e-6
    assert (error <= limit).all()


@all_smooth
@with_all_bits
def test_every_float32_around_minimum_within_documented_error(
    smooth: SmoothActivation, which: int, device: torch.device
) -> None:
    ends = torch.tensor([abs(smooth.minimum) - 0.15, abs(smooth.minimum) + 0.15]).view(torch.int32)
    x = -torch.arange(*ends.tolist(), dtype=torch.int32).view(torch.float32).to(device)
    bits, num_bits = bits_of(smooth, torch.float32, which)
    assert largest_error(smooth, x, bits=bits) <= smooth.error(torch.float32, num_bits)


@all_smooth
@with_all_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dense_samples_within_documented_error(
    smooth: SmoothActivation, dtype: torch.dtype, which: int, device: torch.device
) -> None:
    x = dense(dtype, device, smooth.minimum)
    bits, num_bits = bits_of(smooth, dtype, which)
    assert largest_error(smooth, x, bits=bits) <= smooth.error(dtype, num_bits)
    if num_bits >= smooth.default_bits(dtype):
        x = x[x.abs() < 1e15]
        actual = gradient(partial(smooth.call, bits=bits), x)
        torch.testing.assert_close(actual, gradient(smooth.entry.torch_function, x))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_gradient_matches_lambert_w(dtype: torch.dtype, left: bool, device: torch.device) -> None:
    # The reference inverts the outputs, x = y + W(y exp(-y)), and does not use the inputs.
    special = pytest.importorskip("scipy.special")
    x = (torch.linspace(-9, -1.5, 500) if left else torch.linspace(-1, 8, 500)).to(dtype).to(device)
    y = silu_(x.clone()).cpu()
    exact = y.double().numpy()
    inverse = exact + special.lambertw(exact * np.exp(-exact), -1 if left else 0).real
    inverse[exact == 0] = 0.0  # for zeros of either sign
    expected = derivative(torch.from_numpy(inverse))
    actual = gradient(partial(silu_, bits=1), x).cpu().double()
    # 16-bit kernels fit the derivative to 3.5e-4, and the gradient is rounded to the dtype.
    limit = {
        torch.float64: 1e-13,
        torch.float32: 2e-6,
        torch.float16: 8.5e-4,
        torch.bfloat16: 4.6e-3,
    }
    # Where SiLU is flat the rounding of y moves the inverse: inputs are 0.2 away from the minimum.
    assert (actual - expected).abs().max() <= limit[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_left_tail_matches_pytorch_to_underflow(dtype: torch.dtype, device: torch.device) -> None:
    end = {torch.float16: -20.0, torch.bfloat16: -88.0, torch.float32: -87.0, torch.float64: -700.0}
    x = torch.linspace(end[dtype], -3, 5000, dtype=torch.float64).to(dtype).to(device)
    actual = gradient(silu_, x).double()
    expected = derivative(x)
    torch.testing.assert_close(actual.to(dtype), gradient(F.silu, x))
    if dtype != torch.float32:
        # x is exact: the relative error is the dtype's, except where the result is subnormal.
        relative = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
        limit = relative * expected.abs() + torch.finfo(dtype).smallest_normal * 1e-3
        assert ((actual - expected).abs() <= limit).all()


@all_smooth
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_derivative_codes_within_documented_error(
    smooth: SmoothActivation, dtype: torch.dtype, bits: int, device: torch.device
) -> None:
    x = inputs_of(smooth, dtype, device)
    error = largest_error(smooth, x, save="derivative", bits=bits)
    limit = smooth.entry.derivative_error("derivative", dtype, bits)
    # eps / 2 is the rounding of a number below 2. Errors of half a step of the grid do occur.
    assert error <= limit * (1 + 1e-5) + torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [None, 8, 16, 32])
def test_derivative_codes_of_zero_one_and_nan_are_exact(
    dtype: torch.dtype, bits: int | None, device: torch.device
) -> None:
    x = torch.tensor([-900.0, 900.0, torch.nan, -torch.inf, torch.inf], dtype=dtype, device=device)
    actual = gradient(partial(silu_, save="derivative", bits=bits), x)
    # PyTorch's gradient at +inf is NaN, from inf * 0.
    expected = torch.tensor([0, 1, torch.nan, torch.nan, torch.nan], dtype=dtype, device=device)
    assert_identical(actual + 0.0, expected)
    torch.testing.assert_close(actual, gradient(F.silu, x), rtol=0, atol=0, equal_nan=True)


# Tests of each kind, which run again in a process that uses another instruction set.
CHECKS = [
    f"test_smooth_activations.py::test_{test}[cpu-{parameters}]"
    for test, parameters in [
        ("every_16_bit_value_within_documented_error", "float16-one-silu"),
        ("every_16_bit_value_within_documented_error", "bfloat16-default-gelu"),
        ("default_bits_match_pytorchs_gradient", "float16-silu"),
        ("default_bits_match_pytorchs_gradient", "bfloat16-hardswish"),
        ("every_float32_around_minimum_within_documented_error", "default-gelu_tanh"),
        ("dense_samples_within_documented_error", "float32-one-silu"),
        ("dense_samples_within_documented_error", "float32-eight-mish"),
        ("dense_samples_within_documented_error", "float64-one-gelu"),
        ("left_tail_matches_pytorch_to_underflow", "float32"),
        ("derivative_codes_within_documented_error", "8-float16-silu"),
        ("derivative_codes_within_documented_error", "16-float32-silu"),
    ]
]
CHECKS += [
    f"test_values.py::test_{test}[cpu-{id_of(dtype)}-{activation.name}]"
    for test in ("views_of_every_length_match_pytorch", "edge_values", "edge_gradients")
    for dtype in FLOATS
    for activation in ONE_OF_EACH_FUNCTION
]
CHECKS += [
    "test_values.py::test_every_16_bit_value_is_rounded_as_in_pytorch",
    "test_values.py::test_nan_payload_is_preserved",
    "test_ops.py::test_all_kernels_normalize_to_the_same_bits",
    "test_ops.py::test_unused_bits_are_zero",
]


@pytest.mark.parametrize("instruction_set", ["baseline", "avx2"])
def test_checks_pass_with_other_instruction_sets(instruction_set: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *CHECKS],
        cwd=os.path.dirname(__file__),
        env={**os.environ, "INPLACE_OPS_CPU": instruction_set, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    assert "passed" in result.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set")
def test_unknown_instruction_set_raises() -> None:
    code = """
import torch, inplace_ops
x = torch.tensor([-1.0, 1.0])
try:
    inplace_ops.relu_(x)
except RuntimeError as error:
    print(x.tolist(), error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "INPLACE_OPS_CPU": "avx"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.startswith("[-1.0, 1.0]"), result.stderr
    assert "INPLACE_OPS_CPU must be baseline, avx2 or avx512, not avx" in result.stdout
