"""`Value`: what the engine knows of an operation's output, and proofs that nothing modified it.

The engine makes a value for each operation of the table when it visits the operation's node. The
value is in the node's metadata. It gathers what a spec of the output needs, and what may be gone
when a consumer asks for one: the output's version, a note of the output, copies of small constants,
a norm's parameters, a product's weights.

NOTE [Versions are proved]

A spec recomputes an operation's output as the operation returned it. The spec is wrong for a tensor
that was modified afterwards, and a write such as `with torch.no_grad(): y.add_(1)` does not change
the graph. But every such write raises the tensor's version, which all its views share. So the
engine records, for each operation, the lowest version that its output can have had when the
operation returned. A tensor that is still at that version is unmodified. If the version was really
higher, the comparison fails and the tensor stays saved: the bound errs on the safe side.

Two things are proved. At its consumer, that the saved tensor is unmodified since its operation
returned it (`is_unmodified_in`). And of each operation inside the spec, that every input was at its
recorded version when the operation read it (`unproved` has the others):

1. The output of an operation that allocates it starts at version 0. The output of an in-place
   operation starts at least one version above its input's. A version never decreases, so 0 is the
   lowest version where nothing else is known.
2. If the node saves an input, the spec starts from the saved tensor, whose version autograd checks
   when it is read. PyTorch's in-place SiLU, GELU and the like save a clone of the input that they
   overwrite.
3. If the node does not save an input (a ReLU, a sum, a cast), the input's version comes from its
   note: a weak reference to the tensor, in the value of the node that produced it. Notes are taken
   by forward hooks (NOTE [What convert attaches] in `conversion/wiring.py`), by activation modules,
   by the function mode of `inside_modules.py`, and by the visit of a node that saves the tensor.
   Without a note, the version comes from the saved output of the input's node, if that node saves
   its output.
4. If the noted tensor's `grad_fn` is the new node, the new operation is in-place and has
   overwritten the tensor. Its output is then taken to start one version above its input's recorded
   version. If another write came before, the tensor's real version is higher, and a later
   comparison fails.
5. A note may come after the operation has read its input, for example when a later operation saves
   the same tensor. Because versions never decrease, a tensor that is still at its recorded version
   was at it when the operation read it.
6. A tensor whose version is not proved is saved as PyTorch saves it.

A write through `.data`, NumPy or a storage raises no version: see NOTE [First use] in `verify.py`.

NOTE [Metadata outlives backward]

A node's metadata lives as long as the node, and longer than the node's saved tensors. So:

1. A value refers to activations only weakly.
2. A value refers to copies, weights and statistics until the model's forward has returned.
3. A value refers to no node. A node's metadata would then refer to the node, by a cycle through C++
   that Python's garbage collector does not see, and the graph would stay alive forever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from .._torch_private import CLONE, NO_PASS, WeakTensor, is_named, running_pass
from . import nodes
from .affine import NormFacts
from .nodes import Node
from .operations import OPERATION_OF, Output
from .specs import Leaf, Spec
from .tensors import whole_base
from .views import base_of, reshapes_only
from .weights import ProductFacts

# The key of a node's value in its metadata. A visited node without a value has one of these (a view
# needs none): `WITHOUT_VALUE`, until a value is needed, or `OTHER_STREAM`, if the operation ran on
# another CUDA stream than the forward's first operation on that device. Nothing is read from such
# an operation.
KEY = "inplace_ops"
WITHOUT_VALUE, OTHER_STREAM = None, False


_referent = weakref.ref.__call__  # faster than that of `WeakTensor`


class Value:
    """The engine's knowledge of an operation's output, in its node's metadata.

    Attributes:
        version: The lowest version that the output can have had when the operation returned.
        unproved: The positions of inputs that the node does not save, and that are not proved to
            have been unmodified when the operation read them.
        note: A weak reference to the output; None if no note was taken.
        constants: Copies of small inputs that are not activations, and the number that a sum adds
            or subtracts, by the input's position.
        norm: Of a norm, what is known of its parameters; None of other operations.
        product: Of a product, what it has read; None of other operations, and if unknown.
        was_saved: Whether a node has ever saved the output itself, or a view of it.
        leaf: A weak reference to the spec leaf of the output that the operation itself saves; None
            if none was made.
        saver: A weak reference to the value of a consumer that saves the output or a view of it;
            None if none does. While that consumer lives, the output may be a leaf.
        part: Returns a leaf with the output's values, in or from a concatenation that has read it,
            or None if nothing saves them any more: see 5 of NOTE [Narrow copies] in `narrow.py`.
        spec: A weak reference to the spec that computes the output from the inputs; None if none
            was made. All consumers get the same spec: see NOTE [Shared values] in `specs.py`.
    """

    # Attributes of the class take no time and memory where a value keeps the default.
    version = 0
    unproved: frozenset[int] = frozenset()
    note: WeakTensor | None = None
    constants: Mapping[int, Tensor] = MappingProxyType({})
    norm: NormFacts | None = None
    product: ProductFacts | None = None
    was_saved = False
    leaf: weakref.ref[Leaf] | None = None
    saver: weakref.ref[Value] | None = None
    part: Callable[[], Leaf | None] | None = None
    spec: weakref.ref[Spec] | None = None

    def take_note(self, tensor: Tensor) -> None:
        """Store a weak reference to the operation's output, of which the tensor may be an alias."""
        base = None if tensor._base is None else whole_base(tensor)
        self.note = WeakTensor(tensor if base is None else base)

    @property
    def noted(self) -> Tensor | None:
        """The tensor of the note, if it is alive."""
        note = self.note
        return None if note is None else note()

    def note_saved(self, tensor: Tensor) -> None:
        """Take a note of the output, given the output or a view of it that a node saves.

        In backward an operation may read a copy that hooks have unpacked, whose version says
        nothing of the output.
        """
        note = self.note
        has_note = note is not None and _referent(note) is not None
        if has_note or running_pass() != NO_PASS:
            return
        output = tensor if tensor._base is None else tensor._base
        if output.grad_fn is not None:  # a view of an autograd leaf is not its output
            self.take_note(output)

    def is_unmodified_in(self, tensor: Tensor) -> bool:
        """Whether a tensor with the output's memory is unmodified since the operation returned.

        At version 0 nothing has ever written to the memory, whatever `self.version` assumes.
        """
        version = tensor._version
        return version == 0 or version == self.version

    @property
    def used_leaf(self) -> Leaf | None:
        """The leaf, if a spec reads it."""
        return None if self.leaf is None else self.leaf()

    @property
    def is_saved(self) -> bool:
        """Whether a node or a spec saves the output. That of a ReLU is then not reduced to bits."""
        return self.was_saved or self.used_leaf is not None

    def mark_saved_by(self, saver: Value) -> None:
        """Record that the consumer with this value saves the output, or a view of it."""
        self.was_saved, self.saver = True, weakref.ref(saver)

    def release(self) -> None:
        """Drop what only new specs need: rule 2 of NOTE [Metadata outlives backward]."""
        self.constants, self.norm, self.product = Value.constants, None, None


