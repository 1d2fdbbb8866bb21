"""Where a model holds activations, and putting others there."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..activations import Save
from .calls import CallByCall, InPlaceCall
from .frames import CallSite
from .recognise import Recognised, recognise

_ORIGINAL = "_converted_from"  # where a module put in by `convert` keeps the one it stands for
_COPIED = "_hooks_copied"  # and the keys of the hooks that it got from that


@dataclass(eq=False)
class Slot:
    """A module's attribute, or a container's entry, that holds an activation.

    Attributes:
        name: The path in the model.
        parent: What holds it.
        key: Under which name.
        original: The model's own module.
        recognised: Which activation that is.
        is_shared: Whether other slots hold the same module.
    """

    name: str
    parent: nn.Module
    key: str
    original: nn.Module
    recognised: Recognised
    is_shared: bool

    @property
    def inplace(self) -> bool:
        """Whether the model's own module overwrites its input."""
        return bool(getattr(self.original, "inplace", False))

    def put(self, module: nn.Module) -> None:
        """Let the parent hold `module`."""
        self.parent._modules[self.key] = module

    def converted(self, save: Save, fallback: Save, bits: int | None) -> nn.Module:
        """The module that takes the original's place, with its hooks and attributes."""
        takes_bits = fallback == "output" and not self.recognised.activation.has_mask
        module = self.recognised.build(save=fallback, **({"bits": bits} if takes_bits else {}))
        if save == "recompute":
            module.save, module.fallback = save, fallback  # type: ignore[assignment]
        return self._standing_in(module)

    def converted_in(self, calls: Mapping[CallSite, InPlaceCall]) -> nn.Module:
        """The same, put in place in these of its calls alone."""
        module = self.recognised.build()
        module.inplace = self.inplace  # type: ignore[assignment]  # for torch.jit.script
        module.calls = CallByCall(self.original, calls)  # type: ignore[assignment]
        return self._standing_in(module)

    def _standing_in(self, module: nn.Module) -> nn.Module:
        of_every_module = vars(nn.Module())
        own = {name: value for name, value in vars(module).items() if name not in of_every_module}
        # The original's own dicts of hooks, so that what removes one finds it; but where it may
        # still stand in the model, a hook on one is not to be one on all.
        originals = {
            name: value.copy() if self.is_shared and isinstance(value, dict) else value
            for name, value in vars(self.original).items()
        }
        vars(module).update({**originals, **own, _ORIGINAL: self.original})
        vars(module)[_COPIED] = _keys(self.original) if self.is_shared else frozenset()
        return module


def _keys(module: nn.Module) -> frozenset[object]:
    """The keys of its hooks, no two of which are the same."""
    dicts = (value for value in vars(module).values() if isinstance(value, dict))
    return frozenset(key for entries in dicts for key in entries)


def put_back(original: nn.Module, module: nn.Module) -> None:
    """Give the original what was set since on the module that stands in for it."""
    copied = vars(module)[_COPIED]
    for name in vars(nn.Module()):
        own, value = vars(original)[name], vars(module)[name]
        if not isinstance(value, dict):
            vars(original)[name] = value
        elif own is not value:
            known = [hook for hook in own.values() if callable(hook)]
            since = {key: hook for key, hook in value.items() if key not in copied}
            own |= {k: hook for k, hook in since.items() if k not in own and hook not in known}


_Hooks = Mapping[str, Mapping[Any, Any]]


def hooks_of(module: nn.Module) -> _Hooks:
    """A copy of its dicts of hooks, by name."""
    return {name: value.copy() for name, value in vars(module).items() if isinstance(value, dict)}


def keep_hooks(module: nn.Module, before: _Hooks, then: _Hooks) -> None:
    """Put back the hooks from `before`, but for what was removed or added since `then`."""
    for name, now in hooks_of(module).items():
        kept = {key: hook for key, hook in before.get(name, {}).items() if key in now}
        added = {key: hook for key, hook in now.items() if key not in then.get(name, {})}
        entries = vars(module)[name]
        entries.clear()
        entries.update({**kept, **added})


def original_of(module: nn.Module) -> nn.Module | None:
    """The module that `convert` replaced by `module`; None if it was not put there by it."""
    return vars(module).get(_ORIGINAL)


def find_slots(model: nn.Module) -> list[Slot]:
    """All slots of `model`, seen through an earlier conversion."""
    held = [
        (f"{path}.{key}" if path else key, parent, key, original_of(child) or child)
        for path, parent in model.named_modules()
        for key, child in parent._modules.items()
        if child is not None
    ]
    times = Counter(original for *_, original in held)
    return [
        Slot(name, parent, key, original, recognised, times[original] > 1)
        for name, parent, key, original in held
        if (recognised := recognise(original)) is not None
    ]


@contextmanager
def intercepted(
    slots: Iterable[Slot],
    forward: Callable[..., Any],
    modules: Mapping[Slot, nn.Module] | None = None,
) -> Iterator[None]:
    """Let each slot call `forward(slot, *args, **kwargs)` in place of its module's own.

    Every slot gets a copy of its module, so that one module held in many slots is told apart:
    of the original, or of that in `modules`.
    """
    before = [slot.parent._modules[slot.key] for slot in slots]
    try:
        for slot in slots:
            probe = copy.copy(modules[slot] if modules else slot.original)
            vars(probe)["forward"] = partial(forward, slot)
            slot.put(probe)
        yield
    finally:
        for slot, module in zip(slots, before, strict=True):
            assert module is not None
            slot.put(module)
