"""What the measurements of memory count."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from _support.allocations import largest_allocation, saved_allocation

from inplace_ops.memory import peak_bytes


class Cycle:
    """An object that only the garbage collector frees, with memory that PyTorch counted."""

    def __init__(self) -> None:
        self.cycle = self
        self.memory = torch.zeros(100_000)


def largest(call: Callable[[], object]) -> int:
    with largest_allocation() as found:
        call()
    return found[0]


@pytest.mark.parametrize("measure", [saved_allocation, largest, peak_bytes])
def test_garbage_of_an_earlier_measurement_does_not_count(
    measure: Callable[[Callable[[], object]], int],
) -> None:
    """PyTorch's profiler subtracts freed memory if it saw the allocation, in any measurement."""

    def allocate() -> torch.Tensor:
        gc.collect()
        return torch.zeros(1000)

    measure(Cycle)
    assert measure(allocate) == 4000
