"""The autograd Functions.

Their forward modifies the input and marks it dirty, which raises its version by one. They are
applied by `inplace_ops.functional`, which refuses first what PyTorch refuses: the errors that
`mark_dirty` raises come after forward, when the data is already gone.

Every backward is an op that is linear in the incoming gradient. Where a second derivative may be
asked for it runs as a Function too.

The Functions that modify the input set their context up in forward: a setup_context of their own
would triple the cost of a call, and only torch.func's transforms, which they never meet, need one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import _ops


def _gradient(
    grad: Tensor, op: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]
) -> Tensor:
    """op(grad), linear in grad, or by function, its differentiable form, where that may be needed.

    A tangent that forward-mode AD has given grad goes the same way.
    """
    run = function if torch.is_grad_enabled() else op
    if forward_ad._current_level >= 0:
        primal, tangent = forward_ad.unpack_dual(grad)
        if tangent is not None:
            return forward_ad.make_dual(run(primal), run(tangent))
    try:
        return run(grad)
    except RuntimeError as error:
        if "out of memory" in str(error):
            torch.empty_like(grad)  # raises PyTorch's own error, whose type the op has lost
        raise


class _Linear(Function):
    """grad -> op(grad, saved, *arguments): linear in grad, and without a gradient for the rest."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, op: Callable[..., Tensor], saved: Tensor, *arguments: Any) -> Tensor:
        return op(grad, saved, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.op, saved, *ctx.arguments = inputs
        ctx.save_for_backward(saved)

    @staticmethod
    def backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _linear(grad_grad, ctx.op, *ctx.saved_tensors, *ctx.arguments)
        return (gradient, None, None, *(None for _ in ctx.arguments))


def _linear(grad: Tensor, op: Callable[..., Tensor], saved: Tensor, *arguments: Any) -> Tensor:
    return _gradient(
        grad,
        lambda g: op(g, saved, *arguments),
        lambda g: _Linear.apply(g, op, saved, *arguments),
    )


class ReLUFunction(Function):
    """`ReLUFunction.apply(x, mask, order)` replaces x by max(x, 0) and returns it.

    Keeps the mask, one bit an element, or without one (`None`) the output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, order: list[int]) -> Tensor:
        if mask is None:
            _ops.relu_(x, order)
        else:
            _ops.relu_with_mask_(x, mask, order)
        ctx.mark_dirty(x)
        ReLUFunction.keep(ctx, x, mask, order)
        return x

    @staticmethod
    def keep(ctx: Any, output: Tensor, mask: Tensor | None, order: list[int]) -> None:
        ctx.has_mask, ctx.order = mask is not None, order
        ctx.save_for_backward(output if mask is None else mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        op = _ops.relu_backward_mask if ctx.has_mask else _ops.relu_backward_output
        return _linear(grad, op, *ctx.saved_tensors, ctx.order), None, None


class LeakyReLUFunction(Function):
    """`LeakyReLUFunction.apply(x, mask, order, negative_slope)` replaces x by leaky_relu(x).

    Keeps the mask, one bit an element, or without one (`None`) the output, from which the gradient
    follows where `negative_slope` is not negative.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mask: Tensor | None, order: list[int], negative_slope: float
    ) -> Tensor:
        if mask is None:
            _ops.leaky_relu_(x, order, negative_slope)
        else:
            _ops.leaky_relu_with_mask_(x, mask, order, negative_slope)
        ctx.mark_dirty(x)
        LeakyReLUFunction.keep(ctx, x, mask, order, negative_slope)
        return x

    @staticmethod
    def keep(
        ctx: Any, output: Tensor, mask: Tensor | None, order: list[int], negative_slope: float
    ) -> None:
        ReLUFunction.keep(ctx, output, mask, order)
        ctx.negative_slope = negative_slope

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        op = _ops.leaky_relu_backward_mask if ctx.has_mask else _ops.leaky_relu_backward_output
        gradient = _linear(grad, op, *ctx.saved_tensors, ctx.order, ctx.negative_slope)
        return gradient, None, None, None


