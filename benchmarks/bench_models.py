"""Models of other libraries, converted and trained three steps beside the original.

Each model runs in float32 and under CUDA's autocast policy, contiguous and channels_last. Before a
step both have the same weights and buffers; they run with the same random numbers. Every step
compares all gradients and buffers. The first one, which compares what it recomputes, also measures
the peak of its allocations, and what is saved for backward before and after. A model that does not
run as it is stays in the table, with its error.

A gradient is wrong if it is farther from the original's than roundings explain: see `Limits`. The
exit status is 1 if one is, and if a first step allocates more at one time than the original's.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from baselines import MEMORY_FORMATS, differentiable
from measure import RESULTS, machine, memory_of, quartiles, table, written_to
from model_zoo import LIBRARIES, Entry, entry_of, names_of
from policies import POLICIES, Policy, autocast, emulation
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import inplace_ops
from inplace_ops.conversion.report import Report
from inplace_ops.recompute.reasons import PARAMETER_COPY

STEPS = 3
CONVOLUTIONS = 4  # from which on a model runs in channels_last too
MAX_OPS = 4
PEAK_LIMIT = 1.001  # a step that saves nothing less has scales and shifts, some numbers each

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
Gradients = dict[str, Tensor]


class WrongGradientError(AssertionError):
    """The converted model does not train as the original does."""


class Limits(NamedTuple):
    """How far gradients may be from the original's, over the norm of all of them.

    In float32 1e-5 for all together; for one tensor 1e-4 of its own norm and 1e-6 of all. Under
    autocast by how far autocast itself takes the gradients from those in float32: for all together
    half of that, and 5e-2 at most; for one tensor all of that, and 1e-3.

    Attributes:
        overall: For all gradients together.
        tensors: For each tensor.
    """

    overall: float
    tensors: dict[str, float]


def limits_in_float32(norms: dict[str, float]) -> Limits:
    """The limits for gradients of these norms."""
    total = norm_of(norms)
    return Limits(1e-5, {name: 1e-4 * norm / total + 1e-6 for name, norm in norms.items()})


def limits_under_autocast(norms: dict[str, float], rounding: dict[str, float]) -> Limits:
    """The limits for gradients of these norms, from their distances to those in float32."""
    total = norm_of(norms)
    overall = min(max(1e-5, norm_of(rounding) / total / 2), 5e-2)
    return Limits(overall, {name: off / total + 1e-3 for name, off in rounding.items()})


class Outcome(NamedTuple):
    """What training a converted model beside the original has shown.

    Attributes:
        difference: Of all gradients over their norm, in the step where it is largest.
        allowed: What the limits allow in that step.
        peak_over_torch: Of the first step.
        report: Of the conversion.
    """

    difference: float
    allowed: float
    peak_over_torch: float
    report: Report


def finite_norms(gradients: Gradients) -> dict[str, float]:
    """The norm of each tensor, summed in float64; raises where they cannot be compared with."""
    norms = {name: float(g.norm(dtype=torch.float64)) for name, g in gradients.items()}
    total = norm_of(norms)
    if not (total > 0 and math.isfinite(total)):
        raise ArithmeticError(f"the gradients of the original have a norm of {total}")
    return norms


def norm_of(norms: dict[str, float]) -> float:
    """The norm of all tensors together."""
    return float(sum(norm**2 for norm in norms.values()) ** 0.5)


def distances(actual: Gradients, expected: Gradients) -> dict[str, float]:
    """The norm of each tensor's difference."""
    if actual.keys() != expected.keys():
        raise WrongGradientError(f"only one side has {sorted(actual.keys() ^ expected.keys())}")
    return {
        name: float((actual[name] - expected[name]).norm(dtype=torch.float64)) for name in actual
    }


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's outputs for copies of the inputs, which it may write to."""
    own = tree_map_only(Tensor, Tensor.clone, inputs)
    args = (own.pop(""),) if "" in own else ()
    return model(*args, **own)


