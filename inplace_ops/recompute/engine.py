"""The recompute engine: replaces saved tensors by recompute specs.

Autograd saves for backward every tensor that an operation's gradient reads, even a tensor that is
cheap to recompute from other saved tensors: the output of an activation whose input is saved, the
output of a norm whose input is saved, a sum or a product of such tensors. The engine visits every
autograd node that a model's forward creates, and replaces such saved tensors with pack and unpack
hooks on the single saved tensor (`node._raw_saved_x.register_hooks`). In backward PyTorch itself
connects the recomputed tensor to the graph, as it connects every unpacked tensor. The engine traces
nothing and replaces no operation.

    for each new node:
        for each saved tensor that backward may read recomputed:
            spec = output_spec(the operation that produced the tensor)
            if spec and spec.cost <= max_ops: save spec, and compute it when backward unpacks it

What is cheap is recomputed, and what is wide, from what is narrow: NOTE [Narrow points] in
`products.py`.

- `operations.py` is the table of PyTorch's operations: all that the engine knows about them.
- `products.py` proves the weights of products and computes products; `costs.py` counts their cost.
- `versions.py` proves that a tensor was not modified between its producer and its consumer.
- `notes.py` takes notes for these proofs inside modules.
- `specs.py` computes recompute specs.
- `narrow.py` stores the narrow inputs of what has widened them.
- `rewrites.py` stores other saved tensors that have no spec in fewer bytes, without loss.

NOTE [Where nodes come from]

1. From torch 2.14 on, `torch.autograd.graph.node_creation_hook` passes each node when it is
   created.
2. Before torch 2.14, a forward hook on every module walks back from the module's output over the
   nodes that are new, and visits them in the order of their sequence numbers. An activation module
   walks back from its input too. The walk stops at nodes that the engine has visited, at nodes that
   are older than the model's call, and at the nodes of the model's arguments.
3. The walk visits a node late, when its tensors may have been modified. A tensor whose version can
   no longer be proved is saved as PyTorch saves it.
4. The hook and the walk both call `Engine.visit`.

NOTE [Leaves]

A spec leaf is a tensor that a spec is computed from.

1. A leaf that an operation computed is not copied: that operation, or one that reads the leaf,
   saves it anyway. The engine reads it from the saved field, or from a note of a tensor that some
   consumer saves. It detaches the leaf, stores its version, and compares the version in backward.
2. Other leaves (parameters, buffers, constants) are copied when their operation's node is visited,
   and so are views of them. (What a product reads is not copied: see NOTE [Weights are proved] in
   `products.py`.) FSDP2 frees a parameter's memory when its module's forward returns, and
   reading the parameter later crashes. A fused optimizer writes to a parameter without raising its
   version. A leaf that is larger than 64 KiB, or not smaller than the operation's output, is not
   copied, and there is then no spec. When the model's forward has returned, only specs own copies.
3. A spec keeps its leaves alive until the consumer's backward, even if the operation that saved
   them runs its own backward earlier, for example with two losses. So the engine builds no spec
   whose leaves are more than four times as large as the saved tensor (a slice of something large),
   and none whose copies are as large as it.
4. A write to a leaf after the spec was built raises in backward. PyTorch raises too in most cases,
   because the operation that saved the leaf raises. It does not if that operation's backward does
   not run, for example if only the gradients of the consumer's own parameters are computed, or has
   run before. If that operation's graph is gone when the spec is built, the tensor is not used as a
   leaf.
5. Copies, and the affines of norms, are computed on the current CUDA stream, and are ready on that
   stream alone. A tensor that is read on another stream than its operation's is saved as PyTorch
   saves it.

NOTE [First use]

A write through `.data`, NumPy or a storage changes neither the graph nor a version counter, so no
proof detects it. Therefore the engine verifies each spec at its first use:

1. A spec's key is the consumer's ordinal in the forward pass of the outermost converted model, the
   types of the consumer's and the producer's nodes, the saved field, the spec's cost, and the saved
   tensor's shape, dtype, strides and device. For a fused activation it has the activation's name.
   The ordinal counts the visited nodes that save tensors or are in the table of operations.
2. At the first use of a key, the engine computes the spec and compares the value with the saved
   tensor: bit for bit if the spec is exact, else within its rounding.
3. If they differ, tensors with that key are saved as PyTorch saves them from then on. The engine
   warns, once per model.
4. The number of stored keys is bounded. When the bound is reached all are dropped, and the next use
   of each is a first use again.
5. A write that changes no version counter and begins only after the first use of its key is not
   detected.

NOTE [Containment]

1. An error while the engine visits a node, takes a note or prepares a fused activation leaves the
   tensor saved. It never reaches the model. `Engine.warn_of` warns once, except of the errors that
   autograd raises for a saved tensor that was freed or written to: its own backward raises them.
   Errors in backward reach the model: a written leaf must raise.
2. An error switches nothing off for later steps. If memory runs out while a spec is compared at its
   first use, the next use of its key is a first use again.
3. The engine of a call is visible to its own thread only, and is reset in a `finally`.
4. Nodes that were created outside a converted model's call have no record. The engine never reads
   their saved tensors.
5. The engine does nothing under tracers, compilers and `torch.func` transforms, and skips tensors
   that are not plain.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .. import _ops
from .._torch_private import (
    NO_PASS,
    TO_COPY,
    UNSAFE_SPLITS,
    DisableTorchFunction,
    has_backward_hooks,
    in_tf32,
    running_pass,
    set_grad_enabled,
    storage_id,
    tree_leaves,
)
from ..memory import Packed
from . import costs, functions, nodes, norms, reasons
from .fusions import call_of
from .narrow import NarrowLeaf, NarrowSpec
from .nodes import Node
from .notes import Noting, gains_from_notes, is_user_mode_active, number_of
from .operations import (
    NEEDS_NO_RECORD,
    OPERATION_OF,
    OPERATIONS,
    VIEW_OF,
    Operation,
    Output,
    OutputRule,
    ProductRule,
    arguments_of,
    base_of,
    viewed,
)
from .products import (
    Product,
    ProductCall,
    SavedCast,
    Weight,
    memory_place,
    runs_pytorchs_forward,
    weight_inside,
    weights_of,
)
from .rewrites import Mask, Shape, indices_spec, mask_spec
from .specs import (
    Affine,
    Call,
    Leaf,
    Original,
    Recomputed,
    Restrided,
    Spec,
    ViewCall,
    largest,
)
from .versions import (
    COPY_LIMIT,
    KEY,
    FrozenBias,
    ProductFacts,
    Record,
    cloned_input,
    ensure_record,
    leaf_of,
    prove_late,
    record_of,
    record_output,
    record_product,
    saved_output_of,
    take_note_of_alias,
    was_visited,
    whole_output,
)

_T = TypeVar("_T")
Reason = str | Callable[..., str]

# Errors of reading a node's saved tensor, which is then left as it is, without a warning.
_EXPECTED_ERRORS = (
    # If the operation's backward runs, it raises these itself.
    *("modified by an inplace operation", "second time"),
    # Reading the `grad_fn` of a view whose base was modified in place creates a node.
    "Creating a new autograd node from inside a node creation hook",
    *("is a view and its base", "A view was created in"),
)

MIN_BYTES = 4096  # smaller tensors are saved as PyTorch saves them
MAX_OPS = 4
_LEAF_FACTOR = 4  # see NOTE [Leaves]
_CAST = OPERATIONS[TO_COPY]
_MOST_PRODUCTS = 3  # inside one spec: see 4 of NOTE [Narrow points] in `products.py`
_MAX_SPEC_KEYS = 2**16
_MAX_NODES = 2**32  # of one forward pass
_MAX_ALIASES = 64  # nodes that `_shares_memory_with_leaf` visits
_engines = itertools.count()


# A spec's key distinguishes it from all others of a model: see NOTE [First use].
SpecKey = tuple[Any, ...]


class _Lasting(NamedTuple):
    """Whether a parameter can be read in backward: see 6 of NOTE [Weights are proved].

    Attributes:
        storage: Its storage. With a weak reference to it `torch.utils.swap_tensors` would fail.
        lasts: Whether it had its memory when that was looked at; None until then.
    """

    storage: StorageWeakRef
    lasts: bool | None

    @classmethod
    def of(cls, parameter: Tensor, lasts: bool | None) -> _Lasting:
        """Return what is known of a parameter."""
        return cls(StorageWeakRef(parameter.untyped_storage()), lasts)


class Settings:
    """State that all forward passes of a converted model share.

    Attributes:
        max_ops: The most passes over memory that a spec may take: see `costs.py`.
        rejected: The limits from which specs that took more would have been made, rounded up.
        verified: For each spec key, whether the spec reproduced the saved tensor at its first use.
        warned: The subjects of the warnings that were issued.
    """

    def __init__(self, max_ops: int = MAX_OPS) -> None:
        self.max_ops = max_ops
        self.rejected: set[int] = set()
        self.verified: dict[SpecKey, bool] = {}
        self.warned: set[str] = set()
        self._lasting: dict[int, _Lasting] = {}

    def rejects(self, cost: float) -> bool:
        """Whether this cost is above the limit. If so, remember it."""
        if cost <= self.max_ops:
            return False
        self.rejected.add(math.ceil(cost))
        return True

    def know(self, parameters: Iterable[Tensor]) -> None:
        """Remember that parameters are the model's when `convert` runs."""
        for parameter in filter(nodes.is_plain, parameters):
            if self.lasting(parameter) is None:
                self._lasting[id(parameter)] = _Lasting.of(parameter, None)

    def lasting(self, parameter: Tensor) -> _Lasting | None:
        """Return what is known about a parameter; None if nothing is."""
        known = self._lasting.get(id(parameter))
        storage = storage_id(parameter.untyped_storage())
        return known if known is not None and known.storage.cdata == storage else None

    def learn_whether_lasts(self, weight: Weight) -> bool:
        """Look whether a parameter can be read, if that is not known. Return whether it can."""
        parameter = weight.parameter
        known = self.lasting(parameter)
        if known is None or known.lasts is None:
            if len(self._lasting) >= _MAX_SPEC_KEYS:
                self._lasting.clear()
            known = _Lasting.of(parameter, weight.can_be_read)
            self._lasting[id(parameter)] = known
        return bool(known.lasts)

    def learn_whether_last(self, weights: Sequence[Weight]) -> bool:
        """Look whether parameters can be read, if that is not known. Return whether all can."""
        return all(list(map(self.learn_whether_lasts, weights)))

    def warn(self, subject: str, text: str) -> None:
        """Warn once per model and subject. Never raise, even if warnings are errors."""
        if subject not in self.warned:
            self.warned.add(subject)
            with suppress(Warning):
                warnings.warn(f"inplace_ops: {text}", stacklevel=2)


