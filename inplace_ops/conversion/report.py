"""What `convert` reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Of each table, when printed: what is more than that, or smaller, is in one row.
_ROWS = 16
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True)
class Replaced:
    """A saved tensor that is recomputed in backward, or stored smaller.

    Attributes:
        producer: The operation whose output it is, for example "Silu".
        consumer: The operation that saves it, for example "Convolution".
        module: The path of the module that ran the consumer.
        bytes: The size of its memory; several saved tensors in the same memory count once.
        how: How backward gets it: "recomputed", "1 bit per element", "stored as bfloat16", ...
    """

    producer: str
    consumer: str
    module: str
    bytes: int
    how: str


@dataclass(frozen=True)
class Remaining:
    """A tensor that is saved for backward as PyTorch saves it.

    Attributes:
        producer: The operation whose output it is.
        consumer: The operation that saves it.
        module: The path of the module that ran the consumer.
        bytes: The size of its memory; several saved tensors in the same memory count once.
        reason: Why it is not recomputed.
    """

    producer: str
    consumer: str
    module: str
    bytes: int
    reason: str


@dataclass
class Report:
    """What a converted model saves for backward. Prints as a table.

    Without an example it is empty until the model has run forward once with gradients.

    Attributes:
        saved_bytes_before: Bytes that the model as it was saves for backward, besides parameters,
            buffers and arguments; None until known.
        saved_bytes_after: The same of the converted model.
        peak_bytes_before: The most bytes that a forward and backward pass of the model as it was
            allocates at one time; None without an example.
        peak_bytes_after: The same of the converted model.
        replaced: The saved tensors that are recomputed or stored smaller, largest first.
        remaining: The tensors that are saved, largest first, with the reason.
    """

    saved_bytes_before: int | None = None
    saved_bytes_after: int | None = None
    peak_bytes_before: int | None = None
    peak_bytes_after: int | None = None
    replaced: list[Replaced] = field(default_factory=list)
    remaining: list[Remaining] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        """Whether the model has run."""
        return self.saved_bytes_after is not None

    def fill(self, replaced: Iterable[Replaced], remaining: Iterable[Remaining]) -> None:
        """Take over what a run has shown."""
        self.replaced = sorted(replaced, key=lambda row: -row.bytes)
        self.remaining = sorted(remaining, key=lambda row: -row.bytes)

    @property
    def recompute_bytes(self) -> int:
        """Bytes that are saved to recompute from: scales, shifts, masks, copies of parameters."""
        return max(0, (self.saved_bytes_after or 0) - sum(row.bytes for row in self.remaining))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as dicts, lists, strings and numbers, as JSON takes them."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.is_filled:
            return "converted; the report is filled in by the first forward pass with gradients"
        lines = [
            _table(
                ("MiB", "original", "converted", "ratio"),
                [
                    _totals("saved for backward", self.saved_bytes_before, self.saved_bytes_after),
                    _totals(
                        "peak of forward and backward",
                        self.peak_bytes_before,
                        self.peak_bytes_after,
                    ),
                ],
            )
        ]
        columns = ("MiB", "tensors", "produced by", "saved by")
        if self.replaced:
            lines.append("\nno longer saved:")
            rows = [(r.bytes, r.module, r.producer, r.consumer, r.how) for r in self.replaced]
            lines.append(_grouped((*columns, "instead", "in"), rows))
        if self.remaining:
            lines.append("\nstill saved:")
            kept = [(r.bytes, r.module, r.producer, r.consumer, r.reason) for r in self.remaining]
            lines.append(_grouped((*columns, "why", "in"), kept))
        if self.recompute_bytes:
            size = mib(self.recompute_bytes)
            lines.append(f"\nsaved to recompute from (scales, shifts, masks): {size} MiB")
        return "\n".join(lines)


def _totals(name: str, before: int | None, after: int | None) -> tuple[str, ...]:
    ratio = f"{after / before:.2f}" if before and after is not None else "?"
    return (name, mib(before), mib(after), ratio)


def _grouped(header: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> str:
    """Return a table of the rows (bytes, module, *kind), those of one kind in one line."""
    groups: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for row in rows:
        groups.setdefault(row[2:], []).append(row)
    ordered = sorted(groups.items(), key=lambda item: -sum(row[0] for row in item[1]))
    smallest = _SMALLEST_SHARE * sum(row[0] for row in rows)
    shown = [item for item in ordered if sum(row[0] for row in item[1]) >= smallest][:_ROWS]
    lines = []
    for kind, members in shown:
        modules = list(dict.fromkeys(row[1] for row in members))
        where = modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
        size = mib(sum(row[0] for row in members))
        lines.append((size, str(len(members)), *kind, where))
    rest = [row for _, members in ordered[len(shown) :] for row in members]
    if rest:
        blank = ("",) * (len(header) - 3)
        lines.append((mib(sum(row[0] for row in rest)), str(len(rest)), "smaller rows", *blank))
    return _table(header, lines)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return columns of equal width, numbers to the right, with a rule below the header."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        return "  ".join(
            cell.rjust(width) if rows and _is_number(row_cell) else cell.ljust(width)
            for cell, width, row_cell in zip(cells, widths, rows[0], strict=True)
        ).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows)])


def _is_number(text: str) -> bool:
    return text.replace(".", "").isdigit() or text == "?"


def mib(count: int | None) -> str:
    """Return a count of bytes in MiB."""
    return "?" if count is None else f"{count / 2**20:.3f}"
