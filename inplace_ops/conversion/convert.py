"""`convert`, `analyze`, `revert` and `reverted`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..activations import check_bits
from ..memory import model_bytes
from .calls import InPlaceCall
from .conversion import Conversion, conversion_of, remove_hooks
from .plan import Decision, Plan
from .progress import Progress
from .recognise import recognise
from .recorder import record
from .recording import Recording
from .report import Report
from .run import Example, preserved
from .sites import other_activations, sites_of
from .slots import Slot, find_slots, hooks_of, keep_hooks, original_of, put_back
from .verify import RUNS as RUNS_OF_VERIFY
from .verify import verify as verify_conversion

# The runs set what all threads share: hooks on every module, the random state.
_ONE_AT_A_TIME = threading.RLock()


def convert(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    bits: int | None = None,
    optimize: str = "memory",
    verify: bool = True,
) -> Report:
    """Put in place those of the model's activations for which that is safe.

    The model runs on the example, its activations out of place, in the mode it is in and in the
    other, train or eval, under the caller's autocast. An activation is put in place if in neither
    run anything else needed its input: see `docs/conversion.md` for the rules. The decisions hold
    for runs that take the same way through the model. Parameters, buffers, gradients, the random
    state and the example are left as they were, and `state_dict` as it is. Convert before DDP
    or FSDP wrap the model; a compiled one runs uncompiled here. A model converted before is decided
    anew.

    Args:
        model: Any module, on the CPU or a CUDA device.
        example_inputs: What the model is called with: a tensor, a tuple of arguments or a dict of
            keyword arguments. Small sizes will do.
        bits: Bits per element that SiLU, GELU, Hardswish and Mish keep with `save="output"`, see
            `inplace_ops.silu_`.
        optimize: "memory": what keeps the fewest bytes. "speed": the same at each place, but the
            mask wherever there is one, and no output is formed again. "exact": nothing whose
            gradient is not exact: after a norm all; elsewhere of the four `save="output"` in
            bfloat16 and float16, unless with one bit.
        verify: Whether to run the model before and after, with backward, and compare.

    Returns:
        The decision for each place, with its reason.

    Raises:
        VerificationError: If the converted model differs from the original, or nothing could be
            compared; the original is then back.
        TypeError, ValueError: For arguments that are none of these, for a model that is itself an
            activation or has uninitialized parameters.
        RuntimeError: In inference mode.
        Whatever the model raises on the example, unchanged.
    """
    with _ONE_AT_A_TIME:
        runs = RUNS_OF_VERIFY if verify else 0
        with reverted(model):  # for an error of the model's
            analysis = _Analysis("convert", model, example_inputs, bits, optimize, runs)
        revert(model)
        conversion = analysis.conversion()
        if verify:
            verify_conversion(model, analysis.example, conversion, analysis.progress)
        report = analysis.report(conversion)
        conversion.put()
        return report


def analyze(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    bits: int | None = None,
    optimize: str = "memory",
) -> Report:
    """Report what `convert` would do, and why, and change nothing.

    Takes the arguments of `convert`, and raises what it raises.
    """
    with _ONE_AT_A_TIME, reverted(model):
        analysis = _Analysis("analyze", model, example_inputs, bits, optimize, 0)
        return analysis.report(analysis.conversion())


def revert(model: nn.Module) -> None:
    """Put back the modules that `convert` replaced: the very same objects, in the present mode.

    Its hooks go.

    Works on copies and on unpickled models too, which have their own copies of those modules.
    """
    for parent in model.modules():
        for key, child in parent._modules.items():
            original = original_of(child) if child is not None else None
            if child is not None and original is not None:
                put_back(original, child)
                parent._modules[key] = original
    for module in model.modules():
        remove_hooks(module)


@contextmanager
def reverted(model: nn.Module) -> Iterator[None]:
    """Let the model be what it was before `convert`, within a `with` block; then as it was again.

    For what goes by PyTorch's own module types, or looks at what modules read and return: Captum,
    `torch.ao.quantization`, tools that count operations. What is put in the model's slots within
    the block stays.
    """
    if not isinstance(model, nn.Module):
        yield  # whoever is given it says so
        return
    conversion = conversion_of(model)
    hooks = {slot.original: hooks_of(slot.original) for slot in conversion.modules}
    revert(model)
    with_those_set_since = {original: hooks_of(original) for original in hooks}
    try:
        yield
    finally:
        for original, before in hooks.items():
            keep_hooks(original, before, with_those_set_since[original])
        if not conversion_of(model).modules:  # else it was converted meanwhile
            still_there = {
                slot: module
                for slot, module in conversion.modules.items()
                if slot.parent._modules.get(slot.key) is slot.original
            }
            for slot, module in still_there.items():
                module.training = slot.original.training
            conversion._replace(modules=still_there).put()


def _other_modes(model: nn.Module) -> list[bool]:
    """What all modules' `training` may be that it is not now."""
    modes = {module.training for module in model.modules()}
    return [mode for mode in (True, False) if modes != {mode}]


