"""Whether gradients are the original's: one criterion for all networks and variants.

A gradient is wrong if rounding does not explain its distance from the original's (see `Limits`),
if the original's own gradients are the same in a repeated step, and if, under autocast, a rounding
of the weights changes them by less than their norm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from common import ROUNDING, round_weights
from torch import Tensor, nn

REPEATED = 3  # runs of the original, where a variant's gradients differ

Gradients = dict[str, Tensor]
Norms = dict[str, float]  # of each gradient, or of its distance from another one


class WrongGradientError(AssertionError):
    """A variant trains differently from the original."""


class NoiseError(ArithmeticError):
    """The original's gradients have no correct digit, so they cannot be compared."""


class Limits(NamedTuple):
    """Allowed distances of gradients from the original's, over the norm of all gradients.

    In float32: for all gradients together 1e-5; for one tensor 1e-4 of its own norm plus 1e-6 of
    the norm of all. If a rounding of the weights changes the original's gradients by more than ten
    times that, the limits are a tenth of that change. In 16 bits the limits depend on how far the
    original's gradients are from its gradients in float32: for all together half of that distance,
    at least 1e-5 and at most 5e-2; for one tensor that tensor's distance plus 1e-3. If that
    distance, or in either policy the change by a rounding of the weights, is larger than the norm
    of all gradients, gradients over a limit are not wrong but noise.

    For compiled code all limits are four times as large: it does not round to 16 bits between the
    operations that it fuses, and adds in another order.

    Attributes:
        overall: The limit for all gradients together.
        tensors: The limit for each tensor, by name.
        rounding: The distance of the original's gradients from those in float32.
    """

    overall: float
    tensors: dict[str, float]
    rounding: float


def finite_norms(gradients: Gradients) -> Norms:
    """Return each tensor's norm in float64; raise unless that of all is finite and positive."""
    norms = {name: float(g.norm(dtype=torch.float64)) for name, g in gradients.items()}
    total = norm_of(norms)
    if not (total > 0 and math.isfinite(total)):
        raise ArithmeticError(f"the gradients of the original have a norm of {total}")
    return norms


def norm_of(norms: Norms) -> float:
    """Return the norm of all tensors together, from the norm of each."""
    return float(sum(norm**2 for norm in norms.values()) ** 0.5)


def distances(actual: Gradients, expected: Gradients) -> Norms:
    """Return the norm of each tensor's difference; raise if the names differ."""
    if actual.keys() != expected.keys():
        raise WrongGradientError(f"only one side has {sorted(actual.keys() ^ expected.keys())}")
    return {
        name: float((actual[name] - expected[name]).norm(dtype=torch.float64)) for name in actual
    }


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients of the parameters that have one, by name, and reset them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()  # sets them to None
    return found


def verified(
    actual: Gradients,
    expected: Gradients,
    in_float32: Gradients | None,
    original: nn.Module,
    run: Callable[[nn.Module], None],
    slack: float = 1.0,
) -> tuple[float, Limits]:
    """Return the distance of a variant's gradients over their norm, and the limits.

    Args:
        actual: The variant's gradients.
        expected: The original's.
        in_float32: The original's in float32; None if `expected` are in float32 themselves.
        original: The original.
        run: Runs the step of a model, always with the same random numbers.
        slack: What all limits are multiplied by.

    Raises:
        WrongGradientError: If a distance is above its limit.
        ArithmeticError: If the original's gradients are zero, not finite or noise.
    """
    try:
        return compared(actual, expected, in_float32, slack=slack)
    except WrongGradientError:
        check_steady(run, original, actual, expected, in_float32, slack)
        rounded = gradients_of_rounded(run, original)
        check_conditioned(rounded, expected)
        if in_float32 is not None:
            raise
        return compared(actual, expected, None, rounded, slack)


def compared(
    actual: Gradients,
    expected: Gradients,
    in_float32: Gradients | None,
    rounded: Gradients | None = None,
    slack: float = 1.0,
) -> tuple[float, Limits]:
    """Return the distance of all gradients over their norm, and the limits; raise if over one.

    The arguments are those of `verified`, and the original's gradients in float32 with rounded
    weights, if the limits depend on them.
    """
    norms = finite_norms(expected)
    total = norm_of(norms)
    if in_float32 is None:
        rounding, changes = 0.0, {} if rounded is None else distances(rounded, expected)
        overall = max(1e-5, norm_of(changes) / total / 10)
        tensors = {
            name: max(1e-4 * norm + 1e-6 * total, changes.get(name, 0.0) / 10) / total
            for name, norm in norms.items()
        }
    else:
        roundings = distances(expected, in_float32)
        rounding = norm_of(roundings) / total
        overall = min(max(1e-5, rounding / 2), 5e-2)
        tensors = {name: off / total + 1e-3 for name, off in roundings.items()}
    tensors = {name: slack * limit for name, limit in tensors.items()}
    limits = Limits(slack * overall, tensors, rounding)
    return compare(distances(actual, expected), total, limits), limits


def check_steady(
    run: Callable[[nn.Module], None],
    original: nn.Module,
    actual: Gradients,
    expected: Gradients,
    in_float32: Gradients | None,
    slack: float,
) -> None:
    """Compare again without the gradients that differ between runs of the original.

    Raise NoiseError if there are such gradients and the others agree.
    """
    steady = set(expected)
    again = copy.deepcopy(original)  # a step changes buffers
    for _ in range(REPEATED):
        run(again)
        repeated = gradients_of(again)
        steady = {name for name in steady if torch.equal(expected[name], repeated[name])}
    if varying := expected.keys() - steady:
        others = [g and {name: g[name] for name in steady} for g in (actual, expected, in_float32)]
        if steady:
            compared(*others, slack=slack)
        raise NoiseError(f"runs of the original differ in {', '.join(sorted(varying))}")


def gradients_of_rounded(run: Callable[[nn.Module], None], original: nn.Module) -> Gradients:
    """Return the gradients of a copy of the original whose weights are rounded."""
    rounded = copy.deepcopy(original)
    round_weights(rounded)
    run(rounded)
    return gradients_of(rounded)


def check_conditioned(rounded: Gradients, expected: Gradients) -> None:
    """Raise NoiseError if a rounding of the weights changes all digits of the gradients."""
    norm = norm_of(finite_norms(expected))
    change = norm_of(distances(rounded, expected)) / norm
    if change > 1:
        raise NoiseError(
            f"weights off by {ROUNDING:.0e} change the gradients by {change:.1e} times their norm"
        )


def compare(off: Norms, total: float, limits: Limits) -> float:
    """Return the distance of all gradients over their norm `total`; raise if it is over a limit."""
    overall = norm_of(off) / total
    if not overall <= limits.overall:
        if limits.rounding > 1:
            raise NoiseError(
                f"off by {overall:.1e}, but autocast itself changes the gradients by "
                f"{limits.rounding:.1e} times their norm"
            )
        raise WrongGradientError(f"off by {overall:.1e}, allowed: {limits.overall:.1e}")
    for name, distance in off.items():
        if not distance / total <= limits.tensors.get(name, 0.0):
            raise WrongGradientError(
                f"{name} off by {distance / total:.1e} of the norm of all gradients"
            )
    return overall
