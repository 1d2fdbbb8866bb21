"""Reads the code in the CUDA extension with cuobjdump.

cuobjdump comes with a CUDA toolkit, with NVIDIA's packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm, or with Triton.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import inplace_ops


def _find() -> str | None:
    folders = [os.environ.get("PATH", "")]
    for path in map(Path, sys.path):
        folders += map(str, path.glob("nvidia/*/bin"))
        folders.append(str(path / "triton/backends/nvidia/bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


_PROGRAM = _find()
_LIBRARY = next(Path(inplace_ops.__file__).parent.glob("_C_cuda*.so"), None)


def skip_module_without_it() -> None:
    """Skip the test module that calls this if the extension or cuobjdump is missing."""
    if _LIBRARY is None:
        pytest.skip("the CUDA extension is not built", allow_module_level=True)
    if _PROGRAM is None:
        pytest.skip("cuobjdump is not installed", allow_module_level=True)


def cuobjdump(*arguments: str) -> str:
    """Return what cuobjdump prints of the CUDA extension."""
    path = os.path.dirname(str(_PROGRAM)) + os.pathsep + os.environ.get("PATH", "")
    return subprocess.run(
        [str(_PROGRAM), *arguments, str(_LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    ).stdout
