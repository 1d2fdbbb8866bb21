"""Measurements of allocated CPU memory, and limits of memory."""

from __future__ import annotations

import gc
import itertools
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of all allocations after the block; of frees negative."""
    found: list[int] = []
    gc.collect()  # garbage of earlier tests that is freed during the block would be subtracted
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        yield found
    events = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    found += [event.nbytes() for event in events if event.name() == "[memory]"]


@contextmanager
def largest_allocation() -> Iterator[list[int]]:
    """Yield a list that gets one entry after the block: the peak of the allocated CPU bytes."""
    found: list[int] = []
    with _allocations() as allocations:
        yield found
    found.append(max(itertools.accumulate(allocations, initial=0)))


def saved_allocation(call: Callable[[], object]) -> int:
    """Return the CPU bytes that stay allocated for the result of a call and its saved tensors."""
    with _allocations() as allocations:
        result = call()
    del result
    return sum(allocations)


@contextmanager
def _memory_limit(device: torch.device, more: int) -> Iterator[None]:
    """Let allocations of more than `more` further bytes fail."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = (torch.cuda.memory_reserved(device) + more) / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def out_of_memory_error(device: torch.device) -> Iterator[None]:
    """Leave no memory for 2**24 floats, and check that the block raises PyTorch's error."""
    taken: list[torch.Tensor] = []  # memory freed before, which the limit does not cover
    gc.collect()  # garbage that is freed during the block would be memory for it
    with _memory_limit(device, 2**25):
        with pytest.raises(RuntimeError) as pytorchs:
            taken.extend(torch.empty(2**24, device=device) for _ in itertools.count())
        # What is left may be a bit less than a tensor. A little that is freed would make it enough.
        with pytest.raises(RuntimeError):
            taken.extend(torch.empty(2**21, device=device) for _ in itertools.count())
        with pytest.raises(RuntimeError) as raised:
            yield
    assert type(raised.value) is type(pytorchs.value)
    assert _without_free_memory(raised.value) == _without_free_memory(pytorchs.value)


def _without_free_memory(error: Exception) -> str:
    """Return an out-of-memory message without the free memory, which other processes change."""
    return str(error).partition(" of which")[0][:100]
