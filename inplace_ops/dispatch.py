"""Choose how a call of an in-place activation runs.

NOTE [Order of decisions]

`dispatch` takes the first case that applies. Later cases rely on the earlier ones not applying.

1. The input is not a tensor, or not strided: raise.
2. The input has an integer dtype and needs no gradient, and PyTorch's activation supports integers
   (ReLU, ReLU6): call PyTorch's in-place activation.
3. torch.compile traces the call: see `_compiled`. It inserts one op, which `torch_compile.py`
   replaces later, or for `torch.func` transforms, forward-mode AD, DTensors and export calls
   `decomposed`.
4. A `torch.func` transform or torch.jit.trace is active, or the input has a lazy negation or a
   forward-mode tangent: call `decomposed`, which these understand.
5. No gradient is needed: overwrite the input, and save nothing.
6. The input is a functorch wrapper whose transform has ended: start over with the tensor inside.
7. Otherwise: apply an in-place Function of `autograd.py`, on the local part of a DTensor.

Cases 5 and 7 check whether the input may be modified before they modify it: see NOTE [Modified
before the check] in `autograd.py`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from . import _ops
from ._torch_private import (
    DisableTorchFunction,
    are_functorch_transforms_active,
    is_exporting,
    is_functorch_wrapped_tensor,
    jit_tracing_state,
    unwrap_if_dead,
)
from .activations import Activation, Save
from .autograd import APPLY, FUNCTIONS, check_inplace_allowed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def dispatch(
    activation: Activation,
    input: Tensor,
    save: Save,
    bits: int | None,
    arguments: tuple[Any, ...] = (),
) -> Tensor:
    """Replace `input` by its activation and return `input` itself: see NOTE [Order of decisions].

    Args:
        activation: The activation to compute.
        input: The input of the public function.
        save: The save mode, which must be one of the activation's.
        bits: The number of packed bits per element; None for the default.
        arguments: The activation's scalar arguments.
    """
    if not isinstance(input, Tensor) or input.layout is not torch.strided:  # case 1
        raise _not_strided_error(activation, input)
    if activation.takes_integers and not input.requires_grad and input.dtype in _INTEGERS:  # 2
        return _integer_activation(activation, input)
    if is_compiling():  # case 3
        return _compiled(activation, input, save, bits, arguments)
    if (  # case 4
        are_functorch_transforms_active()
        or jit_tracing_state() is not None
        or input.is_neg()
        or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(input).tangent is not None)
    ):
        _ops.check_dtype(activation.function, input)
        return decomposed(activation, input, arguments)
    if not (input.requires_grad and is_grad_enabled()):  # case 5
        return _without_grad(activation, input, arguments)
    if is_functorch_wrapped_tensor(input):  # case 6
        dispatch(activation, unwrap_if_dead(input), save, bits, arguments)
        return input
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
    """Overwrite `input` with the result of PyTorch's activation, and return `input` itself.

    Every transform supports these operations, and they use as much memory as PyTorch's activation.
    The activation is called with a clone, because it may save its input, which `copy_` overwrites.
    """
    return input.copy_(activation.torch_function(input.clone(), *arguments))


def needs_grad(input: Tensor) -> bool:
    """Whether autograd records operations on the tensor for backward."""
    return input.requires_grad and is_grad_enabled()


def _is_dtensor(input: Tensor) -> TypeGuard[DTensor]:
    # Does not import torch.distributed.tensor, which takes longer than the rest of this package.
    if type(input) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(input, module.DTensor)


def _local_part(input: Tensor, op: str) -> Tensor:
    """Return this process's part of a DTensor, and any other tensor itself."""
    if not _is_dtensor(input):
        return input
    from ._dtensor import local_part

    return local_part(op, input)


def _compiled(
    activation: Activation, input: Tensor, save: Save, bits: int | None, arguments: tuple[Any, ...]
) -> Tensor:
    if (
        are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _is_dtensor(input)
        or is_exporting()
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
        activation.ops.call_in_place(part, _ops.dim_order_of(part), *arguments)
    except NotImplementedError as error:
        raise _ops.unsupported(name, input) from error
    except RuntimeError:
        _ops.check_dtype(name, input)  # a clearer error: the op's own names a line of C++
        raise
    increment_version(input)
    if input.requires_grad and input._is_view():
        _update_grad_fn(input)
    return input


def _with_grad(
    activation: Activation, input: Tensor, save: Save, bits: int | None, arguments: tuple[Any, ...]
) -> Tensor:
    if input.is_leaf or input._is_view():
        check_inplace_allowed(input)
    apply, default_bits = APPLY[activation, save]
    bits = bits or default_bits.get(input.dtype, 8)  # the op rejects other dtypes
    if type(input) is not Tensor and _is_dtensor(input):
        from ._dtensor import local_part, on_local_parts

        local_part(activation.function, input)  # raises if the placements do not allow it
        apply = on_local_parts(FUNCTIONS[activation, save]).apply
    op_args = _ops.record_of(_ops.OpArgs, (_ops.dim_order_of(input), arguments))
    try:
        return apply(input, (bits, op_args))
    except NotImplementedError as error:
        raise _ops.unsupported(activation.function, input) from error
    except RuntimeError as error:
        _ops.check_dtype(activation.function, input)
        _ops.raise_out_of_memory(error, partial(_ops.empty_bits, input, bits))
        raise


def _update_grad_fn(view: Tensor) -> None:
    """Let autograd update a view's `grad_fn`, which it does when it is read.

    See 2 of NOTE [In place on a view] in `recompute/activation_modules.py`. Autograd raises for one
    of several outputs of an operation.
    """
    with suppress(RuntimeError), DisableTorchFunction():
        _ = view.grad_fn


def _check_inference_tensor(input: Tensor) -> None:
    """Raise PyTorch's error for an inference tensor outside of inference mode."""
    if input.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make "
            "a clone to get a normal tensor before doing inplace update."
        )
