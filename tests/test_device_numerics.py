"""SiLU as a GPU computes it, with every error that the PTX ISA allows its approximations.

device_numerics.cpp compiles the device's branches of the mathematics for the host, and
emulated_hardware.h gives each of the hardware's functions as its exact value and an error: the
largest that is documented, with every combination of signs, or shares of it by chance, or a
multiple of it. What is checked is what the README states, against float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activations import DERIVATIVE_ERROR, SILU_DEFAULT_BITS, SILU_ERROR
from comparison import patterns
from test_silu_inverse import MINIMUM, all_finite, dense, derivative, id_of
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
# Below, the output is float16's smallest subnormal or 0, and 0 in bfloat16.
RECOVERED_ABOVE = {torch.float16: -20.125, torch.bfloat16: -89.0}
all_dtypes = pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=id_of)
halves = pytest.mark.parametrize("dtype", HALVES, ids=id_of)
all_bits = pytest.mark.parametrize("bits", range(1, 9))


class Errors(NamedTuple):
    """Multiples of the documented errors; with a seed the largest that an argument may have."""

    exp2: float = 0.0
    log2: float = 0.0
    reciprocal: float = 0.0
    sqrt: float = 0.0
    seed: int = 0


def all_signs(multiple: float) -> Iterator[Errors]:
    for signs in itertools.product((-multiple, multiple), repeat=4):
        yield Errors(*signs)


def by_chance(multiple: float, seed: int) -> Iterator[Errors]:
    """Shares between -1 and 1 by chance (an even seed), and -1 or 1 by chance."""
    for own_seed in (2 * seed + 2, 2 * seed + 3):
        yield Errors(*[multiple] * 4, own_seed)


class Device:
    """The emulated mathematics over tensors."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def set(self, errors: Errors) -> None:
        self.module.set_errors(errors[:4], errors.seed)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        self.module.forward(id_of(x.dtype), x.data_ptr(), y.data_ptr(), x.numel())
        return y

    def recover(self, x: Tensor, bits: int, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The x that backward finds, and silu' there, in float32."""
        y = self.forward(x) if y is None else y
        recovered, slope = (torch.full(x.shape, torch.nan) for _ in range(2))
        self.module.recover(
            id_of(x.dtype), x.data_ptr(), y.data_ptr(), bits, recovered.data_ptr(),
            slope.data_ptr(), x.numel(),
        )  # fmt: skip
        return recovered, slope

    def keep_derivative(self, x: Tensor, bits: int) -> Tensor:
        slope = torch.full(x.shape, torch.nan)
        self.module.keep_derivative(id_of(x.dtype), x.data_ptr(), bits, slope.data_ptr(), x.numel())
        return slope


@pytest.fixture
def device_math(device_numerics: ModuleType) -> Iterator[Device]:
    yield Device(device_numerics)
    device_numerics.set_errors(Errors()[:4], 0)


def largest_error(actual: Tensor, x: Tensor) -> float:
    error = (actual.double() - derivative(x)).abs().max().item()
    assert error == error
    return error


def rounding(dtype: torch.dtype) -> float:
    """The largest that rounding silu' to the dtype makes."""
    x = all_finite(dtype, CPU)
    return (derivative(x).to(dtype).double() - derivative(x)).abs().max().item()


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Whether it passes torch.testing's default tolerances."""
    try:
        torch.testing.assert_close(actual, expected)
    except AssertionError:
        return False
    return True


def values_are_right(device: Device, x: Tensor) -> bool:
    return is_close(device.forward(x), F.silu(x.double()).to(x.dtype))


def inputs_are_recovered(device: Device, x: Tensor) -> bool:
    x = x[x > RECOVERED_ABOVE[x.dtype]]
    return torch.equal(device.recover(x, SILU_DEFAULT_BITS[x.dtype])[0], x.float())


def gradients_are_right(device: Device, x: Tensor) -> bool:
    slope = device.recover(x, SILU_DEFAULT_BITS[x.dtype])[1]
    return is_close(slope.to(x.dtype), derivative(x).to(x.dtype))


def one_bit_is_in_the_table(device: Device, x: Tensor) -> bool:
    slope = device.recover(x, 1)[1].to(x.dtype)
    return largest_error(slope, x) <= SILU_ERROR[x.dtype][0]


def default_is_in_the_table(device: Device, x: Tensor) -> bool:
    limit = SILU_ERROR[x.dtype][SILU_DEFAULT_BITS[x.dtype] - 1]
    return largest_error(device.recover(x, SILU_DEFAULT_BITS[x.dtype])[1], x) <= limit


def around_the_minimum(step: int = 1) -> Tensor:
    """Every float32 in (-2, -1], or each `step`th."""
    return -(torch.arange(2**23, dtype=torch.int32)[::step] + 0x3F800000).view(torch.float32)


def inputs(dtype: torch.dtype) -> Tensor:
    """All values of 16 bits; float32 sampled, more densely around silu's minimum."""
    if dtype in HALVES:
        return all_finite(dtype, CPU)
    return torch.cat([around_the_minimum(37), dense(dtype, CPU)[::3]])


# What the README states, and how many times the documented errors it survives at least.
GUARANTEES: list[tuple[Callable[[Device, Tensor], bool], torch.dtype, int]] = [
    (values_are_right, torch.float32, 64),
    (values_are_right, torch.float16, 512),
    (values_are_right, torch.bfloat16, 512),
    (inputs_are_recovered, torch.float16, 32),
    (inputs_are_recovered, torch.bfloat16, 512),
    (gradients_are_right, torch.float32, 8),
    (gradients_are_right, torch.float16, 64),
    (gradients_are_right, torch.bfloat16, 128),
    (default_is_in_the_table, torch.float32, 1),
    (one_bit_is_in_the_table, torch.float32, 4),
    (one_bit_is_in_the_table, torch.float16, 4),
    (one_bit_is_in_the_table, torch.bfloat16, 4),
]


@pytest.mark.parametrize(
    ("holds", "dtype", "stated"),
    GUARANTEES,
    ids=[f"{holds.__name__}-{id_of(dtype)}" for holds, dtype, _ in GUARANTEES],
)
def test_multiples_that_are_survived(
    device_math: Device,
    holds: Callable[[Device, Tensor], bool],
    dtype: torch.dtype,
    stated: int,
    seed: int,
) -> None:
    x = inputs(dtype)
    survived, multiple = 0, 1
    while multiple <= 1024:
        for errors in itertools.chain(all_signs(multiple), by_chance(multiple, seed)):
            device_math.set(errors)
            if not holds(device_math, x):
                break
        else:
            survived, multiple = multiple, 2 * multiple
            continue
        break
    print(f"{holds.__name__}, {dtype}: {survived} times the documented errors")
    assert survived >= stated


@all_bits
@halves
def test_table_of_16_bit_formats(device_math: Device, dtype: torch.dtype, bits: int) -> None:
    x = all_finite(dtype, CPU)
    for errors in all_signs(1):
        device_math.set(errors)
        slope = device_math.recover(x, bits)[1].to(dtype)
        # PyTorch's own rounding where the table says that x is exact, and half a last bit more.
        limit = SILU_ERROR[dtype][bits - 1] or 1.001 * rounding(dtype)
        assert largest_error(slope, x) <= limit, errors


@halves
def test_last_bits_of_the_default(device_math: Device, dtype: torch.dtype) -> None:
    """One unit at most between it and the rounded derivative, and that in few places."""
    x = all_finite(dtype, CPU)
    x = x[x > RECOVERED_ABOVE[dtype]]
    expected = derivative(x).to(dtype)
    for errors in all_signs(1):
        device_math.set(errors)
        actual = device_math.recover(x, SILU_DEFAULT_BITS[dtype])[1].to(dtype)
        units = (patterns(actual).int() - patterns(expected).int()).abs()
        units[(actual == 0) & (expected == 0)] = 0
        assert units.max() <= 1, errors
        assert int((units > 0).sum()) * 500 < x.numel(), errors


@all_bits
@halves
def test_each_branch_keeps_its_side(device_math: Device, dtype: torch.dtype, bits: int) -> None:
    """And silu'' / silu', which double backward forms, is as large as the README says."""
    x = all_finite(dtype, CPU)
    x = x[x.abs() < 20]
    left = x.double() < MINIMUM
    few = {torch.float16: 6, torch.bfloat16: 5}[
        dtype
    ]  # from there on the input next to it comes back
    for errors in all_signs(1):
        device_math.set(errors)
        recovered, slope = device_math.recover(x, bits)
        assert ((slope < 0) == left).all(), errors
        at = recovered.double()
        s = torch.sigmoid(at)
        second = s * torch.sigmoid(-at) * (2 + at * (1 - 2 * s))
        assert (second / slope).abs().max() <= (7000 if bits >= few else 250), errors


@halves
def test_one_bit_has_no_bias(device_math: Device, dtype: torch.dtype) -> None:
    """The errors of inputs from N(0, 1) add up to much less than what rounding makes of each."""
    quantiles = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    x = torch.special.ndtri(quantiles).to(dtype)
    error = device_math.recover(x, 1)[1].double() - derivative(x)
    typical_rounding = (derivative(x).to(dtype).double() - derivative(x)).square().mean().sqrt()
    assert error.mean().abs() <= 0.1 * typical_rounding


@halves
def test_what_is_not_recovered(device_math: Device, dtype: torch.dtype) -> None:
    """Where the output underflows the gradient is off by as little as the README says."""
    x = all_finite(dtype, CPU)
    x = x[x <= RECOVERED_ABOVE[dtype]]
    for errors in all_signs(1):
        device_math.set(errors)
        slope = device_math.recover(x, SILU_DEFAULT_BITS[dtype])[1].to(dtype)
        # A subnormal and what is lost to rounding; in bfloat16 all of it.
        assert largest_error(slope, x) <= (1.5 * 2**-24 if dtype == torch.float16 else 2e-37), (
            errors
        )


def float32_errors(device: Device, x: Tensor, bits: int, seed: int) -> Iterator[float]:
    """The largest error of silu' for each combination, forward and backward each of their own."""
    expected = derivative(x)
    by_sign = [Errors(*signs) for signs in itertools.product((-1, 1), (0,), (-1, 1), (-1, 1))]
    for forward in (Errors(exp2=-1), Errors(exp2=1), *by_chance(1, seed)):
        device.set(forward)
        y = device.forward(x)
        for backward in by_sign if forward.seed == 0 else by_chance(1, seed + 1):
            device.set(backward)
            slope = device.recover(x, bits, y)[1]
            yield slope.double().sub_(expected).abs_().max().item()


@pytest.mark.parametrize("bits", [1, 6])
def test_every_float32_around_the_minimum(device_math: Device, bits: int, seed: int) -> None:
    x = around_the_minimum()
    assert x.max() == -1
    assert x.min() > -2.000001
    for part in x.split(2**15):
        for error in float32_errors(device_math, part, bits, seed):
            assert error <= SILU_ERROR[torch.float32][bits - 1]


@all_bits
def test_float32_everywhere(device_math: Device, bits: int, seed: int) -> None:
    for error in float32_errors(device_math, inputs(torch.float32), bits, seed):
        assert error <= SILU_ERROR[torch.float32][bits - 1]


@pytest.mark.parametrize("bits", [1, 6])
def test_float32_in_the_far_left(device_math: Device, bits: int) -> None:
    """Relatively, too: float32's unit is 1.2e-7, and y's own last bit moves x by as much."""
    x = torch.linspace(-80, -4, 100_001)
    for errors in all_signs(1):
        device_math.set(errors)
        error = (device_math.recover(x, bits)[1].double() / derivative(x) - 1).abs()
        assert error.max() <= 2e-5, errors


@all_dtypes
@pytest.mark.parametrize("bits", [8, 16])
def test_derivative_codes(device_math: Device, dtype: torch.dtype, bits: int, seed: int) -> None:
    x = inputs(dtype)
    for errors in itertools.chain(all_signs(1), by_chance(1, seed)):
        device_math.set(errors)
        slope = device_math.keep_derivative(x, bits)
        assert largest_error(slope, x) <= DERIVATIVE_ERROR[bits] + 1e-6, errors


@all_dtypes
def test_not_finite(device_math: Device, dtype: torch.dtype) -> None:
    """As on the CPU: silu(inf) is inf with a gradient of NaN, of NaN and -inf all is NaN."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan] * 5, dtype=dtype)
    for errors in all_signs(1):
        device_math.set(errors)
        assert torch.equal(device_math.forward(x)[::3], x[::3])
        assert device_math.forward(x)[1::3].isnan().all()
        for bits in range(1, 9):
            assert device_math.recover(x, bits)[1].isnan().all()
        assert device_math.keep_derivative(x, 8).isnan().all()


@halves
def test_conversions(device_math: Device, dtype: torch.dtype) -> None:
    pattern = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64)
    x = pattern.to(torch.int32).view(torch.float32)
    values = all_finite(dtype, CPU)
    ties = (values[:-1].float() + values[1:].float()) / 2
    x = torch.cat([x[~x.isnan()], ties[ties.isfinite()], values.float()])
    rounded = [device_math.module.rounded(id_of(dtype), value) for value in x.tolist()]
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
def test_the_emulated_errors(device_math: Device, function: str, sign: int) -> None:
    """They are as large as documented, and not larger."""
    exact_function, largest = DOCUMENTED[function]
    x = torch.cat([torch.logspace(-30, 30, 5000), torch.linspace(0.3, 3, 5000)])
    x = x.log2().abs() + 0.01 if function == "exp2" else x
    exact = exact_function(x.double())
    device_math.set(Errors(**{function: sign}))
    emulated = [device_math.module.approximation(function, value) for value in x.tolist()]
    error = sign * (torch.tensor(emulated, dtype=torch.float64) - exact)
    limit = largest(x.double(), exact)
    assert (error <= limit * (1 + 1e-9)).all()
    assert (error / limit).mean() >= 0.45
