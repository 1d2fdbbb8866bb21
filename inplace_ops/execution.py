"""How a call of an in-place activation runs: compiled, transformed, without or with a gradient."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from . import _ops
from ._torch import creation_meta
from .activations import Activation, Save
from .autograd import FUNCTIONS, RecomputeFunction, keep_place
from .normalization import norm_of, source_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def run(
    activation: Activation,
    input: Tensor,
    save: Save,
    bits: int | None,
    *arguments: Any,
    fallback: Save | None = None,
) -> Tensor:
    """Replace `input` by its activation and return `input` itself.

    Args:
        activation: Which one.
        input: What the public functions take.
        save: What is kept for backward, one of the activation's.
        bits: How many bits per element, None for the default.
        *arguments: The activation's scalar arguments.
        fallback: What is kept with save="recompute" where no norm has formed `input`, an error if
            None.
    """
    if activation.takes_integers and isinstance(input, Tensor) and input.dtype in _INTEGERS:
        assert activation.torch_inplace is not None
        if not is_compiling():
            _refuse_inference_tensor(input)
        return activation.torch_inplace(input)
    name = activation.function
    if is_compiling():
        _check_tensor(name, input)
        return _compiled(activation, input, save, bits, *arguments)
    if _decomposes(input, name):
        return _decomposed(activation, input, *arguments)
    if not _needs_grad(input):
        return _without_grad(activation, input, *arguments)
    if save == "recompute":
        return _after_norm(activation, input, fallback, bits, *arguments)
    return _with_grad(activation, input, save, bits, *arguments)


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


def _decomposed(activation: Activation, input: Tensor, *arguments: Any) -> Tensor:
    """PyTorch's own activation and a copy, which every transform understands.

    The activation gets a clone, as it may keep what the copy would overwrite. Right everywhere,
    with PyTorch's memory use.
    """
    return input.copy_(activation.torch_function(input.clone(), *arguments))


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
    activation: Activation, input: Tensor, save: Save, bits: int | None, *arguments: Any
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
    ops, dim_order = activation.ops, _ops.dim_order_of(input)
    if _needs_grad(input) and save == "recompute":
        return _decomposed(activation, input, *arguments)  # which the compiler recomputes best
    if _needs_grad(input) and save in ops.save_out_of_place:
        kept = bits or activation.default_bits(save, input.dtype)
        result, _ = ops.save_out_of_place[save](input, kept, dim_order, *arguments)
    else:
        result = ops.out_of_place(input, dim_order, *arguments)
    return input.copy_(result)


def _without_grad(activation: Activation, input: Tensor, *arguments: Any) -> Tensor:
    _refuse_inference_tensor(input)
    name = activation.function
    try:
        activation.ops.in_place(_local_part(input, name), _ops.dim_order_of(input), *arguments)
    except NotImplementedError as error:
        raise _ops.unsupported(name, input) from error
    increment_version(input)
    return input


def _with_grad(
    activation: Activation, input: Tensor, save: Save, bits: int | None, *arguments: Any
) -> Tensor:
    _refuse_what_autograd_refuses(input)
    name = activation.function
    part = _local_part(input, name)
    kept = bits or activation.default_bits(save, input.dtype)
    packed = _ops.empty_bits(part, kept) if kept else None
    function: Any = FUNCTIONS[activation, save]
    if part is not input:
        from ._dtensor import on_local_parts

        function = on_local_parts(function)
    try:
        return function.apply(input, packed, _ops.dim_order_of(input), *arguments)
    except NotImplementedError as error:
        raise _ops.unsupported(name, input) from error


def _after_norm(
    activation: Activation,
    input: Tensor,
    fallback: Save | None,
    bits: int | None,
    *arguments: Any,
) -> Tensor:
    norm = norm_of(input)
    if norm is None and fallback is None:
        _refuse_what_autograd_refuses(input)
        raise RuntimeError(_no_norm(activation, input))
    source = norm and source_of(norm)
    if norm is None or source is None:
        save = fallback or activation.saves[0]
        return _with_grad(activation, input, save, bits, *arguments)
    _refuse_what_autograd_refuses(input)
    dim_order = _ops.dim_order_of(norm.output)
    function: Any = RecomputeFunction
    try:
        output = function.apply(norm.output, source, dim_order, activation, *arguments)
    except NotImplementedError as error:
        raise _ops.unsupported(activation.function, input) from error
    if not activation.has_mask:
        keep_place(output)
    return input


def _no_norm(activation: Activation, input: Tensor) -> str:
    found = f"that of {type(input.grad_fn).__name__}"
    if input._version != 0:
        found = "a tensor that was written to since it was made"
    elif type(input) is not Tensor:
        found = f"a {type(input).__name__}"
    return (
        f'{activation.function}: save="recompute" needs the unchanged output of a batch, group, '
        f"instance or layer norm, which it forms again from the norm's input, and got {found}: "
        f'use it right after the norm, or save="{activation.saves[0]}"'
    )


def _refuse_inference_tensor(input: Tensor) -> None:
    """Raise PyTorch's error for one outside of inference mode, before it is modified."""
    if input.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make "
            "a clone to get a normal tensor before doing inplace update."
        )


def _refuse_what_autograd_refuses(input: Tensor) -> None:
    """Raise PyTorch's own error for a tensor that it does not let be modified, before it is.

    Autograd checks a custom Function's dirty inputs only after its forward.
    """
    if input.is_leaf or (
        input._is_view()
        and (
            input._base.is_leaf  # type: ignore[union-attr]
            or creation_meta(input) != "DEFAULT"
        )
    ):
        # Autograd's check is the same for every in-place op, and raises before the op.
        input.mul_(1)
        raise AssertionError("autograd was expected to refuse this tensor")
