"""The recompute spec of an operation's output, from what its node saves and from its inputs' specs.

A spec is derived when the first node that saves the output asks for it, not when the operation
runs: much comes later. A third operation saves an input, a module's hook tells a norm's eps, a
function mode tells the number that was added. Until a spec is found, each consumer asks anew.

Each function returns a spec, or the reason why there is none: a text for the report. It is "" if
nothing observes the engine, or if the caller knows more. (Of `obstacle`, "" means that nothing is
in the way.)

NOTE [Leaves]

A spec leaf is a tensor that a spec is computed from.

1. A leaf that an operation computed is not copied: that operation, or one that reads the leaf,
   saves it anyway. The engine reads it from the saved field, or from a note of a tensor that some
   consumer saves. It detaches the leaf, stores its version, and compares the version in backward.
2. Other leaves (parameters, buffers, constants) are copied when their operation's node is visited,
   and so are views of them. (A product's weight is too large to copy: its spec refers to it. See
   NOTE [Weights are proved] in `weights.py`.) FSDP2 frees a parameter's memory when its module's
   forward returns, and reading the parameter later crashes. A fused optimizer writes to a parameter
   without raising its version. A leaf that is larger than 64 KiB, or not smaller than the
   operation's output, is not copied, and there is then no spec. When the model's forward has
   returned, only specs own copies.
3. What a user's autograd Function or an unsafe split has returned may be an alias of a parameter,
   which the graph does not show. It is not a leaf.
4. A spec keeps its leaves alive until the consumer's backward, even if the operation that saved
   them runs its own backward earlier, for example with two losses. So the engine builds no spec
   whose leaves are more than four times as large as the saved tensor (a slice of something large),
   and none whose auxiliary tensors are as large as it.
5. A write to a leaf after the spec was built raises in backward. PyTorch raises too in most cases,
   because the operation that saved the leaf raises. It does not if that operation's backward does
   not run, for example if only the gradients of the consumer's own parameters are computed, or has
   run before. If that operation's graph is gone when the spec is built, the tensor is not used as a
   leaf.
6. Copies, and the affines of norms, are computed on the current CUDA stream, and are ready on that
   stream alone. So of each device, the operations of one stream have values: that of the forward's
   first operation. What another stream computes or reads is saved as PyTorch saves it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._torch_private import UNSAFE_SPLITS
from ..memory import Packed
from . import after_norm, nodes, products, reasons
from .affine import COPY_LIMIT
from .calls import Affine, Call, ViewCall, largest
from .kernels import call_of
from .nodes import Field, Node
from .operations import OPERATION_OF, Operation, Output, ProductRule, arguments_of
from .packed import Recomputed
from .settings import Settings
from .specs import Leaf, Spec
from .tensors import has_storage, is_plain
from .values import KEY, OTHER_STREAM, Value, prove_late, saved_output_of, value_of
from .views import VIEW_OF, base_of, viewed
from .weights import ModelTensors, weights_among

_MOST_PRODUCTS = 3  # inside one spec: see 4 of NOTE [Narrow points] in `products.py`


class Deriver:
    """Derives specs during one forward pass.

    Attributes:
        settings: The state of the model.
        model: The model's parameters and buffers.
        is_observed: Whether reasons are wanted.
    """

    def __init__(self, settings: Settings, model: nn.Module, is_observed: bool) -> None:
        self.settings, self.model, self.is_observed = settings, ModelTensors(model), is_observed

    def why(self, reason: Callable[..., str], *args: Any) -> str:
        """Return a reason; "" if none is wanted."""
        return reason(*args) if self.is_observed else ""

    def spec_of(self, node: Node, index: int) -> Spec | str:
        """Return the spec of an output of a node.

        Of an output without a rule the reason is "": the caller knows more about it.
        """
        view = VIEW_OF[type(node)]
        if view is not None:
            if not view.holds_for(node):
                return self.why(reasons.this_call, node)
            spec = self.spec_of(*viewed(node, index))
            if isinstance(spec, str):
                return spec
            return ViewCall(view.function, (spec,), *arguments_of(node, index, view.arguments))
        value, operation = value_of(node), OPERATION_OF[type(node)]
        if value is None:
            return reasons.OTHER_STREAM if node.metadata.get(KEY) is OTHER_STREAM else ""
        if index == 0:
            saved = saved_output_of(node, value)
            is_usable = saved is not None and is_plain(saved) and has_storage(saved)
            if saved is not None and is_usable and not _may_return_alias(node):
                return Leaf(saved)
        if operation is None or not operation.has_spec:
            return ""
        if index != 0:
            return self.why(reasons.this_call, node)
        if operation.saves_output:
            return self._spec_of_saved_output(node, operation.saves_output, value)
        return self.spec_from_inputs(node, operation, value)

    def _spec_of_saved_output(self, node: Node, name: str, value: Value) -> Spec | str:
        field = Field(node, name)
        if field.packed is not None:
            return self._spec_of_packed(node, field.packed)
        if field.tensor is None or not is_plain(field.tensor):
            return self.why(reasons.hidden_output, node, field.is_hidden)
        leaf = value.used_leaf
        if leaf is None:
            leaf = Leaf(field.tensor)
            value.leaf = weakref.ref(leaf)
        return leaf

    def _spec_of_packed(self, node: Node, packed: Packed, in_strides: bool = False) -> Spec | str:
        if not isinstance(packed, Recomputed):
            return self.why(reasons.stored, node, packed.how)
        is_usable = packed.spec.keeps_strides or not in_strides
        return packed.as_input if is_usable else packed.in_forwards_strides()

    def spec_from_inputs(self, node: Node, operation: Operation, value: Value) -> Spec | str:
        """Return the spec that computes an operation's output from its inputs.

        Unlike `spec_of`, this does not read an output that the node itself saves.
        """
        rule = operation.output
        if rule is None:
            return ""
        known = value.spec() if value.spec is not None else None
        if known is not None and known.is_current():
            return known
        if value.unproved and not prove_late(node, value):
            return self.why(reasons.unproved_input, node)
        if isinstance(rule, Output):
            spec = self._spec_by_rule(node, rule, value)
        elif isinstance(rule, ProductRule):
            spec = self._product_spec(node, rule, value)
        elif rule == "norm":
            spec = self._norm_spec(node, value)
        else:
            spec = after_norm.output_spec(node)
        value.spec = None if isinstance(spec, str) else weakref.ref(spec)
        return spec

    def _spec_by_rule(self, node: Node, rule: Output, value: Value) -> Spec | str:
        if not rule.condition(node):
            return self.why(reasons.this_call, node)
        inputs: list[Spec] = []
        for position, name in enumerate(rule.inputs or (None,) * len(nodes.producers(node))):
            spec = self.input_spec(node, value, position, name)
            if isinstance(spec, str):
                return spec
            obstacle = self.obstacle(spec)
            if obstacle:
                return obstacle
            inputs.append(spec)
        return self.call(node, rule, inputs)

    def input_spec(
        self, node: Node, value: Value, position: int, name: str | None, is_rerun: bool = False
    ) -> Spec | str:
        """Return the spec of an operation's input.

        Args:
            node: The operation's node.
            value: Its value.
            position: The index of the input's edge.
            name: The field that saves the input; None if the node does not save it.
            is_rerun: Whether PyTorch's own product or norm runs again. Its kernel depends on the
                strides of the input, which may also be a large constant, such as an image.
        """
        constant = value.constants.get(position)
        if constant is not None:  # rule 2 of NOTE [Leaves]
            return Leaf(constant, is_auxiliary=True)
        if name is not None:
            field = Field(node, name)
            if field.packed is not None:
                return self._spec_of_packed(node, field.packed, is_rerun)
            if field.is_hidden:
                return self.why(reasons.hooked, node)
            if field.tensor is not None:
                leaf = _leaf_of(field.tensor, is_rerun)
                return leaf or self.why(reasons.hidden_input, node)
        producer, index = nodes.producer(node, position)
        spec = "" if producer is None else self.spec_of(producer, index)
        return spec or self.why(reasons.unsaved_input, node, producer, index)

    def _norm_spec(self, node: Node, value: Value) -> Spec | str:
        x, facts = self.input_spec(node, value, 0, "input"), value.norm
        if isinstance(x, str):
            return x
        affine = None if facts is None else facts.affine_of(node)
        if affine is not None:
            return Affine(x, affine, nodes.output_dtype(node, 0))
        rerun = None if facts is None else facts.rerun(node)
        if rerun is None:
            return self.why(reasons.unknown_parameters, node)
        # Once more, as PyTorch's own norm depends on the strides of its input.
        x = self.input_spec(node, value, 0, "input", is_rerun=True)
        return x if isinstance(x, str) else Call(rerun, (x,))

    def _product_spec(self, node: Node, rule: ProductRule, value: Value) -> Spec | str:
        facts, settings = value.product, self.settings
        if facts is None:
            return self.why(reasons.no_product, node)
        product = products.product_of(node, rule, facts)
        if product is None:
            return self.why(reasons.unknown_factors, node)
        if settings.weights.is_freed(weights_among(product.factors)):
            return reasons.FREED
        if settings.rejects(product.cost):
            return self.why(reasons.too_many, settings.max_ops)
        name, position = rule.operands[1 - facts.weight]
        x = self.input_spec(node, value, position, name, is_rerun=True)
        if isinstance(x, str):
            return x
        spec = products.call_of(node, rule, facts, product, x)
        return self.obstacle(spec) or spec

    def call(self, node: Node, rule: Output, inputs: list[Spec]) -> Spec | str:
        """Return the spec of an operation's output, given those of its inputs.

        See NOTE [Exact specs and roundings] in `specs.py`.
        """
        is_exact = not any(spec.rounding for spec in inputs)
        if rule.bound is None and not is_exact:
            return self.why(reasons.amplified_rounding, node)
        keeps_strides = all(spec.keeps_strides for spec in inputs)
        if is_exact and rule.rounds_by_strides and not keeps_strides:  # rule 2
            return self.why(reasons.unknown_strides, node)
        spec = call_of(
            rule.function,
            inputs,
            arguments_of(node, 0, rule.arguments),
            rule.cost,
            rule.bound or largest,
            nodes.output_dtype(node, 0),
        )
        spec.keeps_strides &= rule.keeps_strides(node)
        return spec

    def affordable_spec_of(self, node: Node, index: int) -> Spec | None:
        """Return the spec of an output of a node; None if there is none within the limits."""
        spec = self.spec_of(node, index)
        return None if isinstance(spec, str) or self.obstacle(spec) else spec

    def obstacle(self, spec: Spec) -> str:
        """Return why a spec takes too much; empty if it does not."""
        if len(spec.products) > _MOST_PRODUCTS:
            return reasons.MANY_PRODUCTS
        limit = self.settings.max_ops
        if spec.cost > limit and self.settings.rejects(spec.added_cost()):
            return reasons.too_many(limit)
        return ""


def _leaf_of(saved: Tensor, is_rerun: bool) -> Leaf | None:
    """Return the leaf of a saved input; None if it has none: rules 1 and 2 of NOTE [Leaves]."""
    usable = _is_activation(saved) or (is_rerun and _is_constant(saved))
    return Leaf(saved) if usable and is_plain(saved) and has_storage(saved) else None


def _is_constant(saved: Tensor) -> bool:
    """Whether no operation computed the tensor, and it is not a parameter, which may be freed."""
    base: Tensor | None = saved if saved._base is None else saved._base
    if saved.grad_fn is not None:
        producer, _ = base_of(saved.grad_fn, saved.output_nr)
        base = None if producer is None else nodes.autograd_leaf_of(producer)
    return base is not None and not isinstance(base, nn.Parameter)


def _is_activation(saved: Tensor) -> bool:
    """Whether an operation computed the tensor: it is not a parameter, buffer or constant.

    Nor is it a view of one.
    """
    base = saved._base
    if saved.grad_fn is None or (base is not None and base.grad_fn is None):
        return False
    node, _ = base_of(saved.grad_fn, saved.output_nr)
    if node is None or nodes.autograd_leaf_of(node) is not None:
        return False
    return not _may_return_alias(node)


def _may_return_alias(node: Node) -> bool:
    """Whether an operation may return an alias of a parameter: rule 3 of NOTE [Leaves]."""
    return nodes.is_users_function(type(node)) or type(node).__name__ in UNSAFE_SPLITS


def constants_of(node: Node, rule: Output) -> Mapping[int, Tensor]:
    """Return copies of a node's small saved inputs that no operation computed, by position.

    See 2 of NOTE [Leaves].
    """
    constants: dict[int, Tensor] = {}
    for position, name in enumerate(rule.inputs):
        saved = None if name is None else nodes.saved_tensor(node, name)
        if saved is None or _is_activation(saved):
            continue
        is_small = saved.nbytes <= min(COPY_LIMIT, nodes.output_bytes(node, 0) - 1)
        if is_small and is_plain(saved) and has_storage(saved):
            constants[position] = _copy_of(saved)
    return constants


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a small tensor.

    The tensor may be a number that autograd has saved. Under a dispatch mode operations receive it
    as a Python number, which they cannot copy.
    """
    if tensor.dim() == 0 and tensor.is_cpu:
        return tensor.new_tensor(tensor.tolist())
    return tensor.detach().clone()
