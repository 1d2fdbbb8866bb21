"""What is known of an operation's output: proofs that nobody wrote to it unseen.

NOTE [Versions are proved]

A spec says what an operation's output was. It is wrong for a tensor that was written to since, and
`with torch.no_grad(): y.add_(1)` leaves the graph as it is. But every such write raises the
tensor's version, which all its views share. So the engine keeps, for each operation, the least
version that its output can have begun with. A tensor that is still at that version was not written
to since. The engine passes through an operation only if its inputs were at theirs:

1. An operation that returns new memory begins at 0, one in place at least one higher than its
   input. A version never falls: where it is not known, 0 is the least.
2. A node that saves its input shows it: an in-place activation saves a clone of it.
3. A node that does not save what it read (a ReLU, a sum, a cast) does not show its input. Its
   version comes from a note: a weak reference to the tensor, left by whoever had it in hand last.
   If the noted tensor's `grad_fn` is the new node, the operation has overwritten it. Without a note
   it comes from the node that made the input, if that node saves its output.
4. What is not proved is saved as PyTorch saves it.

A write through `.data`, NumPy or a storage raises no version: see NOTE [First use] in `engine.py`.

NOTE [Metadata outlives backward]

A node's metadata lives as long as the node, longer than its saved tensors. So a record refers to
nothing large, except weakly; and to copies only until the model's forward has ended.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from . import nodes
from .nodes import Node
from .norms import NormAffine, Parameters
from .operations import OPERATION_OF, Output, base_of
from .specs import DowncastMemory

_KEY = "inplace_ops"
COPY_LIMIT = 64 * 1024  # bytes: see NOTE [Leaves] in `engine.py`


class Record:
    """What is known of an operation, in its node's metadata.

    Attributes:
        version: The least version that the output can have begun with.
        inputs_proved: Whether the inputs that the node does not save were as they were made.
        copies: Copies of small inputs that are no activations, by field.
        parameters: Of a norm, copies of its weight and bias; None if unknown.
        columns: Of a norm of rows, copies of both as its scale and shift; None mostly.
        eps: Of a norm, if its module is known.
        affine: Of a norm, if it was asked for; until the model's forward has ended.
        is_saved: Whether something saves the output itself.
        note: The output, weakly.
        narrowed: Of a cast, weakly, its output as what it was cast from.
        stream: The CUDA stream that was current when the operation was seen.
    """

    __slots__ = (
        "__weakref__",
        "affine",
        "column_affine",
        "copies",
        "downcast",
        "eps",
        "inputs_proved",
        "is_saved",
        "note",
        "parameters",
        "stream",
        "version",
    )

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.inputs_proved = True
        self.copies: dict[str, Tensor] = {}
        self.parameters: Parameters | None = None
        self.column_affine: Tensor | None = None
        self.eps: float | None = None
        self.affine: NormAffine | None = None
        self.is_saved = False
        self.note: TensorWeakRef | None = None
        self.downcast: weakref.ref[DowncastMemory] | None = None
        self.stream: torch.cuda.Stream | None = None

    @property
    def is_known(self) -> bool:
        """Whether a norm's affine follows from what is saved and what is kept here."""
        return self.affine is not None or self.column_affine is not None

    def take_note(self, tensor: Tensor) -> None:
        """Remember a tensor as the operation's output."""
        self.note = TensorWeakRef(tensor)

    def free_copies(self) -> None:
        """Leave what was copied to the specs that have been made of it."""
        self.copies.clear()
        self.parameters = self.column_affine = self.affine = None


def record_of(node: Node) -> Record | None:
    """Return the record of a node that the engine has seen being made."""
    return node.metadata.get(_KEY)


def attach_record(node: Node, record: Record | None) -> None:
    """Put a record into a node's metadata, or that the node was seen and has none."""
    node.metadata[_KEY] = record


def was_visited(node: Node) -> bool:
    """Whether `attach_record` was called: Python's object of a node may die before the node does."""
    return _KEY in node.metadata


def take_note(tensor: Tensor) -> None:
    """Remember a tensor as its operation's output, for the proofs of what reads it next."""
    node, _ = base_of(tensor.grad_fn, tensor.output_nr)
    record = node and record_of(node)
    if record is not None:
        record.take_note(tensor)


def record_output(node: Node, output: Output, result: str) -> Record:
    """Make the record of an elementwise operation, a sum, a cast: see NOTE [Versions are proved].

    Args:
        node: The operation's node, which has just been made.
        output: How its output is computed.
        result: The field under which the node saves its output, if it does.
    """
    record, edges = Record(), nodes.producers(node)
    base, _ = base_of(*edges[0])
    before = base and record_of(base)
    saved = nodes.saved_tensor(node, result) if result else None
    if saved is not None and saved._version > 0:  # in place
        record.version = saved._version
        record.inputs_proved = before is not None and before.version == record.version - 1
        record.note = before.note if before else None
        return record
    for index, field in enumerate(output.inputs or (None,) * len(edges)):
        saved = None if field is None else nodes.saved_tensor(node, field)
        if saved is None:
            _prove_input(node, base if index == 0 else base_of(*edges[index])[0], record)
        elif index == 0 and before is not None and _is_clone(saved, edges[0][0]):
            record.version = before.version + 1
            record.note = before.note
            _prove_clone(node, saved, record)
    return record


def _saved_output(node: Node) -> Tensor | None:
    """Return an operation's output if the node saves it, and nobody has written to it since."""
    operation = OPERATION_OF[type(node)]
    field = operation and (operation.result or operation.saved_output)
    try:
        return nodes.saved_tensor(node, field) if field else None
    except RuntimeError:  # written to
        return None


def cloned_input(node: Node) -> Tensor | None:
    """Return the clone that an in-place activation has saved of what it overwrote."""
    operation = OPERATION_OF[type(node)]
    if operation is None or not operation.saves_first_input:
        return None
    saved = nodes.saved_tensor(node, "self")
    if saved is None or not _is_clone(saved, nodes.producer(node, 0)[0]):
        return None
    return saved


def _is_clone(saved: Tensor, producer: Node) -> bool:
    """Whether an input was saved as a clone, where `producer` has made the input itself."""
    made_by = saved.grad_fn
    return made_by is not producer and type(made_by).__name__ == "CloneBackward0"


def _prove_clone(node: Node, clone: Tensor, record: Record) -> None:
    """Find out late whether what an in-place activation has cloned was as its operation made it.

    The clone's node was seen after the activation had written. If that was the only write, the
    clone came before it.
    """
    of_clone = record_of(clone.grad_fn)
    tensor = record.note() if record.note is not None else None
    if of_clone is None or tensor is None:
        return
    # A view whose base was written to has no node yet, and a hook must make none.
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is node:
        of_clone.inputs_proved |= base._version == record.version


def _prove_input(node: Node, base: Node, record: Record) -> None:
    """Find out whether an input that the node does not save was as its operation made it.

    Args:
        node: The node.
        base: The operation that has made the input, or what the input is a view of.
        record: The record of the node.
    """
    before = base and record_of(base)
    if before is None:
        record.inputs_proved = False
        return
    tensor = before.note() if before.note is not None else None
    if tensor is None:
        tensor = _saved_output(base)
    if tensor is None:
        record.inputs_proved = False
    elif not tensor._is_view() and tensor.grad_fn is node:  # in place
        record.version = before.version + 1
        record.note = before.note
    elif tensor._version != 0 and tensor._version != before.version:
        record.inputs_proved = False
