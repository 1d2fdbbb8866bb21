"""Memory that an activation allocates: the well-known table of in-place operations.

A 10000 x 10000 float32 tensor has 381.5 MiB. Out of place an activation allocates as much again; in
place it should allocate nothing. PyTorch's in-place SiLU clones an input that requires grad.

after forward: bytes that the call allocates and that are still allocated when it has returned.
peak: the most bytes allocated at one time. saved: what inplace_ops.saved_bytes returns, which does
not count x's own memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import MIB, RESULTS, machine, memory_of, table, written_to
from torch import Tensor
from variants import VARIANTS

import inplace_ops


def main() -> None:
    """Measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--size", type=int, default=10000, help="rows and columns")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, size = arguments.device, arguments.size

    def fresh(requires_grad: bool) -> Tensor:
        x = torch.randn(size, size, device=device, requires_grad=requires_grad)
        return x.clone() if requires_grad else x  # autograd forbids modifying a leaf

    with written_to(arguments.out or RESULTS / f"memory_{device}.csv") as rows:
        for activation, variants in VARIANTS.items():
            for variant in variants:
                row = {
                    "activation": activation,
                    "variant": variant.name,
                    "size": f"{size} x {size}",
                }
                for requires_grad in (False, True):
                    x = fresh(requires_grad)
                    peak, allocated = memory_of(lambda x=x, run=variant.run: run(x), device)
                    suffix = "with grad" if requires_grad else "no grad"
                    row[f"MiB after forward, {suffix}"] = f"{allocated / MIB:.1f}"
                    row[f"MiB peak, {suffix}"] = f"{peak / MIB:.1f}"
                    del x
                saved = inplace_ops.saved_bytes(variant.run, fresh(requires_grad=True))
                row["MiB saved, with grad"] = f"{saved / MIB:.1f}"
                rows.append(row | machine(device))
    columns = [c for c in rows[0] if c in ("activation", "variant") or c.startswith("MiB")]
    print(table([columns, *([row[c] for c in columns] for row in rows)]))


if __name__ == "__main__":
    main()
