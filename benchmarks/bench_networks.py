"""Training steps of whole networks: memory, time and bytes, next to the baselines.

All variants of a network start from the same weights. Each is verified, and its time is compared
with "torch in place" of the same repetition.

train: saved and peak bytes, the time of a step, and on CUDA the largest batch. saved: bytes that
are allocated when forward has returned, outputs included. peak: the most bytes allocated at one
time during a step of forward, loss and backward, gradients included. Neither counts the parameters
and the input. Where CUDA's autocast is emulated on a CPU, steps are not timed.

bytes: saved, peak and moved bytes of a step and the FLOPs of its products, where products cost what
they cost on CUDA (`policies.py`). saved: what `inplace_ops.saved_bytes` counts, without parameters,
buffers and the input. Under autocast the weights of convolutions and linear layers are in bfloat16
from the start, so that no copies of weights are counted.

ablation: the same bytes with each mechanism of the engine switched off in turn (`ablation.py`),
over PyTorch's own step, with the default `max_ops`. calls: how many functions of Python and C a
forward calls.

steps: the Python cost of each activation and consumer, in networks that are bound by the host. The
blocks' tensors have 9 and 8 KiB; also 1 KiB, which is less than `convert` replaces.

small: steps of the networks that `bytes` counts with two images of 128 x 128. The time beyond
PyTorch's is that of recomputing, which a clock around each recomputed tensor measures in other
steps, and that of the host.

calls: the host time of each Python function and C function in a step of the 40 blocks with SiLU,
from Python's profiler (cProfile), which adds about a microsecond to each call.
"""

from __future__ import annotations

import argparse
import cProfile
import fcntl
import gc
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ablation import MECHANISMS, without
from common import (
    IN_PLACE,
    MIB,
    OUT_OF_PLACE,
    Clock,
    Failures,
    Row,
    add_options,
    in_turn,
    largest_batch,
    memory_of,
    parser_of,
    quartiles,
    ratio_columns,
    read_csv,
    recorded,
    time_columns,
    write_results,
)
from gradients import NO_SLACK, SLACK_OF_MODULES, SLACK_OF_TOOLS, Slack
from integrations import INTEGRATED
from networks import (
    MEMORY_FORMATS,
    NETWORKS,
    LanguageModel,
    MakeActivation,
    Network,
    backward,
    chain,
    linear_chain,
    resnet18,
    rows_of_networks,
)
from policies import POLICIES, Policy, autocast, emulation, of_dtype
from torch import Tensor, nn
from variants import (
    BASELINES,
    CONVERT,
    LOSS_IN_CHUNKS,
    MAX_OPS,
    TOOLS,
    VARIANTS,
    Memory,
    Step,
    Work,
    expected_of,
    step_of,
    verify_step,
)

import inplace_ops
from inplace_ops.activations import ACTIVATIONS
from inplace_ops.conversion.library import ModelNotFoundError
from inplace_ops.recompute.packed import Recomputed

TIMED = {name: network for name, network in NETWORKS.items() if network.blocks}


class Selection(NamedTuple):
    """What `train` measures for one table, if its options do not say something else.

    Attributes:
        networks: The networks by name.
        variants: The variants, next to PyTorch in place, of each network.
        policies: The dtype policies.
    """

    networks: Mapping[str, Network]
    variants: Callable[[str], Iterable[str]]
    policies: Sequence[str]


LANGUAGE_MODEL = "language model"
TOOL_NETWORKS = {
    **{name: NETWORKS[name] for name in ("EfficientNet-B0", "ViT-S/16", "Llama blocks")},
    LANGUAGE_MODEL: Network(
        LanguageModel, small=(2, 33), cpu=(4, 257), cuda=(16, 1025), blocks=("DecoderLayer",)
    ),
}
SLOW_TO_COMPILE = ("EfficientNet-B0",)
WITH_DROPOUT = ("Llama, LoRA",)  # compiled code draws other numbers: no gradients to compare


