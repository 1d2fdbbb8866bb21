"""Calls that one kernel computes, where PyTorch runs several over the same memory.

A kernel rounds wherever the operations that it stands for round: its result equals theirs bit for
bit. So a fused call costs, rounds and is bounded as its composition, and only `compute` differs.
An activation of a norm's output is the exception: a smooth one PyTorch rounds otherwise, which the
rounding of the norm's output allows for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ..activations import ACTIVATIONS
from .operations import add
from .specs import Affine, Call, Spec

_ACTIVATIONS = {activation.torch_function: activation for activation in ACTIVATIONS}


def call_of(
    function: Callable[..., Tensor], inputs: Sequence[Spec], arguments: Sequence[Any], *rest: Any
) -> Spec:
    """Return the spec of `function(*inputs, *arguments)`, fused where a kernel fits."""
    activation = _ACTIVATIONS.get(function)
    if activation and len(arguments) == len(activation.scalars) and _is_norm(inputs[0]):
        return inputs[0].activated(activation, arguments)
    kind = _kind_of(function, inputs, arguments)
    return kind(function, inputs, arguments, *rest)


def _kind_of(
    function: Callable[..., Tensor], inputs: Sequence[Spec], arguments: Sequence[Any]
) -> type[Call]:
    if function is Tensor.to and _is_float32_affine(inputs[0]) and arguments[0] in _ops.CAST_DTYPES:
        return CastOfAffine
    if function is add and arguments[0] == 1 and any(map(_is_norm, inputs)):
        return SumWithNorm
    if function is F.relu and isinstance(inputs[0], SumWithNorm):
        return ReLUOfSum
    return Call


def _is_float32_affine(spec: Spec) -> bool:
    return isinstance(spec, Affine) and spec.dtype is torch.float32


def _is_norm(spec: Spec) -> TypeGuard[Affine]:
    return isinstance(spec, Affine) and spec.activation is None


class CastOfAffine(Call):
    """A norm's float32 output, or that of an activation after it, cast to 16 bits."""

    __slots__ = ()

    def compute(self) -> Tensor:
        (affine,), (dtype,) = self.inputs, self.arguments
        assert isinstance(affine, Affine)
        return affine.of(affine.x.compute(), dtype)


class SumWithNorm(Call):
    """The sum of a norm's output and a tensor of its shape and dtype, which may be another norm's.

    Where the tensor is another one PyTorch's addition broadcasts or promotes it.
    """

    __slots__ = ()

    def compute(self) -> Tensor:
        return self.of_sum(_ops.NORMALIZE_ADD, lambda total: total)

    def of_sum(self, op: _ops.Op, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a function of the sum: by its op, or composed."""
        norm, other = self.inputs if _is_norm(self.inputs[0]) else self.inputs[::-1]
        assert isinstance(norm, Affine)
        x, addend = norm.x.compute(), other.compute()
        if (x.shape, x.dtype, x.device) != (addend.shape, addend.dtype, addend.device):
            return function(self.of(norm.of(x), addend))
        return op(x, *norm.affine, addend, _ops.dim_order_of(x))


class ReLUOfSum(Call):
    """ReLU of such a sum, as of a residual block."""

    __slots__ = ()

    def compute(self) -> Tensor:
        (total,) = self.inputs
        assert isinstance(total, SumWithNorm)
        return total.of_sum(_ops.NORMALIZE_ADD_RELU, self.function)
