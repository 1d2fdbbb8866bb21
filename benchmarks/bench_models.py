"""Convert models of other libraries, and train each for three steps next to the original.

Each model runs in float32 and under CUDA's autocast policy, contiguous and in channels_last. Before
each step the converted model and the original have the same weights and buffers; both run with the
same random numbers. After each step all gradients and buffers are compared. The first step, in
which the engine also compares what it recomputes, measures the peak of allocations, and the bytes
saved for backward before and after conversion. A model that fails without conversion stays in the
table, with its error.

The exit status is 1 if a gradient is wrong (see `Limits` in gradients.py), or if a converted
model's first step has a higher peak than the original's.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import RESULTS, Row, memory_of, parser_of, write_csv
from gradients import Reference, WrongGradientError, gradients_of
from model_zoo import LIBRARIES, Entry, entry_of, names_of
from networks import MEMORY_FORMATS, differentiable
from policies import POLICIES, Policy, autocast, emulation
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import inplace_ops
from inplace_ops.conversion.report import Report
from inplace_ops.recompute.reasons import PARAMETER_COPY

STEPS = 3
CONVOLUTIONS = 4  # models with this many or more run in channels_last too
MAX_OPS = 4
SAME, MORE_MEMORY = "same gradients", "the first step needs more memory"
COLUMNS = ("result", "gradients_differ_by", "allowed", "saved_before", "saved_after", "ratio")
COLUMNS += ("parameter_copies", "first_peak_over_torch")
PEAK_LIMIT = 1.001  # a step without savings still allocates scales and shifts, a few numbers each

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())


class Case(NamedTuple):
    """How a model is trained: a dtype policy and a memory format."""

    policy: str
    memory_format: str


CASES = [
    Case("float32", "contiguous"),
    Case("float32", "channels_last"),
    Case("CUDA autocast", "contiguous"),
    Case("CUDA autocast", "channels_last"),
    Case("CUDA autocast, torch 2.11", "contiguous"),
]

Inputs = dict[str, Any]


class Outcome(NamedTuple):
    """The result of training a converted model next to the original.

    Attributes:
        difference: The distance of all gradients over their norm, in the step where it is largest.
        allowed: The limit on that distance in that step.
        peak_over_torch: The peak of the converted model's first step over the original's.
        report: The report of the conversion.
    """

    difference: float
    allowed: float
    peak_over_torch: float
    report: Report

    def columns(self) -> Row:
        """Return the columns of a row. The ratio leaves out autocast's parameter copies."""
        before, after = self.report.saved_bytes_before, self.report.saved_bytes_after
        assert before is not None
        assert after is not None
        copies = sum(row.bytes for row in self.report.remaining if row.reason == PARAMETER_COPY)
        return {
            "result": SAME if self.peak_over_torch <= PEAK_LIMIT else MORE_MEMORY,
            "gradients_differ_by": f"{self.difference:.1e}" if self.difference else "0",
            "allowed": f"{self.allowed:.1e}",
            "saved_before": before,
            "saved_after": after,
            "ratio": f"{(after - copies) / (before - copies):.3f}" if before > copies else "",
            "parameter_copies": copies,
            "first_peak_over_torch": f"{self.peak_over_torch:.3f}",
        }


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's outputs for copies of the inputs, which the model may write to."""
    copies = tree_map_only(Tensor, Tensor.clone, inputs)
    args = (copies.pop(""),) if "" in copies else ()
    return model(*args, **copies)


