"""The forward of a converted model's activation modules: fused with the norm before them.

With PyTorch's own SiLU node, backward reads the activation's input z: one more tensor that is
recomputed, written and read. `RecomputeFunction` computes the gradient from the norm's input in one
kernel. So `convert` gives activation modules this forward, as an attribute of the instance. Their
class stays what it is, and its own forward computes the values and decides whether it runs in
place, from its attributes as they are at each call.

The class's own forward runs alone wherever no norm precedes or the kernels do not fit: nested and
sparse tensors, subclasses, other dtypes, under checkpoints, tracers, compilers and `torch.func`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import _ops
from ..activations import Activation
from ..dispatch import check_inplace_allowed
from ..supported import activation_of
from . import nodes, norms
from .engine import Engine, affine_of, running_engine
from .functions import Forward, recomputed_activation
from .norms import NormAffine
from .specs import Affine, Leaf, Recomputed
from .versions import record_of

# What is saved of an activation after a norm is at least that many times smaller than its output.
_AFFINE_FACTOR = 2


def activation_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the module's forward, fused with the norm before it where that is possible."""
    engine = running_engine()
    if engine is None or len(args) != 1 or kwargs or not _is_ordinary(args[0]):
        return type(module).forward(module, *args, **kwargs)
    forward, (z,) = partial(type(module).forward, module), args
    engine.walk(z)
    y = _fused(engine, module, forward, z)
    if y is None:
        engine.note(z)
        y = _unfused(module, forward, z)
    engine.walk(y)
    engine.note(y)
    return y


def _is_ordinary(z: Any) -> bool:
    return (
        type(z) is Tensor
        and z.requires_grad
        and torch.is_grad_enabled()
        and not nodes.is_transformed()
        and not nodes.saved_tensor_hooks_are_active()
        and not nodes.has_tangent(z)
        and nodes.is_plain(z)
    )


def _fused(engine: Engine, module: nn.Module, forward: Forward, z: Tensor) -> Tensor | None:
    """Return the activation of a norm's output, None if z is not one or the kernels do not fit."""
    norm = norms.norm_of(z)
    record = None if norm is None else record_of(norm.node)
    if norm is None or record is None:
        return None
    if record.stream is not nodes.current_stream(z.device):
        return None
    found = activation_of(module)
    if found is None or not _ops.has_kernel(z):
        return None
    activation, scalars = found
    try:
        x = norms.input_of(norm)
        if x is None:
            return None
        with nodes.no_graph():
            affine = affine_of(norm.node, record)
            if affine is None or _AFFINE_FACTOR * affine.nbytes > z.nbytes:
                return None
            make = partial(_output_of, norm, x, affine, activation)
            if not engine.is_right(make, norm.output, activation.name):
                return None
    except RuntimeError:  # freed, or modified since: the norm's own backward will say so
        return None
    if _is_in_place(module, activation):
        check_inplace_allowed(z)
        y = _apply(activation, scalars, forward, norm.output, x, affine, in_place=True)
    else:
        if norm.output is not z:  # an instance norm's, of which z is a view
            x, affine = x.detach().view(z.shape), _by_sample(affine, z)
        y = _apply(activation, scalars, forward, z, x, affine, in_place=False)
    if engine.observer is not None:
        saves_output = activation.torch_saves == "output"
        engine.observer.fused(y.grad_fn if saves_output else norm.node, y.grad_fn, y)
    return z if y is norm.output else y


def _output_of(
    norm: norms.Norm, x: Tensor, affine: NormAffine, activation: Activation
) -> Recomputed:
    """The norm's output as it is recomputed for the activation."""
    spec = Affine(Leaf(x), affine, x.dtype)
    return Recomputed(spec, norm.output, nodes.operation_name(norm.node), activation.name)


def _unfused(module: nn.Module, forward: Forward, z: Tensor) -> Tensor:
    """Run the class's own forward; in place after an instance norm, on what z is a view of.

    In place on the view, a CopySlices node would hide what the activation saves.
    """
    found, norm = activation_of(module), norms.norm_of(z)
    if found is None or norm is None or norm.output is z or not _is_in_place(module, found[0]):
        return forward(z)
    check_inplace_allowed(z)
    forward(norm.output)
    return z


def _is_in_place(module: nn.Module, activation: Activation) -> bool:
    """Whether a module runs in place. PyTorch has no GELU in place, and ignores the attribute."""
    return activation.torch_inplace is not None and getattr(module, "inplace", False)


def _apply(
    activation: Activation,
    scalars: tuple[float, ...],
    forward: Forward,
    z: Tensor,
    x: Tensor,
    affine: NormAffine,
    in_place: bool,
) -> Tensor:
    op_args = _ops.OpArgs(_ops.dim_order_of(z), scalars)

    def run(z: Tensor) -> Tensor:
        if not in_place:
            return forward(z)
        forward(z.data)  # `mark_dirty` raises the version, and raises it once
        return z

    return recomputed_activation(z, x, affine, activation, op_args, run)


def _by_sample(affine: NormAffine, z: Tensor) -> NormAffine:
    """Return an instance norm's function, which is of one sample, as one of all samples."""
    samples, channels, *sizes = z.shape
    return NormAffine(affine.channel_affine.view(2, samples, channels, *(1 for _ in sizes)), None)
