"""Compare alternatives of the CUDA kernels on a machine with a GPU and nvcc.

Compiles tune_cuda.cu for each number of 16-byte accesses that a lane makes to a tensor and for each
cache hint. Each program times all grids and block sizes of ReLU and SiLU, forward and backward, and
prints rows. A program that does not compile or computes wrong values is reported; the others still
run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Failures, Row, parser_of, write_results

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


def compiled(accesses: int, hint: str, architecture: str, folder: Path) -> Path:
    """Compile tune_cuda.cu, and return the program, which does not exist if nvcc fails."""
    program = folder / f"{accesses}_{list(HINTS).index(hint)}"
    load, store = HINTS[hint]
    macros = [f"-DINPLACE_OPS_ACCESSES={accesses}", f'-DINPLACE_OPS_STORE="{store}"']
    macros += [f'-DINPLACE_OPS_LOAD="{load}"'] if load else []
    command = ["nvcc", f"-arch={architecture}", "-O3", "-std=c++17", *macros]
    subprocess.run([*command, "-o", str(program), str(SOURCE)])
    return program


def rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all programs."""
    choices = list(itertools.product(ACCESSES, HINTS))
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    version = nvcc.stdout.split()[-1]
    # Kernels must not be loaded while a graph is captured.
    environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        # The first programs run while others compile, as only the device is timed.
        programs = pool.map(lambda c: compiled(*c, arguments.arch, Path(folder)), choices)
        for (accesses, hint), program in zip(choices, programs, strict=True):
            with failures.recorded(f"{accesses} accesses, hint {hint}"):
                run = subprocess.run([program], stdout=subprocess.PIPE, text=True, env=environment)
                for row in csv.DictReader(run.stdout.splitlines()):
                    yield {"accesses": accesses, "hint": hint, **row, "nvcc": version}
                run.check_returncode()  # the program has printed why


def main() -> None:
    """Compile and run all programs, and write the CSV."""
    parser = parser_of(__doc__)
    parser.add_argument("--arch", default="native", help="nvcc's -arch")
    parser.add_argument("--out", type=Path, help="default: results/tuning_cuda.csv")
    parser.set_defaults(device="cuda", threads=1)
    write_results("tuning", rows, parser.parse_args())


if __name__ == "__main__":
    main()
