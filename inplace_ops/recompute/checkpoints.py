"""Checkpoints of blocks, whose recomputation saves as little as the converted model does.

NOTE [Checkpoints of blocks]

A block that is checkpointed saves its arguments, and runs again in backward. PyTorch's checkpoint
then keeps all that the block saves, which is often more than the whole converted model keeps: it
raises the peak. In this checkpoint the engine runs while the block runs again, and replaces saved
tensors as it does in forward.

1. In forward each node of the block saves a `_Slot` instead of a tensor. The engine is paused: what
   it would replace is not saved.
2. The first slot that backward unpacks runs the block again, with an engine of its own, and fills
   all slots. A slot gives its tensor away when it is unpacked, and finds it again while a node uses
   it. A second backward over a retained graph runs the block once more.
3. The block must do the same again. So activations do not run together with norms in either run,
   and the second one has the attributes of the block's modules, the random state of PyTorch, the
   autocast and the flags of products (TF32) of the first. Attributes are put back afterwards. Both
   runs must save tensors of the same shapes and dtypes, in the same order, or backward raises.
   Threads that draw random numbers at the same time disturb each other, as they do in PyTorch's
   checkpoint.
4. Arguments, parameters and buffers must be unmodified. Their versions are compared, and the
   optimizers' steps: see NOTE [Weights are proved] in `weights.py`, also for writes that are not
   seen.
5. The second run ends when the last tensor that backward needs is saved: the product that reads it
   is not computed. An exception, `Ended`, leaves the block.
6. `conversion/blocks.py` chooses blocks that change nothing when they run twice.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch_private import (
    NO_PASS,
    call_after_pass,
    product_flags,
    running_pass,
    saved_tensor_hooks_are_disabled,
    tree_leaves,
    tree_map,
    under_product_flags,
)
from ..memory import Measured, unpack_measured, written_to_error
from .inside_modules import is_user_mode_active
from .nodes import is_transformed
from .run import run_engine, running_engine
from .settings import Settings
from .tensors import WeakMemory, has_storage, is_plain
from .weights import Weight

_DEVICES = ("cpu", "cuda")  # whose random states are kept


class Calls(threading.local):
    """A counter of each thread's own calls."""

    count = 0


class Checkpoint:
    """What makes a block a checkpointed one: an attribute of the block, as `Conversion` of a model.

    Attributes:
        settings: The state that all recomputations of the block share.
        modes: The training flags of its modules for which it was checked that it may run twice.
        calls: Counts the calls of `run` in this thread.
    """

    def __init__(self, settings: Settings, modes: tuple[bool, ...]) -> None:
        self.settings, self.modes, self.calls = settings, modes, Calls()

    def run(
        self, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run the block's forward, and save its arguments alone."""
        self.calls.count += 1
        if not self._applies(block, (args, kwargs)):
            return forward(*args, **kwargs)
        call = _Call(block, forward, (args, kwargs), self.settings)
        engine = running_engine()
        with ExitStack() as stack:
            if engine is not None:
                stack.enter_context(engine.paused((args, kwargs)))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack))
            output = forward(*args, **kwargs)
            if engine is not None:
                engine.walk(output)
        call.finish_forward()
        return output

    def _applies(self, block: nn.Module, arguments: Any) -> bool:
        if not torch.is_grad_enabled() or is_transformed() or saved_tensor_hooks_are_disabled():
            return False
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if any(t.device.type not in _DEVICES or t.is_inference() for t in tensors):
            return False
        if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
            return False
        if is_user_mode_active():  # it may change what functions compute, and is gone in backward
            return False
        if any(map(is_sharded, block.children())):
            self._warn(block, "FSDP frees the parameters of modules inside: shard whole blocks")
            return False
        if modes_of(block) == self.modes:
            return True
        if block.training:
            self._warn(
                block,
                "the training flags of its modules are not those that convert has measured: call "
                "convert in the mode in which the model trains",
            )
        return False

    def _warn(self, block: nn.Module, why: str) -> None:
        name = type(block).__name__
        self.settings.warn(why, f"a {name} is not checkpointed, because {why}")

    def __reduce__(self) -> Any:
        """Make copies and pickles start with the same `max_ops`."""
        return _new_checkpoint, (self.settings.max_ops, self.modes)


