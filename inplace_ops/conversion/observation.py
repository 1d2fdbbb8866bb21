"""Observe one forward pass of a converted model, for its report."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from .._torch_private import (
    LEAF_SEQUENCE_NUMBER,
    DisableTorchFunction,
    is_compiled,
    next_sequence_number,
    storage_id,
    tree_leaves,
    unpacked,
)
from ..memory import Packed
from ..recompute import nodes, reasons
from ..recompute.after_norm import is_after_norm
from ..recompute.nodes import Node
from ..recompute.packed import Recomputed
from ..recompute.run import running_engine
from ..recompute.settings import Observer, Settings
from ..recompute.specs import ProductInside
from ..recompute.tensors import is_plain
from ..recompute.values import value_of
from ..recompute.views import base_of
from ..saved import Checkpointed, checkpointed_tensors, tensors_in
from .example import describe
from .report import Auxiliary, Remaining, Replaced, Report

NO_PRODUCER = "(no grad_fn)"
CHECKPOINT = "checkpoint"  # the consumer of what a checkpoint saves
_observation_ids = itertools.count()


class _Running(NamedTuple):
    """A module that runs: its path, and whether it was called under autocast."""

    path: str
    is_under_autocast: bool


class _NodeInfo:
    """Observed facts about one node. The node's metadata stores them.

    A row is an index in the list of an observation's replaced tensors.

    Attributes:
        module: The path of the module that ran the node's operation.
        reasons: Why the node's saved tensors stay saved, by field.
        output_rows: The rows of the operation's outputs that are replaced, by the output's index.
        consumed_rows: The rows of replaced tensors that the node would save.
        is_under_autocast: Whether that module was called under autocast. While autocast itself
            casts, it is off.
    """

    __slots__ = ("consumed_rows", "is_under_autocast", "module", "output_rows", "reasons")

    def __init__(self, module: str, is_under_autocast: bool) -> None:
        self.module, self.is_under_autocast = module, is_under_autocast
        self.reasons: dict[str, str] = {}
        self.output_rows: dict[int, int] = {}
        self.consumed_rows: list[int] = []

    def rows_of(self, index: int) -> list[int]:
        """Return the row of one of the operation's outputs, if it has one."""
        return [self.output_rows[index]] if index in self.output_rows else []


class _Place(NamedTuple):
    """The operation that saves a tensor, or would save it, and its place in forward."""

    consumer: str
    module: str
    ordinal: int


class _ReplacedRow(NamedTuple):
    """A replaced tensor, before its consumers are known.

    Attributes:
        producer: The operation that computed the tensor.
        bytes: The size of its storage.
        how: How backward gets the tensor.
        storage: A weak reference to its storage, which keeps the storage's id from being used by
            another; None if the storage is not known.
    """

    producer: str
    bytes: int
    how: str
    storage: StorageWeakRef | None

    def at(self, place: _Place) -> Replaced:
        """Return the row in the report, given the tensor's first consumer."""
        consumer, module, ordinal = place
        return Replaced(self.producer, consumer, module, self.bytes, self.how, ordinal)


class _Tables:
    """The rows of a report, by the storages of their tensors.

    Attributes:
        storages: The ids of all storages that have a row, or exist anyway.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self.storages = {storage_id(tensor.untyped_storage()) for tensor in existing}
        self.remaining: dict[int, Remaining] = {}
        self.auxiliary: dict[int, Auxiliary] = {}

    def add_remaining(
        self, saved: Tensor, producer: Node | str, reason: str, place: _Place
    ) -> bool:
        """Add a row for a tensor that stays saved. Return whether its memory has none yet."""
        storage = saved.untyped_storage()
        key = storage_id(storage)
        first = self.remaining.get(key)
        if first is not None and first.reason == reasons.SAVED_ANYWAY:  # by what is added now
            self.remaining[key] = replace(first, reason=reason)
        if key in self.storages or not storage.nbytes():
            return False
        if producer is None:
            producer = NO_PRODUCER
        name = producer if isinstance(producer, str) else nodes.operation_name(producer)
        consumer, module, ordinal = place
        self.storages.add(key)
        self.remaining[key] = Remaining(name, consumer, module, storage.nbytes(), reason, ordinal)
        return True

    def add_auxiliary(self, tensor: Tensor, place: _Place) -> None:
        """Add a row for a tensor that only the converted model saves, unless its memory has one."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key not in self.storages:
            consumer, module, ordinal = place
            self.storages.add(key)
            self.auxiliary[key] = Auxiliary(consumer, module, storage.nbytes(), ordinal)


