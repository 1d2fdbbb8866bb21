"""Host time of a call on a small tensor: the cost of Python and autograd before the device works.

Calls are issued one after the other without waiting for the device. The time of a call is the
host's elapsed time over the number of calls. Each repetition times the variants in turn, PyTorch
out of place and in place among them. On the CPU the time includes the kernel's, a fraction of a
microsecond at this size.

"Python alone" is a lower bound for every extension that is called from Python: a call of a custom
op, and a torch.autograd.Function that marks its input dirty, saves a tensor and does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, Failures, machine, quartiles, table, written_to
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from variants import VARIANTS, Variant
from verification import verify

from inplace_ops.activations import RELU

ELEMENTS = 64
CALLS = 200  # fewer than a CUDA stream queues before a launch blocks
PHASES = ("no grad", "forward", "backward")


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(saved)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (_,) = ctx.saved_tensors
        return grad, None


_SAVED = torch.empty(1)


def _op_alone(x: Tensor) -> Tensor:
    RELU.ops.in_place(x, None)
    return x


# By name: the callable, and the phases for which it is a lower bound.
FLOORS = {
    "a custom op": (_op_alone, ("no grad",)),
    "an empty autograd.Function": (lambda x: _Empty.apply(x, _SAVED), ("forward", "backward")),
}


def host_time(calls: list[Callable[[], Any]], device: str) -> tuple[float, list[Any]]:
    """Return the microseconds of a call, and the results."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    results = [call() for call in calls]
    return (time.perf_counter() - begin) / len(calls) * 1e6, results


def time_variant(variant: Variant, device: str) -> dict[str, float]:
    """Return microseconds of a call without a gradient, of one with it, and of backward."""
    leaf = torch.randn(ELEMENTS, device=device, requires_grad=True)
    grad = torch.randn(ELEMENTS, device=device)
    inputs = [leaf.detach().clone() for _ in range(CALLS)]
    no_grad, _ = host_time([lambda x=x: variant.run(x) for x in inputs], device)
    inputs = [leaf.clone() for _ in range(CALLS)]
    edges = [get_gradient_edge(x) for x in inputs]
    forward, outputs = host_time([lambda x=x: variant.run(x) for x in inputs], device)
    backward, _ = host_time(
        [
            lambda y=y, edge=edge: torch.autograd.grad(y, [edge], grad)
            for y, edge in zip(outputs, edges, strict=True)
        ],
        device,
    )
    return dict(zip(PHASES, (no_grad, forward, backward), strict=True))


def measure(
    activation: str, variants: list[Variant], device: str, repetitions: int
) -> list[dict[str, Any]]:
    """Return the rows of the variants, timed in turn."""
    for variant in variants:
        time_variant(variant, device)  # warms up
    measured = [
        {variant.name: time_variant(variant, device) for variant in variants}
        for _ in range(repetitions)
    ]
    rows = []
    for variant, phase in itertools.product(variants, PHASES):
        if variant.name in FLOORS and phase not in FLOORS[variant.name][1]:
            continue
        times = [repetition[variant.name][phase] for repetition in measured]
        first, median, third = quartiles(times)
        rows.append(
            {
                "activation": activation,
                "variant": variant.name,
                "phase": phase,
                "elements": ELEMENTS,
                "median_us": f"{median:.2f}",
                "first_quartile_us": f"{first:.2f}",
                "third_quartile_us": f"{third:.2f}",
                **machine(device),
            }
        )
    return rows


def main() -> None:
    """Verify, measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = arguments.device

    failures = Failures()
    floors = [Variant(name, run) for name, (run, _) in FLOORS.items()]
    with written_to(arguments.out or RESULTS / f"host_{device}.csv") as rows:
        for activation, variants in VARIANTS.items():
            passed = []
            for variant in variants:
                with failures.recorded(f"{activation}, {variant.name}"):
                    verify(activation, variant, torch.randn(ELEMENTS, device=device))
                    passed.append(variant)
            rows += measure(activation, passed, device, arguments.repetitions)
        rows += measure("Python alone", floors, device, arguments.repetitions)
    columns = ["activation", "variant", "phase", "median_us"]
    columns += ["first_quartile_us", "third_quartile_us"]
    print(table([columns, *([row[c] for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
