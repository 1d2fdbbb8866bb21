"""The walk over a module's new nodes, where PyTorch has no node creation hook: before torch 2.14.

From torch 2.14 on nothing here runs. See NOTE [Where nodes come from] in `run.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch_private import tree_leaves
from . import nodes, norms
from .nodes import Node
from .operations import OPERATION_OF
from .values import is_clone, producer_of, value_of, was_visited


class _ParameterVersion(NamedTuple):
    """A module's weight or bias at the beginning of its module's call.

    Attributes:
        parameter: The weight or bias.
        version: Its version at that time.
        next_sequence_number: That of the next node at that time.
    """

    parameter: Tensor
    version: int
    next_sequence_number: int


class Walk:
    """Finds the new nodes of one forward pass, and what has changed before they are visited."""

    def __init__(self) -> None:
        self._first = nodes.next_sequence_number()
        self._inputs: set[Node] = set()  # of the model's arguments
        self._parameter_versions: dict[int, _ParameterVersion] = {}
        # Kept alive until the walk visits the operation that has read them: the outputs of
        # `nn.Identity` in a residual sum.
        self._last_noted: deque[Tensor] = deque(maxlen=2)

    def stop_at(self, inputs: Any) -> None:
        """Stop at the nodes of the model's arguments: the caller created that graph."""
        tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        self._inputs.update(filter(None, map(nodes.grad_fn_of, tensors)))

    def new_nodes(self, value: Any) -> Iterator[Node]:
        """Yield the new nodes that tensors in `value` depend on, in the order of their creation."""
        if not torch.is_grad_enabled():
            return
        tensors = [value] if isinstance(value, Tensor) else tree_leaves(value)
        pending = [nodes.root_of(t) for t in tensors if isinstance(t, Tensor)]
        if len(pending) == 1 and (pending[0] is None or was_visited(pending[0])):
            return  # usually the output of an inner module
        end = nodes.next_sequence_number()
        order: dict[Node, float] = {}  # their sequence numbers
        clones: dict[Node, Tensor] = {}
        while pending:
            node = pending.pop()
            if node is None or node in order or not self.may_have_created(node, end):
                continue
            if was_visited(node):
                continue
            order[node] = nodes.sequence_number(node)
            pending += [producer for producer, _ in nodes.producers(node)]
            clone = _cloned_input(node)
            if clone is not None:  # no edge of the graph leads to its node
                clones[node] = clone
                order[clone.grad_fn] = order[node] - 0.5
        for node in sorted(order, key=order.__getitem__):
            if node in clones:
                _prove_clone(node, clones[node])
            yield node

    def may_have_created(self, node: Node, end: int) -> bool:
        """Whether this forward pass may have created a node, whose numbers are below `end`.

        An AccumulateGrad node has the largest number. Each thread numbers its own nodes, so that
        the nodes of the model's arguments may have any number.
        """
        return self._first <= nodes.sequence_number(node) < end and node not in self._inputs

    def keep(self, tensor: Tensor) -> None:
        """Keep a noted tensor alive until the operation that reads it is visited."""
        self._last_noted.append(tensor)

    def finish(self) -> None:
        """Keep no tensor any more."""
        self._last_noted.clear()

    def record_versions(self, module: nn.Module) -> None:
        """Record the versions of a module's weight and bias, before its forward."""
        following = nodes.next_sequence_number()
        for parameter in norms.registered_parameters(module):
            if parameter is not None and not parameter.is_inference():
                self._parameter_versions[id(parameter)] = _ParameterVersion(
                    parameter, parameter._version, following
                )

    def is_unmodified(self, parameter: Tensor | None, node: Node) -> bool:
        """Whether a module's parameter is unmodified since the module's call began."""
        if parameter is None:
            return True
        recorded = self._parameter_versions.get(id(parameter))
        if recorded is None or nodes.sequence_number(node) < recorded.next_sequence_number:
            return False
        return not parameter.is_inference() and parameter._version == recorded.version


def _cloned_input(node: Node) -> Tensor | None:
    """Return the clone that an in-place activation saves of its input; None of other operations."""
    operation = OPERATION_OF[type(node)]
    if operation is None or not operation.saves_first_input:
        return None
    saved = nodes.saved_tensor(node, "self")
    if saved is None or not is_clone(saved, nodes.producer(node, 0)[0]):
        return None
    return saved


def _prove_clone(node: Node, clone: Tensor) -> None:
    """Prove that an in-place activation cloned its input unmodified, if it did.

    The clone's node is visited after the activation has overwritten the input, and cannot be proved
    then. If the activation's write is the only one, the clone precedes it, and is a clone of the
    unmodified input.

    Args:
        node: The activation's node.
        clone: The clone, whose node has been visited.
    """
    _, given = producer_of(*nodes.producer(node, 0))
    cloned = value_of(clone.grad_fn)
    tensor = None if given is None else given.noted
    if given is None or cloned is None or tensor is None:
        return
    # The `grad_fn` of a view whose base was modified is created when it is read, and a node
    # creation hook must not create nodes. The base's `grad_fn` exists already.
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is node and base._version == given.version + 1:
        cloned.unproved = frozenset()
