"""An activation in compiled code.

Dynamo's graph has one op of it, `relu_traced_` for example. What it comes to is decided where the
graph is traced with autograd, as only there it shows what has formed the input:

- A convolution or a matrix product, which is not run again: the Function of eager code, which keeps
  less than PyTorch's activation would. ReLU and LeakyReLU are PyTorch's there too, which keep the
  output alone.
- Nothing in the graph, as it is the graph's input: the Function of eager code. Of PyTorch's, those
  that keep their input get wrong gradients there (torch 2.11 to 2.14 with Inductor).
- Anything else: PyTorch's activation. Min-cut partitioning forms the output of a norm or of a
  pointwise operation again in backward, and keeps no input of an activation for it; it cannot do
  that with custom ops, and Inductor cannot fuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cmp_to_key, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._ops import DimOrder, OpArgs
from ._torch_private import has_activation_memory_budget
from .activations import ACTIVATIONS, LEAKY_RELU, RELU, Activation, Save
from .autograd import FUNCTIONS
from .dispatch import decomposed, dispatch, needs_grad


class _TracedOutOfPlace(Function):
    """`apply(x, function, bits, op_args)`: that Function while a graph is traced, of a copy of x.

    For a graph's input, with the result copied to it: Functions that modify one go wrong.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, bits: int, op_args: OpArgs) -> Tensor:
        output, packed = _output(x, function, bits, op_args)
        function.save_for_backward(ctx, output, packed, op_args)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        gradient, *_ = ctx.function.backward(ctx, grad)
        return gradient, None, None, None


class _TracedInPlace(_TracedOutOfPlace):
    """`apply(x, function, bits, op_args)`: that Function while a graph is traced, x overwritten.

    What is saved is x, as its readers keep it, and not what was copied to it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, bits: int, op_args: OpArgs) -> Tensor:
        output, packed = _output(x, function, bits, op_args)
        x.copy_(output)
        ctx.mark_dirty(x)
        function.save_for_backward(ctx, x, packed, op_args)
        return x


class _TracedTorchReLU(Function):
    """`apply(x, activation, arguments)`: PyTorch's ReLU or LeakyReLU, x overwritten.

    What is saved is a copy of x, which no later write disturbs. The compiler leaves it out where
    x's readers keep x anyway.
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
        backward = _BACKWARD_FROM_OUTPUT[ctx.activation]
        return backward(grad, *ctx.saved_tensors, *ctx.arguments), None, None


_BACKWARD_FROM_OUTPUT: dict[Activation, Callable[..., Tensor]] = {
    RELU: lambda grad, output: torch.ops.aten.threshold_backward(grad, output, 0),
    LEAKY_RELU: lambda grad, output, slope: torch.ops.aten.leaky_relu_backward(
        grad, output, slope, True
    ),
}


def _output(x: Tensor, function: Any, bits: int, op_args: OpArgs) -> tuple[Tensor, Tensor | None]:
    """The activation out of place and the packed bits, if any.

    Inductor would move an earlier read of a tensor behind a custom op that modifies it.
    """
    activation, (dim_order, scalars) = function.activation, op_args
    if bits:
        save_out_of_place = activation.ops.save_out_of_place[function.save_modes[0]]
        return save_out_of_place(x, bits, dim_order, *scalars)
    return activation.torch_function(x, *scalars), None


def _dim_order_of(x: Tensor) -> DimOrder:
    """As that of `_ops`, of a tensor whose sizes may be unknown: in one of the usual formats."""
    if x.dim() != 4 or x.is_contiguous():
        return None
    return [0, 2, 3, 1] if x.is_contiguous(memory_format=torch.channels_last) else None


def _traced(
    activation: Activation, input: Tensor, save: Save, bits: int | None, *arguments: Any
) -> None:
    if type(input) is Tensor:  # the graph runs as it is: Dynamo's backend "eager"
        dispatch(activation, input, save, bits, arguments, fallback=activation.save_modes[0])
        return
    if input._is_view() and _may_overlap(input):
        raise RuntimeError(
            f"{activation.function}: unsupported operation: more than one element of the "
            "written-to tensor may refer to a single memory location. Please clone() the tensor "
            "before performing the operation."
        )
    mode = _save_mode(activation, input, save, arguments)
    if mode is not None:
        bits = bits or activation.default_bits(mode, input.dtype)
        op_args = OpArgs(_dim_order_of(input), arguments)
        call = (FUNCTIONS[activation, mode], bits, op_args)
        if _is_graph_input(input):
            input.copy_(_TracedOutOfPlace.apply(input, *call))
        else:
            _TracedInPlace.apply(input, *call)
    elif needs_grad(input) and _torch_saves_only_output(activation, arguments):
        _TracedTorchReLU.apply(input, activation, arguments)
    else:
        decomposed(activation, input, arguments)


def _torch_saves_only_output(activation: Activation, arguments: tuple[Any, ...]) -> bool:
    """Whether PyTorch's activation, in place, keeps its output alone."""
    return activation.torch_saves == "output" and activation.allows_output(*arguments)


def _save_mode(
    activation: Activation, input: Tensor, save: Save, arguments: tuple[Any, ...]
) -> Save | None:
    """What this package's Function is to keep, None where PyTorch's activation keeps no more."""
    if not needs_grad(input):
        return None
    if _is_graph_input(input):  # which PyTorch's would keep, and find overwritten
        return activation.save_modes[0] if save == "recompute" else save
    if (
        save == "recompute"
        or has_activation_memory_budget()
        or _torch_saves_only_output(activation, arguments)
    ):
        return None
    return save if _is_matmul_output(input) else None


def _is_graph_input(x: Tensor) -> bool:
    """Whether its memory is that of an input of the graph.

    Tracing gives an input that requires grad a node of type Error, and a clone if it is modified.
    """
    whole: Any = x._base if x._is_view() else x
    node = whole.grad_fn
    for _ in range(whole._version):  # back over what has modified it, whose first edge it is
        node = node.next_functions[0][0] if node and node.next_functions else None
    while type(node).__name__ == "CloneBackward0":
        node = node.next_functions[0][0]
    return type(node).__name__ in ("NoneType", "AccumulateGrad", "Error")


# Whose outputs are not formed again, and views of them.
_MATMULS = frozenset(
    f"{name}Backward0" for name in ("Addbmm", "Addmm", "Baddbmm", "Bmm", "Convolution", "Mm")
)
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("Alias", "Permute", "ReshapeAlias", "Transpose", "UnsafeView", "View")
)


def _is_matmul_output(input: Tensor) -> bool:
    node = input.grad_fn
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    return type(node).__name__ in _MATMULS


def _may_overlap(x: Tensor) -> bool:
    """Whether elements may share memory: unless each stride passes what the smaller ones reach."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    def compare(a: tuple[Any, Any], b: tuple[Any, Any]) -> int:
        return -1 if guard_or_false(a[0] < b[0]) else 1

    reach: Any = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True), key=cmp_to_key(compare)):
        if guard_or_false(size > 1):  # sizes that are not known until it runs pass
            if guard_or_false(stride <= reach):
                return True
            reach += stride * (size - 1)
    return False


for _activation in ACTIVATIONS:
    torch.library.impl(
        _activation.ops.traced.name(), "CompositeImplicitAutograd", partial(_traced, _activation)
    )
