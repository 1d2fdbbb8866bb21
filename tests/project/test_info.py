"""Test `python -m inplace_ops info` and errors of the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import inplace_ops
from inplace_ops import __main__ as command_line, _ops
from inplace_ops.activations import ACTIVATIONS


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["inplace_ops", *arguments])
    return command_line.main()


def test_info_checks_every_op(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "info") == 0
    output = capsys.readouterr().out
    assert inplace_ops.__version__ in output
    assert torch.__version__ in output
    cuda = f"yes, CUDA {_ops.cuda_version}" if _ops.cuda_version else f"no ({_ops.no_cuda})"
    assert re.search(rf"(?m)^CUDA kernels: +{re.escape(cuda)}", output)
    devices = ["cpu"]
    if torch.cuda.is_available() and _ops.cuda_version is not None:
        devices.append("cuda")
    for device in devices:
        for op in (activation.function for activation in ACTIVATIONS):
            line = rf"(?m)^.*\b{op}.*\b{device}\b.*\bok\b"
            assert re.search(line, output), f"{op} on {device}:\n{output}"


def test_failed_check_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_self_check", lambda *_: "FAILED: values differ")
    assert run(monkeypatch, "info") == 1
    assert "FAILED: values differ" in capsys.readouterr().out


def test_module_runs_without_cuda_kernels_on_a_cuda_torch() -> None:
    code = """
import runpy, sys, torch
torch.version.cuda = "13.0"
sys.modules["inplace_ops._C_cuda"] = None  # importing it fails, as if the file did not exist
sys.argv = ["inplace_ops", "info"]
runpy.run_module("inplace_ops", run_name="__main__")  # python -m inplace_ops info
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"CUDA kernels: +no \(inplace_ops is built without", result.stdout)


def test_console_script_prints_the_same() -> None:
    script = Path(sys.executable).parent / "inplace-ops"
    if not script.exists():
        pytest.skip("pip has not installed inplace_ops here")
    result = subprocess.run([script, "info"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"inplace_ops:      {inplace_ops.__version__}" in result.stdout
