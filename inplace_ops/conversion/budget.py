"""A budget: choose how a model is converted by the measured peak of its training step.

NOTE [How a budget is met]

A larger `max_ops` saves less, takes more time, and does not always lower the peak. Nothing but a
measurement tells which value fits into a budget. So candidates are measured on the example:

1. `max_ops` is 1, then each time the smallest limit from which the engine would have replaced one
   more tensor, until it rejects nothing. A limit at which the model saves as much as at the one
   before it is left out.
2. Blocks are checkpointed in addition, with the `max_ops` of the lowest peak: all of them, then
   the first half, then what bisection between "fits" and "does not fit" gives. The first blocks are
   the last ones in backward: when one of them runs again, little else is still saved.
3. The fastest candidate that fits is chosen.

A candidate for which memory runs out does not fit; so with PyTorch's own step. Gradients are then
compared with those of the first candidate that runs.

If several processes train together, they must choose alike. So they exchange what they have
measured after each candidate, and the largest peak and time count.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .._ops import is_out_of_memory
from .._torch_private import profiler_is_running
from ..memory import WrittenToError, bytes_of
from ..recompute.checkpoints import Checkpoint, RecomputationError, modes_of
from ..recompute.settings import Settings
from .blocks import Blocks, blocks_of
from .report import Candidate, Report, mib
from .verify import Gradients, Run, compare
from .wiring import Conversion, attach, detach

_T = TypeVar("_T")

MOST_CANDIDATES = 20
_FOR_BLOCKS = 6  # of them, if the model has blocks

_UNITS = {"B": 1, **{f"{p}B": 1000**i for i, p in enumerate(("k", "M", "G", "T"), 1)}}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate(("K", "M", "G", "T"), 1)}
_UNDERSTOOD = (
    'memory must be a number of bytes such as 8 * 2**30, a text such as "8 GiB", "512 MiB" or '
    f'"1.5 GB" (units: {", ".join(_UNITS)}), or a share of PyTorch\'s peak such as 0.5, above 0 '
    "and below 1"
)


class Budget(NamedTuple):
    """A limit for the peak of a step: a number of bytes, or a share of PyTorch's peak."""

    bytes: int | None
    share: float | None

    @classmethod
    def of(cls, memory: Any) -> Budget:
        """Return the budget that an argument `memory` means.

        Raises:
            TypeError: If it is neither a number nor a text.
            ValueError: If it is not positive, no share, or in an unknown unit.
        """
        if isinstance(memory, bool) or not isinstance(memory, (int, str, float)):
            raise TypeError(f"{_UNDERSTOOD}; got {memory!r}")
        if isinstance(memory, float):
            if not 0 < memory < 1:
                raise ValueError(f"{_UNDERSTOOD}; got {memory!r}")
            return cls(None, memory)
        size = memory if isinstance(memory, int) else _parsed(memory)
        if size < 1:
            raise ValueError(f"{_UNDERSTOOD}; got {memory!r}")
        return cls(size, None)

    def limit(self, peak: int | None) -> int:
        """Return the budget in bytes, given PyTorch's peak.

        Raises:
            MemoryError: If it is a share of a peak that is not known.
        """
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        if peak is None:
            raise MemoryError(
                f"memory={self.share} is a share of PyTorch's peak, and PyTorch's own step does "
                'not fit into memory: pass bytes, such as memory="8 GiB", or fewer samples'
            )
        return int(self.share * peak)


