"""Training of whole networks next to the baselines: memory, step time, and the largest batch.

The variants are PyTorch out of place and in place, `torch.compile` without and with a memory
budget, a checkpoint of each block, and `convert` with several `max_ops`, each in several dtype
policies. All variants start from the same weights. Before anything is measured, outputs and
gradients are compared with those of PyTorch out of place. A variant that differs by more than
`verify` allows is printed and left out, and the exit status is 1.

saved: bytes that are allocated when forward has returned, outputs included. peak: the most bytes
allocated at one time during a step of forward, loss and backward, gradients included. Neither
counts the parameters and the input.

The steps of all variants are timed in turn, and each is compared with "torch in place" of the same
repetition. Where CUDA's autocast is emulated on a CPU, steps are not timed. --graphs captures each
step in a CUDA graph and times its replay, which leaves out the host's time. --fill-gib verifies a
small batch, and measures the batch for which PyTorch in place allocates that much. --largest-batch,
on CUDA, searches the largest batch whose step fits into a limit on all that PyTorch allocates. It
does not time steps, so that several networks can be searched at once.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from baselines import (
    IN_PLACE,
    MEMORY_FORMATS,
    OUT_OF_PLACE,
    VARIANTS,
    Variant,
    backward,
    differentiable,
    eager,
)
from measure import (
    MIB,
    RESULTS,
    Clock,
    Failures,
    machine,
    memory_of,
    recorded,
    table,
    time_columns,
    times_in_turn,
    write_csv,
    written_to,
)
from networks import NETWORKS, rows_of_networks
from policies import POLICIES, Policy, autocast, emulation, of_dtype
from torch import Tensor, nn
from verification import exact_convolutions

TIMED = {name: network for name, network in NETWORKS.items() if network.blocks}

Tensors = dict[str, Tensor]
Results = dict[str, Tensors]  # a step's outputs and gradients, by name


def forward(variant: Variant, x: Tensor, policy: Policy) -> Any:
    """Return the outputs."""
    with autocast(policy, x.device.type):
        return variant.run(x)


def step(variant: Variant, x: Tensor, policy: Policy) -> Any:
    """Run forward, loss and backward, and return the outputs."""
    outputs = forward(variant, x, policy)
    backward(outputs)
    return outputs


def results(variant: Variant, x: Tensor, policy: Policy) -> Results:
    """Return the outputs and gradients of a step."""
    torch.manual_seed(0)
    outputs = differentiable(step(variant, x, policy))
    parameters = variant.model.named_parameters()
    gradients = {name: p.grad for name, p in parameters if p.grad is not None}
    variant.model.zero_grad()
    return {"outputs": {str(i): t.detach() for i, t in enumerate(outputs)}, "gradients": gradients}


class Distance(NamedTuple):
    """The distance of tensors from the expected ones.

    Attributes:
        overall: The norm of all differences together over the norm of all expected tensors.
        largest: For each tensor, its largest difference over the largest expected value.
    """

    overall: float
    largest: dict[str, float]


def distance(actual: Tensors, expected: Tensors, zero: set[str]) -> Distance:
    """Return the distance of tensors with the same names; names in `zero` count overall only."""
    if actual.keys() != expected.keys():
        raise AssertionError(f"only one side has {actual.keys() ^ expected.keys()}")
    difference = {name: actual[name].double() - t.double() for name, t in expected.items()}
    squares, expected_squares = (
        sum(t.double().square().sum() for t in tensors.values())
        for tensors in (difference, expected)
    )
    largest = {
        name: (difference[name].abs().max() / t.abs().max()).item()
        for name, t in expected.items()
        if name not in zero
    }
    return Distance((squares / expected_squares).sqrt().item(), largest)


class Expected(NamedTuple):
    """The results of PyTorch out of place, and their accuracy.

    Attributes:
        results: Outputs and gradients.
        rounding: Their distances from the same in float64.
        zero: Names of gradients that are nothing but rounding, for example the gradient of a norm's
            bias before a convolution and another norm.
    """

    results: Results
    rounding: dict[str, Distance]
    zero: set[str]


def expected_of(variant: Variant, x: Tensor, policy: Policy) -> Expected:
    """Return the results to compare with."""
    found = results(variant, x, policy)
    double = copy.deepcopy(variant.model).double()
    exact = results(eager(double), x.double(), POLICIES["float32"])
    tops = {name: t.abs().max().item() for name, t in exact["gradients"].items()}
    zero = {name for name, top in tops.items() if top < 1e-9 * max(tops.values())}
    rounding = {part: distance(found[part], exact[part], zero) for part in found}
    return Expected(found, rounding, zero)


def verify(actual: Results, expected: Expected, policy: Policy) -> Distance:
    """Raise if outputs or gradients are too far from the expected; return the gradients' distance.

    The limit has three parts:

    1. Rounding. Both sides round equally often, but in another order. So all tensors together may
       differ by twice PyTorch's own rounding, and a single tensor, where one value decides, by four
       times PyTorch's rounding of that tensor.
    2. The largest documented error of a derivative with default bits: 1.6e-5 in float32 and 4e-3 in
       bfloat16.
    3. For a single tensor, the order of sums. A norm's gradients add up to a million values.
       PyTorch adds them block by block and compiled code in a row, which rounds by a thousand times
       eps, and by more where values cancel.
    """
    documented, sums = (1.6e-5 if policy.is_float32 else 4e-3), 1e-3
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


def largest_batch(run: Callable[[int], Any], first: int, limit: int) -> int:
    """Return the largest batch, to a 32nd, for which `run` allocates at most `limit` bytes."""
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        low, high = 0, first
        while _fits(run, high):
            low, high = high, 2 * high
        while high - low > max(1, high // 32):
            middle = (low + high) // 2
            low, high = (middle, high) if _fits(run, middle) else (low, middle)
        return low
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _fits(run: Callable[[int], Any], batch: int) -> bool:
    try:
        run(batch)
        fits = True
    except RuntimeError as error:
        # Where no workspace fits into memory, cuDNN finds no engine.
        if "out of memory" not in str(error) and "unable to find an engine" not in str(error):
            raise
        fits = False
    torch.cuda.empty_cache()
    return fits


def memory_of_step(variant: Variant, x: Tensor, policy: Policy) -> tuple[int, int]:
    """Return the bytes that forward saves, and the peak of a step."""
    saved = memory_of(partial(forward, variant, x, policy), x.device.type)[1]
    peak = memory_of(partial(step, variant, x, policy), x.device.type)[0]
    variant.model.zero_grad()
    return saved, peak


def before_capture(model: nn.Module) -> None:
    """Reset gradients, which backward would add to, and free graphs, which would end a capture."""
    model.zero_grad()
    gc.collect()


def measured(
    name: str, policy_name: str, arguments: argparse.Namespace, failures: Failures
) -> list[dict[str, Any]]:
    """Return the rows of a network in one policy, for the variants that pass."""
    device, policy, network = arguments.device, POLICIES[policy_name], TIMED[name]
    torch.manual_seed(0)
    model = network.build()
    shape = network.small if arguments.quick else getattr(network, device)
    if shape is None:
        return []
    shape = (arguments.batch or shape[0], *shape[1:])
    if not any(type(module).__name__ in network.blocks for module in model.modules()):
        raise ValueError(
            f"{name} has no blocks of these classes to checkpoint: {', '.join(network.blocks)}"
        )
    memory_format = MEMORY_FORMATS[arguments.memory_format]

    def input_of(batch: int) -> Tensor:
        x = of_dtype(network.input((batch, *shape[1:]), device), policy)
        return x.to(memory_format=memory_format) if x.dim() == 4 else x

    x = input_of(shape[0])
    model.train().to(device, policy.weights, memory_format=memory_format)
    torch._dynamo.reset()  # Dynamo stops compiling at a limit of recompilations

    variants, off, memory = {}, {}, {}
    with emulation(policy, device):
        with exact_convolutions():
            expected = expected_of(VARIANTS[OUT_OF_PLACE](model, ()), x, policy)
        for label in dict.fromkeys([IN_PLACE, *arguments.variants]):
            with failures.recorded(f"{name}, {policy_name}, {label}"):
                variant = VARIANTS[label](model, network.blocks)
                with exact_convolutions():
                    off[label] = verify(results(variant, x, policy), expected, policy)
                variants[label], memory[label] = variant, memory_of_step(variant, x, policy)
                print(
                    f"{name}, {policy_name}, {label}: off by {off[label].overall:.1e}", flush=True
                )
        if IN_PLACE not in variants:
            return []
        if arguments.fill_gib:
            x = input_of(int(arguments.fill_gib * 1024 * MIB / memory[IN_PLACE][1] * shape[0]))
            memory = {
                label: memory_of_step(variant, x, policy) for label, variant in variants.items()
            }
        times: dict[str, list[float]] = {}
        is_emulated = device == "cpu" and policy.autocast
        if not is_emulated and not arguments.largest_batch:
            steps: dict[str, Callable[[], Any]] = {
                label: partial(step, variant, x, policy) for label, variant in variants.items()
            }
            if arguments.graphs:
                steps = {
                    label: recorded([run], device, partial(before_capture, variants[label].model))
                    for label, run in steps.items()
                }
            times = times_in_turn(
                steps,
                arguments.repetitions,
                Clock(device),
                after=lambda label: variants[label].model.zero_grad(),
            )
        batches: dict[str, int] = {}
        for label, variant in variants.items() if arguments.largest_batch else ():

            def run(batch: int, variant: Variant = variant) -> None:
                step(variant, input_of(batch), policy)
                variant.model.zero_grad()

            limit = int(arguments.largest_batch * 1024 * MIB)
            batches[label] = largest_batch(run, shape[0], limit)
    return [
        {
            "network": name,
            "policy": policy_name,
            "memory_format": arguments.memory_format,
            "variant": label,
            "source": "measured",
            "launched": "from a CUDA graph" if arguments.graphs else "one by one",
            "input": " x ".join(map(str, x.shape)),
            **memory_columns(memory[label], memory[IN_PLACE]),
            **(time_columns(times[label], times[IN_PLACE]) if times else NOT_TIMED),
            "memory_limit_gib": arguments.largest_batch or "",
            "largest_batch": batches.get(label, ""),
            "gradients_differ_by": f"{off[label].overall:.1e}",
            "torch_differs_from_float64_by": f"{expected.rounding['gradients'].overall:.1e}",
            **machine(device),
        }
        for label in variants
    ]


NOT_TIMED = dict.fromkeys(time_columns([1.0, 1.0], [1.0, 1.0]), "")


def memory_columns(variant: tuple[int, int], in_place: tuple[int, int]) -> dict[str, str]:
    """Return a row's columns of saved and peak MiB, and of both over PyTorch in place."""
    columns = {}
    for kind, mine, theirs in zip(("saved", "peak"), variant, in_place, strict=True):
        columns[f"{kind}_mib"] = f"{mine / MIB:.2f}"
        columns[f"{kind}_over_torch_in_place"] = f"{mine / theirs:.3f}"
    return columns


