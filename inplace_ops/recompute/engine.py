"""The recompute engine: saves recompute specs in place of tensors that are cheap to compute again.

PyTorch saves for backward whatever an operation needs, also where it follows cheaply from what is
saved anyway: the output of an activation whose input is saved, of a norm whose input is saved, of a
sum or a product of such tensors. The engine looks at every autograd node that a model's forward
makes. It replaces such saved tensors, by PyTorch's hooks on a single saved tensor
(`node._raw_saved_x.register_hooks`), and PyTorch itself puts what is recomputed back into its place
in the graph. Nothing is traced, and no operation is replaced.

    for each new node:
        for each saved tensor that backward may be given recomputed:
            spec = output_spec(the operation that made the tensor)
            if spec and spec.cost <= max_ops: save spec, and compute it when backward asks

`operations.py` is all that is known of PyTorch's operations, `versions.py` proves that nobody wrote
to a tensor unseen, `specs.py` computes, `rewrites.py` stores exactly what is left, smaller.

NOTE [Where nodes come from]

From torch 2.14 on `torch.autograd.graph.node_creation_hook` passes each node as it is made. Before,
a forward hook on every module walks back from the module's output over the nodes made since, in the
order of their sequence numbers; so does an activation module from its input. The walk stops at
nodes that the engine has seen, and at those that are older than the model's call. It sees a node
late: what can no longer be proved then is saved as PyTorch saves it. `Engine.see` is behind both.

NOTE [Leaves]

1. Large leaves are activations that their operation saves anyway: they are read from its saved
   field, without their graph and with their version, which is compared again in backward.
2. Other leaves (parameters, buffers, constants) are copied when their operation's node is seen.
   FSDP2 frees a parameter's memory when its module's forward has ended, and reading it later
   crashes; an optimizer may write to it through `.data`. One that is larger than 64 KiB, or no
   smaller than the operation's output, is not copied: there is no spec. When the model's forward
   has ended, only specs hold copies.
3. A leaf may outlive its operation's backward: with two losses, one goes backward first. So a spec
   whose leaves are more than four times as large as what it replaces is not built (a slice of
   something large), nor one whose copies are as large.
4. A write to a leaf that begins after its consumer was seen raises in backward. PyTorch raises too,
   unless backward goes past the operation that has saved the leaf, to parameters of the consumer.
5. Copies and scales are computed on the current CUDA stream, and are ready on that one alone. What
   is read on another stream than its operation's is saved as PyTorch saves it.

NOTE [First use]

A write through `.data`, NumPy or a storage leaves no trace, neither in the graph nor in a version.
So the first time that a spec is used in its place its value is compared with the saved tensor, bit
for bit or within its rounding. If they differ, that tensor is saved as PyTorch saves it, from then
on, with one warning. The place is the ordinal in the forward pass of the outermost converted model,
the types of the nodes, shape, dtype and strides. What remains: a write without a trace that begins
only after the first use of its place.

NOTE [Containment]

1. An error inside of the engine leaves a tensor saved and warns once; it never reaches the model.
2. The engine of a call is known to its thread alone, and forgotten in a `finally`.
3. Nodes that were made outside of a converted model's call have no record, and are never read.
4. The engine stands aside from tracers, compilers, `torch.func` and tensors that are not plain.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import _ops
from .._torch_private import storage_id, tree_leaves
from ..memory import Packed
from . import functions, nodes, norms, reasons
from .fusions import call_of
from .nodes import Node
from .operations import (
    OPERATION_OF,
    OPERATIONS,
    VIEW_OF,
    Argument,
    Operation,
    Output,
    base_of,
)
from .rewrites import Mask, Shape
from .specs import Affine, Call, Downcast, DowncastMemory, Leaf, Recomputed, Spec
from .versions import (
    COPY_LIMIT,
    Record,
    attach_record,
    cloned_input,
    record_of,
    record_output,
    take_note,
    was_visited,
)

_T = TypeVar("_T")
Reason = str | Callable[..., str]

# Errors at reading what a node has saved. If the operation's backward comes, it says so itself.
_RAISED_BY_BACKWARD = (
    *("modified by an inplace operation", "second time"),
    "Creating a new autograd node from inside a node creation hook",  # of a view, written to
    "is a view and its base or another view of its base has been modified inplace",
)

MIN_BYTES = 4096  # smaller tensors are left alone
MAX_OPS = 4
_LEAF_FACTOR = 4  # see NOTE [Leaves]
_CAST = OPERATIONS["ToCopyBackward0"]
_MAX_SPEC_KEYS = 2**16


class SpecKey(NamedTuple):
    """What tells one spec from all others of a model: see NOTE [First use].

    Attributes:
        ordinal: Which of the nodes with a rule it is, counted in the forward pass.
        kinds: The types of the nodes, the field, and the spec's cost.
        shape: That of the saved tensor; so are the others.
    """

    ordinal: int
    kinds: tuple[Any, ...]
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device


class Settings:
    """What the calls of a converted model share.

    Attributes:
        max_ops: The most operations that a spec may take.
        verified: Whether the spec with a key came out right at its first use.
        observer: Told what is replaced and what is not, for a report; None mostly.
    """

    def __init__(self, max_ops: int = MAX_OPS) -> None:
        self.max_ops = max_ops
        self.verified: dict[SpecKey, bool] = {}
        self.has_warned = False

    def warn(self, text: str) -> None:
        """Warn once for each model. Never raises, even if warnings are errors."""
        if not self.has_warned:
            self.has_warned = True
            with suppress(Warning):
                warnings.warn(text, stacklevel=2)


class Observer:
    """Is told what the engine does: the base of what fills a report in."""

    def created(self, node: Node) -> None:
        """A node was made."""

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> Packed:
        """Return what is saved instead of a tensor: mostly `packed`."""
        return packed

    def fused(self, producer: Node, node: Node, saved: Tensor) -> None:
        """An activation was fused with a norm; PyTorch's would have saved a tensor like `saved`."""

    def unchanged(self, node: Node, field: str, reason: str) -> None:
        """A saved tensor was looked at and left."""


