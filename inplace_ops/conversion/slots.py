"""Where a model holds activations, and putting others there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..activations import Save
from .recognise import Recognised, recognise

_ORIGINAL = "_converted_from"  # where a module put in by `convert` keeps the one it stands for


@dataclass(eq=False)
class Slot:
    """A module's attribute, or a container's entry, that holds an activation."""

    name: str
    parent: nn.Module
    key: str
    original: nn.Module
    recognised: Recognised

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
        of_every_module = vars(nn.Module())
        own = {name: value for name, value in vars(module).items() if name not in of_every_module}
        vars(module).update({**vars(self.original), **own, _ORIGINAL: self.original})
        return module


def original_of(module: nn.Module) -> nn.Module | None:
    """The module that `convert` replaced by `module`; None if it was not put there by it."""
    return vars(module).get(_ORIGINAL)


def find_slots(model: nn.Module) -> list[Slot]:
    """All slots of `model`, seen through an earlier conversion."""
    slots = []
    for path, parent in model.named_modules():
        for key, child in parent._modules.items():
            if child is None:
                continue
            original = original_of(child) or child
            recognised = recognise(original)
            if recognised is not None:
                name = f"{path}.{key}" if path else key
                slots.append(Slot(name, parent, key, original, recognised))
    return slots


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