# Rota Bulò, Porzi, Kontschieder, CVPR 2018, arXiv 1712.02616: the abstract, and the figure of a
# residual block with identity mapping. Both compare with a standard BatchNorm and an in-place
# activation.
PUBLISHED = [
    {
        "network": "a residual block: 3 buffers instead of 6",
        "variant": "inplace_abn",
        "saved_over_torch_in_place": "0.5",
    },
    {
        "network": "the paper's networks, at best",
        "variant": "inplace_abn",
        "saved_over_torch_in_place": "0.5",
        "ratio_to_torch_in_place": "1.008 to 1.02",
    },
]
SOURCE = "published in 2018: research.mapillary.com/publication/cvpr18a"


def main() -> None:
    """Verify, measure, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--networks", nargs="+", choices=TIMED, default=list(TIMED))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="default: all")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["float32"])
    parser.add_argument("--memory-format", choices=MEMORY_FORMATS, default="contiguous")
    parser.add_argument("--batch", type=int, help="default: 32 on a GPU, 4 on the CPU")
    parser.add_argument(
        "--graphs", action="store_true", help="on CUDA: time the replay of CUDA graphs"
    )
    parser.add_argument(
        "--fill-gib",
        type=float,
        help="measure the batch for which PyTorch in place allocates this much",
    )
    parser.add_argument(
        "--largest-batch",
        type=float,
        metavar="GIB",
        help="on CUDA: search the largest batch whose step fits",
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smoke test: small inputs, three repetitions, nothing compiled",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        if not arguments.out:
            parser.error("--quick measures no results to publish: name a file with --out")
        arguments.repetitions = 3
    if arguments.largest_batch and arguments.device != "cuda":
        parser.error("--largest-batch needs --device cuda")
    if arguments.graphs and arguments.device != "cuda":
        parser.error("--graphs needs --device cuda")
    arguments.variants = arguments.variants or [
        label for label in VARIANTS if not (arguments.quick and "compile" in label)
    ]
    torch.set_num_threads(arguments.threads)
    failures = Failures()

    path = arguments.out or RESULTS / f"networks_{arguments.device}.csv"
    with written_to(path) as rows:
        measure = partial(measured, arguments=arguments, failures=failures)
        for row in rows_of_networks(arguments.networks, arguments.policies, measure, failures):
            rows.append(row)
            write_csv(path, rows)  # now: after a time limit, a step may outlast the grace period
        if rows and not (arguments.fill_gib or arguments.largest_batch or arguments.graphs):
            rows += [dict.fromkeys(rows[0], "") | row | {"source": SOURCE} for row in PUBLISHED]

    columns = ["network", "policy", "variant", "saved_mib", "peak_mib", "peak_over_torch_in_place"]
    columns += ["median_ms", "ratio_to_torch_in_place", "ratio_first_quartile"]
    columns += ["ratio_third_quartile", "largest_batch", "gradients_differ_by"]
    print(table([columns, *([str(row[c]) for c in columns] for row in rows)]))
    failures.exit()


if __name__ == "__main__":
    main()
