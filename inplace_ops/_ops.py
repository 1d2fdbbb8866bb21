"""The compiled ops: their handles, their fakes for tracing, and the memory layouts they work on.

The ops are private. A direct call with a tensor that requires grad modifies it without autograd's
knowledge: `inplace_ops.autograd` wraps the ops in Functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ._torch_private import (
    OpOverload,
    check,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    len_torch_dispatch_stack,
    op_name,
    profiler_is_running,
)

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"inplace_ops is imported from {__file__.rpartition('/')[0]}, where it is not built "
        f"({error}). Build it there, `pip install --no-build-isolation -v .`, or run Python in "
        "another folder if it is installed elsewhere."
    ) from error

cuda_version: str | None = None
cuda_architectures: str | None = None
no_cuda: str | None = None  # why the CUDA kernels are missing
_cuda_calls: dict[str, Callable[..., Any]] = {}
if torch.version.cuda is None:
    no_cuda = "torch is built without CUDA"
else:
    try:
        import inplace_ops._C_cuda as _C_cuda
    except ModuleNotFoundError:
        no_cuda = "inplace_ops is built without them: see docs/building.md"
    except ImportError as error:
        no_cuda = f"they could not be loaded: {error}"
    else:
        cuda_version = f"{_C_cuda.cuda_version // 1000}.{_C_cuda.cuda_version % 1000 // 10}"
        cuda_architectures = _C_cuda.cuda_architectures
        _cuda_calls = _C_cuda.calls
built_with_torch = _C.built_with_torch

Op = OpOverload
Save = Literal["mask", "output", "derivative", "recompute"]
DimOrder = Sequence[int] | None  # a permutation of the dimensions; None means the identity


# Makes a NamedTuple of the tuple of its fields. Its own constructor, which is written in Python,
# takes three times as long.
record_of = tuple.__new__


class OpArgs(NamedTuple):
    """The last arguments of every op.

    Attributes:
        dim_order: The order in which the op iterates over the dimensions.
        scalars: The activation's scalar arguments.
    """

    dim_order: DimOrder
    scalars: tuple[float, ...]


class Call:
    """Calls an op, without PyTorch's dispatcher where that makes no difference.

    For a small tensor the dispatcher takes longer than the kernel. From torch 2.14 on, the library
    has functions that take an op's arguments from Python and do the same: see
    `csrc/python_calls.h`. They serve ordinary tensors on a CPU or GPU, while nothing else sees the
    op: neither a dispatch mode, nor a compiler, nor the profiler.

    Attributes:
        op: The op.
    """

    __slots__ = ("_function", "_function_on_cuda", "op")

    def __init__(self, op: Op) -> None:
        self.op = op
        self._function = _C.calls.get(op_name(op), _not_implemented)
        self._function_on_cuda = _cuda_calls.get(op_name(op), _not_implemented)

    def __call__(self, *arguments: Any) -> Any:
        """Return `op(*arguments)`."""
        if is_dynamo_compiling() or len_torch_dispatch_stack() or profiler_is_running():
            return self.op(*arguments)
        like: Any = arguments[0]
        if like is None:
            like = next(a for a in arguments if a is not None)
        if like.is_cpu:
            result = self._function(*arguments)
        else:
            result = self.without_dispatcher(like)(*arguments)
        return self.op(*arguments) if result is NotImplemented else result

    def without_dispatcher(self, like: Tensor) -> Callable[..., Any]:
        """Return what calls the op on a tensor's device, where nothing else sees the op.

        It takes positional arguments, and returns NotImplemented where only the dispatcher can call
        the op.
        """
        if like.is_cpu:
            return self._function
        return self._function_on_cuda if like.is_cuda else _not_implemented


def _not_implemented(*_: Any) -> Any:
    return NotImplemented


# Returns the offset, shape, strides, dtype and device of a tensor as bytes; None of a subclass of
# Tensor, of a tensor without memory, and of one without kernels. Before torch 2.14 None of all.
layout_of: Callable[[Tensor], bytes | None] = _C.layout or (lambda tensor: None)


class Ops:
    """The compiled ops of one activation: see `csrc/registration.h` for their schemas.

    Attributes:
        name: The activation's name in `csrc/activations.h`.
        default_bits: The default number of packed bits per element, by save mode and dtype.
        derivative_steps: The steps per unit of the grid that save="derivative" rounds to, by bits.
        in_place: Overwrites its argument and saves nothing.
        save_in_place: Overwrites its argument and returns packed bits; by save mode.
        save_out_of_place: Returns the result and packed bits, for compiled code; by save mode.
        traced: The activation in the graph of compiled code: see `torch_compile.py`.
        backward: Computes the gradient from the incoming one and the saved tensors; by save mode.
        recompute: Computes the activation from a norm's input and affine: see `NormAffine`. With
            `dtype` it casts a float32 result to that dtype. With `in_float32` it casts a 16-bit
            input to float32 first, and the result back.
        backward_batch_norm: Computes the gradients of the input, the weight and the bias of a batch
            norm in training from that of the activation of its output: see `csrc/batch_norm.h`.
        double_backward: Computes the term of the second derivative; None if that is zero.
        call_in_place, call_save_in_place, call_save_out_of_place, call_backward, call_recompute,
            call_backward_batch_norm: Call these ops.
    """

    def __init__(self, name: str) -> None:
        def op(suffix: str) -> Op:
            return getattr(torch.ops.inplace_ops, name + suffix).default

        numbers = _C.activations[name]
        self.name = name
        self.derivative_steps = numbers["derivative_steps"]
        self.default_bits: dict[Save, dict[torch.dtype, int]] = {
            save: {getattr(torch, dtype): bits for dtype, bits in by_dtype.items()}
            for save, by_dtype in numbers["default_bits"].items()
        }
        packing = [save for save, bits in self.default_bits.items() if any(bits.values())]
        self.in_place = op("_")
        self.save_in_place = {save: op(f"_save_{save}_") for save in packing}
        self.save_out_of_place = {save: op(f"_save_{save}") for save in packing}
        self.traced = op("_traced_")
        self.backward = {save: op(f"_backward_{save}") for save in self.default_bits}
        self.backward["recompute"] = op("_backward_recompute")
        self.recompute = op("_recompute")
        self.backward_batch_norm = op("_backward_batch_norm")
        self.double_backward = op("_double_backward") if "derivative" in packing else None
        self.call_in_place = Call(self.in_place)
        self.call_save_in_place = {save: Call(op) for save, op in self.save_in_place.items()}
        self.call_save_out_of_place = {
            save: Call(op) for save, op in self.save_out_of_place.items()
        }
        self.call_backward = {save: Call(op) for save, op in self.backward.items()}
        self.call_recompute = Call(self.recompute)
        self.call_backward_batch_norm = Call(self.backward_batch_norm)


ALL = {name: Ops(name) for name in _C.activations}
NORM_AFFINE: Op = torch.ops.inplace_ops.norm_affine.default  # a norm's scale and shift
CALL_NORM_AFFINE = Call(NORM_AFFINE)
NORMALIZE: Op = torch.ops.inplace_ops.normalize.default  # a norm's output, like `Ops.recompute`
CALL_NORMALIZE = Call(NORMALIZE)
NORMALIZE_ADD: Op = torch.ops.inplace_ops.normalize_add.default  # a norm's output plus a tensor
CALL_NORMALIZE_ADD = Call(NORMALIZE_ADD)
NORMALIZE_ADD_RELU: Op = torch.ops.inplace_ops.normalize_add_relu.default  # ReLU of the sum
CALL_NORMALIZE_ADD_RELU = Call(NORMALIZE_ADD_RELU)
DTYPES = tuple(ALL["relu"].default_bits["mask"])
CAST_DTYPES = (torch.float16, torch.bfloat16)  # an op can cast float32 to these, and from them

# The ops of all activations: in place without and with packed bits, out of place with packed bits,
# sums, from a norm's input, backward with the norm's, and backward.
PLAIN_OPS = [ops.in_place for ops in ALL.values()]
SAVING_OPS = [op for ops in ALL.values() for op in ops.save_in_place.values()]
FUNCTIONAL_OPS = [op for ops in ALL.values() for op in ops.save_out_of_place.values()]
SUM_OPS = [NORMALIZE_ADD, NORMALIZE_ADD_RELU]
RECOMPUTING_OPS = [NORMALIZE, *(ops.recompute for ops in ALL.values())]
BATCH_NORM_OPS = [ops.backward_batch_norm for ops in ALL.values()]
BACKWARD_OPS = [op for ops in ALL.values() for op in ops.backward.values()]
BACKWARD_OPS += [ops.double_backward for ops in ALL.values() if ops.double_backward]

# Selective checkpointing must rerun these ops: it would otherwise return their cached results, and
# not write to the tensor.
SAC_IGNORED_OPS.update(PLAIN_OPS, SAVING_OPS)


def dim_order_of(x: Tensor) -> DimOrder:
    """Return the order of x's dimensions in memory, largest stride first.

    The ops iterate over their tensors and pack bits in this order. Any order gives right results.
    """
    if x.is_contiguous():
        return None
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: -strides[d])


def dense_strides(shape: Sequence[int], dim_order: DimOrder) -> tuple[int, ...]:
    """Return the strides of a dense tensor in `dim_order`, such as a backward op's result."""
    strides: list[Any] = [1] * len(shape)  # int or SymInt
    stride: Any = 1
    for d in reversed(dim_order or range(len(shape))):
        strides[d] = stride
        stride = stride * torch.sym_max(shape[d], 1)
    return tuple(strides)


