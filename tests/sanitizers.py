"""Tests once more, in a process in which the code they test was compiled with ASan and UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZE = "INPLACE_OPS_SANITIZE"  # set in that process
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DHOST_DEVICE=inline"]
COMPILER = os.environ.get("CXX", "g++")


def sanitizers() -> list[str]:
    """The libraries that Python is to load first; skips where there are none, or in that run."""
    if SANITIZE in os.environ:
        pytest.skip("this is that run")
    if shutil.which(COMPILER) is None:
        pytest.skip("needs g++")
    libraries = [
        subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    paths = [library.stdout.strip() for library in libraries]
    if not all(os.path.isabs(path) for path in paths):
        pytest.skip(f"{COMPILER} has no sanitizers")
    return paths


def run_tests(*arguments: str, folder: Path, preloaded: list[str], **environment: str) -> None:
    """Run pytest with the arguments in `folder`; fail where it does."""
    # -s: a sanitizer ends the process, and what pytest has captured by then would be lost.
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
