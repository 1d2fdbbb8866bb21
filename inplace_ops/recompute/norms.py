"""Norms: their output as an affine function of their input.

Batch, group, instance, layer and RMS norms save their input for their own backward. One operation
recomputes their output from that input, the saved statistics, the weight and the bias. The norms
are PyTorch's own. This file reads their autograd nodes and changes nothing.

The nodes lack two values:

- The bias of batch and group norms. The node's edge for the bias leads to it. If there is no edge,
  the norm has no bias, or the bias is frozen: only the module shows which.
- The eps of layer and group norms, which `rerun_of` needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _ops
from .._torch_private import (
    REPEAT,
    SYNC_BATCH_NORM,
    BatchNorm,
    InstanceNorm,
    is_named,
    is_replica,
    own_parameters,
)
from .nodes import (
    ByType,
    Node,
    argument,
    autograd_leaf_of,
    has_hooks,
    has_storage,
    is_contiguous,
    is_plain,
    output_device,
    output_dtype,
    output_shape,
    producer,
    saved_stride,
    saved_tensor,
    tensor_without_values,
)

# Modules whose node does not save all that a spec needs. An RMS norm's does. Subclasses come first.
MODULES = (
    nn.SyncBatchNorm,
    BatchNorm,
    InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
)


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


class Norm(NamedTuple):
    """A norm that has run: its node, and its output, of which an instance norm returns a view."""

    node: Node
    output: Tensor


class Statistics(NamedTuple):
    """The statistics that a norm has computed and saved, in the dtype of its affine.

    Attributes:
        mean: The mean of each channel of the batch, group or row; None of an RMS norm.
        rstd: The reciprocal of the standard deviation likewise.
    """

    mean: Tensor | None
    rstd: Tensor


class BatchNormInputs(NamedTuple):
    """The inputs of a batch norm.

    Attributes:
        x: The input. Like weight and bias it leads to the graph.
        weight: The weight; None if it needs no gradient, or the norm has none.
        bias: The bias; None likewise.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


class Parameters(NamedTuple):
    """A norm's weight and bias. None means 1 for the weight, and 0 for the bias."""

    weight: Tensor | None
    bias: Tensor | None

    def copied(self, limit: int) -> Parameters | None:
        """Return copies of both; None if one is larger than `limit` bytes."""
        if any(p is not None and p.nbytes > limit for p in self):
            return None
        return Parameters(*[None if p is None else p.detach().clone() for p in self])


def norm_of(z: Tensor) -> Norm | None:
    """Return the norm whose output z is; None if z is not a norm's output, or was modified.

    A write through `.data` raises no version. Neither this function nor autograd detects it.
    """
    if type(z) is not Tensor or z.is_nested or z._version != 0 or z.output_nr != 0:
        return None
    output = _output_of_instance_norm(z) if z._is_view() else z
    if output is None or kind_of(output.grad_fn) is None:
        return None
    return Norm(output.grad_fn, output)


def _output_of_instance_norm(z: Tensor) -> Tensor | None:
    """Return the base of a view z, if z may be an instance norm's output; else None.

    PyTorch runs an instance norm as a batch norm of one sample with samples * channels channels,
    and returns a view of the batch norm's output.
    """
    base = z._base
    if base is None or base.dim() != z.dim() or z.dim() < 3 or not z.is_contiguous():
        return None
    samples, channels, *sizes = z.shape
    is_whole = base.shape == (1, samples * channels, *sizes) and base.is_contiguous()
    return base if is_whole and is_batch_norm(base.grad_fn) else None


def input_of(norm: Norm) -> Tensor | None:
    """Return the norm's input, if the node saves it and it has the output's shape and dtype.

    Return None if it does not, if the saved input has hooks, or if its memory was freed.
    """
    x, z = saved_tensor(norm.node, "input"), norm.output
    if x is None or not is_plain(x) or x.shape != z.shape or x.dtype is not z.dtype:
        return None
    return x if has_storage(x) else None


