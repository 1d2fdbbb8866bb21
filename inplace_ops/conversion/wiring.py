"""How a converted model switches the recompute engine on, and `revert` takes that away.

- The model itself gets a class of its own, a subclass of its class that differs in `forward`. So it
  does not matter who calls `forward`, and a replica or a copy runs its own parameters. Where such a
  class cannot be made, the model gets a `forward` of the instance.
- Norms, and modules of other libraries that may be one, get forward hooks, which note their output.
- Activations get a `forward` of the instance: `recompute/fused.py`.
- Before torch 2.14 all other modules get a forward hook, which walks over the new nodes.

Parameters, buffers, parents and the classes of all other modules stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ..recompute import engine as engine_module
from ..recompute import norms
from ..recompute.engine import Settings, run_engine, running_engine
from ..recompute.fused import activation_forward
from ..recompute.nodes import saved_tensor_hooks_are_active
from ..supported import activation_of
from .observation import Observation
from .report import Report

_STATE = "_inplace_ops"  # the attribute of a converted model
_ORIGINAL = "_inplace_ops_original"  # of its class: the class that it had
_ATTEMPTS = 3  # to observe a pass for the report


class Conversion:
    """What a converted model knows of its conversion.

    Attributes:
        settings: What its calls share.
        report: Filled in by the first call with gradients.
        observation: What observes that call; None for one of its own.
    """

    def __init__(
        self, settings: Settings, report: Report, observation: Observation | None = None
    ) -> None:
        self.settings, self.report, self.observation = settings, report, observation
        self._attempts = _ATTEMPTS

    def run(
        self, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the model's forward with the engine on."""
        observation = self._observation_of(model)
        with run_engine(self.settings, observation) as engine:
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
                except Exception as error:
                    self.settings.warn(f"inplace_ops: the report is not filled in, as {error!r}")
            return output

    def _observation_of(self, model: nn.Module) -> Observation | None:
        """Return what is to observe a call, if the report needs it and the call may show it."""
        is_wanted = not self.report.is_filled and self._attempts > 0 and running_engine() is None
        if not is_wanted or not torch.is_grad_enabled() or saved_tensor_hooks_are_active():
            return None
        self._attempts -= 1
        return self.observation or Observation(model)

    def __reduce__(self) -> Any:
        """Copies and pickles begin with a report of their own."""
        return _new_conversion, (self.settings.max_ops,)


def _new_conversion(max_ops: int) -> Conversion:
    return Conversion(Settings(max_ops), Report())


def conversion_of(model: nn.Module) -> Conversion | None:
    """Return the conversion of a model, None if it is not converted itself."""
    return vars(model).get(_STATE)


def attach(model: nn.Module, conversion: Conversion) -> None:
    """Convert a model; if that fails, it is as it was."""
    before = _Attached(model)
    try:
        # PyTorch's encoder layers leave their fast path where one of their parts has a hook.
        layers = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
        without_hooks = {part for layer in layers for part in layer.modules()}
        for module in _unscripted(model):
            pieces = _pieces_for(module)
            if module is model:  # whose output `Conversion.run` walks over
                pieces.discard(_WALK)
            _attach_pieces(module, pieces & {_FORWARD} if module in without_hooks else pieces)
        _attach_itself(model, conversion)
    except Exception:
        detach(model)
        before.attach()
        raise


def _attach_itself(model: nn.Module, conversion: Conversion) -> None:
    """Let a model run its forward with the engine on."""
    own = vars(model).get("forward")
    converted = None if own is not None else _converted_class(type(model))
    if converted is not None:
        model.__class__ = converted
    elif not _is_ours(own, activation_forward):
        _set_forward(model, partial(_instance_forward, model, own), own)
    vars(model)[_STATE] = conversion


def _unscripted(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule))


