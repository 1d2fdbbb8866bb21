"""The forward of a converted model's activation modules, which run with the norm before them.

With PyTorch's own SiLU node, backward reads the activation's input z: one more tensor to recompute,
write and read. `RecomputeFunction` computes the gradient from the norm's input in one kernel. So
`convert` gives activation modules this forward, as an attribute of the instance. The module's class
does not change. The class's own forward still computes the values. At each call the module's
attributes decide whether it runs in place.

A norm may save a spec instead of its input, for example after a cast or a concatenation. The
Function then saves the same spec. The input is recomputed once for both: see NOTE [Shared values]
in `specs.py`.

The class's own forward runs alone if no norm precedes the activation, or the kernels do not support
the tensor (nested and sparse tensors, other dtypes), and under checkpoints, tracers, compilers,
`torch.func` and anomaly mode, which names PyTorch's own nodes.

NOTE [In place on a view]

An in-place activation of a view makes a CopySlices node for the base, which hides what the
activation saves. Some views have all elements of their base: an instance norm's output, and an
alias, as the methods of a subclass of Tensor return it. Then the activation runs on the base.

1. The module returns the view, as PyTorch's does.
2. Autograd updates the view's `grad_fn` when it is read. The module reads it before it returns the
   view: a hook that is registered before that is lost, or crashes.
3. A subclass may change what a function returns. The first call compares: see `_only_wraps`.
4. A hook on the view sees second derivatives, as PyTorch saves a clone of the view. So the
   activation of a view with hooks runs on the view.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import _ops
from .._torch_private import DisableTorchFunction, has_gradient_hooks
from ..activations import RELU, Activation
from ..autograd import check_inplace_allowed
from ..supported import activation_of, is_pytorchs
from . import bypass, nodes, norms
from .affine import NormAffine
from .after_norm import Merge, anchor_of, recomputed_activation, runs_in_place
from .calls import Affine
from .inside_modules import is_user_mode_active
from .packed import Recomputed
from .run import Engine, running_engine
from .settings import Settings
from .specs import Leaf
from .tensors import has_tangent, is_plain, whole_base
from .values import value_of
from .verify import is_verified

# An activation runs with its norm only if the norm's affine is at least this many times smaller
# than z.
_AFFINE_FACTOR = 2


def activation_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward, together with the norm before it if possible."""
    engine = running_engine()
    if engine is None or engine.is_paused or len(args) != 1 or kwargs:
        return type(module).forward(module, *args, **kwargs)
    (z,) = args
    merge = engine.planned_merge(module, z)
    if merge is not None:
        is_usual = type(merge.x) is Tensor
        return _run(engine, z, merge) if is_usual else _merged(engine, z, z, merge)
    if not _is_ordinary_call(z):
        return type(module).forward(module, z)
    if type(z) is Tensor or not engine.merges or not _only_wraps(engine, module, z):
        return _activated(engine, module, z)
    check_inplace_allowed(z)
    with DisableTorchFunction():
        _activated(engine, module, z.as_subclass(Tensor))
    return _with_current_history(z)


def _activated(engine: Engine, module: nn.Module, z: Tensor) -> Tensor:
    """Return the activation of z, together with the norm before it if possible."""
    engine.walk(z)
    is_view = engine.merges and type(z) is Tensor and z._is_view()
    has_hooks = is_view and has_gradient_hooks(z)  # rule 4 of NOTE [In place on a view]
    base = whole_base(z) if is_view and not has_hooks else None
    output = norms.norm_output(z if base is None else base) if engine.merges else None
    y = None if output is None else _after_norm(engine, module, z, output)
    if y is None:
        engine.note(z)
        y = _alone(engine, module, z, base if output is None or has_hooks else output)
        engine.walk(y)
        engine.note(y)
    return y