def parameters_of(node: Node) -> Parameters | None:
    """Return the weight and bias that a norm's node refers to; None if it does not refer to both.

    The node of an instance norm does not refer to the bias: its edge leads to a copy that repeats
    the bias for each sample.
    """
    bias_is = _kind_of(node).bias_is
    weight, bias = saved_tensor(node, "weight"), None
    if weight is None and has_hooks(node, "weight"):
        return None
    if bias_is == "saved":
        bias = saved_tensor(node, "bias")
        if bias is None and has_hooks(node, "bias"):
            return None
    elif bias_is == "hidden":
        bias = autograd_leaf_of(producer(node, 2)[0])
        if bias is None:
            return None
    return Parameters(weight, bias) if _is_usable(weight) and _is_usable(bias) else None


def batch_norm_inputs(norm: Norm, x: Tensor | None) -> BatchNormInputs | None:
    """Return the inputs of a batch norm in training, if gradients can be returned to all of them.

    Return None for a batch norm whose input needs no gradient, whose bias was computed, or whose
    parameters have been frozen or unfrozen since.

    Args:
        norm: A batch norm.
        x: Its input; None if the norm saves a spec instead. The x that is returned then has no
            values: it only leads to the graph.
    """
    node = norm.node
    edge_of_x, edge_of_weight, edge_of_bias = node.next_functions
    if has_hooks(node, "weight"):
        return None
    if x is None:
        x = tensor_without_values(node, "input")
    weight = None if edge_of_weight[0] is None else saved_tensor(node, "weight")
    if not _is_at(edge_of_x, x) or not _is_at(edge_of_weight, weight):
        return None
    bias = autograd_leaf_of(edge_of_bias[0])
    if not _is_at(edge_of_bias, bias):
        repeated = _repeated_parameters_of(node)
        if repeated is None or repeated.bias is None or not repeated.bias.requires_grad:
            return None
        bias = _repeated(repeated.bias, output_shape(node, 0)[1])
    return BatchNormInputs(x, weight, bias)


def _is_at(edge: tuple[Node, int], tensor: Tensor | None) -> bool:
    """Whether the gradient of a tensor goes to an edge; None is that of an edge to no node.

    `requires_grad` of a leaf may have changed since the norm ran.
    """
    node, _ = edge
    if node is None or tensor is None or not tensor.requires_grad:
        return node is None and tensor is None
    leaf = autograd_leaf_of(node)
    return tensor is leaf if leaf is not None else (tensor.grad_fn, tensor.output_nr) == edge


def node_determines_bias(node: Node) -> bool:
    """Whether the node determines the bias: a layer norm's saves it, and an RMS norm has none."""
    return _kind_of(node).bias_is != "hidden"


def _repeated_parameters_of(node: Node) -> Parameters | None:
    """Return an instance norm's weight, repeated for each sample, and its bias."""
    repeats = [producer(node, index)[0] for index in (1, 2)]
    if any(not is_named(repeat, REPEAT) for repeat in repeats):
        return None
    weight, bias = (autograd_leaf_of(producer(repeat, 0)[0]) for repeat in repeats)
    repeated = saved_tensor(node, "weight")
    if weight is None or bias is None or repeated is None or repeated._version != 0:
        return None
    times = [argument(repeat, "repeats") for repeat in repeats]
    if times[0] != times[1] or weight.shape != bias.shape or bias.dim() != 1:
        return None
    parameters = Parameters(repeated, bias)
    return parameters if all(map(_is_usable, parameters)) else None


def registered_parameters(module: nn.Module) -> Parameters:
    """Return a norm module's registered weight and bias; None for each that is not registered.

    This does not read `module.bias`, which would run a parametrization once more.
    """
    parameters = own_parameters(module)
    return Parameters(parameters.get("weight"), parameters.get("bias"))


# The attributes of a norm module that determine which weight and bias its operation reads.
_DECIDING = ("forward", "_handle_no_batch_input", "_apply_instance_norm", "__getattr__")


def _methods_of(cls: type) -> tuple[Any, ...]:
    return tuple([getattr(cls, name, None) for name in _DECIDING])


def _functions() -> tuple[Any, ...]:
    return F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm


# PyTorch's own, to recognize that a tool has replaced one.
_METHODS, _FUNCTIONS = {base: _methods_of(base) for base in MODULES}, _functions()