def value_of(node: Node) -> Value | None:
    """Return the value of a node; None if the engine has not visited it, or it has no value."""
    return node.metadata.get(KEY) or None


def was_visited(node: Node) -> bool:
    """Whether the engine has visited a node.

    The metadata tells, since the node's Python object may die before the node does.
    """
    return KEY in node.metadata


def ensure_value(node: Node) -> Value | None:
    """Return the value of a node, a new one if it has none; None of an operation on another stream.

    The nodes of operations that are not in the table get a value only when a consumer saves their
    output, or when a note of it is taken. So does an operation of the table while the engine was
    paused, or whose visit has failed: none of its inputs was proved then.

    Args:
        node: The node. The engine must have visited it, or it must be a view.
    """
    value = node.metadata.get(KEY)
    if value is WITHOUT_VALUE:
        value = node.metadata[KEY] = Value()
        if OPERATION_OF[type(node)] is not None:
            value.unproved = frozenset(range(len(nodes.producers(node))))
    return value or None


def producer_of(node: Node, index: int) -> tuple[Node, Value | None]:
    """Return the node that produced the base of an output, and the value of the base."""
    base, base_index = base_of(node, index)
    return base, value_of(base) if base is not None and base_index == 0 else None


def saved_output_of(node: Node, value: Value) -> Tensor | None:
    """Return an operation's unmodified output if a live consumer saves it, or a view of it."""
    if value.saver is None or value.saver() is None:
        return None
    tensor = value.noted
    if tensor is None or not value.is_unmodified_in(tensor):
        return None
    if tensor.grad_fn is None:  # an alias: see `Field.lasting`
        return _in_shape(tensor, nodes.output_shape(node, 0))
    return whole_output(tensor, node)


