"""Saved bytes: the memory that autograd and checkpoints save for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._torch_private import (
    cell_contents,
    checkpoint_of,
    coo_tensors,
    is_raised_by_disabling_hooks,
    next_sequence_number,
    saved_by_checkpoint,
    saved_tensor_hooks_are_disabled,
    sequence_number,
    storage_id,
    tree_leaves,
    unnoticed_saved_tensor_hooks,
)
from .memory import Measured, plain_tensors, unpack_measured
from .recompute import nodes
from .recompute.checkpoints import kept_by_checkpoint
from .recompute.nodes import Node

Sizes = dict[int, int]  # of storages, by their ids


def saved_bytes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Call `fn(*args, **kwargs)` and return the bytes that are saved for backward.

    That is what autograd saves, and what checkpoints keep to recompute from: their inputs, the
    outputs that a selective checkpoint caches, and random states.

    Each storage counts once. A view counts as its whole storage, and a DTensor as this process's
    part. What exists anyway does not count:

    - The arguments, also those that `fn` modifies.
    - The parameters and buffers of `fn` if it is a module.
    - The parameters, also frozen ones, of modules that `fn` refers to: as a method's object, an
      argument of `functools.partial`, an attribute of a callable object, or a variable that a
      function uses, which may itself be such a function.
    - All other tensors that are leaves of the result's graph.
    - The result, if a selective checkpoint caches it. It counts if an operation saves it.

    Args:
        fn: A module or any callable. It is called once, under the caller's grad mode and autocast;
            twice if it disables saved-tensor hooks, as `torch.func.grad` does. The second call
            misses what in-place operations on views save.
        *args: The arguments of `fn`; tensors in nested lists, tuples and dicts are found.
        **kwargs: The keyword arguments of `fn`.

    Returns:
        The bytes that the graph of the result saves after `fn` has returned.

    Raises:
        TypeError: If `fn` is not callable.
        NotImplementedError: If a tensor's layout is neither strided nor sparse COO.
    """
    if not callable(fn):
        hint = ": call saved_bytes(model, x)" if any(map(callable, args)) else ""
        raise TypeError(f"fn must be a module or a function, got {type(fn).__name__}{hint}")
    call = partial(fn, *args, **kwargs)
    first = next_sequence_number()
    try:
        saved, result = _call(call, with_hooks=not saved_tensor_hooks_are_disabled())
    except Exception as error:
        if not is_raised_by_disabling_hooks(error):
            raise
        first = next_sequence_number()
        saved, result = _call(call, with_hooks=False)
    not_counted = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if isinstance(fn, nn.Module):
        not_counted += [*fn.parameters(), *fn.buffers()]
    else:
        not_counted += _parameters_of(fn)
    graph = graph_of(tensors_in(result), first)
    not_counted += [leaf for node in graph for leaf in _leaves_of(node)]
    return _bytes_excluding(not_counted, saved)


def model_bytes(
    model: nn.Module, call: Callable[[], Any], inputs: Iterable[Tensor], with_hooks: bool = True
) -> int:
    """Return the bytes that a call of the model saves for backward.

    Unlike in `saved_bytes`, only the model's own parameters and buffers, and the tensors in
    `inputs`, do not count.

    Args:
        model: The model.
        call: Calls the model and returns its result.
        inputs: The arguments.
        with_hooks: Whether saved-tensor hooks count. Otherwise a walk over the graph does, which
            misses what in-place operations on views save.
    """
    saved, result = _call(call, with_hooks)
    del result
    return _bytes_excluding([*model.parameters(), *model.buffers(), *inputs], saved)


def _call(call: Callable[[], Any], with_hooks: bool) -> tuple[Sizes, Any]:
    """Return the sizes of the storages that a call saves for backward, and the call's result."""
    references: list[weakref.ref[Measured]] = []

    def pack(tensor: Tensor) -> Measured:
        saved = Measured(tensor)
        references.append(weakref.ref(saved))
        return saved

    first = next_sequence_number()
    if with_hooks:
        with unnoticed_saved_tensor_hooks(pack, unpack_measured):
            result = call()
    else:
        result = call()

    tensors: list[Tensor] = []
    for reference in references:
        saved = reference()
        tensors += [] if saved is None else saved.tensors()
    outputs = [*tensors_in(result)]
    graph = graph_of(outputs, first)
    for each in checkpointed_tensors(graph, outputs):
        tensors += each.tensors
    if not with_hooks:
        for node in graph:
            tensors += [t for handle in nodes.saved_handles(node) for t in nodes.values_of(handle)]
    return {storage_id(s): s.nbytes() for t in tensors for s in _storages(t)}, result


