"""Whether a norm's or a product's module runs PyTorch's own forward on its own parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn

from .._torch_private import is_replica, own_parameters
from . import norms

PRODUCTS = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)

# The attributes of a module that determine which weight and bias its operation reads.
_DECIDING = (
    *("forward", "__getattr__", "__getattribute__"),
    *("_handle_no_batch_input", "_apply_instance_norm"),
    *("_conv_forward", "_output_padding"),
)


def _methods_of(cls: type) -> tuple[Any, ...]:
    return tuple([getattr(cls, name, None) for name in _DECIDING])


def _functions() -> tuple[Any, ...]:
    return (
        *(F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm),
        *(F.linear, F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    )


# PyTorch's own, to recognize that a tool has replaced one.
_METHODS: Mapping[type, tuple[Any, ...]] = {
    base: _methods_of(base) for base in (*norms.MODULES, *PRODUCTS)
}
_FUNCTIONS = _functions()


def runs_pytorchs_forward(module: nn.Module) -> bool:
    """Whether a module runs PyTorch's forward on its registered parameters.

    A property, or an overridden method that PyTorch's forward calls, may pass others to the
    operation.
    """
    cls = type(module)
    original = next((base for base in _METHODS if issubclass(cls, base)), None)
    if original is None or _methods_of(cls) != _METHODS[original] or _functions() != _FUNCTIONS:
        return False
    shadows = {"weight", "bias", *_DECIDING} & vars(module).keys()
    if is_replica(module):  # its parameters are attributes
        own = vars(module)
        shadows -= {n for n, p in own_parameters(module).items() if p is not None and own[n] is p}
    return not shadows and not hasattr(cls, "weight") and not hasattr(cls, "bias")
