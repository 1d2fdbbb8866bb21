"""The recompute engine during one forward pass of a converted model.

Autograd saves for backward every tensor that an operation's gradient reads, even a tensor that is
cheap to recompute from other saved tensors: the output of an activation whose input is saved, the
output of a norm whose input is saved, a sum or a product of such tensors. The engine visits every
autograd node that a model's forward creates, and replaces such saved tensors with pack and unpack
hooks on the single saved tensor (`node._raw_saved_x.register_hooks`). In backward PyTorch itself
connects the recomputed tensor to the graph, as it connects every unpacked tensor. The engine traces
nothing and replaces no operation.

    for each new node:                                           Engine.visit, run.py
        if it is as in the last step: do the same again, else:   plan.py
        value = what a spec of the operation's output needs      values.py
        for each saved tensor that backward may read recomputed: Replacer.visit, replace.py
            spec = Deriver.spec_of(the operation that made it)   derive.py
            if spec and spec.cost <= max_ops: save spec, and compute it when backward unpacks it

What is cheap is recomputed, and what is wide, from what is narrow: NOTE [Narrow points] in
`products.py`. `operations.py` is the table of PyTorch's operations: all that the engine knows about
them. `specs.py` and `calls.py` compute specs.

NOTE [Where nodes come from]

1. From torch 2.14 on, `torch.autograd.graph.node_creation_hook` passes each node when it is
   created.
2. Before torch 2.14, a forward hook on every module walks back from the module's output over the
   nodes that are new, and visits them in the order of their sequence numbers: see `walk.py`. An
   activation module walks back from its input too. The walk stops at nodes that the engine has
   visited, at nodes that are older than the model's call, and at the nodes of the model's
   arguments.
3. The walk visits a node late, when its tensors may have been modified. A tensor whose version can
   no longer be proved is saved as PyTorch saves it.
4. The hook and the walk both call `Engine.visit`. The node of a `RecomputeFunction` is the engine's
   own, and gets its value from `Engine.add_activation` instead.

NOTE [Containment]

1. An error while the engine visits a node, takes a note or prepares an activation leaves the tensor
   saved. It never reaches the model. `Engine.warn_of` warns once, except of the errors that
   autograd raises for a saved tensor that was freed or written to: its own backward raises them.
   Errors in backward reach the model: a written leaf must raise.
2. An error switches nothing off for later steps. If memory runs out while a spec is compared at its
   first use, the next use of its key is a first use again.
3. The engine of a call is visible to its own thread only, and is reset in a `finally`.
4. Nodes that were created outside a converted model's call have no value. The engine never reads
   their saved tensors.
5. The engine does nothing under tracers, compilers and `torch.func` transforms, and skips tensors
   that are not plain.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import (
    DisableTorchFunction,
    has_backward_hooks,
)
from . import nodes, norms
from .after_norm import NODE_CLASS, Merge
from .decisions import MergeDecision
from .inside_modules import Noting, constant_of, gains_from_notes, is_user_mode_active
from .nodes import ACCUMULATE_GRAD_TYPE, Node
from .operations import CAST, OPERATION_OF, Operation, ProductRule
from .plan import Plan
from .products import with_frozen_bias
from .pytorchs_forward import runs_pytorchs_forward
from .replace import Replacer
from .settings import Observer, Settings
from .tensors import is_plain
from .values import KEY, WITHOUT_VALUE, Value, ensure_value, value_of, was_visited
from .views import NEEDS_NO_VALUE, base_of
from .walk import Walk

# Errors of reading a node's saved tensor, which is then left as it is, without a warning.
_EXPECTED_ERRORS = (
    # If the operation's backward runs, it raises these itself.
    *("modified by an inplace operation", "second time"),
    # Reading the `grad_fn` of a view whose base was modified in place creates a node.
    "Creating a new autograd node from inside a node creation hook",
    *("is a view and its base", "A view was created in"),
)


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
    model: nn.Module, settings: Settings, observer: Observer | None = None, merges: bool = True
) -> Iterator[Engine | None]:
    """Run the engine of a model in this thread, and yield it.

    `merges` tells whether activations run together with the norm before them. Yield None and do
    nothing if an engine runs in this thread already, or under a tracer, a compiler or a
    `torch.func` transform.
    """
    if _running.engine is not None or nodes.is_transformed():  # rule 5
        yield None
        return
    engine = Engine(model, settings, observer, merges)
    source = nodes.creation_hook(_on_node_created) if nodes.USE_CREATION_HOOK else nullcontext()
    try:
        _running.engine = engine
        with source:
            yield engine
    finally:  # rule 3
        engine.end()
        _running.engine = None


def _on_node_created(node: Node) -> None:
    """Visit a new node with the running engine: the node creation hook.

    PyTorch pops creation hooks in stack order. If a model's forward leaves a hook of its own open,
    PyTorch pops that one instead of the engine's, which then stays active outside of the engine's
    call, and together with the hook of the next call: every node is passed twice in a row.
    """
    if type(node) not in _NOT_VISITED:
        engine = _running.engine
        if engine is not None:
            engine.visit(node)


# No operation returned the first. For the second see 4 of NOTE [Where nodes come from].
_NOT_VISITED = frozenset({ACCUMULATE_GRAD_TYPE, NODE_CLASS})


def _contained(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method of the engine warn instead of raising: see NOTE [Containment]."""

    @wraps(method)
    def contained(engine: Engine, *args: Any) -> None:
        try:
            method(engine, *args)
        except Exception as error:
            engine.warn_of(error)

    return contained


