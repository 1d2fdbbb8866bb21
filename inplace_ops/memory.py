"""Saved and peak bytes, and `Packed`: the base class of what is saved instead of a tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._torch_private import (
    coo_tensors,
    current_stream,
    is_traceable_wrapper_subclass,
    profiler_is_running,
    storage_id,
    tree_leaves,
)


class Packed:
    """Base class of objects that are saved for backward in place of a tensor.

    Not an `ABC`, for which `isinstance` takes ten times as long.

    Attributes:
        how: How backward obtains the tensor, as reports show it.
        stream: The CUDA stream on which `tensors()` are ready; None on a CPU.
    """

    how = "recomputed"
    stream: torch.cuda.Stream | None = None

    def unpack(self) -> Tensor:
        """Return the tensor that backward reads, ready on the current stream."""
        if self.stream is not None:
            current = current_stream(self.stream.device)
            if current is not self.stream:  # `current_stream` returns one object for each stream
                current.wait_stream(self.stream)
                for tensor in self.tensors():  # else their memory might be reused too early
                    tensor.record_stream(current)
        return self.compute()

    def compute(self) -> Tensor:
        """Compute the tensor that backward reads, with `tensors()` ready on the current stream."""
        raise NotImplementedError

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that this object keeps alive."""
        raise NotImplementedError


class Measured:
    """A tensor that is saved while `saved_bytes` counts; it lives as long as the graph needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.value: Tensor | Packed = tensor

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that this object keeps alive."""
        return self.value.tensors() if isinstance(self.value, Packed) else (self.value,)


def unpack_measured(saved: Measured) -> Tensor:
    """Return the saved tensor: the unpack hook of `saved_bytes`.

    The recompute engine recognizes this hook, and replaces tensors that are saved under it.
    """
    return saved.value.unpack() if isinstance(saved.value, Packed) else saved.value


def saved_bytes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Call `fn(*args, **kwargs)` and return the bytes that autograd saves for backward.

    Each storage counts once. A view counts as its whole storage, and a DTensor as this process's
    part. Parameters, the buffers of `fn` if it is a module, and the arguments do not count, because
    they exist anyway. This includes arguments that `fn` modifies.

    Args:
        fn: A module or any callable; it is called once, under the caller's grad mode and autocast.
        *args: The arguments of `fn`; tensors in nested lists, tuples and dicts are found.
        **kwargs: The keyword arguments of `fn`.

    Returns:
        The bytes that the graph of the result saves after `fn` has returned.

    Raises:
        NotImplementedError: If a tensor's layout is neither strided nor sparse COO.
    """
    storages, result = _saved_storages(fn, *args, **kwargs)
    # A pack hook receives a saved parameter as a plain tensor: only its storage identifies it.
    not_counted: list[Tensor] = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    not_counted += [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Parameter)]
    if isinstance(fn, nn.Module):
        not_counted += [*fn.parameters(), *fn.buffers()]
    del result
    return _bytes_excluding(not_counted, storages)


def model_bytes(model: nn.Module, call: Callable[[], Any], inputs: Iterable[Tensor]) -> int:
    """Return the bytes that a call of the model saves for backward.

    Unlike in `saved_bytes`, only the model's own parameters and buffers, and the tensors in
    `inputs`, do not count.
    """
    storages, result = _saved_storages(call)
    del result
    return _bytes_excluding([*model.parameters(), *model.buffers(), *inputs], storages)


def peak_bytes(fn: Callable[[], object]) -> int | None:
    """Call `fn` and return the most bytes that it allocates at one time, on all devices together.

    Return None if PyTorch's profiler, which counts the bytes, is already running.
    """
    if profiler_is_running():
        return None
    gc.collect()  # garbage that is freed during the call would be subtracted
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        fn()
    allocated = peak = 0
    for event in sorted(profile.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


def _saved_storages(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[dict[int, int], Any]:
    """Call `fn` and return the sizes of the storages that its graph saves, and its result."""
    handles: list[weakref.ref[Measured]] = []

    def pack(tensor: Tensor) -> Measured:
        saved = Measured(tensor.detach())  # detached: keeps no part of the graph alive
        handles.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack_measured):
        result = fn(*args, **kwargs)

    storages: dict[int, int] = {}
    for handle in handles:
        saved = handle()
        if saved is not None:
            storages |= {storage_id(s): s.nbytes() for t in saved.tensors() for s in _storages(t)}
    return storages, result


def _bytes_excluding(not_counted: Iterable[Tensor], storages: Mapping[int, int]) -> int:
    known = {storage_id(s) for t in not_counted if not is_lazy(t) for s in _storages(t)}
    return sum(size for key, size in storages.items() if key not in known)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: a DTensor's local part, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from plain_tensors(part)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    return [storage for part in plain_tensors(tensor) for storage in _storages_of_plain(part)]


def _storages_of_plain(tensor: Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout == torch.sparse_coo:
        return [part.untyped_storage() for part in coo_tensors(tensor)]
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"saved_bytes: cannot measure a tensor of layout {tensor.layout}")
    return [tensor.untyped_storage()]
