"""Recognizes modules that compute one of this package's activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
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
    for candidate in _candidates(cls):
        call = candidate.call_of(module)
        if call is not None:
            return call
    return None


def candidate_of(module: nn.Module) -> Candidate:
    """Return the candidate by which `activation_of` has recognized a module."""
    cls: Any = type(module)
    return next(c for c in _candidates(cls) if c.call_of(module) is not None)


class Candidate(NamedTuple):
    """An activation that modules of a class may compute.

    Attributes:
        activation: The activation.
        torch_name: The name of PyTorch's function.
        function: That function.
        base: PyTorch's module.
        forward_of_base: Its forward.
        forward: The forward of the class.
        conditions: What a module must meet to compute this activation.
        without_scalars: The call if the activation has no scalar arguments.
    """

    activation: Activation
    torch_name: str
    function: Callable[..., Any]
    base: Any
    forward_of_base: Callable[..., Any]
    forward: Callable[..., Any]
    conditions: list[Callable[[nn.Module], bool]]
    without_scalars: ActivationCall

    def call_of(self, module: nn.Module) -> ActivationCall | None:
        """Return the activation that a module of the class computes; None if it is another one.

        Or if a scalar argument is not a plain number, or PyTorch's module or function is replaced.
        """
        for is_met in self.conditions:
            if not is_met(module):
                return None
        cls: Any = type(module)
        is_original = (
            cls.forward is self.forward
            and self.base.forward is self.forward_of_base
            and getattr(F, self.torch_name) is self.function
        )
        if not is_original:
            return None
        activation = self.activation
        if not activation.scalars:
            return self.without_scalars
        scalars = tuple([getattr(module, name) for name in activation.scalars])
        return ActivationCall(activation, scalars) if all(map(_is_number, scalars)) else None


@cache
def _candidates(cls: type[nn.Module]) -> tuple[Candidate, ...]:
    known = _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
    base = _base_of(cls)
    activations = [known] if known else [a for a in ACTIVATIONS if a.torch_module is base]
    return tuple(
        [
            Candidate(
                activation,
                activation.torch_name,
                _FUNCTIONS[activation],
                activation.torch_module,
                _FORWARDS[activation.torch_module],
                cls.forward,
                [*_conditions(activation, with_variant=len(activations) > 1)],
                ActivationCall(activation, ()),
            )
            for activation in activations
        ]
    )


def _conditions(activation: Activation, with_variant: bool) -> Iterator[Callable[[Any], bool]]:
    for name, constant in activation.constants.items():
        yield partial(_has_constant, name, constant)
    if with_variant:
        for name, value in activation.variant.items():
            yield partial(_has_value, name, value)


def _has_constant(name: str, constant: float, module: nn.Module) -> bool:
    value = getattr(module, name, None)
    return _is_number(value) and value == constant


def _has_value(name: str, value: str, module: nn.Module) -> bool:
    return bool(getattr(module, name) == value)


def _is_number(value: Any) -> bool:
    return type(value) is float or isinstance(value, Real)  # the latter is slow


def _base_of(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the base class whose computation `cls` inherits unchanged, or else `cls` itself."""
    while len(cls.__bases__) == 1 and cls not in _BASES and _HARMLESS.issuperset(vars(cls)):
        cls = cls.__bases__[0]
    return cls
