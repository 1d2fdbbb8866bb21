"""Recognizes modules that compute one of this package's activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from numbers import Real
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn

from .activations import ACTIVATIONS, GELU, GELU_TANH, HARDSWISH, MISH, SILU, Activation

# Attributes that a subclass may define without changing what its base class computes.
_HARMLESS = frozenset(
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

# Modules of other libraries. They are given by name, because the libraries may not be installed.
_BY_NAME: Mapping[str, Activation] = {
    "timm.layers.activations.GELU": GELU,
    "timm.layers.activations.GELUTanh": GELU_TANH,
    "timm.layers.activations.HardSwish": HARDSWISH,
    "timm.layers.activations.Mish": MISH,
    "timm.layers.activations.Swish": SILU,
    "transformers.activations.FastGELUActivation": GELU_TANH,
    "transformers.activations.GELUTanh": GELU_TANH,
    "transformers.activations.MishActivation": MISH,
    "transformers.activations.NewGELUActivation": GELU_TANH,
    "transformers.activations.SiLUActivation": SILU,
}

_BASES = {activation.torch_module for activation in ACTIVATIONS}

# PyTorch's own, to recognize that a tool has replaced one, for example to modify gradients.
_FORWARDS = {base: base.forward for base in _BASES}
_FUNCTIONS = {activation: getattr(F, activation.torch_name) for activation in ACTIVATIONS}


def is_pytorchs(module: nn.Module) -> bool:
    """Whether a module's class is one of PyTorch's layers."""
    return type(module).__module__.startswith("torch.nn.")


class ActivationCall(NamedTuple):
    """An activation with its scalar arguments."""

    activation: Activation
    scalars: tuple[float, ...]


def activation_of(module: nn.Module) -> ActivationCall | None:
    """Return the activation that a module computes, and the current values of its scalar arguments.

    Return None if the activation is not one of this package's, if a scalar argument is not a plain
    number, or if PyTorch's module or function is replaced.
    """
    cls: Any = type(module)
    candidates, forward = _candidates(cls)
    for activation in candidates:
        if not _has_attributes(module, activation, with_variant=len(candidates) > 1):
            continue
        scalars = tuple(getattr(module, name) for name in activation.scalars)
        is_supported = all(isinstance(s, Real) for s in scalars)
        is_original = cls.forward is forward and _is_original(activation)
        return ActivationCall(activation, scalars) if is_supported and is_original else None
    return None


def _has_attributes(module: nn.Module, activation: Activation, with_variant: bool) -> bool:
    numbers = ((getattr(module, name, None), n) for name, n in activation.constants.items())
    if not all(isinstance(value, Real) and value == number for value, number in numbers):
        return False
    variant = activation.variant.items() if with_variant else ()
    return all(getattr(module, name) == value for name, value in variant)


def _is_original(activation: Activation) -> bool:
    base = activation.torch_module
    is_original = base.forward is _FORWARDS[base]
    return is_original and getattr(F, activation.torch_name) is _FUNCTIONS[activation]


class _Candidates(NamedTuple):
    """The activations that a class may compute, and its forward."""

    activations: tuple[Activation, ...]
    forward: Callable[..., Any]


@cache
def _candidates(cls: type[nn.Module]) -> _Candidates:
    known = _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
    if known is not None:
        return _Candidates((known,), cls.forward)
    base = _base_of(cls)
    activations = (activation for activation in ACTIVATIONS if activation.torch_module is base)
    return _Candidates(tuple(activations), cls.forward)


def _base_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the base class whose computation `cls` inherits unchanged, or else `cls` itself."""
    while len(cls.__bases__) == 1 and cls not in _BASES and _HARMLESS.issuperset(vars(cls)):
        cls = cls.__bases__[0]
    return cls
