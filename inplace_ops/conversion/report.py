"""What `convert` and `analyze` found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# With more sites than these a summary by reason comes before their list.
_MANY = 16


@dataclass(frozen=True)
class Site:
    """One place of a model that calls an activation, or one of several calls of such a place.

    Attributes:
        name: The path of the module that holds the activation and the activation's name in it, or,
            for calls of a function, the path of the module that calls it and the function's name.
        activation: The kind of activation, for example "SiLU".
        converted: Whether it is put in place.
        reason: Why not; or, where converted, why this is what it saves. For a function, what to
            write instead, and where.
        save: What it saves for backward: "output", "mask", "derivative" or, as it follows from the
            input of a norm, nothing: "recompute"; None if not converted.
        bytes_before: Bytes that PyTorch's activation holds for backward, in place or out of place,
            whichever is less, beyond what the other operations hold anyway.
        bytes_after: The same with the decision taken.
        calls: How often it was called in the run.
        call: The line of code that calls it, "models/unet.py:83", where a module's calls are
            decided line by line; else None.
        advice: For a function that could be in place, the call to write instead of it.
    """

    name: str
    activation: str
    converted: bool
    reason: str
    save: str | None
    bytes_before: int
    bytes_after: int
    calls: int = 1
    call: str | None = None
    advice: str | None = None


@dataclass(frozen=True)
class DroppedOutput:
    """An output that follows from a norm's input, and which its readers form again in backward.

    Attributes:
        name: Where it arises: the place of an activation, as in `Site`, or the path of a norm.
        kind: The kind of activation, or the norm's class.
        readers: The operations that keep it no longer, by the paths of the modules that call them.
        bytes_before: Its size.
        bytes_after: What is kept to form it again, beyond what the norm, or the activation, keeps.
    """

    name: str
    kind: str
    readers: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class OtherActivation:
    """Activations of a kind that has no in-place form in this package.

    Attributes:
        kind: For example "Sigmoid"; where it is a kind that has one, in other words, says so.
        calls: How often it was called in the run, as a module or a function.
        bytes_held: Bytes that these calls alone hold for backward.
    """

    kind: str
    calls: int
    bytes_held: int


@dataclass(frozen=True)
class Report:
    """The decisions for all sites of a model, in the order of its modules. Prints as a table.

    Attributes:
        sites: One entry per place that holds an activation, or per call of it where these are
            decided one by one; then one per line of code that calls an activation as a function,
            in each module.
        dropped: The outputs of norms, and of activations after one, that the operations which read
            them do not keep: in backward they are formed again.
        model_bytes_before: Bytes that the whole model holds for backward when forward has returned,
            beside its parameters, buffers and arguments, measured on the example; None if that run
            fails.
        model_bytes_after: The same of the converted model.
        others: The activations of other kinds.
    """

    sites: list[Site]
    dropped: list[DroppedOutput] = field(default_factory=list)
    model_bytes_before: int | None = None
    model_bytes_after: int | None = None
    others: list[OtherActivation] = field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        """Bytes that PyTorch's activations hold for backward, over all sites."""
        return sum(site.bytes_before for site in self.sites)

    @property
    def bytes_after(self) -> int:
        """Bytes that the activations hold for backward with the decisions taken."""
        return sum(site.bytes_after for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, strings and numbers, as JSON takes them."""
        return {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, **asdict(self)}

    def __str__(self) -> str:
        called = [site for site in self.sites if site.calls]
        total = (
            "total",
            "",
            f"{sum(site.converted for site in called)} of {len(called)}",
            mib(self.bytes_before),
            mib(self.bytes_after),
            "bytes in MiB, held for backward by the activations",
        )
        model = (
            "model",
            "",
            "",
            mib(self.model_bytes_before),
            mib(self.model_bytes_after),
            "held for backward by the whole model",
        )
        sites = [_row(site) for site in self.sites]
        rest = [*map(_row_of_dropped, self.dropped), *map(_row_of_other, self.others), model]
        if not sites:
            return _table(_HEADER, rest)
        lines = [_table(_HEADER, sites, [total, *rest])]
        if len(sites) > _MANY:
            lines.insert(0, _table(("sites", *_HEADER[1:]), _summary(self.sites)) + "\n")
        if self._is_matched_by_pytorch():
            lines.append(
                "Nothing to gain: PyTorch's own activations, with inplace=True where that is safe, "
                "hold as little."
            )
        return "\n".join(lines)

    def _is_matched_by_pytorch(self) -> bool:
        """Whether PyTorch's better setting at each site holds as little, but for one per cent."""
        if not any(site.converted for site in self.sites) or any(s.advice for s in self.sites):
            return False
        gained = self.bytes_before - self.bytes_after
        gained += sum(output.bytes_before - output.bytes_after for output in self.dropped)
        return 0 <= gained < 0.01 * (self.model_bytes_before or 0)


_HEADER = ("site", "activation", "decision", "before", "after", "reason")

_Row = tuple[str, ...]


def _row(site: Site) -> _Row:
    return (
        site.name if site.call is None else f"{site.name} at {site.call}",
        site.activation,
        _decision(site),
        mib(site.bytes_before),
        mib(site.bytes_after),
        site.reason,
    )


def _decision(site: Site) -> str:
    return f'save="{site.save}"' if site.converted else "left"


def _row_of_dropped(output: DroppedOutput) -> _Row:
    readers = ", ".join(f"`{name}`" for name in output.readers)
    return (
        output.name,
        output.kind,
        "dropped",
        mib(output.bytes_before),
        mib(output.bytes_after),
        f"output is formed again for {readers}",
    )


def _row_of_other(other: OtherActivation) -> _Row:
    name, _, is_ours = other.kind.partition(", which is ")
    times = "1 call" if other.calls == 1 else f"{other.calls} calls"
    held = mib(other.bytes_held)
    reason = f"write nn.{is_ours}()" if is_ours else "no in-place form of this kind here"
    return (times, name, "left", held, held, reason)


def _summary(sites: Sequence[Site]) -> list[_Row]:
    """How many sites there are of a kind with the same decision for the same reason, most first."""
    groups: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites:
        # What stands in backquotes or brackets differs from place to place.
        reason = re.sub(r" \(call .*?\)", "", site.reason)
        reason = reason if site.advice else re.sub(r"by `[^`]*`", "by ...", reason)
        groups.setdefault((site.activation, _decision(site), reason), []).append(site)
    return [
        (
            str(len(group)),
            activation,
            decision,
            mib(sum(site.bytes_before for site in group)),
            mib(sum(site.bytes_after for site in group)),
            reason,
        )
        for (activation, decision, reason), group in sorted(
            groups.items(), key=lambda item: len(item[1]), reverse=True
        )
    ]


def _table(header: _Row, *parts: Sequence[_Row]) -> str:
    """Columns of equal width, with a rule before each part."""
    table = [header, *(row for part in parts for row in part)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = "  ".join("-" * width for width in widths)

    def line(row: _Row) -> str:
        cells = zip(row, widths, header, strict=True)
        return "  ".join(
            cell.rjust(width) if name in ("before", "after") else cell.ljust(width)
            for cell, width, name in cells
        ).rstrip()

    return "\n".join([line(header), *(text for part in parts for text in (rule, *map(line, part)))])


def mib(count: int | None) -> str:
    """The count of bytes in MiB."""
    return "?" if count is None else f"{count / 2**20:.3f}"
