"""Narrow copies: the inputs of an operation that widens, stored instead of its output.

NOTE [Narrow copies]

An upsampling, a `repeat`, a cast to float32 or a concatenation returns a wider tensor than it
reads. The consumer saves the wide one, and often nothing saves the narrow one: it is the output of
a sum or of a convolution. A spec may then own copies of the inputs.

1. The copies are read off the operation's output: every other pixel, a cast back, a slice
   (`Output.narrow` in `operations.py`). So they have the values that the operation has read, even
   if the program has overwritten or freed the inputs since.
2. An input that has a spec is not copied. An input that such an operation returned is narrowed too:
   of `cat([upsample(h), skip])` the spec copies h. For that the input must be proved unmodified,
   because h is read off what the concatenation has read: see NOTE [Versions are proved] in
   `values.py`. Such operations select values and compute none. So of an upsampling that autocast
   casts to 16 bits, h in 16 bits suffices: the cast of the selected is the selected of the cast.
3. All new copies together are at most half as large as the tensor that they replace. Those of a
   concatenation are at most an eighth, unless it shares a part (5): in a U-Net each part is
   concatenated once, and copies of large parts would move more bytes than they save.
4. The tensor may stay alive nevertheless, because the caller or an operation without a rule refers
   to it. A copy would then add memory. So `settle` drops each copy whose original is alive and
   unmodified when the model's forward has returned, and reads the original. A later write to it
   raises in backward, as it does in PyTorch, which saves the original itself. Copies of parts (5)
   stay: for another concatenation PyTorch does not keep the original.
5. In a DenseNet each layer reads the concatenated outputs of all layers before it: memory would
   grow quadratically with depth. So specs share what one concatenation has saved of a part. It is
   right for another one that reads the same values: both must prove the part unmodified. The value
   of the part's operation leads to the copy, or to the slice of a concatenation that stays saved.

Masks and indices are stored in fewer bits by the same leaves: see `rewrites.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .._torch_private import CAT, WeakTensor, is_named
from . import nodes
from .calls import ViewCall
from .nodes import Node
from .operations import OPERATION_OF, Output, arguments_of, is_lossless
from .specs import Leaf, Spec
from .tensors import WeakMemory
from .values import ensure_value, value_of
from .views import VIEW_OF, viewed

# Copies are at most one in so many bytes of the tensor that they replace: see NOTE [Narrow copies].
_NARROWER, _NARROWER_PART = 2, 8


class NarrowLeaf(Leaf):
    """A copy of what a wide tensor is computed from: see NOTE [Narrow copies].

    Until `own` is called, the tensor is the original: the wide tensor, or a view of it.

    Attributes:
        dtype: The dtype of the copy.
    """

    __slots__ = ("_how", "_layout", "_original", "dtype")

    def __init__(self, original: Tensor, dtype: torch.dtype, how: str = "") -> None:
        super().__init__(original)
        self.dtype = dtype
        is_cast = dtype is not original.dtype
        stored = f"stored as {dtype}".replace("torch.", "") if is_cast else "stored as its input"
        self._how = how or stored
        self.leaf_bytes = original.numel() * dtype.itemsize
        self.keeps_strides = False  # the input may have had others

    @property
    def how(self) -> str:
        return self._how

    def own(self, copy: Tensor | None = None) -> None:
        """Replace the original by a copy, which nothing else refers to."""
        original = self.tensor
        self._original = WeakMemory(original)
        self._layout = original.shape, original.stride(), original.storage_offset()
        self.tensor = original.to(self.dtype, copy=True) if copy is None else copy
        self.version, self.leaf_bytes = self.tensor._version, self.tensor.nbytes

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is a copy of the tensor's memory, which was not modified since."""
        return self._original.is_of(tensor)

    def settle(self) -> None:
        """Read the original instead of the copy, if it is still alive and unmodified."""
        memory = self._original()
        if memory is not None:  # rule 4
            self.tensor, self.version = memory.as_strided(*self._layout), memory._version


