"""Measure the bandwidth of the kernels as a share of the device's copy bandwidth.

activations: the kernels of the in-place activations, by op, direction, dtype and size. A kernel's
bytes are the least that it must move (variants.py). The copy restores the input of the forward that
follows, and backward reads what that forward saved.

norms: the kernels that run after a norm, by layout and size. Backward of a converted model
recomputes a norm's output from the norm's input, then the activation, and computes the gradient
through both. "in float32" casts a 16-bit input to float32 before, and the result back, as around a
norm under autocast. "with the batch norm's" computes the gradients of a batch norm in training as
well, in two passes, each of which reads the gradient and the norm's input. "product" multiplies
each channel of a sample by a factor, as squeeze-excitation does; its time includes three small
kernels that prepare the factors. How a kernel finds each element's scale and shift depends on the
layout: one plane per channel (a plane of 7 x 7 ends inside an access of 16 bytes), channels
innermost, or rows of a layer norm. A strided gradient is half of the channels of a larger tensor,
as in the backward of torch.cat. A kernel's bytes are each tensor that it reads or writes, once,
without the norm's statistics.

The baseline is a device-to-device copy of a tensor of the same size; its bytes are those read plus
those written. Each repetition times the copy and the kernels in turn, and the share is taken within
the repetition. A timing covers many launches, each with its own tensors: 512 MiB of each tensor or,
for small tensors, 512 launches. On CUDA it is one replay of a graph, so that the time includes
neither Python nor launches from the host, and the L2 cache is evicted first. On the CPU it is a
loop. Below about 1 MiB the launch determines the time, not the memory.

The results of the launches are first compared with PyTorch's. A case that fails is reported and not
timed; the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from common import (
    MIB,
    Clock,
    Failures,
    Key,
    Row,
    add_options,
    in_turn,
    machine,
    quartiles,
    recorded,
    time_columns,
    write_results,
)
from torch import Tensor
from variants import ENTRIES, OP_VARIANTS, SCALARS, OpVariant, check_op

from inplace_ops import _ops
from inplace_ops.activations import Activation
from inplace_ops.recompute.kernels import scaling

# Large sizes first, as a time limit must not cut them off.
SIZES = {
    "activations": {
        "cuda": [2**i for i in (32, 30, 28, 26, 22, 18, 14, 10)],
        "cpu": [2**24, 2**12],
    },
    "norms": {"cuda": [2**30, 2**28, 2**26], "cpu": [2**24]},
}
# Bytes of each tensor over all launches, at most; on CUDA larger than any L2 cache.
ROTATED = {"cuda": 512 * MIB, "cpu": MIB}
MOST_LAUNCHES = 512
CHUNK = 2**26  # elements compared at a time


def launches_of(size: int, device: str) -> int:
    """Return the number of launches in a timing, for tensors of this many bytes."""
    return max(1, min(MOST_LAUNCHES, ROTATED[device] // size))


def times_of(
    runs: Mapping[Key, Callable[[], Any]], launches: int, repetitions: int, clock: Clock
) -> dict[Key, list[float]]:
    """Return the times of the runs, in order, in microseconds per launch."""

    def timed(run: Callable[[], Any]) -> float:
        return clock.time(run)[0] / launches

    timings = {key: partial(timed, run) for key, run in runs.items()}
    return in_turn(timings, repetitions, warm_ups=2, is_shuffled=False)


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


class Buffers:
    """The tensors of the activations' kernels, of one size and dtype; each launch has its own."""

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        self.launches = launches_of(size, device)
        shape = (self.launches, size // dtype.itemsize)
        self.input = torch.randn(shape, dtype=dtype, device=device)
        self.grad = torch.randn(shape, dtype=dtype, device=device)
        self.x = torch.zeros_like(self.input)
        self.copy = recorded(
            [partial(x.copy_, source) for x, source in zip(self.x, self.input, strict=True)], device
        )


def time_case(
    activation: str, variant: OpVariant, buffers: Buffers, repetitions: int, clock: Clock
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
        check_op(activation, variant, *chunks)
    del results, gradient, tensors, chunks
    buffers.grad.normal_()

    return times_of(runs, buffers.launches, repetitions, clock)


def measure(
    activation: str, variant: OpVariant, buffers: Buffers, repetitions: int, clock: Clock
) -> list[Row]:
    """Return the rows of one variant: forward and backward."""
    times = time_case(activation, variant, buffers, repetitions, clock)
    dtype, elements = buffers.x.dtype, buffers.x.size(1)
    copied = 2 * elements * dtype.itemsize
    rows = []
    for direction in ("forward", "backward"):
        moved = variant.bytes_moved(direction, dtype, elements)
        rows.append(
            {
                "activation": activation,
                "variant": variant.name,
                "direction": direction,
                "dtype": str(dtype).removeprefix("torch."),
                "bytes": elements * dtype.itemsize,
                "launches": buffers.launches,
                "method": "graph replay" if clock.device == "cuda" else "loop",
                **time_columns(times[direction], "us", decimals=3),
                **rate_columns(times[direction], moved, times["copy"], copied),
                **machine(clock.device),
            }
        )
    return rows


def activation_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all activations and variants, by size and dtype."""
    clock = Clock(arguments.device)
    for size, name in itertools.product(arguments.sizes, arguments.dtypes):
        dtype = getattr(torch, name)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
            # Three tensors, bits, the result, a comparison.
            if 6 * max(size, ROTATED["cuda"]) > torch.cuda.mem_get_info()[0]:
                print(f"{dtype}, {size} bytes: does not fit", flush=True)
                continue
        buffers = Buffers(size, dtype, arguments.device)
        for activation, variants in OP_VARIANTS.items():
            for variant in variants:
                if variant.kernels:
                    with failures.recorded(f"{activation}, {variant.name}, {dtype}, {size} bytes"):
                        yield from measure(
                            activation, variant, buffers, arguments.repetitions, clock
                        )
        del buffers
        print(f"{dtype}, {size / MIB:g} MiB: verified and timed", flush=True)


MEASURED = ("ReLU", "LeakyReLU", "SiLU", "GELU none")
FORWARD, SUM, BACKWARD = "recompute", "recompute of a residual sum", "backward"
IN_FLOAT32, WITH_NORM = "recompute in float32", "backward with the batch norm's"
PRODUCT = "product with a factor for each channel"


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


class NormBuffers:
    """A norm's affine, inputs and gradients; each launch has its own."""

    def __init__(self, layout: Layout, size: int, dtype: torch.dtype, device: str) -> None:
        one = torch.empty(layout.sample).numel() * dtype.itemsize
        shape = (max(1, size // one), *layout.sample)
        self.launches = launches_of(size, device)
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

    def normalized(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the norm's output, by default in the input's dtype."""
        wide = x.to(self.affine.dtype)
        if self.rows is not None:
            wide = (wide - self.rows[1]) * self.rows[0]
        return (wide * self.affine[0] + self.affine[1]).to(dtype or x.dtype)


def _all_memory(x: Tensor) -> Tensor:
    memory = x.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)


def steps(shape: tuple[int, ...], count: int, size: float, **options: Any) -> Tensor:
    """Return random multiples of `size`, from -count to count times `size`."""
    return size * torch.randint(-count, count + 1, shape, **options)


class Case(NamedTuple):
    """A kernel.

    Attributes:
        calls: Its launches.
        tensors: The number of tensors that each launch moves.
        expected: Returns the expected result of a launch.
        subtracts: Whether results are differences of numbers that are rounded to the dtype.
    """

    calls: list[Callable[[], Tensor]]
    tensors: int
    expected: Callable[[int], Tensor]
    subtracts: bool = False

    def check(self, i: int, result: Tensor) -> None:
        """Compare the result of a launch with the expected one."""
        expected, tolerances = self.expected(i), {}
        if self.subtracts:
            rounding = torch.finfo(expected.dtype).eps * float(expected.abs().max())
            tolerances = {"rtol": 0, "atol": 4 * rounding}
        torch.testing.assert_close(result, expected, **tolerances)


def cases_of(buffers: NormBuffers) -> dict[tuple[str, str], Case]:
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
    if rows is None:
        cases["none", PRODUCT] = _product(buffers)
    pairs = list(zip(buffers.x, buffers.grad, strict=True))

    def total(i: int) -> Tensor:
        return normalized(i) + buffers.grad[i]

    for name, op, expected in (
        ("none", _ops.NORMALIZE_ADD, total),
        ("ReLU", _ops.NORMALIZE_ADD_RELU, lambda i: torch.relu(total(i))),
    ):
        calls = [partial(op, x, affine, rows, addend, order) for x, addend in pairs]
        cases[name, SUM] = Case(calls, 3, expected)
    for name in MEASURED:
        entry = ENTRIES[name]
        scalars = {scalar: SCALARS[scalar] for scalar in entry.scalars}
        arguments = (*norm, *scalars.values())
        function = partial(entry.torch_function, **scalars)
        forward = [partial(entry.ops.recompute, x, *arguments) for x in buffers.x]
        cases[name, FORWARD] = Case(forward, 2, lambda i, f=function: f(normalized(i)))
        if buffers.x[0].dtype in _ops.CAST_DTYPES:
            in_float32 = [partial(call, in_float32=True) for call in forward]
            cases[name, IN_FLOAT32] = Case(in_float32, 2, partial(_in_float32, buffers, function))
        for kind, grads in {
            BACKWARD: buffers.grad,
            f"{BACKWARD}, strided gradient": buffers.strided,
        }.items():
            cases[name, kind] = _backward(entry, buffers, grads, arguments, function)
        if rows is None:
            cases[name, WITH_NORM] = _backward_with_norm(entry, buffers, function, scalars)
    return cases


def _product(buffers: NormBuffers) -> Case:
    shape = buffers.x[0].shape
    factors = 1.5 + steps((*shape[:2], *(1 for _ in shape[2:])), 1, 0.5).to(buffers.x[0])

    def multiplied(x: Tensor) -> Tensor:
        return _ops.NORMALIZE(x, *scaling(factors), buffers.order)

    calls = [partial(multiplied, x) for x in buffers.x]
    return Case(calls, 2, lambda i: buffers.x[i] * factors)


def _in_float32(buffers: NormBuffers, function: Callable[[Tensor], Tensor], i: int) -> Tensor:
    x = buffers.x[i]
    return function(buffers.normalized(x, torch.float32)).to(x.dtype)


def _backward(
    entry: Activation,
    buffers: NormBuffers,
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


def _backward_with_norm(
    entry: Activation,
    buffers: NormBuffers,
    function: Callable[[Tensor], Tensor],
    scalars: dict[str, float],
) -> Case:
    """Return the op that computes a batch norm's gradients too.

    It moves at least five tensors: both inputs in each of its two passes, and the result.
    """
    op, scale = entry.ops.backward_batch_norm, buffers.affine[0]
    channels, dtype = scale.numel(), buffers.affine.dtype
    mean, rstd = (1.5 + steps((channels,), 1, 0.5).to(scale) for _ in range(2))
    arguments = (buffers.affine, mean, rstd, buffers.order, *scalars.values())
    pairs = list(zip(buffers.grad, buffers.x, strict=True))

    def expected(i: int) -> Tensor:
        grad, x = pairs[i]
        z = buffers.normalized(x).to(dtype).requires_grad_()
        (g,) = torch.autograd.grad(function(z), z, grad.to(dtype))
        normalized = (x.to(dtype) - mean.view(scale.shape)) * rstd.view(scale.shape)
        dims = [d for d in range(x.dim()) if d != 1]
        elements = x.numel() / channels
        mean_of_g = g.sum(dims, keepdim=True) / elements
        mean_of_product = (g * normalized).sum(dims, keepdim=True) / elements
        return (scale * (g - mean_of_g - normalized * mean_of_product)).to(x.dtype)

    calls = [lambda p=pair: op(*p, *arguments)[0] for pair in pairs]
    return Case(calls, 5, expected, subtracts=True)


def measure_layout(
    name: str,
    size: int,
    dtype: torch.dtype,
    repetitions: int,
    clock: Clock,
    failures: Failures,
) -> list[Row]:
    """Return the rows of all kernels at one layout, size and dtype."""
    buffers = NormBuffers(LAYOUTS[name], size, dtype, clock.device)
    runs, cases = {("copy", "copy"): buffers.copy}, cases_of(buffers)
    for key, case in cases.items():
        with failures.recorded(f"{', '.join(key)}, {name}, {dtype}, {size} bytes"):
            run = recorded(case.calls, clock.device)
            buffers.exact()
            for i, result in enumerate(run()):
                case.check(i, result)
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


def norm_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all kernels, by size, dtype and layout."""
    clock = Clock(arguments.device)
    for size, dtype, name in itertools.product(
        arguments.sizes, arguments.dtypes, arguments.layouts
    ):
        yield from measure_layout(
            name, size, getattr(torch, dtype), arguments.repetitions, clock, failures
        )
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


# By command: the name of the result file, and what yields its rows.
COMMANDS = {"activations": ("bandwidth", activation_rows), "norms": ("norms", norm_rows)}


def main() -> None:
    """Verify and measure all cases, write the CSV, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command, repetitions, dtypes in (
        ("activations", 21, ["float32", "bfloat16", "float16"]),
        ("norms", 15, ["float32", "bfloat16"]),
    ):
        options = commands.add_parser(command)
        add_options(options, repetitions)
        options.add_argument("--sizes", type=int, nargs="+", help="bytes of a tensor")
        options.add_argument("--dtypes", nargs="+", default=dtypes)
        if command == "norms":
            options.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or SIZES[arguments.command][arguments.device]
    name, rows_of = COMMANDS[arguments.command]
    write_results(name, partial(rows_of, arguments), None, arguments)


if __name__ == "__main__":
    main()
