"""Specs that one kernel computes, where PyTorch runs several kernels over the same memory.

A fused kernel rounds wherever the operations that it replaces round, so its result equals theirs
bit for bit. Therefore a fused spec has the cost, rounding and bound of the composition, and only
computes it in another way. An activation of a norm's output is the exception: for a smooth
activation the fused kernel and PyTorch round differently. The rounding of the norm's output covers
the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ..activations import ACTIVATIONS
from .affine import NormAffine
from .calls import Affine, Call, ViewCall
from .operations import add, same
from .specs import Computed, Leaf, Spec

# On an H200 PyTorch multiplies each channel by a factor at a third of the memory's bandwidth. From
# this size on, a kernel should be faster, with three small ones before it that prepare the factors.
_LEAST_SCALED_BYTES = 2**24

_ACTIVATIONS = {activation.torch_function: activation for activation in ACTIVATIONS}


def call_of(
    function: Callable[..., Tensor],
    inputs: Sequence[Spec],
    arguments: Sequence[Any],
    cost: int,
    bound: Callable[[list[Tensor]], Tensor],
    dtype: torch.dtype,
) -> Spec:
    """Return the spec of `function(*inputs, *arguments)`, fused if there is a kernel for it.

    Equal calls of one input have the same spec, for example autocast's casts of a tensor for
    several consumers: see NOTE [Shared values] in `specs.py`. The arguments are those of `Call`.
    """

    def make() -> Computed:
        activation = _ACTIVATIONS.get(function)
        if activation and len(arguments) == len(activation.scalars) and _is_norm(inputs[0]):
            return inputs[0].activated(activation, arguments)
        if function is same:
            return ViewCall(same, inputs, keeps_strides=False)  # a copy may have others
        if cost == 0:
            return ViewCall(function, inputs, *arguments)
        call_class = _call_class_of(function, inputs, arguments)
        return call_class(function, inputs, arguments, cost, bound, dtype)

    if len(inputs) == 1 and isinstance(inputs[0], Computed):
        # `repr` tells 0.0 from -0.0. The function determines cost and bound.
        return inputs[0].derived((function, repr(arguments), dtype), make)
    return make()


def _call_class_of(
    function: Callable[..., Tensor], inputs: Sequence[Spec], arguments: Sequence[Any]
) -> type[Call]:
    if function is Tensor.to and _is_float32_affine(inputs[0]) and arguments[0] in _ops.CAST_DTYPES:
        return CastOfAffine
    if function is add and arguments[0] == 1 and any(map(_is_norm, inputs)):
        return SumWithNorm
    if function is F.relu and isinstance(inputs[0], SumWithNorm):
        return ReLUOfSum
    if function is torch.mul:
        return Multiplication
    return Call


def _is_float32_affine(spec: Spec) -> bool:
    return isinstance(spec, Affine) and spec.dtype is torch.float32


def _is_norm(spec: Spec) -> TypeGuard[Affine]:
    return isinstance(spec, Affine) and spec.activation is None


class CastOfAffine(Call):
    """The float32 output of a norm, or of an activation after a norm, cast to 16 bits.

    Autocast casts the norm's input to float32 before. The kernel then reads the 16-bit tensor.
    """

    __slots__ = ()

    @property
    def _affine(self) -> Affine:
        (affine,) = self.inputs
        assert isinstance(affine, Affine)
        return affine

    def inner(self) -> Iterable[Spec]:
        return self._affine.inner()

    def compute(self, turn: int | None) -> Tensor:
        (dtype,) = self.arguments
        x = _before_cast(self._affine.x)
        if x is not None and x.dtype is dtype:
            return self._affine.of(x, in_float32=True)
        return self._affine.of(self._affine.x.value(turn), dtype=dtype)


def _before_cast(spec: Spec) -> Tensor | None:
    """Return the tensor that a spec casts to float32, or the same view of it as the spec.

    Return None if the spec takes another operation.
    """
    if isinstance(spec, ViewCall):
        x = _before_cast(spec.inputs[0])
        return None if x is None else spec.of(x)
    if isinstance(spec, Call) and spec.function is Tensor.to and isinstance(spec.inputs[0], Leaf):
        return spec.inputs[0].value()
    return None


class SumWithNorm(Call):
    """The sum of a norm's output and another tensor, which may be another norm's output.

    The kernel needs a tensor of the norm's shape, dtype and device. For other tensors `compute`
    falls back to PyTorch's addition, which broadcasts and promotes.
    """

    __slots__ = ()

    def inner(self) -> Iterable[Spec]:
        norm, other = self._norm_and_other()
        return norm.x, other

    def _norm_and_other(self) -> tuple[Affine, Spec]:
        norm, other = self.inputs if _is_norm(self.inputs[0]) else self.inputs[::-1]
        assert isinstance(norm, Affine)
        return norm, other

    def compute(self, turn: int | None) -> Tensor:
        return self.of_sum(turn, _ops.CALL_NORMALIZE_ADD, lambda total: total)

    def of_sum(
        self, turn: int | None, call: _ops.Call, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return a function of the sum, in one kernel if the tensors match.

        Args:
            turn: The argument of `compute`.
            call: Computes norm, sum and function in one kernel.
            function: Computes the function of a sum that PyTorch's addition has computed.
        """
        norm, other = self._norm_and_other()
        x, addend = norm.x.value(turn), other.value(turn)
        if (x.shape, x.dtype, x.device) != (addend.shape, addend.dtype, addend.device):
            return function(self.of(norm.of(x), addend))
        total: Tensor = call(x, *norm.affine, addend, _ops.dim_order_of(x))
        return total


