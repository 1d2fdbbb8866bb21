"""Test the installed package: its version, the wheel's tags and the wheel's files."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
import torch

import inplace_ops
from inplace_ops import _ops

ROOT = Path(__file__).parents[2]
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
    assert expected
    assert installed - {CUDA_LIBRARY} == expected | {LIBRARY}
    label = inplace_ops.__version__.partition("+")[2]  # "cpu", or "cu" and the CUDA version
    if label:
        assert (CUDA_LIBRARY in installed) == label.startswith("cu")
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_cuda_kernels_are_loaded_if_wheel_contains_them(wheel: Distribution) -> None:
    is_contained = CUDA_LIBRARY in map(str, wheel.files or ())
    loaded = _ops.cuda_version is not None
    assert loaded == (is_contained and torch.version.cuda is not None), _ops.no_cuda
