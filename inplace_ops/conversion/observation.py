"""Observing one forward pass of a converted model, for its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch import storage_id
from ..memory import Packed
from ..recompute import nodes, reasons
from ..recompute.engine import MIN_BYTES, Observer, running_engine
from ..recompute.functions import is_fused
from ..recompute.nodes import Node
from ..recompute.operations import base_of
from ..recompute.specs import Recomputed
from .example import tensors_in
from .report import Remaining, Replaced, Report

_MODULE, _REASONS, _COUNTED = (f"inplace_ops: {key}" for key in ("module", "reasons", "counted"))
NO_PRODUCER = "(no grad_fn)"


class Observation(Observer):
    """What the engine replaces and what remains, with the modules' paths.

    The paths come from hooks on all modules for the time of the pass. What is noted of a node is in
    its metadata: no tensor lives longer for being observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: list[Replaced | None] = []
        self._before = self._added = 0
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

    def made(self, node: Node) -> None:
        node.metadata[_MODULE] = self._path[-1]

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> Packed:
        base, _ = base_of(saved.grad_fn, saved.output_nr)
        self._add(base, node, saved, packed.how)
        return packed

    def fused(self, producer: Node, node: Node, saved: Tensor) -> None:
        self._add(producer, node, saved, Recomputed.how)

    def _add(self, base: Node | None, node: Node, saved: Tensor, how: str) -> None:
        """List the memory of an operation's output once, for the first that would save it."""
        producer = NO_PRODUCER if base is None else nodes.operation_name(base)
        consumer, size = nodes.operation_name(node), saved.untyped_storage().nbytes()
        if base is not None:
            if _COUNTED in base.metadata:
                return
            base.metadata[_COUNTED] = len(self.found)
        self.found.append(Replaced(producer, consumer, self._path[-1], size, how))
        self._before += size

    def kept(self, node: Node, field: str, reason: str) -> None:
        node.metadata.setdefault(_REASONS, {})[field] = reason

    def fill(self, report: Report, output: Any, inputs: Any) -> None:
        """Fill in a report, when forward has returned, if the graph of the pass is there to see."""
        with torch._C.DisableTorchFunction():
            graph = _graph_of(output)
            if graph:
                self._fill(report, graph, inputs)

    def _fill(self, report: Report, graph: list[Node], inputs: Any) -> None:
        known = {storage_id(t.untyped_storage()) for t in _strided(inputs)}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            known.update(storage_id(t.untyped_storage()) for t in _strided(tensor))
        remaining = list(self._remaining(graph, known))
        after = self._added + sum(row.bytes for row in remaining)
        for node in graph:
            for packed in nodes.packed_values(node):
                for tensor in packed.tensors():
                    storage = tensor.untyped_storage()
                    if storage_id(storage) not in known:
                        known.add(storage_id(storage))
                        after += storage.nbytes()
        report.fill(filter(None, self.found), remaining)
        report.saved_bytes_before, report.saved_bytes_after = self._before, after

    def _remaining(self, graph: list[Node], known: set[int]) -> Iterator[Remaining]:
        for node in graph:
            for field, saved in nodes.readable_tensors(node):
                if not nodes.is_plain(saved):
                    continue
                storage = saved.untyped_storage()
                if storage_id(storage) in known:
                    continue
                base, _ = base_of(saved.grad_fn, saved.output_nr)
                known.add(storage_id(storage))
                if is_fused(node) and field != "0":  # what PyTorch's activation does not save
                    self._added += storage.nbytes()
                    continue
                listed = None if base is None else base.metadata.get(_COUNTED)
                if listed is None:
                    self._before += storage.nbytes()
                else:  # replaced for one operation, and saved by another nevertheless
                    self.found[listed] = None
                yield Remaining(
                    NO_PRODUCER if base is None else nodes.operation_name(base),
                    nodes.operation_name(node),
                    node.metadata.get(_MODULE, ""),
                    storage.nbytes(),
                    _reason(node, field, saved, base),
                )


def _reason(node: Node, field: str, saved: Tensor, base: Node | None) -> str:
    """Return why a tensor is saved: what the engine said, or what kept it from looking."""
    if base is None:
        return reasons.NO_GRADIENT
    if nodes.is_cast_leaf(base):
        return reasons.PARAMETER_COPY
    known = node.metadata.get(_REASONS, {}).get(field)
    if known is not None:
        return known
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


def _graph_of(output: Any) -> list[Node]:
    """Return all nodes of the pass that tensors in `output` follow from, in their order."""
    found: dict[Node, int] = {}
    pending: list[Node] = [tensor.grad_fn for tensor in tensors_in(output)]
    while pending:
        node = pending.pop()
        if node is not None and node not in found and _MODULE in node.metadata:
            found[node] = nodes.sequence_number(node) or 0
            pending += [before for before, _ in nodes.producers(node)]
    return sorted(found, key=found.__getitem__)
