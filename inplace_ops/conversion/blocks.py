"""The blocks of a model that may be checkpointed: that change nothing when they run twice."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._ops import is_out_of_memory
from .._torch_private import (
    BatchNorm,
    forward_hooks,
    forward_pre_hooks,
    has_backward_hooks,
    has_children,
    has_global_forward_hooks,
    tree_leaves,
    tree_map,
)
from ..recompute import nodes
from ..recompute.checkpoints import Ended, Mapped, RandomStates, is_sharded
from ..saved import graph_of
from .state import contained
from .wiring import can_have_checkpoint

_MIN_BLOCKS = 3  # of one class, in one container
_MAX_DISTANCE = 1e-2  # between two runs of a block, relative to the norm: the rounding of 16 bits
_CONTAINERS = dict, list, tuple, set, frozenset


def paths_of_blocks(model: nn.Module) -> list[str]:
    """Return the paths of a model's blocks.

    They are the modules in the innermost `ModuleList` or `Sequential` that has three or more
    modules of one class, which have inner modules.
    """
    return [*_paths_of_blocks(model, "")]


def _paths_of_blocks(module: nn.Module, path: str) -> Iterator[str]:
    children = [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_children()
        if not isinstance(child, torch.jit.ScriptModule)
    ]
    inner = [found for name, child in children for found in _paths_of_blocks(child, name)]
    if inner or not isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from inner
        return
    classes = [type(child) for _, child in children if has_children(child)]
    yield from (name for name, child in children if classes.count(type(child)) >= _MIN_BLOCKS)


class Blocks(NamedTuple):
    """What is known about the blocks of a model.

    Attributes:
        usable: The paths of those that may be checkpointed, in the order in which they ran.
        reasons: Why the others may not, by their paths.
    """

    usable: list[str]
    reasons: dict[str, str]


def blocks_of(model: nn.Module, call: Callable[[], Any]) -> Blocks:
    """Call the model, run each of its blocks twice, and return which of them may be checkpointed.

    A block may not, if any of these is so:

    - Running it again changes its buffers, the attributes of its modules, a container or generator
      in them, or the random states of Python and NumPy: a batch norm in training, a cache, a
      counter. A batch norm with running statistics may be put into training mode later.
    - It or the model changes its arguments, for example a cache of keys and values.
    - It returns something else with the same random state of PyTorch.
    - It depends on a parameter that is neither its own nor an argument.
    - It is not as it was when its second run ends at the last tensor that it saves.
    - It has inner modules with hooks, which would run twice, or a `forward` attribute.
    - FSDP frees its parameters.

    Args:
        model: The model, which is not converted.
        call: Calls the model without gradients. The caller restores the model's state.
    """
    blocks = {path: model.get_submodule(path) for path in paths_of_blocks(model)}
    reasons = {path: reason for path, block in blocks.items() if (reason := _obstacle(block))}
    ran: list[_Test] = []
    tests = {path: _Test(block, ran) for path, block in blocks.items() if path not in reasons}
    with ExitStack() as stack:
        for test in tests.values():
            stack.enter_context(test.attached())
        try:
            call()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return Blocks(
                [], dict.fromkeys(blocks, f"the model raises without gradients: {error!r}")
            )
    for test in tests.values():
        test.end()
    reasons |= {path: test.reason for path, test in tests.items() if test.reason}
    usable = [path for path in tests if path not in reasons]
    usable.sort(key=lambda path: ran.index(tests[path]))
    return Blocks(usable, reasons)


def _obstacle(block: nn.Module) -> str:
    """Return why a block may not be checkpointed, as far as that shows without a run; else ""."""
    if not can_have_checkpoint(block):
        return "its forward was replaced"
    if has_global_forward_hooks():
        return "hooks on all modules would run twice"
    if is_sharded(block):
        return "FSDP frees its parameters"
    for module in block.modules():
        if isinstance(module, BatchNorm) and module.track_running_stats:
            return "a batch norm would update its running statistics twice"
        hooks = forward_hooks(module) or forward_pre_hooks(module) or has_backward_hooks(module)
        if module is not block and hooks:
            return "hooks inside it would run twice"
    return ""


class _Test:
    """Runs a block again after each of its runs in a forward pass, and compares.

    Attributes:
        reason: Why the block may not be checkpointed; "" if it may.
    """

    def __init__(self, block: nn.Module, ran: list[_Test]) -> None:
        self.reason, self._block = "it does not run", block
        self._ran = ran  # the tests of all blocks, in the order of their first runs
        self._before: list[Any] = []  # facts about the arguments, before a run
        self._after: list[tuple[Any, list[Any]]] = []  # the arguments, and facts after a run
        self._random = RandomStates.now([])
        self._other_random: list[str] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Add hooks to the block within a `with` block."""
        before = self._block.register_forward_pre_hook(self._enter, with_kwargs=True)
        after = self._block.register_forward_hook(self._leave, with_kwargs=True, prepend=True)
        with before, after:
            yield

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._before = _facts((args, kwargs))
        self._random = RandomStates.now(_tensors((args, kwargs)))
        self._other_random = _other_random_states()

    def _leave(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self not in self._ran:
            self._ran.append(self)
            self.reason = ""
        if not self.reason:
            try:
                self.reason = self._difference(args, kwargs, output)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.reason = f"it raises when it runs again: {error!r}"
        self._after.append(((args, kwargs), _facts((args, kwargs))))

    def _ends(self, run: Callable[[], Any], saved: int) -> bool:
        """Whether an exception at the last saved tensor leaves the block."""
        try:
            with self._random.restored(), torch.enable_grad(), _Packs(saved):
                run()
        except Ended:
            return True
        return False

    def end(self) -> None:
        """Look whether the model has written to an argument after the block's run."""
        if not all(_equal(facts, _facts(arguments)) for arguments, facts in self._after):
            self.reason = self.reason or "the model changes its arguments"

    def _difference(self, args: Any, kwargs: Any, output: Any) -> str:
        """Return what differs if the block runs again; "" if nothing does."""
        block = self._block
        if _other_random_states() != self._other_random:
            return "it draws random numbers from Python or NumPy"
        if not _equal(self._before, _facts((args, kwargs))):
            return "it changes its arguments"
        state = _facts_of_modules(block)
        again_args, again_kwargs = tree_map(Mapped(Tensor, _detached), (args, kwargs))
        run = partial(type(block).forward, block, *again_args, **again_kwargs)
        packs = _Packs()
        with self._random.restored(), torch.enable_grad(), packs:
            again = run()
        if not _equal(state, _facts_of_modules(block)):
            return "it changes a buffer or an attribute"
        if not _reads_only(again, [*block.parameters(), *_tensors((again_args, again_kwargs))]):
            return "it reads a parameter that is not its own"
        if packs.count and not self._ends(run, packs.count):
            return "it catches the exception that ends its second run"
        if not _equal(state, _facts_of_modules(block)):
            return "it leaves an attribute changed when its second run ends early"
        mine, other = _tensors(output), _tensors(again)
        if len(mine) != len(other) or not all(map(_is_close, mine, other)):
            return "it returns something else when it runs again"
        return ""


class _Packs(torch.autograd.graph.saved_tensors_hooks):
    """Counts the tensors that are saved within a `with` block, and ends it at the last one."""

    def __init__(self, last: int = 0) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.count, self._last = 0, last

    def _pack(self, tensor: Tensor) -> Tensor:
        self.count += 1
        if self.count == self._last:
            raise Ended
        return tensor


def _reads_only(outputs: Any, allowed: list[Tensor]) -> bool:
    """Whether the graph of outputs has no other autograd leaves than the allowed ones."""
    known = {id(tensor) for tensor in allowed}
    graph = graph_of(_tensors(outputs), 0)
    leaves = (nodes.autograd_leaf_of(each) for node in graph for each, _ in nodes.producers(node))
    return all(leaf is None or id(leaf) in known for leaf in leaves)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _other_random_states() -> list[str]:
    """Return the random states of Python and NumPy, as texts."""
    states = [repr(random.getstate())]
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        states.append(repr((kind, keys.tobytes(), rest)))
    return states


class _Fact(NamedTuple):
    """A tensor as it is: parameters and arguments without a copy of their values."""

    tensor: Tensor
    version: int
    copied: Tensor | None


def _facts(arguments: Any) -> list[Any]:
    """Return facts that differ if arguments, or what they contain, are changed or replaced."""
    return [*map(_fact, contained([arguments], into_objects=True))]


def _facts_of_modules(block: nn.Module) -> list[Any]:
    """Return the same of the attributes of a block's modules, with copies of their tensors."""
    attributes = contained([vars(each) for each in block.modules()], into_objects=True)
    return [_fact(each, not isinstance(each, nn.Parameter)) for each in attributes]


def _fact(value: Any, copies_tensors: bool = False) -> Any:
    if isinstance(value, Tensor):
        version = -1 if value.is_inference() else value._version
        copied = value.detach().to("cpu", copy=True) if copies_tensors else None
        return _Fact(value, version, copied)
    if isinstance(value, torch.Generator):
        return value.get_state()
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(_name_of(key), _name_of(each)) for key, each in items]