def _is_ordinary_call(z: Any) -> bool:
    """Whether autograd records a call with z, and nothing else sees or reports it.

    Transforms, tangents, subclasses that are not plain, and saved-tensor hooks of other code see
    it. Anomaly mode reports a node.
    """
    return (
        isinstance(z, Tensor)
        and (type(z) is Tensor or is_plain(z))
        and z.requires_grad
        and torch.is_grad_enabled()
        and not nodes.is_transformed()
        and not nodes.saved_tensor_hooks_are_active()
        and not has_tangent(z)
        and not torch.is_anomaly_enabled()
    )


def _only_wraps(engine: Engine, module: nn.Module, z: Tensor) -> bool:
    """Whether a subclass of Tensor only wraps what a module returns, which runs in place on z.

    The first call of a module of this class compares, with a copy of z.
    """
    call = activation_of(module)
    if call is None or not runs_in_place(module, call.activation) or is_user_mode_active():
        return False
    with DisableTorchFunction():
        if has_gradient_hooks(z):
            return False
    key = "only wraps", type(z), type(module)
    verified = engine.settings.verified
    if key not in verified:
        try:
            with torch.no_grad():
                wrapped = type(module).forward(module, z.detach().clone())
                with DisableTorchFunction():
                    copy = z.detach().clone().as_subclass(Tensor)
                    expected = type(module).forward(module, copy)
                    verified[key] = type(wrapped) is type(z) and torch.allclose(
                        wrapped, expected, rtol=0.0, atol=0.0, equal_nan=True
                    )
        except Exception as error:
            engine.warn_of(error)
            return False
    return verified[key]


def _with_current_history(view: Tensor) -> Tensor:
    """Return a view after autograd has updated it: see 2 of NOTE [In place on a view]."""
    nodes.grad_fn_of(view)
    return view


def _after_norm(engine: Engine, module: nn.Module, z: Tensor, output: Tensor) -> Tensor | None:
    """Return the activation of z, which backward recomputes from the input of the norm before it.

    Return None if it cannot.

    Args:
        engine: The engine.
        module: The activation's module.
        z: Its input.
        output: The norm's output: z, or the base of which z is a view.
    """
    merge = _merge_of(engine, module, z, output)
    if merge is None:
        return None
    engine.learn_merge(module, z, output, merge)
    return _merged(engine, z, output, merge)


def _merge_of(engine: Engine, module: nn.Module, z: Tensor, output: Tensor) -> Merge | None:
    """Return how an activation runs with the norm before it. The arguments are those above.

    Return None if z is small, the kernels do not support it, or a function mode may change the
    activation.
    """
    node: Any = output.grad_fn
    value = value_of(node)
    facts = None if value is None else value.norm
    if facts is None or z.nbytes < Settings.MIN_BYTES or is_user_mode_active():
        return None
    if not engine.replacer.is_first_on_its_device(nodes.stream_of(node)):
        return None
    call = activation_of(module)
    if call is None or not _ops.has_kernel(z):
        return None
    is_in_place = runs_in_place(module, call.activation)
    if is_in_place and output is not z and has_gradient_hooks(z):  # rule 4
        return None
    try:
        x = engine.replacer.norm_input(output)
        if x is None or not (isinstance(x, Tensor) or output is z or is_in_place):
            return None
        affine = facts.affine
        if affine is None:
            with nodes.no_graph():
                affine = facts.affine_of(node)
        if affine is None or _AFFINE_FACTOR * affine.nbytes > z.nbytes:
            return None
        make_recomputed = partial(_recomputed_output, output, x, affine, call.activation)
        context = call.activation.name, type(x)
        ordinal = engine.replacer.ordinal
        if not is_verified(engine.settings, ordinal, make_recomputed, output, *context):
            return None
        x_or_none = x if isinstance(x, Tensor) else None
        instead = bypass.bypass_of(output, facts, module, x_or_none, z, is_in_place)
    except Exception as error:
        engine.warn_of(error, node)
        return None
    overwritten = output if is_in_place else z
    op_args = _ops.OpArgs(_ops.dim_order_of(overwritten), call.scalars)
    anchor = anchor_of(call.activation, overwritten)
    return Merge(module, call, is_in_place, op_args, anchor, x, affine, instead)


