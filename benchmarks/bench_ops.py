"""Time and memory of the activations, against PyTorch out of place and in place.

Ratios are to PyTorch in place, or to PyTorch out of place if there is no in-place version.

time: forward, backward and both, by size and dtype. Restoring a variant's input is not timed. The
bandwidth is the bytes that a variant must move (variants.py), over its median time. The times
include the cost of Python and autograd as far as the device has to wait for it: bench_bandwidth.py
times the kernels alone, and `host` the host alone.

host: the cost of Python and autograd before the device works, in a call on a small tensor. Calls
are issued one after the other without waiting for the device. On the CPU the time includes the
kernel's, a fraction of a microsecond at this size. "Python alone" is a lower bound for every
extension that is called from Python.

memory: after forward: bytes that the call allocates and that are still allocated when it has
returned. saved: what `inplace_ops.saved_bytes` returns, without the input's own memory.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from common import (
    MIB,
    Clock,
    Failures,
    Row,
    add_options,
    in_turn,
    memory_of,
    parser_of,
    quartiles,
    ratio_columns,
    time_columns,
    write_results,
)
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from variants import OP_VARIANTS, OpVariant, baseline, verify_op

import inplace_ops
from inplace_ops.activations import RELU


def passing(
    activation: str, variants: Sequence[OpVariant], x: Tensor, failures: Failures
) -> list[OpVariant]:
    """Return the variants whose values and gradients are right."""
    passed = []
    for variant in variants:
        with failures.recorded(f"{activation}, {variant.name}, {x.dtype}, {x.numel()} elements"):
            verify_op(activation, variant, x)
            passed.append(variant)
    return passed


def time_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all sizes, dtypes, activations, variants and phases."""
    clock = Clock(arguments.device)
    for elements, name, activation in itertools.product(
        arguments.elements, arguments.dtypes, arguments.activations
    ):
        dtype = getattr(torch, name)
        x, grad = (torch.randn(elements, device=arguments.device).to(dtype) for _ in range(2))
        variants = list(OP_VARIANTS[activation])
        if arguments.compile:
            torch.compiler.reset()  # past its recompilation limit, torch.compile runs eagerly
            compiled = torch.compile(variants[0].run, dynamic=False)
            variants.append(OpVariant("torch.compile", compiled))
        passed = passing(activation, variants, x, failures)
        base = baseline(variants)
        if base not in passed:
            continue
        leaf = x.clone().requires_grad_()
        timed = {v: partial(_timed, v, leaf, grad, clock) for v in passed}
        times = in_turn(timed, arguments.repetitions, warm_ups=2)
        for variant, phase in itertools.product(passed, ("forward", "backward", "both")):
            own, others = ([each[phase] for each in times[v]] for v in (variant, base))
            moved, base_moved = (v.bytes_moved(phase, dtype, elements) for v in (variant, base))
            yield {
                "activation": activation,
                "variant": variant.name,
                "dtype": name,
                "elements": elements,
                "phase": phase,
                **time_columns(own, "us"),
                "gigabytes_per_second": f"{moved / quartiles(own)[1] / 1e3:.2f}",
                **ratio_columns(own, others),
                "bytes_ratio_to_torch_in_place": f"{moved / base_moved:.3f}",
            }


def _timed(variant: OpVariant, leaf: Tensor, grad: Tensor, clock: Clock) -> dict[str, float]:
    """Return the microseconds of forward, of backward and of both."""
    h = leaf.clone()
    edge = get_gradient_edge(h)
    forward, output = clock.time(lambda: variant.run(h))
    backward, _ = clock.time(lambda: torch.autograd.grad(output, [edge], grad))
    return {"forward": forward, "backward": backward, "both": forward + backward}


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


# Lower bounds, and the phases that they are for.
FLOORS: dict[OpVariant, Sequence[str]] = {
    OpVariant("a custom op", _op_alone): ["no grad"],
    OpVariant("an empty autograd.Function", lambda x: _Empty.apply(x, _SAVED)): PHASES[1:],
}


