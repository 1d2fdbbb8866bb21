"""When an activation may overwrite its input, and what it then keeps for backward.

`SAFETY` and `OUTPUT_SAFETY` are the rules, one entry each. A rule is given one call of an
activation and the plan so far, and returns why it does not hold, or None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from ..functional import default_bits
from .sites import Place
from .trace import Call, Event, Save, Trace

# The fewest bits from which silu's input, and so its gradient, comes back exactly.
_EXACT_BITS = {torch.bfloat16: 5, torch.float16: 7}


@dataclass(frozen=True)
class Decision:
    """What becomes of a place: what it saves where it is put in place, else None."""

    save: str | None
    reason: str
    bytes_before: int
    bytes_after: int


class Plan:
    """The decisions for all places of a traced model.

    Runs in another mode, train or eval, refuse what is unsafe there; nothing else counts of them.
    """

    def __init__(
        self, trace: Trace, bits: int | None, optimize: str, other_modes: Sequence[Trace] = ()
    ) -> None:
        self.trace = trace
        self.bits = bits
        self.optimize = optimize
        self.calls: defaultdict[Place, list[Call]] = defaultdict(list)
        self.links: defaultdict[int, list[Call]] = defaultdict(list)
        for call in trace.calls:
            self.calls[call.place].append(call)
            self.links[call.input].append(call)
            self.links[call.output].append(call)
        self.refused = dict(trace.not_followed)
        self.others = [Plan(other_mode, bits, optimize) for other_mode in other_modes]
        for other in self.others:
            other.refused = self.refused  # one set of decisions for all
            for place in other.calls:
                if place not in self.calls:
                    self.refused.setdefault(place, "not called with this input")
            for place, reason in other.trace.not_followed.items():
                self.refused.setdefault(place, reason)
        self._refuse_until_all_hold()

    def _refuse_until_all_hold(self) -> None:
        """Refuse places until every rule holds for all others.

        A place that is refused runs as the model's own module again, which may keep its input or
        output: the rest is looked at once more.
        """
        while True:
            before = len(self.refused)
            for place in self.calls:
                if place not in self.refused:
                    reason = self._objection(place)
                    if reason is not None:
                        self.refused[place] = reason
            if len(self.refused) == before:
                return

    def _objection(self, place: Place) -> str | None:
        unsafe = self._unsafe(place)
        if unsafe is not None:
            return unsafe
        for other in self.others:
            unsafe = other._unsafe(place)
            if unsafe is not None:
                return f"{unsafe} in the other mode, train or eval"
        save, reason = self._choice(place)
        if save is None:
            return reason
        before, after = self._before(place), self._after(place, save)
        if self.optimize != "speed" and after > before:
            return f"would keep {after} bytes instead of {before}"
        return None

    def _unsafe(self, place: Place) -> str | None:
        for call in self.calls[place]:
            for rule in SAFETY:
                reason = rule(call, self)
                if reason is not None:
                    return reason
        return None

    def decision(self, place: Place) -> Decision:
        """What becomes of `place`."""
        if place not in self.calls and place not in self.refused:
            return Decision(None, "not called with this input", 0, 0)
        if place in self.refused:
            held = sum(self._held_alone(call=call) for call in self.calls[place])
            return Decision(None, self.refused[place], held, held)
        save, reason = self._choice(place)
        assert save is not None
        return Decision(save, reason, self._before(place), self._after(place, save))

    def bytes_of_nodes(self, nodes: set[int]) -> int:
        """Bytes that these autograd nodes hold and no others."""
        return self._held_alone(nodes=nodes)

    def _held_alone(self, nodes: Set[int] = frozenset(), call: Call | None = None) -> int:
        """Bytes that only `call` holds for backward, or only these nodes outside of any call."""
        total = 0
        for storage, saves in self.trace.saves.items():
            own = {
                save.call is call and (call is not None or save.node in nodes)
                for save in saves
                if save.is_held
            }
            if own == {True} and storage not in self.trace.owners:
                total += self.trace.nbytes[storage]
        return total

    # What a place keeps.

    def _choice(self, place: Place) -> tuple[str | None, str]:
        """What `place` keeps in place, and why; None where only a lossy code would save memory."""
        calls = self.calls[place]
        saves = list(place.activation.saves)
        objection = next(
            (
                reason
                for plan in (self, *self.others)
                for call in plan.calls[place]
                for rule in OUTPUT_SAFETY
                if (reason := rule(call, plan))
            ),
            None,
        )
        if objection is not None and "output" in saves:
            saves.remove("output")
        if self.optimize == "exact" and place.activation.is_lossy:
            saves = [save for save in saves if all(self._is_exact(c, save) for c in calls)]
            if not saves:
                return None, "only a lossy code would save memory here"
        if self.optimize == "speed" and not place.activation.is_lossy:
            return "mask", "the mask is the quickest"
        keeper = next((k for c in calls if (k := self._keeper(c))), None)
        # Where a frozen model needs no gradient all cost nothing: take what would once it does.
        save = min(
            saves, key=lambda s: (self._after(place, s), (s == "output") is not bool(keeper))
        )
        if save == "output":
            return save, f"output is kept by `{keeper}` anyway" if keeper else "costs least"
        return save, objection or "nothing else keeps the output"

    def _is_exact(self, call: Call, save: str) -> bool:
        bits = self._bits(call, save)
        return save == "output" and bits >= _EXACT_BITS.get(call.dtype, 9)

    def _bits(self, call: Call, save: str) -> int:
        if not call.place.activation.is_lossy:
            return 1 if save == "mask" else 0
        return (self.bits if save == "output" else None) or default_bits(call.dtype, save)

    def _keeper(self, call: Call) -> str | None:
        """What else holds the call's output for backward."""
        for storage in self.aliases(call.output, call):
            for save in self.trace.saves[storage]:
                if save.time > call.time and save.is_held and self._happens(save, call):
                    return self.trace.saver(save)
        return None

    def _before(self, place: Place) -> int:
        total = 0
        for call in self.calls[place]:
            # PyTorch's own fails where the output that it keeps is written to.
            shares_output = (
                not place.activation.needs_input
                and self._keeper(call) is not None
                and not any(rule(call, self) for rule in OUTPUT_SAFETY)
            )
            if call.needs_grad and not shares_output:
                total += call.elements * call.dtype.itemsize
        return total

    def _after(self, place: Place, save: str) -> int:
        total = 0
        for call in self.calls[place]:
            if not call.needs_grad:
                continue
            total += self._bits(call, save) * ((call.elements + 7) // 8)
            if self._keeper(call) is not None:
                # What keeps the output then keeps the input's whole memory.
                total += self.trace.nbytes[call.input] - self.trace.nbytes[call.output]
            elif save == "output":
                total += self.trace.nbytes[call.input]
        return total

    # What the rules ask.

    def is_in_place(self, call: Call) -> bool:
        """Whether the call overwrites its input: put in place, or left as a module that does."""
        return call.place not in self.refused or call.place.inplace

    def aliases(self, storage: int, without: Call) -> set[int]:
        """The storages that are one with `storage` where all calls but `without` are in place."""
        found, pending = set(), {storage}
        while pending:
            current = pending.pop()
            found.add(current)
            for call in self.links[current]:
                if call is not without and self.is_in_place(call):
                    pending |= {call.input, call.output} - found
        return found

    def events(self, storage: int, call: Call) -> list[Event]:
        """What others do to `storage` after `call`, in time."""
        found = [
            event
            for alias in self.aliases(storage, call)
            for event in self.trace.events[alias]
            if event.time > call.time
        ]
        return sorted(found, key=lambda event: event.time)

    def writes(self, event: Event) -> bool:
        """Whether the event writes."""
        return event.writes or (event.call is not None and self.is_in_place(event.call))

    def saves_of(self, storage: int, call: Call) -> Iterator[Save]:
        """What others save of `storage` for backward, at any time."""
        for alias in self.aliases(storage, call):
            yield from (s for s in self.trace.saves[alias] if self._happens(s, call))

    def _happens(self, save: Save, seen_by: Call) -> bool:
        """Whether what the traced, out-of-place run saved is saved with the decisions taken."""
        if save.call is None:
            return True
        if save.call is seen_by or save.call.place not in self.refused:
            return False
        # In place PyTorch's SiLU saves a clone.
        return not (save.call.place.inplace and save.call.place.activation.is_lossy)


Rule = Callable[[Call, Plan], "str | None"]


def has_a_kernel(call: Call, plan: Plan) -> str | None:
    """The ops take the input's device and dtype."""
    return None if call.has_kernel else f"no kernel for {call.dtype} on {call.device.type}"


def does_not_detach(call: Call, plan: Plan) -> str | None:
    """In place, the output would still be the input, which requires grad."""
    return "input requires grad and is taken under no_grad" if call.detaches else None


def is_no_leaf(call: Call, plan: Plan) -> str | None:
    """Autograd refuses to modify a leaf that requires grad."""
    return "input is a leaf that requires grad" if call.needs_grad and call.is_leaf else None


def is_no_refused_view(call: Call, plan: Plan) -> str | None:
    """Autograd refuses to modify some views."""
    return f"input is {call.refused_view}" if call.needs_grad and call.refused_view else None


def does_not_overlap(call: Call, plan: Plan) -> str | None:
    """Elements that share memory would be overwritten twice."""
    return "input's elements share memory" if call.overlaps else None


def keeps_its_layout(call: Call, plan: Plan) -> str | None:
    """What follows, a `view` for example, may need the dense output that PyTorch makes."""
    if call.keeps_layout or call.overlaps:
        return None
    return "input is a slice, and the output would be one too"


def is_not_saved(call: Call, plan: Plan) -> str | None:
    """Backward needs the values that others saved before."""
    for save in plan.saves_of(call.input, call):
        if save.time < call.time:
            return f"input is saved for backward by `{plan.trace.saver(save)}`"
    return None


def is_not_read_again(call: Call, plan: Plan) -> str | None:
    """A later reader would read the output."""
    for event in plan.events(call.input, call):
        return f"input is read again by `{event.name}`"
    for save in plan.saves_of(call.input, call):
        if save.time > call.time:
            return f"input is saved for backward by `{plan.trace.saver(save)}`"
    return None


def does_not_escape(call: Call, plan: Plan) -> str | None:
    """What is there after forward may be read by anyone."""
    for storage in plan.aliases(call.input, call):
        if storage in plan.trace.owners:
            return f"input is {plan.trace.owners[storage]}"
        if storage in plan.trace.returned:
            return "input is returned by the model"
        if storage in plan.trace.handed_out:
            return "input's memory is handed out, to NumPy for example"
        if storage in plan.trace.alive:
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


def output_is_not_written(call: Call, plan: Plan) -> str | None:
    """Backward needs the output as it was, where it is what is kept."""
    for event in plan.events(call.output, call):
        if plan.writes(event):
            return f"output is written to by `{event.name}`"
    return None


OUTPUT_SAFETY: list[Rule] = [output_is_not_written]
