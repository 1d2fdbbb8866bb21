"""Peak bytes, and `Packed`: the base class of what is saved instead of a tensor."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from ._torch_private import (
    WeakTensor,
    current_stream,
    is_traceable_wrapper_subclass,
    profiler_is_running,
    storage_id,
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
    """A tensor that is saved while `saved_bytes` counts; it lives as long as the graph needs it.

    Attributes:
        value: A detached alias, which keeps no part of the graph alive; or what replaces it.
        original: A weak reference to the tensor, which leads to the one that it is a view of.
        version: The tensor's version when it was saved. PyTorch compares none under hooks.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.value: Tensor | Packed = tensor.detach()
        self.original = WeakTensor(tensor)
        self.version = 0 if tensor.is_inference() else tensor._version

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors that this object keeps alive."""
        return self.value.tensors() if isinstance(self.value, Packed) else (self.value,)


def unpack_measured(saved: Measured) -> Tensor:
    """Return the saved tensor: the unpack hook of `saved_bytes`.

    The recompute engine recognizes this hook, and replaces tensors that are saved under it.

    Raises:
        WrittenToError: If the tensor was modified in place: PyTorch compares nothing under hooks.
    """
    tensor = saved.value
    if isinstance(tensor, Packed):
        return tensor.unpack()
    if not tensor.is_inference() and tensor._version != saved.version:
        raise written_to_error(tensor, saved.version)
    return tensor


class WrittenToError(RuntimeError):
    """A leaf was modified after its spec was built, or a tensor after it was saved under hooks.

    The text is PyTorch's own for a modified saved tensor, except that it says "from which a saved
    tensor is recomputed" where PyTorch names the operation that returned the tensor.
    """


def written_to_error(tensor: Tensor, version: int) -> WrittenToError:
    """Return the error of a tensor that was at this version when it was saved, or became a leaf."""
    if tensor._version == version:
        return WrittenToError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation that raises no version, such as an optimizer's step: [{tensor.type()} "
            f"{list(tensor.shape)}], from which a saved tensor is recomputed. Call backward before "
            "it, or inplace_ops.revert(model)"
        )
    return WrittenToError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}], from which a saved tensor is "
        f"recomputed, is at version {tensor._version}; expected version {version} instead. Hint: "
        "enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def peak_bytes(fn: Callable[[], object]) -> int | None:
    """Call `fn` and return the most bytes that it allocates at one time, on all devices together.

    Return None if PyTorch's profiler, which counts the bytes, is already running.
    """
    if profiler_is_running():
        return None
    gc.collect()  # garbage that is freed during the call would be subtracted
    with _silent_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        fn()
    allocated = peak = 0
    for event in sorted(profile.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """Keep PyTorch's profiler from printing that it starts, and that there is no GPU.

    Its library, Kineto, reads the variable when a process profiles for the first time: if that is
    here, it stays silent.
    """
    name = "KINETO_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "99")  # above all levels
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(name, None)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the memory of tensors; an upper bound for layouts other than strided."""
    storages: dict[int, int] = {}
    for part in chain.from_iterable(map(plain_tensors, tensors)):
        if part.layout is torch.strided:
            storage = part.untyped_storage()
            storages[storage_id(storage)] = storage.nbytes()
        else:
            storages[id(part)] = part.numel() * part.itemsize
    return sum(storages.values())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor consists of: a DTensor's local part, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            yield from plain_tensors(part)
