"""Norms: their output as an affine function of their input.

Batch, group, instance, layer and RMS norms save their input for their own backward. Their output
follows from that input, the statistics, the weight and the bias, in one operation. The norms
themselves are PyTorch's: their autograd nodes are read, and nothing is changed.

What the nodes do not tell:

- The bias of batch and group norms. It stands at the end of its edge in the graph; without an edge
  it is frozen, or there is none. Only the module knows.
- `eps` of layer and group norms, which `rerun` needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import _ops
from .nodes import (
    ByType,
    Node,
    argument,
    autograd_leaf_of,
    has_hooks,
    has_storage,
    is_plain,
    output_device,
    output_dtype,
    output_shape,
    producer,
    saved_is_contiguous,
    saved_tensor,
)

MODULES = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
)


class NormAffine(NamedTuple):
    """A norm's output as a function of its input: z = (x - mean) * rstd * scale + shift.

    Each tensor has the shape (2, ...), and behind the 2 that of x or 1.

    Attributes:
        channel_affine: scale and shift.
        row_statistics: rstd and mean of each row of a layer or RMS norm, or of each group of a
            group norm without parameters; None is 1 and 0.
    """

    channel_affine: Tensor
    row_statistics: Tensor | None

    @property
    def nbytes(self) -> int:
        """The size of both in bytes."""
        rows = self.row_statistics
        return self.channel_affine.nbytes + (0 if rows is None else rows.nbytes)


class Norm(NamedTuple):
    """A norm that has run: its node and its output, of which an instance norm returns a view."""

    node: Node
    output: Tensor


class NormSource(NamedTuple):
    """What a norm's output is computed from.

    Attributes:
        x: The norm's input, of the output's shape and dtype.
        affine: Computes the function, with gradients off.
    """

    x: Tensor
    affine: Callable[[], NormAffine]


class Parameters(NamedTuple):
    """A norm's weight and bias; None is 1, or 0."""

    weight: Tensor | None
    bias: Tensor | None

    def copied(self, limit: int) -> Parameters | None:
        """Return copies; None if one is larger than `limit` bytes."""
        if any(p is not None and p.nbytes > limit for p in self):
            return None
        return Parameters(*(None if p is None else p.detach().clone() for p in self))


def norm_of(z: Tensor) -> Norm | None:
    """Return the norm whose output z is, if z is one and nothing has written to it since.

    A write through `.data` leaves no trace; autograd does not see it either.
    """
    if type(z) is not Tensor or z.is_nested or z._version != 0 or z.output_nr != 0:
        return None
    output = _output_of_instance_norm(z) if z._is_view() else z
    if output is None or kind_of(output.grad_fn) is None:
        return None
    return Norm(output.grad_fn, output)


def _output_of_instance_norm(z: Tensor) -> Tensor | None:
    """Return what z is a view of, where it may be a batch norm's output for one sample."""
    base = z._base
    if base is None or base.dim() != z.dim() or z.dim() < 3 or not z.is_contiguous():
        return None
    samples, channels, *sizes = z.shape
    is_whole = base.shape == (1, samples * channels, *sizes) and base.is_contiguous()
    return base if is_whole else None


def input_of(norm: Norm) -> Tensor | None:
    """Return the norm's input if it is saved as it is, and has the output's shape and dtype."""
    x, z = saved_tensor(norm.node, "input"), norm.output
    if x is None or not is_plain(x) or x.shape != z.shape or x.dtype is not z.dtype:
        return None
    return x if has_storage(x) else None


def source_of(norm: Norm) -> NormSource | None:
    """Return what the norm's output is computed from; None where that is not available.

    Not available: the norm ran inside a checkpoint or under other saved-tensor hooks; its tensors
    are DTensors; its bias is frozen; its parameters' memory is freed until backward, as by FSDP;
    its statistics are saved in 16 bits.
    """
    node = norm.node
    try:
        x = input_of(norm) if can_compute(node) else None
        parameters = None if x is None else parameters_of(node)
        if x is not None and parameters is None and not node_determines_bias(node):
            parameters = _repeated_parameters_of(node)
            if parameters is None and _has_no_parameters(node):
                # Taken for affine=False. A frozen bias without a weight looks the same: documented.
                parameters = Parameters(None, None)
    except RuntimeError:  # freed, or modified since: the norm's own backward will say so
        return None
    if x is None or parameters is None:
        return None
    known = parameters
    return NormSource(x, lambda: affine_of(node, known))