def _new_checkpoint(max_ops: int, modes: tuple[bool, ...]) -> Checkpoint:
    return Checkpoint(Settings(max_ops), modes)


def modes_of(block: nn.Module) -> tuple[bool, ...]:
    """Return the training flags of a block's modules."""
    return tuple([module.training for module in block.modules()])


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP shards a module, or one inside it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    kinds = fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    return any(isinstance(each, kinds) for each in module.modules())


class _Like(NamedTuple):
    """What both runs must have in common in a saved tensor."""

    shape: torch.Size | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        """Return that of a tensor. The shape of a nested one may be None, or a new symbol."""
        shape = None if tensor.is_nested else tensor.shape
        return cls(shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        shape = "unknown shape" if self.shape is None else f"shape {list(self.shape)}"
        return f"a {self.dtype} tensor of {shape} on {self.device}"


class _Value(NamedTuple):
    """What a slot was filled with.

    Attributes:
        running_pass: The backward pass for which the block ran again.
        measured: The tensor, or what the engine has saved instead of it.
    """

    running_pass: int
    measured: Measured


class _Given(NamedTuple):
    """A tensor that a node has got. It may ask again, as a Function does for `ctx.saved_tensors`.

    Attributes:
        running_pass: The backward pass.
        memory: The tensor's memory, while the node uses it.
        layout: The shape, strides and offset of the tensor.
    """

    running_pass: int
    memory: WeakMemory
    layout: tuple[Sequence[int], Sequence[int], int]

    @classmethod
    def of(cls, tensor: Tensor, this_pass: int) -> _Given | None:
        """Return this for a tensor; None if its memory cannot be referred to."""
        if this_pass == NO_PASS or not is_plain(tensor) or not has_storage(tensor):
            return None
        layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return cls(this_pass, WeakMemory(tensor), layout)

    def again(self, this_pass: int) -> Tensor | None:
        """Return the tensor; None if its memory is gone."""
        memory = self.memory() if self.running_pass == this_pass else None
        return None if memory is None else memory.as_strided(*self.layout)


class _Slot:
    """What a node of a checkpointed block saves instead of a tensor.

    Attributes:
        call: The call of the block.
        value: The tensor, between the block's second run and the node's backward; else None.
        given: The tensor that was given away last.
    """

    __slots__ = ("__weakref__", "call", "given", "value")

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.value: _Value | None = None
        self.given: _Given | None = None


def _unpack(slot: _Slot) -> Tensor:
    return slot.call.unpack(slot)


@dataclass(frozen=True)
class _Argument:
    """A tensor among the arguments, detached: the graph is not kept alive.

    Attributes:
        tensor: The tensor.
        version: Its version in forward.
        requires_grad: Whether it requires a gradient.
        weight: What tells an optimizer's step: an argument may be a parameter, or a view of one.
    """

    tensor: Tensor
    version: int
    requires_grad: bool
    weight: Weight | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Argument:
        """Return a tensor as an argument."""
        data, version = tensor.detach(), tensor._version
        weight = Weight(data, version) if is_plain(data) and has_storage(data) else None
        return cls(data, version, tensor.requires_grad, weight)

    def value(self) -> Tensor:
        """Return the tensor, without a graph."""
        if self.weight is not None:
            self.weight.value()
        elif self.tensor._version != self.version:
            raise written_to_error(self.tensor, self.version)
        return self.tensor.detach().requires_grad_(self.requires_grad)


class Mapped:
    """Maps each value of one type in nested containers, and the same object to the same result.

    A block may ask whether two of its arguments are the same tensor.
    """

    def __init__(self, kind: type, function: Callable[[Any], Any]) -> None:
        self._kind, self._function = kind, function
        self._results: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, self._kind):
            return value
        if id(value) not in self._results:
            self._results[id(value)] = self._function(value)
        return self._results[id(value)]


