"""One run of a model with its activations out of place, and what became of each storage in it."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .. import _ops
from ..memory import unwrapped
from .run import Example, patched, reentrant_checkpoints_as_the_others, tensors_in
from .sites import Place, intercepted

# They look at a tensor's shape and not at its values.
_READ_NO_VALUES = frozenset(
    f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
) | {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "_unsafe_view"}

# What reads a tensor's values, or takes its place in the graph, without an operation.
_READ_WITHOUT_AN_OPERATION: Mapping[Callable[..., Any], str] = {
    torch.autograd.grad: "autograd.grad",
    **{
        getattr(Tensor, name): name
        for name in (
            "register_hook",
            "retain_grad",
            "tolist",
            "__repr__",
            "numpy",
            "__array__",
            "__dlpack__",
            "data_ptr",
        )
    },
}

# Of these, what hands the memory out, to be read at any time.
_HANDED_OUT = frozenset({"numpy", "__array__", "__dlpack__"})

_CANNOT_BE_FOLLOWED = {
    "support saved tensor hooks": "a gradient transform of torch.func",
    "no rule registered for HigherOrderOperator": "a higher-order operator, such as torch.cond,",
}

_FUNCTIONS = {
    name: kind
    for kind, names in {
        "ReLU": ("relu", "relu_"),
        "LeakyReLU": ("leaky_relu", "leaky_relu_"),
        "SiLU": ("silu", "silu_"),
    }.items()
    for name in names
}


@dataclass(frozen=True)
class Event:
    """An operation, or the call of an activation module, that reads a storage or writes to it."""

    time: int
    name: str
    writes: bool
    call: Call | None = None


class _Kept:
    """What the graph holds for a saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


@dataclass
class Save:
    """That a storage was saved for backward.

    Attributes:
        time: When.
        node: The number of the autograd node that saved it.
        call: The activation's call that it was part of.
        is_held: Whether the graph still holds it when forward has ended.
        kept: What the graph holds, where the storage went to the tracer's own hooks.
    """

    time: int
    node: int
    call: Call | None
    is_held: bool = True
    kept: weakref.ref[_Kept] | None = None


@dataclass(eq=False)
class Call:
    """One call of an activation module, and its input as it was then.

    Attributes:
        place: Where the module is held.
        time: When.
        input: The input's storage.
        output: The output's storage, another one: the activations run out of place.
        elements: The input's number of elements.
        dtype: The input's.
        device: The input's.
        needs_grad: Whether a gradient flows through the call.
        detaches: Whether the input requires grad and the output does not, as under `no_grad`.
        is_leaf: Whether the input is a leaf.
        refused_view: What kind of view the input is, if autograd does not let it be modified.
        overlaps: Whether elements of the input may share memory.
        has_kernel: Whether there is one for its device and dtype.
        keeps_layout: Whether the output out of place has the input's strides.
    """

    place: Place
    time: int
    input: int
    output: int
    elements: int
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool
    detaches: bool
    is_leaf: bool
    refused_view: str
    overlaps: bool
    has_kernel: bool
    keeps_layout: bool = True


@dataclass
class FunctionCall:
    """An activation called as a function: it is reported, not replaced."""

    name: str
    activation: str
    line: str
    nodes: set[int] = field(default_factory=set)


