"""Peers side by side on whole networks: PyTorch, torch.compile, checkpointing, inplace_ops.convert.

held: what is allocated when forward has returned, the outputs with it. peak: the most allocated at
one time in a step of forward, loss and backward, gradients included. Neither counts the parameters
and the input. Steps are timed in turn, each compared with that of "torch in place" beside it.

All variants start from the same weights; outputs and gradients are compared with those of PyTorch
out of place before anything is measured. A variant that is farther off than `verify` allows is
named and not timed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import (
    MIB,
    RESULTS,
    Clock,
    Failures,
    machine,
    memory_of,
    table,
    time_columns,
    times_in_turn,
    written_to,
)
from peers import BATCH, NETWORKS, PUBLISHED, SOURCE, VARIANTS, Case, Variant
from torch import Tensor, nn
from whole_models import IN_PLACE, MODES, OUT_OF_PLACE, Mode, backward, differentiable

from inplace_ops.conversion.library import ModelNotFoundError

Tensors = dict[str, Tensor]
Results = dict[str, Tensors]  # a step's outputs and gradients, by name


def forward(variant: Variant, x: Tensor, mode: Mode) -> Any:
    """The outputs."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=mode.autocast):
        return variant.run(x)


def step(variant: Variant, x: Tensor, mode: Mode) -> Any:
    """Forward, loss and backward; returns the outputs."""
    outputs = forward(variant, x, mode)
    backward(outputs)
    return outputs


def results(variant: Variant, x: Tensor, mode: Mode) -> Results:
    """The outputs and gradients of a step."""
    torch.manual_seed(0)
    outputs = differentiable(step(variant, x, mode))
    parameters = variant.model.named_parameters()
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    variant.model.zero_grad()
    return {"outputs": {str(i): t.detach() for i, t in enumerate(outputs)}, "gradients": gradients}


class Distance(NamedTuple):
    """How far tensors are from others.

    overall: the norm of the difference of all together over the norm of the others. largest: by
    tensor, the largest difference over the tensor's largest value.
    """

    overall: float
    largest: dict[str, float]


def distance(actual: Tensors, expected: Tensors, zero: set[str]) -> Distance:
    """The distance of tensors of the same names; those that are zero count overall only."""
    if actual.keys() != expected.keys():
        raise AssertionError(f"only one side has {actual.keys() ^ expected.keys()}")
    difference = {name: actual[name].double() - t.double() for name, t in expected.items()}
    squares, others = (
        sum(t.double().square().sum() for t in tensors.values())
        for tensors in (difference, expected)
    )
    largest = {
        name: (difference[name].abs().max() / t.abs().max()).item()
        for name, t in expected.items()
        if name not in zero
    }
    return Distance((squares / others).sqrt().item(), largest)


class Expected(NamedTuple):
    """What PyTorch out of place computes.

    rounding: how far outputs and gradients are from the same in float64. zero: gradients that are
    nothing but rounding, as of a norm's bias before a convolution and another norm.
    """

    results: Results
    rounding: dict[str, Distance]
    zero: set[str]


def expected_of(variant: Variant, x: Tensor, mode: Mode) -> Expected:
    """The results to compare with."""
    found = results(variant, x, mode)
    double = copy.deepcopy(variant.model).double()
    exact = results(Variant(double, double), x.double(), MODES["float32"])
    tops = {name: t.abs().max().item() for name, t in exact["gradients"].items()}
    zero = {name for name, top in tops.items() if top < 1e-9 * max(tops.values())}
    rounding = {part: distance(found[part], exact[part], zero) for part in found}
    return Expected(found, rounding, zero)


def verify(actual: Results, expected: Expected, mode: Mode) -> Distance:
    """Raise if outputs or gradients are too far from the expected; return how far gradients are.

    Both sides round, in another order, each as often: overall twice PyTorch's own rounding is
    allowed, and in a single tensor, where one value decides, four times what it is there. On top
    comes the largest documented error of a derivative with default bits, 1.6e-5 in float32 and 4e-3
    in bfloat16, and in a single tensor the order of sums: a norm's gradients add up to a million
    values, PyTorch block by block, compiled code in a row, which rounds a thousand times eps, more
    where they cancel.
    """
    documented, sums = (4e-3 if mode.autocast else 1.6e-5), 1e-3
    for part, rounding in expected.rounding.items():
        off = distance(actual[part], expected.results[part], expected.zero)
        limit = 2 * rounding.overall + documented
        if not off.overall <= limit:
            raise AssertionError(f"{part} off by {off.overall:.1e}; allowed: {limit:.1e}")
        for name, largest in off.largest.items():
            limit = 4 * rounding.largest[name] + documented + sums
            if not largest <= limit:
                raise AssertionError(f"{part}, {name} off by {largest:.1e}; allowed: {limit:.1e}")
    return off


