"""What a reader keeps of an output that a norm, or an activation after one, has formed.

A convolution or a linear layer saves its input for its own backward. Where that is the output of a
norm, or of an activation with save="recompute", it follows from the norm's input, which the norm
keeps anyway. `drop_outputs`, a forward hook on the reader, lets the reader's node keep that recipe:
by hooks on the saved tensor itself, which PyTorch's notes on saved tensors document. Which nodes
are the reader's `note_first_node` tells, a hook before its forward. What anything else refers to
stays alive all the same.
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
from ._torch import next_node_number, tree_leaves
from .activations import Activation
from .autograd import Normalized, RecomputeFunction
from .memory import is_held_itself, replace
from .normalization import NODES, Maps, source_at


class _Recipe(NamedTuple):
    """How an output is formed again: the activation, if any, of a norm's output."""

    normalized: Normalized
    version: int  # of the norm's input
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
        if self.shared is not None:
            self.shared.use()
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
        output = self.recipe.output()
        if output.shape == self.size and output.stride() == self.stride:
            return output  # most often; and a view costs as much as all else here
        return output.as_strided(self.size, self.stride, self.offset)


def note_first_node(module: nn.Module, args: tuple[Tensor]) -> None:
    """Note where the nodes begin that `module` is going to make: a forward pre-hook.

    Arguments and output may be anything: torch.jit.script, which leaves the hooks out, wants types.
    """
    if not is_scripting():
        _note_first_node(module)


