"""What a recorded run would be with the activations put in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from .frames import CallSite
from .recognise import Recognised
from .recording import Call, Event, Line, Recording, SavedTensor
from .slots import Slot


@dataclass(frozen=True)
class Unit:
    """The calls that are decided together: those of a place, or of a slot those at one site."""

    place: Slot | Line
    site: CallSite | None = None

    @property
    def recognised(self) -> Recognised:
        """The activation."""
        return self.place.recognised


@dataclass
class Decisions:
    """What is refused so far, and why, and which slots are decided call by call."""

    refused: dict[Unit, str] = field(default_factory=dict)
    split: set[Slot | Line] = field(default_factory=set)

    def unit_of(self, call: Call) -> Unit:
        """What the call is decided with."""
        return Unit(call.place, call.site if call.place in self.split else None)


class Forecast:
    """A recorded run as it would be with the present decisions: all units but the refused in place.

    The decisions are the plan's own, and grow while it decides.
    """

    def __init__(self, recording: Recording, decisions: Decisions) -> None:
        self.recording = recording
        self.decisions = decisions
        self.calls: dict[Slot | Line, list[Call]] = {}
        self._links: defaultdict[int, list[Call]] = defaultdict(list)
        for call in recording.calls:
            self.calls.setdefault(call.place, []).append(call)
            self._links[call.input].append(call)
            self._links[call.output].append(call)

    def calls_of(self, unit: Unit) -> list[Call]:
        """The calls that are decided together, in time."""
        calls = self.calls.get(unit.place, [])
        return [call for call in calls if self.decisions.unit_of(call) == unit]

    def is_refused(self, call: Call) -> bool:
        """Whether the call stays as it is."""
        return self.decisions.unit_of(call) in self.decisions.refused

    def is_in_place(self, call: Call) -> bool:
        """Whether the call overwrites its input: put in place, or left as one that does."""
        return not self.is_refused(call) or call.place.inplace

    def aliases(self, storage: int, without: Call) -> set[int]:
        """The storages that are one with `storage` where all calls but `without` are in place."""
        found, pending = set(), {storage}
        while pending:
            current = pending.pop()
            found.add(current)
            for call in self._links[current]:
                if call is not without and self.is_in_place(call):
                    pending |= {call.input, call.output} - found
        return found

    def events(self, storage: int, call: Call) -> list[Event]:
        """What others do to `storage` after `call`, in time."""
        found = [
            event
            for alias in self.aliases(storage, call)
            for event in self.recording.events[alias]
            if event.time > call.time
        ]
        return sorted(found, key=lambda event: event.time)

    def writes(self, event: Event) -> bool:
        """Whether the event writes."""
        return event.writes or (event.call is not None and self.is_in_place(event.call))

    def saved_of(self, storage: int, call: Call) -> Iterator[SavedTensor]:
        """What others save of `storage` for backward, at any time."""
        for alias in self.aliases(storage, call):
            for saved in self.recording.saved[alias]:
                if self._is_saved(saved, call):
                    yield saved

    def keeper(self, call: Call) -> str | None:
        """What else holds the call's output for backward."""
        for saved in self.saved_of(call.output, call):
            if saved.time > call.time and saved.is_held:
                return self.recording.saver(saved)
        return None

    def _is_saved(self, saved: SavedTensor, seen_by: Call) -> bool:
        """Whether what the recorded run saved is saved with the present decisions."""
        call = saved.call
        if call is None:
            return True
        if call is seen_by or not self.is_refused(call):
            return False
        # It ran out of place; what PyTorch's in-place form saves may be a clone.
        place = call.place
        is_clone = place.inplace and place.recognised.activation.torch_saves == "input"
        return isinstance(place, Line) or not is_clone