def _not_compiled(labels: Iterable[str]) -> list[str]:
    """Return the variants without compiled code."""
    return [label for label in labels if "compile" not in label]


def _tools(name: str) -> list[str]:
    """Return the variants of a network in the comparison of tools."""
    if name == LANGUAGE_MODEL:
        has_chunks = hasattr(F, "linear_cross_entropy")  # from torch 2.13 on
        return [CONVERT, *(tool for tool in TOOLS if LOSS_IN_CHUNKS in tool and has_chunks)]
    tools = [CONVERT, *(tool for tool in TOOLS if LOSS_IN_CHUNKS not in tool)]
    return _not_compiled(tools) if name in SLOW_TO_COMPILE else tools


def _frontier(name: str) -> list[str]:
    """Return the variants of a network next to the baselines."""
    variants = [OUT_OF_PLACE, *BASELINES, *(f"convert, max_ops={n}" for n in MAX_OPS)]
    return _not_compiled(variants) if name in WITH_DROPOUT else variants


SELECTIONS = {
    "networks": Selection(TIMED, _frontier, ["float32"]),
    "integrations": Selection(
        INTEGRATED, lambda name: [CONVERT], ["float32", "bfloat16", "CUDA autocast"]
    ),
    "tools": Selection(TOOL_NETWORKS, _tools, ["float32", "CUDA autocast"]),
}


def _slack_of(label: str) -> Slack:
    """Return how much larger the limits of a variant's gradients are."""
    if label == "modules":
        return SLACK_OF_MODULES
    return SLACK_OF_TOOLS if "compile" in label or LOSS_IN_CHUNKS in label else NO_SLACK


def train(
    name: str, policy_name: str, arguments: argparse.Namespace, failures: Failures
) -> list[Row]:
    """Return the rows of a network in one policy, for the variants that pass."""
    device, policy = arguments.device, POLICIES[policy_name]
    selection = SELECTIONS[arguments.selection]
    network, labels = selection.networks[name], arguments.variants
    if not labels:
        labels = selection.variants(name)
        if arguments.quick:
            labels = _not_compiled(labels)
    shape = network.small if arguments.quick else getattr(network, device)
    if shape is None:
        return []
    torch.manual_seed(0)
    model = network.build()
    memory_format = MEMORY_FORMATS[arguments.memory_format]

    def input_of(batch: int) -> Tensor:
        x = of_dtype(network.input((batch, *shape[1:]), device), policy)
        return x.to(memory_format=memory_format) if x.dim() == 4 else x

    x = input_of(arguments.batch or arguments.scale_batch * shape[0])
    model.train().to(device, policy.weights, memory_format=memory_format)
    torch._dynamo.reset()  # Dynamo stops compiling at a limit of recompilations

    steps: dict[str, Step] = {}
    off: dict[str, float] = {}
    memory: dict[str, Memory] = {}
    work: dict[str, Work] = {}
    with emulation(policy, device):
        expected = expected_of(step_of(OUT_OF_PLACE, model, x, policy))
        for label in dict.fromkeys([IN_PLACE, *labels]):
            with failures.recorded(f"{name}, {policy_name}, {label}"):
                step = step_of(label, model, x, policy, network.blocks)
                off[label] = verify_step(step, expected, _slack_of(label))
                memory[label] = step.memory()
                if "compile" not in label:  # a mode counts no compiled kernels
                    work[label] = step.work()
                steps[label] = step
        if IN_PLACE not in steps:
            return []
        if arguments.fill_gib:
            x = input_of(int(arguments.fill_gib * 1024 * MIB / memory[IN_PLACE].peak * len(x)))
            steps = {label: step._replace(x=x) for label, step in steps.items()}
            for label, step in steps.items():
                if "compile" in label:  # it compiles again for another batch
                    step.run()
                    step.reset()
        batches = dict.fromkeys(steps, "")
        times: dict[str, list[float]] = {}
        with _turn(name, arguments):
            if arguments.fill_gib:
                memory = {label: step.memory() for label, step in steps.items()}
            if arguments.largest_batch:
                for label, step in steps.items():
                    batches[label] = _largest_batch(step, input_of, arguments)
            elif not (arguments.memory_only or (device == "cpu" and not policy.is_float32)):
                # The time of an emulation means nothing.
                times = _times(name, steps, arguments, failures)
    return [
        {
            "network": name,
            "policy": policy_name,
            "memory_format": arguments.memory_format,
            "variant": label,
            "launched": "from a CUDA graph" if arguments.graphs else "one by one",
            "input": _dimensions(x.shape),
            **{f"{kind}_mib": f"{n / MIB:.2f}" for kind, n in memory[label]._asdict().items()},
            **_ratios(memory[label], memory[IN_PLACE]),
            **(_ratios(work[label], work[IN_PLACE]) if label in work else {}),
            **_step_columns(times, label),
            "memory_limit_gib": arguments.largest_batch or "",
            "largest_batch": batches[label],
            "gradients_differ_by": f"{off[label]:.1e}",
        }
        for label in steps
    ]


