"""The steps in docs/adding_an_activation.md add an activation that behaves like the others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _support.extension import PROJECT, build_cpu_extension, copy_package
from _support.marks import slow

PAGE = PROJECT / "docs" / "adding_an_activation.md"

# What every activation must satisfy: the lists, values, gradients, second derivatives, saved bytes,
# and that compiled code and a converted model compute the same.
PROGRAM = """
import torch, torch.nn.functional as F
from torch import nn
import inplace_ops

x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
for call in (inplace_ops.hardtanh_, inplace_ops.Hardtanh(), inplace_ops.Hardtanh(save="output")):
    y = call(x * 1)
    assert torch.equal(y, F.hardtanh(x))
    (gradient,), (expected,) = (torch.autograd.grad(z.exp().sum(), x) for z in (y, F.hardtanh(x)))
    assert torch.equal(gradient, expected)
assert type(inplace_ops.hardtanh_(x * 1).grad_fn).__name__ == "HardtanhFunctionBackward"
assert inplace_ops.saved_bytes(lambda: inplace_ops.hardtanh_(x * 1).sum()) <= x.numel() // 8

compiled = torch.compile(lambda x: inplace_ops.hardtanh_(x * 1.5).exp(), backend="aot_eager")
assert torch.equal(compiled(x), F.hardtanh(x * 1.5).exp())

model = nn.Sequential(nn.BatchNorm2d(3), inplace_ops.Hardtanh(), nn.Conv2d(3, 4, 3)).double()
twin = nn.Sequential(model[0], nn.Hardtanh(), model[2])
gradients = []
inplace_ops.convert(model)
for network in (model, twin):
    (gradient,) = torch.autograd.grad(network(x).square().sum(), x)
    gradients.append(gradient)
torch.testing.assert_close(*gradients)
print("all right")
"""


def steps() -> list[tuple[str, str]]:
    """Return the file and the change of each step of the page."""
    blocks = re.findall(r"```diff\n(.*?)\n *```", PAGE.read_text(), re.DOTALL)
    found = []
    for block in blocks:
        first, *lines = (line[3:] for line in block.splitlines())  # the page indents by 3
        found.append((first.removeprefix("+++ "), "\n".join(lines)))
    return found


def apply(change: str, path: Path) -> None:
    """Apply a change in the notation of a diff. Each of its parts must fit in one place."""
    for part in change.split("\n@@\n"):
        lines = part.split("\n")
        if not any(line[:1] in (" ", "-") for line in lines):
            path.write_text("".join(f"{line[1:]}\n" for line in lines))
            continue
        old = "\n".join(line[1:] for line in lines if line[:1] != "+")
        new = "\n".join(line[1:] for line in lines if line[:1] != "-")
        text = path.read_text()
        assert text.count(f"\n{old}") == 1, f"{path.name} has no unique place for\n{part}"
        path.write_text(text.replace(f"\n{old}", f"\n{new}"))


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A copy of the project with the page's activation, without a build."""
    if not PAGE.exists():
        pytest.skip("no documentation next to these tests")
    shutil.copytree(PROJECT / "csrc", tmp_path / "csrc")
    copy_package(PROJECT / "inplace_ops", tmp_path)
    copy_package(PROJECT / "tests", tmp_path)
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    for file, change in steps():
        apply(change, tmp_path / file)
    return tmp_path


def test_steps_change_at_most_six_files(extended: Path) -> None:
    files = [file for file, _ in steps()]
    assert len(files) == len(set(files)) <= 6
    for file in files:
        if file.endswith(".py"):
            compile((extended / file).read_text(), file, "exec")


@slow
def test_added_activation_behaves_like_the_others(extended: Path) -> None:
    build_cpu_extension(extended / "csrc", extended / "inplace_ops")
    environment = {**os.environ, "PYTHONPATH": str(extended), "PYTEST_ADDOPTS": ""}
    names = ("ops/test_activations", "ops/test_values", "autograd/test_autograd")
    generic = [f"tests/{name}.py" for name in names]
    # Not at NaN, where PyTorch's gradient of Hardtanh depends on how its code is vectorized.
    selected = "hardtanh and not edge and not nan or lists"
    pytest_run = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", selected, *generic]
    for arguments in (["-c", PROGRAM], pytest_run):
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=extended,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
        assert re.search(r"all right|\d+ passed", result.stdout)
