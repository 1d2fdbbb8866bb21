"""The operations inside a recompute spec: norms, PyTorch's operations, views.

`kernels.py` has those that one kernel computes where PyTorch runs several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..activations import Activation
from ..memory import Packed
from .affine import NormAffine
from .specs import REACH, Computed, Leaf, Spec, largest_of

# A recomputed norm's output may differ from PyTorch's by this many eps times its magnitude. The
# number is chosen with a margin, not proved: on a CPU a single norm, with or without an activation,
# differs by about one eps. The rest covers the other operations of a spec, whose number `max_ops`
# limits. If the margin is too small for a spec, the comparison at its first use fails, and the
# tensor stays saved as PyTorch saves it: see NOTE [First use] in `verify.py`.
_NORM_ROUNDINGS = 16


@cache
def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


class Affine(Computed):
    """The output of a norm, or of an activation after a norm, recomputed by one kernel.

    Attributes:
        x: The spec of the norm's input.
        affine: The norm's output as a function of its input. Its tensors are auxiliary.
        dtype: The dtype of the norm's output, for `rounding` and for the choice of fused kernels.
            `compute` does not read it: its result has the dtype of x, which is the same.
        activation: The activation after the norm; None if there is none.
        scalars: The activation's arguments after its input, for example LeakyReLU's negative slope.
    """

    reach_of_cheap = 1

    __slots__ = ("activation", "affine", "dtype", "scalars", "x")

    def __init__(
        self,
        x: Spec,
        affine: NormAffine,
        dtype: torch.dtype,
        activation: Activation | None = None,
        scalars: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.x, self.affine, self.activation, self.scalars = x, affine, activation, scalars
        self.dtype, self.products = dtype, x.products
        self.cost = x.cost + (1 if activation is None else 2)
        self.rounding = max(x.rounding, _NORM_ROUNDINGS * _eps(dtype))
        self.tolerance = x.tolerance
        self.keeps_strides = x.keeps_strides
        self.leaf_bytes, self.auxiliary_bytes = x.leaf_bytes, x.auxiliary_bytes + affine.nbytes

    def compute(self, turn: int | None) -> Tensor:
        return self.of(self.x.value(turn))

    def inner(self) -> Iterable[Spec]:
        return (self.x,)

    def _add_inside(self, turn: int, reach: int) -> None:
        if type(self.x) is not Leaf:  # a leaf keeps no value
            super()._add_inside(turn, reach)

    def is_current(self) -> bool:
        return self.x.is_current()

    def of(self, x: Tensor, **casts: Any) -> Tensor:
        """Return the output for the norm's input x. `casts` are keyword arguments of the op."""
        activation = self.activation
        arguments = *self.affine, _ops.dim_order_of(x), *self.scalars
        if casts:
            op = _ops.NORMALIZE if activation is None else activation.ops.recompute
            return op(x, *arguments, **casts)
        call = _ops.CALL_NORMALIZE if activation is None else activation.ops.call_recompute
        value: Tensor = call(x, *arguments)
        return value

    def activated(self, activation: Activation, scalars: Sequence[float]) -> Affine:
        """Return the spec of an activation's output, where this spec is the activation's input."""
        return Affine(self.x, self.affine, self.dtype, activation, scalars)

    def magnitude(self) -> Tensor:
        # Add the absolute values of all terms: their rounding errors remain when the terms cancel.
        # shift = bias - mean * scale may be small although its terms are large. So one bound holds
        # for all elements: the largest |x| covers the mean.
        x = self.x.value().abs()
        if self.x.rounding:  # terms that x is computed from may have cancelled too
            x = x.clamp(min=self.x.magnitude().to(x.dtype))
        affine, rows = self.affine
        if rows is not None:
            rstd, mean = rows
            rows = torch.stack([rstd, -mean.abs()])  # x - mean then is |x| + |mean|
        return largest_of(_ops.NORMALIZE(x, affine.abs(), rows, _ops.dim_order_of(x)))

    def leaves(self) -> Iterator[Leaf]:
        yield from self.x.leaves()
        for tensor in self.affine:
            if tensor is not None:
                yield Leaf(tensor, is_auxiliary=True)


