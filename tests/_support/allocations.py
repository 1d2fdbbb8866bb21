"""Measurements of allocated CPU memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def largest_allocation() -> Iterator[list[int]]:
    """Yield a list that gets one entry after the block: the peak of the allocated CPU bytes."""
    found: list[int] = []
    gc.collect()  # garbage of earlier tests that is freed during the block would be subtracted
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        yield found
    allocated = peak = 0
    for event in sorted(profile.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    found.append(peak)


def saved_allocation(call: Callable[[], object]) -> int:
    """Return the CPU bytes that stay allocated for the result of a call and its saved tensors."""
    gc.collect()  # as above
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = call()
    events = profile.kineto_results.events()
    del result
    return sum(event.nbytes() for event in events if event.name() == "[memory]")
