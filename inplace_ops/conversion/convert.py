"""`convert`, `analyze`, `revert` and `reverted`."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..activations import check_bits
from ..memory import model_bytes
from .calls import InPlaceCall
from .conversion import Conversion, conversion_of, remove_hooks
from .plan import Plan
from .progress import Progress
from .recognise import recognise
from .recorder import record
from .recording import Recording
from .report import Report
from .run import Example, preserved
from .sites import other_activations, sites_of
from .slots import Slot, find_slots, original_of, put_back
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
        check = verify_conversion if verify else None
        conversion, report = _analyze("convert", model, example_inputs, bits, optimize, check)
        revert(model)
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
    with _ONE_AT_A_TIME:
        return _analyze("analyze", model, example_inputs, bits, optimize, None)[1]


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
    conversion = conversion_of(model)
    revert(model)
    try:
        yield
    finally:
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


def _analyze(
    name: str,
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
    bits: int | None,
    optimize: str,
    verify: Callable[[nn.Module, Example, Conversion, Progress], None] | None,
) -> tuple[Conversion, Report]:
    """What is to be put into the model, and the report. The model is as it was."""
    check_bits("convert", "output", bits)
    if optimize not in ("memory", "speed", "exact"):
        raise ValueError(f'optimize must be "memory", "speed" or "exact", got {optimize!r}')
    if torch.is_inference_mode_enabled():
        raise RuntimeError("convert and analyze need autograd: call them outside of inference mode")
    _check_model(model)
    example = Example(example_inputs)
    example.check(model)
    slots, modes = find_slots(model), _other_modes(model)
    runs = 1 + len(modes) + (RUNS_OF_VERIFY if verify else 0) + 2
    progress = Progress(name, runs)
    progress.next("recorded")
    with preserved(model, example), torch.enable_grad():
        recording = record(model, slots, example.copy())
    in_other_modes = []
    for mode in modes:
        progress.next(f"recorded, in {'train' if mode else 'eval'} mode")
        in_other_modes.append(_record_in_mode(mode, model, slots, example))
    plan = Plan(slots, recording, [r for r in in_other_modes if r], bits, optimize)
    conversion = _conversion(plan, slots, bits)
    if verify is not None:
        revert(model)
        verify(model, example, conversion, progress)
    progress.next("for the bytes it holds")
    before = _model_bytes(model, example, None)
    progress.next("for the bytes it holds, converted")
    after = _model_bytes(model, example, conversion)
    sites, others = sites_of(plan, slots, recording), other_activations(recording)
    return conversion, Report(sites, [drop.output for drop in plan.drops], before, after, others)


def _conversion(plan: Plan, slots: Sequence[Slot], bits: int | None) -> Conversion:
    modules: dict[Slot, nn.Module] = {}
    callers: dict[nn.Module, list[nn.Module]] = {}
    for slot in slots:
        in_place = {
            decision.unit.index: (decision, slot.converted(decision.save, decision.fallback, bits))
            for decision in plan.decisions
            if decision.unit.place is slot and decision.save and decision.fallback
        }
        calls = {
            index: InPlaceCall(module, decision.producers)
            for index, (decision, module) in in_place.items()
            if index is not None
        }
        if calls:
            caller = next(d.caller for d, _ in in_place.values())
            modules[slot] = slot.converted_in(calls)
            callers.setdefault(caller, []).append(modules[slot])
        elif in_place:
            modules[slot] = in_place[None][1]
    return Conversion(modules, callers, {reader for drop in plan.drops for reader in drop.readers})


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
