"""Records of operations, and proofs that nothing modified their outputs.

NOTE [Versions are proved]

A spec recomputes an operation's output as the operation returned it. The spec is wrong for a tensor
that was modified afterwards, and a write such as `with torch.no_grad(): y.add_(1)` does not change
the graph. But every such write raises the tensor's version, which all its views share. So the
engine records, for each operation, the lowest version that its output can have had when the
operation returned. A tensor that is still at that version is unmodified. If the version was really
higher, the comparison fails and the tensor stays saved: the bound errs on the safe side. A spec may
compute an operation's output from its inputs only if every input was at its recorded version when
the operation read it:

1. The output of an operation that allocates it starts at version 0. The output of an in-place
   operation starts at least one version above its input's. A version never decreases, so 0 is the
   lowest version where nothing else is known.
2. If the node saves an input, the spec starts from the saved tensor, whose version autograd checks
   when it is read. PyTorch's in-place SiLU, GELU and the like save a clone of the input that they
   overwrite.
3. If the node does not save an input (a ReLU, a sum, a cast), the input's version comes from its
   note: a weak reference to the tensor, in the record of the node that produced it. Notes are
   taken by forward hooks (NOTE [What convert attaches] in `conversion/wiring.py`), by activation
   modules, by the function mode of `notes.py`, and by the visit of a node that saves the tensor.
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

A write through `.data`, NumPy or a storage raises no version: see NOTE [First use] in `engine.py`.

NOTE [Metadata outlives backward]

A node's metadata lives as long as the node, and longer than the node's saved tensors. So:

1. A record refers to large tensors only weakly.
2. A record refers to copies only until the model's forward has returned.
3. A record refers to no node. A node's metadata would then refer to the node, by a cycle through
   C++ that Python's garbage collector does not see, and the graph would stay alive forever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch_private import (
    CLONE,
    ProductFlags,
    WeakTensor,
    is_named,
    product_flags,
)
from . import nodes
from .nodes import Node
from .norms import NormAffine, Parameters, Statistics
from .operations import OPERATION_OF, Output, ProductRule, base_of, reshapes_only
from .specs import Leaf, Spec

# The key of a node's record in its metadata. None instead of a record marks a visited node that has
# no record.
KEY = "inplace_ops"
COPY_LIMIT = 64 * 1024  # bytes: see NOTE [Leaves] in `engine.py`


class FrozenBias(NamedTuple):
    """A bias that needs no gradient, and its version when the product ran.

    A record refers to it until the model's forward has returned. A weak reference would keep
    `torch.utils.swap_tensors` from working.
    """

    parameter: Tensor
    version: int


class ProductFacts(NamedTuple):
    """What a product's node does not show: see NOTE [Weights are proved] in `products.py`.

    Attributes:
        weight: Which operand is the weight.
        input_shape: The shape of the other operand.
        versions: The versions of the parameters that it has read, by the index of their edge.
        flags: The flags of the device's products.
        frozen_bias: The bias, if that is frozen; None if unknown.
    """

    weight: int
    input_shape: torch.Size
    versions: Mapping[int, int]
    flags: ProductFlags
    frozen_bias: FrozenBias | None = None


class Record:
    """The engine's knowledge of an operation, in its node's metadata.

    Attributes:
        version: The lowest version that the output can have had when the operation returned.
        unproved: The positions of inputs that the node does not save, and that are not proved to
            have been unmodified when the operation read them.
        copies: Copies of small inputs that are not activations, by field.
        part: Returns a leaf with the output's values, in or from a concatenation that has read it,
            or None if nothing saves them any more: see 5 of NOTE [Narrow copies] in `narrow.py`.
        parameters: Copies of a norm's weight and bias; None for other operations and if unknown.
        column_affine: Copies of the weight and bias of a layer or RMS norm, as its scale and shift;
            None for other operations and if unknown.
        eps: A norm's eps; None for other operations and if unknown.
        affine: A norm's affine, from the visit of a batch norm, or from the first spec or fused
            activation that needs it, until the model's forward has returned; otherwise None.
        statistics: The statistics that a norm has computed, until the model's forward has returned;
            None for other operations and if unknown.
        is_saved: Whether a node or a spec saves the output itself, or a view of it.
        saver: A weak reference to the record of the last node that saves the output or a view of
            it; None if no consumer saves it.
        note: A weak reference to the output; None if no note was taken.
        alias: An alias of the output without memory, which has its version; None unless a spec
            replaced the output while `saved_bytes` counted, when no note was taken.
        number: The number that a sum or difference adds or subtracts, a scalar; None if unknown,
            and for other operations.
        spec: A weak reference to the spec that computes the output from the inputs; None if none
            was made.
        stream: The CUDA stream that was current when the engine visited the node; None on a CPU.
        has_backward_hooks: Whether the norm's module has backward hooks; False for others.
        product: What a product has read, and how; None for other operations, and if unknown.
    """

    # Most records change few of these defaults.
    version = 0
    unproved: frozenset[int] = frozenset()
    copies: Mapping[str, Tensor] = MappingProxyType({})
    part: Callable[[], Leaf | None] | None = None
    parameters: Parameters | None = None
    column_affine: Tensor | None = None
    eps: float | None = None
    has_backward_hooks = False
    affine: NormAffine | None = None
    statistics: Statistics | None = None
    is_saved = False
    saver: weakref.ref[Record] | None = None
    note: WeakTensor | None = None
    alias: Tensor | None = None
    number: Tensor | None = None
    spec: weakref.ref[Spec] | None = None
    product: ProductFacts | None = None

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    @property
    def has_affine(self) -> bool:
        """Whether this record determines a norm's affine, together with the node's saved tensors.

        Copies of weight and bias alone may not: if the saved statistics are in 16 bits, they are
        too coarse to compute the affine from.
        """
        return self.affine is not None or self.column_affine is not None

    def take_note(self, tensor: Tensor) -> None:
        """Store a weak reference to the operation's output, of which the tensor may be an alias."""
        base = nodes.whole_base(tensor)
        self.note = WeakTensor(tensor if base is None else base)

    def has_note(self) -> bool:
        """Whether the tensor of the note is alive."""
        return self.note is not None and self.note() is not None

    def mark_saved_by(self, consumer: Record) -> None:
        """Record that a consumer saves the output, or a view of it."""
        self.is_saved, self.saver = True, weakref.ref(consumer)

    def free_copies(self) -> None:
        """Drop all copies. Specs that were built from them own them."""
        self.copies, self.product = Record.copies, None
        self.parameters = self.column_affine = self.affine = self.statistics = None


