"""Calls that one kernel computes, where PyTorch runs several over the same memory.

A kernel rounds wherever the operations that it stands for round: its result equals theirs bit for
bit. So a fused call costs, rounds and is bounded as its composition, and only `compute` differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from .specs import Affine, Call, Spec


def call_of(
    function: Callable[..., Tensor], inputs: Sequence[Spec], arguments: Sequence[Any], *rest: Any
) -> Call:
    """Return the spec of `function(*inputs, *arguments)`, fused where a kernel fits."""
    kind = _kind_of(function, inputs, arguments)
    return kind(function, inputs, arguments, *rest)


def _kind_of(
    function: Callable[..., Tensor], inputs: Sequence[Spec], arguments: Sequence[Any]
) -> type[Call]:
    if function is Tensor.to and _is_float32_affine(inputs[0]) and arguments[0] in _ops.CAST_DTYPES:
        return CastOfAffine
    return Call


def _is_float32_affine(spec: Spec) -> bool:
    return isinstance(spec, Affine) and spec.dtype is torch.float32


class CastOfAffine(Call):
    """A norm's float32 output, or that of an activation after it, cast to 16 bits."""

    __slots__ = ()

    def compute(self) -> Tensor:
        (affine,), (dtype,) = self.inputs, self.arguments
        assert isinstance(affine, Affine)
        return affine.of(affine.x.compute(), dtype)
