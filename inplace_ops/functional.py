"""The in-place activations as functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import _ops
from .functions import (
    LeakyReLUFunction,
    ReLUFunction,
    SiLUDerivativeFunction,
    SiLUFunction,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The fewest bits with which SiLU's gradient passes torch.testing's default tolerances.
_SILU_BITS = {torch.float64: 1, torch.float32: 6, torch.float16: 7, torch.bfloat16: 5}
_SILU_DERIVATIVE_BITS = {
    torch.float64: 32,
    torch.float32: 16,
    torch.float16: 8,
    torch.bfloat16: 8,
}


def relu_(input: Tensor, *, save: str = "mask") -> Tensor:
    """Replace `input` by max(input, 0) and return `input` itself.

    Args:
        input: A tensor of any shape and strides, on the CPU or a CUDA device, in float64, float32,
            float16 or bfloat16, or, without gradient, uint8, int8, int16, int32 or int64.
        save: What is kept for backward where a gradient is needed. "mask": one bit an element, so
            that the result may be modified afterwards. "output": the result itself, as
            `torch.relu_` does; free where the next layer keeps it anyway, and then it must not be
            modified before backward.

    Raises:
        RuntimeError: Where `torch.relu_` raises too: a leaf that requires grad, a view that
            autograd cannot modify, overlapping memory, ... `input` is unchanged.
        NotImplementedError: For a tensor with no kernel here (sparse, another device, ...).
        TypeError: If `input` is no tensor.
        ValueError: If `save` is neither "mask" nor "output".
    """
    if has_torch_function_unary(input):
        return _overridden(relu_, input, save=save)
    check_save("relu_", save, ("mask", "output"))
    bits = int(save == "mask")
    if is_compiling():
        _check_tensor("relu_", input)
        return _compiled(_ops.relu, F.relu, input, bits)
    if _decomposes(input, "relu_"):
        return _decomposed(F.relu, input)
    if not _needs_grad(input):
        return _without_grad(_ops.relu_, "relu_", input)
    return _with_grad(ReLUFunction, "relu_", input, bits)


def leaky_relu_(input: Tensor, negative_slope: float = 0.01, *, save: str = "mask") -> Tensor:
    """Multiply `input` by `negative_slope` where it is not positive and return `input` itself.

    Args:
        input: As for `relu_`, but floating point only.
        negative_slope: Any number; the gradient is right for a negative one too.
        save: As for `relu_`; "output" needs `negative_slope >= 0`, as the sign of the output must
            tell that of the input.

    Raises:
        TypeError: If `negative_slope` is no real number.
        ValueError: If `save` is unknown, or "output" with a negative slope.
        Otherwise as `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(leaky_relu_, input, negative_slope=negative_slope, save=save)
    check_leaky_relu(negative_slope, save)
    bits = int(save == "mask")
    if is_compiling():
        _check_tensor("leaky_relu_", input)
        return _compiled(_ops.leaky_relu, F.leaky_relu, input, bits, negative_slope)
    if _decomposes(input, "leaky_relu_"):
        return _decomposed(F.leaky_relu, input, negative_slope)
    if not _needs_grad(input):
        return _without_grad(_ops.leaky_relu_, "leaky_relu_", input, negative_slope)
    return _with_grad(LeakyReLUFunction, "leaky_relu_", input, bits, negative_slope)


def silu_(input: Tensor, *, save: str = "output", bits: int | None = None) -> Tensor:
    """Replace `input` by input * sigmoid(input) and return `input` itself.

    Args:
        input: As for `relu_`, but floating point only.
        save: What is kept for backward where a gradient is needed. "output": the result itself,
            free where the next layer keeps it anyway, and `bits` an element of the input, from
            which backward recovers the input (x = y + W(y exp(-y)), Lambert's W); the result must
            not be modified before backward. "derivative": silu'(x) rounded to a grid of `bits`
            bits; the result may be modified, and there is no second derivative.
        bits: With "output" 1 to 8; None takes the fewest with which the gradient passes
            torch.testing's default tolerances against PyTorch's: 1 in float64, 6 in float32, 7 in
            float16, 5 in bfloat16. With "derivative" 8, 16 or 32; None takes 8 in float16 and
            bfloat16 (largest error of the derivative 2.4e-3), 16 in float32 (1e-5) and 32 in
            float64 (1.6e-10).

    Raises:
        ValueError: If `save` or `bits` is none of these.
        Otherwise as `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(silu_, input, save=save, bits=bits)
    check_silu(save, bits)
    if is_compiling():
        _check_tensor("silu_", input)
        op = _ops.silu if save == "output" else _ops.silu_derivative
        return _compiled(op, F.silu, input, bits or default_bits(input.dtype, save))
    if _decomposes(input, "silu_"):
        return _decomposed(F.silu, input)
    if not _needs_grad(input):
        return _without_grad(_ops.silu_, "silu_", input)
    function = SiLUFunction if save == "output" else SiLUDerivativeFunction
    return _with_grad(function, "silu_", input, bits or default_bits(input.dtype, save))


def default_bits(dtype: torch.dtype, save: str) -> int:
    """The bits an element that silu_ keeps unless it is told."""
    default = _SILU_BITS if save == "output" else _SILU_DERIVATIVE_BITS
    return default.get(dtype, 8)