def record_of(node: Node) -> Record | None:
    """Return the record of a node; None if the engine has not visited it, or it has no record."""
    return node.metadata.get(KEY)


def was_visited(node: Node) -> bool:
    """Whether the engine has visited a node.

    The metadata tells, since the node's Python object may die before the node does.
    """
    return KEY in node.metadata


def ensure_record(node: Node, stream: torch.cuda.Stream | None) -> Record:
    """Return the record of a node, a new one if it has none.

    The nodes of operations that are not in the table get a record only when a consumer saves their
    output, or when a note of it is taken.

    Args:
        node: The node.
        stream: The stream on which the output is read, for a new record.
    """
    record = record_of(node)
    if record is None:
        record = node.metadata[KEY] = Record(stream)
    return record


def take_note_of_alias(record: Record, saved: Tensor, alias: Tensor) -> None:
    """Take a note of an operation's output that a consumer saves, or saves a view of.

    While `saved_bytes` counts, a consumer saves a detached alias, which does not lead to the tensor
    that it is a view of. A note is taken only of an output itself, or of a reshape of it.

    Args:
        record: The record of the operation.
        saved: The saved tensor.
        alias: The alias that is saved instead.
    """
    if reshapes_only(saved.grad_fn, saved.output_nr):
        record.take_note(alias)


def is_unmodified(node: Node, index: int) -> bool:
    """Whether an operation's output, or the tensor that it is a view of, is proved unmodified."""
    base, record = _producer_of(node, index)
    tensor = None if record is None else _known_output(base, record)
    return record is not None and tensor is not None and tensor._version in (0, record.version)


