"""Builds of C++ for tests: the CPU extension, apart from the installed one, and small modules."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from .sanitizers import COMPILER, FLAGS, SANITIZE

PROJECT = Path(__file__).parents[2]


def copy_package(source: Path, folder: Path) -> Path:
    """Copy a package without its compiled libraries; return the copy's path."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    return Path(shutil.copytree(source, folder / source.name, ignore=ignored))


def build_cpu_extension(source: Path, package: Path, *flags: str) -> None:
    """Compile the sources in `source`, csrc/ or a copy, as the CPU extension of a package.

    The loops of one instruction set suffice, and compile in half of the time.
    """
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    from torch.utils.cpp_extension import include_paths, library_paths

    source = Path(shutil.copytree(source, package / "csrc"))
    for header in source.glob("cpu/*.h"):
        header.write_text(header.read_text().replace("#ifdef __x86_64__", "#if 0"))
    command = [COMPILER, "-std=c++17", "-O0", "-fPIC", *flags]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    for path in (*include_paths(), sysconfig.get_path("include")):
        command += ["-isystem", path]

    def compiled(path: Path) -> str:
        object_file = str(package / f"{path.stem}.o")
        subprocess.run([*command, "-c", str(path), "-o", object_file], check=True)
        return object_file

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, (source / "library.cpp", *source.glob("cpu/*.cpp"))))
    link = [COMPILER, "-shared", *flags, *objects]
    for path in library_paths():
        link += [f"-L{path}", f"-Wl,-rpath,{path}"]
    link += ["-lc10", "-ltorch_cpu", "-ltorch", "-o", str(package / "_C.abi3.so")]
    subprocess.run(link, check=True)


def build(source: str, folder: Path, *flags: str, name: str = "") -> ModuleType:
    """Compile a C++ file of tests/cuda as a pybind11 module, and import it.

    The module is called `name`, or like the file. Python treats modules of one name as the same.
    """
    import pybind11  # imported here since tests on a GPU do not need it

    path = PROJECT / "tests" / "cuda" / source
    name = name or path.stem
    library = folder / f"{name}.so"
    flags = (*flags, f"-DMODULE_NAME={name}")
    command = [COMPILER, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}", str(path)]
    if SANITIZE in os.environ:
        command += FLAGS
    subprocess.run([*command, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