def host_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all activations, and of Python alone."""
    x = torch.randn(ELEMENTS, device=arguments.device)
    for activation in arguments.activations:
        passed = passing(activation, OP_VARIANTS[activation], x, failures)
        yield from _host_times(activation, dict.fromkeys(passed, PHASES), arguments)
    yield from _host_times("Python alone", FLOORS, arguments)


def _host_times(
    activation: str, variants: Mapping[OpVariant, Sequence[str]], arguments: argparse.Namespace
) -> Iterator[Row]:
    """Yield the rows of some phases of each variant."""
    timed = {v: partial(_host_time_of_phases, v, arguments.device) for v in variants}
    times = in_turn(timed, arguments.repetitions, warm_ups=1)
    for variant, phases in variants.items():
        for phase in phases:
            yield {
                "activation": activation,
                "variant": variant.name,
                "phase": phase,
                "elements": ELEMENTS,
                **time_columns([each[phase] for each in times[variant]], "us"),
            }


def _host_time_of_phases(variant: OpVariant, device: str) -> dict[str, float]:
    """Return the microseconds of a call without a gradient, of one with it, and of backward."""
    leaf = torch.randn(ELEMENTS, device=device, requires_grad=True)
    grad = torch.randn(ELEMENTS, device=device)
    inputs = [leaf.detach().clone() for _ in range(CALLS)]
    no_grad, _ = _host_time([lambda x=x: variant.run(x) for x in inputs], device)
    inputs = [leaf.clone() for _ in range(CALLS)]
    edges = [get_gradient_edge(x) for x in inputs]
    forward, outputs = _host_time([lambda x=x: variant.run(x) for x in inputs], device)
    pairs = zip(outputs, edges, strict=True)
    backwards = [lambda y=y, edge=edge: torch.autograd.grad(y, [edge], grad) for y, edge in pairs]
    backward, _ = _host_time(backwards, device)
    return dict(zip(PHASES, (no_grad, forward, backward), strict=True))


def _host_time(calls: Sequence[Callable[[], Any]], device: str) -> tuple[float, list[Any]]:
    """Return the microseconds of a call, and the results."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    results = [call() for call in calls]
    return (time.perf_counter() - begin) / len(calls) * 1e6, results


def memory_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all activations and variants."""
    device, size = arguments.device, arguments.size

    def fresh(requires_grad: bool) -> Tensor:
        x = torch.randn(size, size, device=device, requires_grad=requires_grad)
        return x.clone() if requires_grad else x  # autograd forbids modifying a leaf

    for activation in arguments.activations:
        x = torch.randn(64, device=device)
        for variant in passing(activation, OP_VARIANTS[activation], x, failures):
            row = {"activation": activation, "variant": variant.name, "size": f"{size} x {size}"}
            for suffix, requires_grad in (("no grad", False), ("with grad", True)):
                peak, allocated = memory_of(partial(variant.run, fresh(requires_grad)), device)
                row[f"MiB after forward, {suffix}"] = f"{allocated / MIB:.1f}"
                row[f"MiB peak, {suffix}"] = f"{peak / MIB:.1f}"
            saved = inplace_ops.saved_bytes(variant.run, fresh(requires_grad=True))
            row["MiB saved, with grad"] = f"{saved / MIB:.1f}"
            yield row


# By command: the name of the result file, and what yields its rows.
COMMANDS = {
    "time": ("activations", time_rows),
    "host": ("host", host_rows),
    "memory": ("memory", memory_rows),
}


def main() -> None:
    """Verify, measure and write the CSV."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    options = {command: commands.add_parser(command) for command in COMMANDS}
    names = list(OP_VARIANTS)
    for each in options.values():
        add_options(each, repetitions=21)
        each.add_argument("--activations", nargs="+", choices=names, default=names)
    sizes = [2**12, 2**16, 2**20, 2**24]
    timed = options["time"]
    timed.add_argument("--elements", type=int, nargs="+", default=sizes)
    timed.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    timed.add_argument("--compile", action="store_true", help="time torch.compile too")
    options["memory"].add_argument("--size", type=int, default=10000, help="rows and columns")
    arguments = parser.parse_args()
    write_results(*COMMANDS[arguments.command], arguments)


if __name__ == "__main__":
    main()
