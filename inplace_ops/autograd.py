"""The autograd Functions of the in-place activations.

Every backward is an op that is linear in the incoming gradient. With create_graph=True the op runs
inside of another Function, which defines the second derivative.

The Functions that modify their input set up ctx in forward. A separate `setup_context` would triple
the cost of a call, and only torch.func's transforms need one, under which these Functions never
run.

NOTE [Modified before the check]

1. Forward overwrites its input and marks it dirty, which raises the input's version by one, as
   PyTorch's in-place ops do.
2. Autograd checks dirty inputs only after forward. If it rejects one (a leaf that requires grad, a
   view that must not be modified), the data is already overwritten.
3. So `dispatch.py` calls `check_inplace_allowed` before it applies one of these Functions. It runs
   autograd's check. An input that is rejected is unchanged.

NOTE [Slices and CopySlices]

If the input of an in-place Function is a view, for example a slice, autograd makes two nodes: the
Function's own node, and a CopySlices node for the view's base, which calls the own node's backward.
If the Function saves its output, a first derivative with create_graph=True depends on that output,
and unpacks it with the own node as its grad_fn. So a second derivative visits the own node twice:
as a node of the graph, and from CopySlices.

1. After visiting the own node as a node of the graph, autograd frees its saved tensors.
2. Of the nodes that are ready, autograd visits the one with the highest sequence number first, and
   each thread counts its own. If one thread has made all nodes, CopySlices comes first and nothing
   is missing. On a GPU, backward runs in another thread, which counts the nodes that it creates for
   the second derivative. Then the own node may come first, and its saved tensors are already freed
   when CopySlices reads them.
3. So the own node's visit stores the saved tensors, detached and with their versions, unless
   CopySlices was visited earlier in the same backward pass or the pass creates a graph.
4. A visit from CopySlices clears the stored tensors: otherwise they would live as long as the loss.
   If the saved tensors are freed, it uses the stored ones, provided that no version has changed and
   the pass creates no graph; otherwise it raises autograd's error.
5. `_SliceSavedTensors` implements this. A node has one only after CopySlices has called it with
   create_graph=True; without one its saved tensors are read directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function, forward_ad

from . import _ops
from ._ops import DimOrder, OpArgs
from ._torch_private import (
    COPY_SLICES,
    creation_meta,
    is_legacy_batchedtensor,
    is_named,
    running_node,
    running_pass,
)
from .activations import ACTIVATIONS, Activation, Save


def check_inplace_allowed(input: Tensor) -> None:
    """Raise autograd's error if it does not allow the tensor to be modified in place.

    See NOTE [Modified before the check].
    """
    if input.is_leaf or (
        input._is_view()
        and (
            input._base.is_leaf  # type: ignore[union-attr]
            or creation_meta(input) != "DEFAULT"
        )
    ):
        # Autograd runs the same check for every in-place op, and raises before the op runs.
        input.mul_(1)
        raise AssertionError("autograd was expected to reject modifying this tensor in place")


def run_backward(
    op: _ops.Call,
    grad: Tensor,
    *saved: Any,
    differentiable: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return `op(grad, *saved)`, which must be linear in grad.

    If grad mode is on, return `differentiable(grad, op, *saved)` instead, by default
    `_Linear.apply`. If grad has a forward-mode tangent, the result's tangent is computed in the
    same way.
    """
    if is_grad_enabled() or forward_ad._current_level >= 0:
        return _run_transformed(differentiable or _Linear.apply, op, grad, *saved)
    try:
        return op(grad, *saved)
    except RuntimeError as error:
        _ops.raise_out_of_memory(error, partial(torch.empty_like, grad))
        raise


def _run_transformed(
    differentiable: Callable[..., Tensor], op: _ops.Call, grad: Tensor, *saved: Any
) -> Tensor:
    def run(grad: Tensor) -> Tensor:
        return differentiable(grad, op, *saved) if is_grad_enabled() else op(grad, *saved)

    if is_grad_enabled() and is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "with is_grads_batched=True (torch.autograd.functional.jacobian's vectorize=True) and "
            "create_graph=True PyTorch loses the second derivative of every autograd.Function: use "
            "torch.func.jacrev, or a loop over the gradients"
        )
    if forward_ad._current_level >= 0:
        primal, tangent = forward_ad.unpack_dual(grad)
        if tangent is not None:
            return forward_ad.make_dual(run(primal), run(tangent))
    return run(grad)


