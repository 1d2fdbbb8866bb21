"""Attach the recompute engine to a model and to its parts, and detach it again.

NOTE [What convert attaches]

The engine has to run during every forward of the model, whoever calls it. It also needs to see the
outputs of norms and to replace the forward of activations. For this `attach` changes the following,
and nothing else:

1. The model itself gets a new class: a subclass of its class that overrides `forward` to run the
   engine, and what `__call__` runs, to notice that a tool has set a `forward` attribute since. The
   original class's forward is taken for the new one's; of another one a warning tells. A method
   receives the instance that it is called on, so a replica or a copy runs with its own parameters.
   A bound `forward` attribute would run with the original's. All models of one class share one
   such subclass.
2. The model gets an attribute with its `Conversion`. Without this attribute the new class's
   `forward` runs the original forward and nothing else.
3. If the model has a `forward` attribute, or if no such subclass can be created, the model keeps
   its class and gets a `forward` attribute that runs the engine. A model that is itself an
   activation gets only the activation's `forward`, and never runs the engine: it has one node.
4. A norm, or a module without inner modules that is not PyTorch's and so may be a norm, gets a
   forward hook. It takes a note of the output, and records the norm's weight and bias where the
   node does not lead to them. A module that is not PyTorch's also gets a forward pre-hook: the two
   may take notes of the tensors inside, see `recompute/inside_modules.py`. Before torch 2.14 all of
   them get a forward pre-hook, which records the versions of weight and bias.
5. An activation without a `forward` attribute gets one: see `recompute/activation_modules.py`. It
   also gets a `__reduce_ex__` attribute, which copy and pickle read: the `forward` of a copy runs
   the copy. So does a model of 3 that had no `forward` attribute.
6. A linear layer or convolution with a frozen bias gets a forward hook, which records the bias.
   Before torch 2.14 all of them get it, and a forward pre-hook that records the versions of weight
   and bias.
7. Any other module that is not PyTorch's, pooling, `nn.Identity` and an `nn.Sequential` that ends
   in a product get a forward hook that takes a note of the output. Before torch 2.14 all other
   modules that may create nodes get it, and it walks over them: see NOTE [Where nodes come from] in
   `recompute/run.py`. For the model itself `Conversion.run` does this.
8. Parameters, buffers, the tree of modules, and the classes of all other modules do not change.
   Scripted modules do not change at all.
9. A block that a budget checkpoints gets a class and an attribute as in 1 and 2: its `Checkpoint`.
10. An `nn.TransformerEncoderLayer` and its parts get no hooks: with a hook on any of them the layer
   leaves its fast path in inference.

`detach` undoes 1 to 7 and 9, in the model and in all of its parts, also in parts that were
converted on their own. If `attach` fails, the model and its parts are restored, with the
conversions that they had before.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch_private import (
    CALL,
    forward_hooks,
    forward_pre_hooks,
    has_children,
    has_global_forward_hooks,
)
from ..recompute import nodes, norms, pytorchs_forward
from ..recompute.activation_modules import activation_forward
from ..recompute.checkpoints import Calls, Checkpoint
from ..recompute.nodes import saved_tensor_hooks_are_active
from ..recompute.run import run_engine, running_engine
from ..recompute.settings import Settings
from ..supported import activation_of, is_pytorchs
from .observation import Observation
from .report import Report

_CONVERSION = "_inplace_ops"  # the attribute of a converted model
_ORIGINAL_CLASS = "_inplace_ops_original"  # the attribute of a converted model's class
_MAX_OBSERVED_CALLS = 3  # calls that are observed at most, until one fills in the report


class Conversion:
    """The conversion of one model: an attribute of the converted model.

    Attributes:
        settings: State that all forward passes of the model share.
        report: The report. One of the first calls with gradients fills it in.
        checkpoints: The checkpoints of the model's blocks, by their paths.
        calls: Counts the calls of `run` in this thread.
    """

    def __init__(
        self,
        settings: Settings,
        report: Report,
        checkpoints: Mapping[str, Checkpoint] | None = None,
    ) -> None:
        self.settings, self.report = settings, report
        self.checkpoints = checkpoints or {}
        self._observed_calls_left = _MAX_OBSERVED_CALLS
        self._is_settled = True
        self.calls = Calls()

    def run(
        self, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the model's forward with the engine on."""
        self.calls.count += 1
        observation = self._next_observation(model)
        with run_engine(model, self.settings, observation) as engine:
            if engine is None:
                return forward(*args, **kwargs)
            engine.stop_at((args, kwargs))
            with nullcontext() if observation is None else observation.following_modules():
                output = forward(*args, **kwargs)
            engine.walk(output)
            engine.finish()
            if observation is not None:
                try:
                    observation.fill(self.report, output, (args, kwargs))
                    self._is_settled = not engine.replacer.keeps_originals
                except Exception as error:
                    self.settings.warn("the report", f"filling in the report failed: {error!r}")
            return output

    def _next_observation(self, model: nn.Module) -> Observation | None:
        """Return the observation of a call; None if the call is not observed.

        A call is observed if the report is not filled in, gradients are enabled, no other engine
        runs, and no saved-tensor hooks of others hide what is saved. If the call that has filled it
        in kept tensors for the first step alone, the next one fills it in again: see 6 of NOTE
        [Weights are proved] in `recompute/weights.py`.
        """
        is_wanted = (
            not (self.report.is_filled and self._is_settled)
            and self._observed_calls_left > 0
            and running_engine() is None
        )
        if not is_wanted or not torch.is_grad_enabled() or saved_tensor_hooks_are_active():
            return None
        self._observed_calls_left -= 1
        return Observation(model)

    def __reduce__(self) -> Any:
        """Make copies and pickles start with the same `max_ops` and an empty report."""
        return _new_conversion, (self.settings.max_ops,)


