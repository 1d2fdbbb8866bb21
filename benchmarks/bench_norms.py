"""Measure the kernels that run after a norm as a share of the device's copy bandwidth.

By layout and size. Backward of a converted model recomputes a norm's output from the norm's input,
then the activation, and computes the gradient through both. How a kernel finds each element's scale
and shift depends on the layout: one plane per channel (a plane of 7 x 7 ends inside an access of 16
bytes), channels innermost, or rows of a layer norm. A strided gradient is half of the channels of a
larger tensor, as in the backward of torch.cat.

A kernel's bytes are the least that it must move: each tensor that it reads or writes, once, without
the norm's statistics. Launches, graphs and the copy that is the baseline are as in
bench_bandwidth.py. Each kernel is first compared with PyTorch, on numbers whose results are exact
in every dtype. A case that fails is reported and not timed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_bandwidth import MOST_LAUNCHES, ROTATED, rate_columns, times_of
from measure import (
    MIB,
    RESULTS,
    Clock,
    Failures,
    machine,
    quartiles,
    recorded,
    table,
    written_to,
)
from torch import Tensor
from variants import ENTRIES, SCALARS

from inplace_ops import _ops
from inplace_ops.activations import Activation

SIZES = {"cuda": [2**30, 2**28, 2**26], "cpu": [2**20]}
SHOWN = ("ReLU", "LeakyReLU", "SiLU", "GELU none")
FORWARD, SUM, BACKWARD = "recompute", "recompute of a residual sum", "backward"


class Layout(NamedTuple):
    """Shape and memory format of a norm's input.

    Attributes:
        sample: The shape of a sample, channels first; for a layer norm, of a row.
        memory_format: The memory format of the input.
        has_rows: Whether each row has its own statistics, as in a layer norm.
    """

    sample: tuple[int, ...]
    memory_format: torch.memory_format = torch.contiguous_format
    has_rows: bool = False


LAYOUTS = {
    "NCHW, 64 x 56 x 56": Layout((64, 56, 56)),
    "NCHW, 256 x 14 x 14": Layout((256, 14, 14)),
    "NCHW, 512 x 7 x 7": Layout((512, 7, 7)),
    "channels_last, 64 x 56 x 56": Layout((64, 56, 56), torch.channels_last),
    "channels_last, 256 x 14 x 14": Layout((256, 14, 14), torch.channels_last),
    "rows of 384": Layout((384,), has_rows=True),
}


class Buffers:
    """A norm's affine, and inputs and gradients; each launch has its own."""

    def __init__(self, layout: Layout, size: int, dtype: torch.dtype, device: str) -> None:
        one = torch.empty(layout.sample).numel() * dtype.itemsize
        shape = (max(1, size // one), *layout.sample)
        self.launches = max(1, min(MOST_LAUNCHES, ROTATED[device] // size))
        self.size, self.bytes = size, shape[0] * one

        def empty(shape: tuple[int, ...], size: int) -> Tensor:
            memory = torch.empty(size, dtype=torch.uint8, device=device).view(dtype)
            strides = torch.empty(shape, device="meta").to(**format_of(shape)).stride()
            return memory.as_strided(shape, strides)

        def format_of(shape: tuple[int, ...]) -> dict[str, torch.memory_format]:
            return {"memory_format": layout.memory_format} if len(shape) == 4 else {}

        self.x = [empty(shape, size) for _ in range(self.launches)]
        self.grad = [empty(shape, size) for _ in range(self.launches)]
        double = (shape[0], 2 * shape[1], *shape[2:])
        self.strided = [
            empty(double, 2 * size).narrow(1, 0, shape[1]) for _ in range(self.launches)
        ]
        # Copies the whole allocations: CUDA copies more slowly if the number of bytes is not a
        # multiple of a large number.
        pairs = zip(map(_all_memory, self.x), map(_all_memory, self.grad), strict=True)
        self.copy = recorded([partial(x.copy_, grad) for x, grad in pairs], device)
        wide = {"dtype": _ops.affine_dtype(dtype), "device": device}
        ones = (1,) * (len(shape) - 2)
        self.affine = 1.5 + steps((2, 1, shape[1], *ones), 1, 0.5, **wide)
        self.rows = 1.5 + steps((2, shape[0], 1), 1, 0.5, **wide) if layout.has_rows else None
        self.order = _ops.dim_order_of(self.x[0])

    def exact(self) -> None:
        """Fill inputs and gradients with numbers whose sums and products are exact."""
        for tensor in self.x:
            tensor.copy_(steps(tensor.shape, 8, 0.25, device=tensor.device))
        for tensor in (*self.grad, *self.strided):
            tensor.copy_(steps(tensor.shape, 1, 1.0, device=tensor.device))

    def random(self) -> None:
        """Fill inputs and gradients with random numbers."""
        for tensor in (*self.x, *self.grad, *self.strided):
            tensor.normal_()

    def normalized(self, x: Tensor) -> Tensor:
        """Return the norm's output, in the input's dtype."""
        wide = x.to(self.affine.dtype)
        if self.rows is not None:
            wide = (wide - self.rows[1]) * self.rows[0]
        return (wide * self.affine[0] + self.affine[1]).to(x.dtype)


def _all_memory(x: Tensor) -> Tensor:
    memory = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)


def steps(shape: tuple[int, ...], count: int, size: float, **options: Any) -> Tensor:
    """Return random multiples of `size`, from -count to count times `size`."""
    return size * torch.randint(-count, count + 1, shape, **options)


class Case(NamedTuple):
    """A kernel: its launches, the number of tensors that each moves, and the expected results."""

    calls: list[Callable[[], Tensor]]
    tensors: int
    expected: Callable[[int], Tensor]


def cases_of(buffers: Buffers) -> dict[tuple[str, str], Case]:
    """Return the kernels, by activation and by what they compute."""
    norm = (buffers.affine, buffers.rows, buffers.order)

    def normalized(i: int) -> Tensor:
        return buffers.normalized(buffers.x[i])

    cases = {
        ("none", FORWARD): Case(
            [partial(_ops.NORMALIZE, x, *norm) for x in buffers.x], 2, normalized
        )
    }
    affine, rows, order = norm
    pairs = list(zip(buffers.x, buffers.grad, strict=True))

    def total(i: int) -> Tensor:
        return normalized(i) + buffers.grad[i]

    for name, op, expected in (
        ("none", _ops.NORMALIZE_ADD, total),
        ("ReLU", _ops.NORMALIZE_ADD_RELU, lambda i: torch.relu(total(i))),
    ):
        calls = [partial(op, x, affine, rows, addend, order) for x, addend in pairs]
        cases[name, SUM] = Case(calls, 3, expected)
    for name in SHOWN:
        entry = ENTRIES[name]
        scalars = {scalar: SCALARS[scalar] for scalar in entry.scalars}
        arguments = (*norm, *scalars.values())
        function = partial(entry.torch_function, **scalars)
        forward = [partial(entry.ops.recompute, x, *arguments) for x in buffers.x]
        cases[name, FORWARD] = Case(forward, 2, lambda i, f=function: f(normalized(i)))
        for kind, grads in {
            BACKWARD: buffers.grad,
            f"{BACKWARD}, strided gradient": buffers.strided,
        }.items():
            cases[name, kind] = _backward(entry, buffers, grads, arguments, function)
    return cases


def _backward(
    entry: Activation,
    buffers: Buffers,
    grads: list[Tensor],
    arguments: tuple[Any, ...],
    function: Callable[[Tensor], Tensor],
) -> Case:
    op = entry.ops.backward["recompute"]
    pairs = list(zip(grads, buffers.x, strict=True))

    def expected(i: int) -> Tensor:
        grad, x = pairs[i]
        z = buffers.normalized(x).requires_grad_()
        return torch.autograd.grad(function(z), z, grad)[0]

    return Case([partial(op, grad, x, *arguments) for grad, x in pairs], 3, expected)


def measure_layout(
    name: str,
    size: int,
    dtype: torch.dtype,
    repetitions: int,
    clock: Clock,
    failures: Failures,
) -> list[dict[str, Any]]:
    """Return the rows of all kernels at one layout, size and dtype."""
    buffers = Buffers(LAYOUTS[name], size, dtype, clock.device)
    runs, cases = {("copy", "copy"): buffers.copy}, cases_of(buffers)
    for key, case in cases.items():
        with failures.recorded(f"{', '.join(key)}, {name}, {dtype}, {size} bytes"):
            run = recorded(case.calls, clock.device)
            buffers.exact()
            for i, result in enumerate(run()):
                torch.testing.assert_close(result, case.expected(i))
            runs[key] = run
    buffers.random()
    times = times_of(runs, buffers.launches, repetitions, clock)
    copies = times.pop(("copy", "copy"))
    rows = []
    for (activation, kind), kernel_times in times.items():
        moved = cases[activation, kind].tensors * buffers.bytes
        rows.append(
            {
                "activation": activation,
                "kernel": kind,
                "layout": name,
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": size,
                "launches": buffers.launches,
                "median_us": f"{quartiles(kernel_times)[1]:.3f}",
                **rate_columns(kernel_times, moved, copies, copied=2 * buffers.size),
                **machine(clock.device),
            }
        )
    print(f"{name}, {dtype}, {size / MIB:g} MiB: {len(rows)} verified and timed", flush=True)
    return rows


def main() -> None:
    """Verify and measure all cases, write the CSV, print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a tensor")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock, failures = Clock(arguments.device), Failures()
    sizes = arguments.sizes or SIZES[arguments.device]

    with written_to(arguments.out or RESULTS / f"norms_{arguments.device}.csv") as rows:
        for size, dtype, name in itertools.product(sizes, arguments.dtypes, arguments.layouts):
            rows += measure_layout(
                name, size, getattr(torch, dtype), arguments.repetitions, clock, failures
            )
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    columns = ["activation", "kernel", "layout", "dtype", "bytes", "gigabytes_per_second"]
    columns += ["share_of_copy", "share_first_quartile", "share_third_quartile"]
    print(table([columns, *([str(row[c]) for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
