"""What a conversion puts into a model: modules in slots, and hooks on readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from torch import nn

from ..readers import FIRST_NODE, drop_outputs, note_first_node
from .slots import Slot, find_slots, original_of


class Conversion(NamedTuple):
    """What takes the activations' places, and what the modules around it are to do.

    Attributes:
        modules: What takes the places.
        readers: The modules whose operations drop outputs.
    """

    modules: Mapping[Slot, nn.Module]
    readers: Set[nn.Module]

    def put(self) -> None:
        """Put all of it into the model."""
        for slot, module in self.modules.items():
            slot.put(module)
        self.hook(drop_outputs)

    def hook(self, hook: Callable[..., None]) -> None:
        """Put a forward hook on the readers, and before it what notes their first nodes."""
        for reader in self.readers:
            reader.register_forward_pre_hook(note_first_node)
            reader.register_forward_hook(hook)


def conversion_of(model: nn.Module) -> Conversion:
    """What has been put into the model."""
    held = {slot: slot.parent._modules[slot.key] for slot in find_slots(model)}
    return Conversion(
        {slot: module for slot, module in held.items() if module and original_of(module)},
        {m for m in model.modules() if note_first_node in m._forward_pre_hooks.values()},
    )


def remove_hooks(module: nn.Module) -> None:
    """Take away what `Conversion.put` put on a module, or on what it is a copy of."""
    ours = (note_first_node, drop_outputs)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [k for k, hook in hooks.items() if hook in ours]:
            del hooks[key]
    vars(module).pop(FIRST_NODE, None)
