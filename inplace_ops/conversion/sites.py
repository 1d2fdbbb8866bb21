"""What the report says of each place that calls an activation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from .plan import Decision, Plan
from .recording import Call, Line, Recording
from .report import OtherActivation, Site
from .slots import Slot


def sites_of(plan: Plan, slots: Sequence[Slot], recording: Recording) -> list[Site]:
    """Those of modules, in the order of the model, then those of functions, in time."""
    return [
        *_sites_of_modules(plan, slots, recording),
        *_sites_of_functions(plan, recording),
    ]


def other_activations(recording: Recording) -> list[OtherActivation]:
    """The kinds that there is no in-place form of here."""
    return [
        OtherActivation(name, kind.calls, recording.bytes_of_kind(kind))
        for name, kind in recording.other_kinds.items()
    ]


def _sites_of_modules(plan: Plan, slots: Sequence[Slot], recording: Recording) -> Iterator[Site]:
    called: dict[nn.Module, Slot] = {
        call.place.original: call.place for call in recording.calls if isinstance(call.place, Slot)
    }
    for decision in plan.decisions:
        slot, reason = decision.unit.place, decision.reason
        assert isinstance(slot, Slot)
        namesake = called.get(slot.original)
        if not decision.calls and namesake is not None and decision.unit not in plan.refused:
            reason = f"another name of `{namesake.name}`, by which it is not called"
        yield Site(
            slot.name,
            slot.recognised.activation.name,
            decision.save is not None,
            reason,
            decision.save,
            decision.bytes_before,
            decision.bytes_after,
            len(decision.calls),
            None if decision.unit.site is None else decision.calls[0].line,
        )


def _sites_of_functions(plan: Plan, recording: Recording) -> Iterator[Site]:
    sites: dict[tuple[str, Line], list[Call]] = {}
    for call in recording.calls:
        if isinstance(call.place, Line):
            sites.setdefault((call.name, call.place), []).append(call)
    for (name, line), calls in sites.items():
        held = sum(map(recording.bytes_of_call, calls))
        decision = plan.advice[line]
        is_gain = decision.save is not None and decision.bytes_after < decision.bytes_before
        is_to_edit = line.module is None and not line.is_torchs
        advice = _call(line, decision, plan.bits) if is_gain and is_to_edit else None
        yield Site(
            name,
            line.activation.name,
            False,
            _reason(line, decision, advice),
            None,
            held,
            held,
            len(calls),
            advice=advice,
        )


def _reason(line: Line, decision: Decision, advice: str | None) -> str:
    """Why it is left, or what the line could be."""
    name = line.activation.name
    if line.module is not None and "forward" in vars(line.module):
        return "its `forward` was replaced, as by hooks of accelerate: convert before that"
    if line.module is not None:
        kind = type(line.module).__name__
        return f"a {kind} that convert does not know: hold an nn.{name}, with numbers for arguments"
    times = f", {len(decision.calls)} calls" if len(decision.calls) > 1 else ""
    where = f"called as a function in {line.location}{times}"
    if line.is_torchs:
        return f"{where}: PyTorch's own code; if it takes an activation, give it an nn.{name}()"
    if decision.save is None:
        return f"{where}: {decision.reason}"
    if advice is None:
        return f"{where}: nothing to gain in place"
    kept = f"keeps {decision.bytes_after} bytes instead of {decision.bytes_before}"
    module = f"; an nn.{name}, converted, 0" if all(c.after_norm for c in decision.calls) else ""
    return f"safe: write `{advice}` at {line.location}{times}: {kept}{module}"


def _call(line: Line, decision: Decision, bits: int | None) -> str:
    """The call of the package's function that keeps what was decided."""
    activation = line.activation
    arguments = ["x", *map(repr, activation.variant.values()), *map(repr, line.scalars)]
    if decision.save != activation.saves[0]:
        arguments.append(f'save="{decision.save}"')
    if bits is not None and decision.save == "output" and not activation.has_mask:
        arguments.append(f"bits={bits}")
    return f"inplace_ops.{activation.function}({', '.join(arguments)})"