def graph_of(tensors: Iterable[Tensor], first: int) -> list[Node]:
    """Return the nodes that lead to tensors, in their order.

    Args:
        tensors: The tensors.
        first: The sequence number of the first node: nodes before it are not part of the graph.
    """
    found: set[Node] = set()
    pending = [nodes.root_of(tensor) for tensor in tensors]
    while pending:
        node = pending.pop()
        if node is None or node in found or sequence_number(node) < first:
            continue
        if nodes.autograd_leaf_of(node) is None:
            found.add(node)
            pending += [producer for producer, _ in nodes.producers(node)]
    return sorted(found, key=sequence_number)


class Checkpointed(NamedTuple):
    """A tensor that a checkpoint saves for backward, which no node saves.

    Attributes:
        node: The first node of the checkpointed function.
        tensors: The tensor, or what hooks have saved instead of it.
        handle: Autograd's handle of the tensor, or the tensor itself.
        op: The op that computed the tensor, if a selective checkpoint has cached it.
        is_input: Whether it is an argument of the checkpointed function.
    """

    node: Node
    tensors: list[Tensor]
    handle: Any
    op: Any
    is_input: bool


def checkpointed_tensors(
    graph: Iterable[Node], outputs: Sequence[Tensor]
) -> Iterator[Checkpointed]:
    """Yield the tensors that the checkpoints of a graph keep. Reentrant ones have none.

    An operation inside of a checkpoint saves a handle whose unpack hook belongs to the checkpoint.
    A selective checkpoint may cache one of `outputs`, which the caller has anyway: it is left out.
    """
    seen: set[Any] = set()
    for node in graph:
        for handle in nodes.saved_handles(node):
            own = kept_by_checkpoint(handle)
            checkpoint = checkpoint_of(handle.unpack_hook) if own is None else own
            if checkpoint is None or checkpoint in seen:
                continue
            seen.add(checkpoint)
            if own is not None:
                yield from (Checkpointed(node, [t], t, None, False) for t in own.tensors())
                continue
            for each in saved_by_checkpoint(checkpoint):
                is_tensor = isinstance(each.handle, Tensor)
                tensors = [each.handle] if is_tensor else nodes.values_of(each.handle)
                if each.op is None or not _ids(tensors) <= _ids(outputs):
                    yield Checkpointed(node, tensors, *each)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and in the attributes of objects."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        for leaf in tree_leaves(pending.pop(0)):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not (callable(leaf) or isinstance(leaf, ModuleType)):
                seen.add(id(leaf))
                pending.extend(getattr(leaf, "__dict__", {}).values())
                names = (getattr(cls, "__slots__", ()) for cls in type(leaf).__mro__)
                pending.extend(getattr(leaf, name, None) for name in chain.from_iterable(names))


def _leaves_of(node: Node) -> Iterator[Tensor]:
    """Yield the autograd leaves that an operation reads."""
    for producer, _ in nodes.producers(node):
        leaf = None if producer is None else nodes.autograd_leaf_of(producer)
        if leaf is not None:
            yield leaf


def _parameters_of(fn: Any) -> Iterator[Tensor]:
    """Yield the parameters and buffers of the modules that a callable refers to."""
    seen: set[int] = set()
    pending = [fn]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple, set)):
            pending += value
        elif isinstance(value, partial):
            pending += [value.func, value.args, value.keywords]
        elif isinstance(value, MethodType):
            pending += [value.__func__, value.__self__, getattr(value.__self__, "__dict__", {})]
        elif isinstance(value, FunctionType):
            if not (value.__module__ or "").startswith("torch."):
                names = _names_in(value.__code__)
                pending += [value.__globals__[n] for n in names if n in value.__globals__]
            pending += [*cell_contents(value), vars(value)]
        elif callable(value) and not isinstance(value, type):
            pending.append(getattr(value, "__dict__", {}))


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code may read as global variables, also in functions inside it."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*inner)


def _ids(tensors: Iterable[Tensor]) -> set[int]:
    return {storage_id(storage) for tensor in tensors for storage in _storages(tensor)}


def _bytes_excluding(not_counted: Iterable[Tensor], storages: Sizes) -> int:
    known: set[int] = set()
    for tensor in not_counted:
        if not is_lazy(tensor):
            with suppress(NotImplementedError):
                known |= _ids([tensor])
    return sum(size for key, size in storages.items() if key not in known)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [storage for part in plain_tensors(tensor) for storage in _storages_of_plain(part)]


def _storages_of_plain(tensor: Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout == torch.sparse_coo:
        return [part.untyped_storage() for part in coo_tensors(tensor)]
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"saved_bytes: cannot measure a tensor of layout {tensor.layout}")
    return [tensor.untyped_storage()]