def runs_pytorchs_forward(module: nn.Module) -> bool:
    """Whether a norm module runs PyTorch's forward on its registered parameters.

    A property, or an overridden method that PyTorch's forward calls, may pass others to the
    operation.
    """
    cls = type(module)
    original = next((base for base in MODULES if issubclass(cls, base)), None)
    if original is None or cls.__getattribute__ is not object.__getattribute__:
        return False
    if _methods_of(cls) != _METHODS[original] or _functions() != _FUNCTIONS:
        return False
    shadows = {"weight", "bias", *_DECIDING} & vars(module).keys()
    if is_replica(module):  # its parameters are attributes
        own = vars(module)
        shadows -= {n for n, p in own_parameters(module).items() if p is not None and own[n] is p}
    return not shadows and not hasattr(cls, "weight") and not hasattr(cls, "bias")


def eps_of(module: nn.Module) -> float | None:
    """Return a norm module's eps; None if it is not a float, as a tensor may be modified."""
    eps = module.eps if isinstance(module, MODULES) else None
    return eps if isinstance(eps, float) else None


def eps_confirmed_by_output(
    output: Tensor, node: Node, parameters: Parameters | None, module: nn.Module
) -> float | None:
    """Return a norm module's eps if rerunning the norm with it gives the output bit for bit.

    A module's forward may pass another eps to the operation than its attribute. This check runs
    only if `rerun_of` needs eps, and never on a GPU, where it would synchronize.
    """
    x, eps = saved_tensor(node, "input"), eps_of(module)
    if x is None or parameters is None or eps is None or output.is_cuda or can_compute(node):
        return None
    rerun = rerun_of(node, parameters, eps)
    if rerun is None or rerun_of(node, parameters, None) is not None:
        return None
    z = output if output._base is None else output._base
    return eps if torch.equal(rerun(x), z) else None


def parameters_of_module(node: Node, module: nn.Module) -> Parameters | None:
    """Return the weight and bias that PyTorch's own forward of a norm module has read.

    Return None if that is uncertain: a parametrization may pass another bias to the operation than
    the registered one.
    """
    if node_determines_bias(node):
        return parameters_of(node)
    parameters = own_parameters(module)
    if not {"weight", "bias"} <= parameters.keys():
        return None
    weight, bias = parameters["weight"], parameters["bias"]
    saved = saved_tensor(node, "weight")
    is_repeated = isinstance(module, InstanceNorm)
    if (saved is None) != (weight is None):
        return None
    if not (saved is weight or is_repeated or _is_same_memory(saved, weight)):
        return None
    types = {nn.Parameter, type(None), *([Tensor] if is_replica(module) else [])}
    if not types.issuperset(map(type, (weight, bias))):
        return None  # a subclass's `__torch_function__` may pass another to the operation
    return Parameters(weight, bias) if _is_usable(weight) and _is_usable(bias) else None


