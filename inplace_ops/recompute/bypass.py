"""The backward of a batch norm together with its activation's, which bypasses the norm's node.

NOTE [Backward of a batch norm and its activation]

PyTorch runs two operations backward: the activation's, which writes the gradient of the norm's
output z, and the norm's, which reads it twice. One op computes the norm's gradients from the
activation's gradient and the norm's input x, and z's gradient is never written.

1. The Function takes the norm's x, weight and bias as inputs, next to z. Its backward returns their
   gradients, and none for z.
2. The graph is otherwise PyTorch's. The norm keeps its node, which gets the gradients of z's other
   consumers alone, or none. Autograd adds what both return, because a norm's backward is linear in
   the gradient of z.
3. If backward creates a graph, or the gradient is batched or has a tangent, or under compiled
   autograd or anomaly mode, the Function returns the gradient of z alone, and the norm's node does
   the rest. Second derivatives are PyTorch's.
4. Code that asks for the gradient of z would get none, so nothing may ask for it. Neither z nor the
   modules of the norm and of the activation may have backward hooks when the activation runs. If
   the activation overwrites z, no tensor is left to ask with. Otherwise z must be gone when
   backward runs, and no hook may have been registered meanwhile (`Watch`). A hook on the Function's
   own node gets the gradient of z (`after_norm.py`). A hook on the norm's node gets None.
5. Only a batch norm in training is computed like this, or an instance norm, which PyTorch runs as a
   batch norm: see `_inputs_of`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_anomaly_enabled, is_grad_enabled, nn
from torch.autograd import forward_ad

from .. import _ops
from .._torch_private import future_gradient_hooks, has_backward_hooks, has_gradient_hooks
from . import nodes, norms
from .affine import NormFacts
from .nodes import Node
from .norms import Statistics


class Watch:
    """Watches a tensor that is not overwritten, for code that may ask for its gradient."""

    def __init__(self, z: Tensor) -> None:
        self._reference = weakref.ref(z)
        self._hooks = future_gradient_hooks(z)

    def sees_no_use(self) -> bool:
        """Whether z is gone, without hooks."""
        return self._reference() is None and not self._hooks


class Bypass(NamedTuple):
    """The inputs of a norm to which backward returns gradients, instead of to its output z.

    Attributes:
        x: The norm's input. Like weight and bias it leads to the graph.
        weight: The weight; None if it needs no gradient, or the norm has none.
        bias: The bias; None likewise.
        statistics: The norm's statistics.
        is_allowed: Whether nothing asks for the gradient of z. Asked in backward.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    statistics: Statistics
    is_allowed: Callable[[], bool]


def bypass_of(
    output: Tensor,
    facts: NormFacts,
    module: nn.Module,
    x: Tensor | None,
    z: Tensor,
    is_in_place: bool,
) -> Bypass | None:
    """Return where backward may return gradients instead of to a norm's output z; None if nowhere.

    Args:
        output: The norm's output, of which z may be a view.
        facts: What is known of the norm.
        module: The activation's module.
        x: The norm's input; None if the norm saves a spec instead.
        z: The activation's input.
        is_in_place: Whether the activation overwrites z.
    """
    node: Any = output.grad_fn
    if not norms.is_batch_norm(node):  # rule 5
        return None
    if output is not z and (not is_in_place or has_gradient_hooks(output)):
        return None  # z is a view of an instance norm's output
    return bypass_of_batch_norm(node, facts, module, x, z, is_in_place)


def bypass_of_batch_norm(
    node: Node,
    facts: NormFacts,
    module: nn.Module,
    x: Tensor | None,
    z: Tensor,
    is_in_place: bool,
) -> Bypass | None:
    """Return the same for the node of a batch norm, whose output is z."""
    if facts.statistics is None:  # rule 5
        return None
    if facts.has_backward_hooks or has_backward_hooks(module) or has_gradient_hooks(z):  # rule 4
        return None
    inputs = _inputs_of(node, x)
    if inputs is None:
        return None
    is_allowed = _always if is_in_place else Watch(z).sees_no_use
    return _ops.record_of(Bypass, (*inputs, facts.statistics, is_allowed))


def _always() -> bool:
    return True


