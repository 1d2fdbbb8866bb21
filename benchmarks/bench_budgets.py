"""Budgets: what `convert(model, example, memory=...)` chooses, and whether it stays below.

For each network six budgets are measured, from 1.05 times the lowest peak of "checkpoint of each
block" up to nearly PyTorch's peak; in deep networks the lowest budget is also below the lowest peak
that `convert` reaches without checkpoints, halfway to the lowest one that it reaches with them.
Each converted network runs a step that is not the one that `convert` has measured: forward, loss
and backward. Its third step is compared with PyTorch's before anything is written down, and its
peak with the budget. Steps of all budgets and of PyTorch in place are then timed in turn;
with --repetitions 0 they are not. Products cost what they cost on CUDA (`policies.py`).

With --scripts each network's lowest budget is also given to a training from the start: `convert`,
then a loss, Adam and three steps. Its peak is compared with the budget and what the report names
besides: Adam's state.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
from common import (
    IN_PLACE,
    MIB,
    OUT_OF_PLACE,
    Clock,
    Failures,
    Row,
    add_options,
    in_turn,
    memory_of,
    parser_of,
    ratio_columns,
    time_columns,
    write_results,
)
from gradients import Reference
from networks import LLAMA, NETWORKS, Network, backward, rows_of_networks
from policies import POLICIES, emulation
from variants import CHECKPOINTS, Step, expected_of, step_of, verify_step

import inplace_ops
from inplace_ops.conversion.library import load

DEEP_LLAMA = {**LLAMA, "num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 896}
DEEP_LLAMA |= {"use_cache": False}  # a cache among the arguments forbids checkpoints
DROPOUT = {"drop_rate": 0.1, "proj_drop_rate": 0.1}
DEEP = {
    "ViT-Ti/16, 12 layers, dropout": Network(
        partial(load, "timm:vit_tiny_patch16_224", DROPOUT),
        small=(4, 3, 224, 224),
        blocks=("Block",),
    ),
    "Llama, 16 layers": Network(
        partial(load, "transformers:LlamaForCausalLM", DEEP_LLAMA),
        small=(4, 256),
        blocks=("LlamaDecoderLayer",),
    ),
}
NAMES = ("ResNet-50", "EfficientNet-B0", "ConvNeXt-T", "DenseNet-121", "diffusion U-Net")
BUDGETED = {**{name: NETWORKS[name] for name in NAMES}, **DEEP}
POLICY = POLICIES["float32"]
BUDGETS = 6
NO_LIMIT = 2**50


def measure(name: str, policy: str, arguments: argparse.Namespace, failures: Failures) -> list[Row]:
    """Return the rows of a network: PyTorch's variants, then one for each budget."""
    network, device = BUDGETED[name], arguments.device
    torch.manual_seed(0)
    model = network.build().to(device).train()
    x = network.input(network.small, device)
    with emulation(POLICY, device):
        steps = {
            label: step_of(label, model, x, blocks=network.blocks)
            for label in (IN_PLACE, CHECKPOINTS)
        }
        expected = expected_of(step_of(OUT_OF_PLACE, model, x))
        rows = [_row(label, step) for label, step in steps.items()]
        table = inplace_ops.analyze(copy.deepcopy(model), x, memory=NO_LIMIT)
        measured = [each for each in table.candidates if each.peak_bytes is not None]
        lowest = 1.05 * min(float(row["peak_mib"]) for row in rows) * MIB
        if name in DEEP:  # between the lowest peaks with and without checkpoints
            without = min(each.peak_bytes or 0 for each in measured if not each.checkpointed)
            lowest = min(lowest, (without + min(each.peak_bytes or 0 for each in measured)) / 2)
        highest = 0.95 * (table.peak_bytes_before or 0)
        for i in range(BUDGETS):
            budget = int(lowest + (highest - lowest) * i / (BUDGETS - 1))
            twin, label = copy.deepcopy(model), f"convert, budget {budget / MIB:.1f} MiB"
            report = inplace_ops.convert(twin, x, memory=budget)
            steps[label] = step = Step(twin, twin, x)
            (chosen,) = [each for each in report.candidates if each.is_chosen]
            fitting = [c for c in report.candidates if (c.peak_bytes or NO_LIMIT) <= budget]
            if chosen.seconds != min(c.seconds for c in fitting if c.seconds is not None):
                raise AssertionError("the chosen candidate is not the fastest that fits")
            row = _row(label, step) | {
                "budget_mib": f"{budget / MIB:.2f}",
                "max_ops": chosen.max_ops,
                "checkpointed": len(chosen.checkpointed),
                "candidates": len(report.candidates),
                "flops_ratio": f"{(chosen.flops or 0) / (report.flops or 1):.3f}",
                "gradients_differ_by": f"{_difference(step, expected):.1e}",
            }
            if float(row["peak_mib"]) * MIB > budget:
                raise AssertionError(f"a peak of {row['peak_mib']} MiB is above the budget")
            if arguments.scripts and i == 0:
                row["script_peak_mib"] = _script_peak(network, budget, device)
            rows.append(row)
        timed = {label: partial(step.timed, Clock(device)) for label, step in steps.items()}
        times = in_turn(timed, arguments.repetitions) if arguments.repetitions else {}
    for row in rows if times else ():
        own = times[row["variant"]]
        row |= time_columns(own, "ms") | ratio_columns(own, times[IN_PLACE])
    fields = list(dict.fromkeys(field for row in rows for field in row))
    shape = " x ".join(map(str, x.shape))
    return [
        {"network": name, "input": shape, **{field: row.get(field, "") for field in fields}}
        for row in rows
    ]


def _row(label: str, step: Step) -> Row:
    step.run()  # the first step of a checkpoint of PyTorch, or of an allocator
    step.reset()
    memory = step.memory()
    return {
        "variant": label,
        "budget_mib": "",
        "saved_mib": f"{memory.saved / MIB:.2f}",
        "peak_mib": f"{memory.peak / MIB:.2f}",
    }


def _difference(step: Step, expected: Reference) -> float:
    """Return how far the gradients of the third step are from PyTorch's; raise if too far.

    The optimizer writes to the weights, and leaves their values.
    """
    optimizer = torch.optim.SGD(step.model.parameters(), 0.0)
    for _ in range(2):
        step.run()
        optimizer.step()
        step.reset()
    return verify_step(step, expected)


def _script_peak(network: Network, budget: int, device: str) -> str:
    """Convert a network within a budget, train it for three steps, and return the peak in MiB."""
    torch.manual_seed(0)
    model = network.build().to(device).train()
    x = network.input(network.small, device)
    report = inplace_ops.convert(model, x, memory=budget)

    def train() -> None:
        optimizer = torch.optim.Adam(model.parameters(), 1e-5)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model(x))
            optimizer.step()

    peak, _ = memory_of(train, device)
    allowed = budget + 2 * report.trainable_bytes
    if peak > allowed:
        raise AssertionError(f"a peak of {peak / MIB:.2f} MiB; allowed: {allowed / MIB:.2f}")
    return f"{peak / MIB:.2f}"


def main() -> None:
    """Verify, measure and write the CSV."""
    parser = parser_of(__doc__)
    add_options(parser, repetitions=5)
    parser.add_argument("--networks", nargs="+", choices=BUDGETED, default=list(BUDGETED))
    parser.set_defaults(policies=["float32"])
    parser.add_argument("--scripts", action="store_true", help="also train from the start")
    write_results("budgets", partial(rows_of_networks, measure), parser.parse_args())


if __name__ == "__main__":
    main()