def _is_same_memory(saved: Any, weight: Any) -> bool:
    """Whether a saved tensor is a weight without its gradient, as `saved_bytes` saves weights."""
    return (
        type(saved) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and has_storage(weight)
        and (saved.data_ptr(), saved.shape, saved.stride(), saved.dtype)
        == (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
    )


def _is_usable(parameter: Tensor | None) -> bool:
    if parameter is None:
        return True
    if type(parameter) is nn.Parameter:  # the usual case; `is_plain` takes longer
        is_dense = parameter.layout is torch.strided and not parameter.is_meta
        return is_dense and has_storage(parameter)
    return is_plain(parameter) and has_storage(parameter)


def statistics_of(node: Node) -> Statistics | None:
    """Return the statistics that a norm has computed, if the affine can be computed from them.

    Return None if PyTorch has rounded them to 16 bits after it used them: these are too coarse.
    Also for a batch norm in eval mode, which computes none.
    """
    kind = _kind_of(node)
    if kind.affine is _batch_norm and not argument(node, "training"):
        return None
    first = saved_tensor(node, "result1")
    if type(first) is not Tensor or first.is_meta:  # its type may differ from the input's
        return None
    if first.dtype not in _ops.AFFINE_DTYPES:
        return None
    if not kind.has_mean:
        return Statistics(None, first)
    rstd = saved_tensor(node, "result2")
    assert rstd is not None
    return Statistics(first, rstd)


def can_compute(node: Node) -> bool:
    """Whether the affine can be computed from the node's statistics, or the running statistics.

    PyTorch uses running statistics in the dtype that they have.
    """
    if reads_running_statistics(node):
        running = (saved_tensor(node, name) for name in ("running_mean", "running_var"))
        return all(statistic is not None and is_plain(statistic) for statistic in running)
    return statistics_of(node) is not None


def is_batch_norm(node: Node) -> bool:
    """Whether a node is a batch norm's."""
    kind = kind_of(node)
    return kind is not None and kind.affine is _batch_norm


def reads_running_statistics(node: Node) -> bool:
    """Whether the norm is a batch norm in eval mode."""
    return is_batch_norm(node) and not argument(node, "training")


def affine_of(node: Node, parameters: Parameters, statistics: Statistics | None) -> NormAffine:
    """Return the norm's affine. Requires `can_compute(node)`.

    Args:
        node: The norm's node.
        parameters: Its weight and bias.
        statistics: What `statistics_of(node)` returns.
    """
    return _kind_of(node).affine(node, parameters, statistics)


def normalizes_rows(node: Node) -> bool:
    """Whether the norm normalizes rows: a layer or RMS norm."""
    return _kind_of(node).affine is _row_norm


def rerun_of(node: Node, parameters: Parameters, eps: float | None) -> Rerun | None:
    """Return PyTorch's own norm as a function of its input.

    The function recomputes the statistics, and serves norms whose statistics PyTorch saved in 16
    bits. Its result equals the norm's output bit for bit. Return None if eps is needed and unknown,
    for a batch norm in eval mode, and for a SyncBatchNorm or an RMS norm.
    """
    return _kind_of(node).rerun(node, parameters, eps)


Rerun = Callable[[Tensor], Tensor]


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
    rstd = torch.rsqrt(variance.to(dtype) + _batch_norm_eps(node))
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


def _batch_norm_eps(node: Node) -> float:
    return argument(node, "eps" if type(node).__name__.startswith("Native") else "epsilon")


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
    if reads_running_statistics(node):
        return None
    eps = _batch_norm_eps(node)

    def run(x: Tensor) -> Tensor:
        weight, bias = (_repeated(vector, x.size(1)) for vector in parameters)
        return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]

    return run


def _repeated(vector: Tensor | None, channels: int) -> Tensor | None:
    """Repeat an instance norm's weight or bias for each sample, as its batch norm reads it."""
    return None if vector is None else vector.repeat(channels // vector.numel())


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


@dataclass(frozen=True)
class NormKind:
    """How to read the nodes of a kind of norm.

    Attributes:
        affine: See `affine_of`.
        bias_is: "saved" by the node; "absent", if the norm has no bias; "hidden", if only an edge
            of the node leads to the bias.
        rerun: See `rerun_of`.
        has_mean: Whether it saves a mean, and after it rstd; otherwise rstd alone.
    """

    affine: Callable[[Node, Parameters, Statistics | None], NormAffine]
    bias_is: Literal["saved", "absent", "hidden"]
    rerun: Callable[[Node, Parameters, float | None], Rerun | None] = lambda *_: None
    has_mean: bool = True


NORMS: Mapping[str, NormKind] = {
    "NativeBatchNormBackward0": NormKind(_batch_norm, "hidden", _rerun_batch_norm),
    "CudnnBatchNormBackward0": NormKind(_batch_norm, "hidden", _rerun_batch_norm),
    # A Function. Its statistics are those of all processes.
    SYNC_BATCH_NORM: NormKind(_training_batch_norm, "hidden"),
    "NativeGroupNormBackward0": NormKind(_group_norm, "hidden", _rerun_group_norm),
    "NativeLayerNormBackward0": NormKind(_row_norm, "saved", _rerun_layer_norm),
    # The node of RMS norms on GPUs: on a CPU they are several operations. It saves rstd in float32
    # at least.
    "FusedRmsNormBackward0": NormKind(_row_norm, "absent", has_mean=False),
}

_KIND_OF = ByType(NORMS)  # by node type


def kind_of(node: Node) -> NormKind | None:
    """Return the kind of norm that a node belongs to; None if the node is not a norm's."""
    return _KIND_OF[type(node)]


def _kind_of(node: Node) -> NormKind:
    kind = _KIND_OF[type(node)]
    assert kind is not None
    return kind
