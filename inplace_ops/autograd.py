"""The autograd Functions.

Their forward modifies the input and marks it dirty, which raises its version by one. They are
applied by `inplace_ops.dispatch`, which refuses first what PyTorch refuses: the errors that
`mark_dirty` raises come after forward, when the data is already gone.

Every backward is an op that is linear in the incoming gradient. Where a second derivative may be
asked for it runs as a Function too.

The Functions that modify the input set their context up in forward: a setup_context of their own
would triple the cost of a call, and only torch.func's transforms, which they never meet, need one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import Function, forward_ad

from . import _ops
from ._ops import DimOrder, OpArgs
from ._torch_private import running_node, running_pass
from .activations import (
    GELU,
    GELU_TANH,
    HARDSWISH,
    LEAKY_RELU,
    MISH,
    RELU,
    RELU6,
    SILU,
    Activation,
    Save,
)


def run_backward(
    op: _ops.Op,
    grad: Tensor,
    *saved: Any,
    differentiable: Callable[..., Tensor] | None = None,
) -> Tensor:
    """`op(grad, *saved)`, linear in grad.

    When grad mode is on `differentiable(grad, op, *saved)` instead, by default `_Linear`. A tangent
    that forward-mode AD has given grad goes the same way.
    """
    if is_grad_enabled() or forward_ad._current_level >= 0:
        return _run_transformed(differentiable or _Linear.apply, op, grad, *saved)
    try:
        return op(grad, *saved)
    except RuntimeError as error:
        _raise_out_of_memory(error, grad)
        raise


def _raise_out_of_memory(error: RuntimeError, like: Tensor) -> None:
    """Raise PyTorch's own error, whose type an op that allocates one like this has lost."""
    if "out of memory" in str(error):
        torch.empty_like(like)


def _run_transformed(
    differentiable: Callable[..., Tensor], op: _ops.Op, grad: Tensor, *saved: Any
) -> Tensor:
    def run(grad: Tensor) -> Tensor:
        return differentiable(grad, op, *saved) if is_grad_enabled() else op(grad, *saved)

    if is_grad_enabled() and torch._C._functorch.is_legacy_batchedtensor(grad):
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
    """grad -> op(grad, *saved), whose derivative in what was saved is 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, op: _ops.Op, saved: Tensor, *rest: Any) -> Tensor:
        return op(grad, saved, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.op, saved, *ctx.rest = inputs
        ctx.save_for_backward(saved)

    @staticmethod
    def backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        gradient = run_backward(ctx.op, grad_grad, saved, *ctx.rest)
        # An output that was saved has its place in the graph: PyTorch's is 0 there, and not None.
        zeros = torch.zeros_like(saved) if ctx.needs_input_grad[2] else None
        return gradient, None, zeros, *[None] * len(ctx.rest)


class _OutputDoubleBackward(Function):
    """The gradients of `_OutputBackward` in grad and output. A third derivative raises."""

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
    return RuntimeError(f"{activation.function} can be differentiated twice, and not a third time")


class _OutputBackward(Function):
    """grad * f'(x), x recovered from the output and its bits; differentiable once more."""

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
        # Through its output x's graph is reached, whether or not grad_grad has one.
        double_backward: Any = _OutputDoubleBackward
        run = double_backward.apply if is_grad_enabled() else double_backward.forward
        gradients = run(grad_grad, *ctx.saved_tensors, ctx.dim_order, ctx.activation)
        return *gradients, None, None, None


