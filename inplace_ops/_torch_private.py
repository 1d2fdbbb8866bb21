"""PyTorch's private APIs that this package uses, and why no public API suffices.

`dispatch.py` is an exception: to save time it calls directly what every call of an activation
needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The type of an op: `torch.ops` offers only the instances.
from torch._ops import OpOverload as OpOverload

# Whether a tensor subclass has `__tensor_flatten__`, which names the tensors it consists of.
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

# These support the containers that libraries register, for example for the outputs of models.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a GPU, always the same object for a stream.

    `torch.cuda.current_stream` makes a new object at each call.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo supports only the public function
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
    """Return an id that all Python objects of one storage share.

    `data_ptr` is not an id: it is 0 for every empty storage.
    """
    return storage._cdata


def elements_share_memory(tensor: Tensor) -> bool:
    """Whether elements certainly share memory, as after `expand`; in-place ops check this too."""
    return torch._debug_has_internal_overlap(tensor) == 1


def has_activation_memory_budget() -> bool:
    """Whether the compiler must save less than its default, which recomputes only what is free."""
    return torch._functorch.config.activation_memory_budget < 1


def creation_meta(view: Tensor) -> str:
    """Return how a view was made; "DEFAULT" if autograd allows it to be modified.

    No public function returns this: an in-place operation only raises.
    """
    return torch._C._autograd._get_creation_meta(view).name


def running_node() -> Any:
    """Return the autograd node whose backward is running; None outside of backward."""
    return torch._C._current_autograd_node()


def running_pass() -> int:
    """Return the id of the backward pass that is running. Every pass has another id."""
    return torch._C._current_graph_task_id()
