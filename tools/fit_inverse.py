"""Make the fits and the constants of csrc/activations/ and csrc/elementary_functions.h.

    python tools/fit_inverse.py            compare the numbers of csrc/ with those of this tool
    python tools/fit_inverse.py --check    the same; fail if a constant is wrong, or a fit worse
    python tools/fit_inverse.py --write    write the numbers into csrc/; `make format` aligns them
    python tools/fit_inverse.py --only silu.gate.16

A fit is a polynomial P of a few terms that the kernels evaluate in place of a function; minimax.py
explains how they are made. Most fits estimate the input x of a smooth activation f(x) = x gate(x)
from its output y, for example as y / P(root): see csrc/inverse.h. What matters is not the error of
P but its consequences. To first order

- x changes by dx = x (P - gate) / gate;
- the derivative at the estimate changes by f''(x) dx;
- a step of Newton's method leaves an error of f'' dx^2 / (2 f') in x. The derivative is then off by
  (f'' dx)^2 / (2 f'), whose root is proportional to dx.

For a new activation, add its gate to ACTIVATIONS and its `default_fits` to `fits`. If an error
exceeds its limit, add terms. `--only NAME` prints the numbers before csrc/ has them. There, the
comment `tools/fit_inverse.py: NAME` marks the array with the numbers of NAME.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import mpmath
import numpy as np
from minimax import Error, Fit, Function, Limit, Target

mp = mpmath.MPContext()
mp.dps = 40  # decimal places; a double has 16
mpf = mp.mpf
Number = Any  # an mpf

CSRC = Path(__file__).parents[1] / "csrc"
TOLERANCE = 1.02  # how much worse a fit of csrc/ may be: solvers differ
FAR_RIGHT = 12.0  # above, the gates are 1, and the fits of the gate are constant


@dataclass(frozen=True)
class Activation:
    """A smooth activation f(x) = x gate(x), with one minimum.

    Attributes:
        name: The prefix of its names in this tool.
        struct: Its entry in csrc/activations/.
        gate: The gate of an mpf, made of functions of `mp`.
        domain: Where f's minimum is, and the extremes of its derivative.
        others: Further constants of the entry, as functions of the activation.
    """

    name: str
    struct: str
    gate: Function
    domain: tuple[int, int] = (-8, 8)
    others: Mapping[str, Callable[[Activation], Number]] = field(default_factory=dict, hash=False)

    def value(self, x: Number) -> Number:
        """Return f(x)."""
        return x * self.gate(x)

    def zeros(self, order: int) -> list[Number]:
        """Return where f's derivative of this order is 0."""

        def derivative(x: Number) -> Number:
            return mp.diff(self.value, x, order)

        points = [mpf(2 * i + 1) / 16 for i in range(8 * self.domain[0], 8 * self.domain[1])]
        return [
            mp.findroot(derivative, (low, high), solver="anderson")
            for low, high in itertools.pairwise(points)
            if derivative(low) * derivative(high) < 0
        ]

    @cached_property
    def minimum(self) -> Number:
        """The x of the minimum."""
        return self.zeros(1)[0]

    @cached_property
    def lowest(self) -> Number:
        """The y of the minimum."""
        return self.value(self.minimum)

    def around_minimum(self, distance: float) -> tuple[float, float]:
        """Return the interval of this distance around the minimum."""
        return float(self.minimum) - distance, float(self.minimum) + distance

    @cached_property
    def constants(self) -> dict[str, Number]:
        """The constants of the entry by name."""
        slopes = [mp.diff(self.value, x) for x in [*map(mpf, self.domain), *self.zeros(2)]]
        return {
            "kMinimumX": self.minimum,
            "kMinimumY": self.lowest,
            "kMinimumYLow": self.lowest - float(self.lowest),
            "kLowestDerivative": min(slopes),
            "kHighestDerivative": max(slopes),
            **{name: constant(self) for name, constant in self.others.items()},
        }

    def value_series(self) -> list[Number]:
        """Return the power series of (f(x_min + d) - y_min) / d^2 in d."""
        return mp.taylor(self.value, self.minimum, 12, chop=False)[2:]

    def inverse_series(self) -> list[Number]:
        """Return the power series of x - x_min in p = +-sqrt(y - y_min), without the term 0.

        By Lagrange's formula the coefficient of p^n is that of d^(n - 1) in (d / p)^n / n.
        """
        series = self.value_series()[::-1]
        return [
            mp.taylor(lambda d, n=n: mp.polyval(series, d) ** (-n / mpf(2)), 0, n - 1)[-1] / n
            for n in range(1, 11)
        ]


