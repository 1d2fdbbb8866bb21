"""`convert`, `analyze`, `revert` and `reverted`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..recompute.engine import MAX_OPS, Settings, running_engine
from .example import Example, Inputs, warning_of_written_parameters
from .report import Report
from .verify import Run, Verification, compare
from .wiring import Conversion, attach, conversion_of, detach, detached

# An example's runs set what all threads share: the random state, hooks on every module.
_ONE_AT_A_TIME = threading.RLock()


def convert(
    model: nn.Module,
    example_inputs: Inputs | None = None,
    *,
    max_ops: int = MAX_OPS,
    **removed: Any,
) -> Report:
    """Let a model save less for backward, from now on.

    Tensors that are cheap to compute again from tensors that are saved anyway are not saved: the
    outputs of norms, activations, sums, products and concatenations. Gradients are PyTorch's.
    Parameters, buffers, `state_dict` and the classes of the model's parts stay as they are; the
    model itself becomes an instance of a subclass of its class.

    Args:
        model: Any module. Convert it before `torch.compile`, DDP or FSDP wrap it.
        example_inputs: What the model is called with: a tensor, a tuple of arguments or a dict of
            keyword arguments. With it the model runs forward and backward a few times, under the
            caller's autocast; gradients are compared, memory is measured, and everything is put
            back as it was. Without it nothing runs.
        max_ops: The most operations that may be spent on a tensor in backward. More save more and
            take longer.
        **removed: Arguments that earlier versions took; they raise TypeError.

    Returns:
        What is saved before and after. Without an example it is filled in by the first forward
        pass with gradients. Of a model that is converted already, its report.

    Raises:
        VerificationError: If gradients on the example differ; the model is then as it was.
        TypeError: If `model` is not a module, for arguments of earlier versions, and for an example
            that is none of these.
        ValueError: If `max_ops` is not a positive number, for a compiled or scripted model, and for
            one with uninitialized parameters.
        RuntimeError: Inside of a forward pass of a converted model, and in inference mode with an
            example.
        Whatever the model raises on the example, unchanged; the model is then as it was.
    """
    _check_arguments("convert", model, max_ops, removed)
    present = conversion_of(model)
    if present is not None and present.settings.max_ops != max_ops:
        warnings.warn(
            f"the model is converted already, with max_ops={present.settings.max_ops}, and stays "
            "so: call inplace_ops.revert(model) before",
            stacklevel=2,
        )
    conversion = present or Conversion(Settings(max_ops), Report())
    if example_inputs is not None:
        _measure(model, Example(example_inputs), conversion)
    if present is None:
        attach(model, conversion)
    return conversion.report


def analyze(
    model: nn.Module, example_inputs: Inputs, *, max_ops: int = MAX_OPS, **removed: Any
) -> Report:
    """Report what `convert` would do, and change nothing.

    Takes the arguments of `convert`, and raises what it raises. Where the model's own backward
    fails, what is saved is reported, and the peaks are None.
    """
    _check_arguments("analyze", model, max_ops, removed)
    conversion = Conversion(Settings(max_ops), Report())
    _measure(model, Example(example_inputs), conversion, needs_gradients=False)
    return conversion.report


def revert(model: nn.Module) -> None:
    """Undo `convert`, in the model and in all of its parts. Works on copies too."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    detach(model)


@contextmanager
def reverted(model: nn.Module) -> Iterator[None]:
    """Let the model be what it was before `convert`, within a `with` block."""
    with detached(model):
        yield


_REMOVED = {
    "optimize": "max_ops chooses how much is computed again",
    "bits": 'use the modules of inplace_ops, as inplace_ops.SiLU(save="output", bits=1)',
    "verify": "without example_inputs nothing is run or compared",
}


def _check_arguments(name: str, model: Any, max_ops: Any, removed: dict[str, Any]) -> None:
    for argument in removed:
        hint = f": {_REMOVED[argument]}" if argument in _REMOVED else ""
        was = "no longer takes" if argument in _REMOVED else "got an unexpected keyword argument"
        raise TypeError(f"{name}() {was} {argument!r}{hint}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(max_ops, bool) or not isinstance(max_ops, int) or max_ops < 1:
        raise ValueError(f"max_ops must be a positive integer, got {max_ops!r}")
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(
            "the model is compiled: convert it before torch.compile, or convert what "
            "torch.compile was given (the compiler recomputes by itself what it compiles)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("the model is scripted: convert it before torch.jit.script or trace")
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise ValueError("the model has uninitialized parameters: call it once before")
    if running_engine() is not None:
        raise RuntimeError(f"{name}() was called inside of the forward pass of a converted model")


def _measure(
    model: nn.Module, example: Example, conversion: Conversion, needs_gradients: bool = True
) -> None:
    """Fill the report in from runs of the original and of the converted model, and compare them."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("an example needs autograd: call convert outside of inference mode")
    report, run = Report(), Run(model, example)
    with (
        _ONE_AT_A_TIME,
        reverted(model),
        torch.compiler.set_stance("force_eager"),
        warning_of_written_parameters(model),
    ):
        before, original = run.saved_bytes(), None
        try:
            original, again = run.gradients(), run.gradients()
        except Exception:
            if needs_gradients:
                raise
        peak_before = None if original is None else run.peak_bytes()
        verification = Verification(model)
        attach(model, Conversion(conversion.settings, report, verification))
        try:
            converted = None if original is None else run.gradients()
            after = run.saved_bytes()
            peak_after = None if original is None else run.peak_bytes()
        finally:
            detach(model)
        if original is not None and converted is not None:
            compare(original, again, converted, verification.differences)
    report.saved_bytes_before, report.saved_bytes_after = before, after
    report.peak_bytes_before, report.peak_bytes_after = peak_before, peak_after
    vars(conversion.report).update(vars(report))  # the caller may have it already