def whole_output(tensor: Tensor, node: Node) -> Tensor | None:
    """Return an operation's first output, given the output or a view of it.

    A detached alias does not lead to its base, and the result of `_unsafe_view` is a base itself.
    None if the output is not available from the tensor.
    """
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is node:  # notes are taken, and narrow copies made, of first outputs alone
        return base
    whole = tensor if base.grad_fn is None else base
    producer, index = whole.grad_fn, whole.output_nr
    if base_of(producer, index) != (node, 0) or not reshapes_only(producer, index):
        return None
    return _in_shape(whole, nodes.output_shape(node, 0))


def _in_shape(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """Return a tensor whose elements are those of another one, in their order."""
    if tensor.shape == shape:
        return tensor
    return tensor.detach().view(shape) if tensor.is_contiguous() else None


# Proofs: see NOTE [Versions are proved].


def prove(node: Node, value: Value, output: Output, result: str) -> None:
    """Set the version and the unproved inputs of the value of a new node with an output rule.

    Args:
        node: The operation's new node.
        value: Its value.
        output: The output rule.
        result: The field under which the node saves its output; "" if it does not.
    """
    edges = nodes.producers(node)
    _, given = producer_of(*edges[0])
    saved = nodes.saved_tensor(node, result) if result else None
    if saved is not None and saved._version > 0:  # rule 1: in place, and saves its output
        value.version = saved._version
        if given is None or given.version != value.version - 1:
            value.unproved = frozenset({0})
        value.note = given.note if given else None
        return
    for position, field in enumerate(output.inputs or (None,) * len(edges)):
        saved = None if field is None else nodes.saved_tensor(node, field)
        if saved is None:
            prove_input(node, position, value)
        elif position == 0 and given is not None and is_clone(saved, edges[0][0]):
            value.version, value.note = given.version + 1, given.note  # rule 2


def prove_input(node: Node, position: int, value: Value) -> None:
    """Prove an input that the node does not save, or add its position to `value.unproved`."""
    producer, index = nodes.producer(node, position)
    if producer is None:  # without a gradient: no spec reads it, unless it is a known constant
        return
    base, given = producer_of(producer, index)
    tensor = None if given is None else _known_output(base, given)
    if given is None or tensor is None:
        value.unproved |= {position}  # rule 6
    elif not tensor._is_view() and tensor.grad_fn is node:  # rule 4
        value.version, value.note = given.version + 1, given.note
    elif not given.is_unmodified_in(tensor):
        value.unproved |= {position}


def prove_late(node: Node, value: Value) -> bool:
    """Prove inputs by rule 5, with notes that were taken since. Return whether all are proved."""
    edges = nodes.producers(node)
    still = set()
    for position in value.unproved:
        base, given = producer_of(*edges[position])
        tensor = None if given is None else _known_output(base, given)
        if given is None or tensor is None or not given.is_unmodified_in(tensor):
            still.add(position)
    value.unproved = frozenset(still)
    return not still


def _known_output(node: Node, value: Value) -> Tensor | None:
    """Return an operation's output, or an alias, if the note or the node leads to it: rule 3."""
    tensor = value.noted
    if tensor is not None:
        return tensor
    operation = OPERATION_OF[type(node)]
    field = operation and operation.saves_output
    try:
        return nodes.saved_tensor(node, field) if field else None
    except RuntimeError:  # modified in place
        return None


def is_clone(saved: Tensor, producer: Node) -> bool:
    """Whether a node saves a clone of the input that the node `producer` produced."""
    saved_producer = saved.grad_fn
    return saved_producer is not producer and is_named(saved_producer, CLONE)
