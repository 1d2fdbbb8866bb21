"""Run tests again in a process whose compiled code has ASan and UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZE = "INPLACE_OPS_SANITIZE"  # an environment variable, set in that process
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DHOST_DEVICE=inline"]
COMPILER = os.environ.get("CXX", "g++")


def sanitizers() -> list[str]:
    """Return the libraries for LD_PRELOAD.

    Skips the test without a compiler or sanitizers, and in the process that run_tests starts.
    """
    if SANITIZE in os.environ:
        pytest.skip("already runs with sanitizers")
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    libraries = [
        subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    paths = [library.stdout.strip() for library in libraries]
    if not all(os.path.isabs(path) for path in paths):
        pytest.skip(f"{COMPILER} has no sanitizers")
    return paths


def run_tests(*arguments: str, folder: Path, preloaded: list[str], **environment: str) -> None:
    """Run pytest in `folder`, with the arguments and with sanitizers; fail if it fails."""
    # -s: a sanitizer ends the process, and output that pytest has captured would be lost.
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-s",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            *arguments,
        ],
        env={
            **os.environ,
            "PYTEST_ADDOPTS": "",
            SANITIZE: "1",
            "LD_PRELOAD": " ".join(preloaded),
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            **environment,
        },
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
