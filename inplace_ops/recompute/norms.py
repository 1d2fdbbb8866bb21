"""Norms: what their nodes and modules tell of weight, bias, eps and statistics.

Batch, group, instance, layer and RMS norms save their input for their own backward. `affine.py`
recomputes their output from that input, the saved statistics, the weight and the bias. The norms
are PyTorch's own. This file reads their autograd nodes and changes nothing.

The nodes lack two values:

- The bias of batch and group norms. The node's edge for the bias leads to it. If there is no edge,
  the norm has no bias, or the bias is frozen: only the module shows which.
- The eps of layer and group norms, which a rerun of the norm needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
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
from .nodes import ByType, Field, Node, argument, autograd_leaf_of, producer, saved_tensor
from .tensors import has_storage, is_plain

# Modules whose node does not save all that a spec needs. An RMS norm's does. Subclasses come first.
MODULES = (
    nn.SyncBatchNorm,
    BatchNorm,
    InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
)


class Statistics(NamedTuple):
    """The statistics that a norm has computed and saved, in the dtype of its affine.

    Attributes:
        mean: The mean of each channel of the batch, group or row; None of an RMS norm.
        rstd: The reciprocal of the standard deviation likewise.
    """

    mean: Tensor | None
    rstd: Tensor


class Parameters(NamedTuple):
    """A norm's weight and bias. None means 1 for the weight, and 0 for the bias."""

    weight: Tensor | None
    bias: Tensor | None

    def copied(self, limit: int) -> Parameters | None:
        """Return copies of both; None if one is larger than `limit` bytes."""
        if any(p is not None and p.nbytes > limit for p in self):
            return None
        return Parameters(*[None if p is None else p.detach().clone() for p in self])


def norm_output(z: Tensor) -> Tensor | None:
    """Return the norm's output that z is, or is a view of; None if z is neither, or was modified.

    A write through `.data` raises no version. Neither this function nor autograd detects it.
    """
    if type(z) is not Tensor or z.is_nested or z._version != 0 or z.output_nr != 0:
        return None
    output = _output_of_instance_norm(z) if z._is_view() else z
    return None if output is None or kind_of(output.grad_fn) is None else output


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


def input_of(z: Tensor) -> Tensor | None:
    """Return the input of the norm whose output is z, if its node saves it, in z's shape and dtype.

    Return None if it does not, if the saved input has hooks, or if its memory was freed.
    """
    x = saved_tensor(z.grad_fn, "input")
    if x is None or not is_plain(x) or x.shape != z.shape or x.dtype is not z.dtype:
        return None
    return x if has_storage(x) else None


def parameters_of(node: Node) -> Parameters | None:
    """Return the weight and bias that a norm's node refers to; None if it does not refer to both.

    The node of an instance norm does not refer to the bias: its edge leads to a copy that repeats
    the bias for each sample.
    """
    bias_is = known_kind_of(node).bias_is
    saved, bias = Field(node, "weight"), None
    if saved.is_hidden:
        return None
    weight = saved.tensor
    if bias_is == "saved":
        saved = Field(node, "bias")
        if saved.is_hidden:
            return None
        bias = saved.tensor
    elif bias_is == "hidden":
        bias = autograd_leaf_of(producer(node, 2)[0])
        if bias is None:
            return None
    return Parameters(weight, bias) if _is_usable(weight) and _is_usable(bias) else None


def node_determines_bias(node: Node) -> bool:
    """Whether the node determines the bias: a layer norm's saves it, and an RMS norm has none."""
    return known_kind_of(node).bias_is != "hidden"


def repeated_parameters_of(node: Node) -> Parameters | None:
    """Return an instance norm's weight, repeated for each sample, and its bias.

    This assumes that the batch norm read the repeated bias unmodified. Code that implements an
    instance norm itself may modify the repeated bias under `no_grad` before, which the graph does
    not show (docs/compatibility.md says so).
    """
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


