"""Test the installed package: its version, the wheel's tags and the wheel's files."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
import torch

import inplace_ops
from inplace_ops import _ops

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "setup.py"
LIBRARY, CUDA_LIBRARY = "inplace_ops/_C.abi3.so", "inplace_ops/_C_cuda.abi3.so"


@pytest.fixture
def wheel() -> Distribution:
    """The distribution that was installed from a wheel and is imported."""
    for installed in distributions(name="inplace_ops"):
        is_imported = installed.locate_file(LIBRARY) == Path(_ops._C.__file__)
        if is_imported and installed.read_text("WHEEL") is not None:
            return installed
    pytest.skip("inplace_ops is not installed from a wheel")


def test_version_is_the_same_everywhere() -> None:
    number = re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text())
    assert number is not None
    try:
        installed = distribution("inplace_ops").version
    except PackageNotFoundError:
        assert inplace_ops.__version__ == "0+unknown"
    else:
        assert inplace_ops.__version__ == installed
        assert installed.partition("+")[0] == number[1]


def test_wheel_tags_cover_every_python(wheel: Distribution) -> None:
    text = wheel.read_text("WHEEL")
    assert text is not None
    assert "Root-Is-Purelib: false\n" in text
    tags = re.findall(r"(?m)^Tag: (.+)$", text)
    assert tags
    for tag in tags:
        assert re.fullmatch(r"cp310-abi3-(many)?linux\w*", tag)


def test_wheel_contains_package_and_nothing_else(wheel: Distribution) -> None:
    names = {str(file) for file in wheel.files or () if "__pycache__" not in file.parts}
    installed = {name for name in names if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "inplace_ops").rglob("*")
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed"
    }
    (script,) = (name for name in installed if Path(name).name == "inplace-ops")
    assert expected
    assert installed - {CUDA_LIBRARY, script} == expected | {LIBRARY}
    label = inplace_ops.__version__.partition("+")[2]  # "cpu", or "cu" and the CUDA version
    if label:
        assert (CUDA_LIBRARY in installed) == label.startswith("cu")
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_cuda_kernels_are_loaded_if_wheel_contains_them(wheel: Distribution) -> None:
    is_contained = CUDA_LIBRARY in map(str, wheel.files or ())
    loaded = _ops.cuda_version is not None
    assert loaded == (is_contained and torch.version.cuda is not None), _ops.no_cuda


Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Run setup.py, except for the build itself, next to an nvcc of CUDA 12.4."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho '#$ TOP={tmp_path}'\necho 'release 12.4, V12.4.1'\n")
    nvcc.chmod(0o755)

    def run(torch_cuda: str | None, **environment: str) -> dict[str, Any]:
        passed: dict[str, Any] = {}
        monkeypatch.setattr("setuptools.setup", lambda **arguments: passed.update(arguments))
        monkeypatch.setattr("torch.version.cuda", torch_cuda)
        monkeypatch.setattr("sys.path", [*sys.path])
        monkeypatch.chdir(ROOT)
        for name in ("FORCE_CPU", "FORCE_CUDA", "NVCC_APPEND_FLAGS"):
            monkeypatch.setenv(name, environment.get(name, ""))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        script = runpy.run_path(str(SETUP))
        return {"no_cuda": script["no_cuda"], "names": [e.name for e in passed["ext_modules"]]}

    return run


@pytest.mark.skipif(not SETUP.exists(), reason="no sources next to these tests")
@pytest.mark.parametrize(
    ("torch_cuda", "environment", "reason"),
    [
        (None, {}, "torch is built without CUDA"),
        ("13.0", {}, r"nvcc is CUDA 12.4, and torch is built for CUDA 13.0: use a toolkit 13.x"),
        ("12.6", {"FORCE_CPU": "1"}, "FORCE_CPU=1"),
    ],
    ids=["cpu_torch", "other_nvcc", "asked"],
)
def test_cpu_kernels_alone_are_built_without_a_fitting_nvcc(
    torch_cuda: str | None, environment: dict[str, str], reason: str, build: Build
) -> None:
    built = build(torch_cuda, **environment)
    assert built["names"] == ["inplace_ops._C"]
    assert reason in built["no_cuda"]
    if not environment:
        with pytest.raises(SystemExit, match="FORCE_CUDA=1 is set, but .*" + reason):
            build(torch_cuda, FORCE_CUDA="1")