class Engine:
    """The recompute engine during one forward pass of a converted model.

    Attributes:
        settings: State that all forward passes of the model share.
        observer: Observes what the engine does; None if nothing does.
        merges: Whether activations run together with the norm before them.
        is_paused: Whether nodes are visited, and nothing is replaced.
        replacer: Replaces the saved tensors of new nodes.
        walker: Finds new nodes before torch 2.14; None where PyTorch passes them.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, observer: Observer | None, merges: bool = True
    ) -> None:
        self.settings, self.observer, self.merges = settings, observer, merges
        self.is_paused = False
        self.walker = None if nodes.USE_CREATION_HOOK else Walk()
        is_unmodified = _always if self.walker is None else self.walker.is_unmodified
        self.replacer = Replacer(settings, model, observer, is_unmodified)
        self._plan: Plan | None = None
        if self.walker is None and observer is None:  # 6 of NOTE [Plans] in `plan.py`
            self._plan = settings.plan = settings.plan or Plan()
        self._noting = Noting()

    def visit(self, node: Node) -> None:
        """Replace a new node's saved tensors where possible, unless the node was visited before.

        The engine keeps no reference to the node.
        """
        try:
            plan = self._plan
            if plan is not None:
                replacer = self.replacer
                decision = plan.of_nodes.get(replacer.ordinal + 1)
                is_like = decision is not None and type(node) is decision.node_type
                if is_like and decision.repeat(node, replacer):  # type: ignore[union-attr]
                    return
            if self.observer is not None and KEY not in node.metadata:
                self.observer.created(node)
            node_type = type(node)
            if NEEDS_NO_VALUE[node_type]:
                return
            operation = None if self.is_paused else OPERATION_OF[node_type]
            if operation is None:
                node.metadata.setdefault(KEY, WITHOUT_VALUE)
            else:
                self._visit_by_rules(node, operation)
        except Exception as error:
            self.warn_of(error, node)

    def _visit_by_rules(self, node: Node, operation: Operation) -> None:
        metadata = node.metadata
        if KEY in metadata or nodes.is_transformed():  # rule 5 of NOTE [Containment]
            return
        metadata[KEY] = WITHOUT_VALUE  # if this visit fails, no input is proved
        if operation is CAST and nodes.downcasts_autograd_leaf(node):
            return  # autocast's copy of a parameter: `weights.py` looks through it
        with nodes.no_graph():  # a node creation hook must not create nodes
            self.replacer.visit(node, operation)
            if self._plan is not None:
                self._plan.learn(node, self.replacer.ordinal)

    def add_activation(self, y: Tensor) -> Value:
        """Return the value of the new node of a `RecomputeFunction`, which has returned y."""
        node: Any = y.grad_fn
        if self.observer is not None:
            self.observer.created(node)
        self.replacer.ordinal += 1
        value = node.metadata[KEY] = Value()
        value.version = node.output_version
        value.take_note(y)
        return value

    def planned_merge(self, module: nn.Module, z: Any) -> Merge | None:
        """Return how an activation runs with the norm before it, if the plan tells."""
        plan = self._plan
        if plan is None or not self.merges:
            return None
        try:
            decision = plan.of_merges.get(self.replacer.ordinal)
            return None if decision is None else decision.match(module, z, self.replacer)
        except Exception as error:
            self.warn_of(error)
            return None

    @_contained
    def learn_merge(self, module: nn.Module, z: Tensor, output: Tensor, merge: Merge) -> None:
        """Let the plan remember how an activation has run with the norm before it."""
        if self._plan is not None:
            decision = MergeDecision.of(module, z, output, merge)
            self._plan.learn_merge(decision, self.replacer.ordinal)

    @contextmanager
    def paused(self, value: Any) -> Iterator[None]:
        """Replace nothing within a `with` block, whose nodes come after those of `value`."""
        self.walk(value)
        before = self.is_paused, self._plan
        self.is_paused, self._plan = True, None
        try:
            yield
        finally:
            self.is_paused, self._plan = before

    def walk(self, value: Any) -> None:
        """Visit the new nodes that tensors in `value` depend on, before torch 2.14."""
        if self.walker is not None:
            self._walk(self.walker, value)

    @_contained
    def _walk(self, walker: Walk, value: Any) -> None:
        for node in walker.new_nodes(value):
            self.visit(node)
            node.metadata.setdefault(KEY, WITHOUT_VALUE)  # where later walks stop

    @_contained
    def stop_at(self, inputs: Any) -> None:
        """Visit no node of the model's arguments."""
        if self.walker is not None:
            self.walker.stop_at(inputs)

    @_contained
    def finish(self) -> None:
        """Decide what is still open. Called when the model's forward has returned."""
        if self.walker is not None:
            self.walker.finish()
        self.replacer.finish()

    def end(self) -> None:
        """Release what the engine holds: the model's forward has returned, or raised."""
        self._noting.end_all()
        self.replacer.release()

    @_contained
    def note(self, tensor: Any, is_kept: bool = False) -> None:
        """Take a note of an operation's output: 3 of NOTE [Versions are proved] in `values.py`.

        Args:
            tensor: The output.
            is_kept: Whether it stays alive until the walk visits the operation that reads it.
        """
        if isinstance(tensor, Tensor):
            _take_note(tensor)
            if is_kept and self.walker is not None:
                self.walker.keep(tensor)

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
        constant = constant_of(function, args, node)
        value = _take_note(result)
        if value is not None and constant is not None:
            position = 0 if nodes.producer(node, 0)[0] is None else 1
            value.constants = {position: torch.tensor(constant, dtype=torch.double)}
            self.replacer.release_later(value)

    @_contained
    def begin_module(self, module: nn.Module) -> None:
        """Record the versions of a module's weight and bias, as the walk visits its node late."""
        if self.walker is not None:
            self.walker.record_versions(module)

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
        if type(output) is Tensor:
            _finish_module(module, output, is_first_hook)
        elif isinstance(output, Tensor) and is_plain(output):
            with DisableTorchFunction():
                _finish_module(module, output, is_first_hook)

    @_contained
    def finish_product(
        self, module: nn.Module, output: Any, is_first_hook: Callable[[nn.Module], bool]
    ) -> None:
        """Take a note of a product's output. Record a frozen bias, to which no edge leads.

        See 2 of NOTE [Weights are proved] in `weights.py`. The arguments are those of
        `finish_module`.
        """
        self.walk(output)
        self.note(output)
        node = nodes.grad_fn_of(output) if type(output) is Tensor else None
        if node is None or not is_first_hook(module) or is_user_mode_active():
            return
        node, _ = base_of(node, output.output_nr)
        value = None if node is None else value_of(node)
        facts = None if value is None else value.product
        weight, bias = norms.registered_parameters(module)
        if value is None or facts is None or weight is None or bias is None:
            return
        rule = OPERATION_OF[type(node)].output  # type: ignore[union-attr]
        assert isinstance(rule, ProductRule)
        if facts.factors[1:] != (None,) or rule.bias is None:
            return  # it has no bias, or the bias is known
        if nodes.producer(node, rule.bias)[0] is not None:
            return
        if bias.is_inference() or not runs_pytorchs_forward(module):  # has no version, or another
            return
        if self.walker is None or self.walker.is_unmodified(bias, node):
            value.product = with_frozen_bias(facts, node, bias)

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


