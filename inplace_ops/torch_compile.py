"""In-place activations in compiled code.

Dynamo's graph contains one op per activation, for example `relu_traced_`. The op is replaced when
the graph is traced with autograd, because only then it is visible which operation computed the
activation's input. The first of these cases applies:

1. The input is an input of the graph: the Function of eager code. PyTorch's activations that save
   their input get wrong gradients here (torch 2.11 to 2.14 with Inductor).
2. ReLU, or LeakyReLU with a slope of at least 0: PyTorch's activation, which saves its output.
3. The input comes from a convolution or a matrix product, which the compiler does not recompute:
   the Function of eager code, which saves less than PyTorch's activation.
4. Otherwise, PyTorch's activation. Min-cut partitioning recomputes the output of a norm or of a
   pointwise operation in backward, and saves no input of an activation for it. It does not
   recompute custom ops, and Inductor cannot fuse them. With an activation memory budget the
   compiler recomputes products too: with custom ops more of them than the budget asks for.
"""

from __future__ import annotations

from functools import cmp_to_key, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._ops import DimOrder, OpArgs
from ._torch_private import (
    CLONE,
    GRAPH_INPUTS,
    NOT_RECOMPUTED,
    TRACED_VIEWS,
    has_activation_memory_budget,
    is_named,
)
from .activations import ACTIVATIONS, Activation, Save
from .autograd import FUNCTIONS
from .dispatch import decomposed, dispatch, needs_grad


class _Traced(Function):
    """Run a Function of eager code in a traced graph.

    `apply(x, function, bits, op_args, in_place)` returns the activation. In place it copies it to
    x, and saves x, which x's consumers save too. A Function that modifies an input of the graph
    would get wrong gradients: there it runs out of place, and the caller copies.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Any, bits: int, op_args: OpArgs, in_place: bool
    ) -> Tensor:
        activation, (dim_order, scalars) = function.activation, op_args
        # Not in place: Inductor would move an earlier read of x after a custom op that modifies x.
        if bits:
            save_out_of_place = activation.ops.save_out_of_place[function.save_modes[0]]
            output, packed = save_out_of_place(x, bits, dim_order, *scalars)
        else:
            output, packed = activation.torch_function(x, *scalars), None
        if in_place:
            output = x.copy_(output)
            ctx.mark_dirty(x)
        function.save_tensors(ctx, output, packed, op_args)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *_ = ctx.function.backward(ctx, grad)
        return gradient, None, None, None, None


class _TracedTorchReLU(Function):
    """Run PyTorch's ReLU or LeakyReLU in place: `apply(x, activation, arguments)` overwrites x.

    It saves a copy of x, which later writes to x do not change. The compiler removes the copy if
    x's consumers save x anyway.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, arguments: tuple[Any, ...]) -> Tensor:
        assert activation.torch_inplace is not None
        activation.torch_inplace(x, *arguments)
        ctx.mark_dirty(x)
        ctx.activation, ctx.arguments = activation, arguments
        ctx.save_for_backward(x.clone())
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        backward = ctx.activation.torch_backward
        return backward(grad, *ctx.saved_tensors, *ctx.arguments), None, None


def _dim_order_of(x: Tensor) -> DimOrder:
    """Return the order of x's dimensions in memory, for x with symbolic sizes.

    Only contiguous tensors and channels_last ones are recognized.
    """
    if x.dim() != 4 or x.is_contiguous():
        return None
    return [0, 2, 3, 1] if x.is_contiguous(memory_format=torch.channels_last) else None


def _traced(
    activation: Activation, input: Tensor, save: Save, bits: int | None, *arguments: Any
) -> None:
    if type(input) is Tensor:  # Dynamo's backend "eager" runs the graph as it is
        dispatch(activation, input, save, bits, arguments)
        return
    if input._is_view() and _may_overlap(input):
        raise RuntimeError(
            f"{activation.function}: unsupported operation: more than one element of the "
            "written-to tensor may refer to a single memory location. Please clone() the tensor "
            "before performing the operation."
        )
    if not needs_grad(input):
        decomposed(activation, input, arguments)
        return
    bits = bits or activation.default_bits(save, input.dtype)
    call = (FUNCTIONS[activation, save], bits, OpArgs(_dim_order_of(input), arguments))
    if _is_graph_input(input):
        input.copy_(_Traced.apply(input, *call, False))
    elif activation.torch_saves_output and activation.allows_output(*arguments):
        _TracedTorchReLU.apply(input, activation, arguments)
    elif _is_matmul_output(input) and not has_activation_memory_budget():
        _Traced.apply(input, *call, True)
    else:
        decomposed(activation, input, arguments)


def _is_graph_input(x: Tensor) -> bool:
    """Whether x uses the memory of an input of the graph.

    While a graph is traced, an input that requires grad has a grad_fn of type Error, and is cloned
    if the graph modifies it.
    """
    whole: Any = x._base if x._is_view() else x
    node = whole.grad_fn
    for _ in range(whole._version):  # skip the in-place ops: each has the tensor as first input
        node = node.next_functions[0][0] if node and node.next_functions else None
    while is_named(node, CLONE):
        node = node.next_functions[0][0]
    return type(node).__name__ in GRAPH_INPUTS


def _is_matmul_output(input: Tensor) -> bool:
    node = input.grad_fn
    while type(node).__name__ in TRACED_VIEWS:
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    return type(node).__name__ in NOT_RECOMPUTED


def _may_overlap(x: Tensor) -> bool:
    """Whether elements of x may share memory.

    They do not if each stride is larger than the largest offset that the smaller strides reach.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    def compare(a: tuple[Any, Any], b: tuple[Any, Any]) -> int:
        return -1 if guard_or_false(a[0] < b[0]) else 1

    reach: Any = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True), key=cmp_to_key(compare)):
        if guard_or_false(size > 1):  # unknown sizes are not checked
            if guard_or_false(stride <= reach):
                return True
            reach += stride * (size - 1)
    return False


for _activation in ACTIVATIONS:
    torch.library.impl(
        _activation.ops.traced.name(), "CompositeImplicitAutograd", partial(_traced, _activation)
    )
