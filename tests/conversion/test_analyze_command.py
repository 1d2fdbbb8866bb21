"""Test `python -m inplace_ops analyze`, and building a library's model by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inplace_ops.conversion.library import ModelNotFoundError, load


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inplace_ops", "analyze", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    code = """
from torch import nn

def small(width=8):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.SiLU(),
                         nn.Conv2d(width, 4, 3))
"""
    (tmp_path / "own_models.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "own_models:small"


def test_analyze_prints_report(library: str) -> None:
    result = analyze(library, "--input", "2,3,32,32", "--set", "width=16", "--max-ops", "2")
    assert result.returncode == 0, result.stderr
    assert "saved for backward" in result.stdout
    assert "SiLU" in result.stdout


def test_analyze_prints_json(library: str) -> None:
    result = analyze(library, "--input", "2,3,32,32", "--json", "--eval")
    report = json.loads(result.stdout)
    assert report["saved_bytes_after"] < report["saved_bytes_before"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("timm", "--input", "1"), "expected LIBRARY:NAME"),
        (("no_such_library:x", "--input", "1"), "No module named 'no_such_library'"),
        (("torch:no_such_name", "--input", "1"), "no_such_name"),
        (("torch:ones", "--input", "1", "--set", "width"), "invalid setting value: 'width'"),
        (("torch:ones", "--input", "1", "--optimize", "speed"), "unrecognized arguments"),
        (("torch:ones",), "--input"),
    ],
)
def test_invalid_analyze_arguments_exit_with_error(arguments: tuple[str, ...], error: str) -> None:
    result = analyze(*arguments)
    assert result.returncode == 2
    assert error in result.stderr


def test_load_builds_models_of_libraries() -> None:
    with pytest.raises(ModelNotFoundError, match="expected LIBRARY:NAME"):
        load("timm")
    pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10, "intermediate_size": 8}
    model = load("transformers:LlamaModel", {**small, "num_attention_heads": 2})
    assert type(model).__name__ == "LlamaModel"
    assert model.config.hidden_size == 8
    with pytest.raises(ModelNotFoundError, match=r"billion parameters.*--set"):
        load("transformers:LlamaModel")
