"""The public functions `convert`, `analyze`, `revert` and `reverted`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from .._torch_private import is_optimized_module
from ..recompute.run import running_engine
from ..recompute.settings import MAX_OPS, Settings
from .budget import MOST_CANDIDATES, Budget, Choice, Search
from .example import Example, Inputs
from .report import Report
from .state import State
from .verify import Run, compare
from .wiring import Conversion, attach, conversion_of, detach, detached

# Runs on an example change state that threads share: the random state, and the hooks of modules. So
# one thread at a time runs them.
_EXAMPLE_LOCK = threading.RLock()
_PASSES = 8  # of `_measure`


def convert(
    model: nn.Module,
    example_inputs: Inputs | None = None,
    *,
    max_ops: int | None = None,
    memory: int | str | float | None = None,
    **removed: Any,
) -> Report:
    """Let a model recompute tensors in backward instead of saving them, and return a report.

    From now on the model does not save tensors that are cheap to recompute from other saved
    tensors: the outputs of norms, activations, sums, products and concatenations, and those of
    convolutions and matrix products that are larger than the input. Gradients are PyTorch's.
    Parameters, buffers, `state_dict` and the classes of the model's parts stay as they are. The
    model itself becomes an instance of a subclass of its class, and so do the blocks that a budget
    checkpoints.

    Args:
        model: Any module. Convert it before `torch.compile`, DDP or FSDP wrap it.
        example_inputs: Inputs to call the model with: a tensor, a tuple of arguments or a dict of
            keyword arguments. With an example the model runs forward and backward a few times,
            under the caller's autocast: gradients are compared, memory is measured, and the
            model's state is restored. Without an example nothing runs.
        max_ops: The most that recomputing one tensor in backward may take, in passes over its
            memory. An elementwise operation counts one; a convolution or matrix product counts its
            memory and its arithmetic, by device and dtype. A larger limit saves more memory and
            takes more time. The default is 4; with `memory` it bounds the search, which has no
            bound by default.
        memory: A budget for the peak of a forward and backward pass on the example, beyond what was
            allocated before: bytes, a text such as "8 GiB" or "8 GB", or a share of PyTorch's peak
            above 0 and below 1. Values of `max_ops` and checkpoints of blocks are measured, and
            the model is converted like the fastest candidate that fits. Parameters and optimizers
            come in addition: the report has lines for them. All processes of an initialized
            process group must call `convert` together, and choose alike.
        **removed: Arguments of earlier versions; they raise TypeError.

    Returns:
        A report of what the original and the converted model save. Without an example, the first
        forward pass with gradients fills it in. If the model is converted already, its report.

    Raises:
        VerificationError: If gradients on the example differ. The model is unchanged.
        MemoryError: If no candidate fits into `memory`. The model is unchanged.
        TypeError: If `model` is not a module, if an argument of an earlier version is given, if the
            example or `memory` has another type, or if `memory` is given without an example.
        ValueError: If `max_ops` is not a positive integer, if `memory` is not positive, a share of
            1 or more, or in an unknown unit, or if the model is compiled, scripted or has
            uninitialized parameters.
        RuntimeError: If called inside the forward pass of a converted model, with an example in
            inference mode, or with `memory` under PyTorch's profiler, which measures peaks.
        Exception: Any error that the model raises on the example. The model is unchanged.
    """
    budget = _check_arguments("convert", model, example_inputs, max_ops, memory, removed)
    existing, settings = conversion_of(model), _settings_of(max_ops)
    if existing is not None:
        limit = existing.settings.max_ops
        if budget is not None or limit != settings.max_ops:
            warnings.warn(
                f"the model is already converted with max_ops={limit}, which does not change: call "
                "inplace_ops.revert(model) first",
                stacklevel=2,
            )
    if existing is None and budget is not None:
        assert example_inputs is not None
        is_shared = dist.is_available() and dist.is_initialized()
        choice = _search(model, Example(example_inputs), budget, max_ops, is_shared, "convert")
        if choice.conversion is None:
            raise MemoryError(choice.problem)
        attach(model, choice.conversion)
        return choice.report
    conversion = existing or Conversion(settings, Report())
    if example_inputs is not None:
        _measure(model, Example(example_inputs), conversion)
    if existing is None:
        attach(model, conversion)
    return conversion.report


def analyze(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    max_ops: int | None = None,
    memory: int | str | float | None = None,
    **removed: Any,
) -> Report:
    """Return the report of `convert`, and leave the model unconverted.

    Takes the arguments of `convert`, and raises the same errors, with two exceptions. If the
    model's own backward fails, the report lists what is saved, and its peaks are None. If nothing
    fits into `memory`, the report has all candidates, and a remark says what to do. If tqdm is
    installed, a terminal shows a progress bar after two seconds. Processes measure on their own.
    """
    budget = _check_arguments("analyze", model, example_inputs, max_ops, memory, removed)
    example = Example(example_inputs)
    if budget is not None:
        choice = _search(model, example, budget, max_ops, is_shared=False, name="analyze")
        choice.report.remarks += filter(None, [choice.problem])
        return choice.report
    conversion = Conversion(_settings_of(max_ops), Report())
    with _progress_bar("analyze", "pass", _PASSES) as update:
        _measure(model, example, conversion, needs_gradients=False, finished=update)
    return conversion.report


def _settings_of(max_ops: int | None) -> Settings:
    return Settings(MAX_OPS if max_ops is None else max_ops)


def _search(
    model: nn.Module,
    example: Example,
    budget: Budget,
    max_ops: int | None,
    is_shared: bool,
    name: str,
) -> Choice:
    """Measure candidates for a budget, and restore the model."""
    with (
        _measuring(model, example, _nothing) as run,
        _progress_bar(name, "candidate", MOST_CANDIDATES) as update,
    ):
        return Search(model, run, budget, max_ops, is_shared).choose(update)


@contextmanager
def _progress_bar(name: str, unit: str, total: int) -> Iterator[Callable[[], object]]:
    """Show tqdm's progress bar, if it is installed, and provide what to call after each unit."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None:
        yield _nothing
        return
    with tqdm(total=total, desc=name, unit=unit, delay=2, leave=False, disable=None) as progress:
        yield progress.update


