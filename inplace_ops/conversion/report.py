"""What `convert` and `analyze` found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Site:
    """One place of a model that calls an activation.

    Attributes:
        name: The path of the module that holds the activation and the activation's name in it, or,
            for a call of a function, the path of the module that calls it and the function's name.
        activation: The kind of activation, for example "SiLU".
        converted: Whether it is put in place.
        reason: Why not; or, where converted, why this is what it saves.
        save: What it saves for backward: "output", "mask", "derivative" or, as it follows from the
            input of a norm, nothing: "recompute"; None if not converted.
        bytes_before: Bytes that PyTorch's activation holds for backward, in place or out of place,
            whichever is less, beyond what the other operations hold anyway.
        bytes_after: The same with the decision taken.
    """

    name: str
    activation: str
    converted: bool
    reason: str
    save: str | None
    bytes_before: int
    bytes_after: int


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
class Report:
    """The decisions for all sites of a model, in the order of its modules. Prints as a table.

    Attributes:
        sites: One entry per place that holds an activation, then one per call of an activation as
            a function.
        dropped: The outputs of norms, and of activations after one, that the operations which read
            them do not keep: in backward they are formed again.
        model_bytes_before: Bytes that the whole model holds for backward when forward has returned,
            beside its parameters, buffers and arguments, measured on the example; None if that run
            fails.
        model_bytes_after: The same of the converted model.
    """

    sites: list[Site]
    dropped: list[DroppedOutput] = field(default_factory=list)
    model_bytes_before: int | None = None
    model_bytes_after: int | None = None

    @property
    def bytes_before(self) -> int:
        """Bytes that PyTorch's activations hold for backward, over all sites."""
        return sum(site.bytes_before for site in self.sites)

    @property
    def bytes_after(self) -> int:
        """Bytes that the activations hold for backward with the decisions taken."""
        return sum(site.bytes_after for site in self.sites)

    def __str__(self) -> str:
        header = ("site", "activation", "decision", "before", "after", "reason")
        rows = [
            (
                site.name,
                site.activation,
                f'save="{site.save}"' if site.converted else "left",
                _mib(site.bytes_before),
                _mib(site.bytes_after),
                site.reason,
            )
            for site in self.sites
        ]
        converted = sum(site.converted for site in self.sites)
        total = (
            "total",
            "",
            f"{converted} of {len(self.sites)}",
            _mib(self.bytes_before),
            _mib(self.bytes_after),
            "bytes in MiB, held for backward by the activations",
        )
        dropped = [
            (
                output.name,
                output.kind,
                "dropped",
                _mib(output.bytes_before),
                _mib(output.bytes_after),
                "output is formed again for " + ", ".join(f"`{name}`" for name in output.readers),
            )
            for output in self.dropped
        ]
        model = (
            "model",
            "",
            "",
            _mib(self.model_bytes_before),
            _mib(self.model_bytes_after),
            "held for backward by the whole model",
        )
        table = [header, *rows, total, *dropped, model]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if name in ("before", "after") else cell.ljust(width)
                for cell, width, name in zip(row, widths, header, strict=True)
            ).rstrip()
            for row in table
        ]
        rule = "  ".join("-" * width for width in widths)
        first, last = lines[1 : 1 + len(rows)], lines[1 + len(rows) :]
        return "\n".join([lines[0], rule, *first, rule, *last])


def _mib(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:.3f}"
