"""Find tools of the CUDA toolkit: `python benchmarks/toolkit.py nvcc` prints the path of nvcc."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys


def _of_path() -> list[str]:
    """Return the toolkit of the nvcc on PATH; nvcc prints it, as it may be a link or a wrapper."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return []
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    top = re.search(r"TOP=(.+)", subprocess.run(command, capture_output=True, text=True).stderr)
    return [top[1].strip()] if top else []


def _installed() -> list[str]:
    """Return the toolkits in /usr/local: the default one, then the others, newest first."""
    versions = glob.glob("/usr/local/cuda-*")
    versions.sort(key=lambda folder: [int(n) for n in re.findall(r"\d+", folder)], reverse=True)
    return ["/usr/local/cuda", *versions]


def _in(toolkits: list[str], tool: str) -> str | None:
    folders = [f"{toolkit}/{part}" for toolkit in toolkits for part in ("bin", "compute-sanitizer")]
    return shutil.which(tool, path=os.pathsep.join(folders))


def find(tool: str) -> str | None:
    """Return a tool's path: in CUDA_HOME, NVIDIA's packages, PATH or /usr/local, as in setup.py."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    packages = [p for path in sys.path for p in glob.glob(os.path.join(path, "nvidia/cu*"))]
    named = [*([home] if home else []), *packages, *_of_path()]
    return _in(named, tool) or shutil.which(tool) or _in(_installed(), tool)


if __name__ == "__main__":
    print(find(sys.argv[1]) or sys.exit(f"{sys.argv[1]} was not found: set CUDA_HOME or PATH"))