def repeated_for_samples(vector: Tensor, channels: int) -> Tensor:
    """Repeat an instance norm's weight or bias for each sample, as its batch norm reads it."""
    return vector.repeat(channels // vector.numel())


def registered_parameters(module: nn.Module) -> Parameters:
    """Return a norm module's registered weight and bias; None for each that is not registered.

    This does not read `module.bias`, which would run a parametrization once more.
    """
    parameters = own_parameters(module)
    return Parameters(parameters.get("weight"), parameters.get("bias"))


def eps_of(module: nn.Module) -> float | None:
    """Return a norm module's eps; None if it is not a float, as a tensor may be modified."""
    eps = module.eps if isinstance(module, MODULES) else None
    return eps if isinstance(eps, float) else None


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
    saved = Field(node, "weight").original
    is_repeated = isinstance(module, InstanceNorm)
    if (saved is None) != (weight is None) or not (saved is weight or is_repeated):
        return None
    types = {nn.Parameter, type(None), *([Tensor] if is_replica(module) else [])}
    if not types.issuperset(map(type, (weight, bias))):
        return None  # a subclass's `__torch_function__` may pass another to the operation
    return Parameters(weight, bias) if _is_usable(weight) and _is_usable(bias) else None


def _is_usable(parameter: Tensor | None) -> bool:
    if parameter is None:
        return True
    if type(parameter) is nn.Parameter:  # the usual case; `is_plain` takes longer
        is_dense = parameter.layout is torch.strided and not parameter.is_meta
        return is_dense and has_storage(parameter)
    return is_plain(parameter) and has_storage(parameter)


def statistics_of(node: Node, kind: NormKind | None = None) -> Statistics | None:
    """Return the statistics that a norm has computed, if the affine can be computed from them.

    Return None if PyTorch has rounded them to 16 bits after it used them: these are too coarse.
    Also for a batch norm in eval mode, which computes none.
    """
    kind = kind or known_kind_of(node)
    if kind.formula == "batch" and not argument(node, "training"):
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
    kind = _KIND_OF[type(node)]
    return kind is not None and kind.formula == "batch"


def batch_norm_eps(node: Node) -> float:
    """Return the eps of a batch norm's node."""
    return argument(node, "eps" if type(node).__name__.startswith("Native") else "epsilon")


def reads_running_statistics(node: Node) -> bool:
    """Whether the norm is a batch norm in eval mode."""
    return is_batch_norm(node) and not argument(node, "training")


@dataclass(frozen=True)
class NormKind:
    """How to read the nodes of a kind of norm.

    Attributes:
        formula: Which formulas in `affine.py` compute its affine, and run it again.
        bias_is: "saved" by the node; "absent", if the norm has no bias; "hidden", if only an edge
            of the node leads to the bias.
        has_mean: Whether it saves a mean, and after it rstd; otherwise rstd alone.
    """

    formula: Literal["batch", "synchronized batch", "group", "layer", "rms"]
    bias_is: Literal["saved", "absent", "hidden"]
    has_mean: bool = True


NORMS: Mapping[str, NormKind] = {
    "NativeBatchNormBackward0": NormKind("batch", "hidden"),
    "CudnnBatchNormBackward0": NormKind("batch", "hidden"),
    # A Function. Its statistics are those of all processes.
    SYNC_BATCH_NORM: NormKind("synchronized batch", "hidden"),
    "NativeGroupNormBackward0": NormKind("group", "hidden"),
    "NativeLayerNormBackward0": NormKind("layer", "saved"),
    # The node of RMS norms on GPUs: on a CPU they are several operations. It saves rstd in float32
    # at least.
    "FusedRmsNormBackward0": NormKind("rms", "absent", has_mean=False),
}

_KIND_OF = ByType(NORMS)  # by node type


def kind_of(node: Node) -> NormKind | None:
    """Return the kind of norm that a node belongs to; None if the node is not a norm's."""
    return _KIND_OF[type(node)]


def known_kind_of(node: Node) -> NormKind:
    """Return the kind of a norm's node."""
    kind = _KIND_OF[type(node)]
    assert kind is not None
    return kind