class _Attached:
    """What a model and its parts have got from conversions."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.pieces = {module: _pieces_of(module) for module in _unscripted(model)}
        found = ((module, conversion_of(module)) for module in self.pieces)
        self.conversions = {module: known for module, known in found if known is not None}

    def attach(self) -> None:
        """Attach it again to what is still there and was not converted meanwhile."""
        for module in _unscripted(self.model):
            _attach_pieces(module, self.pieces.get(module, set()))
            known = self.conversions.get(module)
            if known is not None and conversion_of(module) is None:
                _attach_itself(module, known)


# Modules that return what they were given, or what a module inside has returned.
_WITHOUT_NODES = (nn.Identity, nn.Sequential)

# What a module may get.
_NOTES, _WALK, _FORWARD = "notes", "walk", "forward"


def _pieces_for(module: nn.Module) -> set[str]:
    """Return what a module is to get."""
    pieces = set()
    if "forward" not in vars(module) and activation_of(module) is not None:
        pieces.add(_FORWARD)  # which walks too
    if _may_be_a_norm(module):
        pieces.add(_NOTES)
    elif not (engine_module.USE_CREATION_HOOK or pieces or type(module) in _WITHOUT_NODES):
        pieces.add(_WALK)
    return pieces


def _may_be_a_norm(module: nn.Module) -> bool:
    """Whether it is a norm, or small code of its own: an RMSNorm, a LayerScale."""
    if isinstance(module, (*norms.MODULES, nn.RMSNorm)):
        return True
    is_own = not type(module).__module__.startswith("torch.nn.")
    return is_own and not module._modules and activation_of(module) is None


def _pieces_of(module: nn.Module) -> set[str]:
    """Return what a module has got."""
    hooks = module._forward_hooks.values()
    pieces = {name for name, hook in ((_NOTES, _note_output), (_WALK, _walk)) if hook in hooks}
    if _is_ours(vars(module).get("forward"), activation_forward):
        pieces.add(_FORWARD)
    return pieces


def _attach_pieces(module: nn.Module, pieces: set[str]) -> None:
    """Give a module what it has not got yet. Hooks go before those of FSDP, which free memory."""
    missing = pieces - _pieces_of(module)
    if _NOTES in missing:
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_note_output, prepend=True)
    if _WALK in missing:
        module.register_forward_hook(_walk, prepend=True)
    if _FORWARD in missing:
        _set_forward(module, partial(activation_forward, module))


def _set_forward(module: nn.Module, forward: partial[Any], wrapped: Any = None) -> None:
    """Set a forward of the instance, which has the signature of what it stands for."""
    with suppress(TypeError, ValueError):  # of what has none
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    if wrapped is not None:
        forward.__wrapped__ = wrapped  # type: ignore[attr-defined]
    vars(module)["forward"] = forward


def _is_ours(forward: Any, function: Callable[..., Any]) -> bool:
    return isinstance(forward, partial) and forward.func is function


def detach(model: nn.Module) -> None:
    """Undo `attach`, in the model and in all of its parts."""
    for module in _unscripted(model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
                del hooks[key]
        own: Any = vars(module).get("forward")
        if _is_ours(own, activation_forward) or _is_ours(own, _instance_forward):
            del vars(module)["forward"]
            if own.func is _instance_forward and own.args[1] is not None:
                vars(module)["forward"] = own.args[1]
        original = vars(type(module)).get(_ORIGINAL)
        if original is not None:
            module.__class__ = original
        # Where the class was changed since, as by FSDP2, ours runs the original's forward.
        vars(module).pop(_STATE, None)


@contextmanager
def detached(model: nn.Module) -> Iterator[None]:
    """Undo `attach` within a `with` block, and redo it at its end."""
    before = _Attached(model)
    detach(model)
    try:
        yield
    finally:
        before.attach()


# Classes that PyTorch makes for an instance and changes or takes apart itself.
_MADE_FOR_AN_INSTANCE = (
    "torch.fx.",
    "torch.nn.utils.parametrize",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
)
_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _converted_class(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the subclass of `cls` that runs its forward with the engine on; None if impossible."""
    known = _classes.get(cls)
    converted = known() if known is not None else None
    if converted is None:
        if cls.__module__.startswith(_MADE_FOR_AN_INSTANCE):
            return None
        if not inspect.isfunction(inspect.getattr_static(cls, "forward")):
            return None  # a static method, a property, ...
        try:
            converted = _new_class(cls)
        except Exception:  # of a metaclass, or for want of a compatible layout
            return None
        _classes[cls] = weakref.ref(converted)
    return converted


def _new_class(cls: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return _run(self, partial(cls.forward, self), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """As an instance of the original class, which is converted anew."""
        if type(self) is not converted:
            return cls.__reduce_ex__(self, protocol)
        self.__class__ = cls
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = converted
        if isinstance(reduced, str) or len(reduced) < 3 or _STATE not in (reduced[2] or ()):
            return reduced  # by a method of the class, without what attribute there is
        build, args, *rest = reduced
        return _rebuilt, (build, args), *rest

    def raise_on_script(self: nn.Module) -> nn.Module:
        if conversion_of(self) is None:
            return self
        raise RuntimeError(
            "torch.jit.script cannot compile a converted model: script it within "
            "`with inplace_ops.reverted(model):`, or call inplace_ops.revert(model) before"
        )

    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"forward": forward, "__reduce_ex__": reduce, "__prepare_scriptable__": raise_on_script}
    body |= {_ORIGINAL: cls}
    # Under its base at once it would be announced to `__init_subclass__`, as of registries.
    metaclass: Any = type(cls)
    converted: type[nn.Module] = metaclass(cls.__name__, (nn.Module,), body)
    converted.__bases__ = (cls,)
    return converted


def _rebuilt(build: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """Return an instance of a converted class, whose state follows."""
    model = build(*args)
    converted = _converted_class(type(model))
    if converted is not None:
        model.__class__ = converted
    return model


def _instance_forward(
    model: nn.Module, forward: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a model whose class stays: what it was set to, or its class's."""
    return _run(model, forward or partial(type(model).forward, model), *args, **kwargs)


def _run(model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a model that is converted, or was when its forward was set."""
    conversion = None if torch.compiler.is_compiling() else conversion_of(model)
    if conversion is None:
        return forward(*args, **kwargs)
    return conversion.run(model, forward, *args, **kwargs)


def _enter(module: nn.Module, args: Any) -> None:
    """The forward pre-hook of norms and the like."""
    engine = running_engine()
    if engine is not None:
        engine.enter_norm(module)


def _note_output(module: nn.Module, args: Any, output: Any) -> None:
    """The forward hook of norms and the like."""
    engine = running_engine()
    if engine is not None:
        engine.walk(output)
        engine.note_output(module, output, _comes_first(module))


def _comes_first(module: nn.Module) -> bool:
    """Whether ours is the first of the forward hooks."""
    if torch.nn.modules.module._global_forward_hooks:
        return False
    return next(iter(module._forward_hooks.values()), None) is _note_output


def _walk(module: nn.Module, args: Any, output: Any) -> None:
    """The forward hook of all other modules, before torch 2.14."""
    engine = running_engine()
    if engine is not None:
        engine.walk(output)


_HOOKS = (_enter, _note_output, _walk)