class Point(NamedTuple):
    """An x, and the values there."""

    activation: Activation
    x: Number
    y: Number
    gate: Number
    derivative: Number
    second_derivative: Number


@cache
def point(activation: Activation, x: float) -> Point:
    """Return the Point at x."""
    y, first, half = mp.taylor(activation.value, mpf(x), 2, chop=False)
    return Point(activation, mpf(x), y, activation.gate(mpf(x)), first, 2 * half)


# Targets and errors of the estimates of x, and variables of their fits.

GATE = Target(lambda p: p.gate, lambda p: p.x / p.gate)  # the estimate is y / P
X = Target(lambda p: p.x, lambda p: 1)
RECIPROCAL = Target(lambda p: -1 / p.x, lambda p: p.x**2)  # the estimate is -1 / P

CHANGE = Error("x", lambda p: 1)
RELATIVE = Error("x, relative", lambda p: 1 / p.x)
DERIVATIVE = Error("derivative", lambda p: p.second_derivative)
AFTER_NEWTON = Error(
    "derivative after Newton's step, root",
    lambda p: p.second_derivative / mp.sqrt(2 * abs(p.derivative)),
)
# On a CPU, SiLU's derivative gate + y (1 - gate) is computed with the fit as the gate. It must be
# close to the derivative at x, and to that at the estimate, from which recover_core() goes on.
OF_FIT = Error("derivative from the fit", lambda p: (1 - p.y) * p.gate / p.x)
OF_FIT_AT_ESTIMATE = Error(
    "derivative from the fit, at estimate",
    lambda p: (1 - p.y) * p.gate / p.x + p.second_derivative,
)


def signed_root(scale: float, center: float = 0.0) -> Function:
    """Return the function of that name in csrc/inverse.h, minus `center`."""

    def variable(p: Point) -> Number:
        root = mp.sqrt(min((p.y - p.activation.lowest) / scale, 1))
        return (root if p.x > p.activation.minimum else -root) - float(np.float32(center))

    return variable


def log_root(p: Point) -> Number:
    """Return sqrt(ln(y_min / y)): on the left x is nearly linear in it if y falls as exp(-x^2)."""
    return mp.sqrt(mp.log(p.activation.lowest / p.y))


def depth_root(p: Point) -> Number:
    """Return sqrt(x_min - ln(-y)): its square is nearly |x| on the left if y falls as x exp(x)."""
    return mp.sqrt(p.activation.minimum - mp.log(-p.y))


# The fits.


def estimate(f: Activation, kind: str, terms: int, *parts: Any) -> Fit:
    """Return a fit that estimates x, from its variable, its target and its limits."""
    variable, target, *limits = parts
    return Fit(f"{f.name}.{kind}", terms, partial(point, f), variable, target, tuple(limits))


def near_minimum(f: Activation, limit: float) -> list[Limit]:
    """Return a limit where recover_core() of csrc/inverse.h omits Newton's method."""
    return [Limit(DERIVATIVE, limit, *f.around_minimum(0.25))]


def gate_16(f: Activation, scale: float, terms: int, low: float, **limits: float) -> Fit:
    """Return the fit of the gate for the 16-bit formats, for x above `low`."""
    left, right = f.around_minimum(0.2)
    errors = (
        Limit(RELATIVE, limits["relative"], low, FAR_RIGHT),
        Limit(CHANGE, limits["near_minimum"], max(left, low), right),
        Limit(DERIVATIVE, limits["derivative"], low, FAR_RIGHT),
        Limit(DERIVATIVE, 1e-8, low, FAR_RIGHT, is_of_mean=True),
    )
    return estimate(f, "gate.16", terms, signed_root(scale), GATE, *errors)


