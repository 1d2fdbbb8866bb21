"""Markers that choose which tests run by default.

Tests marked `slow` rarely find more than a quick test. They run with `pytest -m ""`, and in .ci/run
except those that are also marked `release`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

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
