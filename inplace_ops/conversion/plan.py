"""Which activations are put in place, and what each keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..activations import Save
from . import rules
from .dropping import Drop, dropped_of_call, dropped_of_norm
from .forecast import Forecast
from .recording import Call, Recording
from .slots import Slot


@dataclass(frozen=True)
class Decision:
    """What becomes of a slot: what it saves where it is put in place, else None.

    With "recompute", it saves `fallback` where it is called elsewhere than after a norm.
    """

    save: Save | None
    fallback: Save | None
    reason: str
    bytes_before: int
    bytes_after: int


class Plan:
    """The decisions for all slots of a recorded model.

    Runs in other modes, train or eval, refuse what is unsafe there; nothing else counts of them.
    """

    def __init__(
        self,
        recording: Recording,
        in_other_modes: Sequence[Recording],
        bits: int | None,
        optimize: str,
    ) -> None:
        self.bits = bits
        self.optimize = optimize
        self.refused = dict(recording.not_followed)
        self.run = Forecast(recording, self.refused)
        self.maps = {norm.output: norm.maps for norm in recording.norms}
        self.other_runs = [Forecast(other, self.refused) for other in in_other_modes]
        for other in self.other_runs:
            for slot in other.calls:
                if slot not in self.run.calls:
                    self.refused.setdefault(slot, "not called with this input")
            for slot, reason in other.recording.not_followed.items():
                self.refused.setdefault(slot, reason)
        self._refuse_until_all_hold()

    def decision(self, slot: Slot) -> Decision:
        """What becomes of `slot`."""
        calls = self.run.calls_of(slot)
        if slot in self.refused:
            held = sum(map(self.run.recording.bytes_of_call, calls))
            return Decision(None, None, self.refused[slot], held, held)
        if not calls:
            return Decision(None, None, "not called with this input", 0, 0)
        save, fallback, reason = self._choice(slot)
        after = self._after(slot, save, fallback)
        return Decision(save, fallback, reason, self._before(slot), after)

    def drops(self) -> list[Drop]:
        """The outputs that are formed again in backward, in the order in which they arise."""
        if self.optimize == "speed":
            return []
        converted = {slot for slot in self.run.calls if slot not in self.refused}
        found: list[tuple[int, Drop | None]] = [
            (call.time, dropped_of_call(call, self.run))
            for slot in converted
            if self._choice(slot)[0] == "recompute"
            for call in self.run.calls_of(slot)
        ]
        found += [(norm.time, dropped_of_norm(norm, self.run)) for norm in self.run.recording.norms]
        return [drop for _, drop in sorted(found, key=lambda f: f[0]) if drop]

    def _refuse_until_all_hold(self) -> None:
        """Refuse slots until every rule holds for all others.

        A slot that is refused runs as the model's own module again, which may keep its input or
        output: the rest is looked at once more.
        """
        while True:
            before = len(self.refused)
            for slot in self.run.calls:
                if slot not in self.refused:
                    reason = self._objection(slot)
                    if reason is not None:
                        self.refused[slot] = reason
            if len(self.refused) == before:
                return

    def _objection(self, slot: Slot) -> str | None:
        unsafe = rules.objection(self.run.calls_of(slot), self.run)
        if unsafe is not None:
            return unsafe
        for other in self.other_runs:
            unsafe = rules.objection(other.calls_of(slot), other)
            if unsafe is not None:
                return f"{unsafe} in the other mode, train or eval"
        save, fallback, reason = self._choice(slot)
        if save is None:
            return reason
        before, after = self._before(slot), self._after(slot, save, fallback)
        dropped = self._dropped_bytes(slot) if save == "recompute" else 0
        if self.optimize != "speed" and after - dropped > before:
            return f"would keep {after} bytes instead of {before}"
        return None

    # What a slot keeps.

    def _choice(self, slot: Slot) -> tuple[Save | None, Save | None, str]:
        """What `slot` keeps in place, elsewhere than after a norm too, and why.

        None where only a lossy code would save memory.
        """
        calls = self.run.calls_of(slot)
        save, reason = self._choice_without_norm(slot)
        has_mask = slot.recognised.activation.has_mask
        if not any(call.after_norm and call.needs_grad for call in calls) or (
            self.optimize == "speed" and has_mask
        ):
            return save, save, reason
        if save is None:  # which is right for what is saved elsewhere, but none is
            if not all(call.after_norm for call in calls):
                return None, None, reason
            save = slot.recognised.saves[0]
        after = self._after(slot, "recompute", save) - self._dropped_bytes(slot)
        if after < self._after(slot, save, save):
            return "recompute", save, "follows from the input of the norm before it"
        return save, save, reason

    def _dropped_bytes(self, slot: Slot) -> int:
        """The size of its outputs that are formed again with save="recompute"."""
        if self.optimize == "speed":
            return 0
        drops = (dropped_of_call(call, self.run) for call in self.run.calls_of(slot))
        return sum(d.output.bytes_before - d.output.bytes_after for d in drops if d)

    def _choice_without_norm(self, slot: Slot) -> tuple[Save | None, str]:
        calls = self.run.calls_of(slot)
        saves = slot.recognised.saves
        objection = next(
            (
                reason
                for run in (self.run, *self.other_runs)
                for call in run.calls_of(slot)
                if (reason := rules.output_is_not_written(call, run))
            ),
            None,
        )
        if objection is not None and "output" in saves:
            saves.remove("output")
        if self.optimize == "exact":
            saves = [save for save in saves if all(self._is_exact(c, save) for c in calls)]
            if not saves:
                return None, "only a lossy code would save memory here"
        if self.optimize == "speed" and slot.recognised.activation.has_mask:
            return "mask", "the mask is the quickest"
        keeper = next((k for c in calls if (k := self.run.keeper(c))), None)
        # Without gradients every mode costs 0 bytes; break the tie as if gradients were needed.
        save = min(
            saves, key=lambda s: (self._after(slot, s, s), (s == "output") is not bool(keeper))
        )
        if save == "output":
            return save, f"output is kept by `{keeper}` anyway" if keeper else "costs least"
        return save, objection or "nothing else keeps the output"

    def _is_exact(self, call: Call, save: Save) -> bool:
        activation = call.slot.recognised.activation
        return activation.is_exact(save, call.dtype, self._bits(call, save))

    def _bits(self, call: Call, save: Save) -> int:
        activation = call.slot.recognised.activation
        asked = self.bits if save == "output" and not activation.has_mask else None
        return asked or activation.default_bits(save, call.dtype)

    def _before(self, slot: Slot) -> int:
        total = 0
        for call in self.run.calls_of(slot):
            if slot.recognised.is_own:
                total += self.run.recording.bytes_of_call(call)
                continue
            # PyTorch's own fails where the output that it keeps is written to.
            shares_output = (
                slot.recognised.activation.torch_saves == "output"
                and slot.recognised.allows_output
                and self.run.keeper(call) is not None
                and rules.output_is_not_written(call, self.run) is None
            )
            if call.needs_grad and not shares_output:
                total += call.elements * call.dtype.itemsize
        return total

    def _after(self, slot: Slot, save: Save | None, fallback: Save | None) -> int:
        total = 0
        nbytes = self.run.recording.nbytes
        for call in self.run.calls_of(slot):
            kept = fallback if save == "recompute" and not call.after_norm else save
            if not call.needs_grad or kept is None:
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