class _SliceSavedTensors:
    """What an in-place Function's node, whose output is a slice, leaves for a second visit.

    A second derivative visits it twice: as the output's own node, and from the CopySlices node of
    what it is a slice of, which calls it. Autograd frees after the first what that node has saved,
    and visits CopySlices first only where one thread has made all nodes: on a GPU it differentiates
    on a thread of its own.
    """

    def __init__(self) -> None:
        self.stored: list[tuple[Tensor, int]] = []  # with the versions
        self.last_copy_slices_pass = -1  # the backward pass

    def saved_tensors(self, ctx: Any) -> tuple[Tensor, ...]:
        """What ctx has saved, or has left."""
        backward_pass = running_pass()
        if not _is_in_copy_slices():
            saved: tuple[Tensor, ...] = ctx.saved_tensors
            if self.last_copy_slices_pass != backward_pass and not is_grad_enabled():
                self.stored = [(tensor.detach(), tensor._version) for tensor in saved]
            return saved
        self.last_copy_slices_pass = backward_pass
        stored, self.stored = self.stored, []
        try:
            saved = ctx.saved_tensors
        except RuntimeError:
            if is_grad_enabled() or not stored or any(t._version != v for t, v in stored):
                raise
            saved = tuple(tensor for tensor, _ in stored)
        return saved


def _is_in_copy_slices() -> bool:
    return type(running_node()).__name__ == "CopySlices"


def _saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    slice_saved: _SliceSavedTensors | None = getattr(ctx, "slice_saved", None)
    if slice_saved is not None:
        return slice_saved.saved_tensors(ctx)
    if is_grad_enabled() and _is_in_copy_slices():
        ctx.slice_saved = _SliceSavedTensors()  # there may be a second derivative
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    return saved


