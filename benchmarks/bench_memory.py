"""The memory that an activation allocates: the well-known table of in-place operations.

A 10000 x 10000 float32 tensor has 381.5 MiB. Out of place an activation allocates as much again; in
place it should allocate nothing. With a gradient, PyTorch's in-place SiLU clones its input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import MIB, RESULTS, machine, memory_of, table, write_csv
from variants import VARIANTS


def main() -> None:
    """Measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=10000, help="rows and columns")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, size = arguments.device, arguments.size

    rows = []
    for activation, variants in VARIANTS.items():
        for variant in variants:
            row = {"activation": activation, "variant": variant.name, "size": f"{size} x {size}"}
            for requires_grad in (False, True):
                x = torch.randn(size, size, device=device, requires_grad=requires_grad)
                if requires_grad:
                    x = x.clone()  # autograd refuses to modify a leaf
                peak, held = memory_of(lambda x=x, run=variant.run: run(x), device)
                suffix = "with grad" if requires_grad else "no grad"
                row[f"MiB held, {suffix}"] = f"{held / MIB:.1f}"
                row[f"MiB peak, {suffix}"] = f"{peak / MIB:.1f}"
                del x
            rows.append(row | machine(device))
    columns = list(rows[0])[:2] + list(rows[0])[3:7]
    print(table([columns, *([row[c] for c in columns] for row in rows)]))
    name = "cuda" if device == "cuda" else "cpu"
    write_csv(arguments.out or RESULTS / f"memory_{name}.csv", rows)


if __name__ == "__main__":
    main()