class Observer:
    """Base class for code that observes what the engine does, for example to fill in a report."""

    def created(self, node: Node) -> None:
        """Observe that a node was created."""

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> Packed:
        """Return what to save instead of the tensor `saved`: usually `packed`."""
        return packed

    def fused(self, producer: Node, node: Node, saved: Tensor) -> None:
        """Observe that an activation was fused with a norm.

        Args:
            producer: The node of the operation whose output PyTorch's activation would save.
            node: The fused activation's node.
            saved: A tensor like the one that PyTorch's activation would save.
        """

    def unchanged(self, node: Node, field: str, reason: str) -> None:
        """Observe that a saved tensor stays saved as PyTorch saves it, and why."""


class _Running(threading.local):
    engine: Engine | None = None


_running = _Running()


def running_engine() -> Engine | None:
    """Return the engine of the converted model whose forward runs in this thread.

    Return None while Dynamo traces: compiled code runs without the engine.
    """
    return None if torch.compiler.is_dynamo_compiling() else _running.engine


@contextmanager
def run_engine(
    model: nn.Module, settings: Settings, observer: Observer | None = None, fuses: bool = True
) -> Iterator[Engine | None]:
    """Run the engine of a model in this thread, and yield it.

    `fuses` tells whether activations are fused with norms. Yield None and do nothing if an engine
    runs in this thread already, or under a tracer, a compiler or a `torch.func` transform.
    """
    if _running.engine is not None or nodes.is_transformed():
        yield None
        return
    engine = Engine(model, settings, observer)
    engine.fuses = fuses
    source = nodes.creation_hook(_on_node_created) if USE_CREATION_HOOK else nullcontext()
    try:
        _running.engine = engine
        with source:
            yield engine
    finally:
        engine.finish_notes()
        _running.engine = None


USE_CREATION_HOOK = nodes.creation_hook is not None


