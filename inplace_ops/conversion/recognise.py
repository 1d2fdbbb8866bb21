"""Which modules are activations of ours, and what stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import modules


@dataclass(frozen=True)
class Activation:
    """What an activation module computes, and what stands in for it.

    Attributes:
        name: The activation's name.
        function: The module's own function, out of place.
        build: Makes the module that stands in for it; takes save= and, for SiLU, bits=.
        saves: What it may keep for backward, the choice that later writes cannot disturb first.
        needs_input: Whether PyTorch's own backward reads the input, not the output.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    build: Callable[..., nn.Module]
    saves: tuple[str, ...]
    needs_input: bool

    @property
    def is_lossy(self) -> bool:
        """Whether what it keeps gives the derivative only within an error."""
        return self.name == "SiLU"


def _relu(module: nn.Module) -> Activation:
    return Activation("ReLU", F.relu, modules.ReLU, ("mask", "output"), False)


def _leaky_relu(module: nn.Module) -> Activation | None:
    if isinstance(module.negative_slope, Tensor):
        return None
    slope: float = module.negative_slope  # type: ignore[assignment]
    return Activation(
        "LeakyReLU",
        partial(F.leaky_relu, negative_slope=slope),
        partial(modules.LeakyReLU, slope),
        ("mask", "output") if slope >= 0 else ("mask",),
        needs_input=not slope >= 0,
    )


def _silu(module: nn.Module, function: Callable[[Tensor], Tensor] = F.silu) -> Activation:
    return Activation("SiLU", function, modules.SiLU, ("derivative", "output"), True)


def _x_sigmoid_x(x: Tensor) -> Tensor:
    return x.mul(x.sigmoid())


_BY_BASE: Mapping[type[nn.Module], Callable[[nn.Module], Activation | None]] = {
    nn.ReLU: _relu,
    nn.LeakyReLU: _leaky_relu,
    nn.SiLU: _silu,
}

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
_BY_NAME: Mapping[str, Callable[[nn.Module], Activation]] = {
    "timm.layers.activations.Swish": partial(_silu, function=_x_sigmoid_x),
    "transformers.activations.SiLUActivation": _silu,
}


def recognise(module: nn.Module) -> Activation | None:
    """The activation that `module` computes, None where it is none of ours or changed by hand."""
    if "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule):
        return None
    cls = type(module)
    known = _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}") or _BY_BASE.get(_base_of(cls))
    return known(module) if known else None


def _base_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `cls` is an alias of; itself where it is more than that."""
    while (
        len(cls.__bases__) == 1
        and cls not in _BY_BASE
        and _ALLOWED_IN_AN_ALIAS.issuperset(vars(cls))
    ):
        cls = cls.__bases__[0]
    return cls
