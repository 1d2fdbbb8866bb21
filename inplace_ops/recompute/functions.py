"""The autograd Function of an activation after a norm, which saves no tensor of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .. import _ops
from .._ops import OpArgs
from ..activations import Activation
from ..autograd import run_backward
from . import nodes
from .nodes import function_of, is_being_captured
from .norms import NormAffine
from .specs import Affine, Leaf, Recomputed, Spec

Forward = Callable[[Tensor], Tensor]


class RecomputeFunction(Function):
    """`RecomputeFunction.apply(z, source, activation, op_args, forward)`: the activation of z.

    z is a norm's output. The Function saves the tensors that z is computed from: the norm's input
    x, which the norm saves too, and the norm's affine. Its backward is one kernel that reads x.

    NOTE [The anchor]

    A second derivative needs z, connected to the graph. z is not saved, and if the activation runs
    in place, z's connection to the graph is lost.

    1. So the Function has a second output, the anchor, and saves it: a tensor of z's shape that is
       -0.0 everywhere, expanded from one element that all anchors share.
    2. `z + anchor` has the values of z. Backward passes the gradient of the anchor on to z
       unchanged.
    3. A piecewise-linear activation needs no anchor, as its second derivative is 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        source: Source,
        activation: Activation,
        op_args: OpArgs,
        forward: Forward,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y = forward(z)
        is_in_place = y is z
        if is_in_place:
            ctx.mark_dirty(z)
        ctx.activation, ctx.op_args, ctx.saves_spec = activation, op_args, False
        ctx.output_version = z._version + 1 if is_in_place else 0
        ctx.set_materialize_grads(False)
        anchor = None if activation.is_piecewise_linear else _anchor(z)
        ctx.save_for_backward(source.x, *source.affine, anchor)
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_of_anchor: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        gradient = None if grad is None else _gradient_of_input(ctx, grad)
        if grad_of_anchor is not None:
            gradient = grad_of_anchor if gradient is None else gradient + grad_of_anchor
        return gradient, None, None, None, None


def _anchor(z: Tensor) -> Tensor:
    key = z.dtype, z.device
    element = _ANCHORS.get(key)
    if element is None:
        # A copy from the CPU has ended when `to` returns, so that the element is ready on every
        # stream. It cannot be captured in a CUDA graph, which would write the element at replays.
        if is_being_captured(z):
            return z.new_full((), -0.0).expand(z.shape)
        with torch.inference_mode(False):
            element = _ANCHORS[key] = torch.tensor(-0.0, dtype=z.dtype).to(z.device)
    return element.expand(z.shape)


_ANCHORS: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # the element of all anchors


class Source(NamedTuple):
    """The tensors that z is computed from.

    Passed to the Function as one tuple, so that autograd does not treat the tensors as inputs that
    receive gradients.
    """

    x: Tensor
    affine: NormAffine


def _gradient_of_input(ctx: Any, grad: Tensor) -> Tensor:
    x, channel_affine, row_statistics, anchor = ctx.saved_tensors
    activation, (dim_order, scalars) = ctx.activation, ctx.op_args

    def differentiable(grad: Tensor, *_: Any) -> Tensor:
        """Return the gradient that PyTorch's own activation has, with z connected to the graph."""
        with torch.no_grad():
            z = _ops.NORMALIZE(x, channel_affine, row_statistics, dim_order)
        z = z.requires_grad_() if anchor is None else z + anchor
        y = activation.torch_function(z, *scalars)
        return torch.autograd.grad(y, z, grad, create_graph=True)[0]

    if not torch.is_grad_enabled():
        grad = _ops.in_order(grad, dim_order)
    op = activation.ops.backward["recompute"]
    saved = (x, channel_affine, row_statistics, dim_order, *scalars)
    return run_backward(op, grad, *saved, differentiable=differentiable)


def is_fused(node: Any) -> bool:
    """Whether a node belongs to a RecomputeFunction."""
    return function_of(type(node)) is RecomputeFunction


def output_spec(node: Any) -> Spec:
    """Return the spec of the output of a RecomputeFunction's node."""
    x: Spec
    affine: Any
    if node.saves_spec:  # faster to ask than what the node saves
        packed = nodes.packed(node, "x")
        assert isinstance(packed, Recomputed)
        x, dtype = packed.as_input, packed.dtype
        affine = [nodes.saved_tensor(node, field) for field in ("channel_affine", "row_statistics")]
    else:
        saved, *affine, _ = node.saved_tensors
        x, dtype = Leaf(saved), saved.dtype
    return Affine(x, NormAffine(*affine), dtype, node.activation, node.op_args.scalars)


_apply_recompute = super(Function, RecomputeFunction).apply


def recomputed_activation(
    z: Tensor,
    x: Tensor | Recomputed,
    affine: NormAffine,
    activation: Activation,
    op_args: OpArgs,
    forward: Forward,
) -> Tensor:
    """Return the activation of a norm's output, which backward recomputes from the norm's input.

    Args:
        z: The norm's output.
        x: The norm's input, in z's shape, or what the norm saves instead of it.
        affine: The norm's affine.
        activation: The activation.
        op_args: The last arguments of the activation's ops, for z.
        forward: Computes the activation of z. To run in place it returns z itself, and must not
            raise z's version.
    """
    source = Source(x.detach() if isinstance(x, Tensor) else z.new_empty(0), affine)
    # Skip the part of `Function.apply` that serves functorch's transforms: this never runs in one.
    result = _apply_recompute(z, source, activation, op_args, forward)
    y: Tensor = result if activation.is_piecewise_linear else result[0]
    if isinstance(x, Recomputed):
        node: Any = y.grad_fn
        nodes.replace(node, "x", x)
        node.saves_spec = True
    return y