class Call(Computed):
    """The result of a PyTorch operation or view, applied to other specs' values and to arguments.

    Attributes:
        function: The operation: `function(*inputs, *arguments)`.
        inputs: The specs of the inputs.
        arguments: The arguments after the inputs.
        bound: Returns a bound on the magnitude of the result, given the magnitudes of the inputs.
        dtype: The dtype of the result; None if it is the dtype that `function` returns. The two may
            differ because an in-place operation computes in the promoted dtype, and casts to the
            dtype of the tensor that it overwrites.
    """

    __slots__ = ("arguments", "bound", "dtype", "function", "inputs")

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Spec],
        arguments: Sequence[Any] = (),
        cost: float = 1,
        bound: Callable[[list[Tensor]], Tensor] = lambda inputs: largest(inputs),
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.function, self.inputs, self.arguments, self.bound = function, inputs, arguments, bound
        self.dtype = dtype
        first, *others = inputs
        self.cost, self.rounding = first.cost + cost, first.rounding
        self.tolerance = first.tolerance
        self.leaf_bytes, self.auxiliary_bytes = first.leaf_bytes, first.auxiliary_bytes
        self.keeps_strides, self.products = first.keeps_strides, first.products
        for spec in others:
            self.cost += spec.cost
            self.rounding = max(self.rounding, spec.rounding)
            self.tolerance = max(self.tolerance, spec.tolerance)
            self.leaf_bytes += spec.leaf_bytes
            self.auxiliary_bytes += spec.auxiliary_bytes
            self.keeps_strides &= spec.keeps_strides
            if spec.products:
                self.products = tuple(dict.fromkeys((*self.products, *spec.products)))
        if dtype is not None and self.rounding:  # a cast rounds once more
            self.rounding = max(self.rounding, 2 * _eps(dtype))

    @property
    def how(self) -> str:
        first, *others = self.inputs
        return Packed.how if others or not isinstance(first, Leaf) else first.how

    def compute(self, turn: int | None) -> Tensor:
        return self.of(*[spec.value(turn) for spec in self.inputs])

    def inner(self) -> Iterable[Spec]:
        return self.inputs

    def of(self, *inputs: Tensor) -> Tensor:
        """Return the result for given values of the inputs."""
        value = self.function(*inputs, *self.arguments)
        return value if self.dtype in (None, value.dtype) else value.to(self.dtype)

    def magnitude(self) -> Tensor:
        return self.bound([spec.magnitude() for spec in self.inputs])

    def leaves(self) -> Iterator[Leaf]:
        for spec in self.inputs:
            yield from spec.leaves()


class ViewCall(Call):
    """A view of another spec's value, or another call that costs nothing.

    `keeps_strides` tells whether the value has the strides that the tensor had in forward; None if
    that depends on the inputs.
    """

    __slots__ = ()

    @property
    def how(self) -> str:
        return self.inputs[0].how

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Spec],
        *arguments: Any,
        keeps_strides: bool | None = None,
    ) -> None:
        # Not `Call.__init__`, which takes long: a spec may contain many views.
        Computed.__init__(self)
        self.function, self.inputs, self.arguments = function, inputs, arguments
        self.bound, self.dtype = largest, None
        (spec,) = inputs
        self.cost, self.rounding, self.tolerance = spec.cost, spec.rounding, spec.tolerance
        self.leaf_bytes, self.auxiliary_bytes = spec.leaf_bytes, spec.auxiliary_bytes
        self.keeps_strides = spec.keeps_strides if keeps_strides is None else keeps_strides
        self.products = spec.products

    def added_cost(self) -> float:
        return self.inputs[0].added_cost()

    def is_current(self) -> bool:
        return self.inputs[0].is_current()

    def value(self, turn: int | None = None) -> Tensor:
        return self.compute(turn)

    def add_consumer(self, turn: int, reach: int = REACH) -> None:
        (spec,) = self.inputs
        spec.add_consumer(turn, reach)

    def move_consumer(self, old: int, new: int) -> None:
        (spec,) = self.inputs
        spec.move_consumer(old, new)


def largest(magnitudes: list[Tensor]) -> Tensor:
    """Bound an activation, a view or a concatenation: return the largest input magnitude."""
    return torch.stack(magnitudes).amax()


def largest_or_one(magnitudes: list[Tensor]) -> Tensor:
    """Bound an activation that is not 0 at 0, such as sigmoid: return at least 1."""
    return largest(magnitudes).clamp(min=1.0)


def total(magnitudes: list[Tensor]) -> Tensor:
    """Bound a sum: return the sum of the input magnitudes."""
    return torch.stack(magnitudes).sum()


def product(magnitudes: list[Tensor]) -> Tensor:
    """Bound a product: return the product of the input magnitudes."""
    return torch.stack(magnitudes).prod()