def _on_node_created(node: Node) -> None:
    """Visit a new node with the running engine: the node creation hook.

    PyTorch pops creation hooks in stack order. If a model's forward leaves a hook of its own open,
    PyTorch pops that one instead of the engine's, which then stays active outside of the engine's
    call, and together with the hook of the next call: every node is passed twice in a row.
    """
    engine = _running.engine
    if engine is not None and type(node) is not nodes.ACCUMULATE_GRAD_TYPE:
        engine.visit(node)


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method of the engine warn instead of raising: see NOTE [Containment]."""

    @wraps(method)
    def contained(engine: Engine, *args: Any) -> None:
        try:
            method(engine, *args)
        except Exception as error:
            engine.warn_of(error)

    return contained


class _ParameterVersion(NamedTuple):
    """A module's weight or bias at the beginning of its module's call.

    Attributes:
        parameter: The weight or bias.
        version: Its version at that time.
        next_number: The sequence number of the next node at that time.
    """

    parameter: Tensor
    version: int
    next_number: int


class Engine:
    """The recompute engine during one forward pass of a converted model.

    Attributes:
        settings: State that all forward passes of the model share.
        observer: Observes what the engine does; None if nothing does.
        fuses: Whether activations are fused with norms.
        is_paused: Whether nodes are visited, and nothing is replaced.
    """

    def __init__(self, model: nn.Module, settings: Settings, observer: Observer | None) -> None:
        self._model, self.settings = model, settings
        self.observer = observer
        self.fuses, self.is_paused = True, False
        self._ordinal = 0
        self._first_number = next(_engines) * _MAX_NODES  # see NOTE [Shared values] in `specs.py`
        self._stream: Any = None  # the CUDA stream of the node that is being visited
        self._reason: Reason = ""  # why there is no spec
        self._parameter_versions: dict[int, _ParameterVersion] = {}
        self._copying: list[weakref.ref[Record]] = []  # records that own copies, or may get them
        self._narrow: list[weakref.ref[NarrowLeaf]] = []
        self._undecided: list[weakref.ref[Recomputed]] = []  # values that keep their original
        # The walk over nodes stops at nodes older than `_first`, and at `_inputs`.
        self._first = nodes.next_sequence_number()
        self._inputs: set[Node] = set()
        self._noting = Noting()
        # Kept alive until the walk visits the operation that has read them: the outputs of
        # `nn.Identity` in a residual sum.
        self._last_noted: deque[Tensor] = deque(maxlen=2)

    @property
    def next_number(self) -> int:
        """The number of the next consumer: see NOTE [Shared values] in `specs.py`."""
        return self._first_number + self._ordinal + 1

    def visit(self, node: Node) -> None:
        """Replace a new node's saved tensors where possible, unless the node was visited before.

        The engine keeps no reference to the node.
        """
        try:
            if self.observer is not None and KEY not in node.metadata:
                self.observer.created(node)
            if self.is_paused:
                node.metadata.setdefault(KEY, None)
                return
            node_type = type(node)
            operation = OPERATION_OF[node_type]
            if operation is None:
                if NEEDS_NO_RECORD[node_type] is None:
                    node.metadata.setdefault(KEY, None)
                return
            metadata = node.metadata
            if KEY in metadata or nodes.is_transformed():
                return
            metadata[KEY] = None  # in case of an error
            if operation is _CAST and nodes.downcasts_autograd_leaf(node):
                return  # autocast's copy of a parameter
            was_enabled = torch.is_grad_enabled()
            with DisableTorchFunction():
                set_grad_enabled(False)  # a node creation hook must not create nodes
                try:
                    self._replace_saved_tensors(node, operation, metadata)
                finally:
                    set_grad_enabled(was_enabled)
            if self.observer is not None:
                self._reason = ""  # its arguments may be nodes
        except Exception as error:
            self.warn_of(error, node)

    @contextmanager
    def paused(self, value: Any) -> Iterator[None]:
        """Replace nothing within a `with` block, whose nodes come after those of `value`."""
        self.walk(value)
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    def walk(self, value: Any) -> None:
        """Visit the new nodes that tensors in `value` depend on, before torch 2.14.

        See NOTE [Where nodes come from].
        """
        if not USE_CREATION_HOOK:
            self._walk(value)

    @_contained
    def _walk(self, value: Any) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [value] if isinstance(value, Tensor) else tree_leaves(value)
        pending = [nodes.root_of(t) for t in tensors if isinstance(t, Tensor)]
        if len(pending) == 1 and (pending[0] is None or was_visited(pending[0])):
            return  # usually the output of an inner module
        end = nodes.next_sequence_number()
        new_nodes: dict[Node, float] = {}
        while pending:
            node = pending.pop()
            if node is None or node in new_nodes or not self.may_have_created(node, end):
                continue
            if was_visited(node):
                continue
            new_nodes[node] = number = nodes.sequence_number(node)
            pending += [producer for producer, _ in nodes.producers(node)]
            clone = cloned_input(node)
            if clone is not None:  # no edge of the graph leads to its node
                new_nodes[clone.grad_fn] = number - 0.5
        for node in sorted(new_nodes, key=new_nodes.__getitem__):
            self.visit(node)
            node.metadata.setdefault(KEY, None)  # where later walks stop

    def may_have_created(self, node: Node, end: int) -> bool:
        """Whether this forward pass may have created a node, whose numbers are below `end`.

        An AccumulateGrad node has the largest number. Each thread numbers its own nodes, so that
        the nodes of the model's arguments may have any number.
        """
        return self._first <= nodes.sequence_number(node) < end and node not in self._inputs

    @_contained
    def stop_at(self, inputs: Any) -> None:
        """Make `walk` stop at the nodes of the model's arguments: the caller created that graph."""
        if not USE_CREATION_HOOK:
            tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
            self._inputs.update(filter(None, map(nodes.grad_fn_of, tensors)))

    @_contained
    def finish(self) -> None:
        """Free the copies that no spec uses. Called when the model's forward has returned."""
        self._last_noted.clear()
        for record in _alive(self._copying):
            record.free_copies()
        for value in _alive(self._undecided):
            weights = weights_of(value.spec)
            are_models = all(self.settings.lasting(weight.parameter) for weight in weights)
            if are_models and self.settings.learn_whether_last(weights):
                value.original = None
        with nodes.no_graph():
            for leaf in _alive(self._narrow):
                leaf.settle()

    @property
    def keeps_originals(self) -> bool:
        """Whether tensors stay saved until it is known whether their specs can be computed."""
        return any(value.original is not None for value in _alive(self._undecided))

    def finish_notes(self) -> None:
        """Take no more notes inside modules: the model's forward has ended."""
        self._noting.end_all()

    @_contained
    def note(self, tensor: Any, is_kept: bool = False) -> None:
        """Take a note of an operation's output: see NOTE [Versions are proved] in `versions.py`.

        Args:
            tensor: The output.
            is_kept: Whether it stays alive until the walk visits the operation that reads it.
        """
        if isinstance(tensor, Tensor):
            self._take_note(tensor)
            if is_kept and not USE_CREATION_HOOK:
                self._last_noted.append(tensor)

    def _take_note(self, tensor: Tensor) -> Record | None:
        """Take a note, and return the operation's record.

        Return None if the engine has not visited the operation, or the tensor is not plain.
        """
        if type(tensor) is not Tensor:
            if not nodes.is_plain(tensor):
                return None
            with DisableTorchFunction():
                return self._take_note_of_plain(tensor)
        return self._take_note_of_plain(tensor)

    def _take_note_of_plain(self, tensor: Tensor) -> Record | None:
        node = nodes.grad_fn_of(tensor)
        if node is None:
            return None
        node, index = base_of(node, tensor.output_nr)
        if node is None or index != 0 or not was_visited(node):
            return None
        record = record_of(node) or ensure_record(node, nodes.stream_of(node))
        record.take_note(tensor)
        return record

    @_contained
    def begin_notes(self, module: nn.Module, args: Any) -> None:
        """Take notes of the tensors inside a module from now on, if the module gains from it."""
        if self._noting.is_active or gains_from_notes(module, args):
            self._noting.begin(module, self._note_result)

    def end_notes(self, module: nn.Module) -> None:
        """Take no more notes inside a module."""
        self._noting.end(module)

    @_contained
    def _note_result(self, result: Tensor, function: Callable[..., Any], args: Any) -> None:
        """Take a note of a function's result, and of the number that it has added or subtracted."""
        self.walk(result)
        node = nodes.grad_fn_of(result)
        if node is None:
            return
        number = number_of(function, args, node)
        record = self._take_note(result)
        if record is not None and number is not None:
            record.number = torch.tensor(number, dtype=torch.double)

    @_contained
    def record_parameter_versions(self, module: nn.Module) -> None:
        """Record the versions of a module's weight and bias, as the walk visits its node late."""
        next_number = nodes.next_sequence_number()
        for parameter in norms.registered_parameters(module):
            if parameter is not None and not parameter.is_inference():
                self._parameter_versions[id(parameter)] = _ParameterVersion(
                    parameter, parameter._version, next_number
                )

    @_contained
    def finish_module(
        self, module: nn.Module, output: Any, is_first_hook: Callable[[nn.Module], bool]
    ) -> None:
        """Take a note of a module's output. Record the eps, weight and bias of a norm module.

        Args:
            module: The module.
            output: The value that the module returned.
            is_first_hook: Returns whether no other forward hook has run since the module's forward.
                Such a hook may have restored an eps or a bias, or may have replaced the module's
                output by the output of another norm.
        """
        self.end_notes(module)
        self.walk(output)
        if not isinstance(output, Tensor):
            return
        if type(output) is Tensor:
            self._finish_module(module, output, is_first_hook)
        elif nodes.is_plain(output):
            with DisableTorchFunction():
                self._finish_module(module, output, is_first_hook)

    def _finish_module(
        self, module: nn.Module, output: Tensor, is_first_hook: Callable[[nn.Module], bool]
    ) -> None:
        """Do the same for a module that has returned one tensor."""
        node = nodes.grad_fn_of(output)
        if node is None:
            return
        node, index = base_of(node, output.output_nr)
        record = record_of(node) if node is not None and index == 0 else None
        if record is None:
            return
        if has_backward_hooks(module):
            record.has_backward_hooks = True
        is_norm = norms.kind_of(node) is not None
        if is_norm and not record.has_affine and output.nbytes >= MIN_BYTES:
            with nodes.no_graph():
                is_first = is_first_hook(module)
                self._record_norm_module(module, node, record, output, is_first)
        record.take_note(output)

    @_contained
    def record_frozen_bias(self, module: nn.Module, output: Any) -> None:
        """Record a product's frozen bias, to which no edge leads, right after its module's forward.

        See 2 of NOTE [Weights are proved] in `products.py`.
        """
        node = nodes.grad_fn_of(output) if type(output) is Tensor else None
        if node is None or is_user_mode_active():
            return
        node, _ = base_of(node, output.output_nr)
        record = record_of(node) if node is not None else None
        weight, bias = norms.registered_parameters(module)
        if record is None or record.product is None or weight is None or bias is None:
            return
        rule = OPERATION_OF[type(node)].output  # type: ignore[union-attr]
        assert isinstance(rule, ProductRule)
        if rule.bias is None or nodes.producer(node, rule.bias)[0] is not None:
            return
        if bias.is_inference() or not runs_pytorchs_forward(module):  # has no version, or another
            return
        if USE_CREATION_HOOK or self._is_unmodified(bias, node):
            frozen = FrozenBias(bias, bias._version)
            self._copying.append(weakref.ref(record))
            weight_index, shape, versions, flags, _ = record.product
            record.product = ProductFacts(weight_index, shape, versions, flags, frozen)

    def _record_norm_module(
        self, module: nn.Module, node: Node, record: Record, output: Tensor, is_first_hook: bool
    ) -> None:
        may_differ = not is_first_hook or is_user_mode_active()
        if may_differ or not norms.runs_pytorchs_forward(module):
            if record.eps is None:
                record.eps = norms.eps_confirmed_by_output(output, node, record.parameters, module)
            return
        record.eps = norms.eps_of(module)
        if record.parameters is None and not record.has_affine:
            # Nothing has run since the norm's operation, which is the last one of the forward.
            parameters = norms.parameters_of_module(node, module)
            if parameters is not None:
                record_parameters(node, record, parameters)

    def _is_unmodified(self, parameter: Tensor | None, node: Node) -> bool:
        """Whether a norm's parameter is unmodified since its module's call began."""
        if parameter is None:
            return True
        recorded = self._parameter_versions.get(id(parameter))
        if recorded is None or nodes.sequence_number(node) < recorded.next_number:
            return False
        return not parameter.is_inference() and parameter._version == recorded.version

    def warn_of(self, error: Exception, node: Node = None) -> None:
        """Warn of an error inside the engine, at a node if one is given."""
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _EXPECTED_ERRORS):
            return
        where = "" if node is None else f" of {nodes.operation_name(node)}"
        self.settings.warn(
            "an error of the engine",
            f"tensors{where} are saved as PyTorch saves them, because the recompute engine failed: "
            f"{type(error).__name__}: {error}",
        )

    def _replace_saved_tensors(
        self, node: Node, operation: Operation, metadata: dict[str, Any]
    ) -> None:
        self._ordinal += 1
        self._stream = stream = nodes.stream_of(node)
        record, output = Record(stream), operation.output
        if output is not None:
            self._fill_record(node, record, operation, output)
        metadata[KEY] = record
        for field in operation.reads:
            self._replace_input(node, record, field)
        if not operation.has_rewrites:
            return
        for field in operation.reads_exact:
            if nodes.saves_one_tensor(node, field):
                self._replace_input(node, record, field, exact=True)
        if operation.result:
            self._replace_result(node, operation, record)
        if operation.indices:
            self._replace_indices(node, operation)
        if operation.shape_only:
            saved = self._rewritable(node, operation.shape_only)
            if saved is not None:
                self._save_packed(node, operation.shape_only, saved, Shape(saved))
        if operation.saved_mask:
            self._replace_mask(node, operation.saved_mask)
        if operation.reads_no_values:
            for producer, index in nodes.producers(node):
                self._replace_by_mask(*base_of(producer, index))

    def _fill_record(
        self, node: Node, record: Record, operation: Operation, output: OutputRule
    ) -> None:
        """Record what a spec of an operation's output needs, and what may not last until then."""
        if isinstance(output, Output):
            record_output(node, record, output, operation.result)
            copies = {
                field: _copy_of(saved)
                for field in output.inputs
                if field is not None and (saved := _small_constant(node, field)) is not None
            }
            if copies:
                record.copies = copies
                self._copying.append(weakref.ref(record))
        elif output == "norm":
            self._copying.append(weakref.ref(record))
            x = nodes.saved_tensor(node, "input")
            if x is None or x.nbytes < MIN_BYTES:
                return
            parameters = norms.parameters_of(node)
            # The walk visits a node late, when its bias may have been modified. If the node saves
            # the bias, autograd checks its version.
            is_proved = USE_CREATION_HOOK or norms.node_determines_bias(node)
            if parameters is not None and (is_proved or self._is_unmodified(parameters.bias, node)):
                record_parameters(node, record, parameters)
        elif isinstance(output, ProductRule):
            is_unmodified = partial(self._is_known_unmodified, node)
            record_product(node, record, output, is_unmodified, self._parameter_at)
        else:
            record.version = node.output_version

    def _is_known_unmodified(self, node: Node, leaf: Tensor) -> bool:
        """Whether an autograd leaf is unmodified since a product has read it.

        The walk visits a node late.
        """
        return USE_CREATION_HOOK or self._is_unmodified(leaf, node)

    def _replace_input(
        self, node: Node, own_record: Record, field: str, exact: bool = False
    ) -> None:
        """Replace an input that a node saves by a spec, if there is one.

        Args:
            node: The node.
            own_record: Its record.
            field: The field of the saved input.
            exact: Whether the spec must be exact.
        """
        saved = nodes.saved_tensor(node, field)
        producer = None if saved is None else saved.grad_fn
        if saved is None or producer is None or producer is node:
            return
        if not nodes.is_plain(saved):
            return self._report_unchanged(node, field, reasons.NOT_PLAIN)
        if saved.nbytes < MIN_BYTES:
            return
        base, base_index = base_of(producer, saved.output_nr)
        if base is None or not was_visited(base):  # for example a parameter
            return self._report_unchanged(node, field, reasons.output_of, base)
        record = ensure_record(base, self._stream)
        if record.stream is not self._stream:
            return self._report_unchanged(node, field, reasons.OTHER_STREAM)
        is_itself = nodes.saves_itself(node, field)
        if base_index == 0:
            if record.saver is not None and saved_output_of(base, record) is not None:
                return self._report_unchanged(node, field, reasons.SAVED_ANYWAY)
            # In backward an operation reads what hooks have unpacked, which may be a copy.
            if is_itself and running_pass() == NO_PASS and not record.has_note():
                output = saved if saved._base is None else saved._base
                if output.grad_fn is not None:  # else the base is an autograd leaf
                    record.take_note(output)
        version = saved._version  # at 0 nothing has written to the tensor
        if version != 0 and version != record.version:
            return self._report_unchanged(node, field, reasons.WRITTEN_TO)
        self._set_reason(reasons.output_of, base)
        spec = None
        operation = OPERATION_OF[type(base)]
        if operation is not None and operation.has_spec:
            spec = self._output_spec(producer, saved.output_nr)
            if operation.may_be_narrow and (spec is None or self._obstacle(spec)):
                # This still saves the tensor, in fewer bytes: a spec within max_ops saves more.
                reason = self._reason
                spec = self._narrow_spec(node, field, base, record, saved) or spec
                self._reason = reason
            if spec is not None and exact and spec.rounding:
                spec = None
                self._set_reason(reasons.inexact, node)
        if spec is None:
            self._report_unchanged(node, field, self._reason)
        elif self._replace_by_spec(node, field, saved, spec, base):
            if base_index == 0 and not is_itself and not record.has_note():
                record.alias = nodes.without_memory(saved)
            return
        if base_index == 0:
            record.mark_saved_by(own_record)
            if not is_itself:
                take_note_of_alias(record, saved, nodes.lasting(node, field, saved))

    def _replace_result(self, node: Node, operation: Operation, record: Record) -> None:
        """Replace the operation's own saved output by a spec, if there is one."""
        saved = self._rewritable(node, operation.result)
        if saved is None:
            return
        self._set_reason(reasons.output_of, node)
        spec = self._spec_from_inputs(node, 0, operation, record)
        if spec is None:
            return self._report_unchanged(node, operation.result, self._reason)
        self._replace_by_spec(node, operation.result, saved, spec, node)

    def _replace_by_spec(
        self, node: Node, field: str, saved: Tensor, spec: Spec, base: Node
    ) -> bool:
        """Replace a saved tensor by a spec. Return False if it stays saved as PyTorch saves it."""
        obstacle = self._obstacle(spec)
        if obstacle:
            self._report_unchanged(node, field, obstacle)
            return False
        if spec.cost == 0 and any(_share_memory(leaf.tensor, saved) for leaf in spec.leaves()):
            self._report_unchanged(node, field, reasons.SAVED_ANYWAY)
            return False
        size = saved.nbytes
        if spec.copied_bytes >= size:
            self._report_unchanged(node, field, reasons.AS_LARGE)
            return False
        if spec.leaf_bytes > _LEAF_FACTOR * size:
            self._report_unchanged(node, field, reasons.MUCH_LARGER)
            return False
        number = self._first_number + self._ordinal
        if spec.tolerance and not all(call.is_near(number) for call in spec.products()):
            self._report_unchanged(node, field, reasons.FAR)
            return False
        names = nodes.operation_name(base), nodes.operation_name(node)
        value = Recomputed(spec, saved, *names, number)
        if not self.is_verified(value, saved, type(node), field, type(base), spec.cost):
            self._report_unchanged(node, field, reasons.DIFFERENT)
            return False
        spec.add_consumer(number)
        self._save_packed(node, field, saved, value)
        return True

    def keep_until_known(self, value: Recomputed, saved: Tensor) -> None:
        """Keep the tensor that a spec replaces, until it is known whether its weights last.

        See 6 of NOTE [Weights are proved] in `products.py`.
        """
        weights = weights_of(value.spec)
        known = map(self.settings.lasting, (weight.parameter for weight in weights))
        if all(each is not None and each.lasts for each in known):
            return
        learn = partial(self.settings.learn_whether_last, weights)  # must not refer to the engine
        value.original = Original(Leaf(saved), learn)
        self._undecided.append(weakref.ref(value))

    def is_verified(
        self,
        recomputed: Recomputed | Callable[[], Recomputed],
        saved: Tensor,
        *context: Any,
    ) -> bool:
        """Whether a spec reproduced the saved tensor at the first use of its key.

        See NOTE [First use].

        Return False while a CUDA graph is captured, if the key is new: a comparison would
        synchronize.

        Args:
            recomputed: The spec for the saved tensor, or a function that returns it. The function
                is called at the first use only.
            saved: The saved tensor that the spec replaces.
            *context: Values that distinguish the spec from others with the same ordinal.
        """
        layout = saved.shape, saved.dtype, saved.stride(), saved.device
        key = self._ordinal, context, *layout
        is_verified = self.settings.verified.get(key)
        return self._verify(key, recomputed, saved) if is_verified is None else is_verified

    def _verify(
        self, key: SpecKey, recomputed: Recomputed | Callable[[], Recomputed], saved: Tensor
    ) -> bool:
        """Compare a spec with the saved tensor at the first use of its key."""
        if nodes.is_being_captured(saved):
            return False
        value = recomputed if isinstance(recomputed, Recomputed) else recomputed()
        difference = value.difference(saved)
        verified = self.settings.verified
        if len(verified) >= _MAX_SPEC_KEYS:
            verified.clear()
        verified[key] = difference is None
        if difference is not None:
            self.settings.warn(
                "a difference at the first use",
                f"the recomputed output of {value.name}, differs from the saved tensor "
                f"({difference}). Probably a write through .data modified the tensor without "
                "raising its version counter, and recomputing it in backward would give wrong "
                "gradients. From now on the tensor is saved as PyTorch saves it",
            )
        return difference is None

    def _rewritable(self, node: Node, field: str) -> Tensor | None:
        """Return a saved tensor if the engine may replace it: it is plain and not small."""
        saved = nodes.saved_tensor(node, field)
        if saved is None or not nodes.is_plain(saved) or saved.nbytes < MIN_BYTES:
            return None
        return saved

    def _replace_mask(self, node: Node, field: str) -> None:
        """Replace a saved mask by one bit per element."""
        saved = self._rewritable(node, field)
        if saved is None or saved.untyped_storage().nbytes() > _LEAF_FACTOR * saved.nbytes:
            return
        mask = mask_spec(saved, _alive(self._narrow))
        if mask is None:
            return
        spec, leaf = mask
        self._narrow.append(weakref.ref(leaf))
        value = Recomputed(spec, saved, "mask", nodes.operation_name(node))
        if self.is_verified(value, saved, type(node), field, "mask"):
            self._save_packed(node, field, saved, value)

    def _replace_indices(self, node: Node, operation: Operation) -> None:
        """Replace the indices of max pooling by a copy in a smaller dtype."""
        saved = self._rewritable(node, operation.indices)
        if saved is None or saved.untyped_storage().nbytes() != saved.nbytes:
            return
        pooled = nodes.saved_tensor(node, operation.shape_only)
        # Where a window is outside of the plane, PyTorch's index may be too.
        is_short = pooled is not None and math.prod(pooled.shape[-operation.pooled_dims :]) <= 2**14
        spec, leaf = indices_spec(saved, is_short)
        self._narrow.append(weakref.ref(leaf))
        value = Recomputed(spec, saved, "indices", nodes.operation_name(node))
        self._save_packed(node, operation.indices, saved, value)

    def _save_packed(self, node: Node, field: str, saved: Tensor, value: Packed) -> None:
        """Save a packed value in a field of a node, instead of the tensor `saved`."""
        if self.observer is not None:
            value = self.observer.replaced(node, field, saved, value)
        if isinstance(value, Recomputed) and value.spec.tolerance:
            self.keep_until_known(value, saved)
        if saved.is_cuda:
            value.stream = self._stream
        nodes.replace(node, field, value)

    def _replace_by_mask(self, node: Node, index: int) -> None:
        """Replace the saved tensor of a ReLU or LeakyReLU by one bit per element.

        Called if the operation that consumes the activation's output reads no values in backward.
        """
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
            self._save_packed(node, field, saved, Mask(saved, operation.mask))

    def _set_reason(self, reason: Callable[..., str], *args: Any) -> None:
        """Remember why there is no spec, for a report."""
        if self.observer is not None:
            self._reason = partial(reason, *args)

    def _report_unchanged(self, node: Node, field: str, reason: Reason, *args: Any) -> None:
        if self.observer is not None:
            text = reason if isinstance(reason, str) else reason(*args)
            self.observer.unchanged(node, field, text)

    def _output_spec(self, node: Node, index: int) -> Spec | None:
        """Return the spec of an operation's output; None if there is none.

        For an operation without an output rule the caller has set the reason.
        """
        view = VIEW_OF[type(node)]
        if view is not None:
            if not view.condition(node):
                self._set_reason(reasons.this_call, node)
                return None
            spec = self._output_spec(*viewed(node, index))
            if spec is None:
                return None
            return ViewCall(view.function, (spec,), *arguments_of(node, index, view.arguments))
        record = record_of(node)
        if record is None:
            return None
        if record.stream is not self._stream:
            self._reason = reasons.OTHER_STREAM
            return None
        if record.saver is not None and index == 0:
            saved = saved_output_of(node, record)
            if saved is not None and nodes.is_plain(saved) and nodes.has_storage(saved):
                return Leaf(saved)
        operation = OPERATION_OF[type(node)]
        if operation is None:
            return None
        if operation.result:
            packed = nodes.packed(node, operation.result)
            if packed is not None:
                self._set_reason(reasons.stored, node, packed.how)
                return _spec_of(packed)
            saved = nodes.saved_tensor(node, operation.result)
            if saved is None or not nodes.is_plain(saved):
                self._set_reason(reasons.hidden_output, node, operation.result)
                return None
            record.is_saved = True
            return Leaf(saved)
        if operation.saved_output:
            if index != 0:
                self._set_reason(reasons.this_call, node)
                return None
            self._set_reason(reasons.hidden_output, node, operation.saved_output)
            saved = nodes.saved_tensor(node, operation.saved_output)
            return Leaf(saved) if saved is not None and nodes.is_plain(saved) else None
        return self._spec_from_inputs(node, index, operation, record)

    def _spec_from_inputs(
        self, node: Node, index: int, operation: Operation, record: Record
    ) -> Spec | None:
        """Return the spec that computes an operation's output from its inputs; None if impossible.

        Unlike `_output_spec`, this does not read an output that the node itself saves. All
        consumers get the same spec: see NOTE [Shared values] in `specs.py`.
        """
        if operation.output is None:
            return None
        if index != 0:
            self._set_reason(reasons.this_call, node)
            return None
        spec = record.spec() if record.spec is not None else None
        if spec is not None and spec.is_current():
            return spec
        if record.unproved and not prove_late(node, record):
            self._set_reason(reasons.unproved_input, node)
            return None
        spec = self._new_spec_from_inputs(node, operation, record)
        record.spec = None if spec is None else weakref.ref(spec)
        return spec

    def _new_spec_from_inputs(
        self, node: Node, operation: Operation, record: Record
    ) -> Spec | None:
        """Return a new spec for `_spec_from_inputs`."""
        output = operation.output
        if isinstance(output, ProductRule):
            return self._product_spec(node, output, record)
        if not isinstance(output, Output):
            is_norm = output == "norm"
            return self._norm_spec(node, record) if is_norm else functions.output_spec(node)
        if not output.condition(node):
            self._set_reason(reasons.this_call, node)
            return None
        fields = output.inputs or (None,) * len(nodes.producers(node))
        inputs: list[Spec] = []
        for position, field in enumerate(fields):
            spec = self._input_spec(node, position, field, record)
            if spec is None:
                return None
            obstacle = self._obstacle(spec)
            if obstacle:
                self._reason = obstacle
                return None
            inputs.append(spec)
        return self._call_spec(node, output, inputs)

    def _input_spec(
        self, node: Node, position: int, field: str | None, record: Record
    ) -> Spec | None:
        """Return the spec of an operation's input; None if there is none.

        Args:
            node: The operation's node.
            position: The index of the input's edge.
            field: The field that saves the input; None if the node does not save it.
            record: The node's record.
        """
        if field is not None:
            packed = nodes.packed(node, field)
            if packed is not None:
                self._set_reason(reasons.stored, node, packed.how)
                return _spec_of(packed)
            if nodes.has_hooks(node, field):
                self._set_reason(reasons.hooked, node)
                return None
            copy = record.copies.get(field)
            if copy is not None:
                return Leaf(copy, is_copy=True)
            saved = nodes.saved_tensor(node, field)
            if saved is not None:
                usable = _is_activation(saved) and nodes.is_plain(saved)
                if usable and nodes.has_storage(saved):
                    return Leaf(saved)
                self._set_reason(reasons.hidden_input, node)
                return None
        producer, index = nodes.producer(node, position)
        self._set_reason(reasons.unsaved_input, node, producer, index)
        if producer is None:
            return None if record.number is None else Leaf(record.number, is_copy=True)
        return self._output_spec(producer, index)

    def _norm_spec(self, node: Node, record: Record) -> Spec | None:
        """Return the spec of a norm's output; None if there is none."""
        x = self._input_spec(node, 0, "input", record)
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
        if isinstance(replaced, Recomputed):  # a norm's rounding depends on its input's strides
            x = Restrided(replaced)
        return Call(rerun, (x,))

    def _product_spec(self, node: Node, rule: ProductRule, record: Record) -> Spec | None:
        """Return the spec of a product; None if it has none.

        See NOTE [Narrow points] and NOTE [Weights are proved] in `products.py`.
        """
        facts = record.product
        if facts is None:
            self._set_reason(reasons.no_product, node)
            return None
        factors = self._factors_of(node, rule, facts)
        if factors is None:
            self._set_reason(reasons.unknown_factors, node)
            return None
        weights = [spec for spec in map(weight_inside, factors) if spec is not None]
        known = map(self.settings.lasting, (weight.parameter for weight in weights))
        if any(each is not None and each.lasts is False for each in known):
            self._reason = reasons.FREED
            return None
        shape, dtype = nodes.output_shape(node, 0), nodes.output_dtype(node, 0)
        weight = factors[0].value()
        flops = rule.flops(node, facts.input_shape, weight.shape, facts.weight)
        device_type = weight.device.type
        output_bytes = shape.numel() * dtype.itemsize
        moved = facts.input_shape.numel() * dtype.itemsize + weight.nbytes + output_bytes
        is_in_tf32 = in_tf32(facts.flags, device_type, rule.is_convolution)
        ridge = costs.flops_per_byte(device_type, dtype, is_in_tf32)
        cost = costs.passes(flops, moved, output_bytes, ridge)
        limit = self.settings.max_ops
        if self.settings.rejects(cost):
            self._set_reason(reasons.too_many, limit)
            return None
        field, position = rule.operands[1 - facts.weight]
        x = self._constant_leaf(node, field) or self._input_spec(node, position, field, record)
        if x is None:
            return None
        packed = nodes.packed(node, field)
        if isinstance(packed, Recomputed) and not x.keeps_strides:
            x = Restrided(packed)  # a product's kernels depend on its input's strides
        operands = [x, factors[0]] if facts.weight == 1 else [factors[0], x]
        bias: list[Spec | None] = [*factors[1:]] or [None]
        narrowing = facts.input_shape.numel() / shape.numel()
        terms = max(1, flops // (2 * shape.numel()))
        call = ProductCall(
            rule.function,
            [*operands, *bias],
            arguments_of(node, 0, rule.arguments),
            Product(cost, narrowing, flops, terms, facts.flags, weights, dtype),
        )
        obstacle = self._obstacle(call)
        if obstacle:
            self._reason = obstacle
            return None
        return call

    def _obstacle(self, spec: Spec) -> str:
        """Return why a spec takes too much; empty if it does not."""
        if spec.tolerance and len({*spec.products()}) > _MOST_PRODUCTS:
            return reasons.MANY_PRODUCTS
        limit = self.settings.max_ops
        if spec.cost > limit and self.settings.rejects(spec.added_cost()):
            return reasons.too_many(limit)
        return ""

    def _factors_of(self, node: Node, rule: ProductRule, facts: ProductFacts) -> list[Spec] | None:
        """Return the specs of a product's weight, and of its bias if it has one.

        None if one of them is not known.
        """
        field, position = rule.operands[facts.weight]
        weight = self._factor_of(node, position, facts, field)
        if rule.bias is None or not rule.has_bias(node):
            return None if weight is None else [weight]
        bias = self._factor_of(node, rule.bias, facts)
        return None if weight is None or bias is None else [weight, bias]

    def _factor_of(
        self, node: Node, position: int, facts: ProductFacts, field: str | None = None
    ) -> Spec | None:
        """Return the spec of a product's weight or bias; None if it is not known.

        Args:
            node: The product's node.
            position: The index of its edge.
            facts: What the product's record knows.
            field: The field that may save the weight; None of a bias.
        """
        producer, index = nodes.producer(node, position)
        saved = None if field is None else nodes.saved_tensor(node, field)
        if producer is None:
            if field is None:
                return self._frozen_bias(facts, nodes.output_dtype(node, 0))
            return None if saved is None else self._frozen_weight(saved, facts.versions[position])
        base, _ = base_of(producer, index)
        is_cast = base is not None and nodes.is_cast_of_autograd_leaf(base)
        leaf = leaf_of(node, position)
        if leaf is None or leaf._version != facts.versions.get(position):
            return None
        if not nodes.is_plain(leaf) or not nodes.has_storage(leaf):
            return None
        if not is_cast:
            return self._view_of_weight(producer, index, Weight(leaf, leaf._version))
        if field is not None:
            return None if saved is None else SavedCast(saved)
        if base is not producer or leaf.nbytes > COPY_LIMIT:
            return None
        return Leaf(leaf.detach().to(nodes.output_dtype(base, 0)), is_copy=True)

    def _view_of_weight(self, node: Node, index: int, weight: Weight) -> Spec:
        """Return the spec of an output that is a parameter or a view of one."""
        view = VIEW_OF[type(node)]
        if view is None:
            return weight
        inner = self._view_of_weight(*viewed(node, index), weight)
        return ViewCall(view.function, (inner,), *arguments_of(node, index, view.arguments))

    @cached_property
    def _parameters(self) -> dict[tuple[int, ...], Tensor]:
        """The model's parameters and buffers, by the place of their memory."""
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        return {
            memory_place(t): t
            for t in tensors
            if not t.is_inference() and nodes.is_plain(t) and nodes.has_storage(t)
        }

    def _constant_leaf(self, node: Node, field: str) -> Leaf | None:
        """Return a leaf for a product's saved input that no operation computed, such as an image.

        Return None for other inputs, and for parameters, whose owner may free them.
        """
        saved = nodes.saved_tensor(node, field)
        if saved is None or not nodes.is_plain(saved) or not nodes.has_storage(saved):
            return None
        base: Tensor | None = saved if saved._base is None else saved._base
        if saved.grad_fn is not None:
            producer, _ = base_of(saved.grad_fn, saved.output_nr)
            base = None if producer is None else nodes.autograd_leaf_of(producer)
        return None if base is None or isinstance(base, nn.Parameter) else Leaf(saved)

    def _parameter_at(self, tensor: Tensor) -> Tensor | None:
        """Return the model's parameter or buffer of which a tensor is an alias or a transpose."""
        parameter = self._parameters.get(memory_place(tensor))
        return parameter if parameter is not None and parameter.dtype is tensor.dtype else None

    def _frozen_weight(self, saved: Tensor, version: int) -> Spec | None:
        """Return the spec of a weight that a node saves without an edge.

        Args:
            saved: The saved tensor.
            version: The version of the parameter when the product ran.
        """
        parameter = self._parameter_at(saved)
        if parameter is None or parameter._version != version:
            return None
        weight = Weight(parameter, version)
        layout = saved.shape, saved.stride()
        if (parameter.shape, parameter.stride()) == layout:
            return weight
        return ViewCall(torch.as_strided, (weight,), *layout, saved.storage_offset())

    def _frozen_bias(self, facts: ProductFacts, dtype: torch.dtype) -> Spec | None:
        """Return the spec of a bias without an edge, for a product of this dtype."""
        if facts.frozen_bias is None:
            return None
        bias, version = facts.frozen_bias
        if bias._version != version or bias.nbytes > COPY_LIMIT:
            return None
        if bias.dtype is dtype:
            return Weight(bias, version)
        return Leaf(bias.detach().to(dtype), is_copy=True)  # autocast has cast it

    def _narrow_spec(
        self, node: Node, field: str, base: Node, record: Record, saved: Tensor
    ) -> Spec | None:
        """Return a spec with narrow copies for a saved tensor; None if there is none.

        See NOTE [Narrow copies] in `narrow.py`.

        Args:
            node: The node of a consumer.
            field: The field in which it saves the tensor.
            base: The operation that returned the tensor, or the base of which it is a view.
            record: The operation's record.
            saved: The saved tensor.
        """
        original = nodes.original(node, field, saved)
        output = whole_output(original, base)
        if output is None:
            return None
        narrow = NarrowSpec(self._affordable_spec, self._call_spec, self._stream)
        spec = narrow.of(base, output.detach())
        if spec is None:
            if output is original:
                narrow.offer_slices(nodes.lasting(node, field, saved))
            return None
        self._narrow += map(weakref.ref, narrow.own())
        record.spec = weakref.ref(spec)
        return self._output_spec(saved.grad_fn, saved.output_nr)

    def _affordable_spec(self, node: Node, index: int) -> Spec | None:
        """Return the spec of an operation's output; None if there is none within the limit."""
        spec = self._output_spec(node, index)
        return None if spec is None or self._obstacle(spec) else spec

    def _call_spec(self, node: Node, output: Output, inputs: list[Spec]) -> Spec | None:
        """Return the spec of an operation's output, given those of its inputs; None if inexact."""
        is_exact = not any(spec.rounding for spec in inputs)
        if output.bound is None and not is_exact:
            self._set_reason(reasons.amplified_rounding, node)
            return None
        keeps_strides = all(spec.keeps_strides for spec in inputs)
        if is_exact and output.rounds_by_strides and not keeps_strides:
            self._set_reason(reasons.unknown_strides, node)
            return None
        spec = call_of(
            output.function,
            inputs,
            arguments_of(node, 0, output.arguments),
            output.cost,
            output.bound or largest,
            nodes.output_dtype(node, 0),
        )
        spec.keeps_strides &= output.keeps_strides(node)
        return spec


def _small_constant(node: Node, field: str) -> Tensor | None:
    """Return a saved input if it is a small tensor that no operation computed; else None."""
    saved = nodes.saved_tensor(node, field)
    if saved is None or _is_activation(saved):
        return None
    is_small = saved.nbytes <= min(COPY_LIMIT, nodes.output_bytes(node, 0) - 1)
    return saved if is_small and nodes.is_plain(saved) and nodes.has_storage(saved) else None


def _alive(references: Iterable[weakref.ref[_T]]) -> Iterator[_T]:
    return (value for reference in references if (value := reference()) is not None)


def record_parameters(node: Node, record: Record, parameters: norms.Parameters) -> None:
    """Record the weight and bias that a norm has read: as its affine, its column affine, or copies.

    - A batch norm's record gets the affine, which is as small as the copies. In eval mode the
      affine is computed now, because a later training call of the norm writes to the running
      statistics without raising their versions. If it is too large to store, a norm in training
      gets copies, and one in eval mode nothing.
    - A layer or RMS norm's record gets the column affine: copies of weight and bias, which one
      kernel makes.
    - Any other record gets copies.
    """
    record.statistics = statistics = norms.statistics_of(node)
    if norms.is_batch_norm(node):
        if statistics is not None or norms.can_compute(node):
            affine = norms.affine_of(node, parameters, statistics)
            if affine.nbytes <= COPY_LIMIT:
                record.affine = affine
                return
            if statistics is None:
                return
    elif norms.normalizes_rows(node) and parameters.weight is not None and statistics is not None:
        column_affine = norms.column_affine_of(node, parameters, statistics)
        if column_affine.nbytes <= COPY_LIMIT:
            record.column_affine = column_affine
            return
    record.parameters = parameters.copied(COPY_LIMIT)


def affine_of(node: Node, record: Record) -> norms.NormAffine | None:
    """Return a norm's affine, and store it in the record; None if it is not known."""
    if record.affine is not None:
        return record.affine
    statistics, column_affine = record.statistics, record.column_affine
    if column_affine is not None and statistics is not None:
        record.affine = norms.NormAffine(column_affine, norms.row_statistics_of(statistics))
    elif record.parameters is not None and (statistics is not None or norms.can_compute(node)):
        record.affine = norms.affine_of(node, record.parameters, statistics)
    return record.affine


def _spec_of(packed: Packed) -> Spec | None:
    """Return the spec of a saved tensor, as an input of another spec; None if it has none."""
    return packed.as_input if isinstance(packed, Recomputed) else None


def _copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a small tensor.

    The tensor may be a number that autograd has saved. Under a dispatch mode operations receive it
    as a Python number, which they cannot copy.
    """
    if tensor.dim() == 0 and tensor.is_cpu:
        return tensor.new_tensor(tensor.tolist())
    return tensor.detach().clone()


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    return storage_id(tensor.untyped_storage()) == storage_id(other.untyped_storage())


def _is_activation(saved: Tensor) -> bool:
    """Whether an operation computed the tensor: it is not a parameter, buffer or constant.

    Nor is it a view of one.
    """
    base = saved._base
    if saved.grad_fn is None or (base is not None and base.grad_fn is None):
        return False
    node, _ = base_of(saved.grad_fn, saved.output_nr)
    if node is None or nodes.autograd_leaf_of(node) is not None:
        return False
    return not (_may_return_alias(node) and _shares_memory_with_leaf(saved, node))


def _may_return_alias(node: Node) -> bool:
    """Whether an operation may return an alias of an input that is not a view of it.

    An unsafe split does, and the forward of an autograd Function may, for example `x.detach()`.
    """
    return nodes.is_python_function(type(node)) or type(node).__name__ in UNSAFE_SPLITS


def _shares_memory_with_leaf(tensor: Tensor, node: Node) -> bool:
    """Whether an operation's output may share memory with an autograd leaf that it depends on.

    Other operations in between allocate their output. After many nodes the answer is True.
    """
    pending = [node]
    seen: set[Node] = set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        if len(seen) == _MAX_ALIASES:
            return True
        seen.add(current)
        for producer, index in nodes.producers(current):
            base, _ = base_of(producer, index)
            leaf = None if base is None else nodes.autograd_leaf_of(base)
            if leaf is not None:
                if nodes.is_plain(leaf) and _share_memory(leaf, tensor):
                    return True
            elif base is not None and _may_return_alias(base):
                pending.append(base)
    return False