def gate_32(f: Activation, scale: float, terms: int, near: list[Limit], **limits: float) -> Fit:
    """Return the fit of the gate for float. Newton's method follows where `near` does not hold."""
    low, newton = limits["low"], math.sqrt(limits["newton"])
    errors = (
        *near,
        Limit(RELATIVE, limits["relative"], low, FAR_RIGHT),
        Limit(AFTER_NEWTON, newton, low, near[0].low),
        Limit(AFTER_NEWTON, newton, near[0].high, FAR_RIGHT),
    )
    return estimate(f, "gate.32", terms, signed_root(scale, 0.3), GATE, *errors)


def left_16(f: Activation, low: float) -> Fit:
    """Return the fit of x on GELU's left branch for the 16-bit formats."""
    left, minimum = f.around_minimum(0.2)[0], float(f.minimum)
    errors = (
        Limit(RELATIVE, 0.005, low, minimum),
        Limit(CHANGE, 3e-4, left, minimum),
        Limit(DERIVATIVE, 1.5e-4, low, minimum),
        Limit(DERIVATIVE, 1e-8, low, minimum, is_of_mean=True),
    )
    return estimate(f, "left.16", 6, log_root, X, *errors)


def tail(f: Activation, root: Function, terms: int, **limit: Any) -> Fit:
    """Return the fit of 1 / |x| far left. Its variable is bounded, however large the root is."""
    variable = lambda p: 1 / (root(p) + 2) - mpf(0.234375)  # noqa: E731
    return estimate(f, "tail", terms, variable, RECIPROCAL, Limit(RELATIVE, **limit))


def gelu_fits(f: Activation, low: float, tail_terms: int, tail_limit: float) -> list[Fit]:
    """Return the fits of a form of GELU. Below `low` the kernels limit the root on the left."""
    minimum, scale = float(f.minimum), float(f.constants["kScale"])
    return [
        gate_16(f, 3.5, 6, minimum, relative=0.0048, near_minimum=2.4e-4, derivative=1.6e-4),
        gate_32(f, scale, 11, near_minimum(f, 3e-7), low=-2.0, relative=0.004, newton=4.5e-8),
        left_16(f, low),
        tail(f, log_root, tail_terms, limit=tail_limit, low=low, high=-1.9),
    ]


def default_fits(f: Activation, scale: float) -> list[Fit]:
    """Return the fits of an activation whose y falls as x exp(x) on the left.

    From y = y_min + scale on, the gate is nearly 1.
    """
    return [
        gate_16(f, scale, 8, -4.5, relative=0.009, near_minimum=6.5e-4, derivative=3.2e-4),
        gate_32(f, scale, 12, near_minimum(f, 2.4e-7), low=-4.5, relative=0.004, newton=4e-8),
        tail(f, depth_root, 10, limit=1.1e-6, low=-90.0, high=-4.4),
    ]


def function_fit(name: str, terms: int, result: Function, *parts: Any) -> Fit:
    """Return a fit with which the kernels compute a function, for its relative error."""
    variable, target, *limit = parts
    limits = (Limit(Error("relative", lambda x: 1 / result(x)), *limit),)
    return Fit(name, terms, mpf, variable, target, limits)


def mills(x: Number) -> Number:
    """Return Phi(-x) exp(x^2 / 2), Mills' ratio divided by sqrt(2 pi)."""
    return mp.erfc(x / mp.sqrt(2)) / 2 * mp.exp(x**2 / 2)


def mills_variable(x: Number) -> Number:
    """Return t of csrc/activations/gelu.h."""
    return 1 / (1 + mpf(float(np.float32(0.26))) * x)