def step(model: nn.Module, inputs: Inputs, policy: Policy, seed: int) -> None:
    """Forward and backward of the distance from random targets."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # of transformers' masks of speech
    generator = torch.Generator().manual_seed(seed)
    with emulation(policy, "cpu"):
        with autocast(policy, "cpu"):
            outputs = differentiable(call(model, inputs))
        losses = [
            (t.float() - torch.randn(t.shape, generator=generator)).square().mean() for t in outputs
        ]
        torch.autograd.backward(losses)


def gradients_of(model: nn.Module) -> Gradients:
    """Those of the parameters that have one, by name."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()  # sets them to None
    return found


def trained(model: nn.Module, inputs: Inputs, case: Case) -> Outcome:
    """Train a converted copy of the model beside it; raises WrongGradientError."""
    policy = POLICIES[case.policy]
    original = model.to(memory_format=MEMORY_FORMATS[case.memory_format])
    converted, exact = copy.deepcopy(original), copy.deepcopy(original)
    report = inplace_ops.convert(converted, max_ops=MAX_OPS)
    optimizer = torch.optim.SGD(original.parameters(), 1e-3)
    outcome = Outcome(0.0, 0.0, 1.0, report)
    for seed in range(STEPS):
        run = partial(step, inputs=inputs, policy=policy, seed=seed)
        before = peak_of(partial(run, original), is_measured=seed == 0)
        try:
            after = peak_of(partial(run, converted), is_measured=seed == 0)
        except Exception as error:
            raise WrongGradientError(f"fails converted alone: {one_line(error)}") from error
        if before:
            outcome = outcome._replace(peak_over_torch=after / before)
        expected, actual = gradients_of(original), gradients_of(converted)
        own = finite_norms(expected)
        if policy.is_float32:
            limits = limits_in_float32(own)
        else:
            step(exact, inputs, POLICIES["float32"], seed)
            limits = limits_under_autocast(own, distances(expected, gradients_of(exact)))
        difference = compare(distances(actual, expected), norm_of(own), limits)
        if difference >= outcome.difference:
            outcome = outcome._replace(difference=difference, allowed=limits.overall)
        compare_buffers(converted, original)
        for name, parameter in original.named_parameters():
            parameter.grad = expected.get(name)
        optimizer.step()
        original.zero_grad()
        for other in (converted, exact):
            other.load_state_dict(original.state_dict())
    return outcome


def peak_of(run: Callable[[], None], is_measured: bool) -> int:
    """Run a step; return the most bytes that it allocates at one time, if that is measured."""
    if is_measured:
        return memory_of(run, "cpu")[0]
    run()
    return 0


def compare_buffers(actual: nn.Module, expected: nn.Module) -> None:
    """Raise if running statistics and the like differ."""
    own, others = dict(actual.named_buffers()), dict(expected.named_buffers())
    try:
        torch.testing.assert_close(own, others, equal_nan=True)
    except AssertionError as error:
        raise WrongGradientError(f"buffers differ: {one_line(error)}") from error


def compare(off: dict[str, float], total: float, limits: Limits) -> float:
    """Raise if gradients are too far off; return the distance of all over their norm, `total`."""
    overall = norm_of(off) / total
    if not overall <= limits.overall:
        raise WrongGradientError(f"off by {overall:.1e}, allowed are {limits.overall:.1e}")
    for name, distance in off.items():
        if not distance / total <= limits.tensors.get(name, 0.0):
            raise WrongGradientError(f"{name} off by {distance / total:.1e} of all gradients")
    return overall


def inputs_of(entry: Entry, model: nn.Module) -> Inputs:
    """The first of an entry's inputs that the model takes."""
    error: Exception | None = None
    for inputs in entry.inputs():
        try:
            with torch.no_grad():
                call(copy.deepcopy(model), inputs)
            return inputs
        except Exception as found:  # of a size that is too small, mostly
            error = found
    raise RuntimeError(f"takes none of the inputs: {error}") from error


class Remains(NamedTuple):
    """A kind of tensor that stays saved."""

    producer: str
    consumer: str
    reason: str


