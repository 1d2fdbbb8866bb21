"""The autograd Functions.

Their forward modifies the input and marks it dirty, which raises its version by one. They are
applied by `inplace_ops.execution`, which refuses first what PyTorch refuses: the errors that
`mark_dirty` raises come after forward, when the data is already gone.

Every backward is an op that is linear in the incoming gradient. Where a second derivative may be
asked for it runs as a Function too.

The Functions that modify the input set their context up in forward: a setup_context of their own
would triple the cost of a call, and only torch.func's transforms, which they never meet, need one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import _ops
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
from .memory import is_held_itself, replace
from .normalization import Source


def _gradient(
    grad: Tensor, op: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply `op`, or its differentiable version `function` when grad mode is on.

    Both are linear in grad. A tangent that forward-mode AD has given grad goes the same way.
    """
    run = function if torch.is_grad_enabled() else op
    if torch.is_grad_enabled() and torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "with is_grads_batched=True (torch.autograd.functional.jacobian's vectorize=True) and "
            "create_graph=True PyTorch loses the second derivative of every autograd.Function: use "
            "torch.func.jacrev, or a loop over the gradients"
        )
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


class _InPlaceFunction(Function):
    """`apply(x, packed, dim_order, *arguments)` replaces x by its activation and returns it.

    Attributes:
        activation: Which one it is.
        saves: What it may keep for backward.
    """

    activation: ClassVar[Activation]
    saves: ClassVar[tuple[Save, ...]]

    @classmethod
    def forward(
        cls, ctx: Any, x: Tensor, packed: Tensor | None, dim_order: list[int], *arguments: float
    ) -> Tensor:
        ops = cls.activation.ops
        if packed is None:
            ops.in_place(x, dim_order, *arguments)
        else:
            ops.save_in_place[cls.saves[0]](x, packed, dim_order, *arguments)
        ctx.mark_dirty(x)
        cls.keep(ctx, x, packed, dim_order, *arguments)
        return x

    @classmethod
    def keep(
        cls,
        ctx: Any,
        output: Tensor,
        packed: Tensor | None,
        dim_order: list[int],
        *arguments: float,
    ) -> None:
        """Save for backward what it needs, and nothing else."""
        raise NotImplementedError


