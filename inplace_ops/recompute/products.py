"""Products that widen: convolutions and matrix products whose output is larger than their input.

NOTE [Narrow points]

A block of a network often widens what it gets, and makes it narrow again: a transformer's first
linear layer, a convolution that expands the channels. Autograd saves the wide tensors. The engine
saves what is narrow, and computes the wide tensors from it again.

1. A product has a spec only if its output has more bytes than its input. If products of equal width
   had one, the engine would also replace the narrow tensors, and each would be recomputed from the
   one before it.
2. What a product takes is counted in passes over its output: see `costs.py`.
3. A product runs at most once more in a backward pass, and costs nothing for later consumers. Its
   spec keeps the value from the first read to the last: several views of one value (queries, keys
   and values), the norm and the activation that read it. A consumer that is farther away than
   `NEAR` from the others would keep the value for long, or compute it again. It saves its tensor
   as PyTorch does: a U-Net's skip.
4. A product inside a spec keeps its value while those after it run, for its other consumers. So a
   spec has a few products at most: more would save more, and raise the peak.
5. A norm between two products is not run again, as its statistics are saved. So running statistics
   do not change, and nothing random is drawn.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_private import (
    NO_PASS,
    ProductFlags,
    call_after_pass,
    in_tf32,
    product_flags,
    running_pass,
    under_product_flags,
)
from . import costs, nodes
from .affine import COPY_LIMIT
from .calls import Call, ViewCall
from .nodes import Node
from .operations import ProductRule, arguments_of
from .specs import REACH, Leaf, ProductInside, Spec, keeping
from .tensors import has_storage, is_plain
from .values import Value, prove_input
from .views import VIEW_OF, base_of, viewed
from .weights import ModelTensors, ProductFacts, SavedCast, Weight, weights_among

NEAR = 24  # turns from one consumer to the next: see 3 of NOTE [Narrow points]

# The norm of the error of a product over that of its value, in units of eps times the root of the
# number of terms in an element.
_PRODUCT_ROUNDINGS = 16
_LARGEST_TOLERANCE = 4e-3  # a factor of 1.01 is never within it


class _Kept(NamedTuple):
    """A product's value that is kept in a backward pass.

    Attributes:
        value: The value.
        running_pass: The backward pass that has computed it.
        reads_left: How often it will still be read, if all consumers run.
    """

    value: Tensor
    running_pass: int
    reads_left: int


class Product(NamedTuple):
    """A product, for its spec.

    Attributes:
        cost: The passes over its output.
        narrowing: The size of its input over that of its output.
        flops: The floating point operations.
        terms: The number of terms in an element of the output.
        flags: The flags of the device's products in forward.
        factors: The specs of its weight, and of its bias if there is one.
        dtype: The dtype of its output.
    """

    cost: float
    narrowing: float
    flops: int
    terms: int
    flags: ProductFlags
    factors: Sequence[Spec]
    dtype: torch.dtype


class ProductCall(Call):
    """A product, which runs at most once in a backward pass: see 3 of NOTE [Narrow points].

    Attributes:
        flags: The flags of the device's products in forward.
        flops: The floating point operations.
        weights: The parameters and buffers that it reads, except by autocast's casts.
        lasts: Whether all of these are known to be there in backward.
    """

    reach_of_cheap = 1

    __slots__ = (
        *("_inside", "_kept_value", "_last_turn", "_reads"),
        *("flags", "flops", "lasts", "narrowing", "weights"),
    )

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Spec | None],
        arguments: Sequence[Any],
        product: Product,
    ) -> None:
        given = [spec for spec in inputs if spec is not None]
        if len(given) < len(inputs):
            arguments = [None, *arguments]
        super().__init__(function, given, arguments, dtype=product.dtype)
        # The inputs are smaller, so a pass over them costs less.
        self.cost = product.cost + product.narrowing * sum(spec.cost for spec in given)
        eps = torch.finfo(product.dtype).eps
        own = min(_PRODUCT_ROUNDINGS * math.sqrt(product.terms) * eps, _LARGEST_TOLERANCE)
        self.tolerance = max(own, self.tolerance)
        self.rounding = max(eps, self.rounding)
        self.flags, self.flops = product.flags, product.flops
        self.weights = weights_among(product.factors)
        self.narrowing = product.narrowing
        self.lasts = False
        self._kept_value: _Kept | None = None
        self._last_turn = self._reads = 0

    @property
    def products(self) -> tuple[ProductInside, ...]:
        return self, *self._inside  # stored, it would be a reference cycle

    @products.setter
    def products(self, inside: tuple[ProductInside, ...]) -> None:
        self._inside = inside

    def is_read_near(self, turn: int) -> bool:
        return not self._reads or turn - self._last_turn <= NEAR

    def added_cost(self) -> float:
        if self._reads:
            return 0.0
        inside = sum(spec.cost - spec.added_cost() for spec in self.inner())
        return self.cost - self.narrowing * inside

    def value(self, turn: int | None = None) -> Tensor:
        this_pass = running_pass()
        if this_pass == NO_PASS:
            return self.compute(turn)
        kept = self._kept_value  # rule 3 of NOTE [Narrow points]
        if kept is None or kept.running_pass != this_pass:
            kept = _Kept(self.compute(turn), this_pass, self._reads)
            if kept.reads_left > 1:
                keeping.specs.append(weakref.ref(self))  # in case an error ends the pass
                call_after_pass(partial(_drop, weakref.ref(self), this_pass))
        left = kept.reads_left - 1
        self._kept_value = _Kept(kept.value, this_pass, left) if left > 0 else None
        return kept.value

    def compute(self, turn: int | None) -> Tensor:
        inputs = [spec.value(turn) for spec in self.inputs]
        device_type = inputs[0].device.type
        if product_flags(device_type) == self.flags:  # rule 7 of NOTE [Weights are proved]
            return self.of(*inputs)
        with under_product_flags(device_type, self.flags):
            return self.of(*inputs)

    def magnitude(self) -> Tensor:
        return Leaf(self.value()).magnitude()

    def add_consumer(self, turn: int, reach: int = REACH) -> None:
        self._reads += 1
        if self._reads == 1:
            self._last_turn = turn
            self._add_inside(turn, reach)
        else:
            self._read_last_by(turn)

    def move_consumer(self, old: int, new: int) -> None:
        self._read_last_by(new)

    def read_again(self) -> None:
        self._reads += 1

    def drops(self, turn: int) -> bool:
        kept = self._kept_value
        if kept is not None and kept.running_pass != running_pass():
            self._kept_value = kept = None
        return kept is None

    def _read_last_by(self, turn: int) -> None:
        """Let the inputs be read by the consumer that backward reaches first."""
        if turn > self._last_turn:
            last, self._last_turn = self._last_turn, turn
            self._move_inside(last, turn)


def _drop(product: weakref.ref[ProductCall], this_pass: int) -> None:
    """Drop a value that was kept in a pass, which has ended."""
    spec = product()
    if spec is not None:
        kept = spec._kept_value
        if kept is not None and kept.running_pass == this_pass:
            spec._kept_value = None


def facts_of(
    node: Node,
    value: Value,
    rule: ProductRule,
    is_unmodified: Callable[[Tensor, Node], bool],
    model: ModelTensors,
) -> ProductFacts | None:
    """Return what a new product has read; None unless it widens, and reads parameters as it does.

    See NOTE [Weights are proved] in `weights.py`.

    Args:
        node: The product's node.
        value: Its value.
        rule: Its output rule.
        is_unmodified: Returns whether a parameter is unmodified since the product ran.
        model: The model's parameters and buffers.
    """
    shapes = _narrow_shapes(node, rule)
    widening = [*shapes]
    if not widening:  # rule 1 of NOTE [Narrow points]
        return None
    parameters = {i: _parameter_of(node, rule.operands[i][1]) for i in widening}
    weight = next((i for i in widening if parameters[i] is not None), None)
    if weight is None:  # a frozen weight has no edge
        edges = ((i, nodes.producer(node, rule.operands[i][1])[0]) for i in widening)
        weight = next((i for i, edge in edges if edge is None), None)
    if weight is None:
        return None
    input_shape = shapes[weight]
    field, position = rule.operands[weight]
    saved = nodes.saved_tensor(node, field)
    parameter = parameters[weight]
    if parameter is None:
        parameter = None if saved is None else model.at(saved)
    bias = None if rule.bias is None else _parameter_of(node, rule.bias)
    is_bias_unmodified = bias is None or is_unmodified(bias, node)
    if parameter is None or not is_unmodified(parameter, node) or not is_bias_unmodified:
        return None
    factor: Spec | None
    if nodes.producer(node, position)[0] is None:
        assert saved is not None
        factor = _frozen_weight(saved, parameter)
    else:
        factor = _weight_of(node, position, parameter, saved)
    factors: tuple[Spec | None, ...] = (factor,)
    if rule.bias is not None and rule.has_bias(node):
        factors = (factor, None if bias is None else _bias_of(node, rule.bias, bias))
    field, position = rule.operands[1 - weight]
    if nodes.saved_tensor(node, field) is None:
        prove_input(node, position, value)
    flags = product_flags(nodes.output_device(node, 0).type)
    shape = torch.Size() if factor is None else factor.value().shape
    return ProductFacts(weight, shape, input_shape, factors, flags)


def widens(node: Node, rule: ProductRule) -> bool:
    """Whether a product's output is larger than its input: rule 1 of NOTE [Narrow points]."""
    return bool(_narrow_shapes(node, rule))