Remaining = dict[Remains, int]  # bytes
Rows = list[tuple[dict[str, Any], Remaining]]


def rows_of(name: str, only: Case | None = None) -> Rows:
    """A row for each case, or for one of them, and what remains saved there."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    found: Rows = []
    shape, error, cases = "", "", CASES[:1]
    try:
        entry = entry_of(name)
        model = seeded_model(entry)
        inputs = inputs_of(entry, model)
        shape, cases = shape_of(inputs), list(cases_for(model))
        cases = [case for case in cases if only in (None, case)]
    except Exception as failure:
        error = one_line(failure)
    model = None
    for case in cases:
        columns = dict.fromkeys(COLUMNS, "")
        remaining: Remaining = {}
        columns["result"] = error
        if not error:
            try:
                outcome = trained(seeded_model(entry), inputs, case)
                columns, remaining = column_affine_of(outcome), remaining_of(outcome.report)
            except Exception as failure:
                columns["result"] = one_line(failure)
        row = {"model": name, **case._asdict(), "input": shape, **columns, **machine("cpu")}
        found.append((row, remaining))
    print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def seeded_model(entry: Entry) -> nn.Module:
    """The model, with the same weights each time."""
    torch.manual_seed(0)
    return entry.model()


COLUMNS = (
    *("result", "gradients_differ_by", "allowed", "saved_before", "saved_after", "ratio"),
    *("parameter_copies", "first_peak_over_torch"),
)
SAME = "same gradients"
MORE_MEMORY = "the first step needs more memory"


def column_affine_of(outcome: Outcome) -> dict[str, str]:
    """What a row says of an outcome. The ratio is without autocast's copies of parameters."""
    report = outcome.report
    before, after = report.saved_bytes_before, report.saved_bytes_after
    assert before is not None
    assert after is not None
    copies = sum(row.bytes for row in report.remaining if row.reason == PARAMETER_COPY)
    values = (
        SAME if outcome.peak_over_torch <= PEAK_LIMIT else MORE_MEMORY,
        f"{outcome.difference:.1e}" if outcome.difference else "0",
        f"{outcome.allowed:.1e}",
        before,
        after,
        f"{(after - copies) / (before - copies):.3f}" if before > copies else "",
        copies,
        f"{outcome.peak_over_torch:.3f}",
    )
    return dict(zip(COLUMNS, map(str, values), strict=True))


def remaining_of(report: Report) -> Remaining:
    """What remains saved, by kind."""
    found: Remaining = defaultdict(int)
    for row in report.remaining:
        found[Remains(row.producer, row.consumer, row.reason)] += row.bytes
    return dict(found)


def cases_for(model: nn.Module) -> Iterator[Case]:
    """The cases that differ for a model: channels_last where more than patches are convolved."""
    dims = Counter(p.dim() for p in model.parameters())
    has_rms_norm = any("rms" in type(m).__name__.lower() for m in model.modules())
    for case in CASES:
        if POLICIES[case.policy].excluded and not has_rms_norm:
            continue
        if case.memory_format == "channels_last" and dims[4] < CONVOLUTIONS:
            continue
        yield case


def shape_of(inputs: Inputs) -> str:
    """The shape of the first tensor among the inputs."""
    first = next(iter(inputs.values()))
    while not isinstance(first, Tensor):
        first = first[0]
    return " x ".join(map(str, first.shape))


