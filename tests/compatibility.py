"""The record of a run for the README's table of compatibility.

`pytest --compatibility` writes to compatibility.csv how many tests of each row passed on this torch
and Python, and why others did not run.
"""

from __future__ import annotations

import csv
import platform
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).with_suffix(".csv")
COLUMNS = ("row", "torch", "python", "date", "passed", "failed", "not_run")

# By the beginning of a test's name.
ROWS = {
    "values, dtypes, layouts": ("test_values", "test_ops", "test_silu_inverse", "test_every"),
    "autograd, modules": ("test_autograd", "test_modules"),
    "PyTorch's OpInfo samples, gradcheck": ("test_opinfo",),
    "torch.func: vmap, grad, jvp, jacrev, hessian": ("test_functorch",),
    "torch.compile": ("test_compile",),
    "fx, export, AOTInductor, ONNX, jit": ("test_tracing",),
    "autocast, checkpoint, hooks, threads": ("test_training",),
    "DDP, FSDP2, DTensor, tensor parallel": ("test_distributed",),
    "fuzzing, wrong arguments": ("test_fuzz", "test_direct"),
    "convert": ("test_conversion", "test_docs", "test_models"),
    "CUDA kernels on the host, disassembly": ("test_host_kernels", "test_cuda_code"),
    "CUDA kernels on a GPU": ("test_cuda.py",),
}


def row_of(node: str) -> str | None:
    """The row of a test; what needs a GPU has its own."""
    name = node.rpartition("tests/")[2]
    found = [row for row, starts in ROWS.items() if name.startswith(starts)]
    return (
        "CUDA kernels on a GPU" if "cuda-" in name or "[cuda]" in name else next(iter(found), None)
    )


class Recorder:
    """A pytest plugin that counts outcomes by row."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = row_of(report.nodeid)
        if row is None or (report.when != "call" and report.passed):
            return
        self.outcomes[row][report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[row][report.longrepr[2].removeprefix("Skipped: ")] = None

    def pytest_sessionfinish(self) -> None:
        here = {"torch": torch.__version__, "python": platform.python_version()}
        lines = [line for line in read() if any(line[key] != here[key] for key in here)]
        for row in ROWS:
            lines.append(
                {
                    "row": row,
                    **here,
                    "date": date.today().isoformat(),
                    "passed": str(self.outcomes[row]["passed"]),
                    "failed": str(self.outcomes[row]["failed"]),
                    "not_run": "; ".join(self.reasons[row]),
                }
            )
        with FILE.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


def read() -> list[dict[str, str]]:
    """The lines of the record."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))
