"""What the report shows, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversions import Convolutions, images
from patterns import WIDTH, Network
from torch import Tensor, nn

import inplace_ops
from inplace_ops.__main__ import main
from inplace_ops.conversion.library import ModelNotFoundError, load


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


def test_as_a_dict() -> None:
    report = inplace_ops.analyze(Convolutions(nn.SiLU), images())
    found = json.loads(json.dumps(report.to_dict()))
    assert found["bytes_before"] == report.bytes_before
    assert found["model_bytes_after"] == report.model_bytes_after
    assert [inplace_ops.Site(**s) for s in found["sites"]] == report.sites
    assert found["dropped"][0]["readers"] == list(report.dropped[0].readers)


def test_a_summary_before_a_long_list() -> None:
    def layers(count: int) -> list[nn.Module]:
        return [m for _ in range(count) for m in (nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))]

    short = str(inplace_ops.analyze(nn.Sequential(*layers(3)), torch.randn(2, 4)))
    assert short.startswith("site ")
    model = nn.Sequential(*layers(20), nn.ReLU(), nn.Softsign())
    text = str(inplace_ops.analyze(model, torch.randn(2, 4)))
    summary, sites = text.split("\n\n")
    header, _, first, second = summary.splitlines()
    assert header.split()[:3] == ["sites", "activation", "decision"]
    assert first.split()[:3] == ["20", "SiLU", 'save="output"']
    assert first.endswith("output is kept by ... anyway")
    assert second.split()[:2] == ["1", "ReLU"]
    assert sites.startswith("site ")
    assert "21 of 21" in sites


def test_where_pytorch_is_as_good() -> None:
    """A ReLU between layers: its output is kept by the next one anyway."""
    x = torch.randn(64, 4)
    line = "Nothing to gain: PyTorch's own activations"
    for activation, tail, is_shown in (
        (nn.ReLU, nn.Linear(4, 4), True),
        (nn.ReLU, nn.Softsign(), True),
        (nn.SiLU, nn.Linear(4, 4), False),
        (nn.Tanh, nn.Linear(4, 4), False),  # nothing of ours in it
    ):
        model = nn.Sequential(nn.Linear(4, 4), activation(), tail)
        assert (line in str(inplace_ops.analyze(model, x))) is is_shown
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    assert line not in str(inplace_ops.analyze(normed, x))


def test_a_model_without_any() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ELU(), nn.Tanh(), nn.Linear(4, 4))
    report = inplace_ops.convert(model, torch.randn(2, 4))
    assert [(o.kind, o.calls) for o in report.others] == [("Tanh", 2), ("ELU", 1)]
    text = str(report)
    assert "0 of 0" not in text
    assert "no in-place form of this kind here" in text
    assert "held for backward by the whole model" in text


def test_other_names_of_a_module_do_not_count() -> None:
    """As nnU-Net's blocks, which hold each module by name and in a Sequential that they call."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.SiLU()
            self.all = nn.Sequential(nn.Linear(4, 4), self.act, nn.Linear(4, 4))
            self.unused = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.all(x)

    report = inplace_ops.convert(Named(), torch.randn(2, 4))
    reasons = {s.name: s.reason for s in report.sites}
    assert reasons["act"] == "another name of `all.1`, by which it is not called"
    assert reasons["unused"] == "not called with this input"
    assert "1 of 1" in str(report)


def test_a_branch_that_nothing_holds() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        m.act(m.first(x))
        return m.second(x)

    (found,) = inplace_ops.analyze(Network(compute), torch.randn(4, WIDTH).double()).sites
    assert (found.bytes_before, found.bytes_after, found.calls) == (0, 0, 1)


def test_analyze_command_as_json(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build(width, kind='SiLU'):\n"
        "    act = getattr(nn, kind)()\n"
        "    return nn.Sequential(nn.Linear(4, width), act, nn.Linear(width, 2))\n"
    )
    command = ["mine:build", "--input", "2,4", "--json", "--set", "width=8", "kind=ReLU"]
    result = subprocess.run(
        [sys.executable, "-m", "inplace_ops", "analyze", *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)["sites"]
    assert (found["activation"], found["converted"]) == ("ReLU", True)


@pytest.mark.parametrize(
    ("library", "name", "error"),
    [
        ("timm", "timm:no_such_model", "Unknown model"),
        ("torchvision", "torchvision:no_such_model", "Unknown model"),
        ("ultralytics", "ultralytics:no_such_model.yaml", "does not exist"),
        ("transformers", "transformers:NoSuchModel", "NoSuchModel"),
        ("transformers", "transformers:LlamaForCausalLM", "6.7 billion parameters: make it sm"),
    ],
)
def test_names_that_a_library_does_not_know(library: str, name: str, error: str) -> None:
    pytest.importorskip(library)
    with pytest.raises(ModelNotFoundError, match=error):
        load(name)


def test_a_small_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 32)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = load("transformers:LlamaForCausalLM", {**sizes, **heads})
    (found,) = inplace_ops.analyze(model, torch.zeros(1, 4, dtype=torch.long)).sites
    assert found.activation == "SiLU"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["torch:nn"], "required: --input"),
        (["nonsense", "--input", "2,4"], "expected LIBRARY:NAME"),
        (["no_such_module:x", "--input", "2,4"], "No module named"),
        (["torch:no_such_name", "--input", "2,4"], "no_such_name"),
        (["torch:nn", "--input", "2xfour"], "invalid shape value"),
        (["torch:nn", "--input", "2,4", "--bits", "9"], "invalid choice: 9"),
        (["torch:nn", "--input", "2,4", "--set", "width"], "invalid setting value: 'width'"),
        (["torch.nn:Linear", "--input", "2,4", "--set", "width=4"], "unexpected keyword argument"),
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
