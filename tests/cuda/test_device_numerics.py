"""Test the smooth activations as a GPU computes them, with the errors that the PTX ISA allows.

device_numerics.cpp compiles the device code of the mathematics for the host. emulated_hardware.h
emulates each hardware function as its exact value plus an error: the largest documented error, with
every combination of signs, a random part of it, or a multiple of it. The tests compare the results
with float64, within the bounds that docs/accuracy.md states.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from _support.assertions import patterns
from _support.extension import build
from _support.smooth_references import (
    CPU,
    HALVES,
    SILU,
    SMOOTH_ACTIVATIONS,
    SmoothActivation,
    all_finite,
    dense,
    id_of,
)
from torch import Tensor

all_dtypes = pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
halves = pytest.mark.parametrize("dtype", HALVES)


class Errors(NamedTuple):
    """Multiples of the documented errors; with a seed, the bounds of random multiples."""

    exp2: float = 0.0
    log2: float = 0.0
    reciprocal: float = 0.0
    sqrt: float = 0.0
    seed: int = 0


SIGNS = list(itertools.product((-1, 1), repeat=4))
# For SiLU, unless INPLACE_OPS_LARGE=1: all signs of every three functions.
HALF_OF_THE_SIGNS = [signs for signs in SIGNS if math.prod(signs) == 1]
# For the other smooth activations: both signs of each function.
FEW_SIGNS = [(-1, -1, -1, -1), (1, 1, 1, 1), (1, -1, -1, 1), (-1, 1, 1, -1)]


def random_errors(multiple: float, seed: int) -> Iterator[Errors]:
    """Yield errors times a random number between -1 and 1 (even seed), or times -1 or 1 (odd)."""
    for errors_seed in (2 * seed + 2, 2 * seed + 3):
        yield Errors(*[multiple] * 4, errors_seed)


class Device:
    """Apply the emulated mathematics of a smooth activation to tensors, by device_numerics.cpp."""

    def __init__(self, module: ModuleType, smooth: SmoothActivation) -> None:
        self.module = module
        self.smooth = smooth

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        dtype = id_of(x.dtype)
        self.module.forward(self.smooth.name, dtype, x.data_ptr(), y.data_ptr(), x.numel())
        return y

    def points(
        self, x: Tensor, bits: int, y: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input that backward recovers, and both derivatives there.

        With 0 bits the recovered input is x itself.
        """
        y = self.forward(x) if y is None else y
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        results = [torch.full(x.shape, torch.nan, dtype=compute) for _ in range(3)]
        pointers = [result.data_ptr() for result in results]
        self.module.points(
            self.smooth.name, id_of(x.dtype), x.data_ptr(), y.data_ptr(), bits, *pointers, x.numel()
        )
        return results[0], results[1], results[2]

    def recover(self, x: Tensor, bits: int, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.points(x, bits, y)[:2]

    def error(self, x: Tensor, bits: int, y: Tensor | None = None) -> float:
        """Return the largest absolute error of the derivative."""
        slope = self.recover(x, bits, y)[1].double()
        error = (slope - self.smooth.derivative(x.double())).abs().max().item()
        assert error == error
        return error

    def set(self, errors: Errors) -> None:
        self.module.set_errors(errors[:4], errors.seed)

    def all_signs(self, multiple: float) -> Iterator[Errors]:
        chosen = HALF_OF_THE_SIGNS if self.smooth is SILU else FEW_SIGNS
        for signs in SIGNS if os.environ.get("INPLACE_OPS_LARGE") == "1" else chosen:
            yield Errors(*(sign * multiple for sign in signs))

    def quantized_derivative(self, x: Tensor, bits: int) -> Tensor:
        derivative = torch.full(x.shape, torch.nan)
        self.module.quantized_derivative(
            self.smooth.name, id_of(x.dtype), x.data_ptr(), bits, derivative.data_ptr(), x.numel()
        )
        return derivative


@pytest.fixture(scope="session")
def device_numerics(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """device_numerics.cpp, compiled with fused multiply-adds, as by nvcc."""
    flags = ["-O2", "-pthread", "-ffp-contract=fast"]
    if platform.machine() == "x86_64":
        if "fma" not in Path("/proc/cpuinfo").read_text().split():
            pytest.skip("the processor has no fused multiply-add")
        flags.append("-mfma")
    return build("device_numerics.cpp", tmp_path_factory.mktemp("device_numerics"), *flags)


@pytest.fixture(params=SMOOTH_ACTIVATIONS, ids=lambda smooth: smooth.name)
def device(request: pytest.FixtureRequest, device_numerics: ModuleType) -> Iterator[Device]:
    yield Device(device_numerics, request.param)
    device_numerics.set_errors(Errors()[:4], 0)


only_silu = pytest.mark.parametrize("device", [SILU], ids=["silu"], indirect=True)


def largest_error(actual: Tensor, smooth: SmoothActivation, x: Tensor) -> float:
    error = (actual.double() - smooth.derivative(x.double())).abs().max().item()
    assert error == error
    return error


def rounding(smooth: SmoothActivation, dtype: torch.dtype) -> float:
    """Return the largest error of rounding the derivative to the dtype."""
    derivative = smooth.derivative(all_finite(dtype, CPU).double())
    return (derivative.to(dtype).double() - derivative).abs().max().item()


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether the tensors are close, with the default tolerances of torch.testing."""
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError:
        return False
    return True


def recovered_inputs(smooth: SmoothActivation, dtype: torch.dtype) -> Tensor:
    """Return the inputs that backward recovers exactly, up to 20; above, the output equals x."""
    x = all_finite(dtype, CPU)
    return x[(x > smooth.recovered_above[dtype]) & (x < 20)]


def values_are_right(device: Device, x: Tensor) -> bool:
    return is_close(device.forward(x), device.smooth.exact(x.double()).to(x.dtype))


def inputs_are_recovered(device: Device, x: Tensor) -> bool:
    x = recovered_inputs(device.smooth, x.dtype)
    return torch.equal(device.recover(x, device.smooth.default_bits(x.dtype))[0], x.float())


def gradients_are_right(device: Device, x: Tensor) -> bool:
    derivative = device.recover(x, device.smooth.default_bits(x.dtype))[1]
    return is_close(derivative.to(x.dtype), device.smooth.derivative(x.double()).to(x.dtype))


def one_bit_is_in_the_table(device: Device, x: Tensor) -> bool:
    derivative = device.recover(x, 1)[1]
    return largest_error(derivative, device.smooth, x) <= device.smooth.error(x.dtype, 1)


def default_is_in_the_table(device: Device, x: Tensor) -> bool:
    bits = device.smooth.default_bits(x.dtype)
    return device.error(x, bits) <= device.smooth.error(x.dtype, bits)


def eight_bits_are_in_the_table(device: Device, x: Tensor) -> bool:
    return device.error(x, 8) <= device.smooth.error(x.dtype, 8)


def around_the_minimum(smooth: SmoothActivation, step: int = 1) -> Tensor:
    """Return every float32 between 1.4 and 0.75 times the minimum, or every `step`th."""
    first, last = (
        torch.tensor([x], dtype=torch.float32).view(torch.int32).item()
        for x in (0.75 * smooth.minimum, 1.4 * smooth.minimum)
    )
    return torch.arange(first, last, step, dtype=torch.int32).view(torch.float32)


def inputs(smooth: SmoothActivation, dtype: torch.dtype) -> Tensor:
    """Return all values of a 16-bit dtype, or a sample of float32 that is dense at the minimum."""
    if dtype in HALVES:
        x = all_finite(dtype, CPU)
    else:
        x = torch.cat([around_the_minimum(smooth, 191), dense(dtype, CPU, smooth.minimum)[::23]])
    # Above a sixth of the largest value Hardswish is inf, as in PyTorch.
    return x[x < torch.finfo(dtype).max / 7]


# The statements of docs/accuracy.md, and the least multiples of the documented errors with which
# they still hold: for SiLU, and for every smooth activation.
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
    (eight_bits_are_in_the_table, torch.float32, 1, 1),
    (one_bit_is_in_the_table, torch.float32, 4, 1),
    (one_bit_is_in_the_table, torch.float16, 4, 1),
    (one_bit_is_in_the_table, torch.bfloat16, 4, 1),
]


@pytest.mark.parametrize(
    ("holds", "dtype", "silu_multiple", "any_multiple"),
    GUARANTEES,
    ids=[f"{holds.__name__}-{id_of(dtype)}" for holds, dtype, *_ in GUARANTEES],
)
def test_guarantees_hold_with_multiples_of_the_documented_errors(
    device: Device,
    holds: Callable[[Device, Tensor], bool],
    dtype: torch.dtype,
    silu_multiple: int,
    any_multiple: int,
    seed: int,
) -> None:
    multiple = silu_multiple if device.smooth is SILU else any_multiple
    x = inputs(device.smooth, dtype)
    for errors in itertools.chain(device.all_signs(multiple), random_errors(multiple, seed)):
        device.set(errors)
        assert holds(device, x), errors


@halves
def test_default_bits_differ_from_rounding_by_at_most_one_unit(
    device: Device, dtype: torch.dtype
) -> None:
    """With the default bits few derivatives differ from the rounded derivative, and by one unit."""
    x = recovered_inputs(device.smooth, dtype)
    exact = device.smooth.derivative(x.double())
    expected = exact.to(dtype)
    for errors in device.all_signs(1):
        device.set(errors)
        derivative = device.recover(x, device.smooth.default_bits(dtype))[1]
        units = (patterns(derivative.to(dtype)).int() - patterns(expected).int()).abs()
        # The derivative is near 0 here.
        units[(derivative.double() - exact).abs() <= 2e-6] = 0
        assert units.max() <= 1, errors
        assert int((units > 0).sum()) * 500 < x.numel(), errors
        limit = 1.001 * rounding(device.smooth, dtype)
        assert largest_error(derivative.to(dtype), device.smooth, x) <= limit, errors


@all_dtypes
def test_recovered_inputs_stay_in_their_branch(device: Device, dtype: torch.dtype) -> None:
    """The derivative has the right sign, and the second over the first derivative is bounded.

    Double backward computes this ratio.
    """
    x = inputs(device.smooth, dtype)
    x = x[(x > {"silu": -20, "mish": -20, "hardswish": -2.999}.get(device.smooth.name, -4))]
    x = x[x < 20]
    left = x.double() < device.smooth.minimum
    for bits in device.smooth.all_bits(dtype)[: None if dtype in HALVES else 1]:
        for errors in device.all_signs(1):
            device.set(errors)
            _, derivative, second = device.points(x, bits)
            assert ((derivative < 0) == left).all(), errors
            float16_limit = {"gelu_tanh": 6e4, "mish": 2.5e4}.get(device.smooth.name, 7000)
            most = {torch.float16: float16_limit, torch.bfloat16: 1000, torch.float32: 3e4}[dtype]
            # At Hardswish's minimum it is larger, and finite where double backward needs it.
            elsewhere = (derivative != 0) & (x.double() != device.smooth.minimum)
            assert (second / derivative)[elsewhere].abs().max() <= most


@halves
def test_one_bit_has_no_bias(device: Device, dtype: torch.dtype) -> None:
    """For inputs from N(0, 1) the mean error is much smaller than a typical rounding error."""
    quantiles = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    x = torch.special.ndtri(quantiles).to(dtype)
    exact = device.smooth.derivative(x.double())
    error = device.recover(x, 1)[1].double() - exact
    typical_rounding = (exact.to(dtype).double() - exact).square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * typical_rounding


@halves
def test_gradients_where_outputs_underflow(device: Device, dtype: torch.dtype) -> None:
    """Where the output underflows, x is not recovered and the gradient has a small error."""
    smooth = device.smooth
    x = all_finite(dtype, CPU)
    x = x[x <= smooth.recovered_above[dtype]]
    for errors in device.all_signs(1):
        device.set(errors)
        derivative = device.recover(x, smooth.default_bits(dtype))[1].to(dtype)
        # The error is a subnormal number and rounding; in bfloat16 it is the whole derivative.
        float16_limit = 9e-8 if smooth is SILU else 6e-7
        limit = float16_limit if dtype == torch.float16 else 3e-34
        assert largest_error(derivative, smooth, x) <= limit, errors


@pytest.mark.parametrize("bits", [1, None])
def test_every_float32_around_the_minimum(device: Device, bits: int | None, seed: int) -> None:
    """Within 1/64 of the minimum, for a few combinations of errors of forward and of backward."""
    smooth = device.smooth
    bits = bits or smooth.default_bits(torch.float32)
    x = around_the_minimum(smooth)
    x = x[(x - smooth.minimum).abs() < 1 / 64]
    limit = smooth.error(torch.float32, bits)
    signs = [Errors(*signs) for signs in FEW_SIGNS]
    for part in x.split(2**15):
        values, derivative = smooth.exact(part.double()), smooth.derivative(part.double())
        for forward in signs[:2]:
            device.set(forward)
            y = device.forward(part)
            assert (y.double() - values).abs().max() <= 0.65 * smooth.unit
            for backward in (*signs, *random_errors(1, seed)):
                device.set(backward)
                error = (device.recover(part, bits, y)[1].double() - derivative).abs().max()
                assert error <= limit, (forward, backward)


@pytest.mark.parametrize("bits", [1, None])
def test_float32_in_the_left_tail(device: Device, bits: int | None) -> None:
    """The relative error is small too. A unit is 1.2e-7, and y's last bit moves x by as much."""
    bits = bits or device.smooth.default_bits(torch.float32)
    if device.smooth.name == "hardswish":
        return  # Hardswish is 0 there
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
    for errors in itertools.chain(device.all_signs(1), random_errors(1, seed)):
        device.set(errors)
        assert largest_error(device.quantized_derivative(x, bits), smooth, x) <= limit, errors


@all_dtypes
def test_nonfinite_inputs(device: Device, dtype: torch.dtype) -> None:
    """Nonfinite inputs give the same results as on the CPU.

    The value is inf at inf and otherwise NaN. The gradient is NaN, except that Hardswish has 0 at
    -inf and 1 at inf.
    """
    x = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    derivatives = [1, 0, torch.nan] if device.smooth.name == "hardswish" else [torch.nan] * 3
    for errors in device.all_signs(1):
        device.set(errors)
        y = device.forward(x)
        assert y[0] == torch.inf
        assert y[1:].isnan().all()
        # NaNs as a GPU writes them.
        y[1:] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).to(dtype)
        for bits in (0, *device.smooth.all_bits(dtype)):
            derivative = device.recover(x, bits, y)[1]
            torch.testing.assert_close(derivative, torch.tensor(derivatives), equal_nan=True)


@only_silu
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
    # Its documented error is relative to the rounded value, hence half a unit more.
    "exp2": (torch.exp2, lambda x, y: 2.5 * unit(y)),
    "log2": (torch.log2, lambda x, y: 2**-22 * torch.where((x > 0.5) & (x < 2), 1, y.abs())),
    "reciprocal": (torch.reciprocal, lambda x, y: unit(y)),
    "sqrt": (torch.sqrt, lambda x, y: 2**-23 * y),
}


def unit(y: Tensor) -> Tensor:
    """Return the spacing of float32 at y."""
    return torch.exp2(torch.floor(torch.log2(y.abs())) - 23)


@pytest.mark.parametrize("function", DOCUMENTED)
@pytest.mark.parametrize("sign", [-1, 1])
@only_silu
def test_emulated_errors_are_as_large_as_documented(
    device: Device, function: str, sign: int
) -> None:
    """Errors never exceed the documented ones, and on average are at least 0.45 of them."""
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
