"""Markers and decorators that choose which tests run by default.

Tests marked `exhaustive` are slow and rarely find more than a quick test. They run with
`pytest -m ""`, and in .ci/run except those that are also marked `release`. Cases that take a few
milliseconds share a test: see `each`.
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
    """Return parameters for pytest.mark.parametrize, with `marks` on those not in `always`."""
    return [
        value
        if value in always
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[..., Any]:
    """Parametrize a test like pytest.mark.parametrize, but run all cases in one test.

    A failure names its case. Meant for cases that take less time than pytest needs for a test.
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
        remaining = [p for name, p in signature.parameters.items() if name not in names]
        assert len(remaining) == len(signature.parameters) - len(names)
        all_cases.__signature__ = signature.replace(parameters=remaining)  # type: ignore[attr-defined]
        return all_cases

    return decorate
