"""`convert`, `analyze` and `revert`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..activations import check_bits
from ..memory import model_bytes
from .conversion import Conversion, remove_hooks
from .plan import Plan
from .recognise import recognise
from .recorder import record
from .recording import Recording
from .report import DroppedOutput, Report, Site
from .run import Example, preserved
from .slots import Slot, find_slots, original_of
from .verify import verify as verify_conversion


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
    example = Example(example_inputs)
    conversion, sites, dropped = _decide(model, example, bits, optimize)
    revert(model)
    if verify:
        verify_conversion(model, example, conversion)
    report = Report(sites, dropped, *_model_bytes(model, example, conversion))
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
    example = Example(example_inputs)
    conversion, sites, dropped = _decide(model, example, bits, optimize)
    return Report(sites, dropped, *_model_bytes(model, example, conversion))


def revert(model: nn.Module) -> None:
    """Put back the modules that `convert` replaced: the very same objects, in the present mode.

    Its hooks go.

    Works on copies and on unpickled models too, which have their own copies of those modules.
    """
    for parent in model.modules():
        for key, child in parent._modules.items():
            original = original_of(child) if child is not None else None
            if child is not None and original is not None:
                # What convert shared with it, hooks for example, it has anyway.
                vars(original).update({name: vars(child)[name] for name in vars(nn.Module())})
                parent._modules[key] = original
    for module in model.modules():
        remove_hooks(module)


def _record_other_modes(model: nn.Module, slots: list[Slot], example: Example) -> list[Recording]:
    """The runs with all modules in train mode, and in eval mode, unless they are, or it fails."""
    recordings = []
    for mode in (True, False):
        if all(module.training is mode for module in model.modules()):
            continue
        with preserved(model, example), torch.enable_grad():
            for module in model.modules():
                module.training = mode  # a train() of the model's own may write to parameters
            inputs = example.copy()
            # Anything, as the model need not run in this mode: BatchNorm raises ValueError for one
            # value, a loss TypeError without its targets. Where `record` itself is wrong, the first
            # run, in which nothing is suppressed, shows it.
            with suppress(Exception):
                recordings.append(record(model, slots, inputs))
    return recordings


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


def _decide(
    model: nn.Module, example: Example, bits: int | None, optimize: str
) -> tuple[Conversion, list[Site], list[DroppedOutput]]:
    check_bits("convert", "output", bits)
    if optimize not in ("memory", "speed", "exact"):
        raise ValueError(f'optimize must be "memory", "speed" or "exact", got {optimize!r}')
    if torch.is_inference_mode_enabled():
        raise RuntimeError("convert and analyze need autograd: call them outside of inference mode")
    _check_model(model)
    slots = find_slots(model)
    with preserved(model, example), torch.enable_grad():
        recording = record(model, slots, example.copy())
    plan = Plan(recording, _record_other_modes(model, slots, example), bits, optimize)
    decisions = {slot: plan.decision(slot) for slot in slots}
    drops = plan.drops()
    modules = {
        slot: slot.converted(decision.save, decision.fallback, bits)
        for slot, decision in decisions.items()
        if decision.save is not None and decision.fallback is not None
    }
    conversion = Conversion(modules, {reader for drop in drops for reader in drop.readers})
    sites = [
        Site(
            slot.name,
            slot.recognised.activation.name,
            decision.save is not None,
            decision.reason,
            decision.save,
            decision.bytes_before,
            decision.bytes_after,
        )
        for slot, decision in decisions.items()
    ]
    for function in recording.functions.values():
        held = recording.bytes_of_function(function)
        reason = f"called as a function in {function.line}"
        sites.append(Site(function.name, function.activation, False, reason, None, held, held))
    return conversion, sites, [drop.output for drop in drops]


def _model_bytes(
    model: nn.Module, example: Example, conversion: Conversion
) -> tuple[int | None, int | None]:
    """What the whole model holds for backward when forward has returned, before and after."""

    def measured(conversion: Conversion | None) -> int | None:
        with preserved(model, example), torch.enable_grad(), suppress(Exception):
            revert(model)  # an earlier conversion, which `preserved` puts in again
            if conversion is not None:
                conversion.put()
            inputs = example.copy()
            return model_bytes(model, lambda: inputs.call(model), inputs.tensors())
        return None  # it fails: verify is what says so

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run that was recorded has given them
        return measured(None), measured(conversion)
