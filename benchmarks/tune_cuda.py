"""Compare alternatives of the CUDA kernels on a machine with a GPU and nvcc.

Compiles tune_cuda.cu for each number of 16-byte accesses that a lane makes to a tensor and for each
cache hint. Runs every program, which times all grids and block sizes, and prints the lowest
share of the copy bandwidth among ReLU and SiLU, forward and backward. A variant that does not
compile or computes wrong values is reported and not timed; the others still run, and the exit
status is 1.

`--find nvcc` or `--find compute-sanitizer` only prints where that tool is.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import glob
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common import RESULTS, table, write_csv

SOURCE = Path(__file__).with_name("tune_cuda.cu")
ACCESSES = [2, 1, 4]  # the kernels' own choice first; 1 supports the 16-bit formats alone
# PTX of the load and the store. With None for the load, nvcc chooses the instruction, and allocates
# registers differently.
HINTS: dict[str, tuple[str | None, str]] = {
    "none": (None, "st.global"),
    "store .cs": (None, "st.global.cs"),
    "load in PTX": ("ld.global", "st.global"),
    "load .cs": ("ld.global.cs", "st.global"),
    "load .L1::no_allocate": ("ld.global.L1::no_allocate", "st.global"),
    "both .cs": ("ld.global.cs", "st.global.cs"),
}
Row = dict[str, str]


class Choice(NamedTuple):
    """The choices with which the kernels are compiled."""

    accesses: int
    hint: str

    def compile(self, nvcc: str, architecture: str, folder: Path) -> Path | None:
        """Compile tune_cuda.cu for this choice; return the program, or None if nvcc fails."""
        program = folder / f"{self.accesses}_{list(HINTS).index(self.hint)}"
        load, store = HINTS[self.hint]
        macros = [f"-DINPLACE_OPS_ACCESSES={self.accesses}", f'-DINPLACE_OPS_STORE="{store}"']
        macros += [f'-DINPLACE_OPS_LOAD="{load}"'] if load else []
        command = [nvcc, f"-arch={architecture}", "-O3", "-std=c++17", *macros]
        command += ["-o", str(program), str(SOURCE)]
        return None if subprocess.run(command).returncode else program


def output_of(*command: str) -> str:
    """Run a command and return its standard output."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _toolkit_on_path() -> list[str]:
    """Return the toolkit of the nvcc on PATH; nvcc prints it, as it may be a link or a wrapper."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return []
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    top = re.search(r"TOP=(.+)", subprocess.run(command, capture_output=True, text=True).stderr)
    return [top[1].strip()] if top else []


def _installed_toolkits() -> list[str]:
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
    named = [*([home] if home else []), *packages, *_toolkit_on_path()]
    return _in(named, tool) or shutil.which(tool) or _in(_installed_toolkits(), tool)


def print_table(rows: list[Row]) -> None:
    """Print a line for each variant, grid and block size, with a column for each dtype and size."""
    choices = ["accesses", "hint", "grid", "threads"]
    shares: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        line = shares.setdefault(tuple(row[choice] for choice in choices), {})
        column = f"{row['dtype']} {int(row['bytes']) >> 20} MiB"
        line[column] = min(line.get(column, float("inf")), float(row["share_of_copy"]))
    columns = list(dict.fromkeys(itertools.chain.from_iterable(shares.values())))
    lines = [[*choices, *columns]]
    for choice, line in shares.items():
        lines.append([*choice, *(f"{line[c]:.3f}" if c in line else "-" for c in columns)])
    print(f"\nlowest share of the copy bandwidth:\n{table(lines)}")


def measured(nvcc: str, architecture: str, failed: list[str]) -> Iterator[Row]:
    """Yield the rows of all choices; add those that fail to `failed`."""
    release = re.search(r"release [\d.]+, V([\d.]+)", output_of(nvcc, "--version"))
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    where = {
        "driver": driver.split()[0],
        "nvcc": release[1] if release else "unknown",
        "date": datetime.date.today().isoformat(),
    }
    choices = [Choice(accesses, hint) for accesses in ACCESSES for hint in HINTS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        # The first programs run while others compile, as only the device is timed.
        programs = pool.map(lambda c: c.compile(nvcc, architecture, Path(folder)), choices)
        for choice, program in zip(choices, programs, strict=True):
            name = f"{choice.accesses} accesses, hint {choice.hint}"
            if program is None:
                failed.append(f"{name}: not compiled")
                continue
            # Kernels must not be loaded while a graph is captured.
            environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
            run = subprocess.run([str(program)], stdout=subprocess.PIPE, text=True, env=environment)
            for row in csv.DictReader(run.stdout.splitlines()):
                yield {"accesses": str(choice.accesses), "hint": choice.hint, **row, **where}
            if run.returncode:  # the program has printed why
                failed.append(f"{name}: exit status {run.returncode}")
            print(f"{name}: exit status {run.returncode}", flush=True)


def main() -> None:
    """Compile and run all choices, write the CSV, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="native", help="nvcc's -arch")
    parser.add_argument("--out", type=Path, default=RESULTS / "tuning_cuda.csv")
    parser.add_argument("--find", metavar="TOOL", help="print the path of a tool, and exit")
    arguments = parser.parse_args()
    tool = arguments.find or "nvcc"
    path = find(tool) or sys.exit(f"{tool} was not found: set CUDA_HOME or PATH")
    if arguments.find:
        print(path)
        return
    failed: list[str] = []
    print_table(write_csv(arguments.out, measured(path, arguments.arch, failed)))
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