class ReLUOfSum(Call):
    """ReLU of the sum of a norm's output and another tensor, as in a residual block."""

    __slots__ = ()

    @property
    def _total(self) -> SumWithNorm:
        (total,) = self.inputs
        assert isinstance(total, SumWithNorm)
        return total

    def inner(self) -> Iterable[Spec]:
        return self._total.inner()

    def compute(self, turn: int | None) -> Tensor:
        return self._total.of_sum(turn, _ops.CALL_NORMALIZE_ADD_RELU, self.function)


class Multiplication(Call):
    """The product of two tensors, of which one may have a single factor for each channel."""

    reach_of_cheap = 1

    __slots__ = ()

    def of(self, *inputs: Tensor) -> Tensor:
        value = multiply(*inputs)
        return value if self.dtype in (None, value.dtype) else value.to(self.dtype)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return `x * y`, by a kernel of norms where PyTorch's kernel would be slow."""
    for tensor, factors in ((x, y), (y, x)):
        if _is_scaled_slowly(tensor) and _are_factors(factors, tensor):
            scaled: Tensor = _ops.CALL_NORMALIZE(
                tensor, *scaling(factors), _ops.dim_order_of(tensor)
            )
            return scaled
    return torch.mul(x, y)


def _is_scaled_slowly(x: Tensor) -> bool:
    return x.is_cuda and x.nbytes >= _LEAST_SCALED_BYTES


def _are_factors(factors: Tensor, x: Tensor) -> bool:
    """Whether a tensor has a factor for each channel of x.

    PyTorch's product then has the strides of x, except in dimensions of size 1.
    """
    shape = x.shape
    has_channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return (
        x.dim() > 2
        and factors.shape == (shape[0], shape[1], *(1 for _ in shape[2:]))
        and (factors.dtype, factors.device) == (x.dtype, x.device)
        and factors.is_contiguous()
        and (x.is_contiguous() or has_channels_last)
        and _ops.has_kernel(x)
    )


def scaling(factors: Tensor) -> NormAffine:
    """Return the affine x * factor + -0.0, which has the value of the product bit for bit."""
    scale = factors.reshape(-1).to(_ops.affine_dtype(factors.dtype))
    shift = scale.new_full((1,), -0.0)
    affine = _ops.CALL_NORM_AFFINE(None, None, scale, shift, (2, *factors.shape), 1)
    return NormAffine(affine, None)
