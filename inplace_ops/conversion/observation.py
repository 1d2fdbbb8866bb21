"""Observing one forward pass of a converted model, for its report."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch_private import storage_id
from ..memory import Packed
from ..recompute import nodes, reasons
from ..recompute.engine import MIN_BYTES, Observer, running_engine
from ..recompute.functions import is_fused
from ..recompute.nodes import Node
from ..recompute.operations import base_of
from ..recompute.specs import Recomputed
from .example import tensors_in
from .report import Remaining, Replaced, Report

NO_PRODUCER = "(no grad_fn)"
_numbers = itertools.count()


class _NodeNotes:
    """What is noted of a node, in its metadata, by one observation.

    Attributes:
        module: The path of the module that ran its operation.
        reasons: Why tensors that it saves are saved, by field.
        listed: The rows of the operation's own outputs, by output.
        rows: The rows of what it would save.
    """

    __slots__ = ("listed", "module", "reasons", "rows")

    def __init__(self, module: str) -> None:
        self.module = module
        self.reasons: dict[str, str] = {}
        self.listed: dict[int, int] = {}
        self.rows: list[int] = []


class Observation(Observer):
    """What the engine replaces and what remains, with the modules' paths.

    The paths come from hooks on all modules for the time of the pass. What is noted of a node is in
    its metadata: no tensor lives longer for being observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._key = f"inplace_ops: observation {next(_numbers)}"
        self._found: list[Replaced] = []
        self._path = [""]

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Know which module runs."""
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
        node.metadata.setdefault(self._key, _NodeNotes(self._path[-1]))

    def _of(self, node: Node) -> _NodeNotes | None:
        """Return what is noted of a node that this pass has made; None of others and leaves."""
        return None if nodes.autograd_leaf_of(node) is not None else node.metadata.get(self._key)

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> Packed:
        self._add(saved.grad_fn, saved.output_nr, node, saved, packed.how)
        return packed

    def fused(self, producer: Node, node: Node, saved: Tensor) -> None:
        self.created(node)  # where the engine walks over nodes, it sees this one later
        self._add(producer, 0, node, saved, Recomputed.how)

    def _add(self, producer: Node, index: int, node: Node, saved: Tensor, how: str) -> None:
        """List the memory of an operation's output once."""
        base, index = base_of(producer, index)
        base_notes = None if base is None else self._of(base)
        consumer = self._of(node)
        is_indices = base is None and not saved.is_floating_point()
        if consumer is None or (base_notes is None and not is_indices):
            return  # an argument of the model, or a parameter
        row = None if base_notes is None else base_notes.listed.get(index)
        if row is None:
            row = len(self._found)
            name = NO_PRODUCER if base is None else nodes.operation_name(base)
            size = saved.untyped_storage().nbytes()
            path = self._path[-1]
            self._found.append(Replaced(name, nodes.operation_name(node), path, size, how))
            if base_notes is not None:
                base_notes.listed[index] = row
        consumer.rows.append(row)

    def unchanged(self, node: Node, field: str, reason: str) -> None:
        node_notes = self._of(node)
        if node_notes is not None:
            node_notes.reasons[field] = reason

    def fill(self, report: Report, output: Any, inputs: Any) -> None:
        """Fill in a report, when forward has returned, if the graph of the pass is there to see."""
        with torch._C.DisableTorchFunction():
            graph = self._graph_of(output)
            if graph:
                self._fill(report, graph, inputs)

    def _fill(self, report: Report, graph: list[Node], inputs: Any) -> None:
        known = {storage_id(t.untyped_storage()) for t in _strided(inputs)}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            known.update(storage_id(t.untyped_storage()) for t in _strided(tensor))
        rows = {row for node in graph for row in self._of(node).rows}  # type: ignore[union-attr]
        remaining: list[Remaining] = []
        added = 0
        for node in graph:
            for field, saved in nodes.readable_tensors(node):
                storage = saved.untyped_storage() if nodes.is_plain(saved) else None
                if storage is None or storage_id(storage) in known:
                    continue
                known.add(storage_id(storage))
                if is_fused(node) and field != "0":  # what PyTorch's activation does not save
                    added += storage.nbytes()
                    continue
                base, index = base_of(saved.grad_fn, saved.output_nr)
                base_notes = None if base is None else self._of(base)
                if base_notes is not None:  # replaced for another operation, and saved nevertheless
                    rows.discard(base_notes.listed.get(index, -1))
                remaining.append(self._remaining(node, field, saved, base))
        for node in graph:
            for packed in nodes.packed_values(node):
                for tensor in packed.tensors():
                    storage = tensor.untyped_storage()
                    if storage_id(storage) not in known:
                        known.add(storage_id(storage))
                        added += storage.nbytes()
        replaced = [self._found[row] for row in rows]
        report.fill(replaced, remaining)
        saved_bytes = sum(row.bytes for row in remaining)
        report.saved_bytes_before = saved_bytes + sum(row.bytes for row in replaced)
        report.saved_bytes_after = saved_bytes + added

    def _remaining(self, node: Node, field: str, saved: Tensor, base: Node | None) -> Remaining:
        node_notes = self._of(node)
        assert node_notes is not None
        return Remaining(
            NO_PRODUCER if base is None else nodes.operation_name(base),
            nodes.operation_name(node),
            node_notes.module,
            saved.untyped_storage().nbytes(),
            _reason(node_notes, node, field, saved, base),
        )

    def _graph_of(self, output: Any) -> list[Node]:
        """Return all nodes of the pass that tensors in `output` follow from, in their order."""
        found: dict[Node, int] = {}
        pending: list[Node] = [tensor.grad_fn for tensor in tensors_in(output)]
        while pending:
            node = pending.pop()
            if node is not None and node not in found and self._of(node) is not None:
                found[node] = nodes.sequence_number(node) or 0
                pending += [before for before, _ in nodes.producers(node)]
        return sorted(found, key=found.__getitem__)


def _reason(
    node_notes: _NodeNotes, node: Node, field: str, saved: Tensor, base: Node | None
) -> str:
    """Return why a tensor is saved: what the engine said, or what kept it from looking."""
    if base is None:
        return reasons.NO_GRADIENT
    if nodes.is_cast_of_autograd_leaf(base):
        return reasons.PARAMETER_COPY
    if field in node_notes.reasons:
        return node_notes.reasons[field]
    return reasons.SMALL if saved.nbytes < MIN_BYTES else reasons.saved_by(node)


def _eager_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Return the modules by path, without those that are compiled or scripted."""
    is_compiled = isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl
    if is_compiled or isinstance(model, torch.jit.ScriptModule):
        return
    yield path, model
    for name, child in model.named_children():
        yield from _eager_modules(child, f"{path}.{name}" if path else name)


def _strided(value: Any) -> Iterator[Tensor]:
    return filter(nodes.is_plain, tensors_in(value))
