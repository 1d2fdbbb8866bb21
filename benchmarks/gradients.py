"""Whether gradients are the original's: one criterion for all networks and variants.

A gradient is wrong if rounding does not explain its distance from the original's (see `Limits`),
if the original's own gradients are the same in a repeated step, and if, under autocast, a rounding
of the weights changes them by less than their norm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Slack(NamedTuple):
    """How much larger the limits are for a variant that rounds elsewhere: see `Limits`.

    Attributes:
        factor: What all limits are multiplied by.
        rounds_in_float32: Whether the variant rounds elsewhere in float32 too.
    """

    factor: float = 1.0
    rounds_in_float32: bool = False


NO_SLACK, SLACK_OF_MODULES = Slack(), Slack(16.0)
SLACK_OF_TOOLS = Slack(4.0, rounds_in_float32=True)


class Limits(NamedTuple):
    """Allowed distances of gradients from the original's, over the norm of all gradients.

    In float32: for all gradients together 1e-5; for one tensor 1e-4 of its own norm plus 1e-6 of
    the norm of all. If a rounding of the weights changes the original's gradients by more than ten
    times that, the limits are a tenth of that change. In 16 bits the limits depend on how far the
    original's gradients are from its gradients in float32: for all together half of that distance,
    at least 1e-5 and at most 5e-2; for one tensor that tensor's distance plus 1e-3. If that
    distance, or in either policy the change by a rounding of the weights, is larger than the norm
    of all gradients, gradients over a limit are not wrong but noise.

    For variants that round elsewhere all limits are larger, and 5e-2 is none:

    - Four times for compiled code, which rounds nothing to 16 bits between the operations that it
      fuses, and for a loss in chunks, which rounds the gradients of each chunk. Both also add up
      float32 numbers in another order in every layer. So in float32 the limits also depend on how
      far the original's gradients are from its gradients in float64, and a change by a rounding of
      the weights counts as a whole. The limits of single tensors grow with that of all together.
    - 16 times for this package's modules, whose derivatives have documented errors.

    Attributes:
        overall: The limit for all gradients together.
        tensors: The limit for each tensor, by name.
        rounding: The distance of the original's gradients from those in float32.
    """

    overall: float
    tensors: dict[str, float]
    rounding: float


def norms_of(tensors: Gradients) -> Norms:
    """Return each tensor's norm in float64."""
    return {name: float(t.norm(dtype=torch.float64)) for name, t in tensors.items()}


def norm_of(norms: Norms) -> float:
    """Return the norm of all tensors together, from the norm of each."""
    return float(sum(norm**2 for norm in norms.values()) ** 0.5)


def distances(actual: Gradients, expected: Gradients) -> Norms:
    """Return the norm of each tensor's difference; raise if the names differ."""
    if actual.keys() != expected.keys():
        raise WrongGradientError(f"only one side has {sorted(actual.keys() ^ expected.keys())}")
    return norms_of({name: actual[name] - expected[name] for name in actual})