def step(model: nn.Module, inputs: Inputs, policy: Policy, seed: int) -> None:
    """Run forward, and backward from the outputs' mean squared distance to random targets."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # transformers draws the masks of speech models with NumPy
    generator = torch.Generator().manual_seed(seed)
    with emulation(policy, "cpu"):
        with autocast(policy, "cpu"):
            outputs = differentiable(call(model, inputs))
        losses = [
            (t.float() - torch.randn(t.shape, generator=generator)).square().mean() for t in outputs
        ]
        torch.autograd.backward(losses)


def trained(model: nn.Module, inputs: Inputs, case: Case) -> Outcome:
    """Train a converted copy next to the model.

    Raises:
        WrongGradientError: If the two differ.
        ArithmeticError: If the original's gradients are zero, not finite or noise.
    """
    policy = POLICIES[case.policy]
    original = model.to(memory_format=MEMORY_FORMATS[case.memory_format])
    converted, exact = copy.deepcopy(original), copy.deepcopy(original)
    report = inplace_ops.convert(converted, max_ops=MAX_OPS)
    optimizer = torch.optim.SGD(original.parameters(), 1e-3)
    outcome = Outcome(0.0, 0.0, 1.0, report)
    for seed in range(STEPS):
        run = partial(step, inputs=inputs, policy=policy, seed=seed)
        original_peak = peak_of(partial(run, original), is_measured=seed == 0)
        try:
            converted_peak = peak_of(partial(run, converted), is_measured=seed == 0)
        except Exception as error:
            raise WrongGradientError(f"fails only when converted: {one_line(error)}") from error
        if original_peak:
            outcome = outcome._replace(peak_over_torch=converted_peak / original_peak)
        expected, actual = gradients_of(original), gradients_of(converted)
        in_float32 = None
        if not policy.is_float32:
            step(exact, inputs, POLICIES["float32"], seed)
            in_float32 = gradients_of(exact)
        reference = Reference(original, run, expected, in_float32)
        difference, allowed = reference.verify(actual)
        if difference >= outcome.difference:
            outcome = outcome._replace(difference=difference, allowed=allowed)
        buffers, others = (dict(m.named_buffers()) for m in (original, converted))
        try:
            torch.testing.assert_close(others, buffers, equal_nan=True)
        except AssertionError as error:
            raise WrongGradientError(f"buffers differ: {one_line(error)}") from error
        for name, parameter in original.named_parameters():
            parameter.grad = expected.get(name)
        optimizer.step()
        original.zero_grad()
        for other in (converted, exact):
            other.load_state_dict(original.state_dict())
    return outcome


def peak_of(run: Callable[[], None], is_measured: bool) -> int:
    """Run a step, and return the most bytes that it allocates at one time; 0 if not measured."""
    return memory_of(run, "cpu")[0] if is_measured else run() or 0


def inputs_of(entry: Entry, model: nn.Module) -> Inputs:
    """Return the first of an entry's inputs that the model accepts."""
    error: Exception | None = None
    for inputs in entry.inputs():
        try:
            with torch.no_grad():
                call(copy.deepcopy(model), inputs)
            return inputs
        except Exception as found:  # mostly because the size is too small
            error = found
    raise RuntimeError(f"the model accepts none of the inputs: {error}") from error


# Bytes of the tensors that remain saved: by what made them, what saves them, and the reason.
Remaining = Counter[tuple[str, str, str]]
Rows = list[tuple[Row, Remaining]]