class MaskFunction(_InPlaceFunction):
    """Keeps the mask, one bit per element, or without one (`None`) the output."""

    saves = ("mask", "output")

    @classmethod
    def keep(
        cls,
        ctx: Any,
        output: Tensor,
        packed: Tensor | None,
        dim_order: list[int],
        *arguments: float,
    ) -> None:
        ctx.op = cls.activation.ops.backward["output" if packed is None else "mask"]
        ctx.dim_order, ctx.arguments = dim_order, arguments
        ctx.save_for_backward(output if packed is None else packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _linear(grad, ctx.op, *ctx.saved_tensors, ctx.dim_order, *ctx.arguments)
        return gradient, None, None, *(None for _ in ctx.arguments)


class _OutputDoubleBackward(Function):
    """The gradients of `_OutputBackward` in grad and output. A third derivative raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_grad: Tensor,
        grad: Tensor,
        output: Tensor,
        packed: Tensor,
        dim_order: list[int],
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
        dim_order: list[int],
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
        run = double_backward.apply if torch.is_grad_enabled() else double_backward.forward
        gradients = run(grad_grad, *ctx.saved_tensors, ctx.dim_order, ctx.activation)
        return *gradients, None, None, None


class OutputFunction(_InPlaceFunction):
    """Keeps the output and packed bits of the input."""

    saves = ("output",)

    @classmethod
    def keep(
        cls,
        ctx: Any,
        output: Tensor,
        packed: Tensor | None,
        dim_order: list[int],
        *arguments: float,
    ) -> None:
        ctx.activation, ctx.dim_order = cls.activation, dim_order
        ctx.save_for_backward(output, packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name = ctx.activation.function
        try:
            output, packed = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise RuntimeError(
                f"{error} Here it is the output of {name}, which backward reads: "
                f'{name}(x, save="derivative") allows its output to be modified.'
            ) from None
        activation, dim_order = ctx.activation, ctx.dim_order
        op = activation.ops.backward["output"]
        gradient = _gradient(
            grad,
            lambda g: op(g, output, packed, dim_order),
            lambda g: _OutputBackward.apply(g, output, packed, dim_order, activation),
        )
        return gradient, None, None


class DerivativeFunction(_InPlaceFunction):
    """Keeps f'(x) as packed codes of 8, 16 or 32 bits."""

    saves = ("derivative",)

    @classmethod
    def keep(
        cls,
        ctx: Any,
        output: Tensor,
        packed: Tensor | None,
        dim_order: list[int],
        *arguments: float,
    ) -> None:
        ctx.activation, ctx.dim_order = cls.activation, dim_order
        ctx.save_for_backward(packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Even where grad has no graph: nothing here would lead a second derivative to x.
            raise RuntimeError(
                f'{ctx.activation.function}(x, save="derivative") keeps the first derivative only '
                'and cannot be differentiated twice, with create_graph=True: use save="output".'
            )
        (packed,) = ctx.saved_tensors

        def op(grad: Tensor) -> Tensor:
            return ctx.activation.ops.backward["derivative"](grad, packed, ctx.dim_order)

        return _gradient(grad, op, op), None, None


class ReLUFunction(MaskFunction):
    """`ReLUFunction.apply(x, mask, dim_order)` replaces x by max(x, 0) and returns it."""

    activation = RELU


class LeakyReLUFunction(MaskFunction):
    """`LeakyReLUFunction.apply(x, mask, dim_order, negative_slope)`, of leaky_relu.

    Without a mask the gradient follows from the output where `negative_slope` is not negative.
    """

    activation = LEAKY_RELU


class ReLU6Function(MaskFunction):
    """`ReLU6Function.apply(x, mask, dim_order)`, of min(max(x, 0), 6)."""

    activation = RELU6


class SiLUFunction(OutputFunction):
    """`SiLUFunction.apply(x, packed, dim_order)`, of x * sigmoid(x)."""

    activation = SILU


class SiLUDerivativeFunction(DerivativeFunction):
    """`SiLUDerivativeFunction.apply(x, packed, dim_order)`, of x * sigmoid(x)."""

    activation = SILU


class GELUFunction(OutputFunction):
    """`GELUFunction.apply(x, packed, dim_order)`, of x * Phi(x)."""

    activation = GELU


class GELUDerivativeFunction(DerivativeFunction):
    """`GELUDerivativeFunction.apply(x, packed, dim_order)`, of x * Phi(x)."""

    activation = GELU


class GELUTanhFunction(OutputFunction):
    """`GELUTanhFunction.apply(x, packed, dim_order)`, of gelu's tanh form."""

    activation = GELU_TANH


class GELUTanhDerivativeFunction(DerivativeFunction):
    """`GELUTanhDerivativeFunction.apply(x, packed, dim_order)`, of gelu's tanh form."""

    activation = GELU_TANH


class HardswishFunction(OutputFunction):
    """`HardswishFunction.apply(x, packed, dim_order)`, of x * clamp(x + 3, 0, 6) / 6."""

    activation = HARDSWISH


class HardswishDerivativeFunction(DerivativeFunction):
    """`HardswishDerivativeFunction.apply(x, packed, dim_order)`, of hardswish."""

    activation = HARDSWISH


class MishFunction(OutputFunction):
    """`MishFunction.apply(x, packed, dim_order)`, of x * tanh(log(1 + exp(x)))."""

    activation = MISH


class MishDerivativeFunction(DerivativeFunction):
    """`MishDerivativeFunction.apply(x, packed, dim_order)`, of x * tanh(log(1 + exp(x)))."""

    activation = MISH


class _RecomputeDoubleBackward(Function):
    """The gradients of `_RecomputeBackward` in grad and output. A third derivative raises."""

    @staticmethod
    def forward(
        grad_grad: Tensor, grad: Tensor, normalized: Normalized, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        op = activation.ops.backward["recompute"]
        # The output's own backward multiplies by the slope as this op computes it.
        slope = op(torch.ones_like(grad), *normalized)
        z = _ops.NORMALIZE(*normalized).to(_ops.maps_dtype(grad))
        with torch.enable_grad():
            z.requires_grad_()
            value = activation.torch_function(z)
            (first,) = torch.autograd.grad(value, z, torch.ones_like(z), create_graph=True)
            (second,) = torch.autograd.grad(first, z, torch.ones_like(z))
        term = grad_grad * grad * second / slope
        return op(grad_grad, *normalized), torch.where(slope == 0, 0.0, term).to(grad.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.activation = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise _third_derivative(ctx.activation)


class _RecomputeBackward(Function):
    """grad * f'(z), z from the norm's input; differentiable once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, place: Tensor, activation: Activation, *normalized: Any) -> Tensor:
        return activation.ops.backward["recompute"](grad, *normalized)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, place, ctx.activation, *tensors, ctx.dim_order = inputs
        ctx.save_for_backward(grad, place, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, _, x, channels, rows = ctx.saved_tensors
        normalized = Normalized(x, channels, rows, ctx.dim_order)
        double_backward: Any = _RecomputeDoubleBackward
        run = double_backward.apply if torch.is_grad_enabled() else double_backward.forward
        return *run(grad_grad, grad, normalized, ctx.activation), *[None] * 5


class Normalized(NamedTuple):
    """The arguments of the ops that recompute, but for the gradient."""

    x: Tensor
    channels: Tensor
    rows: Tensor | None
    dim_order: list[int]


class RecomputeFunction(Function):
    """`RecomputeFunction.apply(z, source, dim_order, activation, *arguments)`, after a norm.

    Replaces the norm's output z by its activation and keeps what z follows from: the norm's input,
    which the norm keeps too, and the maps.

    A curve also saves its output, for its place in the graph alone, where a second derivative ends:
    `keep_place` lets go of the values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        source: Source,
        dim_order: list[int],
        activation: Activation,
        *arguments: float,
    ) -> Tensor:
        channels, rows = source.maps()
        activation.ops.in_place(z, dim_order, *arguments)
        ctx.mark_dirty(z)
        ctx.activation, ctx.dim_order, ctx.arguments = activation, dim_order, arguments
        ctx.stride = z.stride()
        place = None if activation.has_mask else z
        ctx.save_for_backward(source.x, channels, rows, place)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, channels, rows, place = ctx.saved_tensors
        activation, op = ctx.activation, ctx.activation.ops.backward["recompute"]
        normalized = Normalized(x.detach(), channels, rows, ctx.dim_order)
        if place is None:
            gradient = _linear(grad, op, *normalized, *ctx.arguments)
        else:
            gradient = _gradient(
                grad,
                lambda g: op(g, *normalized),
                lambda g: _RecomputeBackward.apply(g, place, activation, *normalized),
            )
        return gradient, None, None, None, *(None for _ in ctx.arguments)


def keep_place(output: Tensor) -> None:
    """Let a curve's RecomputeFunction, of which this is the output, keep no values of it."""
    raw = output.grad_fn._raw_saved_tensors[-1]  # type: ignore[union-attr]
    if is_held_itself(raw):
        replace(raw, _without_values, _of_any_values)


def _without_values(tensor: Tensor) -> _Place:
    return tensor.shape, tensor.dtype, tensor.device


def _of_any_values(place: _Place) -> Tensor:
    shape, dtype, device = place
    return torch.empty((), dtype=dtype, device=device).expand(shape)


_Place = tuple[torch.Size, torch.dtype, torch.device]

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
    for save in function.saves
}


def _register_autograd(op: _ops.Op, function: type[_InPlaceFunction], saves_bits: bool) -> None:
    """Give an op out of place the gradient of a Function."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if saves_bits:
            _, _, *arguments = inputs
            function.keep(ctx, *output, *arguments)
        else:
            _, *arguments = inputs
            function.keep(ctx, output, None, *arguments)

    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        gradient, *nones = function.backward(ctx, grad)
        return gradient, *nones[0 if saves_bits else 1 :]

    torch.library.register_autograd(op.name(), backward, setup_context=setup_context)


for (_activation, _save), _function in FUNCTIONS.items():
    if _save in _activation.ops.save_out_of_place:
        _register_autograd(_activation.ops.save_out_of_place[_save], _function, True)
    else:
        _register_autograd(_activation.ops.out_of_place, _function, False)
