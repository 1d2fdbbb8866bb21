"""The report of `convert`: what is recomputed, what stays saved, and how large it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from .plot import Saved, plot

# A printed table has at most this many rows, each with at least this share of the table's bytes.
# One last row sums up the rest.
_MAX_ROWS = 16
_MIN_SHARE = 0.01
_MUCH_LESS = 0.5  # of what is saved less: where the peak falls by less, a line says why


@dataclass(frozen=True)
class Replaced:
    """A saved tensor that is recomputed in backward, or stored smaller.

    Attributes:
        producer: The operation that computed the tensor, for example "SiLU".
        consumer: The operation that saves the tensor, for example "Convolution".
        module: The path of the module that ran the consumer.
        bytes: The size of the tensor's storage. Saved tensors that share a storage count once.
        how: How backward gets the tensor: "recomputed", "1 bit per element", "stored as bfloat16",
            ...
        ordinal: The consumer's place among the operations of forward, from 0 on.
    """

    producer: str
    consumer: str
    module: str
    bytes: int
    how: str
    ordinal: int


@dataclass(frozen=True)
class Remaining:
    """A tensor that is saved for backward as PyTorch saves it.

    Attributes:
        producer: The operation that computed the tensor.
        consumer: The operation that saves the tensor, or "checkpoint" if a checkpoint does.
        module: The path of the module that ran the consumer, or a checkpoint's first operation.
        bytes: The size of the tensor's storage. Saved tensors that share a storage count once.
        reason: Why the tensor is not recomputed.
        ordinal: The consumer's place among the operations of forward, from 0 on.
    """

    producer: str
    consumer: str
    module: str
    bytes: int
    reason: str
    ordinal: int


@dataclass(frozen=True)
class Auxiliary:
    """A tensor that only the converted model saves, to recompute others: a scale, shift or mask.

    Attributes:
        consumer: The operation that reads the recomputed tensor.
        module: The path of the module that ran the consumer.
        bytes: The size of the tensor's storage.
        ordinal: The consumer's place among the operations of forward, from 0 on.
    """

    consumer: str
    module: str
    bytes: int
    ordinal: int


@dataclass(frozen=True)
class Candidate:
    """A way to convert a model that a search for a budget has measured.

    Attributes:
        max_ops: The argument of `convert`.
        checkpointed: The paths of the blocks that are checkpointed.
        saved_bytes: The bytes that the model saves for backward; None if memory ran out.
        peak_bytes: The peak bytes of forward and backward; None if memory ran out.
        flops: The floating point operations of the products in a step; None if memory ran out, and
            if they cannot be counted.
        seconds: The time of the fastest of three steps; None if memory ran out.
        is_chosen: Whether the model is converted like this: the fastest one that fits.
    """

    max_ops: int
    checkpointed: tuple[str, ...]
    saved_bytes: int | None
    peak_bytes: int | None
    flops: int | None
    seconds: float | None
    is_chosen: bool = False


@dataclass
class Report:
    """A report of what a converted model saves for backward. Prints as a table.

    Without an example the report is empty until the model has run forward once with gradients.

    Attributes:
        model: The name of the model's class; empty until known.
        inputs: The dtypes and shapes that it was called with, for example
            "float32[2, 3, 224, 224]".
        saved_bytes_before: Bytes that the original model saves for backward, without parameters,
            buffers and arguments; None until known.
        saved_bytes_after: Bytes that the converted model saves for backward, counted alike.
        peak_bytes_before: The most bytes that a forward and backward pass of the original model
            allocates at one time; None without an example.
        peak_bytes_after: The peak bytes of the converted model.
        gradient_bytes: The bytes of the gradients of parameters and arguments; None without an
            example.
        flops: The floating point operations of the products in a forward and backward pass of the
            original model; None without an example, and if they cannot be counted.
        recompute_flops: Those of the products that backward recomputes.
        memory_limit: The budget in bytes; None without a budget.
        parameter_bytes: The bytes of the parameters, with a budget.
        trainable_bytes: Those of the parameters that require a gradient.
        buffer_bytes: The bytes of the buffers, with a budget.
        remarks: Why a number is unknown.
        replaced: The saved tensors that are recomputed or stored smaller, largest first.
        remaining: The tensors that stay saved, largest first, with the reason.
        auxiliary: The tensors that are saved only to recompute from, largest first.
        candidates: What was measured to choose by the budget, in this order; empty without one.
    """

    model: str = ""
    inputs: str = ""
    saved_bytes_before: int | None = None
    saved_bytes_after: int | None = None
    peak_bytes_before: int | None = None
    peak_bytes_after: int | None = None
    gradient_bytes: int | None = None
    flops: int | None = None
    recompute_flops: int = 0
    memory_limit: int | None = None
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    buffer_bytes: int = 0
    remarks: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    remaining: list[Remaining] = field(default_factory=list)
    auxiliary: list[Auxiliary] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        """Whether a run of the model has filled in the report."""
        return self.saved_bytes_after is not None

    def fill(
        self,
        replaced: Iterable[Replaced],
        remaining: Iterable[Remaining],
        auxiliary: Iterable[Auxiliary],
    ) -> None:
        """Fill in the lists, sorted by size, and the saved bytes."""
        self.replaced = sorted(replaced, key=lambda row: -row.bytes)
        self.remaining = sorted(remaining, key=lambda row: -row.bytes)
        self.auxiliary = sorted(auxiliary, key=lambda row: -row.bytes)
        saved = sum(row.bytes for row in self.remaining)
        self.saved_bytes_before = saved + sum(row.bytes for row in self.replaced)
        self.saved_bytes_after = saved + sum(row.bytes for row in self.auxiliary)

    @property
    def recompute_bytes(self) -> int:
        """The bytes of what is saved only to recompute from: scales, shifts, masks, parameters."""
        return sum(row.bytes for row in self.auxiliary)

    @property
    def unlisted_bytes(self) -> int:
        """The saved bytes that the lists do not have, as PyTorch does not show the saved tensors.

        In-place operations on views hide theirs, and so do functions in C++.
        """
        listed = sum(row.bytes for row in self.remaining) + self.recompute_bytes
        return max(0, (self.saved_bytes_after or 0) - listed)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as nested dicts, lists, strings and numbers, ready for JSON."""
        return asdict(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the bytes saved over the forward pass, before and after, by part of the model.

        Each operation of forward adds what it saves. The height at the end is what the model saves
        for backward; a color is a part of the model, such as a stage of a ResNet.

        Args:
            path: The file to write, of any format that matplotlib knows by its suffix.

        Raises:
            ImportError: If matplotlib is not installed.
            RuntimeError: If the report is not filled in yet.
        """
        before, after = self.saved_bytes_before, self.saved_bytes_after
        if after is None:
            raise RuntimeError("the report is empty: run the model forward once with gradients")
        share = f": {after / before:.0%} stays saved" if before else ""
        sides: dict[str, list[Saved]] = {
            "original": [*self.replaced, *self.remaining],
            "converted": [*self.remaining, *self.auxiliary],
        }
        plot(sides, f"{self.model}, {self.inputs}{share}", path)

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
            ),
            *self._remarks(),
            *self._candidates(),
        ]
        columns = ("MiB", "tensors", "produced by", "saved by")
        if self.replaced:
            lines.append("\nno longer saved:")
            rows = [_Row(r.bytes, r.module, (r.producer, r.consumer, r.how)) for r in self.replaced]
            lines.append(_grouped((*columns, "instead", "in"), rows))
        if self.remaining:
            lines.append("\nstill saved:")
            rows = [
                _Row(r.bytes, r.module, (r.producer, r.consumer, r.reason)) for r in self.remaining
            ]
            lines.append(_grouped((*columns, "why", "in"), rows))
        if self.recompute_bytes:
            size = mib(self.recompute_bytes)
            lines.append(f"\nsaved to recompute from (scales, shifts, masks): {size} MiB")
        if self.recompute_flops:
            lines.append(f"\nproducts that backward recomputes: {self._recompute_flops()}")
        if self.unlisted_bytes >= _MIN_SHARE * (self.saved_bytes_after or 0) > 0:
            size = mib(self.unlisted_bytes)
            lines.append(
                f"\nsaved by operations whose saved tensors PyTorch does not show: {size} MiB"
            )
        return "\n".join(lines)

    def _candidates(self) -> list[str]:
        """Return the table of candidates, and what a training step allocates besides its peak."""
        if not self.candidates:
            return []
        header = ("max_ops", "checkpoints", "saved MiB", "peak MiB", "GFLOP", "seconds", "")
        rows = [
            (
                str(each.max_ops),
                str(len(each.checkpointed)),
                mib(each.saved_bytes),
                mib(each.peak_bytes),
                "?" if each.flops is None else f"{each.flops / 1e9:.3f}",
                "?" if each.seconds is None else f"{each.seconds:.3f}",
                "chosen" if each.is_chosen else "",
            )
            for each in self.candidates
        ]
        return [
            f"\nmeasured for {self.inputs}, with a budget of {mib(self.memory_limit)} MiB for the "
            "peak of forward and backward:",
            _table(header, rows),
            f"\nbesides the peak: parameters {mib(self.parameter_bytes)} MiB, buffers "
            f"{mib(self.buffer_bytes)} MiB; Adam would add {mib(2 * self.trainable_bytes)} MiB",
        ]

    def _recompute_flops(self) -> str:
        text = f"{self.recompute_flops / 1e9:.3f} GFLOP"
        return (
            f"{text}, {self.recompute_flops / self.flops:.1%} of a step's" if self.flops else text
        )

    def _remarks(self) -> list[str]:
        """Return why a number is unknown, and why the peak falls less than what is saved."""
        remarks = [*self.remarks]
        if not remarks and not self.saved_bytes_before:
            remarks.append("nothing is saved besides parameters, buffers and arguments")
        if not remarks and self.peak_bytes_before is None:
            remarks.append("peaks are measured with an example only")
        return [f"\n{remark}" for remark in (*remarks, *self._rest_of_peak())]

    def _rest_of_peak(self) -> list[str]:
        """Return what the converted model's peak consists of, if it falls much less than expected.

        At the peak not all saved tensors and gradients need to be allocated: their bytes are upper
        bounds, so what remains is a lower bound.
        """
        saved, peak = self.saved_bytes_after, self.peak_bytes_after
        if saved is None or peak is None or self.gradient_bytes is None:
            return []
        saved_less = (self.saved_bytes_before or 0) - saved
        peak_less = (self.peak_bytes_before or 0) - peak
        rest = peak - saved - self.gradient_bytes
        if saved_less <= 0 or peak_less >= _MUCH_LESS * saved_less or rest <= 0:
            return []
        return [
            f"of the converted peak at most {mib(saved)} MiB are saved for backward and at most "
            f"{mib(self.gradient_bytes)} MiB gradients of parameters and arguments; at least "
            f"{mib(rest)} MiB are outputs and temporary tensors of single operations"
        ]


class _Row(NamedTuple):
    """A tensor in a printed table. Tensors of one kind share a line."""

    bytes: int
    module: str
    kind: tuple[str, ...]


def _total_bytes(rows: Iterable[_Row]) -> int:
    return sum(row.bytes for row in rows)


def _totals(name: str, before: int | None, after: int | None) -> tuple[str, ...]:
    ratio = f"{after / before:.2f}" if before and after is not None else "?"
    return (name, mib(before), mib(after), ratio)


def _grouped(header: tuple[str, ...], rows: Sequence[_Row]) -> str:
    """Return a table with one line for each kind of rows, the largest first."""
    groups: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    ordered = sorted(groups.values(), key=_total_bytes, reverse=True)
    smallest = _MIN_SHARE * _total_bytes(rows)
    shown = [group for group in ordered if _total_bytes(group) >= smallest][:_MAX_ROWS]
    lines = []
    for group in shown:
        modules = list(dict.fromkeys(row.module for row in group))
        where = modules[0] if len(modules) == 1 else f"{modules[0]} and {len(modules) - 1} more"
        lines.append((mib(_total_bytes(group)), str(len(group)), *group[0].kind, where))
    rest = [row for group in ordered[len(shown) :] for row in group]
    if rest:
        blank = ("",) * (len(header) - 3)
        lines.append((mib(_total_bytes(rest)), str(len(rest)), "smaller rows", *blank))
    return _table(header, lines)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows as aligned columns below a header and a rule, with numbers to the right."""
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