def one_line(error: Exception) -> str:
    """An error in at most 160 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def kinds(found: Iterable[tuple[Case, Remaining]]) -> list[dict[str, Any]]:
    """The kinds of tensors that remain, by their mean share of what remains, for each case."""
    shares: dict[tuple[str, Remains], list[float]] = defaultdict(list)
    models: dict[str, int] = defaultdict(int)
    for case, remaining in found:
        own = {k: b for k, b in remaining.items() if k.reason != PARAMETER_COPY}
        total = sum(own.values())
        if not total or case.memory_format != "contiguous":
            continue
        models[case.policy] += 1
        for kind, count in own.items():
            shares[case.policy, kind].append(count / total)
    rows = [
        {
            "policy": policy,
            "output_of": kind.producer,
            "saved_by": kind.consumer,
            "reason": kind.reason,
            "mean_share": f"{sum(each) / models[policy]:.4f}",
            "models": len(each),
            "of": models[policy],
        }
        for (policy, kind), each in shares.items()
    ]
    return sorted(rows, key=lambda row: (row["policy"], -float(row["mean_share"])))


SHOWN_KINDS = 20  # of each policy
CHUNK = 8  # models in one process, which then ends with what libraries leave behind


def all_rows(names: Sequence[str], processes: int) -> Iterator[tuple[dict[str, Any], Remaining]]:
    """The rows of all models, several processes at a time."""
    chunks = [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]
    with ThreadPoolExecutor(processes) as threads:
        for future in as_completed([threads.submit(rows_in_a_process, c) for c in chunks]):
            yield from future.result()


def rows_in_a_process(names: Sequence[str]) -> Rows:
    """The rows of models that run one after the other in a process.

    Of a model that ends the process each case runs again, and one may: on a CPU PyTorch itself
    corrupts memory in some models in channels_last.
    """
    found: Rows = []
    pending: list[tuple[str, Case | None]] = [(name, None) for name in names]
    while pending:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            while pending:
                name, only = pending.pop(0)
                try:
                    found += pool.submit(rows_of, name, only).result()
                except BrokenProcessPool:
                    if only is None:
                        pending += [(name, case) for case in CASES]
                    else:
                        columns = dict.fromkeys(COLUMNS, "") | {"result": "its process died"}
                        row = {"model": name, **only._asdict(), "input": "", **columns}
                        found.append((row | machine("cpu"), {}))
                    break
    return found


def main() -> None:
    """Train, print a summary, write two CSV files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--models", nargs="+", help="LIBRARY:NAME, instead of whole libraries")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULTS / "models_cpu.csv")
    arguments = parser.parse_args()

    names = arguments.models or [
        name for library in arguments.libraries for name in names_of(library)
    ]
    found: list[tuple[Case, Remaining]] = []
    with written_to(arguments.out) as rows:
        for row, remaining in all_rows(names, arguments.processes):
            print(*list(row.values())[:12], sep=", ", flush=True)
            rows.append(row)
            found.append((Case(row["policy"], row["memory_format"]), remaining))
        rows.sort(key=lambda row: names.index(row["model"]))
    kept_path = arguments.out.with_name(arguments.out.name.replace("models", "remaining"))
    with written_to(kept_path) as remaining_rows:
        all_kinds = kinds(found)
        for policy in POLICIES:
            own = [row for row in all_kinds if row["policy"] == policy]
            remaining_rows += [row | machine("cpu") for row in own[:SHOWN_KINDS]]
    summarize(rows)


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print quartiles of the ratios, and what failed."""
    lines = [["case", "models", "ratio: best", "quartiles", "worst", "first peak: worst"]]
    for case in CASES:
        own = [r for r in rows if (r["policy"], r["memory_format"]) == case and r["ratio"]]
        ratios = sorted(float(row["ratio"]) for row in own)
        if len(ratios) > 1:
            middle = ", ".join(f"{q:.2f}" for q in quartiles(ratios))
            peak = max(float(row["first_peak_over_torch"]) for row in own)
            ends = (f"{ratios[0]:.2f}", middle, f"{ratios[-1]:.2f}", f"{peak:.3f}")
            lines.append([", ".join(case), str(len(own)), *ends])
    print(table(lines))
    failed = [row for row in rows if row["result"] != SAME]
    for row in failed:
        print(f"{row['model']}, {row['policy']}, {row['memory_format']}: {row['result']}")
    wrong = (WrongGradientError.__name__, MORE_MEMORY)
    if any(row["result"].startswith(wrong) for row in failed):
        raise SystemExit("wrong gradients, or more memory")


if __name__ == "__main__":
    main()