class _Running(threading.local):
    engine: Engine | None = None


_running = _Running()


def running_engine() -> Engine | None:
    """Return the engine of the converted model whose forward runs in this thread.

    None in code that is compiled, which goes by without it.
    """
    return None if torch.compiler.is_dynamo_compiling() else _running.engine


@contextmanager
def run_engine(settings: Settings, observer: Observer | None = None) -> Iterator[Engine | None]:
    """Run the engine in this thread; yields None, and does nothing, where one runs already."""
    if _running.engine is not None or nodes.is_transformed():
        yield None
        return
    engine = Engine(settings, observer)
    source = nodes.creation_hook(_visit) if USE_CREATION_HOOK else nullcontext()
    try:
        _running.engine = engine
        with source:
            yield engine
    finally:
        _running.engine = None


USE_CREATION_HOOK = nodes.creation_hook is not None


def _visit(node: Node) -> None:
    """The node creation hook."""
    engine = _running.engine
    if engine is not None and engine.is_new(node):
        engine.visit(node)


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    """Let a method of the engine warn where it would raise: see NOTE [Containment]."""

    @functools.wraps(method)
    def contained(engine: Engine, *args: Any) -> None:
        try:
            method(engine, *args)
        except Exception as error:
            engine.warn_of(error)

    return contained


class _ParameterVersion(NamedTuple):
    """A norm's weight or bias when its module's call began.

    Attributes:
        parameter: The weight or bias.
        version: Its version.
        number: The sequence number of the next node.
    """

    parameter: Tensor
    version: int
    number: int