def _inputs_of(node: Node, x: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Return x, weight and bias of a batch norm in training, if all can receive gradients.

    Return None for a batch norm whose input needs no gradient, whose bias was computed, or whose
    parameters have been frozen or unfrozen since.

    Args:
        node: A batch norm's node.
        x: Its input; None if the norm saves a spec instead. The x that is returned then has no
            values: it only leads to the graph.
    """
    edge_of_x, edge_of_weight, edge_of_bias = node.next_functions
    to_weight, to_bias = edge_of_weight[0], edge_of_bias[0]
    if x is not None and type(to_weight) is type(to_bias) is nodes.ACCUMULATE_GRAD_TYPE:
        weight, bias = to_weight.variable, to_bias.variable
        producer, index = edge_of_x
        leads_to_x = producer is not None and x.grad_fn is producer and x.output_nr == index
        if leads_to_x and weight.requires_grad and bias.requires_grad:  # the usual case
            return x, weight, bias
    if x is None:
        x = nodes.tensor_without_values(node, "input")
    # A weight that is not a leaf, such as an instance norm's repeated one, is saved.
    weight = nodes.autograd_leaf_of(edge_of_weight[0])
    if weight is None and edge_of_weight[0] is not None:
        weight = nodes.saved_tensor(node, "weight")
    if not _is_at(edge_of_x, x) or not _is_at(edge_of_weight, weight):
        return None
    bias = nodes.autograd_leaf_of(edge_of_bias[0])
    if not _is_at(edge_of_bias, bias):
        repeated = norms.repeated_parameters_of(node)
        if repeated is None or repeated.bias is None or not repeated.bias.requires_grad:
            return None
        bias = norms.repeated_for_samples(repeated.bias, nodes.output_shape(node, 0)[1])
    return x, weight, bias


def _is_at(edge: tuple[Node, int], tensor: Tensor | None) -> bool:
    """Whether the gradient of a tensor goes to an edge; None is that of an edge to no node.

    `requires_grad` of a leaf may have changed since the norm ran.
    """
    node, index = edge
    if node is None or tensor is None or not tensor.requires_grad:
        return node is None and tensor is None
    if type(node) is nodes.ACCUMULATE_GRAD_TYPE:
        return tensor is node.variable
    return tensor.grad_fn is node and tensor.output_nr == index


def is_possible(ctx: Any, grad: Tensor, node_class: type) -> bool:
    """Whether backward may bypass the norm's node: rules 3 and 4.

    It creates no graph, the gradient is neither batched nor has a tangent, anomaly mode does not
    look for the operation that returns NaN, and nothing asks for the gradient of z.
    """
    return (
        not is_grad_enabled()  # rule 3
        and not is_anomaly_enabled()
        and forward_ad._current_level < 0
        and not _ops.is_batched(grad)
        and not is_in_compiled_autograd(ctx, node_class)
        and ctx.may_bypass_norm()  # rule 4
    )


def is_in_compiled_autograd(ctx: Any, node_class: type) -> bool:
    """Whether compiled autograd runs the backward, which passes another ctx than the node."""
    return not isinstance(ctx, node_class)


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the norm's input, weight and bias; None for those that need none."""
    x, channel_affine, _, _, mean, rstd = ctx.saved_tensors
    dim_order, scalars = ctx.op_args
    grad = _ops.in_order(grad, dim_order)
    call = ctx.activation.ops.call_backward_batch_norm
    try:
        of_x, of_weight, of_bias = call(grad, x, channel_affine, mean, rstd, dim_order, *scalars)
    except RuntimeError as error:
        _ops.raise_out_of_memory(error, partial(torch.empty_like, grad))
        raise
    _, needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    return (
        of_x if needs_x else None,
        of_weight if needs_weight else None,
        of_bias if needs_bias else None,
    )


def zeros(ctx: Any) -> list[Tensor | None]:
    """Return gradients of the norm's input, weight and bias that are 0.

    Compiled autograd adds them to those that the norm's node returns, and cannot add None.
    """
    x, _, _, _, mean, _ = ctx.saved_tensors
    likes = zip((x, mean, mean), ctx.needs_input_grad[1:4], strict=True)
    return [torch.zeros_like(like) if needs else None for like, needs in likes]
