"""Time of forward, backward and both, against PyTorch out of place and in place.

Every variant is verified against PyTorch out of place before it is timed. All variants of a case
are timed in turn within each repetition, on the same values, and a ratio is taken within each
repetition, so that a busy machine slows both sides. A variant's input is restored outside of the
timed region. "both" is the sum of a repetition's forward and backward.

Bandwidth is the bytes that the variant cannot avoid moving over its median time: for ReLU and
LeakyReLU each tensor read or written once, 2 forward and 3 backward (2 with a mask), for in-place
SiLU in PyTorch 4 + 3 (the clone), and the packed bits once in each direction (variants.py).
`--compile` adds torch.compile of PyTorch's activation, the hardest baseline on a GPU.
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

# Largest error of the derivative that the README gives, where it is more than torch.testing's
# default tolerances; the rounding of the arithmetic on both sides comes on top.
DERIVATIVE_ERROR = {
    "output, 1 bit": {
        torch.float64: 5e-9,
        torch.float32: 8.3e-5,
        torch.float16: 3.8e-3,
        torch.bfloat16: 1.2e-2,
    },
    "derivative": {
        torch.float64: 1.6e-10,
        torch.float32: 9.2e-6,
        torch.float16: 2.4e-3,
        torch.bfloat16: 2.4e-3,
    },
}


def verify(variant: Variant, reference: Variant, x: Tensor, equal: bool) -> None:
    """Raise unless values and gradients are PyTorch's: equal, or within what is documented."""
    # What is documented holds for a unit gradient; the signs tell the elements apart.
    grad = torch.randn_like(x).sign()

    def run(run_variant: Variant) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        output = run_variant.run(leaf.clone())
        (gradient,) = torch.autograd.grad(output, leaf, grad)
        return output.detach(), gradient

    (value, gradient), (expected_value, expected_gradient) = run(variant), run(reference)
    value_tolerance = {"rtol": 0.0, "atol": 0.0} if equal else {}
    gradient_tolerance = value_tolerance
    if variant.name in DERIVATIVE_ERROR:
        arithmetic = torch.finfo(torch.promote_types(x.dtype, torch.float32))
        error = DERIVATIVE_ERROR[variant.name][x.dtype] + 4 * arithmetic.eps
        gradient_tolerance = {"rtol": torch.finfo(x.dtype).eps, "atol": error}
    torch.testing.assert_close(value, expected_value, **value_tolerance)
    torch.testing.assert_close(gradient, expected_gradient, **gradient_tolerance)


def time_case(
    variants: list[Variant], x: Tensor, grad: Tensor, repetitions: int, clock: Clock
) -> dict[str, dict[str, list[float]]]:
    """Microseconds of each variant and phase."""
    times: dict[str, dict[str, list[float]]] = {
        variant.name: {phase: [] for phase in PHASES} for variant in variants
    }
    leaf = x.clone().requires_grad_()
    for repetition in range(repetitions + 2):
        first = repetition % len(variants)  # none always follows the same other
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
    device = arguments.device
    torch.set_num_threads(arguments.threads)
    where, clock = machine(device), Clock(device)

    rows: list[dict[str, Any]] = []
    for activation, listed in VARIANTS.items():
        for dtype_name in arguments.dtypes:
            dtype = getattr(torch, dtype_name)
            for elements in arguments.elements:
                x = torch.randn(elements, device=device).to(dtype)
                grad = torch.randn(elements, device=device).to(dtype)
                variants = list(listed)
                if arguments.compile:
                    torch.compiler.reset()  # past its limit of recompilations it runs eagerly
                    compiled = torch.compile(listed[0].run, dynamic=False)
                    variants.append(Variant("torch.compile", compiled))
                for variant in variants:
                    verify(variant, variants[0], x, equal=activation != "SiLU")
                times = time_case(variants, x, grad, arguments.repetitions, clock)
                for variant in variants:
                    for phase in PHASES:
                        first, median, third = quartiles(times[variant.name][phase])
                        base = times["torch in place"][phase]
                        ratios = quartiles(
                            [a / b for a, b in zip(times[variant.name][phase], base, strict=True)]
                        )
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
                                "ratio_to_torch_in_place": f"{ratios[1]:.3f}",
                                "ratio_first_quartile": f"{ratios[0]:.3f}",
                                "ratio_third_quartile": f"{ratios[2]:.3f}",
                                **where,
                            }
                        )
        print(f"{activation}: verified and timed", flush=True)

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
    write_csv(arguments.out or RESULTS / f"activations_{device}.csv", rows)


if __name__ == "__main__":
    main()
