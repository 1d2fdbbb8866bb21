"""The autograd Function of an activation after a norm, which saves no tensor of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .. import _ops
from .._ops import OpArgs
from .._torch_private import node_class
from ..activations import Activation
from ..autograd import run_backward
from ..supported import ActivationCall
from . import bypass, nodes
from .affine import NormAffine
from .bypass import Bypass
from .calls import Affine
from .nodes import function_of, is_being_captured
from .packed import Recomputed
from .specs import Leaf, Spec


class Merge(NamedTuple):
    """How an activation runs together with the norm before it.

    Attributes:
        module: The activation's module.
        call: The activation.
        is_in_place: Whether it overwrites the norm's output.
        op_args: The last arguments of the activation's ops, for the norm's output.
        anchor: What `anchor_of` returns.
        x: The norm's input, or what the norm saves instead of it.
        affine: The norm's affine.
        instead: Where backward returns gradients instead of to the norm's output; None if nowhere.
    """

    module: nn.Module
    call: ActivationCall
    is_in_place: bool
    op_args: OpArgs
    anchor: Tensor | None
    x: Tensor | Recomputed
    affine: NormAffine
    instead: Bypass | None

    def activated(self, z: Tensor) -> Tensor:
        """Return the activation of the norm's output: z itself, at the same version, in place."""
        module = self.module
        if not self.is_in_place:
            return type(module).forward(module, z)
        type(module).forward(module, z.data)  # leaves z's version unchanged: `mark_dirty` raises it
        return z


def runs_in_place(module: nn.Module, activation: Activation) -> bool:
    """Whether a module runs in place. PyTorch has no in-place GELU, so GELU ignores `inplace`."""
    return activation.torch_inplace is not None and getattr(module, "inplace", False)


