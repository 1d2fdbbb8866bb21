"""Smooth activations: float64 references, and the accuracy that the documentation states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

import inplace_ops
from inplace_ops.activations import GELU, GELU_TANH, HARDSWISH, MISH, SILU, Activation

HALVES = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")


def id_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class SmoothActivation:
    entry: Activation
    minimum: float
    exact: Callable[[Tensor], Tensor]  # the values at a float64 tensor; `derivative` likewise
    derivative: Callable[[Tensor], Tensor]
    # Below this input 16-bit outputs are subnormal or 0, and the input cannot be recovered.
    recovered_above: Mapping[torch.dtype, float]
    unit: float  # the spacing of float32 outputs at the minimum

    @property
    def name(self) -> str:
        """The activation's name in the ops."""
        return self.entry.ops.name

    @property
    def call(self) -> Callable[..., Tensor]:
        return partial(getattr(inplace_ops, self.entry.function), **self.entry.variant)

    def default_bits(self, dtype: torch.dtype) -> int:
        return self.entry.default_bits("output", dtype)

    def all_bits(self, dtype: torch.dtype) -> tuple[int, ...]:
        return tuple(sorted({1, self.default_bits(dtype), 8}))

    def error(self, dtype: torch.dtype, bits: int) -> float:
        """Return the largest absolute error of the derivative; 0 if x is recovered exactly."""
        return self.entry.output_errors[dtype][bits]


def silu_derivative(x: Tensor) -> Tensor:
    x = x.double()
    s = torch.sigmoid(x)
    return s * (1 + x * torch.sigmoid(-x))


def _gelu(x: Tensor) -> Tensor:
    return x * torch.erfc(x / -math.sqrt(2)) / 2


def _gelu_derivative(x: Tensor) -> Tensor:
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return torch.erfc(x / -math.sqrt(2)) / 2 + x * density


def _twice_u(x: Tensor) -> Tensor:
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    # Outside of [-100, 100] the derivative is 0 or 1.
    x = x.clamp(-100, 100)
    u = _twice_u(x)
    rate = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return torch.sigmoid(u) + x * torch.sigmoid(u) * torch.sigmoid(-u) * rate


def _mish_gate(x: Tensor) -> Tensor:
    e = torch.exp(x.clamp(max=40))
    return e * (e + 2) / (e * (e + 2) + 2)


def _mish_derivative(x: Tensor) -> Tensor:
    gate = _mish_gate(x)
    e = torch.exp(x.clamp(max=40))
    return gate + x.clamp(-1000, 40) * 4 * e * (e + 1) / (e * (e + 2) + 2) ** 2


def _hardswish_derivative(x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0, torch.where(x >= 3, 1, x / 3 + 0.5))


SMOOTH_ACTIVATIONS = (
    SmoothActivation(
        SILU,
        -1.2784645427610737,
        lambda x: x * torch.sigmoid(x),
        silu_derivative,
        {torch.float16: -20.125, torch.bfloat16: -89.0},
        2**-25,
    ),
    SmoothActivation(
        GELU,
        -0.7517915246935645,
        _gelu,
        _gelu_derivative,
        {torch.float16: -4.2, torch.bfloat16: -13.0},
        2**-26,
    ),
    SmoothActivation(
        GELU_TANH,
        -0.7524614220710163,
        lambda x: x * torch.sigmoid(_twice_u(x)),
        _gelu_tanh_derivative,
        {torch.float16: -4.05, torch.bfloat16: -9.9},
        2**-26,
    ),
    SmoothActivation(
        MISH,
        -1.1924312145154952,
        lambda x: x * _mish_gate(x),
        _mish_derivative,
        {torch.float16: -12.4, torch.bfloat16: -87.0},
        2**-25,
    ),
    SmoothActivation(
        HARDSWISH,
        -1.5,
        lambda x: x * (x + 3).clamp(0, 6) / 6,
        _hardswish_derivative,
        {torch.float16: -3.0, torch.bfloat16: -3.0},
        2**-25,
    ),
)


def all_finite(dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()].to(device)


def near(center: float, widest: float, dtype: torch.dtype) -> Tensor:
    """Return values on both sides of center, at distances from `widest` down to 1e-17."""
    distances = torch.logspace(math.log10(widest), -17, 20_000, dtype=torch.float64)
    return (center + torch.cat([distances, -distances])).to(dtype)


def dense(dtype: torch.dtype, device: torch.device, minimum: float) -> Tensor:
    """Return values in every region of the inverse: the minimum, 0, both tails, subnormals."""
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
    values = [near(minimum, 1, dtype), near(0, 1, dtype), magnitudes, -magnitudes]
    return torch.cat([*values, *(line.to(dtype) for line in lines)]).to(device)


def inputs_of(smooth: SmoothActivation, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return all finite values of a 16-bit dtype, and values in all regions of a wider one."""
    if dtype in HALVES:
        return all_finite(dtype, device)
    return dense(dtype, device, smooth.minimum)


SILU = SMOOTH_ACTIVATIONS[0]
all_smooth = pytest.mark.parametrize(
    "smooth", SMOOTH_ACTIVATIONS, ids=[smooth.name for smooth in SMOOTH_ACTIVATIONS]
)