class Engine:
    """The engine during one forward pass."""

    def __init__(self, settings: Settings, observer: Observer | None) -> None:
        self.settings = settings
        self.observer = observer
        self._last: int | None = None  # the sequence number of the last node
        self._ordinal = 0
        self._stream: Any = None  # of the node that is looked at
        self._reason: tuple[Any, ...] = ("",)  # why there is no spec: a reason, its arguments
        self._parameter_versions: dict[int, _ParameterVersion] = {}
        self._copying: list[weakref.ref[Record]] = []  # what has copies, or may get them
        self._downcasts: list[weakref.ref[DowncastMemory]] = []
        # Of the walk over nodes: where it stops.
        self._first = nodes.next_sequence_number()
        self._inputs: set[Node] = set()

    def is_new(self, node: Node) -> bool:
        """Whether the last node was another one.

        A forward that leaves a creation hook of its own open makes ours stay, beside the next
        call's.
        """
        number = nodes.sequence_number(node)
        is_new = number is None or number != self._last
        self._last = number
        return is_new

    def visit(self, node: Node) -> None:
        """Look at a node that has just been made. Keeps no reference to it."""
        try:
            if self.observer is not None:
                self.observer.created(node)
            operation = OPERATION_OF[type(node)]
            if operation is None or nodes.is_transformed():
                return
            if operation is _CAST and nodes.downcasts_autograd_leaf(
                node
            ):  # autocast's, of a parameter
                return
            with nodes.no_graph():  # a node creation hook must make no node
                self._visit(node, operation)
        except Exception as error:
            self.warn_of(error, node)

    def walk(self, value: Any) -> None:
        """See the new nodes behind tensors in `value`: see NOTE [Where nodes come from]."""
        if not USE_CREATION_HOOK and torch.is_grad_enabled():
            self._walk(value)

    @_contained
    def _walk(self, value: Any) -> None:
        tensors = [value] if isinstance(value, Tensor) else tree_leaves(value)
        pending = [t.grad_fn for t in tensors if isinstance(t, Tensor)]
        if len(pending) == 1 and (pending[0] is None or was_visited(pending[0])):
            return  # mostly the output of a module inside
        end = nodes.next_sequence_number()
        found: dict[Node, float] = {}
        while pending:
            node = pending.pop()
            number = None if node is None else nodes.sequence_number(node)
            if number is None or not self._first <= number < end:
                continue
            if node in found or node in self._inputs or was_visited(node):
                continue
            found[node] = number
            pending += [before for before, _ in nodes.producers(node)]
            clone = cloned_input(node)
            if clone is not None:  # which no edge leads to
                found[clone.grad_fn] = number - 0.5
        for node in sorted(found, key=found.__getitem__):
            attach_record(node, None)
            self.visit(node)

    @_contained
    def stop_at(self, inputs: Any) -> None:
        """Let `walk` stop at what the model is called with: its graph is somebody else's."""
        if not USE_CREATION_HOOK:
            tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
            self._inputs.update(t.grad_fn for t in tensors if t.grad_fn is not None)

    @_contained
    def finish(self) -> None:
        """Free what no spec has come to need, when the model's forward has returned."""
        for record in _alive(self._copying):
            record.free_copies()
        with nodes.no_graph():
            for memory in _alive(self._downcasts):
                memory.settle()

    @_contained
    def note(self, tensor: Any) -> None:
        """Remember an operation's output: see NOTE [Versions are proved]."""
        if type(tensor) is Tensor and tensor.grad_fn is not None:
            take_note(tensor)

    @_contained
    def enter_norm(self, module: nn.Module) -> None:
        """Remember the versions of a norm's weight and bias, which its node may not tell."""
        number = nodes.next_sequence_number()
        for parameter in norms.registered_parameters(module):
            if parameter is not None and not parameter.is_inference():
                self._parameter_versions[id(parameter)] = _ParameterVersion(
                    parameter, parameter._version, number
                )

    @_contained
    def note_output(self, module: nn.Module, output: Any, comes_first: bool) -> None:
        """Remember a module's output, and of a norm what its node does not tell.

        Args:
            module: The module.
            output: What it returned.
            comes_first: Whether no hook has run since its forward, which may have put back an eps
                or a bias, or put another norm's output in place of the module's.
        """
        if not isinstance(output, Tensor) or output.grad_fn is None:
            return
        with nodes.no_graph():
            node, _ = base_of(output.grad_fn, output.output_nr)
            record = record_of(node) if node is not None else None
            if record is None:
                return
            if not record.is_known and norms.kind_of(node) is not None:
                self._record_norm_module(module, node, record, output, comes_first)
            if type(output) is Tensor:
                record.take_note(output)

    def _record_norm_module(
        self, module: nn.Module, node: Node, record: Record, output: Tensor, comes_first: bool
    ) -> None:
        if not comes_first or not norms.runs_pytorchs_forward(module):
            if record.eps is None:
                record.eps = norms.eps_confirmed_by_output(output, node, record.parameters, module)
            return
        record.eps = norms.eps_of(module)
        if record.parameters is None and not record.is_known:
            known = norms.parameters_of_module(node, module)
            if known is not None and self._are_unmodified(known, node):
                record_parameters(node, record, known)

    def _are_unmodified(self, parameters: Iterable[Tensor | None], node: Node) -> bool:
        """Whether nobody has written to a norm's parameters since before its operation ran."""
        number = nodes.sequence_number(node)
        for parameter in parameters:
            if parameter is None:
                continue
            entered = self._parameter_versions.get(id(parameter))
            if entered is None or number is None or number < entered.number:
                return False
            if parameter.is_inference() or parameter._version != entered.version:
                return False
        return True

    def warn_of(self, error: Exception, node: Node = None) -> None:
        """Warn of an error inside of the engine, at a node."""
        if isinstance(error, RuntimeError) and any(
            text in str(error) for text in _RAISED_BY_BACKWARD
        ):
            return
        where = "" if node is None else f" of {nodes.operation_name(node)}"
        self.settings.warn(
            f"inplace_ops: tensors{where} are saved as PyTorch saves them, as looking at them "
            f"failed: {type(error).__name__}: {error}"
        )

    def _visit(self, node: Node, operation: Operation) -> None:
        self._ordinal += 1
        self._stream = nodes.stream_of(node)
        record = None
        if operation.output is not None or operation.saved_output:
            record = self._record(node, operation)
            if record is not None:
                record.stream = self._stream
                attach_record(node, record)
                if record.copies or operation.output == "norm":
                    self._copying.append(weakref.ref(record))
        for field in operation.reads:
            self._replace_input(node, field)
        if record is not None and operation.result:
            self._replace_result(node, operation, record)
        if operation.shape_only:
            saved = self._rewritable(node, operation.shape_only)
            if saved is not None:
                self._pack(node, operation.shape_only, saved, Shape(saved))
        if operation.indices:
            saved = self._rewritable(node, operation.indices)
            if saved is not None and saved.untyped_storage().nbytes() == saved.nbytes:
                spec = Downcast(self._downcast_memory(saved, torch.int32), saved)
                name = ("indices", nodes.operation_name(node))
                self._pack(node, operation.indices, saved, Recomputed(spec, saved, *name))
        if operation.reads_no_values:
            for producer, index in nodes.producers(node):
                self._pack_mask(*base_of(producer, index))
        if self.observer is not None:
            self._reason = ("",)  # it may refer to nodes

    def _record(self, node: Node, operation: Operation) -> Record | None:
        output = operation.output
        if output is None:
            return Record()
        if output == "activation after a norm":
            return Record(node.output_version)
        if output == "norm":
            record = Record()
            if not nodes.has_hooks(node, "input"):
                known = norms.parameters_of(node)
                # A node that is seen late does not tell whether its bias was written to since,
                # unless it saves that bias.
                is_sure = USE_CREATION_HOOK or norms.node_determines_bias(node)
                if known is not None and (is_sure or self._are_unmodified((known.bias,), node)):
                    record_parameters(node, record, known)
            return record
        assert isinstance(output, Output)
        record = record_output(node, output, operation.result)
        for field in output.inputs:
            saved = None if field is None else nodes.saved_tensor(node, field)
            if field is not None and saved is not None and not _is_activation(saved):
                usable = nodes.is_plain(saved) and nodes.has_storage(saved)
                if usable and saved.nbytes <= min(COPY_LIMIT, nodes.output_bytes(node, 0) - 1):
                    record.copies[field] = saved.detach().clone()
        return record

    def _replace_input(self, node: Node, field: str) -> None:
        """Save a spec in place of a saved input, where there is one."""
        saved = nodes.saved_tensor(node, field)
        producer = None if saved is None else saved.grad_fn
        if saved is None or producer is None or saved.nbytes < MIN_BYTES:
            return
        index = saved.output_nr
        base, _ = base_of(producer, index)
        record = base and record_of(base)
        if not record:
            return self._leave(node, field, reasons.output_of, base)
        if not nodes.is_plain(saved):
            return self._leave(node, field, reasons.NOT_PLAIN)
        if record.stream is not self._stream:
            return self._leave(node, field, reasons.OTHER_STREAM)
        if not saved._is_view() and nodes.saves_itself(node, field):
            record.take_note(saved)
        version = saved._version
        if version != 0 and version != record.version:
            return self._leave(node, field, reasons.WRITTEN_TO)
        self._set_reason(reasons.output_of, base)
        spec = self._output_spec(producer, index)
        if spec is None or spec.cost > self.settings.max_ops:
            spec = self._cast_back(base, record, saved) or spec
        if spec is None:
            record.is_saved = True
            return self._leave(node, field, *self._reason)
        if not self._replace(node, field, saved, spec, base):
            record.is_saved = True

    def _replace_result(self, node: Node, operation: Operation, record: Record) -> None:
        """Save a spec in place of the operation's own saved output, where there is one."""
        saved = self._rewritable(node, operation.result)
        if saved is None:
            return
        self._set_reason(reasons.output_of, node)
        spec = self._computed(node, 0, operation, record)
        if spec is None:
            return self._leave(node, operation.result, *self._reason)
        self._replace(node, operation.result, saved, spec, node)

    def _replace(self, node: Node, field: str, saved: Tensor, spec: Spec, base: Node) -> bool:
        if spec.cost > self.settings.max_ops:
            self._leave(node, field, reasons.too_many, self.settings.max_ops)
            return False
        if spec.cost == 0 and any(_share_memory(leaf.tensor, saved) for leaf in spec.leaves()):
            self._leave(node, field, reasons.SAVED_ANYWAY)
            return False
        size = saved.nbytes
        if spec.copied_bytes >= size:
            self._leave(node, field, reasons.AS_LARGE)
            return False
        if spec.leaf_bytes > _LEAF_FACTOR * size:
            self._leave(node, field, reasons.MUCH_LARGER)
            return False
        value = Recomputed(spec, saved, nodes.operation_name(base), nodes.operation_name(node))
        if not self.is_right(lambda: value, saved, type(node), field, type(base), spec.cost):
            self._leave(node, field, reasons.DIFFERENT)
            return False
        self._pack(node, field, saved, value)
        return True

    def is_right(self, make: Callable[[], Recomputed], saved: Tensor, *kinds: Any) -> bool:
        """Whether a spec came out right at the first use of its key: see NOTE [First use].

        Args:
            make: Returns the spec, if it is needed.
            saved: The tensor that it replaces.
            *kinds: What tells the spec from others at the same ordinal.
        """
        key = SpecKey(self._ordinal, kinds, saved.shape, saved.dtype, saved.stride(), saved.device)
        verified = self.settings.verified
        known = verified.get(key)
        if known is None:
            if saved.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            value = make()
            difference = value.difference(saved)
            known = difference is None
            if len(verified) >= _MAX_SPEC_KEYS:
                verified.clear()
            verified[key] = known
            if not known:
                self.settings.warn(
                    f"inplace_ops: the output of {value.name} differs from what its inputs tell "
                    f"by {difference}, as after a write through .data; it is saved as PyTorch "
                    "saves it"
                )
        return known

    def _rewritable(self, node: Node, field: str) -> Tensor | None:
        """Return a saved tensor that may be stored smaller."""
        saved = nodes.saved_tensor(node, field)
        if saved is None or saved.nbytes < MIN_BYTES or not nodes.is_plain(saved):
            return None
        return saved

    def _downcast_memory(self, saved: Tensor, dtype: torch.dtype) -> DowncastMemory:
        memory = DowncastMemory(saved, dtype)
        self._downcasts.append(weakref.ref(memory))
        return memory

    def _pack(self, node: Node, field: str, saved: Tensor, value: Packed) -> None:
        if self.observer is not None:
            value = self.observer.replaced(node, field, saved, value)
        value.stream = self._stream
        nodes.replace(node, field, value)

    def _pack_mask(self, node: Node, index: int) -> None:
        """Store what a ReLU has saved in bits, where what follows it reads no values."""
        operation = None if node is None else OPERATION_OF[type(node)]
        if operation is None or operation.mask is None:
            return
        record, field = record_of(node), operation.activation_field
        if record is None or record.is_saved or nodes.has_hooks(node, field):
            return
        if record.stream is not self._stream:
            return
        saved = self._rewritable(node, field)
        if saved is not None and _ops.has_kernel(saved):
            self._pack(node, field, saved, Mask(saved, operation.mask))

    def _set_reason(self, reason: Callable[..., str], *args: Any) -> None:
        """Remember what stands in the way of a spec, for a report."""
        if self.observer is not None:
            self._reason = reason, *args

    def _leave(self, node: Node, field: str, reason: Reason, *args: Any) -> None:
        if self.observer is not None:
            text = reason if isinstance(reason, str) else reason(*args)
            self.observer.unchanged(node, field, text)

    def _output_spec(self, node: Node, index: int) -> Spec | None:
        """Return how an operation's output is computed; None if that is not known."""
        view = VIEW_OF[type(node)]
        if view is not None:
            if not view.condition(node):
                return None
            spec = self._output_spec(*nodes.producer(node, 0))
            arguments = _arguments(node, index, view.arguments)
            return spec and Call(view.function, (spec,), arguments, cost=0)
        operation = OPERATION_OF[type(node)]
        record = None if operation is None else record_of(node)
        if operation is None or record is None or record.stream is not self._stream:
            return None
        if operation.result:
            packed = nodes.packed(node, operation.result)
            if isinstance(packed, Recomputed):
                return packed.spec
            saved = nodes.saved_tensor(node, operation.result)
            if saved is None or not nodes.is_plain(saved):
                return None
            record.is_saved = True
            return Leaf(saved)
        if operation.saved_output:
            saved = nodes.saved_tensor(node, operation.saved_output) if index == 0 else None
            return Leaf(saved) if saved is not None and nodes.is_plain(saved) else None
        return self._computed(node, index, operation, record)

    def _computed(
        self, node: Node, index: int, operation: Operation, record: Record
    ) -> Spec | None:
        output = operation.output
        if not record.inputs_proved or index != 0:
            self._set_reason(reasons.unproved_input, node)
            return None
        if output == "norm":
            return self._norm(node, record)
        if output == "activation after a norm":
            return functions.output_spec(node)
        assert isinstance(output, Output)
        if not output.condition(node):
            return None
        fields = output.inputs or (None,) * len(nodes.producers(node))
        inputs: list[Spec] = []
        for position, field in enumerate(fields):
            spec = self._input(node, position, field, record)
            if spec is None:
                return None
            if spec.cost > self.settings.max_ops:
                self._set_reason(reasons.too_many, self.settings.max_ops)
                return None
            inputs.append(spec)
        return call_of(
            output.function,
            inputs,
            _arguments(node, index, output.arguments),
            output.cost,
            output.bound,
            nodes.output_dtype(node, index),
        )

    def _input(self, node: Node, position: int, field: str | None, record: Record) -> Spec | None:
        """Return how an input of an operation is computed."""
        self._set_reason(reasons.hidden_input, node)
        if field is not None:
            packed = nodes.packed(node, field)
            if packed is not None:
                return packed.spec if isinstance(packed, Recomputed) else None
            if nodes.has_hooks(node, field):
                return None
            copy = record.copies.get(field)
            if copy is not None:
                return Leaf(copy, is_copy=True)
            saved = nodes.saved_tensor(node, field)
            if saved is not None:
                usable = _is_activation(saved) and nodes.is_plain(saved)
                return Leaf(saved) if usable and nodes.has_storage(saved) else None
        producer, index = nodes.producer(node, position)
        self._set_reason(reasons.unsaved_input, node, producer, index)
        return None if producer is None else self._output_spec(producer, index)

    def _norm(self, node: Node, record: Record) -> Spec | None:
        """Return how a norm's output is computed."""
        x = self._input(node, 0, "input", record)
        if x is None:
            return None
        affine = affine_of(node, record)
        if affine is not None:
            return Affine(x, affine, nodes.output_dtype(node, 0))
        self._set_reason(reasons.unknown_parameters, node)
        if record.parameters is None:
            return None
        rerun = norms.rerun_of(node, record.parameters, record.eps)
        if rerun is None:
            return None
        replaced = nodes.packed(node, "input")
        if isinstance(replaced, Recomputed):  # how a norm rounds depends on the strides
            x = Call(replaced.in_layout, (x,), cost=0)
        return Call(rerun, (x,))

    def _cast_back(self, node: Node, record: Record, saved: Tensor) -> Spec | None:
        """Return what was cast to `saved`, if that is as good and smaller: one for all who ask."""
        if type(node).__name__ != "ToCopyBackward0" or saved._version != 0:
            return None
        source = nodes.output_dtype(*nodes.producer(node, 0))
        if not _is_lossless(source, saved.dtype):
            return None
        if saved.untyped_storage().nbytes() != nodes.output_bytes(node, 0):
            return None
        memory = record.downcast() if record.downcast is not None else None
        if memory is None:
            memory = self._downcast_memory(saved, source)
            record.downcast = weakref.ref(memory)
        return Downcast(memory, saved)