def _producer_of(node: Node, index: int) -> tuple[Node, Record | None]:
    """Return the node that produced the base of an output, and the record of the base."""
    base, base_index = base_of(node, index)
    return base, record_of(base) if base is not None and base_index == 0 else None


def _known_output(node: Node, record: Record) -> Tensor | None:
    """Return an operation's output, or an alias, if the record or the node leads to it."""
    tensor = record.note() if record.note is not None else None
    if tensor is None:
        tensor = _saved_output(node)
    return record.alias if tensor is None else tensor


def saved_output_of(node: Node, record: Record) -> Tensor | None:
    """Return the operation's unmodified output if a live consumer saves it, or a view of it."""
    if record.saver is None or record.saver() is None or record.note is None:
        return None
    tensor = record.note()
    if tensor is None or tensor._version not in (0, record.version):
        return None
    if tensor.grad_fn is None:  # an alias: see `take_note_of_alias`
        return _in_shape(tensor, nodes.output_shape(node, 0))
    return whole_output(tensor, node)


def whole_output(tensor: Tensor, node: Node) -> Tensor | None:
    """Return an operation's first output, given the output or a view of it.

    A detached alias does not lead to its base, and the result of `_unsafe_view` is a base itself.
    None if the output cannot be had from the tensor.
    """
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is node:
        return base if base.output_nr == 0 else None
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


def record_output(node: Node, record: Record, output: Output, result: str) -> None:
    """Record the version and the unproved inputs of an operation that has an output rule.

    See NOTE [Versions are proved].

    Args:
        node: The operation's new node.
        record: Its record.
        output: The output rule.
        result: The field under which the node saves its output; "" if it does not.
    """
    edges = nodes.producers(node)
    _, producer_record = _producer_of(*edges[0])
    saved = nodes.saved_tensor(node, result) if result else None
    if saved is not None and saved._version > 0:  # an in-place activation that saves its output
        record.version = saved._version
        if producer_record is None or producer_record.version != record.version - 1:
            record.unproved = frozenset({0})
        record.note = producer_record.note if producer_record else None
        return
    for index, field in enumerate(output.inputs or (None,) * len(edges)):
        saved = None if field is None else nodes.saved_tensor(node, field)
        if saved is None:
            _prove_input(node, index, record)
        elif index == 0 and producer_record is not None and _is_clone(saved, edges[0][0]):
            # An in-place activation that saves a clone of its input.
            record.version = producer_record.version + 1
            record.note = producer_record.note
            _prove_clone(node, saved, record)


def record_product(
    node: Node,
    record: Record,
    rule: ProductRule,
    is_unmodified: Callable[[Tensor], bool],
    parameter_at: Callable[[Tensor], Tensor | None],
) -> None:
    """Record what a product has read, if it widens and its weight and bias are proved.

    Args:
        node: The product's node.
        record: Its record.
        rule: Its output rule.
        is_unmodified: Returns whether a parameter is unmodified since the product ran.
        parameter_at: Returns the model's parameter of which a saved tensor is an alias, or None.
    """
    size = nodes.output_shape(node, 0).numel()
    shapes = {i: _shape_of(node, *rule.operands[1 - i]) for i in rule.weights}  # of the other one
    widening = [i for i, shape in shapes.items() if shape is not None and size > shape.numel()]
    if not widening:
        return
    leaves = {i: leaf_of(node, rule.operands[i][1]) for i in widening}
    weight = next((i for i in widening if leaves[i] is not None), None)
    if weight is None:  # a frozen weight has no edge
        edges = ((i, nodes.producer(node, rule.operands[i][1])[0]) for i in widening)
        weight = next((i for i, edge in edges if edge is None), None)
    shape = None if weight is None else shapes[weight]
    if weight is None or shape is None:
        return
    versions: dict[int, int] = {}
    weight_field, weight_position = rule.operands[weight]
    read = {weight_position: leaves[weight]}
    if leaves[weight] is None:
        saved = nodes.saved_tensor(node, weight_field)
        read[weight_position] = None if saved is None else parameter_at(saved)
        if read[weight_position] is None:
            return
    if rule.bias is not None:
        read[rule.bias] = leaf_of(node, rule.bias)
    for index, leaf in read.items():
        if leaf is not None:
            if not is_unmodified(leaf):
                return
            versions[index] = leaf._version
    field, position = rule.operands[1 - weight]
    if nodes.saved_tensor(node, field) is None:
        _prove_input(node, position, record)
    flags = product_flags(nodes.output_device(node, 0).type)
    record.product = ProductFacts(weight, shape, versions, flags)