def _always(parameter: Tensor | None, node: Node) -> bool:
    """Whether a parameter is unmodified since an operation read it: the node was just created."""
    return True


def _take_note(tensor: Tensor) -> Value | None:
    """Take a note of an operation's output, and return the operation's value.

    Return None if the engine has not visited the operation, or the tensor is not plain.
    """
    if type(tensor) is Tensor:
        return _take_note_of_plain(tensor)
    if not is_plain(tensor):
        return None
    with DisableTorchFunction():
        return _take_note_of_plain(tensor)


def _take_note_of_plain(tensor: Tensor) -> Value | None:
    node = nodes.grad_fn_of(tensor)
    if node is None:
        return None
    node, index = base_of(node, tensor.output_nr)
    if node is None or index != 0 or not was_visited(node):
        return None
    value = ensure_value(node)
    if value is not None:
        value.take_note(tensor)
    return value


def _finish_module(
    module: nn.Module, output: Tensor, is_first_hook: Callable[[nn.Module], bool]
) -> None:
    """Do the same as `Engine.finish_module` for a module that has returned one tensor."""
    node = nodes.grad_fn_of(output)
    if node is None:
        return
    node, index = base_of(node, output.output_nr)
    value = value_of(node) if node is not None and index == 0 else None
    if value is None:
        return
    facts = value.norm
    if facts is not None:
        if has_backward_hooks(module):
            facts.has_backward_hooks = True
        if not facts.has_affine and output.nbytes >= Settings.MIN_BYTES:
            with nodes.no_graph():
                # Nothing has run since the norm's operation, which is the last one of the forward.
                may_differ = not is_first_hook(module) or is_user_mode_active()
                if not may_differ and runs_pytorchs_forward(module):
                    facts.eps = norms.eps_of(module)
                    if facts.parameters is None:
                        parameters = norms.parameters_of_module(node, module)
                        if parameters is not None:
                            facts.add_parameters(node, parameters)
    value.take_note(output)