_CUDA_GRAPHS = "torch.cuda.graphs"  # the module of the forwards of `make_graphed_callables`


def _new_conversion(max_ops: int) -> Conversion:
    return Conversion(Settings(max_ops), Report())


def conversion_of(model: nn.Module) -> Conversion | None:
    """Return the conversion of a model; None if the model itself is not converted."""
    attached = _attached_to(model)
    return attached if isinstance(attached, Conversion) else None


def _attached_to(module: nn.Module) -> Conversion | Checkpoint | None:
    """Return the conversion of a model, or the checkpoint of a block; None if it has neither.

    A copy may have the attribute alone, if its class has a `__getstate__` of its own.
    """
    attached: Conversion | Checkpoint | None = vars(module).get(_CONVERSION)
    return attached if attached is not None and _has_forward(module) else None


def _has_forward(model: nn.Module) -> bool:
    """Whether `attach` has given a model the class or the `forward` attribute that it has."""
    forward = vars(model).get("forward")
    return any(_ORIGINAL_CLASS in vars(cls) for cls in type(model).__mro__) or any(
        _is_partial_of(forward, function) for function in _FORWARDS
    )


def attach(model: nn.Module, conversion: Conversion) -> None:
    """Convert a model: see NOTE [What convert attaches]. If that fails, restore the model."""
    snapshot = _Snapshot(model)
    try:
        layers = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
        without_hooks = {part for layer in layers for part in layer.modules()}
        for module in _unscripted(model):
            attachments = _attachments_for(module)
            if module is model:  # `Conversion.run` walks
                attachments.discard(_OUTPUT_HOOK)
            _add_attachments(
                module, attachments & {_FORWARD} if module in without_hooks else attachments
            )
        _attach_conversion(model, conversion)
        conversion.settings.weights.add((*model.parameters(), *model.buffers()))
        for path, checkpoint in conversion.checkpoints.items():
            block = model.get_submodule(path)
            _attach_conversion(block, checkpoint)
            checkpoint.settings.weights.add((*block.parameters(), *block.buffers()))
    except Exception:
        detach(model)
        snapshot.restore()
        raise


def _attach_conversion(model: nn.Module, conversion: Conversion | Checkpoint) -> None:
    """Make a model run its forward with the engine on, or a block as a checkpoint."""
    own_forward = vars(model).get("forward")
    converted = None if own_forward is not None else _converted_class(type(model))
    if converted is not None:
        model.__class__ = converted
    elif own_forward is None:
        _set_forward(model, _class_forward)
    elif not _is_partial_of(own_forward, activation_forward):
        _set_forward(model, _instance_forward, own_forward)
    vars(model)[_CONVERSION] = conversion


def can_have_checkpoint(block: nn.Module) -> bool:
    """Whether a block may get a `Checkpoint`."""
    is_unchanged = "forward" not in vars(block) and _CONVERSION not in vars(block)
    return is_unchanged and _converted_class(type(block)) is not None