@contextmanager
def _turn(name: str, arguments: argparse.Namespace) -> Iterator[None]:
    """Wait until all processes are ready to measure, and until no other one does.

    A search of the largest batch does not wait: it does not measure time.
    """
    if arguments.turns is None or arguments.largest_batch:
        yield
        return
    folder, processes = Path(arguments.turns[0]), int(arguments.turns[1])
    if arguments.device == "cuda":
        torch.cuda.empty_cache()  # leaves the memory to the process whose turn it is
    (folder / _file_name(name)).touch()
    while len(list(folder.iterdir())) < processes:
        time.sleep(0.1)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


def _file_name(network: str) -> str:
    return re.sub(r"\W", "_", network)


def _times(
    name: str, steps: Mapping[str, Step], arguments: argparse.Namespace, failures: Failures
) -> dict[str, list[float]]:
    """Return the milliseconds of all repetitions, by variant, without those that fail to run."""
    clock = Clock(arguments.device)
    timed = {}
    for label, step in steps.items():
        with failures.recorded(f"{name}, {label}"):
            run: Callable[[], Any] = step.run
            if arguments.graphs:
                # Collecting frees graphs of autograd, which would end the capture.
                run = recorded([run], arguments.device, lambda s=step: s.reset() or gc.collect())
            timed[label] = partial(step.timed, clock, run)
    return in_turn(timed, arguments.repetitions)


def _largest_batch(
    step: Step, input_of: Callable[[int], Tensor], arguments: argparse.Namespace
) -> str:
    def run(batch: int) -> None:
        step._replace(x=input_of(batch)).run()
        step.reset()

    return str(largest_batch(run, len(step.x), int(arguments.largest_batch * 1024 * MIB)))


def _step_columns(times: Mapping[str, list[float]], label: str) -> dict[str, str]:
    has_times = label in times and IN_PLACE in times
    own, other = (times[key] if has_times else [1.0, 1.0] for key in (label, IN_PLACE))
    columns = time_columns(own, "ms") | ratio_columns(own, other)
    return columns if has_times else dict.fromkeys(columns, "")


def _ratios(own: Memory | Work, in_place: Memory | Work) -> dict[str, str]:
    pairs = zip(own._fields, own, in_place, strict=True)
    return {f"{kind}_over_torch_in_place": f"{mine / theirs:.3f}" for kind, mine, theirs in pairs}


