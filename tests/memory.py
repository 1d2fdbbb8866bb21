"""What is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def largest_allocation() -> Iterator[list[int]]:
    """The most bytes that the block allocates on the CPU at one time: entry 0, at the end."""
    found: list[int] = []
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        yield found
    allocated = peak = 0
    for event in sorted(profile.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    found.append(peak)


def saved_allocation(call: Callable[[], object]) -> int:
    """The bytes that the result of a call holds on the CPU, with all that backward needs."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = call()
    events = profile.kineto_results.events()
    del result
    return sum(event.nbytes() for event in events if event.name() == "[memory]")