def _narrow_shapes(node: Node, rule: ProductRule) -> dict[int, torch.Size]:
    """Return the shapes of operands that are smaller than the output, by the index of the weight.

    The weight is then the other operand.
    """
    size = nodes.output_shape(node, 0).numel()
    shapes = {i: _shape_of(node, *rule.operands[1 - i]) for i in rule.weights}
    return {i: shape for i, shape in shapes.items() if shape is not None and size > shape.numel()}


def _shape_of(node: Node, field: str, position: int) -> torch.Size | None:
    """Return the shape of an operand; None if the node neither saves it nor has an edge to it."""
    saved = nodes.saved_tensor(node, field)
    if saved is not None:
        return saved.shape
    producer, index = nodes.producer(node, position)
    return None if producer is None else nodes.output_shape(producer, index)


def _parameter_of(node: Node, position: int) -> Tensor | None:
    """Return the autograd leaf of which an input is a view, a cast, or a view of a cast.

    Return None if the input is another tensor.
    """
    base, _ = base_of(*nodes.producer(node, position))
    if base is not None and nodes.is_cast_of_autograd_leaf(base):
        base, _ = nodes.producer(base, 0)
    return None if base is None else nodes.autograd_leaf_of(base)


def _weight_of(node: Node, position: int, parameter: Tensor, saved: Tensor | None) -> Spec | None:
    """Return the spec of a weight to which an edge leads: rule 1 of NOTE [Weights are proved].

    Args:
        node: The product's node.
        position: The index of the edge.
        parameter: The parameter.
        saved: The weight, if the node saves it.
    """
    producer, index = nodes.producer(node, position)
    base, _ = base_of(producer, index)
    if base is not None and nodes.is_cast_of_autograd_leaf(base):
        return None if saved is None else SavedCast(saved)
    if not is_plain(parameter) or not has_storage(parameter):
        return None
    return _view_of_weight(producer, index, Weight(parameter, parameter._version))


