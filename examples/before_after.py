"""Train twice, as PyTorch does and converted, and print one line: what the examples end in."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import inplace_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# On a CPU without AVX-512 products take up to 50 times as long in 16 bits as in float32.
HAS_BFLOAT16 = DEVICE == "cuda" or "AVX512" in torch.backends.cpu.get_cpu_capability()
MIB = 2**20


@dataclass
class Training:
    """The losses and times of a training's steps, and the report if its model was converted."""

    report: inplace_ops.Report | None = None
    losses: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def step(self, loss: float) -> None:
        """Record the end of a step and its loss."""
        self.losses.append(loss)
        self.ends.append(time.perf_counter())

    @property
    def milliseconds(self) -> float:
        """The median time of a step; the first one is left out."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return 1e3 * statistics.median(end - begin for begin, end in pairs)


def before_after(train: Callable[[bool], Training]) -> None:
    """Call `train(False)` and `train(True)`, which converts its model, and print what changed.

    The saved and peak bytes are of one forward and backward pass on an example, from the report of
    `convert`. Times and losses are of the training.
    """
    before, after = train(False), train(True)
    report = after.report
    assert report is not None
    changes = {
        "saved, MiB": (report.saved_bytes_before / MIB, report.saved_bytes_after / MIB),
        "peak, MiB": (report.peak_bytes_before / MIB, report.peak_bytes_after / MIB),
        "step, ms": (before.milliseconds, after.milliseconds),
    }
    line = [f"{name}: {old:.1f} -> {new:.1f}" for name, (old, new) in changes.items()]
    line.append(f"last loss: {before.losses[-1]:.4f} -> {after.losses[-1]:.4f}")
    print("; ".join(line))