def _name_of(value: Any) -> Any:
    """Return what tells a value from others; of a container its type, as its content is a fact."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return value
    return type(value) if isinstance(value, _CONTAINERS) else id(value)


def _equal(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) == len(after) and all(map(_is_same, before, after))


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, _Fact) and isinstance(after, _Fact):
        if before.tensor is not after.tensor or before.version != after.version:
            return False
        return before.copied is None or _is_identical(before.copied, after.copied)
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return torch.equal(before, after)
    return type(before) is type(after) and bool(before == after)


def _is_identical(before: Tensor, after: Tensor | None) -> bool:
    if after is None or before.shape != after.shape or before.dtype is not after.dtype:
        return False
    if before.layout is not torch.strided:
        return False
    return torch.equal(before, after) or torch.allclose(before, after, 0, 0, equal_nan=True)


def _is_close(mine: Tensor, other: Tensor) -> bool:
    if mine.shape != other.shape or mine.dtype is not other.dtype:
        return False
    if not mine.is_floating_point():
        return torch.equal(mine, other.detach())
    mine, other = mine.detach().double(), other.detach().double()
    difference = torch.linalg.vector_norm(torch.where(mine == other, 0.0, mine - other))
    return bool(difference <= _MAX_DISTANCE * torch.linalg.vector_norm(mine.nan_to_num(0, 0, 0)))
