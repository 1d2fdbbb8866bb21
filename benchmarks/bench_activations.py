"""Time of forward, backward and both, against PyTorch out of place and in place.

Every variant is verified against PyTorch out of place before it is timed. All variants of a case
are timed in turn within each repetition, on the same values. A variant's input is restored outside
of the timed region. Bandwidth is the bytes that the variant cannot avoid moving (variants.py) over
its median time. `--compile` adds torch.compile of PyTorch's activation, the hardest baseline on a
GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Clock, machine, quartiles, table, write_csv
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from variants import VARIANTS, Variant

PHASES = ("forward", "backward", "both")


def verify(variant: Variant, reference: Variant, x: Tensor, grad: Tensor) -> None:
    """Raise unless values and gradients are PyTorch's, within what is documented."""

    def run(run_variant: Variant) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        output = run_variant.run(leaf.clone())
        (gradient,) = torch.autograd.grad(output, leaf, grad)
        return output.detach(), gradient

    (value, gradient), (expected_value, expected_gradient) = run(variant), run(reference)
    torch.testing.assert_close(value, expected_value)
    if variant.gradient_error is None:
        scale = grad.abs().amax().clamp(min=1).item()  # the tolerances are for a unit gradient
        torch.testing.assert_close(gradient / scale, expected_gradient / scale)
    else:
        rounding = torch.finfo(x.dtype).eps * expected_gradient.double().abs()
        limit = variant.gradient_error * grad.double().abs() + rounding + 1e-7
        error = (gradient.double() - expected_gradient.double()).abs()
        if not bool((error <= limit).all()):
            raise AssertionError(f"{variant.name}: gradient off by {error.max().item():.2e}")


def time_case(
    variants: list[Variant], x: Tensor, grad: Tensor, repetitions: int, clock: Clock
) -> dict[str, dict[str, list[float]]]:
    """Microseconds of each variant and phase."""
    times: dict[str, dict[str, list[float]]] = {
        variant.name: {phase: [] for phase in PHASES} for variant in variants
    }
    leaf = x.clone().requires_grad_()
    for repetition in range(repetitions + 2):
        for variant in variants:
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


def main() -> None:
    """Verify, measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads, all by default")
    parser.add_argument("--elements", type=int, nargs="+", default=[2**12, 2**16, 2**20, 2**24])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    where, clock = machine(device), Clock(device)

    rows: list[dict[str, Any]] = []
    for activation, listed in VARIANTS.items():
        variants = list(listed)
        if arguments.compile:
            variants.append(Variant("torch.compile", torch.compile(listed[0].run)))
        for dtype_name in arguments.dtypes:
            dtype = getattr(torch, dtype_name)
            for elements in arguments.elements:
                x = torch.randn(elements, device=device).to(dtype)
                grad = torch.randn(elements, device=device).to(dtype)
                for variant in variants:
                    verify(variant, variants[0], x, grad)
                times = time_case(variants, x, grad, arguments.repetitions, clock)
                for variant in variants:
                    for phase in PHASES:
                        first, median, third = quartiles(times[variant.name][phase])
                        base = quartiles(times["torch in place"][phase])[1]
                        moved = variant.bytes_moved(phase, dtype, elements)
                        rows.append(
                            {
                                "activation": activation,
                                "variant": variant.name,
                                "dtype": dtype_name,
                                "elements": elements,
                                "phase": phase,
                                "median_us": f"{median:.2f}",
                                "first_quartile_us": f"{first:.2f}",
                                "third_quartile_us": f"{third:.2f}",
                                "gigabytes_per_second": f"{moved / median / 1e3:.2f}",
                                "time_over_torch_in_place": f"{median / base:.3f}",
                                **where,
                            }
                        )
        print(f"{activation}: verified and timed", flush=True)

    print("\nForward and backward, time over PyTorch in place (below 1 is faster):\n")
    columns = ["activation", "variant", "dtype", "elements"]
    columns += ["median_us", "gigabytes_per_second", "time_over_torch_in_place"]
    both = [row for row in rows if row["phase"] == "both"]
    print(table([columns, *([str(row[c]) for c in columns] for row in both)]))
    name = "cuda" if device == "cuda" else "cpu"
    write_csv(arguments.out or RESULTS / f"activations_{name}.csv", rows)


if __name__ == "__main__":
    main()