def _merged(engine: Engine, z: Tensor, output: Tensor, merge: Merge) -> Tensor:
    """Return the activation of z as `merge` tells. The other arguments are those above."""
    module, call, is_in_place, op_args, anchor, x, affine, instead = merge
    if not isinstance(x, Tensor):
        original = x.original
        x = x.for_consumer(call.activation.name, engine.replacer.next_turn)
        if original is not None:
            engine.replacer.keep_until_known(x, original.leaf.tensor)
    z_or_base = output
    if is_in_place:
        if output is not z:  # a norm's output itself may be modified
            check_inplace_allowed(z)
    else:
        z_or_base = z
        if output.shape != z.shape:  # an instance norm's output, of which z is a view
            assert isinstance(x, Tensor)
            x, affine = x.detach().view(z.shape), _with_samples(affine, z)
    node = None if engine.observer is None else output.grad_fn
    merge = Merge(module, call, is_in_place, op_args, anchor, x, affine, instead)
    y = _run(engine, z_or_base, merge)
    if engine.observer is not None:
        # Out of place PyTorch's LeakyReLU saves its input.
        activation = call.activation
        saves_output = activation.torch_saves_output and (is_in_place or activation is RELU)
        engine.observer.activated(y.grad_fn if saves_output else node, y.grad_fn, y)
    return _with_current_history(z) if y is output and y is not z else y


def _run(engine: Engine, z: Tensor, merge: Merge) -> Tensor:
    """Return the activation of a norm's output z, and give its node the spec of it."""
    y = recomputed_activation(z, merge)
    node: Any = y.grad_fn
    leaf = Leaf(merge.x) if isinstance(merge.x, Tensor) else merge.x.as_input
    node.spec = spec = Affine(leaf, merge.affine, z.dtype, *merge.call)
    engine.add_activation(y).spec = weakref.ref(spec)
    return y


def _recomputed_output(
    output: Tensor, x: Tensor | Recomputed, affine: NormAffine, activation: Activation
) -> Recomputed:
    """Return the spec of the norm's output, as the activation's backward recomputes it."""
    leaf = Leaf(x) if isinstance(x, Tensor) else x.as_input
    spec = Affine(leaf, affine, x.dtype)
    return Recomputed(spec, output, nodes.operation_name(output.grad_fn), activation.name)


def _alone(engine: Engine, module: nn.Module, z: Tensor, base: Tensor | None) -> Tensor:
    """Run the class's own forward on z, or in place on its base: see NOTE [In place on a view].

    A function mode of the user may return another tensor than the one that it gets.
    """
    if base is not None and base is not z and not is_user_mode_active():
        call = activation_of(module)
        if call is not None and runs_in_place(module, call.activation):
            check_inplace_allowed(z)
            _with_notes(engine, module, base)
            return _with_current_history(z)
    return _with_notes(engine, module, z)


def _with_notes(engine: Engine, module: nn.Module, z: Tensor) -> Tensor:
    """Run the class's own forward, and take notes inside it if that lets the engine save less."""
    forward = type(module).forward
    if is_pytorchs(module):
        return forward(module, z)
    engine.begin_notes(module, (z,))
    try:
        return forward(module, z)
    finally:
        engine.end_notes(module)


def _with_samples(affine: NormAffine, z: Tensor) -> NormAffine:
    """Return an instance norm's affine in the shape of z.

    PyTorch runs an instance norm as a batch norm of one sample with samples * channels channels.
    """
    samples, channels, *sizes = z.shape
    return NormAffine(affine.channel_affine.view(2, samples, channels, *[1 for _ in sizes]), None)