def _has_no_parameters(node: Node) -> bool:
    if has_hooks(node, "weight"):
        return False
    return saved_tensor(node, "weight") is None and producer(node, 2)[0] is None


def parameters_of(node: Node) -> Parameters | None:
    """Return weight and bias as the norm's node tells them; None where it does not tell both.

    An instance norm's does not tell its bias: it has read copies, one for each sample.
    """
    bias_is = _kind_of(node).bias_is
    if has_hooks(node, "weight") or (bias_is == "saved" and has_hooks(node, "bias")):
        return None
    weight, bias = saved_tensor(node, "weight"), None
    if bias_is == "saved":
        bias = saved_tensor(node, "bias")
    elif bias_is == "hidden":
        bias = autograd_leaf_of(producer(node, 2)[0])
        if bias is None:
            return None
    return Parameters(weight, bias) if _is_usable(weight) and _is_usable(bias) else None


def node_determines_bias(node: Node) -> bool:
    """Whether the node itself tells the bias: a layer norm saves it, and an RMS norm has none."""
    return _kind_of(node).bias_is != "hidden"


def _repeated_parameters_of(node: Node) -> Parameters | None:
    """Return an instance norm's weight, once for each sample, and its bias.

    The bias is taken for what was repeated. Code that repeats it by itself may write to it before
    its batch norm reads it, and leave no trace in the graph: documented.
    """
    repeats = [producer(node, index)[0] for index in (1, 2)]
    if any(type(repeat).__name__ != "RepeatBackward0" for repeat in repeats):
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
    """Return a norm module's weight and bias as they are registered; None also if it has none.

    Not by `module.bias`: a parametrization would run once more.
    """
    return Parameters(module._parameters.get("weight"), module._parameters.get("bias"))


# What decides which weight and bias a norm module's operation is given.
_DECIDING = ("forward", "_handle_no_batch_input", "_apply_instance_norm", "__getattr__")


def runs_pytorchs_forward(module: nn.Module) -> bool:
    """Whether a norm module runs PyTorch's forward, on the parameters that it has registered.

    A property, or a method that PyTorch's forward calls, may give its operation others.
    """
    cls = type(module)
    original = next((base for base in MODULES if issubclass(cls, base)), None)
    if original is None or cls.__getattribute__ is not object.__getattribute__:
        return False
    if any(getattr(cls, name, None) is not getattr(original, name, None) for name in _DECIDING):
        return False
    shadows = {"weight", "bias", *_DECIDING} & vars(module).keys()
    return not shadows and not hasattr(cls, "weight") and not hasattr(cls, "bias")


def eps_of(module: nn.Module) -> float | None:
    """Return a norm module's eps; None of a tensor, which may be written to."""
    eps = module.eps if isinstance(module, MODULES) else None
    return eps if isinstance(eps, float) else None


