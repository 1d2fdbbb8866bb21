"""How many tests there are, and which run by default.

Tests marked `exhaustive` run with `pytest -m ""`, and in .ci/run but for those marked `release`:
they are slow, and rarely tell more than a quick one. Cases of a few milliseconds share a test.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive
release = (exhaustive, pytest.mark.release)


def quick(values: Iterable[Any], always: Container[Any], marks: Any = exhaustive) -> list[Any]:
    """Parameters for pytest.mark.parametrize: those not among `always` are exhaustive."""
    return [
        value
        if value in always
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[..., Any]:
    """As pytest.mark.parametrize, but with all cases in one test, which names the one that fails.

    For cases that take less time than pytest does for a test.
    """
    cases = [(value,) if isinstance(names, str) else tuple(value) for value in values]
    names = (names,) if isinstance(names, str) else names
    assert cases

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            for case in cases:
                given = dict(zip(names, case, strict=True))
                try:
                    test(**fixtures, **given)
                except (Exception, pytest.fail.Exception) as error:
                    named = ", ".join(f"{n}={getattr(v, '__name__', v)}" for n, v in given.items())
                    raise AssertionError(f"{named}: {error}") from error

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in names]
        assert len(left) == len(signature.parameters) - len(names)
        all_cases.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return all_cases

    return decorate
