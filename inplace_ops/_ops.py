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
relu_ = _namespace.relu_.default
relu_backward_mask = _namespace.relu_backward_mask.default
relu_backward_output = _namespace.relu_backward_output.default
leaky_relu_ = _namespace.leaky_relu_.default
leaky_relu_backward_mask = _namespace.leaky_relu_backward_mask.default
leaky_relu_backward_output = _namespace.leaky_relu_backward_output.default
silu_ = _namespace.silu_.default
silu_backward_output = _namespace.silu_backward_output.default
silu_double_backward = _namespace.silu_double_backward.default
silu_derivative_ = _namespace.silu_derivative_.default
silu_backward_derivative = _namespace.silu_backward_derivative.default

FORWARD_OPS = (relu_, leaky_relu_, silu_, silu_derivative_)
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
    order is right; in compiled code, whose strides may be symbols, it is that of the usual formats.
    """
    if x.is_contiguous():
        return []
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    if torch.compiler.is_compiling():
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


def _forward_fake(name: str) -> Callable[..., None]:
    def fake(x: Tensor, bits: Tensor | None, order: Sequence[int], *arguments: float) -> None:
        _check_devices(x, bits)
        check_dtype(name, x)

    return fake


def _backward_fake(grad: Tensor, *arguments: object) -> Tensor:
    _check_devices(grad, *arguments)
    order = next(a for a in arguments if isinstance(a, (list, tuple)))
    return grad.new_empty_strided(grad.shape, dense_strides(grad.shape, order))


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


for _op in FORWARD_OPS:
    torch.library.register_fake(_op.name(), _forward_fake(_op.name().removeprefix("inplace_ops::")))
for _op in BACKWARD_OPS:
    torch.library.register_fake(_op.name(), _backward_fake)
    torch.library.register_vmap(_op.name(), _loop_over_batch(_op))

SUPPORTED = "strided tensors on the CPU" + (" and CUDA devices" if cuda_version else "")


def unsupported(op: str, x: Tensor) -> NotImplementedError:
    """The error for a tensor that no kernel exists for."""
    reason = f"; the CUDA kernels could not be loaded: {cuda_error}" if cuda_error else ""
    return NotImplementedError(
        f"{op}: no kernel for a tensor with layout {x.layout}, device {x.device} and dtype "
        f"{x.dtype}; this build supports {SUPPORTED}{reason}"
    )