def _unscripted(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule))


class _Snapshot:
    """The attachments and conversions of a model and of its parts at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attachments = {module: _attachments_of(module) for module in _unscripted(model)}
        pairs = ((module, _attached_to(module)) for module in self.attachments)
        self.conversions = {module: value for module, value in pairs if value is not None}

    def restore(self) -> None:
        """Attach everything again, except to modules that were removed or converted meanwhile."""
        for module in _unscripted(self.model):
            _add_attachments(module, self.attachments.get(module, set()))
            conversion = self.conversions.get(module)
            if conversion is not None and _attached_to(module) is None:
                _attach_conversion(module, conversion)


# Modules of PyTorch whose output often is concatenated or added, which saves neither.
_NOTED = (nn.Identity, nn.Upsample, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool2d, nn.AvgPool3d)

# The attachments of a module: see 4 (norms), 6 (products), 7 (outputs) and 5 (activations) of NOTE
# [What convert attaches].
_NORM_HOOKS, _PRODUCT_HOOKS = "norm hooks", "product hooks"
_OUTPUT_HOOK, _FORWARD = "output hook", "forward"


def _attachments_for(module: nn.Module) -> set[str]:
    """Return the attachments that a module needs."""
    attachments = set()
    if "forward" not in vars(module) and activation_of(module) is not None:
        attachments.add(_FORWARD)  # this forward walks too
    if _may_be_a_norm(module):
        attachments.add(_NORM_HOOKS)
    elif _needs_product_hooks(module):
        attachments.add(_PRODUCT_HOOKS)
    elif not attachments and _needs_output_hook(module):
        attachments.add(_OUTPUT_HOOK)
    return attachments


def _needs_product_hooks(module: nn.Module) -> bool:
    if type(module) not in pytorchs_forward.PRODUCTS:
        return False
    bias = norms.registered_parameters(module).bias
    return not nodes.USE_CREATION_HOOK or (bias is not None and not bias.requires_grad)


def _needs_output_hook(module: nn.Module) -> bool:
    walks = not nodes.USE_CREATION_HOOK
    if type(module).forward is nn.Sequential.forward:
        # Its last module has a hook, unless that is a product.
        return not walks and type([None, *module.children()][-1]) in pytorchs_forward.PRODUCTS
    return walks or isinstance(module, _NOTED) or not is_pytorchs(module)


def _may_be_a_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or may be: one without inner modules that is not PyTorch's.

    Examples are a model's own RMSNorm and a LayerScale.
    """
    if isinstance(module, (*norms.MODULES, nn.RMSNorm)):
        return True
    return _is_leaf_of_others(module) and activation_of(module) is None


def _is_leaf_of_others(module: nn.Module) -> bool:
    return not is_pytorchs(module) and not has_children(module)


def _attachments_of(module: nn.Module) -> set[str]:
    """Return the attachments that a module has."""
    hooks = forward_hooks(module).values()
    attachments = {
        name
        for name, hook in (
            (_NORM_HOOKS, _norm_hook),
            (_PRODUCT_HOOKS, _product_hook),
            (_OUTPUT_HOOK, _output_hook),
        )
        if hook in hooks
    }
    if _is_partial_of(vars(module).get("forward"), activation_forward):
        attachments.add(_FORWARD)
    return attachments


def _add_attachments(module: nn.Module, attachments: set[str]) -> None:
    """Add the attachments that a module does not have yet.

    Forward hooks are prepended: they run before the hooks of FSDP, which free memory.
    """
    missing = attachments - _attachments_of(module)
    if _NORM_HOOKS in missing:
        is_leaf = _is_leaf_of_others(module)
        if is_leaf or not nodes.USE_CREATION_HOOK:
            module.register_forward_pre_hook(_leaf_pre_hook if is_leaf else _versions_pre_hook)
        module.register_forward_hook(_norm_hook, prepend=True, always_call=is_leaf)
    if _PRODUCT_HOOKS in missing:
        if not nodes.USE_CREATION_HOOK:
            module.register_forward_pre_hook(_versions_pre_hook)
        module.register_forward_hook(_product_hook, prepend=True)
    if _OUTPUT_HOOK in missing:
        module.register_forward_hook(_output_hook, prepend=True)
    if _FORWARD in missing:
        _set_forward(module, activation_forward)