def _record_in_mode(
    mode: bool, model: nn.Module, slots: list[Slot], example: Example
) -> Recording | None:
    """The run with all modules in train or in eval mode; None if it fails."""
    with preserved(model, example), torch.enable_grad():
        for module in model.modules():
            module.training = mode  # a train() of the model's own may write to parameters
        inputs = example.copy()
        # Anything, as the model need not run in this mode: BatchNorm raises ValueError for one
        # value, a loss TypeError without its targets. Where `record` itself is wrong, the first
        # run, in which nothing is suppressed, shows it.
        with suppress(Exception):
            return record(model, slots, inputs)
    return None


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    recognised = recognise(model)
    if recognised is not None:
        raise ValueError(
            f"the model is itself a {recognised.activation.name}: convert the module that holds it"
        )
    if any(map(is_lazy, model.parameters())):
        raise ValueError("the model has uninitialized parameters: call it once before")


class _Analysis:
    """The decisions for a model, which stays as it is; more runs may follow."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
        bits: int | None,
        optimize: str,
        more_runs: int,
    ) -> None:
        check_bits("convert", "output", bits)
        if optimize not in ("memory", "speed", "exact"):
            raise ValueError(f'optimize must be "memory", "speed" or "exact", got {optimize!r}')
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "convert and analyze need autograd: call them outside of inference mode"
            )
        _check_model(model)
        self.model, self.bits = model, bits
        self.example = Example(example_inputs)
        self.slots, modes = find_slots(model), _other_modes(model)
        self.progress = Progress(name, 1 + len(modes) + more_runs + 2)
        self.progress.next("recorded")
        with preserved(model, self.example), torch.enable_grad():
            try:
                self.recording = record(model, self.slots, self.example.copy())
            except TypeError as error:
                self.example.explain(error, model)
                raise
        in_other_modes = []
        for mode in modes:
            self.progress.next(f"recorded, in {'train' if mode else 'eval'} mode")
            in_other_modes.append(_record_in_mode(mode, model, self.slots, self.example))
        runs = [recording for recording in in_other_modes if recording is not None]
        self.plan = Plan(self.slots, self.recording, runs, bits, optimize)

    def conversion(self) -> Conversion:
        """What is to be put into the model."""
        modules: dict[Slot, nn.Module] = {}
        for slot in self.slots:
            in_place = [d for d in self.plan.decisions if d.unit.place is slot and d.save]
            calls = {
                d.unit.site: InPlaceCall(self._in_place(slot, d), d.calls[0].line)
                for d in in_place
                if d.unit.site is not None
            }
            if calls:
                modules[slot] = slot.converted_in(calls)
            elif in_place:
                modules[slot] = self._in_place(slot, in_place[0])
        return Conversion(modules, {reader for drop in self.plan.drops for reader in drop.readers})

    def _in_place(self, slot: Slot, decision: Decision) -> nn.Module:
        assert decision.save is not None
        assert decision.fallback is not None
        return slot.converted(decision.save, decision.fallback, self.bits)

    def report(self, conversion: Conversion) -> Report:
        """What is decided, with the bytes that the whole model holds before and after."""
        self.progress.next("for the bytes it holds")
        before = _model_bytes(self.model, self.example, None)
        self.progress.next("for the bytes it holds, converted")
        after = _model_bytes(self.model, self.example, conversion)
        return Report(
            sites_of(self.plan, self.slots, self.recording),
            [drop.output for drop in self.plan.drops],
            before,
            after,
            other_activations(self.recording),
        )


def _model_bytes(model: nn.Module, example: Example, conversion: Conversion | None) -> int | None:
    """What the whole model holds for backward when forward has returned, converted or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run that was recorded has given them
        with preserved(model, example), torch.enable_grad(), suppress(Exception):
            revert(model)  # an earlier conversion, which `preserved` puts in again
            if conversion is not None:
                conversion.put()
            inputs = example.copy()
            return model_bytes(model, lambda: inputs.call(model), inputs.tensors())
    return None  # it fails: verify is what says so
