"""Draw what a model saves for backward, operation by operation of the forward pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

MIB = 2**20
_MAX_SHARE = 0.6  # of all bytes, for one group
_MAX_GROUPS = 8
_MAX_LAYERS = 8  # that the axis names, so far apart that their names do not overlap
_OTHERS = "other modules"


class Saved(Protocol):
    """A saved tensor of a report."""

    @property
    def module(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def ordinal(self) -> int: ...


def plot(sides: Mapping[str, Sequence[Saved]], title: str, path: str | os.PathLike[str]) -> None:
    """Draw models side by side: see `Report.plot`.

    Args:
        sides: The saved tensors of each model, by the model's title; the first is the original.
        title: The title of the picture.
        path: The file to write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report.plot needs matplotlib: pip install matplotlib") from error
    everything = [tensor for tensors in sides.values() for tensor in tensors]
    group_of = groups(everything)
    names = sorted(dict.fromkeys(group_of.values()), key=_OTHERS.__eq__)  # that one last
    length = 1 + max((tensor.ordinal for tensor in everything), default=0)

    layers = _largest_layers(next(iter(sides.values())), length)
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, len(sides), sharex=True, sharey=True)
    for axis, (side, tensors) in zip(axes, sides.items(), strict=True):
        heights = [
            _mib_after_each(length, [t for t in tensors if group_of[t.module] == name])
            for name in names
        ]
        # A legend leaves out labels that start with an underscore.
        labels = [_verbatim(f"in {name}") for name in names]
        axis.stackplot(range(length), heights, labels=labels, step="post")
        total = sum(tensor.bytes for tensor in tensors) / MIB
        axis.set_title(f"{side}: {total:.2f} MiB")
        axis.set_xticks([*layers], layers.values(), rotation=30, ha="right", fontsize=7)
        axis.set_xlabel("operations of the forward pass, with the layers that save most")
    axes[0].set_ylabel("saved for backward, MiB")
    axes[0].set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    figure.suptitle(_verbatim(title))
    figure.savefig(path, dpi=120)


def _verbatim(text: str) -> str:
    """Return a text that matplotlib draws as it is: a dollar begins a formula."""
    return text.replace("$", r"\$")


def _largest_layers(tensors: Sequence[Saved], length: int) -> dict[int, str]:
    """Return the paths of the modules that save most, by their place among the operations."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.module] = sizes.get(tensor.module, 0) + tensor.bytes
    places = {tensor.module: tensor.ordinal for tensor in reversed(tensors)}  # of the largest
    layers: dict[int, str] = {}
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        is_apart = all(abs(places[path] - other) * _MAX_LAYERS >= length for other in layers)
        if path and is_apart and len(layers) < _MAX_LAYERS:
            layers[places[path]] = _verbatim(path)
    return layers


def _mib_after_each(length: int, tensors: Sequence[Saved]) -> list[float]:
    """Return what is saved after each operation of forward."""
    added = [0.0] * length
    for tensor in tensors:
        added[tensor.ordinal] += tensor.bytes / MIB
    return list(accumulate(added))


def groups(tensors: Sequence[Saved]) -> dict[str, str]:
    """Return the group of each module that saves a tensor, by path, in the order of forward.

    Groups are the parts of the model at the first depth at which none has most of the bytes. If
    there are more than eight, the smallest are one group.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.ordinal)
    total = sum(tensor.bytes for tensor in tensors)
    depth, deepest = 1, max((tensor.module.count(".") + 1 for tensor in tensors), default=1)
    while True:
        sizes: dict[str, int] = {}
        for tensor in ordered:
            name = _prefix(tensor.module, depth)
            sizes[name] = sizes.get(name, 0) + tensor.bytes
        if depth == deepest or max(sizes.values()) <= _MAX_SHARE * total:
            break
        depth += 1
    shown = sorted(sizes, key=lambda name: -sizes[name])
    if len(shown) > _MAX_GROUPS:
        shown = shown[: _MAX_GROUPS - 1]
    paths = {tensor.module: _prefix(tensor.module, depth) for tensor in ordered}
    return {path: name if name in shown else _OTHERS for path, name in paths.items()}


def _prefix(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth]) or "the model itself"
