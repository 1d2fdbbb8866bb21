"""Activations that a model calls as functions: which these are, and the lines of code that do."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _ops
from .._torch import OpOverload, op_parameters
from ..activations import ACTIVATIONS, Activation
from .recording import OtherKind

_ACTIVATIONS: defaultdict[str, list[Activation]] = defaultdict(list)
for _activation in ACTIVATIONS:
    for _operation in _activation.operations:
        _ACTIVATIONS[_operation].append(_activation)


class Function(NamedTuple):
    """A call of an activation's operation, with its scalar arguments."""

    activation: Activation
    scalars: tuple[float, ...]
    inplace: bool


def function_called(
    operation: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Function | None:
    """The activation that the operation computes, if it is one of ours."""
    name = operation.overloadpacket.__name__
    if name not in _ACTIVATIONS or operation.namespace != "aten":
        return None
    given = {p.name: value for p, value in zip(op_parameters(operation), args, strict=False)}
    defaults = {p.name: p.default_value for p in op_parameters(operation) if p.has_default_value()}
    named = {**defaults, **given, **kwargs}
    for activation in _ACTIVATIONS[name]:
        if activation.is_call(args) and activation.variant.items() <= named.items():
            scalars = tuple(named[scalar] for scalar in activation.scalars)
            return Function(activation, scalars, name.endswith("_"))
    return None


# Where torch.nn is no more than on the way to whoever calls an activation.
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_MODULES = f"{_TORCH}nn{os.sep}modules{os.sep}"
_ON_THE_WAY = frozenset(f"{_MODULES}{name}.py" for name in ("activation", "container", "module"))
_PACKAGE = f"{Path(_ops.__file__).parent}{os.sep}"


def line_that_calls() -> tuple[str, bool]:
    """File and line of the innermost caller that is no layer around PyTorch's functions.

    With whether it is PyTorch's own: a module of torch.nn that calls them, as a transformer's.
    """
    frame = sys._getframe(1)
    while _is_passed_over(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{_shown(file)}:{frame.f_lineno}", file.startswith(_TORCH)


def _is_passed_over(file: str) -> bool:
    if file.startswith(_MODULES):
        return file in _ON_THE_WAY
    return file.startswith((_TORCH, _PACKAGE))


def _shown(file: str) -> str:
    """The file as seen from where Python found it, as "timm/models/mobilevit.py"."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    parents = [folder for folder in folders if file.startswith(f"{folder}{os.sep}")]
    if not parents:
        return os.path.join(*Path(file).parts[-2:])
    return os.path.relpath(file, max(parents, key=len))


# Activations without an in-place form of ours, by PyTorch's operation.
_OTHER_KINDS = {
    "_prelu_kernel": "PReLU",
    "elu": "ELU",
    "glu": "GLU",
    "hardshrink": "Hardshrink",
    "hardsigmoid": "Hardsigmoid",
    "hardtanh": "Hardtanh",
    "log_sigmoid_forward": "LogSigmoid",
    "rrelu_with_noise": "RReLU",
    "sigmoid": "Sigmoid",
    "softplus": "Softplus",
    "softshrink": "Softshrink",
    "tanh": "Tanh",
    "threshold": "Threshold",
}

# Ours in other words.
_SILU = "x * sigmoid(x), which is SiLU"
_RELU = "clamp(min=0), which is ReLU"


class OtherKinds:
    """Counts the activations that are called and that have no in-place form here.

    Attributes:
        found: By kind.
    """

    def __init__(self) -> None:
        self.found: dict[str, OtherKind] = {}
        self._sigmoids: dict[int, tuple[int, int]] = {}

    def see(
        self, operation: str, args: tuple[Any, ...], read: list[int], made: list[int], node: int
    ) -> None:
        """Look at an operation, the storages that it reads and makes, and its autograd node."""
        name = operation.removesuffix("_")
        kind = _OTHER_KINDS.get(name)
        if name == "mul":
            kind = self._silu(read)
        elif name in ("clamp", "clamp_min") and args[1:2] == (0,) and args[2:] in ((), (None,)):
            kind = _RELU
        if kind is None:
            return
        found = self.found.setdefault(kind, OtherKind())
        found.calls += 1
        found.nodes.add(node)
        if name == "sigmoid":
            self._sigmoids.update({output: (input, node) for input in read for output in made})

    def _silu(self, factors: list[int]) -> str | None:
        """What the product of x and sigmoid(x) is, of which the sigmoid is a part."""
        for factor in factors:
            input, node = self._sigmoids.get(factor, (None, 0))
            if input in factors and input != factor:
                sigmoids = self.found["Sigmoid"]
                sigmoids.calls -= 1
                sigmoids.nodes.discard(node)
                if sigmoids.calls == 0:
                    del self.found["Sigmoid"]
                self.found.setdefault(_SILU, OtherKind()).nodes.add(node)
                return _SILU
        return None
