"""Which activations are put in place, and what each keeps for backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..activations import Save
from . import rules
from .dropping import Drop, dropped_of_call, dropped_of_norm
from .forecast import Decisions, Forecast, Unit
from .recording import Call, Line, Recording
from .slots import Slot


@dataclass(frozen=True)
class Decision:
    """What becomes of the calls of a unit: what they save where they are put in place, else None.

    With "recompute", they save `fallback` where they are called elsewhere than after a norm.
    """

    unit: Unit
    save: Save | None
    fallback: Save | None
    reason: str
    bytes_before: int
    bytes_after: int
    calls: Sequence[Call]


class Plan:
    """The decisions for a recorded model.

    Runs in other modes, train or eval, refuse what is unsafe there; nothing else counts of them.

    Attributes:
        decisions: For the slots, in their order: one each, or one for each site of its calls.
        drops: The outputs that are formed again in backward, in the order in which they arise.
        advice: For the lines of code that call activations, what they could be in place.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        recording: Recording,
        in_other_modes: Sequence[Recording],
        bits: int | None,
        optimize: str,
    ) -> None:
        self.bits = bits
        self.optimize = optimize
        self.so_far = Decisions()
        self.run = Forecast(recording, self.so_far)
        self.other_runs = [Forecast(other, self.so_far) for other in in_other_modes]
        self.runs = [self.run, *self.other_runs]
        self.maps = {norm.output: norm.maps for norm in recording.norms}
        self.refused = self.so_far.refused
        for run in self.runs:
            for place, reason in run.recording.not_followed.items():
                self.refused.setdefault(Unit(place), reason)
            for place in run.calls:
                if place not in self.run.calls:
                    self.refused.setdefault(Unit(place), _NOT_CALLED)
        self.lines = [place for place in self.run.calls if isinstance(place, Line)]
        self.advised = [Unit(line) for line in self.lines if Unit(line) not in self.refused]
        self.refused |= dict.fromkeys(self.advised, "a conversion leaves it as it is")
        self._refuse_until_all_hold([p for p in self.run.calls if isinstance(p, Slot)])
        self.decisions = [self._decision(unit) for slot in slots for unit in self._units(slot)]
        self.drops = self._drops()
        self.advice = self._advise()

    def _units(self, place: Slot | Line) -> list[Unit]:
        """What is decided of the place, in the order of its calls."""
        return list(dict.fromkeys(map(self.so_far.unit_of, self.run.calls.get(place, [])))) or [
            Unit(place)
        ]

    def _decision(self, unit: Unit) -> Decision:
        calls = self.run.calls_of(unit)
        if unit in self.refused or not calls:
            held = self._held(calls)
            reason = self.refused.get(unit, _NOT_CALLED)
            return Decision(unit, None, None, reason, held, held, calls)
        save, fallback, reason = self._choice(unit)
        before, after = self._before(unit), self._after(unit, save, fallback)
        return Decision(unit, save, fallback, reason, before, after, calls)

    def _drops(self) -> list[Drop]:
        if self.optimize == "speed":
            return []
        found: list[tuple[int, Drop | None]] = [
            (call.time, dropped_of_call(call, self.run))
            for decision in self.decisions
            if decision.save == "recompute"
            for call in decision.calls
        ]
        found += [(norm.time, dropped_of_norm(norm, self.run)) for norm in self.run.recording.norms]
        return [drop for _, drop in sorted(found, key=lambda f: f[0]) if drop]

    def _advise(self) -> dict[Line, Decision]:
        """What each line could be in place, if it alone is changed.

        With the model's own activations around it, and with those that are put in.
        """
        decided = dict(self.refused)
        own = {self.so_far.unit_of(call): "" for run in self.runs for call in run.recording.calls}
        advice = {}
        for line in self.lines:
            unit = Unit(line)
            for around in (decided, own | decided):
                self.refused.clear()
                self.refused.update(around)
                if unit in self.advised:
                    del self.refused[unit]
                    reason = self._objection(unit)
                    if reason is not None:
                        self.refused[unit] = reason
                advice[line] = self._decision(unit)
                if advice[line].save is None:
                    break
        self.refused.clear()
        self.refused.update(decided)
        return advice

    def _refuse_until_all_hold(self, places: Iterable[Slot | Line]) -> None:
        """Refuse calls until every rule holds for all others.

        One that is refused runs as the model's own again, which may keep its input or output: the
        rest is looked at once more.
        """
        changed = True
        while changed:
            changed = False
            for place in places:
                for unit in self._units(place):
                    if unit in self.refused:
                        continue
                    reason = self._objection(unit)
                    if reason is not None:
                        changed = True
                        self._refuse(unit, reason)

    def _refuse(self, unit: Unit, reason: str) -> None:
        """Refuse the unit's calls, or, of a slot that is called at several sites, each alone."""
        if unit.site is None and len({call.site for call in self.run.calls[unit.place]}) > 1:
            self.so_far.split.add(unit.place)
            shown = self._units(unit.place)
            for run in self.other_runs:
                for call in run.calls.get(unit.place, []):
                    if self.so_far.unit_of(call) not in shown:
                        self.refused[self.so_far.unit_of(call)] = _NOT_CALLED
            return
        self.refused[unit] = reason
        if unit.site is not None and all(u in self.refused for u in self._units(unit.place)):
            reason = self.refused[self._units(unit.place)[0]]
            self.so_far.split.remove(unit.place)
            self.refused[Unit(unit.place)] = reason

    def _objection(self, unit: Unit) -> str | None:
        for run in self.runs:
            unsafe = rules.objection(run.calls_of(unit), run)
            if unsafe is not None:
                elsewhere = "" if run is self.run else " in the other mode, train or eval"
                return f"{unsafe.reason}{self._which(unsafe.call, run)}{elsewhere}"
        save, fallback, reason = self._choice(unit)
        if save is None:
            return reason
        before, after = self._before(unit), self._after(unit, save, fallback)
        dropped = self._dropped_bytes(unit) if save == "recompute" else 0
        if self.optimize != "speed" and after - dropped > before:
            return f"would keep {after} bytes instead of {before}"
        return None

    def _which(self, call: Call, run: Forecast) -> str:
        """Which of several calls, in words."""
        calls = run.calls[call.place]
        if len(calls) == 1:
            return ""
        shape = " x ".join(map(str, call.shape))
        return f" (call {calls.index(call) + 1} of {len(calls)}, {shape})"

    # What a unit keeps.

    def _choice(self, unit: Unit) -> tuple[Save | None, Save | None, str]:
        """What `unit` keeps in place, elsewhere than after a norm too, and why.

        None where only a lossy code would save memory.
        """
        calls = self.run.calls_of(unit)
        save, reason = self._choice_without_norm(unit)
        has_mask = unit.recognised.activation.has_mask
        if (
            not any(call.after_norm and call.needs_grad for call in calls)
            or (self.optimize == "speed" and has_mask)
            or isinstance(unit.place, Line)  # a function has no fallback
        ):
            return save, save, reason
        if save is None:  # which is right for what is saved elsewhere, but none is
            if not all(call.after_norm for call in calls):
                return None, None, reason
            save = unit.recognised.saves[0]
        after = self._after(unit, "recompute", save) - self._dropped_bytes(unit)
        if after < self._after(unit, save, save):
            return "recompute", save, "follows from the input of the norm before it"
        return save, save, reason

    def _dropped_bytes(self, unit: Unit) -> int:
        """The size of its outputs that are formed again with save="recompute"."""
        if self.optimize == "speed":
            return 0
        drops = (dropped_of_call(call, self.run) for call in self.run.calls_of(unit))
        return sum(d.output.bytes_before - d.output.bytes_after for d in drops if d)

    def _choice_without_norm(self, unit: Unit) -> tuple[Save | None, str]:
        calls = self.run.calls_of(unit)
        saves = unit.recognised.saves
        objection = next(
            (
                reason
                for run in self.runs
                for call in run.calls_of(unit)
                if (reason := rules.output_is_not_written(call, run))
            ),
            None,
        )
        if objection is not None and "output" in saves:
            saves.remove("output")
        if "derivative" in saves and any(call.is_differentiated_twice for call in calls):
            saves.remove("derivative")
            if not saves:
                return None, f"{objection}, and its gradient is differentiated"
        if self.optimize == "exact":
            saves = [save for save in saves if all(self._is_exact(c, save) for c in calls)]
            if not saves:
                return None, "only a lossy code would save memory here"
        if self.optimize == "speed" and unit.recognised.activation.has_mask:
            return "mask", "the mask is the quickest"
        keeper = next((k for c in calls if (k := self.run.keeper(c))), None)
        # Without gradients every mode costs 0 bytes; break the tie as if gradients were needed.
        save = min(
            saves, key=lambda s: (self._after(unit, s, s), (s == "output") is not bool(keeper))
        )
        if save == "output":
            return save, f"output is kept by `{keeper}` anyway" if keeper else "costs least"
        return save, objection or "nothing else keeps the output"

    def _is_exact(self, call: Call, save: Save) -> bool:
        activation = call.place.recognised.activation
        return activation.is_exact(save, call.dtype, self._bits(call, save))

    def _bits(self, call: Call, save: Save) -> int:
        activation = call.place.recognised.activation
        asked = self.bits if save == "output" and not activation.has_mask else None
        return asked or activation.default_bits(save, call.dtype)

    def _held(self, calls: Iterable[Call]) -> int:
        return sum(map(self.run.recording.bytes_of_call, calls))

    def _before(self, unit: Unit) -> int:
        """What PyTorch's activation holds, in place or not, whichever is less; of a line more."""
        calls, recognised = self.run.calls_of(unit), unit.recognised
        if recognised.is_own:
            return self._held(calls)
        total = 0
        for call in calls:
            # PyTorch's own fails where the output that it keeps is written to.
            shares_output = (
                recognised.activation.torch_saves == "output"
                and recognised.allows_output
                and self.run.keeper(call) is not None
                and rules.output_is_not_written(call, self.run) is None
            )
            if call.needs_grad and call.is_held and not shares_output:
                total += call.elements * call.dtype.itemsize
        # Nobody puts a line in place on the way.
        return max(total, self._held(calls)) if isinstance(unit.place, Line) else total

    def _after(self, unit: Unit, save: Save | None, fallback: Save | None) -> int:
        total = 0
        nbytes = self.run.recording.nbytes
        for call in self.run.calls_of(unit):
            kept = fallback if save == "recompute" and not call.after_norm else save
            if not call.needs_grad or not call.is_held or kept is None:
                continue
            if kept == "recompute":
                total += self.maps[call.input]
            else:
                total += self._bits(call, kept) * ((call.elements + 7) // 8)
            if self.run.keeper(call) is not None:
                # What keeps the output then keeps the input's whole memory.
                total += nbytes[call.input] - nbytes[call.output]
            elif kept == "output":
                total += nbytes[call.input]
        return total


_NOT_CALLED = "not called with this input"
