"""Access to autograd's nodes and to the tensors that they save.

PyTorch documents `_saved_*`, `_raw_saved_*`, `metadata` and `next_functions` in its notes on
autograd. All other attributes are private, and `_torch_private.py` reads them.

NOTE [Look before reading a saved tensor]

Reading `node._saved_x` calls the unpack hook of that saved tensor. Inside a checkpoint the hook
recomputes the whole checkpointed region in the middle of forward, and batch norms update their
statistics twice. So every function here checks `node._raw_saved_x.unpack_hook` first:

1. If there is no hook, or only that of `inplace_ops.saved_bytes`, the engine may read and replace
   the saved tensor.
2. If the hook is the engine's own, the engine may read the packed value. It does not read the saved
   tensor, as that would recompute it.
3. If the hook belongs to other code, the engine neither reads nor replaces the saved tensor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from .._torch_private import (
    SYNC_BATCH_NORM,
    TO_COPY,
    DisableTorchFunction,
    Node as Node,
    OpOverload,
    current_stream,
    default_saved_tensor_hooks,
    function_of as function_of,
    is_named,
    is_transformed as is_transformed,
    next_sequence_number as next_sequence_number,
    op_name,
    output_device as output_device,
    output_dtype as output_dtype,
    output_shape as output_shape,
    sequence_number as sequence_number,
    set_grad_enabled,
    tree_leaves,
)
from ..activations import ACTIVATIONS, RELU6, Activation
from ..memory import Measured, Packed, unpack_measured

_T = TypeVar("_T")

# None before torch 2.14.
creation_hook: Any = getattr(torch.autograd.graph, "node_creation_hook", None)
USE_CREATION_HOOK = creation_hook is not None  # see NOTE [Where nodes come from] in `run.py`

_KNOWN = (__name__.partition(".")[0] + ".", "torch.nn.")  # modules with Functions in the tables

# By the node types of PyTorch's and this package's Functions: fields of the tensors that they save.
_FUNCTION_FIELDS = {
    SYNC_BATCH_NORM: ("input", "weight", "result1", "result2", "count"),
    "RecomputeFunctionBackward": (
        "x",
        "channel_affine",
        "row_statistics",
        "anchor",
        "mean",
        "rstd",
    ),
}


def is_python_function(node_type: type) -> bool:
    """Whether nodes of the type belong to a `torch.autograd.Function`."""
    return issubclass(node_type, BackwardCFunction)


def is_users_function(node_type: type) -> bool:
    """Whether nodes of the type belong to an autograd Function that this file does not know."""
    function = function_of(node_type)
    return function is not None and not function.__module__.startswith(_KNOWN)


class ByType(dict[type, _T | None]):
    """A table with an entry for each node type, `table[type(node)]`, made from one by type names.

    The entry is None for types that are not in the table, and for all Functions of users, whatever
    their names.
    """

    def __init__(self, by_name: Mapping[str, _T]) -> None:
        self._by_name = by_name

    def __missing__(self, node_type: type) -> _T | None:
        if is_users_function(node_type):
            return None  # not stored: programs create and delete such types
        self[node_type] = entry = self._by_name.get(node_type.__name__)
        return entry


def operation_name(node: Node) -> str:
    """Return the name of a node's operation: "Convolution" for ConvolutionBackward0.

    An activation has the name of PyTorch's module: "SiLU" for SiluBackward0 and this package's own.
    """
    node_type = type(node)
    name = _names.get(node_type)
    if name is not None:
        return name
    if is_python_function(node_type):
        # This package's Functions have their activation: in the node, or in the class.
        for owner in (node, function_of(node_type)):
            activation = getattr(owner, "activation", None)
            if isinstance(activation, Activation):
                return activation.name
        return node_type.__name__.removesuffix("Backward")
    name = name_of_type(node_type.__name__)
    if name == "Hardtanh":  # a ReLU6 if it has that one's arguments
        arguments = node._saved_min_val, node._saved_max_val
        return RELU6.name if arguments == RELU6.aten[1:] else name
    return _names.setdefault(node_type, name)


def name_of_type(node_type: str) -> str:
    """Return the name of the operation of PyTorch's own nodes of a type, given by its name."""
    name = node_type.rpartition("Backward")[0] or node_type
    return _ACTIVATION_NAMES.get(name, name)


def name_of_op(op: OpOverload) -> str:
    """Return the name of the operation that an op computes, as `operation_name` of its node."""
    return name_of_type(_camel_case(op_name(op)))