def _view_of_weight(node: Node, index: int, weight: Weight) -> Spec:
    """Return the spec of an output that is a parameter or a view of one."""
    view = VIEW_OF[type(node)]
    if view is None:
        return weight
    inner = _view_of_weight(*viewed(node, index), weight)
    return ViewCall(view.function, (inner,), *arguments_of(node, index, view.arguments))


def _frozen_weight(saved: Tensor, parameter: Tensor) -> Spec:
    """Return the spec of a weight that a node saves without an edge, an alias of a parameter."""
    weight = Weight(parameter, parameter._version)
    layout = saved.shape, saved.stride()
    if (parameter.shape, parameter.stride()) == layout:
        return weight
    return ViewCall(torch.as_strided, (weight,), *layout, saved.storage_offset())


def _bias_of(node: Node, position: int, parameter: Tensor) -> Spec | None:
    """Return the spec of a bias to which an edge leads: rule 2 of NOTE [Weights are proved]."""
    if not is_plain(parameter) or not has_storage(parameter):
        return None
    producer, index = nodes.producer(node, position)
    base, _ = base_of(producer, index)
    if base is None or not nodes.is_cast_of_autograd_leaf(base):
        return _view_of_weight(producer, index, Weight(parameter, parameter._version))
    return _cast_of(parameter, nodes.output_dtype(base, 0)) if base is producer else None


def with_frozen_bias(facts: ProductFacts, node: Node, bias: Tensor) -> ProductFacts:
    """Return the facts with a bias to which no edge leads, right after its module's forward."""
    dtype = nodes.output_dtype(node, 0)  # autocast may have cast the bias
    spec = Weight(bias, bias._version) if bias.dtype is dtype else _cast_of(bias, dtype)
    weight, weight_shape, input_shape, (factor, *_), flags = facts
    return ProductFacts(weight, weight_shape, input_shape, (factor, spec), flags)


def _cast_of(bias: Tensor, dtype: torch.dtype) -> Leaf | None:
    if bias.nbytes > COPY_LIMIT:
        return None
    return Leaf(bias.detach().to(dtype), is_auxiliary=True)


def product_of(node: Node, rule: ProductRule, facts: ProductFacts) -> Product | None:
    """Return a product; None if its weight or bias is unknown, or modified since.

    See rules 2 and 3 of NOTE [Weights are proved] in `weights.py`.
    """
    factors = [spec for spec in facts.factors if spec is not None and spec.is_current()]
    if len(factors) < len(facts.factors):
        return None
    shape, dtype = nodes.output_shape(node, 0), nodes.output_dtype(node, 0)
    size, input_size = shape.numel(), facts.input_shape.numel()
    flops = rule.flops(node, facts.input_shape, facts.weight_shape, facts.weight)
    device_type = nodes.output_device(node, 0).type
    is_in_tf32 = in_tf32(facts.flags, device_type, rule.is_convolution)
    cost = costs.passes(
        flops,
        (input_size + facts.weight_shape.numel() + size) * dtype.itemsize,
        size * dtype.itemsize,
        costs.flops_per_byte(device_type, dtype, is_in_tf32),
    )
    return Product(
        cost=cost,
        narrowing=input_size / size,
        flops=flops,
        terms=max(1, flops // (2 * size)),
        flags=facts.flags,
        factors=factors,
        dtype=dtype,
    )


def call_of(
    node: Node, rule: ProductRule, facts: ProductFacts, product: Product, x: Spec
) -> ProductCall:
    """Return the spec of a product of x."""
    weight, *bias = product.factors
    operands: list[Spec | None] = [x, weight] if facts.weight == 1 else [weight, x]
    operands += bias or [None]
    return ProductCall(rule.function, operands, arguments_of(node, 0, rule.arguments), product)