def rows_of(name: str) -> Rows:
    """Return a row, and what remains saved, for each case that applies to a model."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        entry = entry_of(name)
        model = entry.model()
        inputs = inputs_of(entry, model)
        shape, cases = shape_of(inputs), list(cases_for(model))
    except Exception as failure:
        return [(row_of(name, CASES[0], "", result=one_line(failure)), Counter())]
    model = None
    found: Rows = []
    for case in cases:
        try:
            outcome = trained(entry.model(), inputs, case)
            remaining: Remaining = Counter()
            for each in outcome.report.remaining:
                remaining[each.producer, each.consumer, each.reason] += each.bytes
            found.append((row_of(name, case, shape, **outcome.columns()), remaining))
        except Exception as failure:
            found.append((row_of(name, case, shape, result=one_line(failure)), Counter()))
    return found


def row_of(name: str, case: Case, shape: str, **columns: Any) -> Row:
    """Return the row of a model; columns that are not given are empty."""
    return {
        "model": name,
        **case._asdict(),
        "input": shape,
        **dict.fromkeys(COLUMNS, ""),
        **columns,
    }


def cases_for(model: nn.Module) -> Iterator[Case]:
    """Yield the cases that apply to a model.

    channels_last applies to models that convolve more than patches, unless PyTorch itself fails,
    and a policy that excludes operations to models with an RMS norm.
    """
    dims = Counter(p.dim() for p in model.parameters())
    has_rms_norm = any("rms" in type(m).__name__.lower() for m in model.modules())
    for case in CASES:
        if POLICIES[case.policy].excluded and not has_rms_norm:
            continue
        if case.memory_format == "channels_last" and (
            dims[4] < CONVOLUTIONS or any(map(corrupts_memory, model.modules()))
        ):
            continue
        yield case


def corrupts_memory(module: nn.Module) -> bool:
    """Whether PyTorch writes out of bounds in the module's backward in channels_last, on a CPU.

    torch 2.14.1 does so on AVX-512, for example from 2 x 3 x 96 x 96 to 64 channels.
    """
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.in_channels < 16
    )


def shape_of(inputs: Inputs) -> str:
    """Return the shape of the first tensor among the inputs."""
    first = next(iter(inputs.values()))
    while not isinstance(first, Tensor):
        first = first[0]
    return " x ".join(map(str, first.shape))


def one_line(error: Exception) -> str:
    """Return an error's type and text in at most 160 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def kinds(found: Rows) -> Iterator[Row]:
    """Yield the kinds of tensors that remain saved, by policy, the largest mean share first."""
    for policy in POLICIES:
        shares: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        models = 0
        for row, remaining in found:
            own = {kind: n for kind, n in remaining.items() if kind[-1] != PARAMETER_COPY}
            if row["policy"] == policy and row["memory_format"] == "contiguous" and own:
                models += 1
                for kind, count in own.items():
                    shares[kind].append(count / sum(own.values()))
        for kind, each in sorted(shares.items(), key=lambda item: -sum(item[1]))[:SHOWN_KINDS]:
            yield {
                "policy": policy,
                **dict(zip(("output_of", "saved_by", "reason"), kind, strict=True)),
                "mean_share": f"{sum(each) / models:.4f}",
                "models": len(each),
                "of": models,
            }


SHOWN_KINDS = 20  # of each policy
CHUNK = 8  # models in one process; its end frees what libraries leave behind


def all_rows(names: Sequence[str], processes: int) -> Iterator[tuple[Row, Remaining]]:
    """Yield the rows of all models in order, from several processes at a time."""
    chunks = [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]
    with ThreadPoolExecutor(processes) as threads:
        for rows in threads.map(rows_in_a_process, chunks):
            yield from rows


def rows_in_a_process(names: Sequence[str]) -> Rows:
    """Return the rows of models that run one after the other in a process, or until one kills it.

    The models after that one run in another process.
    """
    found: Rows = []
    pending = list(names)
    while pending:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                while pending:
                    found += pool.submit(rows_of, pending[0]).result()
                    pending.pop(0)
            except BrokenProcessPool:
                row = row_of(pending.pop(0), CASES[0], "", result="its process died")
                found.append((row, Counter()))
    return found


def main() -> None:
    """Train, and write two CSV files."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", help="LIBRARY:NAME, instead of all")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS / "models_cpu.csv")
    arguments = parser.parse_args()
    if "models" not in arguments.out.name:
        parser.error("--out: the name must contain `models`: a second file has `remaining` there")

    torch.set_num_threads(1)  # as the processes, for the files' column of the device
    names = arguments.models or [name for library in LIBRARIES for name in names_of(library)]
    found: Rows = []

    def rows() -> Iterator[Row]:
        for row, remaining in all_rows(names, arguments.processes):
            found.append((row, remaining))
            yield row

    written = write_csv(arguments.out, rows(), "cpu")
    libraries = {"libraries": ", ".join(dict.fromkeys(name.partition(":")[0] for name in names))}
    path = arguments.out.with_name(arguments.out.name.replace("models", "remaining"))
    write_csv(path, (libraries | row for row in kinds(found)), "cpu")
    wrong = (WrongGradientError.__name__, MORE_MEMORY)
    if any(row["result"].startswith(wrong) for row in written):
        raise SystemExit("gradients are wrong, or a first step needs more memory")


if __name__ == "__main__":
    main()
