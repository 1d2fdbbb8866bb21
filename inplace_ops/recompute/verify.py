"""The comparison of a spec with the saved tensor that it replaces, at its first use.

NOTE [First use]

A write through `.data`, NumPy or a storage changes neither the graph nor a version counter, so no
proof detects it. Therefore the engine verifies each spec at its first use:

1. A spec's key is the consumer's ordinal in the forward pass of the outermost converted model, the
   types of the consumer's and the producer's nodes, the saved field, the spec's cost, and the saved
   tensor's shape, dtype, strides and device. For an activation after a norm it has the activation's
   name. The ordinal counts the visited nodes that are in the table of operations.
2. At the first use of a key, the engine computes the spec and compares the value with the saved
   tensor: bit for bit if the spec is exact, else within its rounding.
3. If they differ, tensors with that key are saved as PyTorch saves them from then on. The engine
   warns, once per model.
4. The number of stored keys is bounded. When the bound is reached all are dropped, and the next use
   of each is a first use again.
5. A write that changes no version counter and begins only after the first use of its key is not
   detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..memory import WrittenToError
from .nodes import is_being_captured
from .packed import Recomputed
from .settings import MAX_KEYS, Settings, SpecKey
from .specs import largest_of


def is_verified(
    settings: Settings,
    ordinal: int,
    recomputed: Recomputed | Callable[[], Recomputed],
    saved: Tensor,
    *context: Any,
) -> bool:
    """Whether a spec reproduced the saved tensor at the first use of its key.

    Return False while a CUDA graph is captured, if the key is new: a comparison would synchronize.

    Args:
        settings: The state of the model, with the keys that were used.
        ordinal: The consumer's ordinal.
        recomputed: The spec for the saved tensor, or a function that returns it. The function is
            called at the first use only.
        saved: The saved tensor that the spec replaces.
        *context: Values that distinguish the spec from others with the same ordinal.
    """
    key = ordinal, context, saved.shape, saved.dtype, saved.stride(), saved.device
    verified = settings.verified.get(key)
    return _verify(settings, key, recomputed, saved) if verified is None else verified


def _verify(
    settings: Settings,
    key: SpecKey,
    recomputed: Recomputed | Callable[[], Recomputed],
    saved: Tensor,
) -> bool:
    """Compare a spec with the saved tensor: rules 2 to 4 of NOTE [First use]."""
    if is_being_captured(saved):  # a comparison would synchronize
        return False
    value = recomputed if isinstance(recomputed, Recomputed) else recomputed()
    found = difference(value, saved)
    if len(settings.verified) >= MAX_KEYS:  # rule 4
        settings.verified.clear()
    settings.verified[key] = found is None
    if found is not None:  # rule 3
        settings.warn(
            "a difference at the first use",
            f"the recomputed output of {value.name}, differs from the saved tensor ({found}). "
            "Probably a write through .data modified the tensor without raising its version "
            "counter, and recomputing it in backward would give wrong gradients. From now on the "
            "tensor is saved as PyTorch saves it",
        )
    return found is None


def difference(recomputed: Recomputed, saved: Tensor) -> str | None:
    """Return by how much the recomputed value differs from the saved tensor; None if equal.

    Unless the spec is exact, values within its rounding count as equal. If the value cannot be
    recomputed, return the error's text.

    Raises:
        WrittenToError: A leaf was modified.
        RuntimeError: Memory ran out.
            Neither says anything about other forward passes, in which the value may be right.
    """
    try:
        value = recomputed.compute()
    except WrittenToError:
        raise
    except RuntimeError as error:
        if _ops.is_out_of_memory(error):
            raise
        return str(error)
    with recomputed.without_modes():
        saved, spec = saved.detach(), recomputed.spec
        if torch.equal(value, saved):
            return None
        if saved.dtype is torch.bool:
            return "in some elements"
        if spec.tolerance:
            distance = _distance(value, saved)
            return None if distance <= spec.tolerance else f"{distance:.3g} of its norm"
        # `magnitude` takes memory to compute. The value's own magnitude is a lower bound of it.
        rounding = spec.rounding
        if rounding and _excess(value, saved, rounding * _largest_of_chunks(value)) is None:
            return None
        allowed = rounding * float(spec.magnitude()) if rounding else 0.0
        excess = _excess(value, saved, allowed)
        return None if excess is None else f"up to {excess:.3g}"


# Compare a tensor in at most this many chunks, of at least this many elements: so a comparison adds
# little to the peak memory of the first step, and synchronizes with a GPU only a few times.
_MAX_CHUNKS, _MIN_CHUNK_SIZE = 16, 2**16


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the elements of tensors of one shape in 1-D chunks, of the same elements at a time.

    In memory order if all tensors are dense and have the same strides.
    """
    first = tensors[0]
    strides = {tensor.stride() for tensor in tensors}
    if len(strides) == 1 and torch.ops.aten.is_non_overlapping_and_dense(first):
        flat = [tensor.as_strided((first.numel(),), (1,)) for tensor in tensors]
    else:
        flat = [tensor.reshape(-1) for tensor in tensors]
    size = max(_MIN_CHUNK_SIZE, -(-first.numel() // _MAX_CHUNKS))
    yield from zip(*[tensor.split(size) for tensor in flat], strict=True)


def _largest_of_chunks(tensor: Tensor) -> float:
    return max((float(largest_of(chunk)) for (chunk,) in _chunks(tensor)), default=0.0)


def _excess(value: Tensor, saved: Tensor, allowed: float) -> float | None:
    """Return the largest difference that is more than `allowed`; None if there is none.

    Equal infinities count as equal, and so do two NaNs.
    """
    excess = None
    for mine, other in _chunks(value, saved):
        difference = torch.sub(mine, other).abs()
        wrong = ~(difference <= allowed)
        wrong &= ~((mine == other) | (mine.isnan() & other.isnan()))
        if wrong.any():
            excess = max(excess or 0.0, float(difference[wrong].max()))
    return excess


def _distance(value: Tensor, saved: Tensor) -> float:
    """Return the norm of the difference over the norm of `saved`.

    It is infinite if an element is NaN or infinite in one of the two alone.
    """
    total = difference = 0.0
    if saved.is_complex():
        value, saved = torch.view_as_real(value), torch.view_as_real(saved)
    dtype = torch.promote_types(saved.dtype, torch.float32)
    norm = partial(torch.linalg.vector_norm, dtype=dtype)
    for mine, other in _chunks(value, saved):
        finite = other.isfinite()
        if not torch.equal(finite, mine.isfinite()):
            return math.inf
        total += float(norm(other.where(finite, 0.0))) ** 2
        difference += float(norm(torch.sub(mine, other).where(finite, 0.0))) ** 2
    return math.sqrt(difference / total) if total else math.sqrt(difference)
