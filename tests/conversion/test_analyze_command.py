"""Test `python -m inplace_ops analyze`, and building a library's model by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inplace_ops import __main__ as command_line
from inplace_ops.conversion.library import ModelNotFoundError, load

Analyze = Callable[..., str]


@pytest.fixture
def analyze(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Analyze:
    """Run `python -m inplace_ops analyze` in this process, and return what it prints.

    test_info.py runs the command line in a process of its own.
    """

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["inplace_ops", "analyze", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        assert command_line.main() == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a function that builds a model, in a library that is not part of PyTorch."""
    code = """
from torch import nn

def small(width=8):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.SiLU(),
                         nn.Conv2d(width, 4, 3))
"""
    (tmp_path / "own_models.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_models:small"
    sys.modules.pop("own_models", None)


def test_report_names_saved_tensors(library: str, analyze: Analyze) -> None:
    output = analyze(library, "--input", "2,3,32,32")
    assert "saved for backward" in output
    assert "SiLU" in output


def test_plot_option_draws_the_report(library: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    command = [sys.executable, "-m", "inplace_ops", "analyze", library, "--json", "--plot"]
    command += [str(plot), "--input", "2,3,32,32"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Ultralytics, which another test may have imported, lets PyTorch's profiler print more.
    environment.pop("KINETO_LOG_LEVEL", None)
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stderr == f"wrote {plot}\n"
    assert json.loads(result.stdout)["model"] == library
    assert f"{library}, float32[2, 3, 32, 32]: " in plot.read_text()


def test_function_of_a_file_in_the_current_folder_is_found(
    library: str, tmp_path: Path, analyze: Analyze, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `python -m`, though the console script's own folder is first in the path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert "SiLU" in analyze(library, "--input", "2,3,32,32")


@pytest.mark.parametrize(
    ("code", "cause", "remedy"),
    [
        ("import absent_part.inner", "No module named 'absent_part'", "pip install absent_part"),
        (
            "try: import absent_part\nexcept ImportError as e: raise RuntimeError('above') from e",
            "RuntimeError: above, caused by ModuleNotFoundError",
            "pip install absent_part",
        ),
        (
            "raise ImportError('libGL.so.1: cannot open shared object file')",
            "libGL.so.1",
            "pip install --force-reinstall --no-deps opencv-python-headless",
        ),
        (
            "raise OSError('libfoo.so.2: cannot open shared object file')",
            "OSError: libfoo.so.2",
            "install the system's package that has libfoo.so.2",
        ),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "operator torchvision::nms",
            f"install a version of timm that fits torch {torch.__version__}",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero", "mend what `import own_file` raises"),
    ],
    ids=["missing", "chain", "no_gl", "no_shared_library", "other", "own"],
)
def test_failed_import_shows_cause_and_remedy(
    code: str, cause: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "own_file" if "own_file" in remedy else "timm"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModelNotFoundError) as error:
        load(f"{name}:model")
    assert cause in str(error.value)
    assert str(error.value).endswith(f"likely remedy: {remedy}")


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("memory", ["0.9", "1GiB", "100000000"])
def test_memory_option_prints_candidates(memory: str, library: str, analyze: Analyze) -> None:
    assert "chosen" in analyze(library, "--input", "2,3,32,32", f"--memory={memory}")


def report_of(analyze: Analyze, library: str, *arguments: str) -> dict[str, Any]:
    return json.loads(analyze(library, "--input", "2,3,32,32", "--json", *arguments))


def test_options_change_the_report(library: str, analyze: Analyze) -> None:
    report = report_of(analyze, library)
    assert report["saved_bytes_after"] < report["saved_bytes_before"]
    twice = report_of(analyze, library, "--set", "width=16")
    assert twice["saved_bytes_before"] > 1.9 * report["saved_bytes_before"]
    cheap = report_of(analyze, library, "--max-ops", "1")
    assert cheap["saved_bytes_after"] > report["saved_bytes_after"]
    fixed = report_of(analyze, library, "--eval")
    assert fixed["saved_bytes_before"] < report["saved_bytes_before"]  # no statistics of the batch


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("timm", "--input", "1"), "expected LIBRARY:NAME or MODULE:FUNCTION"),
        (("no_such_library:x", "--input", "1"), "the folder that has no_such_library.py, or pip"),
        (("./models.py:x", "--input", "1"), "MODULE is the name that Python imports, here models"),
        (("torch.nn:Linear", "--input", "1"), "--set NAME=VALUE gives arguments"),
        (("torch:no_such_name", "--input", "1"), "no_such_name"),
        (("torch:ones", "--input", "1", "--set", "width"), "invalid setting value: 'width'"),
        (("torch:ones", "--input", "1", "--optimize", "speed"), "unrecognized arguments"),
        (("torch:ones",), "--input"),
        *(
            (("torch:ones", "--input", "1", f"--memory={text}"), "memory must be a number of bytes")
            for text in ("8gigs", "1.5", "-3", "0")
        ),
    ],
    ids=[
        "no_name",
        "no_library",
        "file",
        "no_arguments",
        "unknown_name",
        "no_value",
        "unknown_option",
        "no_input",
        *("unit", "share", "negative", "zero"),
    ],
)
def test_invalid_arguments_exit_with_error(
    arguments: tuple[str, ...],
    error: str,
    analyze: Analyze,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as raised:
        analyze(*arguments)
    assert raised.value.code == 2
    assert error in capsys.readouterr().err


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
