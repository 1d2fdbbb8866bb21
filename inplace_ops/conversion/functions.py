"""Activations that a model calls as functions, and those that there is no in-place form of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import OpOverload, has_storage, op_parameters, storage_id
from ..activations import ACTIVATIONS, Activation
from ..memory import is_plain
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
        self._sigmoids: dict[_Fingerprint, tuple[_Fingerprint, int | None]] = {}

    def see(self, operation: str, args: tuple[Any, ...], result: Any, next_node: int) -> None:
        """Look at an operation, and at the node that it has made if anything requires grad."""
        name = operation.removesuffix("_")
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        has_node = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        node = next_node if has_node else None
        kind = _OTHER_KINDS.get(name)
        if name == "mul":
            kind = self._silu(tensors, node)
        elif name in ("clamp", "clamp_min") and _is_from_zero(*args[1:]):
            kind = _RELU
        if kind is None:
            return
        self._count(kind, node)
        if operation == "sigmoid" and isinstance(result, Tensor):
            self._sigmoids[_fingerprint(result)] = _fingerprint(args[0]), node

    def _count(self, kind: str, node: int | None) -> None:
        found = self.found.setdefault(kind, OtherKind())
        found.calls += 1
        found.nodes |= set() if node is None else {node}

    def _silu(self, factors: list[Tensor], node: int | None) -> str | None:
        """What the product of x and sigmoid(x) is, of which the sigmoid is a part."""
        seen = [_fingerprint(factor) for factor in factors]
        for factor in seen:
            input, its_node = self._sigmoids.pop(factor, (None, None))
            if input in seen and (its_node is None) == (node is None):
                sigmoids = self.found["Sigmoid"]
                sigmoids.calls -= 1
                if its_node is not None:
                    sigmoids.nodes.discard(its_node)
                    self.found.setdefault(_SILU, OtherKind()).nodes.add(its_node)
                if sigmoids.calls == 0:
                    del self.found["Sigmoid"]
                return _SILU
        return None


_Fingerprint = tuple[object, ...]


def _fingerprint(x: Tensor) -> _Fingerprint:
    """What only the same tensor, not written to since, has."""
    if not has_storage(x) or not is_plain(x):
        return (id(x),)
    return storage_id(x.untyped_storage()), x.storage_offset(), x.shape, x.stride(), x._version


def _is_from_zero(low: object = None, high: object = None) -> bool:
    return isinstance(low, (int, float)) and low == 0 and high is None
