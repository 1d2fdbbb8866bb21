"""The table of views, and what an output is a view of.

A view shares its base's memory and version. The engine keeps one value for a base and all views of
it, and applies the views to the base's spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _ops
from .._torch_private import ACCUMULATE_GRAD, BACKWARD_HOOK
from . import nodes
from .nodes import Node
from .operations import OPERATION_OF, Argument, Narrow, first_block, same, slice_of
from .tensors import is_contiguous, same_strides


@dataclass(frozen=True)
class View:
    """An operation whose output is a view of its input, and shares its version.

    Attributes:
        function: Computes the output from the input and the arguments. The input may have other
            strides than in forward.
        arguments: The arguments after the input.
        condition: Returns whether the function holds for a node; None if it always does.
        narrow: See `Output`.
        keeps_order: Whether a view with all elements has them in the order of the input.
        views_each_input: Whether each output is a view of the input at its place, instead of all
            being views of the first input.
    """

    function: Callable[..., Tensor]
    arguments: tuple[Argument, ...] = ()
    condition: Callable[[Node], bool] | None = None
    narrow: Narrow | None = None
    keeps_order: bool = False
    views_each_input: bool = False

    def source_of(self, node: Node, index: int) -> tuple[Node, int]:
        """Return the node and index of the tensor of which an output is a view."""
        source: tuple[Node, int] = node.next_functions[index if self.views_each_input else 0]
        return source

    def holds_for(self, node: Node) -> bool:
        """Whether the function holds for a node."""
        return self.condition is None or self.condition(node)


def _index(node: Node, index: int) -> int:
    return index


def _split(x: Tensor, size: int | tuple[int, ...], dim: int, index: int) -> Tensor:
    return x.split(size, dim)[index]


def _unbind(x: Tensor, dim: int, index: int) -> Tensor:
    return x.unbind(dim)[index]


def _reshapes(node: Node) -> bool:
    """Whether `as_strided` returned all elements of a tensor in their order.

    It did if it returned an alias, or a contiguous view of a contiguous tensor.
    """
    if nodes.argument(node, "storage_offset") not in (0, None):
        return False
    size, stride = nodes.argument(node, "size"), nodes.argument(node, "stride")
    producer, index = nodes.producer(node, 0)
    shape = nodes.output_shape(producer, index)
    known = _known_stride(producer, shape)
    if size == shape:
        return same_strides(shape, stride, known)
    return (
        math.prod(size) == shape.numel()
        and is_contiguous(size, stride)
        and is_contiguous(shape, known)
    )


def _known_stride(node: Node, shape: torch.Size) -> tuple[int, ...] | None:
    """Return the strides of a node's output, of this shape; None if they are not known.

    They are known of an activation, and of a reshape of an activation that is contiguous. What an
    activation saves has the strides of its output.
    """
    if VIEW_OF[type(node)] is _RESHAPE:
        producer, index = nodes.producer(node, 0)
        inner = nodes.output_shape(producer, index)
        if not is_contiguous(inner, _known_stride(producer, inner)):
            return None
        return _ops.dense_strides(shape, None)
    operation = OPERATION_OF[type(node)]
    if operation is None:
        return None
    if operation.output == "activation after a norm":
        return _ops.dense_strides(shape, node.op_args.dim_order)
    field = operation.activation_field
    return nodes.saved_stride(node, field) if field else None


_RESHAPE = View(Tensor.reshape, (nodes.output_shape,), keeps_order=True)

# Use `reshape` where forward used a view: the recomputed input may have other strides.
VIEWS: Mapping[str, View] = {
    "AliasBackward0": View(same, keeps_order=True),
    # A module with full backward hooks gets and returns aliases, each of the input at its place.
    BACKWARD_HOOK: View(same, keeps_order=True, views_each_input=True),
    # Autograd regenerates the node of a view whose base was modified in place, for example of an
    # instance norm's output that an activation has overwritten.
    "AsStridedBackward0": View(Tensor.reshape, ("size",), _reshapes),
    "ExpandBackward0": View(Tensor.expand, (nodes.output_shape,), narrow=first_block),
    "PermuteBackward0": View(Tensor.permute, ("dims",)),
    "ReshapeAliasBackward0": _RESHAPE,
    "SelectBackward0": View(torch.select, ("dim", "index")),
    "SliceBackward0": View(slice_of, ("dim", "start", "end", "step"), keeps_order=True),
    "SplitBackward0": View(_split, ("split_size", "dim", _index)),
    "SplitWithSizesBackward0": View(_split, ("split_sizes", "dim", _index)),
    "SqueezeBackward0": _RESHAPE,
    "SqueezeBackward1": _RESHAPE,
    "SqueezeBackward2": _RESHAPE,
    "TBackward0": View(torch.t),
    "TransposeBackward0": View(torch.transpose, ("dim0", "dim1")),
    "UnbindBackward0": View(_unbind, ("dim", _index)),
    # Its output has its own version: PyTorch uses it only for memory that nothing else refers to.
    "UnsafeViewBackward0": _RESHAPE,
    "UnsqueezeBackward0": _RESHAPE,
    "ViewBackward0": _RESHAPE,
}


VIEW_OF = nodes.ByType(VIEWS)  # by node type


# By node type: whether an operation never gets a value. The bases of views do.
NEEDS_NO_VALUE = nodes.ByType(dict.fromkeys([*VIEWS, ACCUMULATE_GRAD], True))


def base_of(node: Node, index: int) -> tuple[Node, int]:
    """Return the node that produced the base of an output, and the index of the node's output.

    Return the given node and index if the output is not a view.
    """
    while (view := VIEW_OF[type(node)]) is not None:
        node, index = view.source_of(node, index)
    return node, index


def viewed(node: Node, index: int) -> tuple[Node, int]:
    """Return the node and index of the tensor of which an output is a view."""
    view = VIEW_OF[type(node)]
    assert view is not None
    return view.source_of(node, index)


def reshapes_only(node: Node, index: int) -> bool:
    """Whether an output of a node is not a view, or has all elements of its base in their order."""
    size = nodes.output_shape(node, index).numel()
    while (view := VIEW_OF[type(node)]) is not None:
        if not view.keeps_order:
            return False
        node, index = view.source_of(node, index)
    return nodes.output_shape(node, index).numel() == size