class _ModuleState:
    """The attributes of a module, and the contents of dicts and lists among them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = {**vars(module)}
        self._dicts = [(d, {**d}) for d in self._attributes.values() if isinstance(d, dict)]
        self._lists = [(each, [*each]) for each in self._attributes.values() if type(each) is list]

    def put(self) -> None:
        """Give the module this state, where it has another one."""
        for container, content in ((vars(self._module), self._attributes), *self._dicts):
            if not _is_same(container, content):
                container.clear()
                container.update(content)
        for values, before in self._lists:
            if [*map(id, values)] != [*map(id, before)]:
                values[:] = before


def _is_same(container: dict[Any, Any], content: dict[Any, Any]) -> bool:
    if len(container) != len(content):
        return False
    return all(container.get(key, container) is value for key, value in content.items())


class _BlockState:
    """The state of a block's modules, and which of its tensors require a gradient."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = [_ModuleState(module) for module in block.modules()]
        self._requires_grad = [(each, each.requires_grad) for each in block.parameters()]

    def put(self) -> None:
        """Give the block this state."""
        for module in self._modules:
            module.put()
        for parameter, requires_grad in self._requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


class RandomStates(NamedTuple):
    """PyTorch's random states of the CPU and of CUDA devices."""

    cpu: Tensor
    devices: list[torch.device]
    cuda: list[Tensor]

    @classmethod
    def now(cls, tensors: Iterable[Tensor]) -> RandomStates:
        """Return the current ones, of CUDA those of the devices of tensors."""
        devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
        return cls(torch.get_rng_state(), devices, [*map(torch.cuda.get_rng_state, devices)])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set them within a `with` block."""
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            for device, state in zip(self.devices, self.cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


class _Autocast(NamedTuple):
    """Autocast of one device type."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> _Autocast:
        """Return the current one."""
        return cls(
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )


class Ended(BaseException):
    """All tensors that backward needs are saved. A block's `except Exception` does not catch it."""


_lock = threading.RLock()  # a run sets the random state, which all threads share


class RecomputationError(RuntimeError):
    """A checkpointed block did something else when it ran again."""