class RecomputeFunction(Function):
    """`RecomputeFunction.apply(z, x, weight, bias, merge)`: the activation of z, a norm's output.

    The Function saves the tensors that z is computed from: the norm's input x, which the norm saves
    too, and the norm's affine. Its backward is one op that reads x. With x, weight and bias,
    backward may return their gradients instead of z's: see `bypass.py`. Autograd does not look for
    tensors inside of `merge`, which would receive gradients.

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
        x: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        merge: Merge,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y = merge.activated(z)
        if y is z:
            ctx.mark_dirty(z)
            ctx.output_version = z._version + 1
        _, (ctx.activation, _), _, ctx.op_args, anchor, saved, affine, instead = merge
        mean = rstd = None
        if instead is not None:
            *_, (mean, rstd), ctx.may_bypass_norm = instead
        if not isinstance(saved, Tensor):
            saved = z.new_empty(0)
        if anchor is not None:
            anchor = anchor.detach()  # `expand` is slower
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(saved, *affine, anchor, mean, rstd)
        return y if anchor is None else (y, anchor)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_of_anchor: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        ctx.spec = None
        gradient: Tensor | None = None
        of_inputs: Sequence[Tensor | None] = (None, None, None)
        if grad is None:
            pass
        elif bypass.is_possible(ctx, grad, NODE_CLASS) and not ctx.has_hooks:
            of_inputs = bypass.gradients(ctx, grad)
        else:
            gradient = _gradient_of_input(ctx, grad)
            if bypass.is_in_compiled_autograd(ctx, NODE_CLASS):
                of_inputs = bypass.zeros(ctx)
        if grad_of_anchor is not None:
            gradient = grad_of_anchor if gradient is None else gradient + grad_of_anchor
        return gradient, *of_inputs, None


def _register_hook(node: Any, hook: Callable[..., Any]) -> Any:
    """Register a hook on a node of a RecomputeFunction.

    The hook gets the gradients that the node's backward returns: from then on that of z.
    """
    node.has_hooks = True
    return super(NODE_CLASS, node).register_hook(hook)


NODE_CLASS = node_class(RecomputeFunction)
NODE_CLASS.register_hook = _register_hook
NODE_CLASS.apply = RecomputeFunction.backward  # PyTorch's looks it up in each backward
# What is true of most new nodes: they have no hooks, save x itself and run out of place, and their
# output has no spec. `may_bypass_norm`, asked in backward, tells whether it may return the norm's
# gradients instead of z's.
NODE_CLASS.has_hooks = NODE_CLASS.saves_spec = False
NODE_CLASS.may_bypass_norm = staticmethod(lambda: False)
NODE_CLASS.output_version, NODE_CLASS.spec = 0, None


def anchor_of(activation: Activation, z: Tensor) -> Tensor | None:
    """Return a tensor of which anchors are aliases; None if the activation needs none."""
    if activation.is_piecewise_linear:
        return None
    key = z.dtype, z.device, z.shape
    anchor = _ANCHORS.get(key)
    if anchor is None:
        element = _ELEMENTS.get(key[:2])
        if element is None:
            # A copy from the CPU has ended when `to` returns, so that the element is ready on every
            # stream. It cannot be captured in a CUDA graph, which would write the element at
            # replays.
            if is_being_captured(z):
                return z.new_full((), -0.0).expand(z.shape)
            with torch.inference_mode(False):
                element = _ELEMENTS[key[:2]] = torch.tensor(-0.0, dtype=z.dtype).to(z.device)
        if len(_ANCHORS) >= _MAX_ANCHORS:
            _ANCHORS.clear()
        with torch.inference_mode(False):
            anchor = _ANCHORS[key] = element.expand(z.shape)
    return anchor


_MAX_ANCHORS = 4096
_ELEMENTS: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # the element of all anchors
_ANCHORS: dict[tuple[torch.dtype, torch.device, torch.Size], Tensor] = {}


def _gradient_of_input(ctx: Any, grad: Tensor) -> Tensor:
    x, channel_affine, row_statistics, anchor, *_ = ctx.saved_tensors
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
    op = activation.ops.call_backward["recompute"]
    saved = (x, channel_affine, row_statistics, dim_order, *scalars)
    return run_backward(op, grad, *saved, differentiable=differentiable)


def is_after_norm(node: Any) -> bool:
    """Whether a node belongs to a RecomputeFunction."""
    return function_of(type(node)) is RecomputeFunction


def output_spec(node: Any) -> Spec:
    """Return the spec of the output of a RecomputeFunction's node.

    The node owns the spec until its backward has run. A consumer may be created later.
    """
    if node.spec is None or not node.spec.is_current():
        x: Spec
        affine: Any
        if node.saves_spec:
            packed = nodes.packed(node, "x")
            assert isinstance(packed, Recomputed)
            x, dtype = packed.as_input, packed.dtype
            fields = "channel_affine", "row_statistics"
            affine = [nodes.saved_tensor(node, field) for field in fields]
        else:
            saved, *affine = node.saved_tensors[:3]
            x, dtype = Leaf(saved), saved.dtype
        affine = NormAffine(*affine)
        node.spec = Affine(x, affine, dtype, node.activation, node.op_args.scalars)
    spec: Spec = node.spec
    return spec


_apply_recompute = super(Function, RecomputeFunction).apply


def recomputed_activation(z: Tensor, merge: Merge) -> Tensor:
    """Return the activation of a norm's output z, which backward recomputes from the norm's input.

    `merge.x` and `merge.affine` must have z's shape.
    """
    instead = merge.instead
    receivers = (None, None, None) if instead is None else instead[:3]
    # Skip the part of `Function.apply` that serves functorch's transforms: this never runs in one.
    result = _apply_recompute(z, *receivers, merge)
    y: Tensor = result if merge.anchor is None else result[0]
    if not isinstance(merge.x, Tensor):
        node: Any = y.grad_fn
        nodes.Field(node, "x").replace(merge.x)
        node.saves_spec = True
    return y