def measured(
    name: str, model: nn.Module, arguments: argparse.Namespace, clock: Clock, failures: Failures
) -> list[dict[str, Any]]:
    """The rows of a network, of the variants that pass."""
    device, mode, network = arguments.device, MODES[arguments.mode], NETWORKS[name]
    kind = "quick" if arguments.quick else device
    x = torch.randn(arguments.batch or BATCH[kind], *network.shapes[kind], device=device)
    if not any(type(module).__name__ in network.blocks for module in model.modules()):
        raise ValueError(f"no block to checkpoint: {', '.join(network.blocks)}")
    if x.dim() == 4:
        x = x.to(memory_format=mode.memory_format)
    model.train().to(device, memory_format=mode.memory_format)
    case = Case(model, x, network.blocks)
    torch._dynamo.reset()  # it counts what it has compiled, and stops

    expected = expected_of(VARIANTS[OUT_OF_PLACE](case), x, mode)
    variants, off, memory = {}, {}, {}
    for label in dict.fromkeys([OUT_OF_PLACE, IN_PLACE, *arguments.variants]):
        with failures.recorded(f"{name}, {label}"):
            with torch.autocast(device, torch.bfloat16, enabled=mode.autocast):
                variant = VARIANTS[label](case)
            off[label] = verify(results(variant, x, mode), expected, mode)
            held = memory_of(partial(forward, variant, x, mode), device)[1]
            peak = memory_of(partial(step, variant, x, mode), device)[0]
            variant.model.zero_grad()
            variants[label], memory[label] = variant, (held, peak)
            print(f"{name}, {label}: gradients off by {off[label].overall:.1e}", flush=True)
    if IN_PLACE not in variants:
        return []
    times = times_in_turn(
        {label: partial(step, variant, x, mode) for label, variant in variants.items()},
        arguments.repetitions,
        clock,
        after=lambda label: variants[label].model.zero_grad(),
    )
    rows, rounding = [], expected.rounding["gradients"]
    for label in variants:
        held, peak = (f"{count / MIB:.2f}" for count in memory[label])
        over = [a / b for a, b in zip(memory[label], memory[IN_PLACE], strict=True)]
        rows.append(
            {
                "network": name,
                "variant": label,
                "source": "measured",
                "mode": arguments.mode,
                "input": " x ".join(map(str, x.shape)),
                "held_mib": held,
                "held_over_torch_in_place": f"{over[0]:.3f}",
                "peak_mib": peak,
                "peak_over_torch_in_place": f"{over[1]:.3f}",
                **time_columns(times[label], times[IN_PLACE]),
                "gradient_off_by": f"{off[label].overall:.1e}",
                "gradient_off_in_a_tensor_by": f"{max(off[label].largest.values()):.1e}",
                "torch_off_from_float64_by": f"{rounding.overall:.1e}",
                "torch_off_in_a_tensor_by": f"{max(rounding.largest.values()):.1e}",
                **machine(device),
            }
        )
    return rows


def main() -> None:
    """Verify, measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="all by default")
    parser.add_argument("--mode", choices=list(MODES), default="float32")
    parser.add_argument("--batch", type=int, help="32 on a GPU, 4 on the CPU")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small inputs, three repetitions and nothing compiled, to see that it runs",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        if not arguments.out:
            parser.error("--quick gives no results: name a file with --out")
        arguments.repetitions = 3
    arguments.variants = arguments.variants or [
        label for label in VARIANTS if not (arguments.quick and "compile" in label)
    ]
    torch.set_num_threads(arguments.threads)
    clock, failures = Clock(arguments.device), Failures()

    with written_to(arguments.out or RESULTS / f"peers_{arguments.device}.csv") as rows:
        for name in arguments.networks:
            torch.manual_seed(0)
            with failures.recorded(name):
                try:
                    model = NETWORKS[name].build()
                except ModelNotFoundError as error:
                    print(f"{name}: skipped: {error}", flush=True)
                    continue
                rows += measured(name, model, arguments, clock, failures)
        if rows:
            rows += [dict.fromkeys(rows[0], "") | row | {"source": SOURCE} for row in PUBLISHED]

    columns = ["network", "variant", "held_mib", "peak_mib", "peak_over_torch_in_place"]
    columns += ["median_ms", "ratio_to_torch_in_place", "ratio_first_quartile"]
    columns += ["ratio_third_quartile", "gradient_off_by"]
    print(table([columns, *([row[c] for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
