"""Test tools/fit_inverse.py: csrc/ has the numbers that it makes, and it fits other activations."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from _support.marks import slow
from _support.smooth_references import CPU, HALVES, all_finite
from torch import Tensor

PROJECT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROJECT / "tools")


@pytest.mark.parametrize("name", ["mish.gate.16", "silu.kMinimumX", "gelu.inverse"])
def test_committed_numbers_are_right(name: str) -> None:
    from fit_inverse import main

    assert main(["--check", "--only", name]) == 0


@slow
def test_all_committed_numbers_are_right() -> None:
    from fit_inverse import main

    assert main(["--check"]) == 0


@pytest.mark.parametrize("name", ["mish.tail", "mish.kMinimumX", "mish.inverse"])
def test_changed_number_is_found_and_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fit_inverse

    shutil.copytree(PROJECT / "csrc", tmp_path / "csrc")
    monkeypatch.setattr(fit_inverse, "CSRC", tmp_path / "csrc")
    header = tmp_path / "csrc" / "activations" / "mish.h"
    text = header.read_text()
    (item,) = (item for item in fit_inverse.items() if item.name == name)
    found = item.find()
    assert found is not None
    start = found[1].start(1)
    changed = re.sub(r"(?<=\d\.\d{3})\d", another_digit, text[start:], count=1)
    header.write_text(text[:start] + changed)

    assert fit_inverse.main(["--check", "--only", name]) == 1
    assert f"To be replaced in csrc/: {name}\n" in capsys.readouterr().out
    assert fit_inverse.main(["--check", "--write", "--only", name]) == 0
    old, new = item.compare()
    assert old == new


def another_digit(match: re.Match[str]) -> str:
    return str((int(match[0]) + 1) % 10)


# TanhExp, x tanh(e^x) (Liu, Di, "TanhExp: A Smooth Activation Function with High Convergence Speed
# for Lightweight Neural Networks", 2020), which the package does not have.


def tanh_exp(x: Tensor) -> Tensor:
    return x * torch.tanh(torch.exp(x))


def tanh_exp_derivative(x: Tensor) -> Tensor:
    e = torch.exp(x.clamp(max=5))
    return torch.tanh(e) + x * e / torch.cosh(e) ** 2


SCALE = 2.3


def test_fits_of_another_activation() -> None:
    """The errors are within the limits of the other activations, and the inputs are recovered."""
    import fit_inverse
    from fit_inverse import mp

    activation = fit_inverse.Activation("tanh_exp", "TanhExp", lambda x: mp.tanh(mp.exp(x)))
    gate_16, gate_32, tail = fits = fit_inverse.default_fits(activation, SCALE)
    for fit in fits:
        assert max(fit.errors(fit.coefficients)) <= 1
    constants = {name: float(value) for name, value in activation.constants.items()}
    for dtype in HALVES:
        assert_inputs_are_recovered(dtype, constants, gate_16.coefficients, tail.coefficients)
    assert_float32_estimates_are_exact(constants, gate_32.coefficients)


def assert_inputs_are_recovered(
    dtype: torch.dtype, constants: dict[str, float], gate: list[float], tail: list[float]
) -> None:
    """Each estimate is off by less than half a period of the saved bits, as in csrc/inverse.h."""
    lowest = constants["kMinimumY"]
    x = all_finite(dtype, CPU)
    x = x[x < 20]
    y = tanh_exp(x.double()).to(dtype).double()
    x, y = x[y.abs() >= torch.finfo(dtype).tiny], y[y.abs() >= torch.finfo(dtype).tiny]
    left = x.double() < constants["kMinimumX"]

    spacing = torch.finfo(dtype).eps / 4  # of y next to the minimum, which is below -1/4
    output = -lowest / spacing - round(-lowest / spacing)  # IntervalMidpoint::kLowestOutput
    midpoint = 0.5 * (1 + output) + 0.5 * math.sqrt((1.5 + output) * (0.5 + output))
    min_radicand = (0.01 + 0.25 * (output + 0.5)) * spacing
    offset = (1 + output - 0.98 * midpoint) * spacing + min_radicand
    root = torch.sqrt(((y - lowest - offset) / SCALE).clamp(0, 1) + min_radicand / SCALE)
    estimate = y / polynomial(gate, torch.where(left, -root, root))

    in_tail = left & (y > tanh_exp(torch.tensor(-4.5)))
    depth = constants["kMinimumX"] - torch.log(-y[in_tail])
    estimate[in_tail] = -1 / polynomial(tail, 1 / (torch.sqrt(depth) + 2) - 0.234375)

    bits, shift, scale = {torch.float16: (7, 13, 2.0**-112), torch.bfloat16: (5, 16, 1.0)}[dtype]
    patterns, expected = (
        (values.double() * scale).float().view(torch.int32).long() for values in (estimate, x)
    )
    assert ((patterns - expected).abs() < 2 ** (shift + bits - 2)).all()


def assert_float32_estimates_are_exact(constants: dict[str, float], gate: list[float]) -> None:
    """Around the minimum the estimate suffices, elsewhere with a step of Newton's method."""
    x = torch.linspace(-4.5, 6, 100_001, dtype=torch.float64)
    y = tanh_exp(x)
    root = torch.sqrt(((y - constants["kMinimumY"]) / SCALE).clamp(0, 1))
    center = float(np.float32(0.3))
    root = torch.where(x < constants["kMinimumX"], -root, root)
    estimate = y / polynomial(gate, root - center)
    is_near = (x - constants["kMinimumX"]).abs() < 0.25
    step = (tanh_exp(estimate) - y) / tanh_exp_derivative(estimate)
    estimate = torch.where(is_near, estimate, estimate - step)
    error = (tanh_exp_derivative(estimate) - tanh_exp_derivative(x)).abs()
    assert error[is_near].max() <= 2.4e-7
    assert error[~is_near].max() <= 5e-8


def polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    return sum(c * x**power for power, c in enumerate(coefficients))
