from __future__ import annotations

import re
import subprocess
import sys

import torch

import inplace_ops
from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS


def test_info() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "inplace_ops", "info"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert inplace_ops.__version__ in result.stdout
    assert torch.__version__ in result.stdout
    assert "CUDA" in result.stdout
    devices = ["cpu"]
    if torch.cuda.is_available() and _ops.cuda_version is not None:
        devices.append("cuda")
    for device in devices:
        for op in (activation.function for activation in ACTIVATIONS):
            line = rf"(?m)^.*\b{op}.*\b{device}\b.*\bok\b"
            assert re.search(line, result.stdout), f"{op} on {device}:\n{result.stdout}"


def test_unknown_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "inplace_ops", "nonsense"], capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "nonsense" in result.stderr