def _camel_case(name: str) -> str:
    """Return a name as autograd's node types have it: LeakyRelu for leaky_relu."""
    return name.title().replace("_", "")


_ACTIVATION_NAMES = {
    _camel_case(activation.torch_name): activation.name
    for activation in ACTIVATIONS
    if len(activation.aten) <= 1
}
_names: dict[type, str] = {}  # the operation's name for each type of PyTorch's own nodes


class no_graph:  # named like torch.no_grad
    """Context manager that disables grad mode and the caller's function modes.

    `torch.no_grad` takes twice as long.
    """

    __slots__ = ("_function", "_was_enabled")

    def __enter__(self) -> None:
        self._function = DisableTorchFunction()
        self._function.__enter__()
        self._was_enabled = torch.is_grad_enabled()
        if self._was_enabled:
            set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        if self._was_enabled:
            set_grad_enabled(True)
        self._function.__exit__(*error)


def producer(node: Node, index: int) -> tuple[Node, int]:
    """Return the node that produced input `index` of an operation, and the index of its output.

    The node is None if the input has no gradient, or is not a tensor.
    """
    edges = node.next_functions
    return edges[index] if index < len(edges) else (None, 0)


def grad_fn_of(tensor: Tensor) -> Node:
    """Return the node that produced a tensor; None if there is none, or if autograd does not tell.

    If the base of a view was modified in place, this call updates the view's `grad_fn`. Autograd
    does so only when `grad_fn` is read. Until then a new hook on the view is lost, or crashes.

    Autograd raises for a stale view: one of several outputs of an operation, whose base was
    modified in place since.
    """
    try:
        if type(tensor) is Tensor:  # entering the context takes long
            return tensor.grad_fn
        with DisableTorchFunction():
            return tensor.grad_fn
    except RuntimeError:
        return None


# Return the node that produced each input of an operation, and the index of its output.
producers: Callable[[Node], tuple[tuple[Node, int], ...]] = attrgetter("next_functions")


with torch.inference_mode(False):
    ACCUMULATE_GRAD_TYPE: Any = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


def autograd_leaf_of(node: Node) -> Tensor | None:
    """Return the tensor of an AccumulateGrad node; None of other nodes."""
    return node.variable if type(node) is ACCUMULATE_GRAD_TYPE else None


def is_cast_of_autograd_leaf(node: Node) -> bool:
    """Whether the operation casts a parameter to another dtype."""
    return _cast_autograd_leaf(node) is not None


def downcasts_autograd_leaf(node: Node) -> bool:
    """Whether the operation casts a parameter to a smaller dtype, as autocast does."""
    leaf = _cast_autograd_leaf(node)
    return leaf is not None and leaf.dtype.itemsize > output_dtype(node, 0).itemsize


def _cast_autograd_leaf(node: Node) -> Tensor | None:
    if not is_named(node, TO_COPY):
        return None
    source, _ = producer(node, 0)
    return None if source is None else autograd_leaf_of(source)


def argument(node: Node, name: str) -> Any:
    """Return a saved argument that is not a tensor. Nodes return integers as if unsigned."""
    value = getattr(node, names_of(name)[1])
    if isinstance(value, (tuple, list)):
        return tuple([_signed(item) for item in value])
    return _signed(value)


def _signed(value: Any) -> Any:
    return value - 2**64 if type(value) is int and value >= 2**63 else value


def output_bytes(node: Node, index: int) -> int:
    """Return the size of one of the operation's outputs."""
    return output_shape(node, index).numel() * output_dtype(node, index).itemsize


def stream_of(node: Node) -> torch.cuda.Stream | None:
    """Return the current CUDA stream of an operation's device; None of other devices.

    Where there is only one GPU, operations on the CPU also get its stream, because reading a node's
    device takes long.
    """
    if not torch.cuda.is_initialized():
        return None
    device = _only_gpu() or output_device(node, 0)
    return current_stream(device) if device.type == "cuda" else None


@cache
def _only_gpu() -> torch.device | None:
    """Return the GPU if there is only one."""
    return torch.device("cuda", 0) if torch.cuda.device_count() == 1 else None