def _dimensions(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _rows_of_processes(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all networks, each measured in its own process, as the processes end."""
    options = [option for option in sys.argv[1:] if option != "--at-once"]
    with tempfile.TemporaryDirectory() as folder:
        turns = Path(folder, "turns")
        turns.mkdir()
        running: dict[str, subprocess.Popen[bytes]] = {}
        for name in arguments.networks:
            command = [sys.executable, __file__, *options, "--networks", name]
            command += ["--out", f"{folder}/{_file_name(name)}.csv"]
            command += ["--turns", str(turns), str(len(arguments.networks))]
            running[name] = subprocess.Popen(command)
        try:
            while running:
                time.sleep(0.1)
                for name in [
                    name for name, process in running.items() if process.poll() is not None
                ]:
                    if running.pop(name).returncode:
                        failures.cases.append(name)
                    (turns / _file_name(name)).touch()  # others need not wait for this process
                    path = Path(folder, f"{_file_name(name)}.csv")
                    yield from read_csv(path) if path.exists() else ()
        finally:
            for process in running.values():
                process.terminate()


def train_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all networks."""
    if arguments.at_once:
        return _rows_of_processes(arguments, failures)
    return rows_of_networks(train, arguments, failures)


def count(
    name: str, policy_name: str, arguments: argparse.Namespace, failures: Failures
) -> list[Row]:
    """Return the rows of a network's bytes in one policy, one for each `max_ops`."""
    device, policy = arguments.device, POLICIES[policy_name]
    model, x = _counted(name, policy, device)
    rows = []
    with emulation(policy, device):
        original = step_of(IN_PLACE, model, x, policy)
        expected, before = expected_of(original), _bytes_of(original)
        before["flops"] = original.flops()
        for number in arguments.max_ops:
            step = step_of(f"convert, max_ops={number}", model, x, policy)
            off = verify_step(step, expected)
            after = {**_bytes_of(step), "flops": step.flops()}
            row: Row = {"network": name, "policy": policy_name, "max_ops": number}
            row["input"] = _dimensions(x.shape)
            for kind, ours in after.items():
                row[f"{kind}_torch"], row[kind] = before[kind], ours
                row[f"{kind}_ratio"] = f"{ours / before[kind]:.3f}"
            rows.append(row | {"gradients_differ_by": f"{off:.1e}"})
    return rows


def _counted(name: str, policy: Policy, device: str) -> tuple[nn.Module, Tensor]:
    """Return a network and its small input; under autocast weights of products are in bfloat16."""
    torch.manual_seed(0)
    model = NETWORKS[name].build().to(device).train().to(policy.weights)
    if policy.autocast:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                module.to(torch.bfloat16)
    return model, of_dtype(NETWORKS[name].input(NETWORKS[name].small, device), policy)


def _bytes_of(step: Step) -> dict[str, int]:
    """Return what a step saves, what it allocates at most, and what it reads and writes."""
    device = step.x.device.type
    with autocast(step.policy, device):
        saved = inplace_ops.saved_bytes(step.model, step.x)
    peak = memory_of(step.run, device)[0]
    step.reset()
    return {"saved": saved, "peak": peak, "moved": step.moved()}


# One network of each kind, with the layers that most mechanisms are for.
ABLATED = ("EfficientNet-B0", "ResNet-50", "DenseNet-121", "diffusion U-Net", "nnU-Net-like")
ABLATED += ("ViT-S/16", "ConvNeXt-T", "Llama, 2 layers", "T5, 2 layers", "GPT-2, 2 layers")
ABLATED += ("Qwen2, padded batch", "SqueezeNet 1.1", "GPT blocks", "ConvNeXt-V2")


def ablate(
    name: str, policy_name: str, arguments: argparse.Namespace, failures: Failures
) -> list[Row]:
    """Return a network's row in one policy with all mechanisms, and one without each of them."""
    device, policy = arguments.device, POLICIES[policy_name]
    model, x = _counted(name, policy, device)
    rows: list[Row] = []
    with emulation(policy, device):
        original = step_of(IN_PLACE, model, x, policy)
        expected, before = expected_of(original), _bytes_of(original)
        for mechanism in ("", *arguments.mechanisms):
            case = {"network": name, "policy": policy_name, "mechanism": mechanism}
            with failures.recorded(", ".join(case.values())), without(mechanism):
                step = step_of(CONVERT, model, x, policy)
                off = verify_step(step, expected)
                after = _bytes_of(step).items()
                ratios = {f"{kind}_ratio": f"{ours / before[kind]:.3f}" for kind, ours in after}
                counted = {"calls": step.calls(), "gradients_differ_by": f"{off:.1e}"}
                rows.append(case | ratios | counted)
    return rows


class HostBound(NamedTuple):
    """A network whose steps are bound by the host."""

    build: Callable[[MakeActivation], nn.Module]
    activations: int
    shape: tuple[int, ...]
    activation: str


BLOCKS = 40
LEAST_US = 0.5  # of a function, for each block
_CONVOLUTIONS = partial(chain, blocks=BLOCKS, channels=8, kernel=1)
HOST_BOUND = {
    "ResNet-18": HostBound(resnet18, 17, (1, 3, 32, 32), "ReLU"),
    "40 blocks, ReLU": HostBound(_CONVOLUTIONS, BLOCKS, (2, 8, 12, 12), "ReLU"),
    "40 blocks, SiLU": HostBound(_CONVOLUTIONS, BLOCKS, (2, 8, 12, 12), "SiLU"),
    "40 blocks of 1 KiB, ReLU": HostBound(_CONVOLUTIONS, BLOCKS, (2, 8, 4, 4), "ReLU"),
    "40 linear blocks, GELU": HostBound(
        partial(linear_chain, blocks=BLOCKS, features=64), BLOCKS, (32, 64), "GELU"
    ),
}


def _by_activation(network: HostBound, device: str) -> dict[str, Step]:
    """Return a step for each kind of activation, with the same weights and input.

    The first is the baseline.
    """
    theirs, ours = getattr(nn, network.activation), getattr(inplace_ops, network.activation)
    makers = {OUT_OF_PLACE: theirs, "convert": theirs}
    if any(a.torch_inplace for a in ACTIVATIONS if a.name == network.activation):
        in_place = partial(theirs, inplace=True)
        makers = {IN_PLACE: in_place, **makers, "convert, in place": in_place}
    makers["modules"] = ours
    models = {label: network.build(make).to(device) for label, make in makers.items()}
    baseline = next(iter(models.values()))
    for label, model in models.items():
        model.load_state_dict(baseline.state_dict())
        if label.startswith("convert"):
            inplace_ops.convert(model)
    x = torch.randn(network.shape, device=device)
    return {label: Step(model, model, x) for label, model in models.items()}


def steps_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of the networks that are bound by the host."""
    torch.manual_seed(0)
    for name, network in HOST_BOUND.items():
        with failures.recorded(name):
            steps = _by_activation(network, arguments.device)
            expected = expected_of(next(iter(steps.values())))
            for label, step in steps.items():
                verify_step(step, expected, _slack_of(label))
            halves = {label: partial(_halves, step) for label, step in steps.items()}
            times = in_turn(halves, arguments.repetitions, warm_ups=3)
            for label in steps:
                yield _steps_row(name, label, times)


def _halves(step: Step) -> tuple[float, float]:
    """Return the seconds of forward and of backward, which allocates new gradients."""
    step.reset()
    if step.x.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    outputs = step.forward()
    middle = time.perf_counter()
    backward(outputs)
    return middle - begin, time.perf_counter() - middle


def _steps_row(name: str, label: str, times: Mapping[str, list[tuple[float, float]]]) -> Row:
    baseline = next(iter(times))
    ours, theirs = ([sum(pair) for pair in times[key]] for key in (label, baseline))
    extra = {}
    for i, half in enumerate(("forward", "backward")):
        pairs = zip(times[label], times[baseline], strict=True)
        median = quartiles([mine[i] - other[i] for mine, other in pairs])[1]
        extra[f"{half}_us_per_activation"] = f"{median * 1e6 / HOST_BOUND[name].activations:.1f}"
    row = {"network": name, "variant": label, "step_ms": f"{quartiles(ours)[1] * 1e3:.2f}"}
    return row | ratio_columns(ours, theirs) | extra


SMALL = (2, 3, 128, 128)


def small_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield a row for each network with small images."""
    policy = POLICIES["float32"]
    for name in (name for name, network in NETWORKS.items() if network.small == SMALL):
        with failures.recorded(name):
            try:
                model, x = _counted(name, policy, arguments.device)
            except ModelNotFoundError as error:
                print(f"{name}: skipped: {error}", flush=True)
                continue
            steps = {label: step_of(label, model, x, policy) for label in (IN_PLACE, CONVERT)}
            verify_step(steps[CONVERT], expected_of(steps[IN_PLACE]))
            halves = {label: partial(_halves, step) for label, step in steps.items()}
            times = in_turn(halves, arguments.repetitions, warm_ups=3)
            sums = {label: [sum(pair) for pair in pairs] for label, pairs in times.items()}
            recomputing = [_recomputing(steps[CONVERT]) for _ in range(arguments.repetitions)]
            in_torch, in_recomputing = (quartiles(s)[1] for s in (sums[IN_PLACE], recomputing))
            yield {
                "network": name,
                "variant": CONVERT,
                "torch_ms": f"{in_torch * 1e3:.1f}",
                **ratio_columns(sums[CONVERT], sums[IN_PLACE]),
                "recomputing_over_torch": f"{in_recomputing / in_torch:.3f}",
            }


def _recomputing(step: Step) -> float:
    """Return the seconds of a step in which tensors are recomputed."""
    seconds, compute = 0.0, Recomputed.compute

    def timed(self: Recomputed) -> Tensor:
        nonlocal seconds
        begin = time.perf_counter()
        value = compute(self)
        seconds += time.perf_counter() - begin
        return value

    Recomputed.compute = timed  # type: ignore[method-assign]
    try:
        _halves(step)
    finally:
        Recomputed.compute = compute  # type: ignore[method-assign]
    return seconds


def calls_rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of the functions that take the most time in a step of 40 blocks."""
    torch.manual_seed(0)
    name = "40 blocks, SiLU"
    steps = _by_activation(HOST_BOUND[name], arguments.device)
    expected = expected_of(steps[IN_PLACE])
    for label in (IN_PLACE, "convert, in place"):
        step = steps[label]
        with failures.recorded(f"{name}, {label}"):
            verify_step(step, expected)
            profiles = {"forward": cProfile.Profile(), "backward": cProfile.Profile()}
            for _ in range(arguments.repetitions):
                step.reset()
                outputs = profiles["forward"].runcall(step.forward)
                profiles["backward"].runcall(backward, outputs)
            for phase, profile in profiles.items():
                columns = {"network": name, "variant": label, "phase": phase}
                for row in _functions(profile, BLOCKS * arguments.repetitions):
                    if float(row["us_per_block"]) >= LEAST_US:
                        yield columns | row


def _functions(profile: cProfile.Profile, blocks: int) -> list[Row]:
    """Return the calls and the time of each function for a block, the slowest first."""
    totals: dict[str, tuple[int, float]] = {}
    statistics: Any = pstats.Stats(profile)
    for (file, _, function), (_, calls, seconds, *_) in statistics.stats.items():
        path = Path(file)
        where = "" if file == "~" else f"{path.parent.name}/{path.name}: "
        earlier_calls, earlier_seconds = totals.get(where + function, (0, 0.0))
        totals[where + function] = calls + earlier_calls, seconds + earlier_seconds
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return [
        {
            "function": function,
            "calls_per_block": f"{calls / blocks:.2f}",
            "us_per_block": f"{seconds / blocks * 1e6:.2f}",
        }
        for function, (calls, seconds) in ordered
    ]


def parse() -> argparse.Namespace:
    """Return the arguments of a command, with its name."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    add_options(training, repetitions=9)
    add, of_table = training.add_argument, "default: the selection's"
    add("--selection", choices=SELECTIONS, default="networks", help="the table to measure")
    add("--networks", nargs="+", help=of_table)
    add("--variants", nargs="+", choices=VARIANTS, help=of_table)
    add("--policies", nargs="+", choices=POLICIES, help=of_table)
    add("--memory-format", choices=MEMORY_FORMATS, default="contiguous")
    add("--batch", type=int, help="default: 32 on a GPU, 4 on the CPU")
    add("--scale-batch", type=int, default=1, metavar="N", help="N times the default batch")
    add("--memory-only", action="store_true", help="time nothing")
    add("--graphs", action="store_true", help="time the replay of CUDA graphs")
    add("--fill-gib", type=float, help="the batch for which PyTorch in place allocates this much")
    add("--largest-batch", type=float, metavar="GIB", help="search the largest batch that fits")
    add("--at-once", action="store_true", help="prepare all networks at once, in processes")
    turns = "measure when FOLDER has N files, one process at a time; --at-once sets this"
    add("--turns", nargs=2, metavar=("FOLDER", "N"), help=turns)
    add("--quick", action="store_true", help="a smoke test: small inputs, nothing compiled")

    for command, networks, policies in (
        ("bytes", NETWORKS, ("float32", "bfloat16", "CUDA autocast")),
        ("ablation", ABLATED, ("float32", "bfloat16", "CUDA autocast")),
    ):
        counting = commands.add_parser(command)
        add_options(counting, repetitions=1, threads=1)
        add = counting.add_argument
        add("--networks", nargs="+", choices=NETWORKS, default=list(networks))
        add("--policies", nargs="+", choices=POLICIES, default=list(policies))
        if command == "bytes":
            add("--max-ops", nargs="+", type=int, choices=MAX_OPS, default=MAX_OPS)
        else:
            add("--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS))

    add_options(commands.add_parser("steps"), repetitions=61, threads=1)
    add_options(commands.add_parser("small"), repetitions=21, threads=1)
    add_options(commands.add_parser("calls"), repetitions=40, threads=1)

    arguments = parser.parse_args()
    if arguments.command == "train":
        selection = SELECTIONS[arguments.selection]
        arguments.networks = arguments.networks or list(selection.networks)
        if unknown := set(arguments.networks) - set(selection.networks):
            parser.error(
                f"unknown networks: {', '.join(unknown)}. The selection {arguments.selection} has "
                f"{', '.join(selection.networks)}"
            )
        arguments.policies = arguments.policies or selection.policies
        if arguments.quick and not arguments.out:
            parser.error("--quick measures no results to publish: name a file with --out")
        if (arguments.graphs or arguments.largest_batch) and arguments.device != "cuda":
            parser.error("--graphs and --largest-batch need --device cuda")
        if arguments.batch and arguments.scale_batch != 1:
            parser.error("--scale-batch multiplies the default batch, and --batch replaces it")
        if arguments.at_once and len(arguments.policies) > 1:
            parser.error("--at-once times one policy: others would be prepared meanwhile")
    return arguments


# By command: the name of the result file, and what yields its rows.
COMMANDS = {
    "train": ("networks", train_rows),
    "bytes": ("bytes", partial(rows_of_networks, count)),
    "ablation": ("ablation", partial(rows_of_networks, ablate)),
    "steps": ("steps", steps_rows),
    "small": ("small", small_rows),
    "calls": ("calls", calls_rows),
}


def main() -> None:
    """Verify, measure and write the CSV."""
    arguments = parse()
    name, rows_of = COMMANDS[arguments.command]
    if arguments.command == "train":
        name = arguments.selection
        if name == "networks" and arguments.memory_only:
            name = "peaks"
    write_results(name, rows_of, arguments)


if __name__ == "__main__":
    main()
