"""Runs from several seeds: their spread, and their differences from PyTorch with the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

BASELINE = "torch in place"
CASE = ("network", "precision", "variant")


@dataclass
class Paired:
    """A column's values in the runs of a case and in PyTorch's runs, paired by seed."""

    values: list[float]
    pytorchs: list[float]

    @property
    def differences(self) -> list[float]:
        """The differences from PyTorch's values, seed by seed."""
        return [ours - theirs for ours, theirs in zip(self.values, self.pytorchs, strict=True)]

    @property
    def is_unchanged(self) -> bool:
        """Whether the means differ no more than two runs of PyTorch usually do.

        The limit is two standard deviations over PyTorch's seeds, of which at least two are needed.
        """
        return abs(mean(self.differences)) <= 2 * stdev(self.pytorchs)

    def cell(self, form: str, difference_form: str, scale: float = 1) -> str:
        """Return mean ± standard deviation over the seeds, and the same of the differences."""

        def spread(values: list[float], form: str, sign: str = "") -> str:
            scaled = [scale * value for value in values]
            plus_minus = f" ± {stdev(scaled):{form}}" if len(scaled) > 1 else ""
            return f"{mean(scaled):{sign}{form}}{plus_minus}"

        differ = any(self.differences)
        difference = spread(self.differences, difference_form, "+") if differ else "equal"
        return f"{spread(self.values, form)} ({difference})"


def paired(rows: Sequence[dict[str, Any]], column: str, case: dict[str, str]) -> Paired:
    """Return a column's values in the rows of a case, paired with those of `BASELINE`."""

    def values(wanted: dict[str, str]) -> list[float]:
        chosen = [row for row in rows if all(row[key] == wanted[key] for key in CASE)]
        return [float(row[column]) for row in sorted(chosen, key=lambda row: int(row["seed"]))]

    return Paired(values(case), values({**case, "variant": BASELINE}))


def cases(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return each combination of network, precision and variant once, in order."""
    found = dict.fromkeys(tuple(row[key] for key in CASE) for row in rows)
    return [dict(zip(CASE, case, strict=True)) for case in found]


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a table of saved bytes, gradients, test accuracy and loss; the header comes first."""
    seeds = len({row["seed"] for row in rows})
    header = [f"{rows[0]['epochs']} epochs, {seeds} seeds (difference from {BASELINE})"]
    for precision in dict.fromkeys(row["precision"] for row in rows):
        columns = ("saved over PyTorch's", "gradient off by", "test accuracy, %", "test loss")
        header += [f"{column}, {precision}" for column in columns]
    body: dict[str, list[str]] = {}
    for case in cases(rows):
        name = f"{case['network']}: {case['variant']}"
        saved = paired(rows, "saved_bytes", case)
        line = body.setdefault(name, [name])
        line.append(f"{saved.values[0] / saved.pytorchs[0]:.3f}")
        line.append(f"{paired(rows, 'gradient_off_by', case).values[0]:.0e}")
        line.append(paired(rows, "test_accuracy", case).cell(".2f", ".2f", 100))
        line.append(paired(rows, "test_loss", case).cell(".4f", ".0e"))
    return [header, *body.values()]