def drop_outputs(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    """Let the nodes that `module` has just made keep recipes instead of outputs: a forward hook."""
    if not is_scripting():
        _drop_outputs(module, output)


FIRST_NODE = "_inplace_ops_first_node"  # the attribute of a module, past nn.Module's own setting


def _note_first_node(module: nn.Module) -> None:
    if not is_compiling():
        vars(module)[FIRST_NODE] = next_node_number()


def _drop_outputs(module: nn.Module, output: Any) -> None:
    for saved in outputs_saved_by(module, output):
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
        """By its roundings it may differ: the largest |x * scale| + |shift| of the norm.

        Of the whole tensor, as bias and mean may cancel in a shift, which the norm adds in turn.
        """
        x, channels, rows, dim_order = self.view.recipe.normalized
        maps = channels.abs(), None if rows is None else rows.abs()
        magnitude = _ops.NORMALIZE(x.abs(), *maps, dim_order)
        return magnitude.nan_to_num(nan=0.0, posinf=0.0).amax()

    def drop(self) -> None:
        """Let the node keep the recipe instead."""
        view = self.view  # the hook must not hold the tensor
        replace(self.raw, lambda _: view, _View.tensor)


def outputs_saved_by(module: nn.Module, output: Any) -> Iterator[SavedOutput]:
    """What the nodes saved that a call of `module` has made, if it can be formed again."""
    if (
        is_compiling()
        or not torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    ):
        return
    first = vars(module).get(FIRST_NODE)
    if first is None:  # the call began before there was a hook
        return
    seen = set()
    pending: list[Any] = [tensor.grad_fn for tensor in _tensors_in(output)]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        number = node._sequence_nr()
        if not first <= number < _LEAF:
            continue
        seen.add(node)
        if number > first:  # what that follows from is older, but for views made anew
            pending += [before for before, _ in node.next_functions]
        kind: Any = type(node)
        if issubclass(kind, BackwardCFunction):  # somebody's own, which no cache must keep alive
            continue
        for raw_name, name in _saved_by(kind):
            try:
                raw = getattr(node, raw_name)
                if isinstance(raw, tuple) or not is_held_itself(raw):
                    continue
                tensor = getattr(node, name)
            except RuntimeError:  # freed, or modified since: backward will say so, if it comes
                continue
            if tensor is None or tensor.grad_fn is None:
                continue
            view = _view_of(tensor)
            if view is not None:
                yield SavedOutput(raw, tensor, view)


_LEAF = 2**64 - 1  # the number of every node that gathers a leaf's gradient


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


# What may be given an input that differs by a rounding: the gradients of these follow it, or jump
# where those of ReLU do. That of a maximum, or of a norm of infinite order, compares it with the
# result, and is another altogether.
_OPERATIONS = (
    *("addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "linear", "mm", "mv", "_trilinear"),
    *("convolution", "cudnn_grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "_scaled_dot_product_fused_attention_overrideable",
    *("addcmul", "div", "mul"),
    *("elu", "gelu", "glu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish"),
    *("_prelu_kernel", "silu", "softplus"),
    # These look at its shape alone.
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
)


def _key(name: str) -> str:
    """What the names of an operation and of its node have in common."""
    return name.replace("_", "").lower()


_KEYS = frozenset(map(_key, _OPERATIONS))


def can_read_what_is_formed_again(operation: str) -> bool:
    """Whether PyTorch's operation of that name may be given what differs by a rounding."""
    return _key(operation) in _KEYS


@cache
def _saved_by(node_type: Any) -> tuple[tuple[str, str], ...]:
    """What nodes of a type save that may be formed again: the attributes, raw and unpacked."""
    if not can_read_what_is_formed_again(node_type.__name__.rpartition("Backward")[0]):
        return ()
    raw = [name for name in dir(node_type) if name.startswith("_raw_saved_")]
    return tuple((name, name.replace("_raw", "", 1)) for name in raw)


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
    number = saved.output_nr
    while type(node).__name__ in _VIEWS:
        node, number = node.next_functions[0]
    recipe, version = None, 0
    if type(node) is RecomputeFunction._backward_cls:
        recipe, version = _recipe_of_activation(node, saved), 1
    elif type(node).__name__ in NODES and number == 0:
        recipe = _recipe_of_norm(node, saved)
    if recipe is None:
        return None
    x = recipe.normalized.x
    is_whole = saved.untyped_storage().nbytes() == x.numel() * x.itemsize
    if saved._version != version or saved.dtype != x.dtype or saved.is_neg() or not is_whole:
        return None
    return _View(recipe, saved.size(), saved.stride(), saved.storage_offset())


def _recipe_of_activation(node: Any, saved: Any) -> _Recipe | None:
    if saved.grad_fn is node and saved.stride() != node.stride:
        return None  # laid otherwise, through `.data`
    try:
        if not is_held_itself(node._raw_saved_tensors[0]):
            return None
        x, channels, rows, _ = node.saved_tensors
    except RuntimeError:  # freed, or the norm's input was modified: backward will say so
        return None
    dim_order, *arguments = node.tail
    normalized = Normalized(x.detach(), channels, rows, dim_order)
    return _Recipe(normalized, x._version, node.activation, tuple(arguments))


def _recipe_of_norm(node: Any, saved: Tensor) -> _Recipe | None:
    source = source_at(node)
    if source is None:
        return None
    x = source.x.detach()
    if saved._is_view() or saved.grad_fn is node:
        output: Any = saved if saved._base is None else saved._base
        # It lies as the input does or, as a group norm's on a GPU, contiguous.
        dim_order = _ops.dim_order_of(output)
        if output.grad_fn is not node or dim_order not in (None, _ops.dim_order_of(x)):
            return None  # laid otherwise, through `.data`
    # A view through the hooks of `saved_bytes`, which do not tell of what: as PyTorch lays it.
    elif _is_contiguous_anyway(node):
        dim_order = None
    elif _is_in_a_memory_format(x):
        dim_order = _ops.dim_order_of(x)
    else:
        return None
    shared = node.metadata.get(_SHARED, _nothing)()
    if shared is None:
        with torch.no_grad():
            shared = _SharedMaps(source.maps())
        node.metadata[_SHARED] = weakref.ref(shared)  # metadata outlives backward
    channels, rows = shared.maps
    normalized = Normalized(x, channels, rows, dim_order)
    return _Recipe(normalized, x._version, None, (), shared)


def _is_contiguous_anyway(node: Any) -> bool:
    """Whether the output of that norm is contiguous, however its input lies."""
    name = type(node).__name__
    return name == "NativeLayerNormBackward0" or (
        name == "NativeGroupNormBackward0" and node._saved_input.is_cuda
    )


def _is_in_a_memory_format(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (
        x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
    )


_SHARED = "inplace_ops: maps"  # in a norm's metadata: what all that read its output share


class _SharedMaps:
    """The maps of a norm's output, as long as a recipe holds them."""

    def __init__(self, maps: Maps) -> None:
        self.maps = maps
        device = maps.channels.device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def use(self) -> None:
        """Let the present stream wait until they are formed, and them until it has used them."""
        if self.stream is None:
            return
        stream = torch.cuda.current_stream(self.maps.channels.device)
        if stream != self.stream:
            stream.wait_stream(self.stream)
            for part in self.maps:
                if part is not None:
                    part.record_stream(stream)


def _nothing() -> None:
    return None