class _Linear(Function):
    """The function grad -> op(grad, *saved), with derivative 0 with respect to `saved`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, op: _ops.Call, saved: Tensor, *rest: Any) -> Tensor:
        return op(grad, saved, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.op, saved, *ctx.rest = inputs
        ctx.save_for_backward(saved)

    @staticmethod
    def backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        gradient = run_backward(ctx.op, grad_grad, saved, *ctx.rest)
        # A saved output is part of the graph: its gradient is 0, as PyTorch's is, and not None.
        zeros = torch.zeros_like(saved) if ctx.needs_input_grad[2] else None
        return gradient, None, zeros, *[None] * len(ctx.rest)


class _OutputDoubleBackward(Function):
    """The gradients of `_OutputBackward` with respect to grad and output.

    A third derivative raises.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_grad: Tensor,
        grad: Tensor,
        output: Tensor,
        packed: Tensor,
        dim_order: DimOrder,
        activation: Activation,
    ) -> tuple[Tensor, Tensor]:
        ops = activation.ops
        assert ops.double_backward is not None
        return (
            ops.backward["output"](grad_grad, output, packed, dim_order),
            ops.double_backward(grad_grad, grad, output, packed, dim_order),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.activation = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise _third_derivative(ctx.activation)


def _third_derivative(activation: Activation) -> RuntimeError:
    return RuntimeError(f"{activation.function} can be differentiated twice, but not a third time")


class _OutputBackward(Function):
    """The gradient grad * f'(x), with x recovered from the output and the packed bits.

    It can be differentiated once.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor,
        output: Tensor,
        packed: Tensor,
        dim_order: DimOrder,
        activation: Activation,
    ) -> Tensor:
        return activation.ops.backward["output"](grad, output, packed, dim_order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, activation_output, packed, ctx.dim_order, ctx.activation = inputs
        ctx.save_for_backward(grad, activation_output, packed)

    @staticmethod
    def backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
        # The saved output leads to x, so the gradients have a graph even if grad_grad has none.
        double_backward: Any = _OutputDoubleBackward
        run = double_backward.apply if is_grad_enabled() else double_backward.forward
        gradients = run(grad_grad, *ctx.saved_tensors, ctx.dim_order, ctx.activation)
        return *gradients, None, None, None


class _Stored(NamedTuple):
    """A saved tensor and its version when it was stored."""

    tensor: Tensor
    version: int

    @property
    def was_written_to(self) -> bool:
        return self.tensor._version != self.version


class _SliceSavedTensors:
    """The saved tensors of a node that a second derivative visits twice.

    See NOTE [Slices and CopySlices].
    """

    def __init__(self) -> None:
        self.stored: list[_Stored] = []
        self.last_copy_slices_pass = -1  # the last backward pass that visited CopySlices

    def saved_tensors(self, ctx: Any) -> tuple[Tensor, ...]:
        """Return the tensors that ctx has saved, or the stored ones if autograd has freed them."""
        backward_pass = running_pass()
        if not _is_in_copy_slices():
            saved: tuple[Tensor, ...] = ctx.saved_tensors
            if self.last_copy_slices_pass != backward_pass and not is_grad_enabled():
                self.stored = [_Stored(tensor.detach(), tensor._version) for tensor in saved]
            return saved
        self.last_copy_slices_pass = backward_pass
        stored, self.stored = self.stored, []
        try:
            saved = ctx.saved_tensors
        except RuntimeError:
            if is_grad_enabled() or not stored or any(s.was_written_to for s in stored):
                raise
            saved = tuple([s.tensor for s in stored])
        return saved


def _is_in_copy_slices() -> bool:
    return is_named(running_node(), COPY_SLICES)


def _saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    slice_saved: _SliceSavedTensors | None = getattr(ctx, "slice_saved", None)
    if slice_saved is not None:
        return slice_saved.saved_tensors(ctx)
    if is_grad_enabled() and _is_in_copy_slices():
        ctx.slice_saved = _SliceSavedTensors()  # a second derivative may follow
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    return saved


class _InPlaceFunction(Function):
    """Base class of the Functions: `apply(x, (bits, op_args))` replaces x by its activation.

    `apply` returns x itself. It saves `bits` packed bits per element for backward, and the output
    if `bits` is 0 or `saves_output_and_bits` is set. `op_args` are the last arguments of the ops:
    the order of x's dimensions in memory, and the activation's scalar arguments. Both are one
    argument of the Function, as autograd looks at each.

    Attributes:
        activation: The activation that is computed.
        save_modes: The save modes that the Function implements. With packed bits it uses the first;
            without them it saves the output.
        saves_output_and_bits: Whether it saves its output in addition to packed bits.
        save_in_place: The op that overwrites x and returns packed bits.
        multiply: The op that multiplies the gradient, with packed bits.
    """

    activation: ClassVar[Activation]
    save_in_place: ClassVar[_ops.Call]
    multiply: ClassVar[_ops.Call]
    save_modes: ClassVar[tuple[Save, ...]]
    saves_output_and_bits: ClassVar[bool] = False

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, saved: tuple[int, OpArgs]) -> Tensor:
        bits, op_args = saved
        packed, (dim_order, scalars), ops = None, op_args, cls.activation.ops
        if bits:
            packed = cls.save_in_place(x, bits, dim_order, *scalars)
        else:
            ops.call_in_place(x, dim_order, *scalars)
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        cls.save_tensors(ctx, x, packed, op_args)
        return x

    @classmethod
    def save_tensors(cls, ctx: Any, output: Tensor, packed: Tensor | None, op_args: OpArgs) -> None:
        """Save the output, the packed bits or both, whichever backward needs, and choose its op."""
        ctx.function, ctx.op_args, ctx.op = cls, op_args, cls.multiply
        if packed is None:
            ctx.op = cls.activation.ops.call_backward["output"]
            ctx.save_for_backward(output)
        elif cls.saves_output_and_bits:
            ctx.save_for_backward(output, packed)
        else:
            ctx.save_for_backward(packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:  # from a later Function's backward; passed on, leaves' .grad stays None
            return None, None
        try:
            saved = _saved_tensors(ctx)
            dim_order, scalars = ctx.op_args
            if is_grad_enabled() or forward_ad._current_level >= 0:
                gradient = _run_transformed(
                    ctx.function.differentiable, ctx.op, grad, *saved, dim_order, *scalars
                )
            else:
                grad = _ops.in_order(grad, dim_order)
                gradient = ctx.op(grad, *saved, dim_order, *scalars)
        except RuntimeError as error:
            ctx.function.raise_clearer_error(error, grad)
            raise
        return gradient, None

    @classmethod
    def differentiable(cls, grad: Tensor, op: _ops.Call, *saved: Any) -> Tensor:
        """Compute `op(grad, *saved)` so that the result can be differentiated."""
        return _Linear.apply(grad, op, *saved)

    @classmethod
    def raise_clearer_error(cls, error: RuntimeError, grad: Tensor) -> None:
        """Raise a clearer error than `error`, if there is one."""
        _ops.raise_out_of_memory(error, partial(torch.empty_like, grad))


class MaskFunction(_InPlaceFunction):
    """Saves one bit per element, or the output if `bits` is 0.

    The bit is 1 where the gradient is the incoming gradient.
    """

    save_modes = ("mask", "output")


class OutputFunction(_InPlaceFunction):
    """Saves the output and packed bits of the input.

    Backward recovers the input from both, and multiplies the gradient by f'(x).
    """

    save_modes = ("output",)
    saves_output_and_bits = True

    @classmethod
    def differentiable(cls, grad: Tensor, op: _ops.Call, *saved: Any) -> Tensor:
        return _OutputBackward.apply(grad, *saved, cls.activation)

    @classmethod
    def raise_clearer_error(cls, error: RuntimeError, grad: Tensor) -> None:
        super().raise_clearer_error(error, grad)
        if "inplace operation" in str(error):
            name = cls.activation.function
            raise RuntimeError(
                f"{error} The modified tensor is the output of {name}, which backward reads: "
                f'{name}(x, save="derivative") allows its output to be modified.'
            ) from None


class DerivativeFunction(_InPlaceFunction):
    """Saves f'(x) as packed codes of 8, 16 or 32 bits. Backward multiplies the gradient by it."""

    save_modes = ("derivative",)

    @classmethod
    def differentiable(cls, grad: Tensor, op: _ops.Call, *saved: Any) -> Tensor:
        # Raises even if grad has no graph: no saved tensor leads a second derivative to x.
        raise RuntimeError(
            f'{cls.activation.function}(x, save="derivative") saves only the first derivative and '
            'cannot be differentiated twice (create_graph=True): use save="output".'
        )


def _functions_of(activation: Activation) -> Iterator[type[_InPlaceFunction]]:
    """Yield a Function for each way in which an activation saves tensors.

    Autograd shows a Function's name as the name of its nodes.
    """
    bases: dict[str, type[_InPlaceFunction]] = {"Function": MaskFunction}
    if not activation.is_piecewise_linear:
        bases = {"Function": OutputFunction, "DerivativeFunction": DerivativeFunction}
    for suffix, base in bases.items():
        ops, mode = activation.ops, base.save_modes[0]
        attributes = {
            "__doc__": base.__doc__,
            "__module__": __name__,
            "activation": activation,
            "save_in_place": ops.call_save_in_place[mode],
            "multiply": ops.call_backward[mode],
        }
        variant = "".join(v.capitalize() for v in activation.variant.values() if v != "none")
        yield type(f"{activation.name}{variant}{suffix}", (base,), attributes)


FUNCTIONS: Mapping[tuple[Activation, Save], type[_InPlaceFunction]] = {
    (activation, save): function
    for activation in ACTIVATIONS
    for function in _functions_of(activation)
    for save in function.save_modes
}
# ReLUFunction, LeakyReLUFunction, SiLUFunction and the others: pickle finds a class by its name.
globals().update({function.__name__: function for function in FUNCTIONS.values()})


class Applied(NamedTuple):
    """How `dispatch` applies a Function.

    Attributes:
        apply: `Function.apply` without its support of functorch's transforms, under which these
            Functions never run.
        default_bits: The default number of packed bits per element, by dtype.
    """

    apply: Callable[..., Tensor]
    default_bits: Mapping[torch.dtype, int]


APPLY: Mapping[tuple[Activation, Save], Applied] = {
    (activation, save): Applied(
        super(Function, function).apply,  # type: ignore[misc]
        activation.ops.default_bits[save],
    )
    for (activation, save), function in FUNCTIONS.items()
}
