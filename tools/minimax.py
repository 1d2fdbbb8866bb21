"""Fit polynomials by linear programming, for several errors that matter at once.

A polynomial P of a variable u(x) approximates target(x). An `Error` of what is computed with P is,
to first order, a weight w(x) times P(u(x)) - target(x), so that it is linear in the coefficients.
A `Fit` limits several errors, each in an interval of x. Its coefficients make the largest ratio of
an error to its limit as small as possible. For points x_i that are dense in the intervals, this is
a linear program in the coefficients and t:

    minimize t   subject to   |w(x_i) (P(u(x_i)) - target(x_i))| <= t limit(x_i)

All errors are within their limits if t <= 1. The mean of an error over inputs from N(0, 1) is
linear too. If its limit is tiny, a sum over many inputs has no bias.

If each coefficient were rounded to the nearest float, the fit would lose accuracy. So only the one
whose rounding changes P most is rounded, the program is solved again for the others, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

GRID_POINTS = 300  # in each interval

Array = NDArray[np.float64]
Function = Callable[[Any], Any]  # of a sample


class Target(NamedTuple):
    """What a polynomial P approximates, and how much the result changes per unit of P."""

    value: Function
    effect: Function


class Error(NamedTuple):
    """An error that a fit limits, per unit of the result's change."""

    description: str
    weight: Function


class Limit(NamedTuple):
    """The limit of an error where low <= x <= high, or of its mean over x from N(0, 1)."""

    error: Error
    limit: float
    low: float
    high: float
    is_of_mean: bool = False


@dataclass(frozen=True)
class Fit:
    """A polynomial of a variable. Variable, target and errors are functions of sample(x)."""

    name: str
    terms: int
    sample: Callable[[float], Any]
    variable: Function
    target: Target
    limits: tuple[Limit, ...]

    @cached_property
    def rows(self) -> list[tuple[Array, Array]]:
        """For each limit (a, b): a @ coefficients - b are ratios of the error to its limit."""
        rows = []
        nodes = np.cos(np.pi * (np.arange(GRID_POINTS) + 0.5) / GRID_POINTS)  # dense at the ends
        for error, limit, low, high, is_of_mean in self.limits:
            x = 0.5 * (low + high) + 0.5 * (low - high) * nodes
            samples = [self.sample(float(node)) for node in x]
            u, target, effect, weight = (
                np.array([float(function(sample)) for sample in samples], dtype=np.float64)
                for function in (self.variable, *self.target, error.weight)
            )
            ratio = effect * weight / limit
            a, b = ratio[:, None] * u[:, None] ** np.arange(self.terms), ratio * target
            if is_of_mean:
                steps = 0.5 * (high - low) * np.pi / GRID_POINTS * np.sqrt(1 - nodes**2)
                density = steps * np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)
                a, b = density[None] @ a, density[None] @ b
            rows.append((a, b))
        return rows

    def errors(self, coefficients: Sequence[float]) -> list[float]:
        """Return the largest ratio of each error to its limit."""
        return [float(np.abs(a @ np.array(coefficients) - b).max()) for a, b in self.rows]

    @cached_property
    def coefficients(self) -> list[float]:
        """The coefficients. Each is a float."""
        a, b = (np.concatenate(parts) for parts in zip(*self.rows, strict=True))
        result = [0.0] * self.terms
        free = list(range(self.terms))
        while free:
            best = minimax(a[:, free], b)
            spacing = np.spacing(np.abs(best).astype(np.float32))
            i = int(np.argmax(spacing * np.abs(a[:, free]).max(axis=0)))
            power = free.pop(i)
            result[power] = float(np.float32(best[i]))
            b = b - a[:, power] * result[power]
        return result


def minimax(a: Array, b: Array) -> Array:
    """Return the x that minimizes the largest component of |a @ x - b|."""
    # In the basis of powers the program is badly conditioned: the columns of q, which are
    # orthogonal polynomials, are the basis. The solver's tolerances are absolute: the unknowns
    # start from least squares, and are scaled so that all numbers are of order 1.
    q, r = np.linalg.qr(a)
    start = q.T @ b
    residual = b - q @ start
    scale, size = np.abs(residual).max(), np.sqrt(len(a))
    ones = np.ones((len(a), 1))
    solution = linprog(
        np.append(np.zeros(len(start)), 1.0),
        A_ub=np.block([[size * q, -ones], [-size * q, -ones]]),
        b_ub=np.append(residual, -residual) / scale,
        bounds=(None, None),
        method="highs",
    )
    if solution.x is None:
        raise RuntimeError(solution.message)
    return np.asarray(np.linalg.solve(r, start + scale * size * solution.x[:-1]))
