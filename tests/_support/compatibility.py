"""Record a test run for the table in docs/compatibility.md.

`pytest --compatibility` writes to compatibility.csv, for this version of torch and Python, how many
tests of each row of the table passed, and why other tests did not run. `make tables` writes the
table.
"""

from __future__ import annotations

import csv
import platform
import re
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[1] / "compatibility.csv"
COLUMNS = ("row", "torch", "python", "date", "passed", "failed", "not_run")

# The rows of the table, and the test files of each row by the beginnings of their names. Tests that
# need a GPU are in a separate row.
ROWS = {
    "values, dtypes, layouts": (
        "test_activations",
        "test_batch_norm_ops",
        "test_every",
        "test_examples",
        "test_ops",
        "test_smooth_activations",
        "test_values",
    ),
    "autograd, modules": ("test_autograd", "test_modules"),
    "PyTorch's OpInfo samples, gradcheck": ("test_opinfo",),
    "torch.func: vmap, grad, jvp, jacrev, hessian": ("test_functorch",),
    "torch.compile": ("test_compile.py", "test_compiled_memory"),
    "fx, export, AOTInductor, ONNX, jit": ("test_tracing",),
    "autocast, checkpoint, hooks, threads": ("test_training",),
    "DDP, FSDP2, DTensor, tensor parallel": ("test_distributed",),
    "wrong arguments, sanitizers": ("test_direct", "test_python_calls"),
    "convert": (
        "test_convert",
        "test_engine",
        "test_analyze",
        "test_public_reports",
        "test_docs",
        "test_models",
    ),
    "CUDA kernels on the host, interpreted, disassembled": (
        "test_compiled_kernels",
        "test_cuda_code",
        "test_device_numerics",
        "test_host_kernels",
    ),
}
ON_A_GPU = "on a GPU"
# Beginnings of the names of files that need a GPU as a whole.
_GPU_FILES = ("test_cuda.py", "test_cuda_models", "test_cuda_nodes")


def row_of(node: str, reason: str) -> str | None:
    """Return the row of a test; None if it has none.

    Args:
        node: The test's pytest node ID.
        reason: Why the test was skipped; empty if it ran.
    """
    name = node.partition("::")[0].rpartition("/")[2]
    if name.startswith(_GPU_FILES) or re.search(r"[\[-]cuda[\]-]|GPU|\.cuda ", name + reason):
        return ON_A_GPU
    return next((row for row, prefixes in ROWS.items() if name.startswith(prefixes)), None)


class Recorder:
    """A pytest plugin that counts the outcomes of tests by row."""

    def __init__(self) -> None:
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.record_reason(report.nodeid, report)
        if row is not None and (report.when == "call" or not report.passed):
            self.outcomes[row][report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole file
            self.record_reason(report.nodeid, report)

    def record_reason(
        self, node: str, report: pytest.CollectReport | pytest.TestReport
    ) -> str | None:
        """Record why a test or a file was skipped, if it was, and return its row."""
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        row = row_of(node, reason)
        if row is not None and reason:
            missing = r".*(?:could not import|No module named) '(\w+)'.*"
            short = re.sub(missing, r"no \1", reason)
            self.reasons[row][short.removeprefix("Skipped: ")] = None
        return row

    def pytest_sessionfinish(self) -> None:
        if not torch.cuda.is_available():  # conftest.py then deselects tests that need a GPU
            self.reasons[ON_A_GPU]["torch.cuda is not available"] = None
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        lines = [line for line in read() if any(line[key] != versions[key] for key in versions)]
        for row in (*ROWS, ON_A_GPU):
            lines.append(
                {
                    "row": row,
                    **versions,
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
    """Return the lines of compatibility.csv; an empty list if there is no such file."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))
