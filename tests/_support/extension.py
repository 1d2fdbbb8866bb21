"""Builds of the CPU extension apart from the installed one."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .sanitizers import COMPILER

PROJECT = Path(__file__).parents[2]


def copy_package(source: Path, folder: Path) -> Path:
    """Copy a package without its compiled libraries; return the copy's path."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    return Path(shutil.copytree(source, folder / source.name, ignore=ignored))


def build_cpu_extension(source: Path, package: Path, *flags: str) -> None:
    """Compile the sources in `source`, a copy of csrc/, as the CPU extension of a package."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    from torch.utils.cpp_extension import include_paths, library_paths

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
