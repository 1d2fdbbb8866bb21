"""Test `python -m inplace_ops info` and errors of the command line."""

from __future__ import annotations

import re
import subprocess
import sys

import torch

import inplace_ops
from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS


def test_info_checks_every_op() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "inplace_ops", "info"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert inplace_ops.__version__ in result.stdout
    assert torch.__version__ in result.stdout
    cuda = f"yes, CUDA {_ops.cuda_version}" if _ops.cuda_version else f"no ({_ops.no_cuda})"
    assert re.search(rf"(?m)^CUDA kernels: +{re.escape(cuda)}", result.stdout)
    devices = ["cpu"]
    if torch.cuda.is_available() and _ops.cuda_version is not None:
        devices.append("cuda")
    for device in devices:
        for op in (activation.function for activation in ACTIVATIONS):
            line = rf"(?m)^.*\b{op}.*\b{device}\b.*\bok\b"
            assert re.search(line, result.stdout), f"{op} on {device}:\n{result.stdout}"


def test_reason_of_missing_cuda_kernels_on_a_cuda_torch() -> None:
    code = """
import sys, torch
torch.version.cuda = "13.0"
sys.modules["inplace_ops._C_cuda"] = None  # importing it fails, as if the file did not exist
from inplace_ops import _ops
print(_ops.cuda_version, _ops.no_cuda, sep=", ")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "None, inplace_ops is built without them\n", result.stderr


def test_unknown_command_exits_with_error() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "inplace_ops", "nonsense"], capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "nonsense" in result.stderr
