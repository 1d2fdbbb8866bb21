"""Measure the bandwidth of the kernels as a share of the device's copy bandwidth.

activations: the kernels of the in-place activations, by op, direction, dtype and size. A kernel's
bytes are the least that it must move (variants.py). The copy restores the input of the forward that
follows, and backward reads what that forward saved.

norms: the kernels that run after a norm in a converted model, by layout and size. "in float32"
casts a 16-bit input to float32 before, and the result back, as around a norm under autocast. "with
the batch norm's" computes the gradients of a batch norm in training as well, in two passes, each of
which reads the gradient and the norm's input. "product" multiplies each channel of a sample by a
factor, as squeeze-excitation does; its time includes three small kernels that prepare the factors.
How a kernel finds each element's scale and shift depends on the layout: one plane per channel (a
plane of 7 x 7 ends inside an access of 16 bytes), channels innermost, or rows of a layer norm. A
strided gradient is half of the channels of a larger tensor, as in the backward of torch.cat. A
kernel's bytes are each tensor that it reads or writes, once, without the norm's statistics.

The baseline is a device-to-device copy of a tensor of the same size; its bytes are those read plus
those written, and the share is taken within a repetition. A timing covers many launches, each with
its own tensors. Below about 1 MiB the launch determines the time, not the memory.
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
    parser_of,
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


def share_columns(
    runs: Mapping[Key, Callable[[], Any]],
    moved: Mapping[Key, float],
    copy: Key,
    launches: int,
    repetitions: int,
    clock: Clock,
) -> dict[Key, Row]:
    """Time the runs in their order; return the columns of each, next to the copy.

    A run has several launches, each of which moves `moved` bytes.
    """

    def timed(run: Callable[[], Any]) -> float:
        return clock.time(run)[0] / launches

    timings = {key: partial(timed, run) for key, run in runs.items()}
    times = in_turn(timings, repetitions, warm_ups=2, is_shuffled=False)
    copies, found = times.pop(copy), {}
    for key, own in times.items():
        pairs = zip(own, copies, strict=True)
        shares = quartiles([moved[key] / moved[copy] * other / time for time, other in pairs])
        found[key] = {
            "launches": launches,
            **time_columns(own, "us", decimals=3),
            "gigabytes_per_second": f"{moved[key] / quartiles(own)[1] / 1e3:.2f}",
            "copy_gigabytes_per_second": f"{moved[copy] / quartiles(copies)[1] / 1e3:.2f}",
            "share_of_copy": f"{shares[1]:.3f}",
            "share_first_quartile": f"{shares[0]:.3f}",
            "share_third_quartile": f"{shares[2]:.3f}",
        }
    return found


class Buffers:
    """The tensors of the activations' kernels, of one size and dtype; each launch has its own."""

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        shape = (launches_of(size, device), size // dtype.itemsize)
        self.input = torch.randn(shape, dtype=dtype, device=device)
        self.grad = torch.randn(shape, dtype=dtype, device=device)
        self.x = torch.zeros_like(self.input)
        self.copy = recorded(
            [partial(x.copy_, source) for x, source in zip(self.x, self.input, strict=True)], device
        )


def measure_op(
    activation: str, variant: OpVariant, buffers: Buffers, repetitions: int, clock: Clock
) -> dict[str, Row]:
    """Verify, then return the columns of forward and backward."""
    assert variant.kernels is not None
    forward = recorded([partial(variant.kernels.forward, x) for x in buffers.x], clock.device)
    buffers.grad.normal_().sign_()
    buffers.copy()
    if not torch.equal(buffers.x, buffers.input):
        raise AssertionError("the copy differs from its source")
    backwards = []
    for x, grad, bits in zip(buffers.x, buffers.grad, forward(), strict=True):
        saved = [x] if variant.backward_tensors == 3 else []
        saved += [] if bits is None else [bits]
        backwards.append(partial(variant.kernels.backward, grad, *saved))
    backward = recorded(backwards, clock.device)
    buffers.copy()
    forward()
    results = backward()
    gradient = results[0] if len(results) == 1 else torch.stack(results)
    tensors = (buffers.input, buffers.grad, buffers.x, gradient)
    for chunks in zip(*(tensor.flatten().split(CHUNK) for tensor in tensors), strict=True):
        check_op(activation, variant, *chunks)
    del results, gradient, tensors, chunks
    buffers.grad.normal_()
    (launches, elements), dtype = buffers.x.shape, buffers.x.dtype
    moved = {"copy": 2.0 * elements * dtype.itemsize}
    for direction in ("forward", "backward"):
        moved[direction] = variant.bytes_moved(direction, dtype, elements)
    runs = {"copy": buffers.copy, "forward": forward, "backward": backward}
    return share_columns(runs, moved, "copy", launches, repetitions, clock)


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
            for variant in (each for each in variants if each.kernels):
                with failures.recorded(f"{activation}, {variant.name}, {dtype}, {size} bytes"):
                    found = measure_op(activation, variant, buffers, arguments.repetitions, clock)
                    case = {"activation": activation, "variant": variant.name}
                    for direction, columns in found.items():
                        what = {"direction": direction, "dtype": name}
                        yield case | what | {"bytes": buffers.x[0].nbytes} | columns
        del buffers


MEASURED = ("ReLU", "LeakyReLU", "SiLU", "GELU none")
FORWARD, SUM, BACKWARD = "recompute", "recompute of a residual sum", "backward"
IN_FLOAT32, WITH_NORM = "recompute in float32", "backward with the batch norm's"
STRIDED = "backward, strided gradient"
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

        def empty(shape: tuple[int, ...], size: int) -> list[Tensor]:
            like = torch.empty(shape, device="meta")
            like = like.to(memory_format=layout.memory_format) if like.dim() == 4 else like
            memory = (
                torch.empty(size, dtype=torch.uint8, device=device) for _ in range(self.launches)
            )
            return [each.view(dtype).as_strided(shape, like.stride()) for each in memory]

        self.x, self.grad = empty(shape, size), empty(shape, size)
        double = (shape[0], 2 * shape[1], *shape[2:])
        self.strided = [each.narrow(1, 0, shape[1]) for each in empty(double, 2 * size)]
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
        call: Launches it, given the number of the launch.
        tensors: The number of tensors that each launch moves.
        expected: Returns the expected result of a launch.
        subtracts: Whether results are differences of numbers that are rounded to the dtype.
    """

    call: Callable[[int], Tensor]
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
    affine, rows, order = norm = (buffers.affine, buffers.rows, buffers.order)
    x, grad = buffers.x, buffers.grad

    def total(i: int) -> Tensor:
        return buffers.normalized(x[i]) + grad[i]

    def add(op: Callable[..., Tensor], i: int) -> Tensor:
        return op(x[i], affine, rows, grad[i], order)

    cases = {
        ("none", FORWARD): Case(
            lambda i: _ops.NORMALIZE(x[i], *norm), 2, lambda i: buffers.normalized(x[i])
        ),
        ("none", SUM): Case(partial(add, _ops.NORMALIZE_ADD), 3, total),
        ("ReLU", SUM): Case(
            partial(add, _ops.NORMALIZE_ADD_RELU), 3, lambda i: torch.relu(total(i))
        ),
    }
    if rows is None:
        shape = x[0].shape
        factors = 1.5 + steps((*shape[:2], *(1 for _ in shape[2:])), 1, 0.5).to(x[0])
        cases["none", PRODUCT] = Case(
            lambda i: _ops.NORMALIZE(x[i], *scaling(factors), order), 2, lambda i: x[i] * factors
        )
    for name in MEASURED:
        of_activation = _cases_of_activation(ENTRIES[name], buffers)
        cases |= {(name, kind): case for kind, case in of_activation.items()}
    return cases


def _cases_of_activation(entry: Activation, buffers: NormBuffers) -> dict[str, Case]:
    """Return the kernels of an activation after the norm, by what they compute."""
    norm, x = (buffers.affine, buffers.rows, buffers.order), buffers.x
    scalars = {name: SCALARS[name] for name in entry.scalars}
    function = partial(entry.torch_function, **scalars)

    def recompute(i: int, **options: bool) -> Tensor:
        return entry.ops.recompute(x[i], *norm, *scalars.values(), **options)

    def output(i: int, dtype: torch.dtype | None = None) -> Tensor:
        return function(buffers.normalized(x[i], dtype)).to(x[i].dtype)

    def gradient(grads: list[Tensor], i: int, dtype: torch.dtype | None = None) -> Tensor:
        z = buffers.normalized(x[i], dtype).requires_grad_()
        return torch.autograd.grad(function(z), z, grads[i].to(z.dtype))[0]

    def backward(grads: list[Tensor], i: int) -> Tensor:
        return entry.ops.backward["recompute"](grads[i], x[i], *norm, *scalars.values())

    cases = {FORWARD: Case(recompute, 2, output)}
    if x[0].dtype in _ops.CAST_DTYPES:
        cases[IN_FLOAT32] = Case(
            partial(recompute, in_float32=True), 2, partial(output, dtype=torch.float32)
        )
    for kind, grads in ((BACKWARD, buffers.grad), (STRIDED, buffers.strided)):
        cases[kind] = Case(partial(backward, grads), 3, partial(gradient, grads))
    if buffers.rows is None:
        scale = buffers.affine[0].flatten()
        mean, rstd = (1.5 + steps(tuple(scale.shape), 1, 0.5).to(scale) for _ in range(2))
        arguments = (buffers.affine, mean, rstd, buffers.order, *scalars.values())

        def with_norm(i: int) -> Tensor:
            return entry.ops.backward_batch_norm(buffers.grad[i], x[i], *arguments)[0]

        def expected(i: int) -> Tensor:
            given = (gradient(buffers.grad, i, torch.float64), x[i].double())
            weight, *statistics = (each.double() for each in (scale / rstd, mean, rstd))
            others = (weight, None, None, *statistics, True, 0.0, [True, False, False])
            return torch.ops.aten.native_batch_norm_backward(*given, *others)[0].to(x[i].dtype)

        # At least five tensors: both inputs in each of its two passes, and the result.
        cases[WITH_NORM] = Case(with_norm, 5, expected, subtracts=True)
    return cases


def measure_layout(
    name: str, size: int, dtype: str, repetitions: int, clock: Clock, failures: Failures
) -> dict[tuple[str, str], Row]:
    """Verify, then return the columns of all kernels at one layout, size and dtype."""
    buffers, copy = NormBuffers(LAYOUTS[name], size, getattr(torch, dtype), clock.device), ("", "")
    runs, moved = {copy: buffers.copy}, {copy: 2.0 * size}
    for key, case in cases_of(buffers).items():
        with failures.recorded(f"{', '.join(key)}, {name}, {dtype}, {size} bytes"):
            calls = [partial(case.call, i) for i in range(buffers.launches)]
            run = recorded(calls, clock.device)
            buffers.exact()
            for i, result in enumerate(run()):
                case.check(i, result)
            runs[key], moved[key] = run, case.tensors * buffers.bytes
    for tensor in (*buffers.x, *buffers.grad, *buffers.strided):
        tensor.normal_()
    return share_columns(runs, moved, copy, buffers.launches, repetitions, clock)


def norm_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all kernels, by size, dtype and layout."""
    clock = Clock(arguments.device)
    for size, dtype, name in itertools.product(
        arguments.sizes, arguments.dtypes, arguments.layouts
    ):
        found = measure_layout(name, size, dtype, arguments.repetitions, clock, failures)
        for (activation, kernel), columns in found.items():
            what = {"activation": activation, "kernel": kernel, "layout": name, "dtype": dtype}
            yield what | {"bytes": size} | columns
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


# By command: the name of the result file, and what yields its rows.
COMMANDS = {"activations": ("bandwidth", activation_rows), "norms": ("norms", norm_rows)}


def main() -> None:
    """Verify, measure and write the CSV."""
    parser = parser_of(__doc__)
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
    write_results(*COMMANDS[arguments.command], arguments)


if __name__ == "__main__":
    main()