def _parsed(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{_UNDERSTOOD}; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


class Choice(NamedTuple):
    """What a search has found.

    Attributes:
        report: The report of the chosen candidate; of that of the lowest peak if none fits.
        conversion: The chosen conversion, as it was measured; None if none fits.
        problem: Why none fits, and what to do; empty if one does.
    """

    report: Report
    conversion: Conversion | None
    problem: str


class _Original(NamedTuple):
    """What was measured of PyTorch's own step."""

    saved_bytes: int
    flops: int | None
    peak_bytes: int | None


class _Step(NamedTuple):
    """What was measured of a candidate's step."""

    peak_bytes: int
    flops: int | None
    seconds: float


class _Trial(NamedTuple):
    """A measured candidate, with the conversion that it was measured with."""

    candidate: Candidate
    conversion: Conversion

    @property
    def peak(self) -> float:
        """The peak; infinite if memory ran out."""
        peak = self.candidate.peak_bytes
        return math.inf if peak is None else peak


class Search:
    """The search for the fastest candidate that fits: see NOTE [How a budget is met]."""

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        budget: Budget,
        max_ops: int | None = None,
        is_shared: bool = False,
    ) -> None:
        """Measure PyTorch's own step, and find the blocks that may be checkpointed.

        Args:
            model: The model, which is not converted.
            run: Runs it on the example.
            budget: The limit for the peak.
            max_ops: The largest `max_ops` of a candidate; None if there is no such limit.
            is_shared: Whether all processes that train together search, and choose alike.

        Raises:
            MemoryError: If the budget is a share of a peak that cannot be measured.
            RuntimeError: If PyTorch's profiler, which measures peaks, is already running.
        """
        if profiler_is_running():
            raise RuntimeError("a budget needs PyTorch's profiler, which is already running")
        self._model, self._run, self._max_ops, self._is_shared = model, run, max_ops, is_shared
        self._trials: list[_Trial] = []
        self._original: _Original | None = None
        self._references: list[Gradients] = []  # of two runs, with which others are compared
        self._compared = 0
        self._remarks: list[str] = []
        self._limit = budget.limit(_largest(self._together(self._measure_original)))
        found = self._together(lambda: blocks_of(model, run.call))
        known = [Blocks([], {}) if blocks is None else blocks for blocks in found]
        self._blocks = known[0]
        self._usable = [p for p in known[0].usable if all(p in each.usable for each in known)]

    def choose(self, finished: Callable[[], object]) -> Choice:
        """Measure candidates, and return the chosen one. `finished` is called after each.

        Raises:
            VerificationError: If the gradients of a candidate differ.
        """
        self._try_limits(finished)
        self._try_checkpoints(finished)
        fitting = [trial for trial in self._trials if trial.peak <= self._limit]
        chosen = min(fitting, key=lambda t: t.candidate.seconds or math.inf, default=None)
        trial = self._lowest() if chosen is None else chosen
        report = trial.conversion.report
        report.candidates = [
            replace(each.candidate, is_chosen=each is chosen) for each in self._trials
        ]
        self._fill(report, trial.candidate)
        if chosen is not None:
            return Choice(report, chosen.conversion, "")
        return Choice(report, None, self._problem(trial))

    def _try_limits(self, finished: Callable[[], object]) -> None:
        """Measure candidates without checkpoints."""
        max_ops: int | None = 1
        most = MOST_CANDIDATES - (_FOR_BLOCKS if self._usable else 0)
        while max_ops is not None and len(self._trials) < most:
            rejected = self._try(max_ops, ())
            finished()
            larger = [limit for limit in sorted(rejected) if limit > max_ops]
            # Usually the smallest; if there are more than can be measured, some are left out.
            left = max(1, most - len(self._trials))
            max_ops = larger[-(-len(larger) // left) - 1] if larger else None
            if max_ops is not None and self._max_ops is not None and max_ops > self._max_ops:
                max_ops = None

    def _try_checkpoints(self, finished: Callable[[], object]) -> None:
        """Measure candidates with checkpoints, by bisection over how many blocks have one."""
        max_ops = self._lowest().candidate.max_ops
        is_needed = self._lowest().peak > self._limit
        fits, fails, count = len(self._usable) + 1, 0, len(self._usable)
        while fails < count < fits and len(self._trials) < MOST_CANDIDATES:
            self._try(max_ops, self._usable[:count])
            finished()
            if not is_needed:
                return
            if self._trials[-1].peak <= self._limit:
                fits = count
            else:
                fails = count
            count = (fails + fits) // 2

    def _lowest(self) -> _Trial:
        """Return the candidate of the lowest peak; if several have it, the one that saves least."""
        return min(self._trials, key=lambda t: (t.peak, t.candidate.saved_bytes or 0))

    def _try(self, max_ops: int, checkpointed: Sequence[str]) -> set[int]:
        """Measure a candidate, unless it saves as much as the one before it.

        Return the limits from which more would be replaced.
        """
        checkpoints = {
            path: Checkpoint(Settings(max_ops), modes_of(self._model.get_submodule(path)))
            for path in checkpointed
        }
        conversion = Conversion(Settings(max_ops), Report(), checkpoints=checkpoints)
        attach(self._model, conversion)
        try:
            saved = _largest(self._together(self._run.saved_bytes))
            before = self._trials[-1].candidate.saved_bytes if self._trials else None
            if checkpointed or saved is None or saved != before:
                self._add(
                    conversion, saved, self._together(partial(self._measure_step, conversion))
                )
            rejected = self._together(lambda: {*conversion.settings.rejected})
            return {limit for limits in rejected for limit in limits or ()}
        finally:
            detach(self._model)

    def _add(
        self, conversion: Conversion, saved: int | None, steps: Sequence[_Step | None]
    ) -> None:
        """Add a measured candidate. One for which memory ran out has no measurements."""
        known = [step for step in steps if step is not None]
        is_known = len(known) == len(steps)
        candidate = Candidate(
            conversion.settings.max_ops,
            tuple(conversion.checkpoints),
            saved,
            max(step.peak_bytes for step in known) if is_known else None,
            known[0].flops if is_known else None,
            max(step.seconds for step in known) if is_known else None,
        )
        self._trials.append(_Trial(candidate, conversion))

    def _measure_original(self) -> int | None:
        """Measure PyTorch's own step, and return its peak."""
        run = self._run
        gradients = run.gradients().to_host()
        repeated, flops = run.gradients_and_flops()
        self._original = original = _Original(run.saved_bytes(), flops, run.peak_bytes())
        self._references = [gradients, repeated.to_host()]
        return original.peak_bytes

    def _measure_step(self, conversion: Conversion) -> _Step | None:
        """Measure the attached candidate, and compare its gradients.

        None if a checkpointed block does something else when it runs again.
        """
        try:
            gradients, flops = self._run.gradients_and_flops()
        except (RecomputationError, WrittenToError) as error:
            if not conversion.checkpoints:
                raise
            self._remarks.append(f"checkpoints of blocks fail: {error}")
            return None
        gradients.to_host()
        if self._references:
            compare(self._references[0], self._references[1], gradients)
            self._compared += 1
        else:
            self._references = [gradients, self._run.gradients().to_host()]
        peak = self._run.peak_bytes()
        assert peak is not None
        return _Step(peak, flops, self._run.seconds())

    def _together(self, measure: Callable[[], _T]) -> list[_T | None]:
        """Measure, and return what each process has measured; None where memory ran out."""
        value, error = None, None
        try:
            value = measure()
        except Exception as raised:
            if not is_out_of_memory(raised):
                error = raised
        if value is None:
            _free_memory()
        everyone: list[Any] = [(value, None)]
        if self._is_shared:
            everyone *= dist.get_world_size()
            dist.all_gather_object(everyone, (value, None if error is None else repr(error)))
        if error is not None:
            raise error
        for _, text in everyone:
            if text is not None:
                raise RuntimeError(f"another process failed while it measured candidates: {text}")
        return [each for each, _ in everyone]

    def _fill(self, report: Report, candidate: Candidate) -> None:
        """Fill in what was measured with an example."""
        original, model = self._original, self._model
        report.memory_limit = self._limit
        report.remarks += self._remarks
        report.peak_bytes_after = candidate.peak_bytes
        if candidate.saved_bytes is not None:
            report.saved_bytes_after = candidate.saved_bytes
        if self._references:
            report.gradient_bytes = self._references[0].bytes
            report.remarks += self._references[0].remarks
        if original is not None:
            report.saved_bytes_before = original.saved_bytes
            report.peak_bytes_before, report.flops = original.peak_bytes, original.flops
        else:
            other = "the first candidate's" if self._compared else "nothing, as one candidate fits"
            report.remarks.append(
                f"PyTorch's own step does not fit into memory: gradients were compared with {other}"
            )
        report.parameter_bytes = bytes_of(model.parameters())
        report.trainable_bytes = bytes_of(p for p in model.parameters() if p.requires_grad)
        report.buffer_bytes = bytes_of(model.buffers())

    def _problem(self, lowest: _Trial) -> str:
        """Return why no candidate fits, and what to do."""
        candidate, report = lowest.candidate, lowest.conversion.report
        limit = f"no candidate fits into memory={mib(self._limit)} MiB"
        if candidate.peak_bytes is None:
            return f"{limit}: memory runs out in all of them. {_SMALLER}"
        blocks = len(candidate.checkpointed)
        what = [
            f"at most {mib(candidate.saved_bytes)} MiB are saved for backward",
            f"at most {mib(report.gradient_bytes)} MiB are gradients",
            "the rest are outputs and temporary tensors of single operations",
        ]
        text = (
            f"{limit}: the lowest peak of forward and backward is {mib(candidate.peak_bytes)} MiB, "
            f"with max_ops={candidate.max_ops} and {blocks} checkpointed "
            f"block{'' if blocks == 1 else 's'} ({'; '.join(what)}). {_SMALLER}"
        )
        text += "".join(f" {remark}." for remark in self._remarks)
        if self._blocks.reasons:
            (path, reason), *more = self._blocks.reasons.items()
            others = f" and {len(more)} more" if more else ""
            text += f" Not checkpointed: {path}{others}, as {reason}."
        elif not self._blocks.usable:
            text += (
                " The model has no blocks to checkpoint: a ModuleList or Sequential of three or "
                "more modules of one class."
            )
        return text


_SMALLER = "Pass a larger memory or fewer samples, or train under torch.autocast."


def _largest(values: Sequence[int | None]) -> int | None:
    """Return the largest value; None if one is not known."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _free_memory() -> None:
    """Free what a failed measurement has left."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
