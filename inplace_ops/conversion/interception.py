"""What the dispatcher does not see of a run: saved-tensor hooks, and reads without an operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .run import patched

# What reads a tensor's values, or takes its place in the graph, without an operation.
_READ_WITHOUT_AN_OPERATION: Mapping[Callable[..., Any], str] = {
    torch.autograd.grad: "autograd.grad",
    **{
        getattr(Tensor, name): name
        for name in (
            "register_hook",
            "retain_grad",
            "tolist",
            "__repr__",
            "numpy",
            "__array__",
            "__dlpack__",
            "data_ptr",
        )
    },
}

# Of these, what hands the memory out, to be read at any time.
HANDED_OUT = frozenset({"numpy", "__array__", "__dlpack__"})


class ReadsWithoutAnOperation(TorchFunctionMode):
    """Reports to `record` the calls that read a tensor and that the dispatcher does not see."""

    def __init__(self, record: Callable[[str, Any], object]) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = _READ_WITHOUT_AN_OPERATION.get(func)
        if name is not None:
            self.record(name, (args, kwargs))
        return func(*args, **(kwargs or {}))


class OwnHooks(saved_tensors_hooks):
    """Hooks that are not reported as the model's."""

    __enter__ = saved_tensors_hooks.__enter__


@contextmanager
def seen_through_other_hooks(record: Callable[[Tensor, bool], object]) -> Iterator[None]:
    """Report to `record` what goes to saved-tensor hooks that the model itself enters.

    Only the innermost hooks are called: those of a checkpoint would hide what it saves when it
    runs again, and holds then. Other hooks keep what they make of the tensor, not the tensor.
    """
    enter = saved_tensors_hooks.__enter__

    def enter_and_record(hooks: saved_tensors_hooks) -> None:
        pack = hooks.pack_hook
        is_checkpoint = type(hooks).__module__ == checkpoint.__module__

        @functools.wraps(pack)
        def record_and_pack(tensor: Tensor) -> Any:
            record(tensor, is_checkpoint)
            return pack(tensor)

        hooks.pack_hook = record_and_pack
        try:
            enter(hooks)
        finally:
            hooks.pack_hook = pack

    with patched(saved_tensors_hooks, "__enter__", enter_and_record):
        yield