EXP = Target(lambda r: (mp.expm1(r) - r) / r**2, lambda r: r**2)
LOG = Target(lambda f: (mp.log1p(f) - f + f**2 / 2) / f**3, lambda f: f**3)
MILLS = Target(mills, lambda x: 1)


def output(x: str) -> Callable[[Activation], Number]:
    """Return the constant that is the output at x."""
    return lambda f: f.value(mpf(x))


Constants = Mapping[str, Callable[[Activation], Number]]
OF_SILU = {"kFitLeftEnd": output("-4.5"), "kLeftEnd": output("-2.2"), "kRightEnd": output("2.6")}
OF_GELU: Constants = {
    "kLogMinimum": lambda f: mp.log(-f.lowest),
    "kScale": lambda f: mpf(mp.nstr(mpf("3.3") - f.lowest, 8)),
}
OF_HARDSWISH: Constants = {"kScale": lambda f: 3 - f.lowest}


def sigmoid(x: Number) -> Number:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + mp.exp(-x))


def gelu_tanh_gate(x: Number) -> Number:
    """Return the gate of GELU's tanh form."""
    return sigmoid(mp.sqrt(8 / mp.pi) * (x + mpf("0.044715") * x**3))


def mish_gate(x: Number) -> Number:
    """Return tanh(ln(1 + exp(x)))."""
    return mp.tanh(mp.log1p(mp.exp(x)))


SILU = Activation("silu", "SiLU", sigmoid, others=OF_SILU)
GELU = Activation("gelu", "GELU", mp.ncdf, others=OF_GELU)
GELU_TANH = Activation("gelu_tanh", "GELUTanh", gelu_tanh_gate, others=OF_GELU)
MISH = Activation("mish", "Mish", mish_gate, others={"kLeftEnd": output("-4.5")})
HARDSWISH = Activation("hardswish", "Hardswish", lambda x: (x + 3) / 6, (-3, 3), OF_HARDSWISH)
ACTIVATIONS = (SILU, GELU, GELU_TANH, MISH, HARDSWISH)


@cache
def fits() -> list[Fit]:
    """Return the fits of csrc/."""
    half = math.log(2) / 2
    near = [Limit(error, 3e-7, -2.2, 2.6) for error in (OF_FIT, OF_FIT_AT_ESTIMATE)]
    return [
        function_fit("exp", 5, mp.exp, mpf, EXP, 4e-9, -half, half),
        function_fit("log", 9, mp.log1p, mpf, LOG, 1e-9, math.expm1(-half), math.expm1(half)),
        function_fit("gelu.mills.16", 8, mills, mills_variable, MILLS, 5e-7, 0.0, 14.0),
        function_fit("gelu.mills.32", 10, mills, mills_variable, MILLS, 1e-8, 0.0, 14.0),
        gate_16(SILU, 5.75, 8, -4.5, relative=0.008, near_minimum=5e-4, derivative=3.2e-4),
        gate_32(SILU, 5.75, 16, near, low=-4.5, relative=0.008, newton=7.5e-8),
        tail(SILU, depth_root, 10, limit=1.1e-6, low=-90.0, high=-4.4),
        *gelu_fits(GELU, low=-13.48, tail_terms=7, tail_limit=1.6e-7),
        *gelu_fits(GELU_TANH, low=-10.29, tail_terms=8, tail_limit=4e-6),
        *default_fits(MISH, scale=5.0),
    ]


# The numbers of csrc/.

NUMBER = r"(?<![\w.])-?\d[\d.]*(?:e[-+]?\d+)?f?(?!\w)"
ARRAY = r"// tools/fit_inverse\.py: {}\n[^;]*?\{{(.*?)\}};"
CONSTANT = r"struct {} :(?:(?!\nstruct ).)*?\b{} = (?:[^,;]*? )?({})(?: : \w+)?[,;]"


