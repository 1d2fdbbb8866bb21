"""Concatenations, whose parts several saved tensors share.

NOTE [Shared parts]

In a DenseNet each layer's norm saves the concatenation of the outputs of all layers before it:
memory grows quadratically with depth. The concatenation follows from its parts, but often nothing
else saves a part. So a spec of a concatenation may contain copies of parts:

1. A part that can be recomputed, or that a consumer saves, is not copied.
2. A part of an earlier concatenation that stays saved is a slice of it.
3. Any other part is copied from the concatenation, once, and later concatenations share the copy.
   Memory then grows linearly with depth.
4. Parts are copied only if the concatenation shares another part with an earlier one, because later
   ones then probably share the copies, or if the copies are small. In a U-Net each part is
   concatenated once: a copy of it would save little, and would raise the peak.
5. Specs share a slice or copy only if the part is proved unmodified, from its operation until both
   concatenations have read it: see NOTE [Versions are proved] in `versions.py`. The copy itself
   needs no proof, because it has the values that the concatenation has read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch_private import WeakTensor
from . import nodes
from .nodes import Node
from .operations import base_of
from .specs import Leaf, Spec
from .versions import CopyOfOutput, ensure_record, is_unmodified, prove_late, was_visited

_SMALL_COPIES = 8  # copies of at most one in so many elements are small


class _Part(NamedTuple):
    """A part of a concatenation.

    Attributes:
        producer: The node of the part; None if it has no gradient.
        output: The index of the producer's output.
        start: Where the part begins in the concatenated dimension.
        length: Its size in that dimension.
    """

    producer: Node
    output: int
    start: int
    length: int


def specs_of_parts(
    node: Node,
    saved: Tensor,
    output_spec: Callable[[Node, int], Spec | None],
    stream: torch.cuda.Stream | None,
) -> list[Spec] | None:
    """Return specs of a concatenation's parts, or None: see NOTE [Shared parts].

    Args:
        node: The concatenation's node.
        saved: Its unmodified output, which a consumer saves.
        output_spec: Returns the spec of an operation's output, or None.
        stream: The current CUDA stream; None on a CPU.
    """
    dim = nodes.argument(node, "dim") % saved.dim()
    parts = list(_parts_of(node, dim, saved))
    if not parts:
        return None
    record = ensure_record(node, stream)
    prove_late(node, record)
    number = nodes.sequence_number(node)
    specs: list[Spec | None] = [None] * len(parts)
    shares_a_part = False
    for position, part in enumerate(parts):
        if position not in record.unproved and _was_visited(part):
            specs[position] = output_spec(part.producer, part.output)
            if specs[position] is None:
                specs[position] = copy = _earlier_copy(part, number, stream)
                shares_a_part |= copy is not None
    copied = sum(part.length for part, spec in zip(parts, specs, strict=True) if spec is None)
    if not shares_a_part and _SMALL_COPIES * copied > saved.shape[dim]:
        for part in parts:
            # The record must not refer to a node: see NOTE [Metadata outlives backward].
            where = dim, part.start, part.length
            slice_of = partial(_slice, WeakTensor(saved), saved._version, *where)
            _offer(part, CopyOfOutput(slice_of, number), saved.dtype, stream)
        return None
    for position, part in enumerate(parts):
        if specs[position] is None:
            leaf = _leaf(saved.detach().narrow(dim, part.start, part.length).clone())
            _offer(part, CopyOfOutput(weakref.ref(leaf), number), saved.dtype, stream)
            specs[position] = leaf
    return [spec for spec in specs if spec is not None]


def _parts_of(node: Node, dim: int, saved: Tensor) -> Iterator[_Part]:
    """Yield the parts; none if their sizes are unknown."""
    edges = nodes.producers(node)
    shapes = [None if edge[0] is None else nodes.output_shape(*edge) for edge in edges]
    known = [shape[dim] for shape in shapes if shape is not None and len(shape) == saved.dim()]
    unknown = len(edges) - len(known)
    rest = saved.shape[dim] - sum(known)
    if unknown > 1 or (unknown == 0 and rest):
        return
    start = 0
    for (producer, index), shape in zip(edges, shapes, strict=True):
        is_known = shape is not None and len(shape) == saved.dim()
        length = shape[dim] if is_known else rest  # type: ignore[index]
        yield _Part(producer, index, start, length)
        start += length


def _earlier_copy(part: _Part, number: int, stream: torch.cuda.Stream | None) -> Leaf | None:
    """Return a copy of a part, in or from another concatenation; None if there is none.

    Args:
        part: The part, which was unmodified when this concatenation read it.
        number: The sequence number of this concatenation.
        stream: See `specs_of_parts`.
    """
    record = ensure_record(part.producer, stream)
    copy = record.copies_of_output.get(part.output)
    if copy is None or record.stream is not stream:
        return None
    # A later concatenation may have read a modified part.
    is_right = copy.number <= number or is_unmodified(part.producer, part.output)
    return copy.leaf() if is_right else None


def _was_visited(part: _Part) -> bool:
    """Whether the engine has visited the node that produced the part, or its base."""
    base, _ = base_of(part.producer, part.output)
    return base is not None and was_visited(base)


def _offer(
    part: _Part, copy: CopyOfOutput, dtype: torch.dtype, stream: torch.cuda.Stream | None
) -> None:
    """Let specs of other concatenations find a copy of a part, which has this dtype."""
    producer, index = part.producer, part.output
    if not _was_visited(part) or nodes.output_dtype(producer, index) is not dtype:
        return
    record = ensure_record(producer, stream)
    if record.stream is stream:
        record.copies_of_output = {**record.copies_of_output, index: copy}


def _slice(saved: WeakTensor, version: int, dim: int, start: int, length: int) -> Leaf | None:
    tensor = saved()
    if tensor is None or tensor._version != version:
        return None
    return _leaf(tensor.detach().narrow(dim, start, length))


def _leaf(copy: Tensor) -> Leaf:
    leaf = Leaf(copy)
    leaf.keeps_strides = False  # the part may have had others
    return leaf