def check_save(op: str, save: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `save` is one of `choices`."""
    if save not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{op}: save must be {expected}, got {save!r}")


def check_leaky_relu(negative_slope: float, save: str) -> None:
    """Raise TypeError or ValueError for arguments that leaky_relu_ does not take."""
    check_save("leaky_relu_", save, ("mask", "output"))
    # Real, an abstract class, takes long to ask.
    if not isinstance(negative_slope, (float, int, Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(
            f"leaky_relu_: negative_slope must be a real number, got {negative_slope!r}"
        )
    if save == "output" and not negative_slope >= 0:
        raise ValueError(
            f'leaky_relu_: save="output" needs negative_slope >= 0, got {negative_slope}: the sign '
            'of the output does not tell that of the input; use save="mask"'
        )


def check_silu(save: str, bits: int | None) -> None:
    """Raise ValueError for arguments that silu_ does not take."""
    check_save("silu_", save, ("output", "derivative"))
    if bits is None:
        return
    choices = (1, 2, 3, 4, 5, 6, 7, 8) if save == "output" else (8, 16, 32)
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in choices:
        expected = "1 to 8" if save == "output" else "8, 16 or 32"
        raise ValueError(f'silu_: bits must be {expected} with save="{save}", got {bits!r}')


def _overridden(function: Callable[..., Tensor], input: Any, **arguments: Any) -> Any:
    return handle_torch_function(function, (input,), input, **arguments)


def _check_tensor(op: str, input: Tensor) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: expected a torch.Tensor, got {type(input).__name__}")
    if input.layout is not torch.strided:
        raise _ops.unsupported(op, input)


def _decomposes(input: Tensor, op: str) -> bool:
    """Whether to run as PyTorch's own ops: inside transforms, and of a lazily negated tensor."""
    if not isinstance(input, Tensor) or input.layout is not torch.strided:
        _check_tensor(op, input)  # raises; asked first, as a call costs 0.2 us
    if (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
        or input.is_neg()
    ):
        _ops.check_dtype(op, input)
        return True
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(input).tangent is not None


def _decomposed(activation: Callable[..., Tensor], input: Tensor, *arguments: Any) -> Tensor:
    """PyTorch's own activation and a copy, which every transform understands.

    The activation gets a clone, as it may keep what the copy would overwrite. Right everywhere,
    with PyTorch's memory use.
    """
    return input.copy_(activation(input.clone(), *arguments))


def _needs_grad(input: Tensor) -> bool:
    return input.requires_grad and torch.is_grad_enabled()


def _is_dtensor(input: Tensor) -> TypeGuard[DTensor]:
    # Without importing torch.distributed.tensor, which takes longer than the rest.
    if type(input) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(input, module.DTensor)


def _local_part(input: Tensor, op: str) -> Tensor:
    """The tensor to work on: this process's part of a DTensor, else the input itself."""
    if not _is_dtensor(input):
        return input
    from ._dtensor import local_part

    return local_part(op, input)


def _compiled(
    op: Any, activation: Callable[..., Tensor], input: Tensor, bits: int, *arguments: Any
) -> Tensor:
    """The activation in compiled code: out of place and a copy, of which the compiler makes one.

    Inductor moves an earlier read of a tensor behind a custom op that modifies it, and autograd
    Functions that modify a graph's input get wrong gradients.
    """
    if (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_dtensor(input)
        # is_exporting() is true of all that Dynamo traces before torch 2.13.
        or torch.compiler._is_exporting_flag
    ):
        return _decomposed(activation, input, *arguments)
    order = _ops.storage_order(input)
    result, _ = op(input, bits if _needs_grad(input) else 0, order, *arguments)
    return input.copy_(result)


def _without_grad(op: Any, name: str, input: Tensor, *arguments: Any) -> Tensor:
    if input.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make "
            "a clone to get a normal tensor before doing inplace update."
        )
    try:
        op(_local_part(input, name), _ops.storage_order(input), *arguments)
    except NotImplementedError as error:
        raise _ops.unsupported(name, input) from error
    increment_version(input)
    return input


def _with_grad(
    function: type[Function], name: str, input: Tensor, bits: int, *arguments: Any
) -> Tensor:
    _refuse_what_autograd_refuses(input)
    part = _local_part(input, name)
    packed = _ops.empty_bits(part, bits) if bits else None
    if part is not input:
        from ._dtensor import on_local_parts

        function = on_local_parts(function)
    try:
        return function.apply(input, packed, _ops.storage_order(input), *arguments)
    except NotImplementedError as error:
        raise _ops.unsupported(name, input) from error


def _refuse_what_autograd_refuses(input: Tensor) -> None:
    """Raise PyTorch's own error for a tensor that it does not let be modified, before it is.

    Autograd checks a custom Function's dirty inputs only after its forward.
    """
    if input.is_leaf or (
        input._is_view()
        and (
            input._base.is_leaf  # type: ignore[union-attr]
            or torch._C._autograd._get_creation_meta(input)
            != torch._C._autograd.CreationMeta.DEFAULT
        )
    ):
        # Autograd's check is the same for every in-place op, and raises before the op.
        input.mul_(1)
        raise AssertionError("autograd was expected to refuse this tensor")