@dataclass(frozen=True)
class Item:
    """A constant, the coefficients of a power series or those of a fit.

    Attributes:
        name: Its name for --only.
        pattern: A regular expression; its group is what has the numbers in a header.
        numbers: Makes the numbers. For a power series csrc/ has only the first ones.
        fit: The fit, if it is one.
    """

    name: str
    pattern: str
    numbers: Callable[[], Sequence[Any]]
    fit: Fit | None = None

    def rounded(self, number: Any) -> Any:
        """Return the nearest number of the constant's type, whose str() is the shortest."""
        is_float = self.fit is not None or self.name.endswith("End")
        return np.float32(float(number)) if is_float else float(number)

    def find(self) -> tuple[Path, re.Match[str]] | None:
        """Return the header that has the numbers and the match in it."""
        for path in sorted(CSRC.rglob("*.h")):
            if match := re.search(self.pattern, path.read_text(), re.DOTALL):
                return path, match
        return None

    def compare(self) -> tuple[list[Any], list[Any]]:
        """Return the numbers that csrc/ has, if any, and those that it should have."""
        found = self.find()
        literals = re.findall(NUMBER, found[1][1]) if found else []
        old = [self.rounded(number.rstrip("f")) for number in literals]
        return old, [self.rounded(number) for number in self.numbers()][: len(old) or None]

    def check(self) -> bool:
        """Print the numbers and their errors; return whether those of csrc/ are as good."""
        old, new = self.compare()
        print(f"{self.name} = {', '.join(map(str, new))}")
        if old != new:
            print(f"  csrc/ has {', '.join(map(str, old)) or 'nothing'}")
        if self.fit is None or len(old) != len(new):
            return old == new
        errors = self.fit.errors(old), self.fit.errors(new)
        for limit, *ratios in zip(self.fit.limits, *errors, strict=True):
            name = ("mean of " if limit.is_of_mean else "") + limit.error.description
            sizes = "".join(f"{limit.limit * ratio:10.2g}" for ratio in (1.0, *ratios))
            print(f"    {name:38}{limit.low:7.2f} to {limit.high:5.2f}{sizes}")
        return max(errors[0]) <= min(1.0, TOLERANCE * max(errors[1]))

    def write(self) -> None:
        """Replace the numbers in csrc/."""
        found, (old, new) = self.find(), self.compare()
        if found is not None and old != new:
            path, match = found
            literals = iter(str(x) + "f" * isinstance(x, np.float32) for x in new)
            text = re.sub(NUMBER, lambda _: next(literals), match[1])
            path.write_text(match.string[: match.start(1)] + text + match.string[match.end(1) :])


def items() -> Iterator[Item]:
    """Yield everything that this tool makes."""
    for fit in fits():
        pattern = ARRAY.format(re.escape(fit.name))
        yield Item(fit.name, pattern, partial(getattr, fit, "coefficients"), fit)
    for f in ACTIVATIONS:
        for name, value in f.constants.items():
            pattern = CONSTANT.format(f.struct, name, NUMBER)
            yield Item(f"{f.name}.{name}", pattern, partial(list, [value]))
        if f is not HARDSWISH:  # whose inverse needs no series
            for name, series in (("value", f.value_series), ("inverse", f.inverse_series)):
                yield Item(f"{f.name}.{name}", ARRAY.format(rf"{f.name}\.{name}"), series)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(description="Make the numbers of the smooth activations.")
    parser.add_argument("--only", metavar="NAME", help="one of them, or all that start with NAME")
    parser.add_argument("--check", action="store_true", help="fail if those of csrc/ are worse")
    parser.add_argument("--write", action="store_true", help="write them into csrc/")
    options = parser.parse_args(arguments)
    chosen = [i for i in items() if not options.only or f"{i.name}.".startswith(f"{options.only}.")]
    if not chosen:
        parser.error(f"nothing is called {options.only}")
    if options.write:
        for item in chosen:
            item.write()
    print("Errors between two x: the limit, the largest error of csrc/, and of the new fit")
    wrong = [item.name for item in chosen if not item.check()]
    print(f"To be replaced in csrc/: {', '.join(wrong) or 'none'}")
    return int(options.check and bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