def _nothing() -> None:
    pass


def revert(model: nn.Module) -> None:
    """Undo `convert` in the model and in all of its parts. Copies of a model can be reverted too.

    Raises:
        TypeError: If `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    detach(model)


@contextmanager
def reverted(model: nn.Module) -> Iterator[None]:
    """Undo `convert` within a `with` block, and convert the model again at its end."""
    with detached(model):
        yield


_REMOVED = {
    "optimize": "use max_ops to choose how much is recomputed",
    "bits": 'use a module of inplace_ops, such as inplace_ops.SiLU(save="output", bits=1)',
    "verify": "without example_inputs nothing is run or compared",
}


def _check_arguments(
    name: str,
    model: Any,
    example_inputs: Any,
    max_ops: Any,
    memory: Any,
    removed: dict[str, Any],
) -> Budget | None:
    """Check the arguments, and return the budget; None if none is given."""
    for argument in removed:
        hint = f": {_REMOVED[argument]}" if argument in _REMOVED else ""
        problem = (
            "no longer takes" if argument in _REMOVED else "got an unexpected keyword argument"
        )
        raise TypeError(f"{name}() {problem} {argument!r}{hint}")
    if not isinstance(model, nn.Module):
        hint = f": call {name}(model, x)" if isinstance(example_inputs, nn.Module) else ""
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}{hint}")
    is_integer = isinstance(max_ops, int) and not isinstance(max_ops, bool)
    if max_ops is not None and not (is_integer and max_ops >= 1):
        raise ValueError(f"max_ops must be a positive integer, got {max_ops!r}")
    if is_optimized_module(model):
        raise ValueError(
            "the model is compiled: convert it before torch.compile, or convert the module that "
            "was passed to torch.compile (the compiler decides itself what its code recomputes)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("the model is scripted: convert it before torch.jit.script or trace")
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise ValueError("the model has uninitialized parameters: call it once first")
    if running_engine() is not None:
        raise RuntimeError(f"{name}() was called inside the forward pass of a converted model")
    if memory is not None and example_inputs is None:
        raise TypeError(
            f"memory needs an example, on which peaks are measured: {name}(model, x, "
            f"memory={memory!r})"
        )
    return None if memory is None else Budget.of(memory)


@contextmanager
def _measuring(model: nn.Module, example: Example, finished: Callable[[], object]) -> Iterator[Run]:
    """Provide runs of the unconverted model on an example, and restore the model's state."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("an example needs autograd: call convert outside inference mode")
    with (
        _EXAMPLE_LOCK,
        reverted(model),
        torch.compiler.set_stance("force_eager"),
        State(model, [tensor.device for tensor in example.tensors()]) as state,
    ):
        yield Run(model, example, state, finished)


def _measure(
    model: nn.Module,
    example: Example,
    conversion: Conversion,
    needs_gradients: bool = True,
    finished: Callable[[], object] = _nothing,
) -> None:
    """Run the original and the converted model, compare gradients, and fill in the report.

    Args:
        model: The model; it is restored.
        example: The arguments that it is called with.
        conversion: Its settings are used, and its report is filled in.
        needs_gradients: Whether an error in the original model's backward is raised.
        finished: Called after each pass.
    """
    report = Report()
    with _measuring(model, example, finished) as run:
        before, original = run.saved_bytes(), None
        try:
            original = run.gradients()
            repeated, report.flops = run.gradients_and_flops()
        except Exception as error:
            if needs_gradients:
                raise
            report.remarks.append(f"peaks are unknown, as backward raises: {_summary(error)}")
        peak_before = None if original is None else run.peak_bytes()
        attach(model, Conversion(conversion.settings, report))
        try:
            if original is not None:
                run.gradients()  # see 6 of NOTE [Weights are proved] in `weights.py`
            converted = None if original is None else run.gradients()
            after = run.saved_bytes()
            peak_after = None if original is None else run.peak_bytes()
        finally:
            detach(model)
        if original is not None and converted is not None:
            compare(original, repeated, converted)
    if original is not None:
        report.gradient_bytes = original.bytes
        report.remarks += original.remarks
        if peak_before is None or peak_after is None:
            report.remarks.append("peaks are unknown, as PyTorch's profiler is already running")
    report.saved_bytes_before, report.saved_bytes_after = before, after
    report.peak_bytes_before, report.peak_bytes_after = peak_before, peak_after
    vars(conversion.report).update(vars(report))  # the caller may have this object


def _summary(error: Exception) -> str:
    """Return the first line of an error."""
    first, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {first}"
