"""Test tools/fit_inverse.py: csrc/ has the numbers that it makes, and it fits other activations."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from _support.marks import slow

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


def test_fits_of_another_activation() -> None:
    """The errors are within the limits of the other activations.

    TanhExp is of Liu, Di, "TanhExp: A Smooth Activation Function with High Convergence Speed for
    Lightweight Neural Networks", 2020. The package does not have it.
    """
    import fit_inverse
    from fit_inverse import mp

    activation = fit_inverse.Activation("tanh_exp", "TanhExp", lambda x: mp.tanh(mp.exp(x)))
    for fit in fit_inverse.default_fits(activation, 2.3):
        assert max(fit.errors(fit.coefficients)) <= 1