@dataclass
class Trace:
    """What happened in one run. Storages are numbers that no two of them share.

    Attributes:
        calls: Of the activation modules, in time.
        events: By storage, in time.
        saves: By storage, in time.
        owners: The storages that were there before, and what they are.
        nbytes: The size of each storage.
        alive: The inputs of calls that are still there after forward.
        handed_out: The storages whose memory was given to something else than PyTorch.
        returned: The storages that the model returns.
        node_names: The operations by the numbers of their autograd nodes.
        functions: The activations called as functions, by name and line.
        not_followed: The places whose calls cannot be judged, and why.
    """

    calls: list[Call] = field(default_factory=list)
    events: defaultdict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    saves: defaultdict[int, list[Save]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[int, str] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    handed_out: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    node_names: dict[int, str] = field(default_factory=dict)
    functions: dict[tuple[str, str], FunctionCall] = field(default_factory=dict)
    not_followed: dict[Place, str] = field(default_factory=dict)

    def saver(self, save: Save) -> str:
        """The name of what saved it."""
        if save.call is not None:
            return save.call.place.name
        return self.node_names.get(save.node, "an autograd Function")


def trace(model: nn.Module, places: list[Place], example: Example) -> Trace:
    """Call the model on the example once, the activations in `places` out of place.

    Every storage is told apart by a weak reference, which outlives it: the address of one that is
    gone is not taken for it.
    """
    return _Tracer(model).trace(places, example)


class _Tracer(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.stack = [""]
        self.clock = itertools.count()
        self.result = Trace()
        self.storages: dict[int, StorageWeakRef] = {}
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.call: Call | None = None
        self.is_in_activation = False

    def trace(self, places: list[Place], example: Example) -> Trace:
        trace = self.result
        owners: list[tuple[str, Tensor]] = []
        owners += [(f"the model's parameter `{n}`", p) for n, p in self.model.named_parameters()]
        owners += [(f"the model's buffer `{n}`", b) for n, b in self.model.named_buffers()]
        owners += [("an argument of the model", a) for a in example.tensors()]
        for owner, tensor in owners:
            for storage in self.storages_of([tensor]):
                trace.owners.setdefault(storage, owner)

        # The modules that stand in are held until the end: their hooks may keep tensors on them.
        with intercepted(places, self.activation):
            output = self.run(example)
            self.note_what_is_left(output)
        return trace

    def run(self, example: Example) -> Any:
        with ExitStack() as stack:
            stack.enter_context(reentrant_checkpoints_as_the_others())
            stack.enter_context(_seen_through_other_hooks(self.record_save))
            stack.enter_context(_OwnHooks(self.pack, _unpack))
            stack.enter_context(self.module_paths())
            stack.enter_context(_ReadsWithoutAnOperation(self.record_read))
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

    def note_what_is_left(self, output: Any) -> None:
        trace = self.result
        for save in itertools.chain.from_iterable(trace.saves.values()):
            if save.kept is not None:
                save.is_held = save.kept() is not None
        # From here on the graph holds nothing: a storage that is still there escapes.
        for kept in list(self.kept):
            kept.tensor = None
        trace.returned = set(self.storages_of(tensors_in(output)))
        inputs = {call.input for call in trace.calls}
        if not all(self.storages[storage].expired() for storage in inputs):
            gc.collect()
        trace.alive = {storage for storage in inputs if not self.storages[storage].expired()}

    def storages_of(self, tensors: Iterable[Tensor]) -> Iterator[int]:
        for tensor in itertools.chain.from_iterable(map(unwrapped, tensors)):
            if torch._C._has_storage(tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.storages.setdefault(reference.cdata, reference)
                self.result.nbytes[reference.cdata] = storage.nbytes()
                yield reference.cdata

    @contextmanager
    def module_paths(self) -> Iterator[None]:
        def enter(module: nn.Module, inputs: Any) -> None:
            self.stack.append(self.paths.get(module, self.stack[-1]))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.stack.pop()

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
        self.kept.add(kept)
        self.record_save(tensor, kept=weakref.ref(kept))
        return kept

    def record_save(
        self, tensor: Tensor, is_held: bool = True, kept: weakref.ref[_Kept] | None = None
    ) -> None:
        # A node takes its number before it saves its first tensor.
        node = torch._C._autograd._get_sequence_nr()
        for storage in self.storages_of([tensor]):
            save = Save(next(self.clock), node, self.call, is_held, kept)
            self.result.saves[storage].append(save)

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
        if self.call is None and not func.is_view and func._opname not in _READ_NO_VALUES:
            self.record_operation(func, args, kwargs, time)
        return result

    def record_read(self, name: str, arguments: Any) -> None:
        event = Event(next(self.clock), self.named(name), False)
        for storage in set(self.storages_of(_tensors(arguments))):
            self.result.events[storage].append(event)
            if name in _HANDED_OUT:
                self.result.handed_out.add(storage)

    def record_operation(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], time: int
    ) -> None:
        name = self.named(func._opname)
        used: dict[int, bool] = {}
        for i, parameter in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(parameter.name)
            is_written = parameter.alias_info is not None and parameter.alias_info.is_write
            for storage in self.storages_of(_tensors(value)):
                used[storage] = used.get(storage, False) or is_written
        for storage, is_written in used.items():
            self.result.events[storage].append(Event(time, name, is_written))
        if not used:
            return
        node = torch._C._autograd._get_sequence_nr()
        self.result.node_names.setdefault(node, name)
        if func._opname in _FUNCTIONS and not self.is_in_activation:
            line = _line_of_the_model()
            function = FunctionCall(name, _FUNCTIONS[func._opname], line)
            self.result.functions.setdefault((name, line), function).nodes.add(node)

    def activation(self, place: Place, *args: Any, **kwargs: Any) -> Any:
        objection = self.not_to_be_followed(args, kwargs)
        if objection is not None:
            self.result.not_followed[place] = objection
            self.is_in_activation = True
            try:
                return type(place.original).forward(place.original, *args, **kwargs)
            finally:
                self.is_in_activation = False
        (x,) = args
        (input,) = self.storages_of([x])
        self.call = call = Call(
            place,
            next(self.clock),
            input,
            input,
            elements=x.numel(),
            dtype=x.dtype,
            device=x.device,
            needs_grad=x.requires_grad and torch.is_grad_enabled(),
            detaches=x.requires_grad and not torch.is_grad_enabled(),
            is_leaf=x.is_leaf and not x._is_view(),
            refused_view=_refused_view(x),
            overlaps=_may_overlap(x),
            has_kernel=_has_kernel(x),
        )
        try:
            with _OwnHooks(self.pack, _unpack):
                result = place.activation.function(x)
        finally:
            self.call = None
        (call.output,) = self.storages_of([result])
        call.keeps_layout = _strides(result) == _strides(x)
        self.result.calls.append(call)
        self.result.events[input].append(Event(call.time, place.name, False, call))
        return result

    def not_to_be_followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self.call is not None or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return "called otherwise than with one tensor"
        (x,) = args
        if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_nested:
            return "called with a sparse or nested tensor, or another subclass of Tensor"
        if not torch._C._has_storage(x):
            return "called inside a transform of torch.func"
        return None


class _ReadsWithoutAnOperation(TorchFunctionMode):
    """Reports to `record` the calls that read a tensor and that the dispatcher does not see."""

    def __init__(self, record: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = _READ_WITHOUT_AN_OPERATION.get(func)
        if name is not None:
            self.record(name, (args, kwargs))
        return func(*args, **(kwargs or {}))


class _OwnHooks(saved_tensors_hooks):
    """Hooks that are not reported as the model's."""

    __enter__ = saved_tensors_hooks.__enter__


def _unpack(kept: _Kept) -> Tensor:
    if kept.tensor is None:
        raise RuntimeError("a graph of the run that convert analysed is used after it")
    return kept.tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _has_kernel(x: Tensor) -> bool:
    devices = ("cpu", "cuda") if _ops.cuda_version else ("cpu",)
    return x.device.type in devices and x.dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )


def _refused_view(x: Tensor) -> str:
    """Why autograd does not let the view x be modified; empty where it does, or x is no view."""
    if not x._is_view():
        return ""
    base = x._base
    if base is not None and base.is_leaf and base.requires_grad:
        return "a view of a leaf that requires grad"
    meta = torch._C._autograd.CreationMeta
    return {
        meta.DEFAULT: "",
        meta.IN_CUSTOM_FUNCTION: "a view made by an autograd Function, as a module's backward hook",
        meta.MULTI_OUTPUT_NODE: "one of several views made at once, as by `chunk` or `split`",
        meta.NO_GRAD_MODE: "a view made under no_grad",
    }.get(torch._C._autograd._get_creation_meta(x), "a view made in inference mode")


def _may_overlap(x: Tensor) -> bool:
    """Whether two elements of x may share memory: always told where they do."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return x.numel() > 0
            reach += stride * (size - 1)
    return False


def _strides(x: Tensor) -> list[int]:
    """The strides that have a meaning."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _line_of_the_model() -> str:
    """File and line of the innermost caller outside of torch and of this package."""
    outside = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, _ops.__file__))
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(outside) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def _seen_through_other_hooks(record: Callable[[Tensor, bool], None]) -> Iterator[None]:
    """Report to `record` what goes to saved-tensor hooks that the model itself enters.

    Only the innermost hooks are called: those of a checkpoint would hide what it saves when it
    runs again, and holds then. Other hooks keep what they make of the tensor, not the tensor.
    """
    enter = saved_tensors_hooks.__enter__

    def enter_and_record(hooks: saved_tensors_hooks) -> None:
        pack = hooks.pack_hook
        is_checkpoint = type(hooks).__module__ == checkpoint.__module__

        @functools.wraps(pack)
        def record_and_pack(tensor: Tensor) -> Any:
            record(tensor, is_checkpoint)
            return pack(tensor)

        hooks.pack_hook = record_and_pack
        try:
            enter(hooks)
        finally:
            hooks.pack_hook = pack

    with patched(saved_tensors_hooks, "__enter__", enter_and_record):
        yield