def _shape_of(node: Node, field: str, position: int) -> torch.Size | None:
    """Return the shape of an operand; None if the node neither saves it nor has an edge to it."""
    saved = nodes.saved_tensor(node, field)
    if saved is not None:
        return saved.shape
    producer, index = nodes.producer(node, position)
    return None if producer is None else nodes.output_shape(producer, index)


def leaf_of(node: Node, position: int) -> Tensor | None:
    """Return the autograd leaf of which an input is a view, a cast, or a view of a cast.

    Return None if the input is another tensor.
    """
    base, _ = base_of(*nodes.producer(node, position))
    if base is not None and nodes.is_cast_of_autograd_leaf(base):
        base, _ = nodes.producer(base, 0)
    return None if base is None else nodes.autograd_leaf_of(base)


def prove_late(node: Node, record: Record) -> bool:
    """Prove the inputs with notes that were taken since: see 5 of NOTE [Versions are proved].

    Return whether all inputs are proved.
    """
    edges = nodes.producers(node)
    unproved = (index for index in record.unproved if not is_unmodified(*edges[index]))
    record.unproved = frozenset(unproved)
    return not record.unproved


def _saved_output(node: Node) -> Tensor | None:
    """Return an operation's output if its node saves it and it is unmodified; else None."""
    operation = OPERATION_OF[type(node)]
    field = operation and (operation.result or operation.saved_output)
    try:
        return nodes.saved_tensor(node, field) if field else None
    except RuntimeError:  # modified in place
        return None


def cloned_input(node: Node) -> Tensor | None:
    """Return the clone that an in-place activation saves of its input; None of other operations."""
    operation = OPERATION_OF[type(node)]
    if operation is None or not operation.saves_first_input:
        return None
    saved = nodes.saved_tensor(node, "self")
    if saved is None or not _is_clone(saved, nodes.producer(node, 0)[0]):
        return None
    return saved


def _is_clone(saved: Tensor, producer: Node) -> bool:
    """Whether a node saves a clone of the input that the node `producer` produced."""
    saved_producer = saved.grad_fn
    return saved_producer is not producer and is_named(saved_producer, CLONE)


def _prove_clone(node: Node, clone: Tensor, record: Record) -> None:
    """Prove late that an in-place activation cloned its input unmodified, if it did.

    Before torch 2.14 the clone's node is visited after the activation has overwritten the input,
    and cannot be proved then. If the activation's write is the only one, the clone precedes it, and
    is a clone of the unmodified input.
    """
    clone_record = record_of(clone.grad_fn)
    tensor = record.note() if record.note is not None else None
    if clone_record is None or tensor is None:
        return
    # The `grad_fn` of a view whose base was modified is created when it is read, and a node
    # creation hook must not create nodes. The base's `grad_fn` exists already.
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is node and base._version == record.version:
        clone_record.unproved = frozenset()


def _prove_input(node: Node, position: int, record: Record) -> None:
    """Prove an input that the node does not save, or add its position to `record.unproved`."""
    producer, index = nodes.producer(node, position)
    if producer is None:  # without a gradient: no spec reads it, unless it is a known number
        return
    base, producer_record = _producer_of(producer, index)
    tensor = None if producer_record is None else _known_output(base, producer_record)
    if producer_record is None or tensor is None:
        record.unproved |= {position}
    elif not tensor._is_view() and tensor.grad_fn is node:  # in place
        record.version = producer_record.version + 1
        record.note = producer_record.note
    elif tensor._version not in (0, producer_record.version):
        record.unproved |= {position}
