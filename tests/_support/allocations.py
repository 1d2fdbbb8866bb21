"""Measurements of allocated CPU memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
