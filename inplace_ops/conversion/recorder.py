"""Runs a model with its activations out of place, and records what becomes of each storage."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks

from .._ops import maps_dtype
from .._torch import (
    OpOverload,
    TorchDispatchMode,
    has_storage,
    next_node_number,
    op_parameters,
    running_node,
)
from ..memory import is_plain, unwrapped
from ..normalization import norm_of, source_of
from .frames import call_site, is_called_by_autograd, is_in_a_transform, line_that_calls
from .functions import OtherKinds, function_called
from .interception import HANDED_OUT, OwnHooks, ReadsWithoutAnOperation, seen_through_other_hooks
from .recognise import recognise_class
from .recording import NORMS, Call, Event, Line, NormCall, Recording, SavedTensor
from .run import Example, reentrant_checkpoints_as_the_others
from .slots import Slot, intercepted
from .tensors import has_kernel, may_overlap, refused_view, strides, tensors_in, tensors_passed

# They look at a tensor's shape and not at its values.
_READ_NO_VALUES = frozenset(
    f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
) | {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "_unsafe_view"}

_OTHER_THREAD = 2**32  # above the numbers of the model's own thread

_CANNOT_BE_FOLLOWED = {
    "support saved tensor hooks": "a gradient transform of torch.func",
    "no rule registered for HigherOrderOperator": "a higher-order operator, such as torch.cond,",
}


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
        self.thread = threading.get_ident()
        self.paths = {module: path for path, module in model.named_modules()}
        self.stack = [""]
        self.modules = [model]
        self.functions: dict[int, Call] = {}  # by node
        self.differentiated: dict[int, Call] = {}  # by the node of their second derivative
        self.other_kinds = OtherKinds()
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
            stack.enter_context(seen_through_other_hooks(self.record_saved_elsewhere))
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
        saved = [(s, tensor) for s, tensors in self.recording.saved.items() for tensor in tensors]
        for storage, tensor in sorted(saved, key=lambda pair: pair[1].time):
            differentiated = self.differentiated.get(tensor.node)
            if differentiated is not None and storage in differentiated.storages:
                tensor.call = differentiated
                differentiated.is_differentiated_twice = True
            elif tensor.call is None:
                # A function saves one tensor; what comes later has no node of its own.
                tensor.call = self.functions.pop(tensor.node, None)
        is_held: dict[Call, bool] = {}
        for reference, tensors in self.kept:
            for tensor in tensors:
                tensor.is_held = reference() is not None
                if tensor.call is not None:
                    is_held[tensor.call] = tensor.is_held or is_held.get(tensor.call, False)
        for call, value in is_held.items():
            call.is_held = value
        self.recording.other_kinds = self.other_kinds.found
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
        # The hooks are everybody's: what runs in other threads is not this model.
        def enter(module: nn.Module, inputs: Any) -> None:
            if threading.get_ident() == self.thread:
                self.stack.append(self.paths.get(module, self.stack[-1]))
                self.modules.append(module)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() == self.thread:
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

    def record_saved_elsewhere(self, tensor: Tensor, is_held: bool) -> None:
        if threading.get_ident() == self.thread:
            self.record_saved(tensor, is_held)

    def record_saved(self, tensor: Tensor, is_held: bool = True) -> list[SavedTensor]:
        # A node takes its number before it saves its first tensor.
        node = self.next_node()
        # Not what the model calls without holding it: nothing finds its hooks again.
        reader = self.modules[-1] if self.modules[-1] in self.paths else None
        found = []
        for storage in self.storages_of([tensor]):
            saved = SavedTensor(next(self.clock), node, self.call, is_held, reader)
            self.recording.saved[storage].append(saved)
            found.append(saved)
        return found

    def next_node(self) -> int:
        """The number that autograd's next node takes, of those of all threads.

        Each thread counts its own. A forward that differentiates has autograd make nodes on another
        one, where it is on a GPU.
        """
        number = next_node_number()
        return number if threading.get_ident() == self.thread else _OTHER_THREAD + number

    def call_in_backward(self) -> Call | None:
        """The call of an activation whose own backward runs, inside of forward."""
        node = running_node()
        if node is None or not is_called_by_autograd():
            return None
        numbers = range(node._sequence_nr(), 2 * _OTHER_THREAD, _OTHER_THREAD)  # made by any thread
        calls = self.recording.calls
        return next((c for c in calls if any(number in c.nodes for number in numbers)), None)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        time = next(self.clock)
        if self.call is not None or func.is_view:
            return func(*args, **kwargs)
        call = self.function(func, args, kwargs, time)
        result = func(*args, **kwargs)
        self.record_operation(func, args, kwargs, result, time, call)
        if func.overloadpacket.__name__ in NORMS and not result[0].is_nested:
            (output,) = self.storages_of(result[:1])
            kind, maps = type(self.modules[-1]).__name__, _bytes_of_maps(func, *result[:2])
            norm = NormCall(self.stack[-1], kind, time, output, maps)
            self.recording.norms.append(norm)
        return result

    def record_read(self, name: str, arguments: Any) -> None:
        event = Event(next(self.clock), self.named(name), False)
        for storage in set(self.storages_of(tensors_passed(arguments))):
            self.recording.events[storage].append(event)
            if name in HANDED_OUT:
                self.recording.handed_out.add(storage)

    def record_operation(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        time: int,
        call: Call | None,
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
        differentiated = self.call_in_backward()
        for storage, is_written in used.items():
            # What an activation's own backward reads is what it has kept.
            if differentiated is None or storage not in differentiated.storages or is_written:
                self.recording.events[storage].append(Event(time, name, is_written, call))
        if not used:
            return
        node = self.next_node()
        self.recording.node_names.setdefault(node, name)
        if differentiated is not None and torch.is_grad_enabled():
            self.differentiated[node] = differentiated
        if call is not None:
            (call.output,) = self.storages_of([result])
            call.keeps_layout = strides(result) == strides(args[0])
            self.recording.calls.append(call)
            if call.needs_grad:
                call.nodes = range(node - 1, node)
                self.functions[node] = call
        elif not self.is_in_activation and running_node() is None:
            self.other_kinds.see(operation, args, result, node)

    def function(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], time: int
    ) -> Call | None:
        """The call of an activation that the operation is going to be, if it is one."""
        function = None if self.is_in_activation else function_called(func, args, kwargs)
        if function is None:
            return None
        x = args[0]
        module = self.modules[-1] if self.is_activation(self.modules[-1]) else None
        location, is_torchs = line_that_calls()
        line = Line(location, is_torchs, *function, module)
        if not is_plain(x) or not has_storage(x):
            self.recording.not_followed[line] = "called with another kind of tensor"
            return None
        if is_in_a_transform():
            self.recording.not_followed[line] = "called inside a transform of torch.func"
        return self.call_on(x, line, self.named(func.overloadpacket.__name__), time)

    def is_activation(self, module: nn.Module) -> bool:
        """Whether the model holds it as one, though in no slot."""
        is_torchs = type(module).__module__ == nn.SiLU.__module__
        return module in self.paths and (is_torchs or recognise_class(module) is not None)

    def call_on(self, x: Tensor, place: Slot | Line, name: str, time: int) -> Call:
        (input,) = self.storages_of([x])
        return Call(
            place,
            name,
            time,
            input,
            input,
            elements=x.numel(),
            shape=tuple(x.shape),
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
        self.call = call = self.call_on(x, slot, slot.name, next(self.clock))
        call.site, (call.line, _) = call_site(), line_that_calls()
        first_node = self.next_node()
        try:
            with OwnHooks(self.pack, _unpack):
                result = slot.recognised.function(x)
        finally:
            self.call = None
        call.nodes = range(first_node, self.next_node())
        (call.output,) = self.storages_of([result])
        call.keeps_layout = strides(result) == strides(x)
        self.recording.calls.append(call)
        self.recording.events[call.input].append(Event(call.time, slot.name, False, call))
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