class _SiLUDoubleBackward(Function):
    """The gradients of `_SiLUBackward` in grad and output. A third derivative raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_grad: Tensor, grad: Tensor, output: Tensor, bits: Tensor, order: list[int]
    ) -> tuple[Tensor, Tensor]:
        return (
            _ops.silu_backward_output(grad_grad, output, bits, order),
            _ops.silu_double_backward(grad_grad, grad, output, bits, order),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("silu_ can be differentiated twice, and not a third time")


class _SiLUBackward(Function):
    """grad * silu'(x), x recovered from the output and its bits; differentiable once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, output: Tensor, bits: Tensor, order: list[int]) -> Tensor:
        return _ops.silu_backward_output(grad, output, bits, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, silu_output, bits, ctx.order = inputs
        ctx.save_for_backward(grad, silu_output, bits)

    @staticmethod
    def backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
        # Through its output x's graph is reached, whether or not grad_grad has one.
        double_backward: Any = _SiLUDoubleBackward
        run = double_backward.apply if torch.is_grad_enabled() else double_backward.forward
        return *run(grad_grad, *ctx.saved_tensors, ctx.order), None, None


class SiLUFunction(Function):
    """`SiLUFunction.apply(x, bits, order)` replaces x by silu(x) and returns it.

    Keeps the output and the packed bits of the input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor, order: list[int]) -> Tensor:
        _ops.silu_with_bits_(x, bits, order)
        ctx.mark_dirty(x)
        SiLUFunction.keep(ctx, x, bits, order)
        return x

    @staticmethod
    def keep(ctx: Any, output: Tensor, bits: Tensor, order: list[int]) -> None:
        ctx.order = order
        ctx.save_for_backward(output, bits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        try:
            output, bits = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise RuntimeError(
                f"{error} Here it is the output of silu_, which backward reads: "
                'silu_(x, save="derivative") allows its output to be modified.'
            ) from None
        gradient = _gradient(
            grad,
            lambda g: _ops.silu_backward_output(g, output, bits, ctx.order),
            lambda g: _SiLUBackward.apply(g, output, bits, ctx.order),
        )
        return gradient, None, None


class SiLUDerivativeFunction(Function):
    """`SiLUDerivativeFunction.apply(x, bits, order)` replaces x by silu(x) and returns it.

    Keeps silu'(x) as packed codes of 8, 16 or 32 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor, order: list[int]) -> Tensor:
        _ops.silu_with_derivative_(x, bits, order)
        ctx.mark_dirty(x)
        SiLUDerivativeFunction.keep(ctx, x, bits, order)
        return x

    @staticmethod
    def keep(ctx: Any, output: Tensor, bits: Tensor, order: list[int]) -> None:
        ctx.order = order
        ctx.save_for_backward(bits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Even where grad has no graph: nothing here would lead a second derivative to x.
            raise RuntimeError(
                'silu_(x, save="derivative") keeps the first derivative only and cannot be '
                'differentiated twice, with create_graph=True: use save="output".'
            )
        (bits,) = ctx.saved_tensors

        def op(grad: Tensor) -> Tensor:
            return _ops.silu_backward_derivative(grad, bits, ctx.order)

        return _gradient(grad, op, op), None, None


def _register_autograd(op: torch._ops.OpOverload, function: Any) -> None:
    """Give an op out of place the gradient of a Function."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, bits, *arguments = inputs
        result, packed = output
        function.keep(ctx, result, packed if bits else None, *arguments)

    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return function.backward(ctx, grad)

    torch.library.register_autograd(op.name(), backward, setup_context=setup_context)


_register_autograd(_ops.relu, ReLUFunction)
_register_autograd(_ops.leaky_relu, LeakyReLUFunction)
_register_autograd(_ops.silu, SiLUFunction)
_register_autograd(_ops.silu_derivative, SiLUDerivativeFunction)