def gradients_of(model: nn.Module) -> Gradients:
    """Return the gradients of the parameters that have one, by name, and reset them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()  # sets them to None
    return found


class Reference(NamedTuple):
    """The original's gradients, which a variant's are compared with.

    Attributes:
        model: The original.
        run: Runs a step of a model, always with the same random numbers.
        gradients: The original's gradients.
        in_float32: The same in float32; None if `gradients` are.
        in_float64: Returns the same in float64. Only variants that round elsewhere in float32 need
            it.
        slack: How much larger the limits are.
    """

    model: nn.Module
    run: Callable[[nn.Module], Any]
    gradients: Gradients
    in_float32: Gradients | None = None
    in_float64: Callable[[], Gradients] | None = None
    slack: Slack = NO_SLACK

    def verify(self, actual: Gradients) -> tuple[float, float]:
        """Return the distance of a variant's gradients over their norm, and the limit.

        Raises:
            WrongGradientError: If a distance is above its limit.
            ArithmeticError: If the original's gradients are zero, not finite or noise.
        """
        try:
            return self._compare(actual)
        except WrongGradientError:
            self._check_steady(actual)
            changes = self._changes_by_rounding()
            if self.in_float32 is not None:
                raise
            if self.slack.rounds_in_float32:
                assert self.in_float64 is not None
                roundings = distances(self.gradients, self.in_float64())
                largest = {name: max(d, changes[name]) for name, d in roundings.items()}
                return self._compare(actual, largest)
            return self._compare(actual, {name: change / 10 for name, change in changes.items()})

    def _compare(self, actual: Gradients, allowed: Norms | None = None) -> tuple[float, float]:
        limits, total = self._limits(allowed or {}), self._norm()
        off = {name: d / total for name, d in distances(actual, self.gradients).items()}
        overall = norm_of(off)
        if not overall <= limits.overall:
            if limits.rounding > 1:
                raise NoiseError(
                    f"off by {overall:.1e}, but autocast itself changes the gradients by "
                    f"{limits.rounding:.1e} times their norm"
                )
            raise WrongGradientError(f"off by {overall:.1e}, allowed: {limits.overall:.1e}")
        for name, distance in off.items():
            if not distance <= limits.tensors[name]:
                raise WrongGradientError(
                    f"{name} off by {distance:.1e} of the norm of all gradients"
                )
        return overall, limits.overall

    def _limits(self, allowed: Norms) -> Limits:
        """Return the limits; in float32 at least what rounding allows each gradient."""
        total, factor = self._norm(), self.slack.factor
        if self.in_float32 is None:
            rounding, overall = 0.0, max(1e-5, norm_of(allowed) / total)
            scale = overall / 1e-5 if self.slack.rounds_in_float32 else 1.0
            tensors = {
                name: max(scale * (1e-4 * norm / total + 1e-6), allowed.get(name, 0.0) / total)
                for name, norm in norms_of(self.gradients).items()
            }
        else:
            roundings = distances(self.gradients, self.in_float32)
            rounding = norm_of(roundings) / total
            overall = min(max(1e-5, rounding / 2), 5e-2 if self.slack == NO_SLACK else math.inf)
            tensors = {name: off / total + 1e-3 for name, off in roundings.items()}
        tensors = {name: factor * limit for name, limit in tensors.items()}
        return Limits(factor * overall, tensors, rounding)

    def _norm(self) -> float:
        """Return the norm of all gradients; raise unless it is finite and positive."""
        total = norm_of(norms_of(self.gradients))
        if not (total > 0 and math.isfinite(total)):
            raise ArithmeticError(f"the gradients of the original have a norm of {total}")
        return total

    def _check_steady(self, actual: Gradients) -> None:
        """Compare again without the gradients that differ between runs of the original.

        Raise NoiseError if there are such gradients and the others agree.
        """
        steady = set(self.gradients)
        again = copy.deepcopy(self.model)  # a step changes buffers
        for _ in range(REPEATED):
            self.run(again)
            repeated = gradients_of(again)
            steady = {name for name in steady if torch.equal(self.gradients[name], repeated[name])}
        if varying := self.gradients.keys() - steady:
            others, gradients, in_float32 = (
                g and {name: g[name] for name in steady}
                for g in (actual, self.gradients, self.in_float32)
            )
            if steady:
                self._replace(gradients=gradients, in_float32=in_float32)._compare(others)
            raise NoiseError(f"runs of the original differ in {', '.join(sorted(varying))}")

    def _changes_by_rounding(self) -> Norms:
        """Return how a rounding of the weights changes each gradient; raise if in all digits."""
        rounded = copy.deepcopy(self.model)
        round_weights(rounded)
        self.run(rounded)
        changes = distances(gradients_of(rounded), self.gradients)
        if (change := norm_of(changes) / self._norm()) > 1:
            raise NoiseError(
                f"weights off by {ROUNDING:.0e} change the gradients by {change:.1e} times their "
                "norm"
            )
        return changes
