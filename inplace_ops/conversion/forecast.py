"""What a recorded run would be with the activations put in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator

from .recording import Call, Event, Recording, SavedTensor
from .slots import Slot


class Forecast:
    """A recorded run as it would be with the present decisions: all slots but `refused` in place.

    `refused` is the plan's own, and grows while it decides.
    """

    def __init__(self, recording: Recording, refused: Container[Slot]) -> None:
        self.recording = recording
        self.refused = refused
        self.calls: dict[Slot, list[Call]] = {}
        self._links: defaultdict[int, list[Call]] = defaultdict(list)
        for call in recording.calls:
            self.calls.setdefault(call.slot, []).append(call)
            self._links[call.input].append(call)
            self._links[call.output].append(call)

    def calls_of(self, slot: Slot) -> list[Call]:
        """The calls of the activation in `slot`, in time."""
        return self.calls.get(slot, [])

    def is_in_place(self, call: Call) -> bool:
        """Whether the call overwrites its input: put in place, or left as a module that does."""
        return call.slot not in self.refused or call.slot.inplace

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
        """Whether what the recorded, out-of-place run saved is saved with the present decisions."""
        if saved.call is None:
            return True
        slot = saved.call.slot
        if saved.call is seen_by or slot not in self.refused:
            return False
        # What PyTorch's in-place form saves may be a clone.
        return not (slot.inplace and slot.recognised.activation.torch_saves == "input")