def _set_forward(module: nn.Module, function: Callable[..., Any], wrapped: Any = None) -> None:
    """Give a module a `forward` attribute that calls `function(module, ...)`.

    Args:
        module: The module.
        function: The function.
        wrapped: The `forward` attribute that the module had, which the function gets too. None if
            it had none; copies of the module then get a `forward` attribute of their own.
    """
    forward = partial(function, module) if wrapped is None else partial(function, module, wrapped)
    with suppress(TypeError, ValueError):  # some callables have no signature
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    vars(module)["forward"] = forward
    if wrapped is None:
        vars(module)[_REDUCE] = partial(_reduce_with_forward, module)


_REDUCE = "__reduce_ex__"  # as an attribute of an instance, copy and pickle read it too


def _reduce_with_forward(module: nn.Module, protocol: Any) -> Any:
    """Reduce a module to all but its `forward` attribute, which rebuilding sets again.

    Not so if a tool has replaced that attribute: then it is reduced as it is.
    """
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    build, args, state, *rest = reduced
    state = {name: value for name, value in state.items() if name != _REDUCE}
    forward: Any = state.get("forward")
    if not any(_is_partial_of(forward, function) for function in _FORWARDS):
        return build, args, state, *rest
    del state["forward"]
    return _rebuilt_with_forward, (build, args, forward.func), state, *rest


def _rebuilt_with_forward(
    build: Callable[..., nn.Module], args: tuple[Any, ...], function: Callable[..., Any]
) -> nn.Module:
    """Return a module with a `forward` attribute; copy and pickle set its state afterwards."""
    module = build(*args)
    _set_forward(module, function)
    return module


def _is_partial_of(forward: Any, function: Callable[..., Any]) -> bool:
    return isinstance(forward, partial) and forward.func is function


def detach(model: nn.Module) -> None:
    """Undo `attach` in the model and in all of its parts."""
    for module in _unscripted(model):
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
                del hooks[key]
        forward: Any = vars(module).get("forward")
        if any(_is_partial_of(forward, function) for function in _FORWARDS):
            del vars(module)["forward"]
            if forward.args[1:]:
                vars(module)["forward"] = forward.args[1]
        if _is_partial_of(vars(module).get(_REDUCE), _reduce_with_forward):
            del vars(module)[_REDUCE]
        original = vars(type(module)).get(_ORIGINAL_CLASS)
        if original is not None:
            module.__class__ = original
        # If the class was replaced after `attach`, as FSDP2 does, the converted class stays among
        # its bases. Without the conversion its forward runs the original forward alone.
        vars(module).pop(_CONVERSION, None)


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Undo `attach` within a `with` block, and redo it at its end."""
    snapshot = _Snapshot(model)
    detach(model)
    try:
        yield
    finally:
        snapshot.restore()


# The Python modules in which PyTorch creates classes for one instance, and later removes them.
_INSTANCE_CLASS_MODULES = (
    "torch.fx.",
    "torch.nn.utils.parametrize",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
)
_converted_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _converted_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the subclass of `cls` that runs its forward with the engine on.

    None if no such class can be created.
    """
    reference = _converted_classes.get(cls)
    converted = reference() if reference is not None else None
    if converted is None:
        if cls.__module__.startswith(_INSTANCE_CLASS_MODULES):
            return None
        if not inspect.isfunction(inspect.getattr_static(cls, "forward")):
            return None  # a static method, a property, ...
        try:
            converted = _new_class(cls)
        except Exception:  # the metaclass raises, or the classes' memory layouts differ
            return None
        _converted_classes[cls] = weakref.ref(converted)
    return converted