class _InPlaceFunction(Function):
    """`apply(x, bits, op_args)` replaces x by its activation and returns it.

    `bits` packed bits per element are kept, and the output where there are none. `op_args` is what
    the ops take at their end: the order in which x's elements lie, and the scalar arguments.

    Attributes:
        activation: Which one it is.
        save_modes: What it may keep for backward.
        saves_output_and_bits: Whether it keeps its output beside packed bits.
    """

    activation: ClassVar[Activation]
    save_modes: ClassVar[tuple[Save, ...]]
    saves_output_and_bits: ClassVar[bool] = False

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, bits: int, op_args: OpArgs) -> Tensor:
        packed = None
        if bits:
            packed = cls.activation.ops.save_in_place[cls.save_modes[0]](
                x, bits, op_args.dim_order, *op_args.scalars
            )
        else:
            cls.activation.ops.in_place(x, op_args.dim_order, *op_args.scalars)
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        cls.save_for_backward(ctx, x, packed, op_args)
        return x

    @classmethod
    def save_for_backward(
        cls, ctx: Any, output: Tensor, packed: Tensor | None, op_args: OpArgs
    ) -> None:
        """Save for backward what it needs, and nothing else."""
        ctx.function, ctx.op_args = cls, op_args
        if packed is None:
            ctx.op = cls.activation.ops.backward["output"]
            ctx.save_for_backward(output)
        elif cls.saves_output_and_bits:
            ctx.op = cls.activation.ops.backward["output"]
            ctx.save_for_backward(output, packed)
        else:
            ctx.op = cls.activation.ops.backward[cls.save_modes[0]]
            ctx.save_for_backward(packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:  # as a Function behind it has returned; its leaves' .grad stays None
            return None, None, None
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
        return gradient, None, None

    @classmethod
    def differentiable(cls, grad: Tensor, op: _ops.Op, *saved: Any) -> Tensor:
        """`op(grad, *saved)`, that backward may go through again."""
        return _Linear.apply(grad, op, *saved)

    @classmethod
    def raise_clearer_error(cls, error: RuntimeError, grad: Tensor) -> None:
        """Raise a better error than that of backward, where there is one."""
        _raise_out_of_memory(error, grad)


class MaskFunction(_InPlaceFunction):
    """Keeps the mask, one bit per element, or without bits the output."""

    save_modes = ("mask", "output")


class OutputFunction(_InPlaceFunction):
    """Keeps the output and packed bits of the input."""

    save_modes = ("output",)
    saves_output_and_bits = True

    @classmethod
    def differentiable(cls, grad: Tensor, op: _ops.Op, *saved: Any) -> Tensor:
        return _OutputBackward.apply(grad, *saved, cls.activation)

    @classmethod
    def raise_clearer_error(cls, error: RuntimeError, grad: Tensor) -> None:
        super().raise_clearer_error(error, grad)
        if "inplace operation" in str(error):
            name = cls.activation.function
            raise RuntimeError(
                f"{error} Here it is the output of {name}, which backward reads: "
                f'{name}(x, save="derivative") allows its output to be modified.'
            ) from None


class DerivativeFunction(_InPlaceFunction):
    """Keeps f'(x) as packed codes of 8, 16 or 32 bits."""

    save_modes = ("derivative",)

    @classmethod
    def differentiable(cls, grad: Tensor, op: _ops.Op, *saved: Any) -> Tensor:
        # Even where grad has no graph: nothing here would lead a second derivative to x.
        raise RuntimeError(
            f'{cls.activation.function}(x, save="derivative") keeps the first derivative only '
            'and cannot be differentiated twice, with create_graph=True: use save="output".'
        )


class ReLUFunction(MaskFunction):
    """`ReLUFunction.apply(x, bits, op_args)`, of max(x, 0)."""

    activation = RELU


class LeakyReLUFunction(MaskFunction):
    """`LeakyReLUFunction.apply(x, bits, op_args)`, of leaky_relu.

    Without a mask the gradient follows from the output where `negative_slope` is not negative.
    """

    activation = LEAKY_RELU


class ReLU6Function(MaskFunction):
    """`ReLU6Function.apply(x, bits, op_args)`, of min(max(x, 0), 6)."""

    activation = RELU6


class SiLUFunction(OutputFunction):
    """`SiLUFunction.apply(x, bits, op_args)`, of x * sigmoid(x)."""

    activation = SILU


class SiLUDerivativeFunction(DerivativeFunction):
    """`SiLUDerivativeFunction.apply(x, bits, op_args)`, of x * sigmoid(x)."""

    activation = SILU


class GELUFunction(OutputFunction):
    """`GELUFunction.apply(x, bits, op_args)`, of x * Phi(x)."""

    activation = GELU


class GELUDerivativeFunction(DerivativeFunction):
    """`GELUDerivativeFunction.apply(x, bits, op_args)`, of x * Phi(x)."""

    activation = GELU


class GELUTanhFunction(OutputFunction):
    """`GELUTanhFunction.apply(x, bits, op_args)`, of gelu's tanh form."""

    activation = GELU_TANH


class GELUTanhDerivativeFunction(DerivativeFunction):
    """`GELUTanhDerivativeFunction.apply(x, bits, op_args)`, of gelu's tanh form."""

    activation = GELU_TANH


class HardswishFunction(OutputFunction):
    """`HardswishFunction.apply(x, bits, op_args)`, of x * clamp(x + 3, 0, 6) / 6."""

    activation = HARDSWISH


class HardswishDerivativeFunction(DerivativeFunction):
    """`HardswishDerivativeFunction.apply(x, bits, op_args)`, of hardswish."""

    activation = HARDSWISH


class MishFunction(OutputFunction):
    """`MishFunction.apply(x, bits, op_args)`, of x * tanh(log(1 + exp(x)))."""

    activation = MISH


class MishDerivativeFunction(DerivativeFunction):
    """`MishDerivativeFunction.apply(x, bits, op_args)`, of x * tanh(log(1 + exp(x)))."""

    activation = MISH


FUNCTIONS: Mapping[tuple[Activation, Save], type[_InPlaceFunction]] = {
    (function.activation, save): function
    for function in (
        ReLUFunction,
        LeakyReLUFunction,
        ReLU6Function,
        SiLUFunction,
        SiLUDerivativeFunction,
        GELUFunction,
        GELUDerivativeFunction,
        GELUTanhFunction,
        GELUTanhDerivativeFunction,
        HardswishFunction,
        HardswishDerivativeFunction,
        MishFunction,
        MishDerivativeFunction,
    )
    for save in function.save_modes
}

# Function.apply without what it does for functorch's transforms, in which none of these runs; and
# the bits that are kept by default.
APPLY: Mapping[tuple[Activation, Save], tuple[Callable[..., Tensor], Mapping[torch.dtype, int]]] = {
    (activation, save): (
        super(Function, function).apply,  # type: ignore[misc]
        activation.ops.default_bits[save],
    )
    for (activation, save), function in FUNCTIONS.items()
}
