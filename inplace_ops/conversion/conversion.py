"""What a conversion puts into a model: modules in slots, and hooks on readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from torch import nn

from ..readers import drop_outputs
from .slots import Slot


class Conversion(NamedTuple):
    """The modules that take the activations' places, and those whose operations drop outputs."""

    modules: Mapping[Slot, nn.Module]
    readers: Set[nn.Module]

    def put(self) -> None:
        """Put all of it into the model."""
        for slot, module in self.modules.items():
            slot.put(module)
        self.hook(drop_outputs)

    def hook(self, hook: Callable[..., None]) -> None:
        """Put a forward hook on the readers."""
        for reader in self.readers:
            reader.register_forward_hook(hook)


def remove_hooks(module: nn.Module) -> None:
    """Take away what `Conversion.put` put on a reader, or on what it is a copy of."""
    for key in [key for key, hook in module._forward_hooks.items() if hook is drop_outputs]:
        del module._forward_hooks[key]
