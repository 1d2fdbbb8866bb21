"""Observe one forward pass of a converted model, for its report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch_private import (
    LEAF_SEQUENCE_NUMBER,
    DisableTorchFunction,
    is_compiled,
    storage_id,
)
from ..memory import Packed
from ..recompute import nodes, reasons
from ..recompute.engine import MIN_BYTES, Observer, running_engine
from ..recompute.functions import is_fused
from ..recompute.nodes import Node
from ..recompute.operations import base_of
from ..saved import tensors_in
from .report import Auxiliary, Remaining, Replaced, Report

NO_PRODUCER = "(no grad_fn)"
_observation_ids = itertools.count()


class _NodeInfo:
    """Observed facts about one node. The node's metadata stores them.

    A row is an index in the list of an observation's replaced tensors.

    Attributes:
        module: The path of the module that ran the node's operation.
        reasons: Why the node's saved tensors stay saved, by field.
        output_rows: The rows of the operation's outputs that are replaced, by the output's index.
        consumed_rows: The rows of replaced tensors that the node would save.
    """

    __slots__ = ("consumed_rows", "module", "output_rows", "reasons")

    def __init__(self, module: str) -> None:
        self.module = module
        self.reasons: dict[str, str] = {}
        self.output_rows: dict[int, int] = {}
        self.consumed_rows: list[int] = []


class Observation(Observer):
    """Observe which saved tensors the engine replaces, which stay saved, and in which modules.

    Hooks on all modules, registered for the pass alone, follow which module runs. Facts about a
    node are in the node's metadata, so an observation keeps neither nodes nor tensors alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._key = f"inplace_ops: observation {next(_observation_ids)}"
        self._replaced: list[Callable[[int], Replaced]] = []  # of an ordinal
        self._without_producer: dict[int, int] = {}  # by row: the storage of a mask or of indices
        self._path = [""]

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Follow which module runs, within a `with` block."""
        handles: list[RemovableHandle] = []
        for path, module in _eager_modules(self.model):
            handles.append(module.register_forward_pre_hook(self._entering(path)))
            handles.append(module.register_forward_hook(self._leaving))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            if self._is_running():
                self._path.append(path)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_running() and len(self._path) > 1:
            self._path.pop()

    def _is_running(self) -> bool:
        engine = running_engine()
        return engine is not None and engine.observer is self

    def created(self, node: Node) -> None:
        node.metadata.setdefault(self._key, _NodeInfo(self._path[-1]))

    def _info_of(self, node: Node) -> _NodeInfo | None:
        """Return the facts about a node of this pass; None for other nodes and autograd leaves."""
        return None if nodes.autograd_leaf_of(node) is not None else node.metadata.get(self._key)

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> Packed:
        self._add_row(saved.grad_fn, saved.output_nr, node, saved, packed.how)
        return packed

    def fused(self, producer: Node, node: Node, saved: Tensor) -> None:
        self.created(node)  # an engine that walks over nodes sees this node only later
        self._add_row(producer, 0, node, saved, Packed.how)

    def _add_row(self, producer: Node, index: int, node: Node, saved: Tensor, how: str) -> None:
        """Add a row for a replaced tensor, unless its memory has one.

        Tensors of other passes and parameters get no row.
        """
        base, index = base_of(producer, index)
        base_info = None if base is None else self._info_of(base)
        consumer = self._info_of(node)
        if consumer is None or (base_info is None and base is not None):
            return
        row = None if base_info is None else base_info.output_rows.get(index)
        if row is None:
            row = len(self._replaced)
            name = NO_PRODUCER if base is None else nodes.operation_name(base)
            size = saved.untyped_storage().nbytes()
            path = self._path[-1]
            consumer_name = nodes.operation_name(node)
            self._replaced.append(partial(Replaced, name, consumer_name, path, size, how))
            if base_info is not None:
                base_info.output_rows[index] = row
            else:
                self._without_producer[row] = storage_id(saved.untyped_storage())
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
            inputs: The arguments of forward, whose tensors do not count.
        """
        with DisableTorchFunction():
            graph = self._graph_of(output)
            if graph:
                self._fill(report, graph, inputs)

    def _fill(self, report: Report, graph: list[Node], inputs: Any) -> None:
        counted = {storage_id(t.untyped_storage()) for t in _plain_tensors(inputs)}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            counted.update(storage_id(t.untyped_storage()) for t in _plain_tensors(tensor))
        rows: dict[int, int] = {}  # by row: the ordinal of its first consumer
        for ordinal, node in enumerate(graph):
            for row in self._info_of(node).consumed_rows:  # type: ignore[union-attr]
                if self._without_producer.get(row) not in counted:
                    rows.setdefault(row, ordinal)
        remaining: list[Remaining] = []
        auxiliary: list[Auxiliary] = []
        for ordinal, node in enumerate(graph):
            for field, saved in nodes.readable_tensors(node):
                storage = saved.untyped_storage() if nodes.is_plain(saved) else None
                if storage is None or not storage.nbytes() or storage_id(storage) in counted:
                    continue
                counted.add(storage_id(storage))
                if is_fused(node) and field != "0":  # PyTorch's activation does not save these
                    auxiliary.append(self._auxiliary(node, storage, ordinal))
                    continue
                base, index = base_of(saved.grad_fn, saved.output_nr)
                base_info = None if base is None else self._info_of(base)
                if base_info is not None:  # another consumer may recompute it: count it once
                    rows.pop(base_info.output_rows.get(index, -1), None)
                remaining.append(self._remaining(node, field, saved, base, ordinal))
        for ordinal, node in enumerate(graph):
            for packed in nodes.packed_values(node):
                for tensor in packed.tensors():
                    storage = tensor.untyped_storage()
                    if storage_id(storage) not in counted:
                        counted.add(storage_id(storage))
                        auxiliary.append(self._auxiliary(node, storage, ordinal))
        replaced = [self._replaced[row](ordinal) for row, ordinal in rows.items()]
        report.fill(replaced, remaining, auxiliary)

    def _auxiliary(self, node: Node, storage: torch.UntypedStorage, ordinal: int) -> Auxiliary:
        info = self._info_of(node)
        assert info is not None
        return Auxiliary(nodes.operation_name(node), info.module, storage.nbytes(), ordinal)

    def _remaining(
        self, node: Node, field: str, saved: Tensor, base: Node | None, ordinal: int
    ) -> Remaining:
        info = self._info_of(node)
        assert info is not None
        return Remaining(
            NO_PRODUCER if base is None else nodes.operation_name(base),
            nodes.operation_name(node),
            info.module,
            saved.untyped_storage().nbytes(),
            _reason(info, node, field, saved, base),
            ordinal,
        )

    def _graph_of(self, output: Any) -> list[Node]:
        """Return all nodes of this pass that lead to tensors in `output`, in their order."""
        numbers: dict[Node, int] = {}
        pending: list[Node] = [tensor.grad_fn for tensor in tensors_in(output)]
        while pending:
            node = pending.pop()
            if node is not None and node not in numbers and self._info_of(node) is not None:
                number = nodes.sequence_number(node)
                numbers[node] = 0 if number == LEAF_SEQUENCE_NUMBER else number
                pending += [producer for producer, _ in nodes.producers(node)]
        return sorted(numbers, key=numbers.__getitem__)


def _reason(info: _NodeInfo, node: Node, field: str, saved: Tensor, base: Node | None) -> str:
    """Return why a tensor stays saved: the engine's reason, or why the engine did not look."""
    if base is None:
        return reasons.NO_GRADIENT
    if nodes.is_cast_of_autograd_leaf(base):
        return reasons.PARAMETER_COPY
    if field in info.reasons:
        return info.reasons[field]
    return reasons.SMALL if saved.nbytes < MIN_BYTES else reasons.saved_by(node)


def _eager_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths and modules of a model, except compiled and scripted modules."""
    if is_compiled(model) or isinstance(model, torch.jit.ScriptModule):
        return
    yield path, model
    for name, child in model.named_children():
        yield from _eager_modules(child, f"{path}.{name}" if path else name)


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    return filter(nodes.is_plain, tensors_in(value))