def _new_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Create the subclass: see 1 of NOTE [What convert attaches]."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _run_converted(self, partial(cls.forward, self), *args, **kwargs)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = vars(self).get("forward")
        if own is None or torch.compiler.is_compiling():
            return getattr(cls, CALL)(self, *args, **kwargs)
        if getattr(own, "__func__", None) is cls.forward and own.__self__ is self:
            # A tool has unwrapped the forward of this class, by `__wrapped__` as accelerate does.
            del vars(self)["forward"]
        conversion = _attached_to(self)
        count = 0 if conversion is None else conversion.calls.count
        output = getattr(cls, CALL)(self, *args, **kwargs)
        if conversion is not None and conversion.calls.count == count:
            _warn_of_replaced_forward(self, conversion)
        return output

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Reduce as an instance of the original class, and set the new class on rebuilding.

        Pickle looks a class up by its name, and finds the original class there.
        """
        if type(self) is not converted:
            return cls.__reduce_ex__(self, protocol)
        self.__class__ = cls
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = converted
        if isinstance(reduced, str) or len(reduced) < 3 or _CONVERSION not in (reduced[2] or ()):
            return reduced  # the class's own method leaves out the conversion
        build, args, *rest = reduced
        return _rebuilt, (build, args), *rest

    def raise_on_script(self: nn.Module) -> nn.Module:
        if _attached_to(self) is None:
            return self
        raise RuntimeError(
            "torch.jit.script cannot compile a converted model: script it within "
            "`with inplace_ops.reverted(model):`, or call inplace_ops.revert(model) first"
        )

    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"forward": forward, CALL: call, "__reduce_ex__": reduce}
    body |= {"__prepare_scriptable__": raise_on_script, _ORIGINAL_CLASS: cls}
    # The base is set afterwards, because creating a subclass of `cls` calls its
    # `__init_subclass__`, which may for example register the class.
    metaclass: Any = type(cls)
    converted: type[nn.Module] = metaclass(cls.__name__, (nn.Module,), body)
    converted.__bases__ = (cls,)
    return converted


def _rebuilt(build: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """Return an instance of a converted class; copy and pickle set its state afterwards."""
    model = build(*args)
    converted = _converted_class(type(model))
    if converted is not None:
        model.__class__ = converted
    return model


def _warn_of_replaced_forward(model: nn.Module, conversion: Conversion | Checkpoint) -> None:
    """Warn of a model's `forward` attribute that has run without the engine.

    A replayed CUDA graph runs no operation, so it needs no engine.
    """
    forward = vars(model).get("forward")
    if forward is None or running_engine() is not None:
        return
    if torch.is_grad_enabled() and getattr(forward, "__module__", "") != _CUDA_GRAPHS:
        conversion.settings.warn(
            "the forward",
            "the model's forward was replaced after convert, and the new one saves everything as "
            "PyTorch does: call inplace_ops.revert(model), then inplace_ops.convert(model)",
        )


def _class_forward(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run the engine for a model that keeps its class, and had no `forward` attribute."""
    return _run_converted(model, partial(type(model).forward, model), *args, **kwargs)


def _instance_forward(
    model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run the engine for a model that had the `forward` attribute `forward`."""
    return _run_converted(model, forward, *args, **kwargs)


def _run_converted(
    model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a forward with the engine on, unless the model was reverted or a compiler traces it."""
    conversion = None if torch.compiler.is_compiling() else vars(model).get(_CONVERSION)
    if conversion is None:
        return forward(*args, **kwargs)
    return conversion.run(model, forward, *args, **kwargs)


def _versions_pre_hook(module: nn.Module, args: Any) -> None:
    """Record the versions of a module's weight and bias before its forward."""
    engine = running_engine()
    if engine is not None:
        engine.begin_module(module)


def _leaf_pre_hook(module: nn.Module, args: Any) -> None:
    """Take notes inside a module that may be a norm, in addition."""
    engine = running_engine()
    if engine is not None:
        engine.begin_module(module)
        engine.begin_notes(module, args)


def _norm_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Note the output of a norm after its forward, or after an exception in it."""
    engine = running_engine()
    if engine is not None:
        engine.finish_module(module, output, _norm_hook_runs_first)


def _product_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Record the frozen bias of a product after its forward."""
    engine = running_engine()
    if engine is not None:
        engine.finish_product(module, output, _product_hook_runs_first)


def _runs_first(hook: Callable[..., Any], module: nn.Module) -> bool:
    """Whether a hook is the first of the module's forward hooks."""
    if has_global_forward_hooks():
        return False
    return next(iter(forward_hooks(module).values()), None) is hook


def _output_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Walk over the new nodes of a module's output, before torch 2.14, and note the output."""
    engine = running_engine()
    if engine is not None:
        engine.walk(output)
        engine.note(output, isinstance(module, nn.Identity))


_norm_hook_runs_first = partial(_runs_first, _norm_hook)
_product_hook_runs_first = partial(_runs_first, _product_hook)
_HOOKS = (_versions_pre_hook, _leaf_pre_hook, _norm_hook, _product_hook, _output_hook)
_FORWARDS = (activation_forward, _class_forward, _instance_forward)
