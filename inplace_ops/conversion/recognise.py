"""Which modules are activations of ours, and what stands in for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import modules
from ..activations import (
    ACTIVATIONS,
    GELU,
    GELU_TANH,
    HARDSWISH,
    MISH,
    SILU,
    Activation,
    Save,
)


@dataclass(frozen=True)
class Recognised:
    """An activation as a module computes it.

    Attributes:
        activation: Which one.
        function: The module's own function, out of place.
        scalars: Its scalar arguments by name.
        is_own: Whether that function is another library's, and not PyTorch's.
    """

    activation: Activation
    function: Callable[[Tensor], Tensor]
    scalars: Mapping[str, Any]
    is_own: bool = False

    @property
    def saves(self) -> list[Save]:
        """What it may keep for backward, the choice that later writes cannot disturb first."""
        saves = sorted(self.activation.saves, key=lambda save: save == "output")
        return saves if self.allows_output else saves[:-1]

    @property
    def allows_output(self) -> bool:
        """Whether its output tells what backward needs."""
        return self.activation.allows_output(*self.scalars.values())

    def build(self, **arguments: Any) -> nn.Module:
        """The module that stands in for it, which takes save= and maybe bits=."""
        module = getattr(modules, self.activation.name)
        return module(**self.activation.variant, **self.scalars, **arguments)


# Attributes that a subclass may define and still count as an alias of its base; anything else would
# be lost on replacement.
_ALLOWED_IN_AN_ALIAS = frozenset(
    {
        "__module__",
        "__qualname__",
        "__doc__",
        "__init__",
        "extra_repr",
        "__annotations__",
        "__annotate_func__",
        "__annotations_cache__",
        "__firstlineno__",
        "__static_attributes__",
    }
)

# Other libraries' own modules, by name, as the libraries may not be there.
_BY_NAME: Mapping[str, Activation] = {
    "timm.layers.activations.GELU": GELU,
    "timm.layers.activations.GELUTanh": GELU_TANH,
    "timm.layers.activations.HardSwish": HARDSWISH,
    "timm.layers.activations.Mish": MISH,
    "timm.layers.activations.Swish": SILU,
    "transformers.activations.FastGELUActivation": GELU_TANH,
    "transformers.activations.GELUActivation": GELU,
    "transformers.activations.GELUTanh": GELU_TANH,
    "transformers.activations.MishActivation": MISH,
    "transformers.activations.NewGELUActivation": GELU_TANH,
    "transformers.activations.SiLUActivation": SILU,
}

_BASES = {activation.torch_module for activation in ACTIVATIONS}


def recognise(module: nn.Module) -> Recognised | None:
    """The activation that `module` computes, None where it is none of ours or changed by hand."""
    return None if "forward" in vars(module) else recognise_class(module)


def recognise_class(module: nn.Module) -> Recognised | None:
    """The same, whatever the module's `forward` was replaced by."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    cls = type(module)
    known = _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
    if known is not None:
        return Recognised(known, _forward_out_of_place(module), {}, is_own=True)
    base = _base_of(cls)
    for activation in ACTIVATIONS:
        if activation.torch_module is base and all(
            getattr(module, name) == value for name, value in activation.variant.items()
        ):
            scalars = {name: getattr(module, name) for name in activation.scalars}
            if any(isinstance(scalar, Tensor) for scalar in scalars.values()):
                return None
            return Recognised(activation, partial(activation.torch_function, **scalars), scalars)
    return None


def _forward_out_of_place(module: nn.Module) -> Callable[[Tensor], Tensor]:
    own = copy.copy(module)
    if getattr(own, "inplace", False):
        own.inplace = False  # type: ignore[assignment]
    return own.forward


def _base_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `cls` is an alias of; itself where it is more than that."""
    while (
        len(cls.__bases__) == 1 and cls not in _BASES and _ALLOWED_IN_AN_ALIAS.issuperset(vars(cls))
    ):
        cls = cls.__bases__[0]
    return cls
