"""What the report shows, and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conversions import Convolutions, images
from torch import nn

import inplace_ops
from inplace_ops.__main__ import main


def test_report() -> None:
    text = str(inplace_ops.analyze(Convolutions(nn.SiLU), images()))
    header, _, *rows, _, total, dropped, model = text.splitlines()
    assert header.split() == ["site", "activation", "decision", "before", "after", "reason"]
    assert rows[0].split()[:3] == ["preactivation", "SiLU", "left"]
    assert "read again by `add`" in rows[0]
    assert 'save="recompute"' in rows[1]
    assert dropped.split()[:3] == ["stem.2", "SiLU", "dropped"]
    assert "formed again for `block.0.convolution`" in dropped
    assert "held for backward by the whole model" in model
    assert "3 of 4" in total
    assert max(map(len, text.splitlines())) < 120


def test_analyze_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2))\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "inplace_ops", "analyze", "mine:build", "--input", "2,4"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "1 of 1" in result.stdout
    assert 'save="output"' in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["torch:nn"], "required: --input"),
        (["nonsense", "--input", "2,4"], "expected LIBRARY:NAME"),
        (["no_such_module:x", "--input", "2,4"], "No module named"),
        (["torch:no_such_name", "--input", "2,4"], "no_such_name"),
        (["torch:nn", "--input", "2xfour"], "invalid shape value"),
        (["torch:nn", "--input", "2,4", "--bits", "9"], "invalid choice: 9"),
    ],
)
def test_wrong_analyze_commands(
    arguments: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["inplace_ops", "analyze", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert "usage:" in message
    assert error in message
