"""What the engine asks of tensors: may it compute with them, their strides, their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _ops
from .._torch_private import (
    DisableTorchFunction,
    dispatch_keys,
    has_torch_dispatch,
    is_functional_or_zero,
    is_functorch_wrapped_tensor,
    storage_of_weak_reference,
)


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has a dtype with kernels, its memory has its values, and nothing wraps it.

    Not so for tensors that are empty or freed, nor for those of tracers and transforms, which have
    no memory: `data_ptr` raises, or returns 0.
    """
    try:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.dtype in _ops.DTYPES
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and not tensor.is_neg()
            and tensor.data_ptr() != 0
        )
    except RuntimeError:
        return False


def is_plain(tensor: Tensor) -> bool:
    """Whether the engine may compute with a tensor: it is strided, and memory has all its values.

    A subclass without `__torch_dispatch__`, such as MONAI's MetaTensor, is plain. DTensors and the
    tensors of tracers, functorch and functionalization are not. Each of these has its own dispatch
    key, so all tensors of one type with the same set of dispatch keys have the same answer.
    """
    if is_ordinary(tensor):  # the usual case; the keys take longer
        return True
    type_and_keys = type(tensor), dispatch_keys(tensor).raw_repr()
    plain = _is_plain.get(type_and_keys)
    if plain is None:
        plain = _is_plain[type_and_keys] = _looks_plain(tensor)
    return plain


_is_plain: dict[tuple[type, int], bool] = {}


def _looks_plain(tensor: Tensor) -> bool:
    return (
        not has_torch_dispatch(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_functorch_wrapped_tensor(tensor)
        and not is_functional_or_zero(tensor)
        and not tensor.is_meta
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor's memory is allocated: FSDP and ZeRO free the memory of parameters."""
    if tensor.storage_offset() == 0 and tensor.data_ptr() != 0:  # the storage itself takes longer
        return True
    return tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def whole_base(tensor: Tensor) -> Tensor | None:
    """Return the base of which a tensor is an alias: it has the same elements, shape and strides.

    Return None of other tensors, and of an alias of an autograd leaf.
    """
    base = tensor._base
    if base is None or base.grad_fn is None or base.dtype is not tensor.dtype:
        return None
    is_same = (base.shape, base.stride()) == (tensor.shape, tensor.stride())
    if not is_same or base.storage_offset() != tensor.storage_offset():
        return None
    return base if base.is_neg() == tensor.is_neg() and base.is_conj() == tensor.is_conj() else None


def same_strides(
    shape: Sequence[int], first: Sequence[int] | None, second: Sequence[int] | None
) -> bool:
    """Whether two strides mean the same for tensors of a shape. False if one is not known."""
    if first is None or second is None:
        return False
    if first == second:
        return True
    strides = zip(shape, first, second, strict=True)
    return all(mine == other for size, mine, other in strides if size > 1)


def is_contiguous(shape: Sequence[int], stride: Sequence[int] | None) -> bool:
    """Whether a tensor of this shape and these strides is contiguous. False if they are unknown."""
    if stride is None:
        return False
    dense = 1
    for size, mine in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and mine != dense:
            return False
        dense *= max(size, 1)
    return True


def is_stale(tensor: Tensor) -> bool:
    """Whether autograd raises for a view: see `grad_fn_of`."""
    try:
        with DisableTorchFunction():
            _ = tensor.grad_fn
    except RuntimeError:
        return True
    return False


def without_memory(tensor: Tensor) -> Tensor:
    """Return an alias without memory, which shares the version counter: `.data` keeps it."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


class WeakMemory:
    """A weak reference to a tensor's memory, with the version that all its aliases share.

    The memory may outlive the tensor, since `detach` returns an alias of it.
    """

    __slots__ = ("_alias", "_storage", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._version = tensor._version
        self._alias = without_memory(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the memory of a tensor that was not modified since."""
        is_same = self._storage.cdata == StorageWeakRef(tensor.untyped_storage()).cdata
        return is_same and self._version == tensor._version and not self._storage.expired()

    def __call__(self) -> Tensor | None:
        """Return the memory as a 1-D tensor; None if it was freed, or modified in place.

        From then on this object keeps the memory alive.
        """
        if self._alias._version != self._version or self._storage.expired():
            return None
        storage = storage_of_weak_reference(self._storage.cdata)
        vector = self._alias.new_empty(0)
        size = storage.nbytes() // vector.itemsize
        self._alias.data = vector.set_(storage, 0, (size,), (1,))
        return self._alias


def has_tangent(tensor: Tensor) -> bool:
    """Whether the tensor has a tangent in forward-mode AD."""
    level = forward_ad._current_level
    return level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