class _Call:
    """One call of a checkpointed block, from forward to backward."""

    def __init__(
        self, block: nn.Module, forward: Callable[..., Any], arguments: Any, settings: Settings
    ) -> None:
        self._block, self._forward, self._settings = block, forward, settings
        self._arguments = tree_map(Mapped(Tensor, _Argument.of), arguments)
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self._random = RandomStates.now([*tensors, *block.parameters()])
        types = ["cpu", "cuda"] if self._random.devices else ["cpu"]
        self._autocasts = [*map(_Autocast.now, types)]
        self._flags = {name: product_flags(name) for name in types}
        self._slots: list[weakref.ref[_Slot]] = []
        self._likes: list[_Like] = []
        self._state: _BlockState | None = None
        self._weights: list[Weight] = []

    def pack(self, tensor: Tensor) -> _Slot:
        """Save a slot instead of a tensor, in forward."""
        slot = _Slot(self)
        self._slots.append(weakref.ref(slot))
        self._likes.append(_Like.of(tensor))
        return slot

    def finish_forward(self) -> None:
        """Record the block's state, as its first forward may have created some of it."""
        self._state = _BlockState(self._block)
        self._weights = [
            Weight(each, each._version)
            for each in _tensors_of(self._block)
            if is_plain(each) and has_storage(each) and not each.is_inference()
        ]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that the call keeps alive until backward."""
        leaves = tree_leaves(self._arguments)
        yield from (leaf.tensor for leaf in leaves if isinstance(leaf, _Argument))
        yield from (self._random.cpu, *self._random.cuda)

    def unpack(self, slot: _Slot) -> Tensor:
        """Return a slot's tensor, in backward."""
        this_pass = running_pass()
        given, slot.given = slot.given, None
        tensor = None if given is None else given.again(this_pass)
        if tensor is None:
            tensor = self._unpack(slot, this_pass)
        slot.given = _Given.of(tensor, this_pass)
        return tensor

    def _unpack(self, slot: _Slot, this_pass: int) -> Tensor:
        with _lock:
            if self._state is None:  # the block differentiates inside its forward
                self.finish_forward()
            value, slot.value = slot.value, None
            if value is None or value.running_pass != this_pass or this_pass == NO_PASS:
                self._run_again(this_pass, slot if this_pass == NO_PASS else None)
                value, slot.value = slot.value, None
        if value is None:
            raise self._error("saved fewer tensors")
        return unpack_measured(value.measured)

    def _run_again(self, this_pass: int, only: _Slot | None) -> None:
        """Run the block again, and fill the slots that the graph still needs, or one alone."""
        state = self._state
        assert state is not None
        for weight in self._weights:  # rule 4
            weight.value()
        slots = [reference() for reference in self._slots]
        if only is not None:
            slots = [slot if slot is only else None for slot in slots]
        last = max(i for i, slot in enumerate(slots) if slot is not None)
        args, kwargs = tree_map(Mapped(_Argument, _Argument.value), self._arguments)
        count = 0

        def pack(tensor: Tensor) -> Measured:
            nonlocal count
            index, count = count, count + 1
            if index > last:  # rule 5: the block has caught `Ended`
                raise Ended
            if _Like.of(tensor) != self._likes[index]:  # rule 3
                raise self._error(f"saved {_Like.of(tensor)} instead of {self._likes[index]}")
            measured = Measured(tensor)
            slot = slots[index]
            if slot is not None:
                slot.value = _Value(this_pass, measured)
            if index == last:
                raise Ended
            return measured

        output = None
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._random.restored())
            stack.callback(_BlockState(self._block).put)  # `Ended` may leave it half changed
            state.put()
            for device_type, dtype, enabled, cache_enabled in self._autocasts:
                stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
            for device_type, flags in self._flags.items():
                stack.enter_context(under_product_flags(device_type, flags))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack_measured))
            outer = running_engine()
            if outer is not None:  # backward runs inside the forward of a converted model
                stack.enter_context(outer.paused(None))
            engine = stack.enter_context(run_engine(self._block, self._settings, merges=False))
            if engine is not None:
                engine.stop_at((args, kwargs))
            with suppress(Ended):
                output = self._forward(*args, **kwargs)
            if engine is not None:
                engine.walk(output)
                engine.finish()
        if this_pass != NO_PASS:  # drop what no node has asked for
            call_after_pass(partial(_drop, self._slots, this_pass))

    def _error(self, what: str) -> RecomputationError:
        return RecomputationError(
            f"the checkpointed {type(self._block).__name__} {what} when it ran again in backward: "
            "something has changed since forward that its arguments do not show. Call "
            "inplace_ops.revert(model), and convert it without memory"
        )


def _drop(slots: Sequence[weakref.ref[_Slot]], this_pass: int) -> None:
    """Drop the tensors that slots have from a backward pass, which has ended."""
    for reference in slots:
        slot = reference()
        if slot is not None and slot.value is not None and slot.value.running_pass == this_pass:
            slot.value = None


def _tensors_of(block: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a block, and the tensors in its modules' attributes."""
    found: list[Any] = [*block.parameters(), *block.buffers()]
    for module in block.modules():
        found += vars(module).values()
    return [each for each in found if isinstance(each, Tensor)]


def kept_by_checkpoint(handle: Any) -> _Call | None:
    """Return the checkpointed call, if autograd's handle of a saved tensor belongs to one."""
    return handle.data.call if handle.unpack_hook is _unpack else None
