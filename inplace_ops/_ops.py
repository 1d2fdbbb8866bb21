"""The compiled ops: their handles, their shapes for tracing, and the layout they walk.

The ops are private. Called directly on a tensor that requires grad they modify it behind autograd's
back: `inplace_ops.functions` wraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"inplace_ops is not built here ({error}). Install it with `pip install .`, and do not run "
        "Python from inside a clone of it unless you installed with `pip install -e .`."
    ) from error

cuda_error: ImportError | None = None
cuda_version: str | None = None
cuda_architectures: str | None = None
if torch.version.cuda is not None:
    try:
        from . import _C_cuda
    except ImportError as error:
        cuda_error = error
    else:
        cuda_version = f"{_C_cuda.cuda_version // 1000}.{_C_cuda.cuda_version % 1000 // 10}"
        cuda_architectures = _C_cuda.cuda_architectures
built_with_torch = _C.built_with_torch

_namespace = torch.ops.inplace_ops
relu = _namespace.relu.default
relu_ = _namespace.relu_.default
relu_with_mask_ = _namespace.relu_with_mask_.default
relu_backward_mask = _namespace.relu_backward_mask.default
relu_backward_output = _namespace.relu_backward_output.default
leaky_relu = _namespace.leaky_relu.default
leaky_relu_ = _namespace.leaky_relu_.default
leaky_relu_with_mask_ = _namespace.leaky_relu_with_mask_.default
leaky_relu_backward_mask = _namespace.leaky_relu_backward_mask.default
leaky_relu_backward_output = _namespace.leaky_relu_backward_output.default
silu = _namespace.silu.default
silu_ = _namespace.silu_.default
silu_with_bits_ = _namespace.silu_with_bits_.default
silu_backward_output = _namespace.silu_backward_output.default
silu_double_backward = _namespace.silu_double_backward.default
silu_derivative = _namespace.silu_derivative.default
silu_with_derivative_ = _namespace.silu_with_derivative_.default
silu_backward_derivative = _namespace.silu_backward_derivative.default

# Out of place, for compiled code: the result and the packed bits.
FUNCTIONAL_OPS = (relu, leaky_relu, silu, silu_derivative)
FORWARD_OPS = (
    relu_,
    relu_with_mask_,
    leaky_relu_,
    leaky_relu_with_mask_,
    silu_,
    silu_with_bits_,
    silu_with_derivative_,
)
BACKWARD_OPS = (
    relu_backward_mask,
    relu_backward_output,
    leaky_relu_backward_mask,
    leaky_relu_backward_output,
    silu_backward_output,
    silu_double_backward,
    silu_backward_derivative,
)


# Selective checkpointing must run them again: it would replay what they return, which is nothing.
SAC_IGNORED_OPS.update(FORWARD_OPS)


def storage_order(x: Tensor) -> list[int]:
    """The permutation of x's dimensions in which its elements lie in memory.

    The ops walk their tensors, and lay packed bits, in this order. Empty for the identity. Any
    order is right; in compiled code, whose sizes may be unknown, it is that of the usual formats.
    """
    compiling = torch.compiler.is_compiling()
    if (compiling and x.dim() != 4) or x.is_contiguous():
        return []
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    if compiling:
        return []
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: -strides[d])


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie densely in `order`, as a backward op's result."""
    strides = [1] * len(shape)
    stride = 1
    for d in reversed(order or range(len(shape))):
        strides[d] = stride
        stride = stride * torch.sym_max(shape[d], 1)
    return tuple(strides)


def empty_bits(x: Tensor, bits: int) -> Tensor:
    """Room for `bits` packed bits an element of x: uint8 (bits, ceil(elements / 8))."""
    return x.new_empty((bits, (x.numel() + 7) // 8), dtype=torch.uint8)


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_dtype(op: str, x: Tensor) -> None:
    """Raise RuntimeError for a dtype that the kernels, which are not asked here, refuse."""
    if x.dtype not in _FLOATS and not (op == "relu_" and x.dtype in _INTEGERS):
        raise RuntimeError(f"{op}: unsupported dtype {x.dtype}")


def _check_devices(*arguments: object) -> None:
    devices = {a.device for a in arguments if isinstance(a, Tensor)}
    torch._check(len(devices) == 1, lambda: f"tensors on several devices: {devices}")


def _empty_in_order(x: Tensor, order: Sequence[int]) -> Tensor:
    return x.new_empty_strided(x.shape, dense_strides(x.shape, order))


def _functional_fake(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(
        x: Tensor, bits: int, order: Sequence[int], *arguments: float
    ) -> tuple[Tensor, Tensor]:
        check_dtype(name, x)
        return _empty_in_order(x, order), empty_bits(x, bits)

    return fake


def _in_place_fake(name: str) -> Callable[..., None]:
    def fake(x: Tensor, *arguments: object) -> None:
        _check_devices(x, *arguments)
        check_dtype(name, x)

    return fake


def _backward_fake(grad: Tensor, *arguments: object) -> Tensor:
    _check_devices(grad, *arguments)
    return _empty_in_order(grad, next(a for a in arguments if isinstance(a, (list, tuple))))


def _loop_over_batch(op: torch._ops.OpOverload):  # type: ignore[no-untyped-def]
    """The batching rule of a backward op, for vmap over the gradients of an ordinary backward."""

    def rule(info, in_dims, *arguments):  # type: ignore[no-untyped-def]
        def sample(i: int) -> list[object]:
            return [
                a.select(d, i).contiguous() if isinstance(a, Tensor) and d is not None else a
                for a, d in zip(arguments, in_dims, strict=True)
            ]

        return torch.stack([op(*sample(i)) for i in range(info.batch_size)]), 0

    return rule


for _op in FUNCTIONAL_OPS:
    torch.library.register_fake(_op.name(), _functional_fake(f"{_op._opname}_"))
for _op in FORWARD_OPS:
    torch.library.register_fake(_op.name(), _in_place_fake(_op._opname))
for _op in BACKWARD_OPS:
    torch.library.register_fake(_op.name(), _backward_fake)
    torch.library.register_vmap(_op.name(), _loop_over_batch(_op))

SUPPORTED = "strided tensors, neither nested nor quantized, on the CPU"
SUPPORTED += " and CUDA devices" if cuda_version else ""


def unsupported(op: str, x: Tensor) -> NotImplementedError:
    """The error for a tensor that no kernel exists for."""
    reason = f"; the CUDA kernels could not be loaded: {cuda_error}" if cuda_error else ""
    return NotImplementedError(
        f"{op}: no kernel for a tensor with layout {x.layout}, device {x.device} and dtype "
        f"{x.dtype}; this build supports {SUPPORTED}{reason}"
    )
