"""Measure the bandwidth of the kernels as a share of the device's copy bandwidth.

By op, direction, dtype and size. The baseline is a device-to-device copy of a tensor of the same
size; its bytes are those read plus those written. A kernel's bytes are the least that it must move
(variants.py). Each repetition times the copy and the kernels in turn, and the share is taken
within the repetition. The copy restores the input of the forward that follows, and backward reads
what that forward saved.

A timing covers many launches, each with its own tensors: 512 MiB of each tensor or, for small
tensors, 512 launches. On CUDA it is one replay of a graph, so that the time includes neither Python
nor launches from the host, and the L2 cache is evicted first. On the CPU it is a loop. Below about
1 MiB the launch determines the time, not the memory.

The results of the launches that are timed are first compared with PyTorch's. A case that fails is
reported and not timed; the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
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
from variants import VARIANTS, Variant
from verification import check

# Large sizes first, as a time limit must not cut them off.
SIZES = {"cuda": [2**i for i in (32, 30, 28, 26, 22, 18, 14, 10)], "cpu": [2**24, 2**18, 2**12]}
# Bytes of each tensor over all launches, at most; on CUDA larger than any L2 cache.
ROTATED = {"cuda": 512 * MIB, "cpu": 16 * MIB}
MOST_LAUNCHES = 512
CHUNK = 2**26  # elements compared at a time
Key = TypeVar("Key")


class Buffers:
    """Tensors of one size and dtype; each launch has its own."""

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        self.launches = max(1, min(MOST_LAUNCHES, ROTATED[device] // size))
        shape = (self.launches, size // dtype.itemsize)
        self.input = torch.randn(shape, dtype=dtype, device=device)
        self.grad = torch.randn(shape, dtype=dtype, device=device)
        self.x = torch.zeros_like(self.input)
        self.copy = recorded(
            [partial(x.copy_, source) for x, source in zip(self.x, self.input, strict=True)], device
        )


def time_case(
    activation: str, variant: Variant, buffers: Buffers, repetitions: int, clock: Clock
) -> dict[str, list[float]]:
    """Verify, then return the times of copy, forward and backward in microseconds per launch."""
    assert variant.kernels is not None
    forward = recorded([partial(variant.kernels.forward, x) for x in buffers.x], clock.device)
    runs = {"copy": buffers.copy, "forward": forward}

    buffers.grad.normal_().sign_()
    runs["copy"]()
    if not torch.equal(buffers.x, buffers.input):
        raise AssertionError("the copy differs from its source")
    backwards = []
    for x, grad, bits in zip(buffers.x, buffers.grad, runs["forward"](), strict=True):
        saved = [x] if variant.backward_tensors == 3 else []
        saved += [] if bits is None else [bits]
        backwards.append(partial(variant.kernels.backward, grad, *saved))
    runs["backward"] = recorded(backwards, clock.device)
    runs["copy"]()
    runs["forward"]()
    results = runs["backward"]()
    gradient = results[0] if len(results) == 1 else torch.stack(results)
    tensors = (buffers.input, buffers.grad, buffers.x, gradient)
    for chunks in zip(*(tensor.flatten().split(CHUNK) for tensor in tensors), strict=True):
        check(activation, variant, *chunks)
    del results, gradient, tensors, chunks
    buffers.grad.normal_()

    return times_of(runs, buffers.launches, repetitions, clock)


def times_of(
    runs: Mapping[Key, Callable[[], Any]], launches: int, repetitions: int, clock: Clock
) -> dict[Key, list[float]]:
    """Return the times of the runs, in microseconds per launch; repetitions take them in turn."""
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for repetition in range(repetitions + 2):
        for key, run in runs.items():
            time, _ = clock.time(run)
            if repetition >= 2:  # the first two warm up
                times[key].append(time / launches)
    return times


def rate_columns(
    times: list[float], moved: float, copies: list[float], copied: int
) -> dict[str, str]:
    """Return a row's columns of bytes per second: of the kernel, of the copy, and their ratio.

    Args:
        times: Times of the kernel, in microseconds.
        moved: Bytes that the kernel moves.
        copies: Times of the copy, in microseconds, from the same repetitions.
        copied: Bytes that the copy moves.
    """
    pairs = zip(times, copies, strict=True)
    shares = quartiles([moved / copied * copy / time for time, copy in pairs])
    return {
        "gigabytes_per_second": f"{moved / quartiles(times)[1] / 1e3:.2f}",
        "copy_gigabytes_per_second": f"{copied / quartiles(copies)[1] / 1e3:.2f}",
        "share_of_copy": f"{shares[1]:.3f}",
        "share_first_quartile": f"{shares[0]:.3f}",
        "share_third_quartile": f"{shares[2]:.3f}",
    }


def measure(
    activation: str, variant: Variant, buffers: Buffers, repetitions: int, clock: Clock
) -> list[dict[str, Any]]:
    """Return the rows of one variant: forward and backward."""
    times = time_case(activation, variant, buffers, repetitions, clock)
    dtype, elements = buffers.x.dtype, buffers.x.size(1)
    copied = 2 * elements * dtype.itemsize
    rows = []
    for direction in ("forward", "backward"):
        moved = variant.bytes_moved(direction, dtype, elements)
        first, median, third = quartiles(times[direction])
        rows.append(
            {
                "activation": activation,
                "variant": variant.name,
                "direction": direction,
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": elements * dtype.itemsize,
                "launches": buffers.launches,
                "method": "graph replay" if clock.device == "cuda" else "loop",
                "median_us": f"{median:.3f}",
                "first_quartile_us": f"{first:.3f}",
                "third_quartile_us": f"{third:.3f}",
                **rate_columns(times[direction], moved, times["copy"], copied),
                **machine(clock.device),
            }
        )
    return rows


def measure_size(
    size: int,
    dtype: torch.dtype,
    repetitions: int,
    clock: Clock,
    failures: Failures,
) -> list[dict[str, Any]]:
    """Return the rows of all variants at one size and dtype; none if they do not fit the device."""
    if clock.device == "cuda":
        torch.cuda.empty_cache()
        needed = 6 * max(size, ROTATED["cuda"])  # three tensors, bits, the result, a comparison
        if needed > torch.cuda.mem_get_info()[0]:
            print(f"{dtype}, {size} bytes: does not fit", flush=True)
            return []
    buffers = Buffers(size, dtype, clock.device)
    rows = []
    for activation, variants in VARIANTS.items():
        for variant in variants:
            if variant.kernels:
                with failures.recorded(f"{activation}, {variant.name}, {dtype}, {size} bytes"):
                    rows += measure(activation, variant, buffers, repetitions, clock)
    print(f"{dtype}, {size} bytes: {len(rows)} rows verified and timed", flush=True)
    return rows


def main() -> None:
    """Verify and measure all cases, write the CSV, print the rows of the largest size."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of a tensor")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = Clock(arguments.device)

    failures = Failures()
    cases = itertools.product(arguments.sizes or SIZES[arguments.device], arguments.dtypes)
    with written_to(arguments.out or RESULTS / f"bandwidth_{arguments.device}.csv") as rows:
        for size, dtype in cases:
            rows += measure_size(
                size, getattr(torch, dtype), arguments.repetitions, clock, failures
            )

    columns = ["activation", "variant", "direction", "dtype", "bytes", "median_us"]
    columns += ["copy_gigabytes_per_second", "share_of_copy"]
    columns += ["share_first_quartile", "share_third_quartile"]
    largest = max((row["bytes"] for row in rows), default=0)
    shown = [row for row in rows if row["bytes"] == largest]
    print(table([columns, *([str(row[c]) for c in columns] for row in shown)]))
    failures.exit()


if __name__ == "__main__":
    main()
