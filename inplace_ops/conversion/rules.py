"""When an activation may overwrite its input, and when its output may be what it keeps.

`SAFETY` are the rules for the first, one entry each. A rule is given one call of an activation and
the run with the present decisions, and returns why it does not hold, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from .forecast import Forecast
from .recording import Call
from .tensors import SEVERAL_VIEWS


class Objection(NamedTuple):
    """Why a rule does not hold, and for which call."""

    reason: str
    call: Call


Rule = Callable[[Call, Forecast], "str | None"]


def has_a_kernel(call: Call, run: Forecast) -> str | None:
    """The ops take the input's device and dtype."""
    return None if call.has_kernel else f"no kernel for {call.dtype} on {call.device.type}"


def does_not_detach(call: Call, run: Forecast) -> str | None:
    """In place, the output would still be the input, which requires grad."""
    return "input requires grad and is taken under no_grad" if call.detaches else None


def is_no_leaf(call: Call, run: Forecast) -> str | None:
    """Autograd refuses to modify a leaf that requires grad."""
    return "input is a leaf that requires grad" if call.needs_grad and call.is_leaf else None


def is_no_refused_view(call: Call, run: Forecast) -> str | None:
    """Autograd refuses to modify some views."""
    if not (call.needs_grad and call.refused_view):
        return None
    reason = f"input is {call.refused_view}"
    if call.refused_view == SEVERAL_VIEWS:
        function = f"`inplace_ops.{call.place.recognised.activation.function}`"
        reason += (
            f"; cut by `narrow` or slices, {function} may overwrite one before the rest is read"
        )
    return reason


def does_not_overlap(call: Call, run: Forecast) -> str | None:
    """Elements that share memory would be overwritten twice."""
    return "input's elements share memory" if call.overlaps else None


def keeps_its_layout(call: Call, run: Forecast) -> str | None:
    """What follows, a `view` for example, may need the dense output that PyTorch makes."""
    if call.keeps_layout or call.overlaps:
        return None
    return "input is a slice, and the output would be one too"


def is_not_saved(call: Call, run: Forecast) -> str | None:
    """Backward needs the values that others saved before."""
    for saved in run.saved_of(call.input, call):
        if saved.time < call.time:
            return f"input is saved for backward by `{run.recording.saver(saved)}`"
    return None


def is_not_read_again(call: Call, run: Forecast) -> str | None:
    """A later reader would read the output."""
    for event in run.events(call.input, call):
        return f"input is read again by `{event.name}`"
    for saved in run.saved_of(call.input, call):
        if saved.time > call.time:
            return f"input is saved for backward by `{run.recording.saver(saved)}`"
    return None


def does_not_escape(call: Call, run: Forecast) -> str | None:
    """What is there after forward may be read by anyone."""
    for storage in run.aliases(call.input, call):
        if storage in run.recording.owners:
            return f"input is {run.recording.owners[storage]}"
        if storage in run.recording.returned:
            return "input is returned by the model"
        if storage in run.recording.handed_out:
            return "input's memory is handed out, to NumPy for example"
        if storage in run.recording.alive:
            return "input is kept after forward, by a hook or an attribute"
    return None


SAFETY: list[Rule] = [
    has_a_kernel,
    does_not_detach,
    is_no_leaf,
    is_no_refused_view,
    does_not_overlap,
    keeps_its_layout,
    is_not_saved,
    is_not_read_again,
    does_not_escape,
]


def objection(calls: Iterable[Call], run: Forecast) -> Objection | None:
    """Why one of the calls may not overwrite its input; None where all may."""
    for call in calls:
        # What overwrites it already is meant to.
        for rule in [has_a_kernel] if call.overwrites else SAFETY:
            reason = rule(call, run)
            if reason is not None:
                return Objection(reason, call)
    return None


def output_is_not_written(call: Call, run: Forecast) -> str | None:
    """Backward needs the output as it was, where it is what is kept."""
    for event in run.events(call.output, call):
        if run.writes(event):
            return f"output is written to by `{event.name}`"
    return None