def eps_confirmed_by_output(
    output: Tensor, node: Node, parameters: Parameters | None, module: nn.Module
) -> float | None:
    """Return a norm module's eps if its norm, run again with it, gives its output bit for bit.

    For a forward that may have given its operation another. Tried where `rerun_of` needs it, and no
    GPU has to be waited for.
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
    """Return the weight and bias that PyTorch's own forward of a norm module has surely read.

    A parametrization may give the operation another bias than `module.bias`.
    """
    if node_determines_bias(node):
        return parameters_of(node)
    parameters = module._parameters
    if not {"weight", "bias"} <= parameters.keys():
        return None
    weight, bias = parameters["weight"], parameters["bias"]
    saved = saved_tensor(node, "weight")
    is_repeated = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    if (saved is None) != (weight is None) or (saved is not weight and not is_repeated):
        return None
    if any(type(parameter) not in (nn.Parameter, type(None)) for parameter in (weight, bias)):
        return None  # a `__torch_function__` of its own may give the operation another
    return Parameters(weight, bias) if _is_usable(weight) and _is_usable(bias) else None


def _is_usable(parameter: Tensor | None) -> bool:
    if parameter is None:
        return True
    if type(parameter) is nn.Parameter:  # mostly, and `is_plain` takes longer
        is_dense = parameter.layout is torch.strided and not parameter.is_meta
        return is_dense and has_storage(parameter)
    return is_plain(parameter) and has_storage(parameter)


def can_compute(node: Node) -> bool:
    """Whether the saved statistics tell the function: those in 16 bits are too coarse."""
    if reads_running_statistics(node):
        running = (saved_tensor(node, name) for name in ("running_mean", "running_var"))
        return all(statistic is not None and is_plain(statistic) for statistic in running)
    mean = saved_tensor(node, "result1")
    if type(mean) is not Tensor or mean.is_meta:  # whatever the input is, of a type of its own
        return False
    return mean.dtype is _ops.affine_dtype(output_dtype(node, 0))


def is_batch_norm(node: Node) -> bool:
    """Whether the norm is a batch norm."""
    return _kind_of(node).affine is _batch_norm


def reads_running_statistics(node: Node) -> bool:
    """Whether the norm is a batch norm in eval mode."""
    return is_batch_norm(node) and not node._saved_training


def affine_of(node: Node, parameters: Parameters) -> NormAffine:
    """Compute the function, where `can_compute`."""
    return _kind_of(node).affine(node, parameters)


def normalizes_rows(node: Node) -> bool:
    """Whether the norm is one of rows: a layer or RMS norm."""
    return _kind_of(node).row_statistics is not None


def row_statistics_of(node: Node) -> Tensor:
    """Return rstd and mean of each row of a layer or RMS norm, where `can_compute`."""
    row_statistics = _kind_of(node).row_statistics
    assert row_statistics is not None
    return row_statistics(node)


def rerun_of(node: Node, parameters: Parameters, eps: float | None) -> Rerun | None:
    """Return PyTorch's own norm as a function of its input; None if eps is not known.

    For statistics that PyTorch saved in 16 bits: they are computed again, and the output is equal
    bit for bit.
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
    """Return scales weight * rstd and shifts bias - mean * scale, in the given shape.

    `rstd` and `mean` hold a value for every `channels_per_group` channels; None is 1, or 0.
    """
    vectors = [_contiguous(vector, dtype) for vector in (rstd, mean, *parameters)]
    return _ops.NORM_AFFINE(*vectors, shape, channels_per_group)