class Observation(Observer):
    """Observe which saved tensors the engine replaces, which stay saved, and in which modules.

    Hooks on all modules, registered for the pass alone, follow which module runs. Facts about a
    node are in the node's metadata, so an observation keeps neither nodes nor tensors alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._key = f"inplace_ops: observation {next(_observation_ids)}"
        self._replaced: list[_ReplacedRow] = []
        self._row_of_storage: dict[int, int] = {}
        self._modules = [_Running("", False)]  # that run, the innermost last

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Follow which module runs, within a `with` block."""
        handles: list[RemovableHandle] = []
        for path, module in _eager_modules(self.model):
            handles.append(module.register_forward_pre_hook(self._entering(path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, path: str) -> Any:
        # A thread that calls a module while this one registers the hook may pass no kwargs:
        # `nn.Module` stores the hook first, and then that it takes them.
        def enter(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if self._is_running():
                self._walk((args, kwargs))
                is_under_autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
                self._modules.append(_Running(path, is_under_autocast))

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_running() and len(self._modules) > 1:
            self._walk(output)
            self._modules.pop()

    def _walk(self, value: Any) -> None:
        """Observe the new nodes that tensors in `value` depend on, before torch 2.14.

        There the engine sees nodes late, when another module may be running.
        """
        engine = running_engine()
        walker = None if engine is None else engine.walker
        if walker is None:
            return
        pending = [nodes.root_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        end = next_sequence_number()
        while pending:
            node = pending.pop()
            if node is None or self._key in node.metadata or not walker.may_have_created(node, end):
                continue
            self.created(node)
            pending += [producer for producer, _ in nodes.producers(node)]

    def _is_running(self) -> bool:
        engine = running_engine()
        return engine is not None and engine.observer is self

    def created(self, node: Node) -> None:
        if self._key not in node.metadata:
            node.metadata[self._key] = _NodeInfo(*self._modules[-1])

    def _info_of(self, node: Node) -> _NodeInfo | None:
        """Return the facts about a node of this pass; None for other nodes and autograd leaves."""
        return None if nodes.autograd_leaf_of(node) is not None else node.metadata.get(self._key)

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> None:
        self._add_row(saved.grad_fn, saved.output_nr, node, saved, packed.how, saved)

    def activated(self, producer: Node, node: Node, saved: Tensor) -> None:
        self.created(node)  # an engine that walks over nodes sees this node only later
        # PyTorch's activation would save its output, `saved`, or the norm's output. If it has
        # overwritten that one, it would save a clone.
        value = value_of(producer)
        replaced = None if value is None else value.noted
        if producer is node:
            replaced = saved
        elif replaced is not None and _share_memory(replaced, saved):
            replaced = None
        self._add_row(producer, 0, node, saved, Packed.how, replaced)

    def _add_row(
        self,
        producer: Node,
        index: int,
        node: Node,
        saved: Tensor,
        how: str,
        replaced: Tensor | None,
    ) -> None:
        """Add a row for a replaced tensor, unless its memory has one.

        Tensors of other passes and parameters get no row.

        Args:
            producer: The node that produced the tensor.
            index: The index of the node's output.
            node: The node that would save it.
            saved: A tensor of the same size.
            how: How backward gets the tensor.
            replaced: The tensor itself; None if it is not known.
        """
        base, index = base_of(producer, index)
        base_info = None if base is None else self._info_of(base)
        consumer = self._info_of(node)
        if consumer is None or (base_info is None and base is not None):
            return
        storage = None if replaced is None else StorageWeakRef(replaced.untyped_storage())
        row = None if base_info is None else base_info.output_rows.get(index)
        if row is None and storage is not None:
            row = self._row_of_storage.get(storage.cdata)
        if row is None:
            row = len(self._replaced)
            name = NO_PRODUCER if base is None else nodes.operation_name(base)
            size = saved.untyped_storage().nbytes()
            self._replaced.append(_ReplacedRow(name, size, how, storage))
            if storage is not None:
                self._row_of_storage[storage.cdata] = row
        if base_info is not None:
            base_info.output_rows[index] = row
        consumer.consumed_rows.append(row)

    def unchanged(self, node: Node, field: str, reason: str) -> None:
        info = self._info_of(node)
        if info is not None:
            info.reasons[field] = reason

    def fill(self, report: Report, output: Any, inputs: Any) -> None:
        """Fill in a report after forward, if the output leads to nodes of this pass.

        Args:
            report: The report.
            output: The value that forward returned.
            inputs: The positional and the keyword arguments of forward, whose tensors do not count.
        """
        with DisableTorchFunction():
            outputs = [*tensors_in(output)]
            self._walk(outputs)
            graph = self._graph_of(outputs)
            if graph:
                report.model, report.inputs = type(self.model).__name__, describe(*inputs)
                self._fill(report, graph, outputs, inputs)

    def _fill(self, report: Report, graph: list[Node], outputs: list[Tensor], inputs: Any) -> None:
        existing = [*_plain_tensors(inputs)]
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            existing += _plain_tensors(tensor)
        tables = _Tables(existing)
        ordinals = {node: ordinal for ordinal, node in enumerate(graph)}
        rows: set[int] = set()  # of tensors that are saved all the same
        for node, ordinal in ordinals.items():
            place = self._place_of(node, ordinal)
            for field, saved in nodes.readable_tensors(node):
                if not is_plain(saved):
                    continue
                if is_after_norm(node) and field != "0":  # PyTorch's activation does not save these
                    tables.add_auxiliary(saved, place)
                    continue
                base, index = _base_of(saved)
                base_info = None if base is None else self._info_of(base)
                if tables.add_remaining(saved, base, self._reason(node, field, saved, base), place):
                    rows.update([] if base_info is None else base_info.rows_of(index))
        for each in checkpointed_tensors(graph, outputs):
            place = self._place_of(each.node, ordinals[each.node], CHECKPOINT)
            for tensor in filter(is_plain, each.tensors):
                tables.add_remaining(tensor, *_checkpointed(each), place)
        products: set[ProductInside] = set()
        for node, ordinal in ordinals.items():
            place = self._place_of(node, ordinal)
            for packed in nodes.packed_values(node):
                if isinstance(packed, Recomputed):
                    if packed.original is not None:
                        saved = packed.original.leaf.tensor
                        tables.add_remaining(saved, packed.producer, reasons.FIRST_STEP, place)
                        continue
                    products.update(packed.spec.products)
                for tensor in packed.tensors():
                    tables.add_auxiliary(tensor, place)
        rows.update(
            index
            for index, row in enumerate(self._replaced)
            if row.storage is not None and row.storage.cdata in tables.storages
        )
        replaced: dict[int, Replaced] = {}
        for node, ordinal in ordinals.items():
            place = self._place_of(node, ordinal)
            for index in self._info_of(node).consumed_rows:  # type: ignore[union-attr]
                if index not in rows:
                    replaced.setdefault(index, self._replaced[index].at(place))
        report.fill(replaced.values(), tables.remaining.values(), tables.auxiliary.values())
        report.recompute_flops = sum(call.flops for call in products)

    def _place_of(self, node: Node, ordinal: int, consumer: str = "") -> _Place:
        info = self._info_of(node)
        assert info is not None
        return _Place(consumer or nodes.operation_name(node), info.module, ordinal)

    def _reason(self, node: Node, field: str, saved: Tensor, base: Node | None) -> str:
        """Return why a tensor stays saved: the engine's reason, or why the engine did not look."""
        info = self._info_of(node)
        if base is None:
            return reasons.NO_GRADIENT
        if nodes.is_cast_of_autograd_leaf(base):
            base_info = self._info_of(base)
            is_autocasts = base_info is not None and base_info.is_under_autocast
            return reasons.PARAMETER_COPY if is_autocasts else reasons.PARAMETER_CAST
        if info is not None and field in info.reasons:
            return info.reasons[field]
        if saved.nbytes >= Settings.MIN_BYTES:
            return reasons.saved_by(node)
        is_whole = saved.untyped_storage().nbytes() < Settings.MIN_BYTES
        return reasons.SMALL if is_whole else reasons.SMALL_PART

    def _graph_of(self, outputs: list[Tensor]) -> list[Node]:
        """Return all nodes of this pass that lead to tensors in `outputs`, in their order."""
        numbers: dict[Node, int] = {}
        pending: list[Node] = [nodes.root_of(tensor) for tensor in outputs]
        while pending:
            node = pending.pop()
            if node is not None and node not in numbers and self._info_of(node) is not None:
                number = nodes.sequence_number(node)
                numbers[node] = 0 if number == LEAF_SEQUENCE_NUMBER else number
                pending += [producer for producer, _ in nodes.producers(node)]
        return sorted(numbers, key=numbers.__getitem__)


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    return storage_id(tensor.untyped_storage()) == storage_id(other.untyped_storage())


def _base_of(saved: Tensor) -> tuple[Node, int]:
    """Return the node that produced a saved tensor's base, and the index of its output."""
    return base_of(nodes.root_of(saved), saved.output_nr)


def _checkpointed(each: Checkpointed) -> tuple[Node | str, str]:
    """Return what computed a tensor that a checkpoint saves, and why it stays saved.

    A selective checkpoint detaches what it caches: only the op is known.
    """
    if each.op is not None:
        return nodes.name_of_op(each.op), reasons.CACHED_BY_CHECKPOINT
    if not each.is_input:
        return NO_PRODUCER, reasons.NEEDED_BY_CHECKPOINT
    saved = unpacked(each.handle) if nodes.is_readable(each.handle) else None
    base, _ = (None, 0) if saved is None else _base_of(saved)
    return base, reasons.CHECKPOINT_INPUT


def _eager_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths and modules of a model, except compiled and scripted modules."""
    if is_compiled(model) or isinstance(model, torch.jit.ScriptModule):
        return
    yield path, model
    for name, child in model.named_children():
        yield from _eager_modules(child, f"{path}.{name}" if path else name)


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    return filter(is_plain, tensors_in(value))
