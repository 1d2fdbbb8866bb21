"""What the autograd node of a norm tells: how its output follows from its input.

Batch, group, instance and layer norms keep their input for their own backward. With the statistics,
the weight and the bias their output is a scale and a shift of it, so that an activation behind one
need keep nothing: `save="recompute"`. The norms are PyTorch's; their nodes' `_saved_*` attributes
and `next_functions` are read, as PyTorch's notes on autograd document them, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _ops
from .memory import is_held_itself, is_plain


class Norm(NamedTuple):
    """A norm that has run: its node and its output, of which an instance norm returns a view."""

    node: Any
    output: Tensor


class Maps(NamedTuple):
    """A norm's output as a map of its input, z = x * scale + shift.

    Tensors of their own, so that nobody's later change of a parameter or a statistic matters, with
    shape (2, ...), scales first, and the rest of x's shape or 1.

    Attributes:
        channels: The map.
        rows: Of a layer norm the map of its statistics, which comes first.
    """

    channels: Tensor
    rows: Tensor | None


class Source(NamedTuple):
    """What a norm's output follows from.

    Attributes:
        x: The norm's input, as large as its output.
        maps: Computes the maps, with gradients off.
    """

    x: Tensor
    maps: Callable[[], Maps]


def norm_of(z: Tensor) -> Norm | None:
    """The norm whose output z is, if z is one and has its values still.

    But for a write through `.data`, which PyTorch does not see either.
    """
    if type(z) is not Tensor or z.is_nested or z._version != 0 or z.output_nr != 0:
        return None
    output = _output_of_instance_norm(z) if z._is_view() else z
    if output is None or type(output.grad_fn).__name__ not in _READERS:
        return None
    return Norm(output.grad_fn, output)


def _output_of_instance_norm(z: Tensor) -> Tensor | None:
    """What z is a view of where it may be an instance norm's: a batch norm's, of one sample."""
    base = z._base
    if base is None or base.dim() != z.dim() or z.dim() < 3 or not z.is_contiguous():
        return None
    samples, channels, *sizes = z.shape
    is_whole = base.shape == (1, samples * channels, *sizes) and base.is_contiguous()
    return base if is_whole else None


Unpack = Callable[[Any], Tensor]


def source_of(norm: Norm, harmless: Unpack | None = None) -> Source | None:
    """What the norm's output follows from; None where that cannot be had, as in `source_at`."""
    source = source_at(norm.node, harmless)
    z = norm.output
    return source if source and source.x.shape == z.shape and source.x.dtype == z.dtype else None


def source_at(node: Any, harmless: Unpack | None = None) -> Source | None:
    """What the output of the norm with that node follows from.

    None where that cannot be had: the norm ran inside a checkpoint or under other saved-tensor
    hooks, which would run again; its tensors are DTensors; its bias is frozen, and stands nowhere;
    its parameters have been freed until backward, as FSDP does; its statistics, of a norm whose
    parameters have 16 bits, are kept rounded to those.
    """
    try:
        # PyTorch's hooks take all that a node saves.
        if not is_held_itself(node._raw_saved_input, harmless):
            return None
        x = node._saved_input
        return _READERS[type(node).__name__](node, x) if _is_there(x) else None
    except RuntimeError:  # freed, or modified since: the norm's own backward will say so
        return None


def _map(
    x: Tensor,
    shape: tuple[int, ...],
    deviation: Tensor | None,
    mean: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    share: int = 1,
) -> Tensor:
    """A map of the given shape: weight / deviation, and bias - mean * that.

    The deviation comes as its reciprocal, for every `share` channels; None is 1, or 0. Mean and
    deviation are contiguous and of the maps' dtype.
    """
    dtype = _ops.maps_dtype(x)
    return _ops.NORM_MAPS(
        deviation, mean, _contiguous(weight, dtype), _contiguous(bias, dtype), shape, share
    )


def _contiguous(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if vector is None or (vector.dtype is dtype and vector.is_contiguous()):
        return vector
    return vector.to(dtype).contiguous()


def _statistics(node: Any, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The means and the reciprocals of the deviations; None where they are kept rounded."""
    mean = node._saved_result1
    return (mean, node._saved_result2) if mean.dtype is _ops.maps_dtype(x) else None


def _parameters(node: Any) -> tuple[Tensor | None, Tensor | None] | None:
    """Weight and bias; None where there is a bias that cannot be had.

    Backward does not need it, and it stands at the end of its edge in the graph: without an edge it
    is frozen, or there is none, which a frozen one beside no weight is taken for. An instance
    norm's is repeated for each sample.
    """
    weight, before = node._saved_weight, node.next_functions[2][0]
    if before is None:
        return None if weight is not None else (None, None)
    if type(before).__name__ == "RepeatBackward0":
        before = before.next_functions[0][0]
    if type(before).__name__ != "AccumulateGrad":
        return None
    bias = before.variable
    is_usable = bias.dim() == 1 and _is_there(weight) and _is_there(bias)
    return (weight, bias) if is_usable else None


def _is_there(value: Tensor | None) -> bool:
    """Whether it is a plain tensor whose memory has not been freed."""
    if value is None:
        return True
    return is_plain(value) and (value.numel() == 0 or value.untyped_storage().nbytes() > 0)


def _of_channels(x: Tensor, samples: int = 1) -> tuple[int, ...]:
    return (2, samples, x.size(1), *(1,) * (x.dim() - 2))


def _batch_norm(node: Any, x: Tensor) -> Source | None:
    parameters = _parameters(node)
    if parameters is None:
        return None
    shape = _of_channels(x)
    if node._saved_training:
        statistics = _statistics(node, x)
        if statistics is None:
            return None
        mean, deviation = statistics
        return Source(x, lambda: Maps(_map(x, shape, deviation, mean, *parameters), None))

    epsilon = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    running_mean, variance = node._saved_running_mean, node._saved_running_var

    def make() -> Maps:
        dtype = _ops.maps_dtype(x)
        deviation = torch.rsqrt(variance.to(dtype) + epsilon).contiguous()
        return Maps(_map(x, shape, deviation, _contiguous(running_mean, dtype), *parameters), None)

    return Source(x, make)


def _group_norm(node: Any, x: Tensor) -> Source | None:
    parameters, statistics = _parameters(node), _statistics(node, x)
    if parameters is None or statistics is None:
        return None
    mean, deviation = statistics
    samples, groups = mean.shape
    shape, share = _of_channels(x, samples), x.size(1) // groups
    return Source(x, lambda: Maps(_map(x, shape, deviation, mean, *parameters, share), None))


def _layer_norm(node: Any, x: Tensor) -> Source | None:
    weight, bias, statistics = node._saved_weight, node._saved_bias, _statistics(node, x)
    if statistics is None or not (_is_there(weight) and _is_there(bias)):
        return None
    mean, deviation = statistics

    def make() -> Maps:
        rows = _map(x, (2, *mean.shape), deviation, mean, None, None)
        if weight is None and bias is None:
            return Maps(rows, None)
        factor = torch.ones_like(bias) if weight is None else weight
        shape = (2, *(1,) * (x.dim() - factor.dim()), *factor.shape)
        return Maps(_map(x, shape, None, None, factor, bias), rows)

    return Source(x, make)


# By the type of the norm's node.
_READERS: Mapping[str, Callable[[Any, Tensor], Source | None]] = {
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "NativeGroupNormBackward0": _group_norm,
    "NativeLayerNormBackward0": _layer_norm,
}
NODES = frozenset(_READERS)
