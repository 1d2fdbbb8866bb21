"""Time of forward, backward and both, against PyTorch out of place and in place.

The ratios are to PyTorch in place, or to PyTorch out of place if there is no in-place version.

Before timing, every variant is verified against PyTorch out of place. A variant that fails is
printed and left out, and the exit status is 1. Each repetition times all variants of a case in
turn, on the same values, and computes their ratios, so that a busy machine slows both sides of a
ratio. Restoring a variant's input is not timed. "both" is the sum of a repetition's forward and
backward.

Bandwidth is the bytes that a variant must move, over its median time. Each tensor is read or
written once: two tensors in forward, three in backward, or two where backward does not read the
output. Where PyTorch in place clones its input, forward moves four and backward three. Packed bits
count once in each direction (variants.py).

`--compile` adds torch.compile of PyTorch's activation, the hardest baseline on a GPU. The times
include the cost of Python and autograd as far as the device has to wait for it: bench_bandwidth.py
times the kernels alone, bench_host.py the host alone.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Clock, Failures, machine, quartiles, table, written_to
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from variants import VARIANTS, Variant, baseline
from verification import verify

PHASES = ("forward", "backward", "both")


def time_case(
    variants: list[Variant], x: Tensor, grad: Tensor, repetitions: int, clock: Clock
) -> dict[str, dict[str, list[float]]]:
    """Return the microseconds of every repetition, by variant and phase."""
    times: dict[str, dict[str, list[float]]] = {
        variant.name: {phase: [] for phase in PHASES} for variant in variants
    }
    leaf = x.clone().requires_grad_()
    for repetition in range(repetitions + 2):
        first = repetition % len(variants)  # no variant always follows the same one
        for variant in variants[first:] + variants[:first]:
            h = leaf.clone()
            edge = get_gradient_edge(h)
            forward, output = clock.time(lambda v=variant, h=h: v.run(h))
            backward, _ = clock.time(lambda y=output, e=edge: torch.autograd.grad(y, [e], grad))
            del h, output, edge
            if repetition >= 2:  # the first ones warm up
                for phase, time in zip(
                    PHASES, (forward, backward, forward + backward), strict=True
                ):
                    times[variant.name][phase].append(time)
    return times


def measure(
    activation: str,
    dtype: torch.dtype,
    elements: int,
    arguments: argparse.Namespace,
    clock: Clock,
    failures: Failures,
) -> list[dict[str, Any]]:
    """Return the rows of one case: each phase of every variant that passes."""
    x, grad = (torch.randn(elements, device=arguments.device).to(dtype) for _ in range(2))
    variants = list(VARIANTS[activation])
    if arguments.compile:
        torch.compiler.reset()  # past its recompilation limit, torch.compile runs eagerly
        compiled = torch.compile(variants[0].run, dynamic=False)
        variants.append(Variant("torch.compile", compiled))
    passed = []
    for variant in variants:
        with failures.recorded(f"{activation}, {variant.name}, {dtype}, {elements} elements"):
            verify(activation, variant, x)
            passed.append(variant)
    reference = baseline(variants)
    if reference not in passed:
        return []
    times = time_case(passed, x, grad, arguments.repetitions, clock)

    rows = []
    for variant, phase in itertools.product(passed, PHASES):
        first, median, third = quartiles(times[variant.name][phase])
        base = times[reference.name][phase]
        ratios = quartiles([a / b for a, b in zip(times[variant.name][phase], base, strict=True)])
        moved = variant.bytes_moved(phase, dtype, elements)
        base_moved = reference.bytes_moved(phase, dtype, elements)
        rows.append(
            {
                "activation": activation,
                "variant": variant.name,
                "dtype": str(dtype).removeprefix("torch."),
                "elements": elements,
                "phase": phase,
                "median_us": f"{median:.2f}",
                "first_quartile_us": f"{first:.2f}",
                "third_quartile_us": f"{third:.2f}",
                "gigabytes_per_second": f"{moved / median / 1e3:.2f}",
                "ratio_to_torch_in_place": f"{ratios[1]:.3f}",
                "ratio_first_quartile": f"{ratios[0]:.3f}",
                "ratio_third_quartile": f"{ratios[2]:.3f}",
                "bytes_ratio_to_torch_in_place": f"{moved / base_moved:.3f}",
                **machine(arguments.device),
            }
        )
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    """Print forward plus backward of every case, and where PyTorch is faster."""
    print("\nForward and backward, time over PyTorch in place (below 1 is faster):\n")
    columns = ["activation", "variant", "dtype", "elements"]
    columns += ["median_us", "gigabytes_per_second", "ratio_to_torch_in_place"]
    columns += ["ratio_first_quartile", "ratio_third_quartile"]
    both = [row for row in rows if row["phase"] == "both"]
    print(table([columns, *([str(row[c]) for c in columns] for row in both)]))
    ours = [row for row in both if not row["variant"].startswith("torch")]
    slower = [row for row in ours if float(row["ratio_first_quartile"]) > 1]
    print(f"\ninplace_ops is slower than PyTorch in place in {len(slower)} of {len(ours)} cases:")
    for row in slower:
        case = ", ".join(str(row[c]) for c in columns[:4])
        print(f"  {case}: {row['ratio_to_torch_in_place']}")


def main() -> None:
    """Verify, measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--elements", type=int, nargs="+", default=[2**12, 2**16, 2**20, 2**24])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = Clock(arguments.device)

    failures = Failures()
    cases = itertools.product(arguments.elements, arguments.dtypes, VARIANTS)
    with written_to(arguments.out or RESULTS / f"activations_{arguments.device}.csv") as rows:
        for elements, dtype, activation in cases:
            rows += measure(activation, getattr(torch, dtype), elements, arguments, clock, failures)
            print(f"{activation}, {dtype}, {elements} elements: done", flush=True)
    report(rows)
    failures.exit()


if __name__ == "__main__":
    main()
