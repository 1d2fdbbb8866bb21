"""Which outputs nobody need keep: those that follow from a norm's input, and what keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..readers import can_read_what_is_formed_again
from .forecast import Forecast
from .recording import Call, NormCall, SavedTensor
from .report import DroppedOutput
from .slots import Slot


class Drop(NamedTuple):
    """An output that its readers form again, and the modules that call these."""

    output: DroppedOutput
    readers: tuple[nn.Module, ...]


def dropped_of_call(call: Call, run: Forecast) -> Drop | None:
    """The output of an activation after a norm; None where something else keeps it, or nothing."""
    if not call.after_norm or not call.needs_grad:
        return None
    kind = call.place.recognised.activation.name
    saved = [s for s in run.saved_of(call.output, call) if s.is_held]
    writes = any(run.writes(event) for event in run.events(call.output, call))
    escapes = any(_escapes(s, run) for s in run.aliases(call.output, call))
    return _dropped(call.name, kind, call.output, 0, saved, writes or escapes, run)


def dropped_of_norm(norm: NormCall, run: Forecast) -> Drop | None:
    """The output of a norm without an activation in place behind it."""
    recording = run.recording
    if any(run.is_in_place(call) for call in recording.calls if call.input == norm.output):
        return None
    saved = [s for s in recording.saved[norm.output] if s.is_held]
    writes = any(event.writes for event in recording.events[norm.output] if event.time > norm.time)
    stays = writes or _escapes(norm.output, run) or norm.maps >= recording.nbytes[norm.output]
    return _dropped(norm.name, norm.kind, norm.output, norm.maps, saved, stays, run)


def _escapes(storage: int, run: Forecast) -> bool:
    recording = run.recording
    kept = (recording.owners, recording.returned, recording.handed_out, recording.alive_outputs)
    return any(storage in those for those in kept)


def _dropped(
    name: str,
    kind: str,
    storage: int,
    maps: int,
    saved: Iterable[SavedTensor],
    stays: bool,
    run: Forecast,
) -> Drop | None:
    saved = list(saved)
    if stays or not saved or not all(_can_drop(s, run) for s in saved):
        return None
    readers = tuple(dict.fromkeys(run.recording.saver(s) for s in saved))
    modules = tuple(dict.fromkeys(s.reader for s in saved if s.reader))
    output = DroppedOutput(name, kind, readers, run.recording.nbytes[storage], maps)
    return Drop(output, modules)


def _can_drop(saved: SavedTensor, run: Forecast) -> bool:
    """Whether what saved the tensor is an operation, in a module, that may be given another."""
    operation = run.recording.node_names.get(saved.node, "").rpartition(".")[2]
    is_module = saved.call is not None and isinstance(saved.call.place, Slot)
    return (
        not is_module
        and can_read_what_is_formed_again(operation)
        and saved.reader is not None
        and not isinstance(saved.reader, torch.jit.ScriptModule)
    )
