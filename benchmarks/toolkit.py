"""Where the CUDA toolkit's tools are: `python benchmarks/toolkit.py nvcc` prints the path."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys


def _of_path() -> list[str]:
    """The toolkit of the nvcc on PATH, which may be a link or a wrapper: it names it itself."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return []
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    top = re.search(r"TOP=(.+)", subprocess.run(command, capture_output=True, text=True).stderr)
    return [top[1].strip()] if top else []


def _installed() -> list[str]:
    """The toolkits in /usr/local: the one that was chosen there, then the newest first."""
    versions = glob.glob("/usr/local/cuda-*")
    versions.sort(key=lambda folder: [int(n) for n in re.findall(r"\d+", folder)], reverse=True)
    return ["/usr/local/cuda", *versions]


def _in(toolkits: list[str], tool: str) -> str | None:
    places = [f"{toolkit}/{part}" for toolkit in toolkits for part in ("bin", "compute-sanitizer")]
    return shutil.which(tool, path=os.pathsep.join(places))


def find(tool: str) -> str | None:
    """The tool's path: of CUDA_HOME, NVIDIA's packages, PATH, /usr/local, as in setup.py."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    packages = [p for path in sys.path for p in glob.glob(os.path.join(path, "nvidia/cu*"))]
    named = [*([home] if home else []), *packages, *_of_path()]
    return _in(named, tool) or shutil.which(tool) or _in(_installed(), tool)


if __name__ == "__main__":
    print(find(sys.argv[1]) or sys.exit(f"no {sys.argv[1]} was found: set CUDA_HOME or PATH"))
