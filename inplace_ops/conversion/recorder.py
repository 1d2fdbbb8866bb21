"""Runs a model with its activations out of place, and records what becomes of each storage."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks

from .. import _ops
from .._ops import maps_dtype
from .._torch import (
    OpOverload,
    TorchDispatchMode,
    has_storage,
    next_node_number,
    op_parameters,
)
from ..activations import ACTIVATIONS
from ..memory import is_plain, unwrapped
from ..normalization import norm_of, source_of
from .interception import HANDED_OUT, OwnHooks, ReadsWithoutAnOperation, seen_through_other_hooks
from .recording import NORMS, Call, Event, FunctionCall, NormCall, Recording, SavedTensor
from .run import Example, reentrant_checkpoints_as_the_others
from .slots import Slot, intercepted
from .tensors import has_kernel, may_overlap, refused_view, strides, tensors_in, tensors_passed

# They look at a tensor's shape and not at its values.
_READ_NO_VALUES = frozenset(
    f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
) | {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "_unsafe_view"}

_CANNOT_BE_FOLLOWED = {
    "support saved tensor hooks": "a gradient transform of torch.func",
    "no rule registered for HigherOrderOperator": "a higher-order operator, such as torch.cond,",
}


_FUNCTIONS = {name: activation for activation in ACTIVATIONS for name in activation.operations}


def record(model: nn.Module, slots: list[Slot], example: Example) -> Recording:
    """Call the model on the example once, the activations in `slots` out of place.

    Every storage is told apart by a weak reference, which outlives it: the address of one that is
    gone is not taken for it.
    """
    return _Recorder(model).record(slots, example)


class _Kept:
    """What the graph holds for a saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.stack = [""]
        self.modules = [model]
        self.clock = itertools.count()
        self.recording = Recording()
        self.storages: dict[int, StorageWeakRef] = {}
        self.kept: list[tuple[weakref.ref[_Kept], list[SavedTensor]]] = []
        self.call: Call | None = None
        self.is_in_activation = False

    def record(self, slots: list[Slot], example: Example) -> Recording:
        owners: list[tuple[str, Tensor]] = []
        owners += [(f"the model's parameter `{n}`", p) for n, p in self.model.named_parameters()]
        owners += [(f"the model's buffer `{n}`", b) for n, b in self.model.named_buffers()]
        owners += [("an argument of the model", a) for a in example.tensors()]
        for owner, tensor in owners:
            for storage in self.storages_of([tensor]):
                self.recording.owners.setdefault(storage, owner)

        # The modules that stand in are held until the end: their hooks may keep tensors on them.
        with intercepted(slots, self.activation):
            output = self.run(example)
            self.record_what_is_left(output)
        return self.recording

    def run(self, example: Example) -> Any:
        with ExitStack() as stack:
            stack.enter_context(reentrant_checkpoints_as_the_others())
            stack.enter_context(seen_through_other_hooks(self.record_saved))
            stack.enter_context(OwnHooks(self.pack, _unpack))
            stack.enter_context(self.module_paths())
            stack.enter_context(ReadsWithoutAnOperation(self.record_read))
            stack.enter_context(self)
            try:
                return example.call(self.model)
            except RuntimeError as error:
                for symptom, cause in _CANNOT_BE_FOLLOWED.items():
                    if symptom in str(error):
                        raise RuntimeError(
                            f"convert and analyze cannot follow a model that calls {cause} in its "
                            "forward: PyTorch does not let them see what happens inside"
                        ) from error
                raise

    def record_what_is_left(self, output: Any) -> None:
        """Drop what the graph holds. Inputs that are still alive have escaped."""
        for reference, saved in self.kept:
            for tensor in saved:
                tensor.is_held = reference() is not None
        for reference, _ in self.kept:
            kept = reference()
            if kept is not None:
                kept.tensor = None
        self.recording.returned = set(self.storages_of(tensors_in(output)))
        inputs = {call.input for call in self.recording.calls}
        outputs = {call.output for call in self.recording.calls}
        outputs |= {norm.output for norm in self.recording.norms}
        not_returned = (inputs | outputs) - self.recording.returned
        if not all(self.storages[storage].expired() for storage in not_returned):
            gc.collect()
        self.recording.alive = {s for s in inputs if not self.storages[s].expired()}
        self.recording.alive_outputs = {s for s in outputs if not self.storages[s].expired()}

    def storages_of(self, tensors: Iterable[Tensor]) -> Iterator[int]:
        for tensor in itertools.chain.from_iterable(map(unwrapped, tensors)):
            if has_storage(tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.storages.setdefault(reference.cdata, reference)
                self.recording.nbytes[reference.cdata] = storage.nbytes()
                yield reference.cdata

    @contextmanager
    def module_paths(self) -> Iterator[None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            self.stack.append(self.paths.get(module, self.stack[-1]))
            self.modules.append(module)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.stack.pop()
            self.modules.pop()

        handles = [
            module_hooks.register_module_forward_pre_hook(enter),
            module_hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def named(self, operation: str) -> str:
        return f"{self.stack[-1]}.{operation}".lstrip(".")

    # What the three sources report: autograd, the dispatcher, the activation modules.

    def pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor.detach())  # without the graph, which would hold itself
        self.kept.append((weakref.ref(kept), self.record_saved(tensor)))
        return kept

    def record_saved(self, tensor: Tensor, is_held: bool = True) -> list[SavedTensor]:
        # A node takes its number before it saves its first tensor.
        node = next_node_number()
        # Not what the model calls without holding it: nothing finds its hooks again.
        reader = self.modules[-1] if self.modules[-1] in self.paths else None
        found = []
        for storage in self.storages_of([tensor]):
            saved = SavedTensor(next(self.clock), node, self.call, is_held, reader)
            self.recording.saved[storage].append(saved)
            found.append(saved)
        return found

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        time = next(self.clock)
        result = func(*args, **kwargs)
        if self.call is None and not func.is_view:
            self.record_operation(func, args, kwargs, time)
            if func.overloadpacket.__name__ in NORMS and not result[0].is_nested:
                (output,) = self.storages_of(result[:1])
                kind, maps = type(self.modules[-1]).__name__, _bytes_of_maps(func, *result[:2])
                norm = NormCall(
                    self.stack[-1], kind, time, output, maps, _layout_is_known(func, args)
                )
                self.recording.norms.append(norm)
        return result

    def record_read(self, name: str, arguments: Any) -> None:
        event = Event(next(self.clock), self.named(name), False)
        for storage in set(self.storages_of(tensors_passed(arguments))):
            self.recording.events[storage].append(event)
            if name in HANDED_OUT:
                self.recording.handed_out.add(storage)

    def record_operation(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], time: int
    ) -> None:
        operation = func.overloadpacket.__name__
        if operation in _READ_NO_VALUES:
            return
        name = self.named(operation)
        used: dict[int, bool] = {}
        for i, parameter in enumerate(op_parameters(func)):
            value = args[i] if i < len(args) else kwargs.get(parameter.name)
            is_written = parameter.alias_info is not None and parameter.alias_info.is_write
            for storage in self.storages_of(tensors_passed(value)):
                used[storage] = used.get(storage, False) or is_written
        for storage, is_written in used.items():
            self.recording.events[storage].append(Event(time, name, is_written))
        if not used:
            return
        node = next_node_number()
        self.recording.node_names.setdefault(node, name)
        activation = _FUNCTIONS.get(operation)
        if (
            activation is not None
            and activation.is_call(args)
            and func.namespace == "aten"
            and not self.is_in_activation
        ):
            line = _line_of_the_model()
            function = FunctionCall(name, activation.name, line)
            self.recording.functions.setdefault((name, line), function).nodes.add(node)

    def activation(self, slot: Slot, *args: Any, **kwargs: Any) -> Any:
        objection = self.not_to_be_followed(args, kwargs)
        if objection is not None:
            self.recording.not_followed[slot] = objection
            self.is_in_activation = True
            try:
                return type(slot.original).forward(slot.original, *args, **kwargs)
            finally:
                self.is_in_activation = False
        (x,) = args
        (input,) = self.storages_of([x])
        self.call = call = Call(
            slot,
            next(self.clock),
            input,
            input,
            elements=x.numel(),
            dtype=x.dtype,
            device=x.device,
            needs_grad=x.requires_grad and torch.is_grad_enabled(),
            detaches=x.requires_grad and not torch.is_grad_enabled(),
            is_leaf=x.is_leaf and not x._is_view(),
            refused_view=refused_view(x),
            overlaps=may_overlap(x),
            has_kernel=has_kernel(x),
            after_norm=_follows_from_norm(x),
        )
        try:
            with OwnHooks(self.pack, _unpack):
                result = slot.recognised.function(x)
        finally:
            self.call = None
        (call.output,) = self.storages_of([result])
        call.keeps_layout = strides(result) == strides(x)
        self.recording.calls.append(call)
        self.recording.events[input].append(Event(call.time, slot.name, False, call))
        return result

    def not_to_be_followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self.call is not None or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return "called otherwise than with one tensor"
        (x,) = args
        if not is_plain(x):
            return "called with a sparse or nested tensor, or another subclass of Tensor"
        if not has_storage(x):
            return "called inside a transform of torch.func"
        return None


def _layout_is_known(norm: OpOverload, args: tuple[Any, ...]) -> bool:
    name = norm.overloadpacket.__name__
    return name == "native_layer_norm" or _ops.is_in_a_memory_format(args[0])


def _bytes_of_maps(norm: OpOverload, output: Tensor, means: Tensor) -> int:
    match norm.overloadpacket.__name__:
        case "native_layer_norm":
            values = means.numel() + output.numel() // max(means.numel(), 1)
        case "native_group_norm":
            values = output.size(0) * output.size(1)
        case _:
            values = output.size(1)
    return 2 * values * maps_dtype(output).itemsize


def _follows_from_norm(x: Tensor) -> bool:
    norm = norm_of(x)
    return norm is not None and source_of(norm, harmless=_unpack) is not None


def _unpack(kept: _Kept) -> Tensor:
    if kept.tensor is None:
        raise RuntimeError("a graph of the run that convert analysed is used after it")
    return kept.tensor


def _line_of_the_model() -> str:
    """File and line of the innermost caller outside of torch and of this package."""
    outside = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, _ops.__file__))
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(outside) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
