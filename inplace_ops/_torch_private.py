"""What is used of PyTorch under a private name, and why no public one serves.

But for what each call asks: that stands in `dispatch.py`, without a function around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The type of an op, of which `torch.ops` has the instances alone.
from torch._ops import OpOverload as OpOverload

# Says that a tensor has `__tensor_flatten__`, and of what it is made.
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

# These know the containers that libraries register, of their models' outputs for example.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a GPU, one object for each: `torch.cuda` makes one at each call."""
    if torch.compiler.is_dynamo_compiling():  # which knows the public function alone
        return torch.cuda.current_stream(device)
    key = torch._C._cuda_getCurrentStream(device.index)
    stream = _streams.get(key)
    if stream is None:
        number, index, kind = key
        stream = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
        stream = _streams.setdefault(key, stream)  # another thread may have been first
    return stream


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def storage_id(storage: torch.UntypedStorage) -> int:
    """The same for all Python objects of one storage; `data_ptr` is 0 for every empty one."""
    return storage._cdata


def elements_share_memory(tensor: Tensor) -> bool:
    """Whether they surely do, as after `expand`: what in-place ops ask before they write."""
    return torch._debug_has_internal_overlap(tensor) == 1


def has_activation_memory_budget() -> bool:
    """Whether compiled code is to keep less than what takes no time to form again."""
    return torch._functorch.config.activation_memory_budget < 1


def creation_meta(view: Tensor) -> str:
    """How the view was made, "DEFAULT" where autograd lets it be modified; in public it raises."""
    return torch._C._autograd._get_creation_meta(view).name


def running_node() -> Any:
    """The autograd node whose backward runs; None outside of backward."""
    return torch._C._current_autograd_node()


def running_pass() -> int:
    """The number of the backward pass that runs, another for each."""
    return torch._C._current_graph_task_id()