def is_being_captured(tensor: Tensor) -> bool:
    """Whether a CUDA graph captures operations on the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def saved_tensor(node: Node, field: str) -> Tensor | None:
    """Return a saved tensor; None if there is none, or if the engine may not read it.

    Raises:
        RuntimeError: If a backward has freed the tensor, or if it was modified in place.
    """
    names = names_of(field)
    raw = getattr(node, names[0], None)
    if raw is not None and raw.unpack_hook is None:  # the usual case
        saved: Tensor | None = getattr(node, names[1])
        return saved
    return _read(node, field) if is_readable(_raw(node, field)) else None


def _raw(node: Node, field: str) -> Any:
    """Return the handle of a saved tensor."""
    raw = getattr(node, names_of(field)[0], _MISSING)
    if raw is _MISSING:
        return node._raw_saved_tensors[_FUNCTION_FIELDS[type(node).__name__].index(field)]
    return raw


_MISSING = object()


@cache
def names_of(field: str) -> tuple[str, str]:
    """Return the attributes of a field of a node: autograd's handle, and the saved tensor.

    They are interned: Python finds attributes of other names slowly.
    """
    return sys.intern(f"_raw_saved_{field}"), sys.intern(f"_saved_{field}")


def _read(node: Node, field: str) -> Any:
    """Return a saved tensor that has no hooks of other code."""
    saved = getattr(node, names_of(field)[1], _MISSING)
    if saved is not _MISSING:
        return saved
    index = _FUNCTION_FIELDS[type(node).__name__].index(field)
    if all(map(is_readable, node._raw_saved_tensors)):  # this read compares versions
        return node.saved_tensors[index]
    value = node._raw_saved_tensors[index].data
    return value.value if isinstance(value, Measured) else value


class Field:
    """What a node saves in one field, as it is now. It is read once, since each read takes long.

    Attributes:
        tensor: The saved tensor; None if there is none, or if the engine may not read it.
        packed: What the engine has saved instead; None if it has replaced nothing.
        is_hidden: Whether hooks of other code have the tensor: rule 3 of NOTE [Look before reading
            a saved tensor].
        is_itself: Whether `tensor` is the saved tensor itself, and not an alias, as it is while
            `saved_bytes` counts and while a checkpointed block runs again. Each read of an alias
            makes another tensor.
    """

    __slots__ = ("_handle", "is_hidden", "is_itself", "packed", "tensor")

    def __init__(self, node: Node, name: str) -> None:
        """Read a field.

        Raises:
            RuntimeError: If a backward has freed the tensor, or if it was modified in place.
        """
        self.tensor: Tensor | None = None
        self.packed: Packed | None = None
        self.is_hidden = False
        raw, saved = names_of(name)
        handle = getattr(node, raw, None)
        if handle is not None and handle.unpack_hook is None:  # the usual case
            self._handle, self.is_itself, self.tensor = handle, True, getattr(node, saved)
            return
        handle = self._handle = _raw(node, name)
        self.is_itself = handle is None or handle.unpack_hook is None
        if self.is_itself or is_readable(handle):
            self.tensor = _read(node, name)
        else:
            self.packed = _packed_of(handle)
            self.is_hidden = self.packed is None  # rule 3

    @property
    def lasting(self) -> Tensor | None:
        """The saved tensor or its alias: a tensor that lives as long as the node saves it."""
        return self.tensor if self.is_itself else self._handle.data.value

    @property
    def original(self) -> Tensor | None:
        """The saved tensor itself; if it is gone, the alias that this read has made."""
        if self.is_itself or self.is_hidden:
            return self.tensor
        tensor = self._handle.data.original()
        return self.tensor if tensor is None else tensor

    def replace(self, value: Packed) -> None:
        """Save `value` instead of the tensor. Backward then reads `value.unpack()`."""
        if self.is_itself:
            put(self._handle, value)
        else:
            self._handle.data.value = value


def put(handle: Any, value: Packed) -> None:
    """Save `value` instead of the tensor of a handle without hooks."""
    handle.register_hooks(lambda _: value, _unpack)


_unpack = methodcaller("unpack")  # of a `Packed`


def packed(node: Node, field: str) -> Packed | None:
    """Return what the engine has saved instead of a tensor; None if it has replaced nothing."""
    return _packed_of(_raw(node, field))


def _packed_of(handle: Any) -> Packed | None:
    if handle.unpack_hook is None:
        return None
    value = handle.data
    if isinstance(value, Measured):
        value = value.value
    return value if isinstance(value, Packed) else None


def saved_stride(node: Node, field: str) -> tuple[int, ...] | None:
    """Return a saved tensor's strides, or those that it had when the engine replaced it.

    Return None if other code's hooks hide the tensor.
    """
    saved: Any = saved_tensor(node, field)
    if saved is not None:
        return tuple(saved.stride())
    value: Any = packed(node, field)
    return None if value is None else tuple(value.stride)


def _fields_of(node: Node) -> tuple[str, ...]:
    node_type: Any = type(node)
    return tensor_fields(node_type)


def tensor_without_values(node: Node, field: str) -> Tensor:
    """Return a tensor that leads to the graph as a saved tensor does that `replace` has replaced.

    All of its elements share one address, and have no meaning.
    """
    unpacking.skips_values = True
    try:
        saved: Tensor = _read(node, field)
    finally:
        unpacking.skips_values = False
    return saved


class _Unpacking(threading.local):
    """Whether `Recomputed.unpack` returns a tensor without values, in this thread."""

    skips_values = False


unpacking = _Unpacking()


def is_readable(raw: Any) -> bool:
    """Whether a saved tensor has no hooks, or only those of `saved_bytes`, and is not replaced."""
    hook = raw.unpack_hook
    return hook is None or (hook is unpack_measured and isinstance(raw.data.value, Tensor))


@cache
def tensor_fields(node_type: Hashable) -> tuple[str, ...]:
    """Return the names of the fields in which nodes of a type of PyTorch's own save tensors."""
    prefix = "_raw_saved_"
    return tuple([name.removeprefix(prefix) for name in dir(node_type) if name.startswith(prefix)])