def in_order(x: Tensor, dim_order: DimOrder) -> Tensor:
    """Return x, or a copy that is dense in `dim_order` where x is dense in another order.

    Kernels iterate over all tensors in one order, and are slow if one of them is transposed. This
    happens after a group norm in channels_last on a GPU: its output is contiguous, and the gradient
    is not.
    """
    if dim_order is None and x.is_contiguous():
        return x
    if is_dynamo_compiling() or is_batched(x):
        return x
    own = dim_order_of(x)
    if own == dim_order or x.stride() != dense_strides(x.shape, own):
        return x
    return x.new_empty_strided(x.shape, dense_strides(x.shape, dim_order)).copy_(x)


def is_batched(x: Tensor) -> bool:
    """Whether the tensor is a batch of tensors, made by vmap or by `is_grads_batched=True`."""
    return is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x)


AFFINE_DTYPES = (torch.float32, torch.float64)


def affine_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the scales and shifts of a norm with outputs of the given dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_bits(x: Tensor, bits: int) -> Tensor:
    """Allocate `bits` packed bits per element of x: uint8, of shape (bits, ceil(elements / 8))."""
    return x.new_empty((bits, (x.numel() + 7) // 8), dtype=torch.uint8)


def raise_out_of_memory(error: RuntimeError, allocate: Callable[[], Tensor]) -> None:
    """Raise PyTorch's own error if an op could not allocate its result.

    The op raises a RuntimeError about memory in any case: the stable ABI loses type and text, also
    those of an earlier error of a GPU. `allocate` allocates such a result again.
    """
    if is_out_of_memory(error):
        allocate()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: on a GPU, on a CPU, or in an op of this package."""
    text = str(error)
    return any(
        part in text for part in ("out of memory", "can't allocate memory", "not enough memory")
    )


def check_dtype(op: str, x: Tensor) -> None:
    """Raise RuntimeError for a dtype without kernels."""
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise RuntimeError(f"{op}: unsupported dtype {x.dtype}; supported are {names}")


def _check_devices(*arguments: object) -> None:
    devices = {a.device for a in arguments if isinstance(a, Tensor)}
    check(len(devices) == 1, lambda: f"tensors on several devices: {devices}")


def _empty_in_order(x: Tensor, dim_order: DimOrder, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty_strided(x.shape, dense_strides(x.shape, dim_order), dtype=dtype or x.dtype)


def _name_of(op: Op) -> str:
    """Return the activation's name as in the kernels' errors; GELU's tanh form has its own."""
    return op_name(op).partition("_save_")[0].removesuffix("_") + "_"


def _recomputing_fake(
    x: Tensor,
    channel_affine: Tensor,
    row_statistics: Tensor | None,
    dim_order: DimOrder,
    *arguments: float,
    dtype: torch.dtype | None = None,
    in_float32: bool = False,
) -> Tensor:
    _check_devices(x, channel_affine, row_statistics)
    is_cast = x.dtype is torch.float32 and dtype in CAST_DTYPES and not in_float32
    check(
        dtype in (None, x.dtype) or is_cast,
        lambda: f"dtype must be the dtype of x, or float16 or bfloat16 if x is float32: {dtype}",
    )
    check(
        x.dtype in CAST_DTYPES or not in_float32, lambda: "in_float32 requires float16 or bfloat16"
    )
    return _empty_in_order(x, dim_order, dtype)


def _sum_fake(
    x: Tensor,
    channel_affine: Tensor,
    row_statistics: Tensor | None,
    addend: Tensor,
    dim_order: DimOrder,
) -> Tensor:
    _check_devices(x, channel_affine, row_statistics, addend)
    check(
        x.shape == addend.shape and x.dtype == addend.dtype,
        lambda: "x and addend must have one shape and dtype",
    )
    return _empty_in_order(x, dim_order)


def _norm_affine_fake(
    rstd: Tensor | None,
    mean: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
    channels_per_group: int,
) -> Tensor:
    _check_devices(rstd, mean, weight, bias)
    like = weight if rstd is None else rstd
    assert like is not None
    return like.new_empty(shape)


def _functional_fake(op: Op) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(x: Tensor, bits: int, dim_order: DimOrder, *arguments: float) -> tuple[Tensor, Tensor]:
        check_dtype(_name_of(op), x)
        return _empty_in_order(x, dim_order), empty_bits(x, bits)

    return fake


def _saving_fake(op: Op) -> Callable[..., Tensor]:
    def fake(x: Tensor, bits: int, *arguments: object) -> Tensor:
        check_dtype(_name_of(op), x)
        return empty_bits(x, bits)

    return fake


def _plain_fake(op: Op) -> Callable[..., None]:
    def fake(x: Tensor, *arguments: object) -> None:
        check_dtype(_name_of(op), x)

    return fake


def _backward_fake(grad: Tensor, *arguments: object) -> Tensor:
    _check_devices(grad, *arguments)
    order = next((a for a in arguments if isinstance(a, (list, tuple))), None)
    return _empty_in_order(grad, order)


def _batch_norm_fake(
    grad: Tensor,
    x: Tensor,
    channel_affine: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dim_order: DimOrder,
    *arguments: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_devices(grad, x, channel_affine, mean, rstd)
    check(
        grad.shape == x.shape and grad.dtype == x.dtype,
        lambda: "grad and x must have one shape and dtype",
    )
    return _empty_in_order(x, dim_order), torch.empty_like(mean), torch.empty_like(mean)


def _loop_over_batch(op: Op):  # type: ignore[no-untyped-def]
    """Return the vmap rule of a backward op, which calls the op once per sample.

    It serves vmap over the gradients of an ordinary backward.
    """

    def rule(info, in_dims, *arguments):  # type: ignore[no-untyped-def]
        def sample(i: int) -> list[object]:
            return [
                a.select(d, i).contiguous() if isinstance(a, Tensor) and d is not None else a
                for a, d in zip(arguments, in_dims, strict=True)
            ]

        return torch.stack([op(*sample(i)) for i in range(info.batch_size)]), 0

    return rule


torch.library.register_fake(NORM_AFFINE.name(), _norm_affine_fake)
for _op in RECOMPUTING_OPS:
    torch.library.register_fake(_op.name(), _recomputing_fake)
for _op in SUM_OPS:
    torch.library.register_fake(_op.name(), _sum_fake)
for _op in BATCH_NORM_OPS:
    torch.library.register_fake(_op.name(), _batch_norm_fake)
for _op in PLAIN_OPS:
    torch.library.register_fake(_op.name(), _plain_fake(_op))
for _op in SAVING_OPS:
    torch.library.register_fake(_op.name(), _saving_fake(_op))
for _op in FUNCTIONAL_OPS:
    torch.library.register_fake(_op.name(), _functional_fake(_op))
for _op in BACKWARD_OPS:
    torch.library.register_fake(_op.name(), _backward_fake)
    torch.library.register_vmap(_op.name(), _loop_over_batch(_op))

SUPPORTED = "strided tensors, neither nested nor quantized, on the CPU"
SUPPORTED += " and CUDA devices" if cuda_version else ""


def has_kernel(x: Tensor) -> bool:
    """Whether there are kernels for the device and the dtype of a strided tensor."""
    return x.dtype in DTYPES and (x.is_cpu or (x.is_cuda and cuda_version is not None))


def unsupported(op: str, x: Tensor) -> NotImplementedError:
    """Return the error for a tensor without a kernel."""
    reason = f"; no CUDA kernels: {no_cuda}" if x.is_cuda and no_cuda else ""
    return NotImplementedError(
        f"{op}: no kernel for a {'nested ' if x.is_nested else ''}tensor with layout {x.layout}, "
        f"device {x.device} and dtype {x.dtype}; this build supports {SUPPORTED}{reason}"
    )
