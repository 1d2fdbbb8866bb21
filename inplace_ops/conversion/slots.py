"""The places of a model that hold an activation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import modules

_ORIGINAL = "_converted_from"  # where a module put in by `convert` keeps the one it stands for


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

# What the class of a mere renaming may define: the module that is put in has none of the rest.
_OF_A_NEW_NAME = frozenset(
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
    """The class that `cls` only renames, itself where it is more than another name."""
    while len(cls.__bases__) == 1 and cls not in _BY_BASE and _OF_A_NEW_NAME.issuperset(vars(cls)):
        cls = cls.__bases__[0]
    return cls


@dataclass(eq=False)
class Place:
    """A module's attribute, or a container's entry, that holds an activation."""

    name: str
    parent: nn.Module
    key: str
    original: nn.Module
    activation: Activation

    @property
    def inplace(self) -> bool:
        """Whether the model's own module overwrites its input."""
        return bool(getattr(self.original, "inplace", False))

    def put(self, module: nn.Module) -> None:
        """Let the parent hold `module`."""
        self.parent._modules[self.key] = module

    def converted(self, save: str, bits: int | None) -> nn.Module:
        """The module that takes the original's place, with its hooks and attributes."""
        arguments = {"bits": bits} if self.activation.is_lossy and save == "output" else {}
        module = self.activation.build(save=save, **arguments)
        of_every_module = vars(nn.Module())
        own = {name: value for name, value in vars(module).items() if name not in of_every_module}
        vars(module).update({**vars(self.original), **own, _ORIGINAL: self.original})
        return module


def original_of(module: nn.Module) -> nn.Module | None:
    """The module that `convert` replaced by `module`; None if it was not put there by it."""
    return vars(module).get(_ORIGINAL)


def find_places(model: nn.Module) -> list[Place]:
    """All places of `model` that hold an activation, seen through an earlier conversion."""
    places = []
    for path, parent in model.named_modules():
        for key, child in parent._modules.items():
            if child is None:
                continue
            original = original_of(child) or child
            activation = recognise(original)
            if activation is not None:
                name = f"{path}.{key}" if path else key
                places.append(Place(name, parent, key, original, activation))
    return places


@contextmanager
def intercepted(
    places: Iterable[Place],
    forward: Callable[..., Any],
    modules: Mapping[Place, nn.Module] | None = None,
) -> Iterator[None]:
    """Let each place call `forward(place, *args, **kwargs)` in place of its module's own.

    Every place gets a copy of its module, so that one module held in many places is told apart:
    of the original, or of that in `modules`.
    """
    before = [place.parent._modules[place.key] for place in places]
    try:
        for place in places:
            probe = copy.copy(modules[place] if modules else place.original)
            vars(probe)["forward"] = partial(forward, place)
            place.put(probe)
        yield
    finally:
        for place, module in zip(places, before, strict=True):
            assert module is not None
            place.put(module)