def root_of(tensor: Tensor) -> Node:
    """Return the node from which the graph of a tensor starts: its `grad_fn`.

    Of a stale view, for which autograd raises, it is that of the base.
    """
    with DisableTorchFunction():
        try:
            return tensor.grad_fn
        except RuntimeError:
            base = tensor._base
    return None if base is None else grad_fn_of(base)


def saved_handles(node: Node) -> list[Any]:
    """Return autograd's handles of all tensors that a node saves, whatever their hooks."""
    if is_python_function(type(node)):
        with suppress(RuntimeError):  # freed
            return [*node._raw_saved_tensors]
        return []
    handles: list[Any] = []
    for field in _fields_of(node):
        with suppress(RuntimeError):
            raw = getattr(node, names_of(field)[0])
            handles += raw if isinstance(raw, tuple) else [raw]
    return [handle for handle in handles if handle is not None]


def values_of(handle: Any) -> list[Tensor]:
    """Return the tensors that autograd's handle of a saved tensor keeps alive.

    Calls no unpack hook. If the hook belongs to other code, these are the tensors that were packed.
    """
    value = handle.data
    if isinstance(value, (Measured, Packed)):
        return [*value.tensors()]
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def readable_tensors(node: Node) -> Iterator[tuple[str, Tensor]]:
    """Return the field and the tensor for all tensors that a node saves as PyTorch saves them."""
    if is_python_function(type(node)):
        with suppress(RuntimeError):  # freed, or modified in place
            if all(map(is_readable, node._raw_saved_tensors)):
                saved = node.saved_tensors
                yield from ((str(i), t) for i, t in enumerate(saved) if t is not None)
            else:
                for field in _FUNCTION_FIELDS.get(type(node).__name__, ()):
                    tensor = saved_tensor(node, field)
                    if tensor is not None:
                        yield field, tensor
        return
    for field in _fields_of(node):
        with suppress(RuntimeError):
            raw = getattr(node, names_of(field)[0])
            if isinstance(raw, tuple):  # such as the indices of IndexBackward0
                if all(each is None or is_readable(each) for each in raw):
                    tensors = enumerate(getattr(node, names_of(field)[1]))
                    yield from ((f"{field}.{i}", t) for i, t in tensors if t is not None)
                continue
            tensor = saved_tensor(node, field) if raw is not None else None
            if tensor is not None:
                yield field, tensor


def packed_values(node: Node) -> Iterator[Packed]:
    """Return the packed values that `replace` saved instead of a node's tensors."""
    if is_python_function(type(node)):
        with suppress(RuntimeError):  # freed
            yield from filter(None, map(_packed_of, node._raw_saved_tensors))
    else:
        for field in _fields_of(node):
            raw = getattr(node, names_of(field)[0])
            if raw is not None and not isinstance(raw, tuple):
                value = packed(node, field)
                if value is not None:
                    yield value


def saved_tensor_hooks_are_active() -> bool:
    """Whether default saved-tensor hooks are active, as in a checkpoint or under `save_on_cpu`.

    The hooks of `inplace_ops.saved_bytes` do not count.
    """
    hooks = default_saved_tensor_hooks()
    return hooks is not None and hooks[1] is not unpack_measured
