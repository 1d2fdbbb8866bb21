"""What a reader keeps of an output that a norm, or an activation after one, has formed.

A convolution or a linear layer saves its input for its own backward. Where that is the output of a
norm, or of an activation with save="recompute", it follows from the norm's input, which the norm
keeps anyway. `drop_outputs`, a forward hook on the reader, lets the reader's node keep that recipe:
by hooks on the saved tensor itself, which PyTorch's notes on saved tensors document. What anything
else refers to stays alive all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_compiling
from torch.jit import is_scripting  # type: ignore[attr-defined]

from . import _ops
from ._torch import tree_leaves
from .activations import Activation
from .autograd import Normalized, RecomputeFunction
from .memory import is_held_itself, replace
from .normalization import NODES, Maps, source_at


class _Recipe(NamedTuple):
    """How an output is formed again: the activation, if any, of a norm's output."""

    normalized: Normalized
    version: int  # of the norm's input
    stride: tuple[int, ...]  # of the output
    activation: Activation | None
    arguments: tuple[float, ...]
    shared: _SharedMaps | None = None

    def output(self) -> Tensor:
        if self.normalized.x._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a norm's input, of shape {list(self.normalized.x.shape)}, is "
                f"at version {self.normalized.x._version}; expected version {self.version} instead"
            )
        if self.activation is None:
            return _ops.NORMALIZE(*self.normalized)
        return self.activation.ops.recompute(*self.normalized, *self.arguments)


class _View(NamedTuple):
    """What a node keeps: a recipe, and which view of the output it saved."""

    recipe: _Recipe
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def tensor(self) -> Tensor:
        return self.recipe.output().as_strided(self.size, self.stride, self.offset)


def drop_outputs(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    """Let the nodes that `module` has just made keep recipes instead of outputs: a forward hook.

    Arguments and output may be anything: torch.jit.script, which leaves the hook out, wants types.
    """
    if not is_scripting():
        _drop_outputs(args, output)


def _drop_outputs(args: Any, output: Any) -> None:
    for saved in outputs_saved_by(args, output):
        saved.drop()


class SavedOutput(NamedTuple):
    """An output that a node has saved, and which can be formed again."""

    raw: Any
    tensor: Tensor
    view: _View

    def formed(self) -> Tensor:
        """The same, formed again."""
        return self.view.tensor()

    def magnitude(self) -> Tensor:
        """By its roundings it may differ: |x * scale| + |shift| of the norm."""
        normalized = self.view.recipe.normalized
        x, channels, rows, dim_order = normalized
        maps = channels.abs(), None if rows is None else rows.abs()
        magnitude = _ops.NORMALIZE(x.abs(), *maps, dim_order)
        return magnitude.as_strided(self.view.size, self.view.stride, self.view.offset)

    def drop(self) -> None:
        """Let the node keep the recipe instead."""
        view = self.view  # the hook must not hold the tensor
        replace(self.raw, lambda _: view, _View.tensor)


def outputs_saved_by(args: Any, output: Any) -> Iterator[SavedOutput]:
    """What a module has saved, between its arguments and its output, that can be formed again."""
    if (
        is_compiling()
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    ):
        return
    arguments = _tensors_in(args[0] if len(args) == 1 else args)
    if not arguments:
        return  # what the call has made cannot be told from what was there
    seen = {argument.grad_fn for argument in arguments}
    pending = [tensor.grad_fn for tensor in _tensors_in(output)]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(before for before, _ in node.next_functions)
        kind: Any = type(node)
        if kind.__name__ in NODES:  # a look at what a norm keeps would form it again
            continue
        if issubclass(kind, BackwardCFunction):  # which know what they keep themselves
            continue
        for name in _saved_by(kind):
            try:
                raw = getattr(node, f"_raw_saved_{name}")
                if isinstance(raw, tuple) or not is_held_itself(raw):
                    continue
                tensor = getattr(node, f"_saved_{name}")
            except RuntimeError:  # freed, or modified since: backward will say so, if it comes
                continue
            if tensor is None or tensor.grad_fn is None:
                continue
            view = _view_of(tensor)
            if view is not None:
                yield SavedOutput(raw, tensor, view)


def _tensors_in(value: Any) -> list[Tensor]:
    leaves = (value,) if isinstance(value, Tensor) else tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@cache
def _saved_by(node_type: Any) -> tuple[str, ...]:
    """The names under which nodes of a type, of PyTorch's own, save tensors."""
    prefix = "_raw_saved_"
    return tuple(n.removeprefix(prefix) for n in dir(node_type) if n.startswith(prefix))


# Whose output is a view of their input, and shares its version.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias",
        "AsStrided",
        "Expand",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "T",
        "Transpose",
        "Unbind",
        "Unfold",
        "Unsqueeze",
        "View",
    )
) | {"SqueezeBackward1", "SqueezeBackward2", "TransposeBackward1"}


def _view_of(saved: Tensor) -> _View | None:
    """The recipe of what a node saved; None where it is no such output, or not as it was formed."""
    node: Any = saved.grad_fn
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    recipe, version = None, 0
    if type(node) is RecomputeFunction._backward_cls:
        recipe, version = _recipe_of_activation(node), 1
    elif type(node).__name__ in NODES:
        recipe = _recipe_of_norm(node)
    if recipe is None:
        return None
    x = recipe.normalized.x
    is_whole = saved.untyped_storage().nbytes() == x.numel() * x.itemsize
    if saved._version != version or saved.dtype != x.dtype or saved.is_neg() or not is_whole:
        return None
    if saved.grad_fn is node and saved.stride() != recipe.stride:
        return None
    return _View(recipe, saved.size(), saved.stride(), saved.storage_offset())


def _recipe_of_activation(node: Any) -> _Recipe | None:
    try:
        if not is_held_itself(node._raw_saved_tensors[0]):
            return None
        x, channels, rows, _ = node.saved_tensors
    except RuntimeError:  # freed, or the norm's input was modified: backward will say so
        return None
    normalized = Normalized(x.detach(), channels, rows, node.dim_order)
    return _Recipe(normalized, x._version, node.stride, node.activation, node.arguments)


def _recipe_of_norm(node: Any) -> _Recipe | None:
    source = source_at(node)
    if source is None:
        return None
    x = source.x.detach()
    dim_order = _ops.dim_order_of(x)
    stride = _ops.dense_strides(x.shape, dim_order)
    if type(node).__name__ == "NativeLayerNormBackward0":
        dim_order, stride = [], _ops.dense_strides(x.shape, [])  # contiguous in any case
    elif not _ops.is_in_a_memory_format(x):
        return None  # its output lies otherwise
    shared = node.metadata.get(_SHARED, _nothing)()
    if shared is None:
        with torch.no_grad():
            shared = _SharedMaps(source.maps())
        node.metadata[_SHARED] = weakref.ref(shared)  # metadata outlives backward
    channels, rows = shared.maps
    normalized = Normalized(x, channels, rows, dim_order)
    return _Recipe(normalized, x._version, stride, None, (), shared)


_SHARED = "inplace_ops: maps"  # in a norm's metadata: what all that read its output share


class _SharedMaps:
    """The maps of a norm's output, as long as a recipe holds them."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps


def _nothing() -> None:
    return None