def _alive(references: Iterable[weakref.ref[_T]]) -> Iterator[_T]:
    return (value for reference in references if (value := reference()) is not None)


def record_parameters(node: Node, record: Record, known: norms.Parameters) -> None:
    """Keep what a norm has read of its weight and bias: its affine, its columns, or copies.

    Of a batch norm the affine, which is as small. In eval mode it has to be computed at once: a
    training call of the norm writes to the running statistics, and raises no version. Of a norm of
    rows the columns, which are copies of both, made by one kernel.
    """
    if norms.is_batch_norm(node) and norms.can_compute(node):
        affine = norms.affine_of(node, known)
        if affine.nbytes <= COPY_LIMIT:
            record.affine = affine
            return
        if norms.reads_running_statistics(node):
            return
    elif norms.normalizes_rows(node) and known.weight is not None and norms.can_compute(node):
        columns = norms.column_affine_of(node, known)
        if columns.nbytes <= COPY_LIMIT:
            record.column_affine = columns
            return
    record.parameters = known.copied(COPY_LIMIT)


def affine_of(node: Node, record: Record) -> norms.NormAffine | None:
    """Return the function of a norm, computed once; None if it is not known."""
    if record.affine is not None:
        return record.affine
    if record.column_affine is not None:
        record.affine = norms.NormAffine(record.column_affine, norms.row_statistics_of(node))
    elif record.parameters is not None and norms.can_compute(node):
        record.affine = norms.affine_of(node, record.parameters)
    return record.affine


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    return storage_id(tensor.untyped_storage()) == storage_id(other.untyped_storage())


def _is_activation(saved: Tensor) -> bool:
    """Whether an operation has made the tensor: it is no parameter, buffer or constant."""
    if saved.grad_fn is None:
        return False
    node, _ = base_of(saved.grad_fn, saved.output_nr)
    return node is not None and nodes.autograd_leaf_of(node) is None


def _is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast from `source` to `target` keeps all values."""
    wider = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    return wider.get(source) is target or (source is torch.float32 and target is torch.float64)


def _arguments(node: Node, index: int, arguments: tuple[Argument, ...]) -> list[Any]:
    return [nodes.argument(node, a) if isinstance(a, str) else a(node, index) for a in arguments]
