"""The tensors in a value, and what is asked of one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from .._torch import creation_meta, elements_share_memory, tree_leaves

SEVERAL_VIEWS = "one of several views made at once, as by `chunk` or `split`"

# By how autograd says that a view was made.
_REFUSED_VIEWS = {
    "DEFAULT": "",
    "IN_CUSTOM_FUNCTION": "a view made by an autograd Function, as a module's backward hook",
    "MULTI_OUTPUT_NODE": SEVERAL_VIEWS,
    "NO_GRAD_MODE": "a view made under no_grad",
}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in containers, nested ones too, and in objects' attributes and `__slots__`."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        for leaf in tree_leaves(pending.pop(0)):
            if isinstance(leaf, Tensor):
                yield leaf
            elif id(leaf) not in seen and not (callable(leaf) or isinstance(leaf, ModuleType)):
                seen.add(id(leaf))
                pending.extend(getattr(leaf, "__dict__", {}).values())
                names = (getattr(cls, "__slots__", ()) for cls in type(leaf).__mro__)
                pending.extend(getattr(leaf, name, None) for name in chain.from_iterable(names))


def tensors_passed(value: Any) -> Iterator[Tensor]:
    """The tensors in what is passed to an operation: itself, or those in containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def has_kernel(x: Tensor) -> bool:
    """Whether there is one for its device and dtype."""
    devices = ("cpu", "cuda") if _ops.cuda_version else ("cpu",)
    return x.device.type in devices and x.dtype in _ops.DTYPES


def refused_view(x: Tensor) -> str:
    """Why autograd does not let the view x be modified; empty where it does, or x is no view."""
    if not x._is_view():
        return ""
    base = x._base
    if base is not None and base.is_leaf and base.requires_grad:
        return "a view of a leaf that requires grad"
    return _REFUSED_VIEWS.get(creation_meta(x), "a view made in inference mode")


def may_overlap(x: Tensor) -> bool:
    """Whether two elements of x may share memory: always told where they do."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return x.numel() > 0
            reach += stride * (size - 1)
    return False


def strides(x: Tensor) -> list[int]:
    """The strides that have a meaning."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def may_be_written_to(x: Tensor) -> bool:
    """Whether x is strided, has values, and is not expanded from fewer."""
    return x.layout == torch.strided and not x.is_meta and not elements_share_memory(x)