def _contiguous(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if vector is None or (vector.dtype is dtype and vector.is_contiguous()):
        return vector
    return vector.to(dtype).contiguous()


def _shape_of_channels(node: Node, samples: int = 1) -> tuple[int, ...]:
    _, channels, *sizes = output_shape(node, 0)
    return (2, samples, channels, *(1 for _ in sizes))


def _batch_norm(node: Node, parameters: Parameters) -> NormAffine:
    if not reads_running_statistics(node):
        mean, rstd = saved_tensor(node, "result1"), saved_tensor(node, "result2")
        assert mean is not None
        dtype = mean.dtype
    else:
        mean, variance = saved_tensor(node, "running_mean"), saved_tensor(node, "running_var")
        assert variance is not None
        dtype = _ops.affine_dtype(output_dtype(node, 0))
        rstd = torch.rsqrt(variance.to(dtype) + _batch_norm_eps(node))
    return NormAffine(_scale_shift(dtype, _shape_of_channels(node), rstd, mean, parameters), None)


def _batch_norm_eps(node: Node) -> float:
    return argument(node, "eps" if type(node).__name__.startswith("Native") else "epsilon")


def _group_norm(node: Node, parameters: Parameters) -> NormAffine:
    mean, rstd = saved_tensor(node, "result1"), saved_tensor(node, "result2")
    assert mean is not None
    assert rstd is not None
    samples, groups = mean.shape
    shape = _shape_of_channels(node, samples)
    channels_per_group = shape[2] // groups
    if parameters == Parameters(None, None) and _is_contiguous(node):
        # PyTorch's kernels then subtract the mean first, as a layer norm's do.
        rows = torch.stack([rstd, mean]).repeat_interleave(channels_per_group, 2).view(shape)
        return NormAffine(_identity(rows, len(shape) - 1), rows)
    affine = _scale_shift(mean.dtype, shape, rstd, mean, parameters, channels_per_group)
    return NormAffine(affine, None)


def _is_contiguous(node: Node) -> bool:
    """Whether a group norm's kernel reads a contiguous input: that of a GPU makes it so."""
    return output_device(node, 0).type == "cuda" or saved_is_contiguous(node, "input")


def _row_norm(node: Node, parameters: Parameters) -> NormAffine:
    return NormAffine(column_affine_of(node, parameters), row_statistics_of(node))


def column_affine_of(node: Node, parameters: Parameters) -> Tensor:
    """Return scale and shift of a norm of rows, where `can_compute`: copies of weight and bias."""
    weight, bias = parameters
    statistic = saved_tensor(node, "result1")
    assert statistic is not None
    dims = statistic.dim()
    if weight is None:
        if bias is None:
            columns = argument(node, "normalized_shape")[-1]  # kernels are fast with one of each
            return _identity(statistic, dims, columns)
        weight = torch.ones_like(bias)
    shape = (2, *(1,) * (dims - weight.dim()), *weight.shape)
    return _scale_shift(statistic.dtype, shape, None, None, Parameters(weight, bias))


def _statistics_of_layer_norm(node: Node) -> Tensor:
    mean, rstd = saved_tensor(node, "result1"), saved_tensor(node, "result2")
    assert mean is not None
    assert rstd is not None
    return torch.stack([rstd, mean])


def _statistics_of_rms_norm(node: Node) -> Tensor:
    rstd = saved_tensor(node, "result1")
    assert rstd is not None
    return torch.stack([rstd, torch.zeros_like(rstd)])


def _identity(like: Tensor, dim: int, columns: int = 1) -> Tensor:
    """Return the scale 1 and the shift 0, of every channel of a tensor of `dim` dimensions."""
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
    """Return an instance norm's vector as its operation reads it: once for each sample."""
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
    """What is known of a norm's node.

    Attributes:
        affine: See `affine_of`.
        bias_is: "saved" by the node, "absent", or "hidden" behind its edge.
        rerun: See `rerun_of`.
        row_statistics: See `row_statistics_of`.
    """

    affine: Callable[[Node, Parameters], NormAffine]
    bias_is: Literal["saved", "absent", "hidden"]
    rerun: Callable[[Node, Parameters, float | None], Rerun | None] = lambda *_: None
    row_statistics: Callable[[Node], Tensor] | None = None


NORMS: Mapping[str, NormKind] = {
    "NativeBatchNormBackward0": NormKind(_batch_norm, "hidden", _rerun_batch_norm),
    "CudnnBatchNormBackward0": NormKind(_batch_norm, "hidden", _rerun_batch_norm),
    "NativeGroupNormBackward0": NormKind(_group_norm, "hidden", _rerun_group_norm),
    "NativeLayerNormBackward0": NormKind(
        _row_norm, "saved", _rerun_layer_norm, _statistics_of_layer_norm
    ),
    # Of a GPU: on a CPU it is several operations. It saves rstd in float32 at least.
    "FusedRmsNormBackward0": NormKind(_row_norm, "absent", row_statistics=_statistics_of_rms_norm),
}

_KIND_OF = ByType(NORMS)  # by the type of a node


def kind_of(node: Node) -> NormKind | None:
    """Return what is known of a node that may be a norm's; None of others."""
    return _KIND_OF[type(node)]


def _kind_of(node: Node) -> NormKind:
    kind = _KIND_OF[type(node)]
    assert kind is not None
    return kind
