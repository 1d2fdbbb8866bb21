"""A norm's output as an affine function of its input, or as a rerun of the norm.

One operation of this package recomputes the output from the norm's input, the affine and the
statistics that the norm has saved. `norms.py` reads them off the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops
from . import norms
from .nodes import (
    Node,
    argument,
    output_device,
    output_dtype,
    output_shape,
    saved_stride,
    saved_tensor,
)
from .norms import Parameters, Statistics, repeated_for_samples
from .tensors import is_contiguous

COPY_LIMIT = 64 * 1024  # bytes: see 2 of NOTE [Leaves] in `derive.py`
Rerun = Callable[[Tensor], Tensor]


class NormAffine(NamedTuple):
    """A norm's output as a function of its input: z = (x - mean) * rstd * scale + shift.

    Each tensor has the shape (2, ...). After the 2, each size is that of x, or 1.

    Attributes:
        channel_affine: scale and shift.
        row_statistics: rstd and mean of each row of a layer or RMS norm, or of each group of a
            group norm without parameters; None means rstd 1 and mean 0.
    """

    channel_affine: Tensor
    row_statistics: Tensor | None

    @property
    def nbytes(self) -> int:
        """The size of both tensors in bytes."""
        rows = self.row_statistics
        return self.channel_affine.nbytes + (0 if rows is None else rows.nbytes)


class NormFacts:
    """What is known of a norm, from its visit until the model's forward has returned.

    Its weight and bias are known in one of four forms. They must not be read from the parameters
    later: see 2 of NOTE [Leaves] in `derive.py`.

    - A batch norm has its affine, which is as small as copies. In eval mode the affine is computed
      at the visit, because a later training call of the norm writes to the running statistics
      without raising their versions. If it is too large to store, a norm in training has copies,
      and one in eval mode nothing.
    - A layer or RMS norm has its column affine: copies of weight and bias, which one kernel makes.
    - Any other norm has copies.
    - One whose parameters are not known has none of these.

    Attributes:
        statistics: The statistics that it has computed; None if unknown.
        affine: From the visit of a batch norm, or from the first spec or activation that needs it.
        column_affine: Copies of weight and bias, as scale and shift.
        parameters: Copies of weight and bias.
        eps: The eps; None if unknown.
        has_backward_hooks: Whether the norm's module has backward hooks.
    """

    statistics: Statistics | None = None
    affine: NormAffine | None = None
    column_affine: Tensor | None = None
    parameters: Parameters | None = None
    eps: float | None = None
    has_backward_hooks = False

    @property
    def has_affine(self) -> bool:
        """Whether this determines the affine, together with the node's saved tensors.

        Copies of weight and bias alone may not: if the saved statistics are in 16 bits, they are
        too coarse to compute the affine from.
        """
        return self.affine is not None or self.column_affine is not None

    def add_parameters(self, node: Node, parameters: Parameters) -> None:
        """Add the weight and bias that a norm has read, in the form that it needs."""
        kind = norms.known_kind_of(node)
        self.statistics = statistics = norms.statistics_of(node, kind)
        formula = kind.formula
        if formula == "batch":
            if statistics is not None or norms.can_compute(node):
                affine = _batch_norm(node, parameters, statistics)
                if affine.nbytes <= COPY_LIMIT:
                    self.affine = affine
                    return
                if statistics is None:
                    return
        elif (
            formula in ("layer", "rms") and parameters.weight is not None and statistics is not None
        ):
            column_affine = column_affine_of(node, parameters, statistics)
            if column_affine.nbytes <= COPY_LIMIT:
                self.column_affine = column_affine
                return
        self.parameters = parameters.copied(COPY_LIMIT)

    def affine_of(self, node: Node) -> NormAffine | None:
        """Return the affine, and store it; None if it is not known."""
        if self.affine is not None:
            return self.affine
        statistics = self.statistics
        if self.column_affine is not None and statistics is not None:
            self.affine = NormAffine(self.column_affine, row_statistics_of(statistics))
        elif self.parameters is not None and (statistics is not None or norms.can_compute(node)):
            self.affine = affine_of(node, self.parameters, statistics)
        return self.affine

    def rerun(self, node: Node) -> Rerun | None:
        """Return PyTorch's own norm as a function of its input.

        The function recomputes the statistics, and serves norms whose statistics PyTorch saved in
        16 bits. Its result equals the norm's output bit for bit. Return None if parameters or a
        needed eps are unknown, for a batch norm in eval mode, a SyncBatchNorm and an RMS norm.
        """
        rerun = _RERUNS.get(norms.known_kind_of(node).formula)
        if self.parameters is None or rerun is None:
            return None
        return rerun(node, self.parameters, self.eps)


def affine_of(node: Node, parameters: Parameters, statistics: Statistics | None) -> NormAffine:
    """Return a norm's affine.

    Args:
        node: The norm's node.
        parameters: Its weight and bias.
        statistics: What `norms.statistics_of(node)` returns. If that is None,
            `norms.can_compute(node)` must be true.
    """
    return _FORMULAS[norms.known_kind_of(node).formula](node, parameters, statistics)


def _scale_shift(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    rstd: Tensor | None,
    mean: Tensor | None,
    parameters: Parameters,
    channels_per_group: int = 1,
) -> Tensor:
    """Return scale = weight * rstd and shift = bias - mean * scale, in the given shape.

    Args:
        dtype: The dtype of the result.
        shape: The shape (2, ...) of the result.
        rstd: One value for each `channels_per_group` channels, in this dtype; None means 1.
        mean: One value for each `channels_per_group` channels, in this dtype; None means 0.
        parameters: The norm's weight and bias.
        channels_per_group: The number of channels in a group.
    """
    weight, bias = parameters
    if weight is not None:
        weight = _contiguous(weight, dtype)
    if bias is not None:
        bias = _contiguous(bias, dtype)
    affine: Tensor = _ops.CALL_NORM_AFFINE(rstd, mean, weight, bias, shape, channels_per_group)
    return affine


def _contiguous(vector: Tensor, dtype: torch.dtype) -> Tensor:
    if vector.dtype is dtype and vector.is_contiguous():
        return vector
    return vector.to(dtype).contiguous()


def _shape_of_channels(node: Node, samples: int, channels: int) -> tuple[int, ...]:
    x = saved_tensor(node, "input")
    dims = len(output_shape(node, 0)) if x is None else x.dim()  # the former takes longer
    return (2, samples, channels, *(1,) * (dims - 2))


def _batch_norm(node: Node, parameters: Parameters, statistics: Statistics | None) -> NormAffine:
    if statistics is not None:
        return _training_batch_norm(node, parameters, statistics)
    mean, variance = saved_tensor(node, "running_mean"), saved_tensor(node, "running_var")
    assert mean is not None
    assert variance is not None
    dtype = _ops.affine_dtype(output_dtype(node, 0))
    rstd = torch.rsqrt(variance.to(dtype) + norms.batch_norm_eps(node))
    mean = _contiguous(mean, dtype)
    shape = _shape_of_channels(node, 1, rstd.numel())
    return NormAffine(_scale_shift(dtype, shape, rstd, mean, parameters), None)


def _training_batch_norm(
    node: Node, parameters: Parameters, statistics: Statistics | None
) -> NormAffine:
    assert statistics is not None
    mean, rstd = statistics
    shape = _shape_of_channels(node, 1, rstd.numel())
    return NormAffine(_scale_shift(rstd.dtype, shape, rstd, mean, parameters), None)


def _group_norm(node: Node, parameters: Parameters, statistics: Statistics | None) -> NormAffine:
    assert statistics is not None
    mean, rstd = statistics
    assert mean is not None
    samples, groups = mean.shape
    channels = output_shape(node, 0)[1]
    shape, channels_per_group = _shape_of_channels(node, samples, channels), channels // groups
    if parameters == Parameters(None, None) and _is_contiguous(node):
        # PyTorch's kernels subtract the mean first in this case, as its layer norm kernels do.
        rows = torch.stack([rstd, mean]).repeat_interleave(channels_per_group, 2).view(shape)
        return NormAffine(_identity(rows, len(shape) - 1), rows)
    affine = _scale_shift(mean.dtype, shape, rstd, mean, parameters, channels_per_group)
    return NormAffine(affine, None)


def _is_contiguous(node: Node) -> bool:
    """Whether a group norm's kernel reads a contiguous input.

    On a GPU PyTorch makes the input contiguous first.
    """
    if output_device(node, 0).type == "cuda":
        return True
    return is_contiguous(output_shape(node, 0), saved_stride(node, "input"))


def _row_norm(node: Node, parameters: Parameters, statistics: Statistics | None) -> NormAffine:
    assert statistics is not None
    return NormAffine(column_affine_of(node, parameters, statistics), row_statistics_of(statistics))


def row_statistics_of(statistics: Statistics) -> Tensor:
    """Return rstd and mean of each row of a layer or RMS norm."""
    mean, rstd = statistics
    # Copies both as if they were weight and bias, in one kernel.
    return _scale_shift(rstd.dtype, (2, *rstd.shape), None, None, Parameters(rstd, mean))


def column_affine_of(node: Node, parameters: Parameters, statistics: Statistics) -> Tensor:
    """Return scale and shift of a layer or RMS norm: copies of weight and bias."""
    weight, bias = parameters
    statistic = statistics.rstd
    dims = statistic.dim()
    if weight is None:
        if bias is None:
            # The kernels are fast with a scale and a shift for each column.
            columns = argument(node, "normalized_shape")[-1]
            return _identity(statistic, dims, columns)
        weight = torch.ones_like(bias)
    shape = (2, *(1,) * (dims - weight.dim()), *weight.shape)
    return _scale_shift(statistic.dtype, shape, None, None, Parameters(weight, bias))


def _identity(like: Tensor, dim: int, columns: int = 1) -> Tensor:
    """Return scale 1 and shift 0 in the shape (2, 1, ..., 1, columns), which has dim + 1 sizes."""
    identity = like.new_zeros(2, *(1,) * (dim - 1), columns)
    identity[0].fill_(1.0)
    return identity


def _rerun_batch_norm(node: Node, parameters: Parameters, eps: float | None) -> Rerun | None:
    if norms.reads_running_statistics(node):
        return None
    eps = norms.batch_norm_eps(node)

    def run(x: Tensor) -> Tensor:
        channels = x.size(1)
        weight, bias = (
            None if vector is None else repeated_for_samples(vector, channels)
            for vector in parameters
        )
        return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]

    return run


def _rerun_group_norm(node: Node, parameters: Parameters, eps: float | None) -> Rerun | None:
    if eps is None:
        return None
    weight, bias = parameters
    samples, channels, size, groups = (argument(node, name) for name in ("N", "C", "HxW", "group"))

    def run(x: Tensor) -> Tensor:
        return torch.native_group_norm(x, weight, bias, samples, channels, size, groups, eps)[0]

    return run


def _rerun_layer_norm(node: Node, parameters: Parameters, eps: float | None) -> Rerun | None:
    if eps is None:
        return None
    shape = argument(node, "normalized_shape")
    return lambda x: torch.native_layer_norm(x, shape, *parameters, eps)[0]


_FORMULAS: Mapping[str, Callable[[Node, Parameters, Statistics | None], NormAffine]] = {
    "batch": _batch_norm,
    "synchronized batch": _training_batch_norm,
    "group": _group_norm,
    "layer": _row_norm,
    "rms": _row_norm,
}
_RERUNS: Mapping[str, Callable[[Node, Parameters, float | None], Rerun | None]] = {
    "batch": _rerun_batch_norm,
    "group": _rerun_group_norm,
    "layer": _rerun_layer_norm,
}
