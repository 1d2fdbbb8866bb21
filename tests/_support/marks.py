"""Markers that choose which tests run by default.

Tests marked `slow` rarely find more than a quick test. They run with `pytest -m ""`, and in .ci/run
except those that are also marked `release`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest
import torch

slow = pytest.mark.slow
release = (slow, pytest.mark.release)


def quick(values: Iterable[Any], always: Container[Any], marks: Any = slow) -> list[Any]:
    """Return parameters for pytest.mark.parametrize, with `marks` on those not in `always`."""
    return [
        value
        if value in always
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]


def in_turn(
    rows: Iterable[Any], columns: Iterable[Any], others: Sequence[Any]
) -> list[tuple[Any, Any, Any]]:
    """Return each pair of a row and a column, with the other values in turn.

    Every two values of different axes occur together, if no axis is shorter than `others`.
    """
    columns = list(columns)
    return [
        (row, column, others[(i + j) % len(others)])
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def readable_id(value: Any) -> str:
    """Return a parameter's part of a test's ID: the name of a row, of an op or of a dtype."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    name = getattr(value, "name", value)
    return str(name() if callable(name) else name).removeprefix("inplace_ops::")
