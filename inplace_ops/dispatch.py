"""How a call of an in-place activation runs: compiled, transformed, without or with a gradient."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _get_tracing_state
from torch._C._functorch import is_functorch_wrapped_tensor, unwrap_if_dead
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from . import _ops
from ._torch_private import creation_meta
from .activations import Activation, Save
from .autograd import APPLY, FUNCTIONS
from .recompute.functions import recomputed_activation
from .recompute.norms import norm_of, source_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def dispatch(
    activation: Activation,
    input: Tensor,
    save: Save,
    bits: int | None,
    arguments: tuple[Any, ...] = (),
    fallback: Save | None = None,
) -> Tensor:
    """Replace `input` by its activation and return `input` itself.

    Args:
        activation: Which one.
        input: What the public functions take.
        save: What is kept for backward, one of the activation's.
        bits: How many bits per element, None for the default.
        arguments: The activation's scalar arguments.
        fallback: What is kept with save="recompute" where no norm has formed `input`, an error if
            None.
    """
    if not isinstance(input, Tensor) or input.layout is not torch.strided:
        raise _not_strided_error(activation, input)
    if activation.takes_integers and not input.requires_grad and input.dtype in _INTEGERS:
        return _integer_activation(activation, input)
    if is_compiling():
        return _compiled(activation, input, save, bits, arguments)
    if (
        _are_functorch_transforms_active()
        or _get_tracing_state() is not None  # torch.jit.trace
        or input.is_neg()
        or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(input).tangent is not None)
    ):
        _ops.check_dtype(activation.function, input)
        return decomposed(activation, input, arguments)
    if not (input.requires_grad and is_grad_enabled()):
        return _without_grad(activation, input, arguments)
    if is_functorch_wrapped_tensor(input):  # by a transform that has ended
        dispatch(activation, unwrap_if_dead(input), save, bits, arguments, fallback)
        return input
    if save == "recompute":
        return _after_norm(activation, input, fallback, bits, arguments)
    return _with_grad(activation, input, save, bits, arguments)


def _not_strided_error(activation: Activation, input: object) -> Exception:
    if isinstance(input, Tensor):
        return _ops.unsupported(activation.function, input)
    return TypeError(f"{activation.function}: expected a torch.Tensor, got {type(input).__name__}")


def _integer_activation(activation: Activation, input: Tensor) -> Tensor:
    assert activation.torch_inplace is not None
    if not is_compiling():
        _check_inference_tensor(input)
    return activation.torch_inplace(input)


def decomposed(activation: Activation, input: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """PyTorch's own activation and a copy, which every transform understands.

    The activation gets a clone, as it may keep what the copy would overwrite. Right everywhere,
    with PyTorch's memory use.
    """
    return input.copy_(activation.torch_function(input.clone(), *arguments))


def needs_grad(input: Tensor) -> bool:
    """Whether what is done with it is recorded for backward."""
    return input.requires_grad and is_grad_enabled()


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
    activation: Activation, input: Tensor, save: Save, bits: int | None, arguments: tuple[Any, ...]
) -> Tensor:
    if (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_dtensor(input)
        # is_exporting() is true of all that Dynamo traces before torch 2.13.
        or torch.compiler._is_exporting_flag
    ):
        return decomposed(activation, input, arguments)
    _ops.check_dtype(activation.function, input)
    activation.ops.traced(input, save, bits, *arguments)
    return input


def _without_grad(activation: Activation, input: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    _check_inference_tensor(input)
    name = activation.function
    part = input if type(input) is Tensor else _local_part(input, name)
    try:
        activation.ops.in_place(part, _ops.dim_order_of(part), *arguments)
    except NotImplementedError as error:
        raise _ops.unsupported(name, input) from error
    except RuntimeError:
        _ops.check_dtype(name, input)  # the op's own error names a line of C++
        raise
    increment_version(input)
    return input


def _with_grad(
    activation: Activation, input: Tensor, save: Save, bits: int | None, arguments: tuple[Any, ...]
) -> Tensor:
    if input.is_leaf or input._is_view():
        check_inplace_allowed(input)
    apply, default_bits = APPLY[activation, save]
    bits = bits or default_bits.get(input.dtype, 8)  # the op refuses a dtype that it does not know
    if type(input) is not Tensor and _is_dtensor(input):
        from ._dtensor import local_part, on_local_parts

        local_part(activation.function, input)  # raises where the parts cannot be modified
        apply = on_local_parts(FUNCTIONS[activation, save]).apply
    try:
        return apply(input, bits, _ops.OpArgs(_ops.dim_order_of(input), arguments))
    except NotImplementedError as error:
        raise _ops.unsupported(activation.function, input) from error
    except RuntimeError as error:
        _ops.check_dtype(activation.function, input)
        if "out of memory" in str(error):
            _ops.empty_bits(input, bits)  # raises PyTorch's own error, whose type the op has lost
        raise


def _after_norm(
    activation: Activation,
    input: Tensor,
    fallback: Save | None,
    bits: int | None,
    arguments: tuple[Any, ...],
) -> Tensor:
    norm = norm_of(input)
    if norm is None and fallback is None:
        check_inplace_allowed(input)
        raise RuntimeError(_no_norm_error(activation, input))
    source = norm and source_of(norm)
    if norm is None or source is None:
        save = fallback or activation.save_modes[0]
        return _with_grad(activation, input, save, bits, arguments)
    check_inplace_allowed(input)
    op_args = _ops.OpArgs(_ops.dim_order_of(norm.output), arguments)

    def in_place(z: Tensor) -> Tensor:
        activation.ops.in_place(z, op_args.dim_order, *arguments)
        return z

    try:
        with torch.no_grad():
            affine = source.affine()
        recomputed_activation(norm.output, source.x, affine, activation, op_args, in_place)
    except NotImplementedError as error:
        raise _ops.unsupported(activation.function, input) from error
    return input


def _no_norm_error(activation: Activation, input: Tensor) -> str:
    found = f"that of {type(input.grad_fn).__name__}"
    if input._version != 0:
        found = "a tensor that was written to since it was made"
    elif type(input) is not Tensor:
        found = f"a {type(input).__name__}"
    return (
        f'{activation.function}: save="recompute" needs the unchanged output of a batch, group, '
        f"instance or layer norm, which it recomputes from the norm's input, and got {found}: "
        f'use it right after the norm, or save="{activation.save_modes[0]}"'
    )


def _check_inference_tensor(input: Tensor) -> None:
    """Raise PyTorch's error for one outside of inference mode, before it is modified."""
    if input.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make "
            "a clone to get a normal tensor before doing inplace update."
        )


def check_inplace_allowed(input: Tensor) -> None:
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
