"""Compare alternatives of the CUDA kernels on a machine with a GPU and nvcc. Needs no torch.

Compiles tune_cuda.cu for each number of 16-byte accesses that a lane makes to a tensor and for each
cache hint. Runs every program, which times all grids and block sizes, and prints the lowest
share of the copy bandwidth among ReLU and SiLU, forward and backward. A variant that does not
compile or computes wrong values is reported and not timed; the others still run, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import toolkit

HERE = Path(__file__).parent
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


class Variant(NamedTuple):
    """The choices with which the kernels are compiled."""

    accesses: int
    hint: str

    def compile(self, nvcc: str, architecture: str, folder: Path) -> Path | None:
        """Compile tune_cuda.cu for this variant; return the program, or None if nvcc fails."""
        program = folder / f"{self.accesses}_{list(HINTS).index(self.hint)}"
        load, store = HINTS[self.hint]
        macros = [f"-DINPLACE_OPS_ACCESSES={self.accesses}", f'-DINPLACE_OPS_STORE="{store}"']
        macros += [f'-DINPLACE_OPS_LOAD="{load}"'] if load else []
        command = [nvcc, f"-arch={architecture}", "-O3", "-std=c++17", *macros]
        command += ["-o", str(program), str(HERE / "tune_cuda.cu")]
        return None if subprocess.run(command).returncode else program


def output_of(*command: str) -> str:
    """Run a command and return its standard output."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def write_csv(path: Path, rows: list[Row]) -> None:
    """Write the rows to a CSV file, if there are any."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"\nwritten to {path}")


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
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print("\nlowest share of the copy bandwidth:")
    for cells in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def main() -> None:
    """Compile and run all variants, write the CSV, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", default="native", help="nvcc's -arch")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tuning_cuda.csv")
    arguments = parser.parse_args()
    # A time limit ends this with SIGTERM. Raise an exception then, so that the rows are written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))

    nvcc = toolkit.find("nvcc") or sys.exit("nvcc was not found: set CUDA_HOME or PATH")
    release = re.search(r"release [\d.]+, V([\d.]+)", output_of(nvcc, "--version"))
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    where = {
        "driver": driver.split()[0],
        "nvcc": release[1] if release else "unknown",
        "date": datetime.date.today().isoformat(),
    }
    variants = [Variant(accesses, hint) for accesses in ACCESSES for hint in HINTS]
    rows: list[Row] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        # The first programs run while others compile, as only the device is timed.
        programs = pool.map(lambda v: v.compile(nvcc, arguments.arch, Path(folder)), variants)
        try:
            for variant, program in zip(variants, programs, strict=True):
                name = f"{variant.accesses} accesses, hint {variant.hint}"
                if program is None:
                    failed.append(f"{name}: not compiled")
                    continue
                # Kernels must not be loaded while a graph is captured.
                environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
                run = subprocess.run(
                    [str(program)], stdout=subprocess.PIPE, text=True, env=environment
                )
                chosen = {"accesses": str(variant.accesses), "hint": variant.hint}
                found = csv.DictReader(run.stdout.splitlines())
                rows += [{**chosen, **row, **where} for row in found]
                if run.returncode:  # the program has printed why
                    failed.append(f"{name}: exit status {run.returncode}")
                print(f"{name}: exit status {run.returncode}", flush=True)
        finally:
            write_csv(arguments.out, rows)
    print_table(rows)
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