class NarrowSpec:
    """A spec of an operation's output with narrow copies, while it is built.

    Attributes:
        leaves: The copies. They are made by `own`.
        parts: Those of a concatenation's parts that others may share, with the parts' producers.
    """

    def __init__(
        self,
        known_spec: Callable[[Node, int], Spec | None],
        call: Callable[[Node, Output, list[Spec]], Spec | str],
    ) -> None:
        """Prepare to build a spec.

        Args:
            known_spec: Returns the spec of an output without narrow copies, or None.
            call: Returns the spec of an operation's output from those of its inputs.
        """
        self._known_spec, self._call = known_spec, call
        self._shares_a_part = False
        self.leaves: list[NarrowLeaf] = []
        self.parts: list[tuple[Node, NarrowLeaf]] = []

    def of(self, node: Node, output: Tensor) -> Spec | None:
        """Return the spec of an operation's unmodified output; None if it would not save enough."""
        spec = self._widened(node, 0, output, is_proved=True)  # rules 1 and 2
        copied = sum(leaf.leaf_bytes for leaf in self.leaves)
        shares_nothing = is_named(node, CAT) and not self._shares_a_part
        factor = _NARROWER_PART if shares_nothing else _NARROWER
        return spec if spec is not None and factor * copied <= output.nbytes else None  # rule 3

    def own(self) -> list[NarrowLeaf]:
        """Make the copies, and let specs of other concatenations find parts.

        Return the copies that may be given up for their original.
        """
        for leaf in self.leaves:
            leaf.own()
        for producer, leaf in self.parts:
            _offer(producer, weakref.ref(leaf))
        shared = {id(leaf) for _, leaf in self.parts}
        return [leaf for leaf in self.leaves if id(leaf) not in shared]

    def offer_slices(self, saved: Tensor) -> None:
        """Let specs of other concatenations find the parts of one that stays saved.

        Args:
            saved: The concatenation. It lives as long as it is saved.
        """
        for producer, leaf in self.parts:
            if leaf.dtype is not leaf.tensor.dtype:
                continue
            # The value must not refer to a node: see NOTE [Metadata outlives backward].
            view = leaf.tensor
            layout = view.shape, view.stride(), int(view.storage_offset())
            slice_of = partial(_slice, WeakTensor(saved), saved._version, *layout)
            _offer(producer, slice_of)

    def _widened(self, node: Node, index: int, output: Tensor, is_proved: bool) -> Spec | None:
        """Return the spec of an output, from specs of the inputs; None if there is no rule.

        Args:
            node: The operation's node.
            index: The index of the output.
            output: The output's values.
            is_proved: Whether the operation returned these values, as far as known.
        """
        view = VIEW_OF[type(node)]
        if view is not None:  # it shares its memory, so no write can come in between
            if view.narrow is None:
                return None
            pieces = view.narrow(node, output)
            if pieces is None:
                return None
            x = self._input(*viewed(node, index), pieces[0], is_proved, is_part=False)
            return ViewCall(view.function, (x,), *arguments_of(node, index, view.arguments))
        operation = OPERATION_OF[type(node)]
        rule = None if operation is None else operation.output
        if not (is_proved and isinstance(rule, Output) and rule.narrow is not None):
            return None
        value = value_of(node)
        pieces = rule.narrow(node, output) if rule.condition(node) else None
        if value is None or pieces is None:
            return None
        edges = zip(nodes.producers(node), pieces, strict=True)
        is_part = is_named(node, CAT)
        inputs = [
            self._input(*edge, piece, position not in value.unproved, is_part)
            for position, (edge, piece) in enumerate(edges)
        ]
        spec = self._call(node, rule, inputs)
        assert not isinstance(spec, str)  # such a rule has a bound, and does not round by strides
        return spec

    def _input(
        self, producer: Node, index: int, piece: Tensor, is_proved: bool, is_part: bool
    ) -> Spec:
        """Return the spec of an input: one that is known, or one with narrow copies.

        Args:
            producer: The node of the operation that returned the input; None if there is none.
            index: The index of its output.
            piece: The input's values.
            is_proved: Whether the input is proved unmodified.
            is_part: Whether it is a part of a concatenation.
        """
        if producer is None:
            return self._leaf(piece, piece.dtype)
        if is_proved:
            known = self._known_spec(producer, index) or self._part(producer, index)
            if known is not None:
                return known
        spec = self._widened(producer, index, piece, is_proved)
        if spec is not None:
            return spec
        dtype = nodes.output_dtype(producer, index)
        leaf = self._leaf(piece, dtype if is_lossless(dtype, piece.dtype) else piece.dtype)
        if is_part and is_proved and index == 0 and leaf.dtype is dtype:  # rule 5
            self.parts.append((producer, leaf))
        return leaf

    def _part(self, producer: Node, index: int) -> Leaf | None:
        """Return the part of another concatenation; None if it is not a part of one."""
        value = value_of(producer) if index == 0 else None
        if value is None or value.part is None:
            return None
        part = value.part()
        self._shares_a_part |= part is not None
        return part

    def _leaf(self, piece: Tensor, dtype: torch.dtype) -> NarrowLeaf:
        leaf = NarrowLeaf(piece, dtype)
        self.leaves.append(leaf)
        return leaf


def _offer(producer: Node, part: Callable[[], Leaf | None]) -> None:
    """Let the value of a part's operation lead to it."""
    value = ensure_value(producer)
    if value is not None:
        value.part = part


def _slice(
    saved: WeakTensor, version: int, shape: torch.Size, stride: tuple[int, ...], offset: int
) -> Leaf | None:
    tensor = saved()
    if tensor is None or tensor._version != version:
        return None
    leaf = Leaf(tensor.detach().as_strided(shape, stride, offset))
    leaf.leaf_bytes = tensor.untyped_storage().nbytes()  # which it keeps alive
    leaf.keeps_strides = False
    return leaf
