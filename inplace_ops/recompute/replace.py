"""Which saved tensors of a new node the engine replaces, and by what.

For each field that backward may read recomputed, `_replace_input` asks `derive.py` for a spec of
the tensor, and keeps to these limits. The other methods store what backward needs in fewer bytes.

NOTE [Limits]

A saved tensor stays as PyTorch saves it, if any of these is so. The branches cite the number.

1. It is smaller than 4 KiB, or not plain.
2. Another consumer saves the same memory.
3. It may have been modified: NOTE [Versions are proved] in `values.py`.
4. It has no spec, or the spec takes more than `max_ops` passes over memory, or too many products.
5. The spec's leaves are so large that little is gained: 4 of NOTE [Leaves] in `derive.py`.
6. A product inside is far from the spec's other consumers: 3 of NOTE [Narrow points] in
   `products.py`.
7. The spec has not reproduced the tensor: NOTE [First use] in `verify.py`.
8. The engine knows nothing of its operation: that ran outside of the model's call, on another
   stream or outside of autograd; or hooks of other code have the tensor.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from .. import _ops
from .._torch_private import CAT, is_named, storage_id
from ..memory import Packed
from . import nodes, norms, reasons
from .affine import NormFacts
from .derive import Deriver, constants_of
from .narrow import NarrowLeaf, NarrowSpec
from .nodes import Field, Node
from .operations import OPERATION_OF, Operation, Output, OutputRule, ProductRule
from .packed import Original, Recomputed
from .products import facts_of
from .rewrites import Bits, Shape, indices_spec, mask_spec
from .settings import Observer, Settings
from .specs import Leaf, Spec
from .tensors import is_plain
from .values import (
    KEY,
    OTHER_STREAM,
    Value,
    ensure_value,
    prove,
    saved_output_of,
    value_of,
    was_visited,
    whole_output,
)
from .verify import is_verified
from .views import base_of, reshapes_only
from .weights import weights_of

_T = TypeVar("_T")
_LEAF_FACTOR = 4  # see 4 of NOTE [Leaves] in `derive.py`
_MAX_NODES = 2**32  # of one forward pass
_passes = itertools.count()


class Replacer:
    """Replaces the saved tensors of new nodes during one forward pass.

    Attributes:
        settings: The state of the model.
        deriver: Derives specs.
        observer: Observes what is replaced; None if nothing does.
        ordinal: How many nodes of the table were visited.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        observer: Observer | None,
        is_unmodified: Callable[[Tensor | None, Node], bool],
    ) -> None:
        """Prepare for a forward pass.

        Args:
            settings: The state of the model.
            model: The model.
            observer: Observes what is replaced; None if nothing does.
            is_unmodified: Returns whether a parameter is unmodified since an operation has read it.
        """
        self.settings, self.observer = settings, observer
        self.deriver = Deriver(settings, model, observer is not None)
        self.ordinal = 0
        self._first_turn = next(_passes) * _MAX_NODES  # see NOTE [Shared values] in `specs.py`
        self._is_unmodified = is_unmodified
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # the first of each device
        self._holding: list[weakref.ref[Value]] = []  # values to release
        self._narrow: list[weakref.ref[NarrowLeaf]] = []
        self._undecided: list[weakref.ref[Recomputed]] = []  # those that keep their original

    @property
    def turn(self) -> int:
        """The turn of the node that is visited."""
        return self._first_turn + self.ordinal

    def stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the stream of the first operation on a device."""
        return self._streams.get(device)

    @property
    def next_turn(self) -> int:
        """The turn of the next consumer: see NOTE [Shared values] in `specs.py`."""
        return self.turn + 1

    def is_first_on_its_device(self, stream: torch.cuda.Stream | None) -> bool:
        """Whether a CUDA stream is that of the first operation: 6 of NOTE [Leaves]."""
        return stream is None or self._streams.setdefault(stream.device, stream) is stream

    def visit(self, node: Node, operation: Operation) -> None:
        """Make a new node's value, and replace its saved tensors where possible."""
        self.ordinal += 1
        stream = nodes.stream_of(node)
        if stream is not None and not self.is_first_on_its_device(stream):
            node.metadata[KEY] = OTHER_STREAM
            for name in operation.reads:
                self._report(node, name, reasons.OTHER_STREAM)
            return
        value = Value()
        if operation.output is not None:
            self.fill(node, value, operation, operation.output)
        node.metadata[KEY] = value
        for name in operation.reads:
            self.replace_input(node, value, name)
        for name in operation.reads_exact:
            self.replace_input(node, value, name, is_exact=True)
        if operation.has_rewrites:
            self.rewrite(node, operation, value)

    def rewrite(self, node: Node, operation: Operation, value: Value) -> None:
        """Replace other tensors than inputs that backward reads."""
        if operation.result:
            self._replace_result(node, operation, value)
        if operation.indices:
            self._narrow_indices(node, operation)
        if operation.shape_only:
            field = Field(node, operation.shape_only)
            if (saved := _rewritable(field)) is not None:
                self._save(node, operation.shape_only, field, Shape(saved))
        if operation.saved_mask:
            self._narrow_mask(node, operation.saved_mask)
        if operation.reads_no_values and not is_named(node, CAT):
            for edge in nodes.producers(node):
                base, _ = base_of(*edge)
                if is_named(base, CAT):
                    self._reduce_parts(base)
                else:
                    self._reduce_to_bits(base)

    def fill(self, node: Node, value: Value, operation: Operation, rule: OutputRule) -> None:
        """Store what a spec of the output needs, and what may be gone when one is derived."""
        if isinstance(rule, Output):
            prove(node, value, rule, operation.result)
            constants = constants_of(node, rule)
            if constants:
                value.constants = constants
                self.release_later(value)
        elif rule == "norm":
            value.norm = NormFacts()
            self.release_later(value)
            self._add_parameters(node, value.norm)
        elif isinstance(rule, ProductRule):
            value.product = facts_of(node, value, rule, self._is_unmodified, self.deriver.model)
            if value.product is not None:
                self.release_later(value)

    def _add_parameters(self, node: Node, facts: NormFacts) -> None:
        """Add the parameters to which a norm's node leads."""
        x = nodes.saved_tensor(node, "input")
        if x is None or x.nbytes < Settings.MIN_BYTES:
            return
        parameters = norms.parameters_of(node)
        if parameters is None:
            return
        # If the node saves the bias, autograd checks its version.
        if self._is_unmodified(parameters.bias, node) or norms.node_determines_bias(node):
            facts.add_parameters(node, parameters)

    def release_later(self, value: Value) -> None:
        """Release a value when the model's forward has returned."""
        self._holding.append(weakref.ref(value))

    def replace_input(self, node: Node, own: Value, name: str, is_exact: bool = False) -> None:
        """Replace an input that a node saves by a spec, if there is one.

        Args:
            node: The node.
            own: Its value.
            name: The field of the saved input.
            is_exact: Whether the spec must be exact.
        """
        field = Field(node, name)
        saved = field.tensor
        producer = None if saved is None else saved.grad_fn
        if saved is None or producer is None or producer is node:  # limit 8
            return
        if not is_plain(saved):  # limit 1
            return self._report(node, name, reasons.NOT_PLAIN)
        if saved.nbytes < Settings.MIN_BYTES:
            return
        base, index = base_of(producer, saved.output_nr)
        if base is None or not was_visited(base):  # limit 8, for example a parameter
            return self._report(node, name, self.deriver.why(reasons.output_of, base))
        value = ensure_value(base)
        if value is None:  # limit 8
            return self._report(node, name, reasons.OTHER_STREAM)
        if index == 0:
            if value.saver is not None and saved_output_of(base, value) is not None:  # limit 2
                return self._report(node, name, reasons.SAVED_ANYWAY)
            if field.is_itself:
                value.note_saved(saved)
        if not value.is_unmodified_in(saved):  # limit 3
            return self._report(node, name, reasons.WRITTEN_TO)
        spec = self._spec_for(field, saved, base, value)
        if isinstance(spec, str):
            self._report(node, name, spec or self.deriver.why(reasons.output_of, base))
        elif is_exact and spec.rounding:
            self._report(node, name, reasons.ROUNDED)
        elif (recomputed := self._recomputed(node, name, field, spec, base)) is not None:
            self._save(node, name, field, recomputed)
            if index == 0 and value.noted is None and (original := field.original) is not None:
                value.take_note(original)
            return
        if index == 0:
            value.mark_saved_by(own)
            if not field.is_itself and reshapes_only(producer, saved.output_nr):
                # A note of the alias that this read made would die at once.
                value.take_note(field.lasting)  # type: ignore[arg-type]
            if is_named(base, CAT):
                del spec  # and its leaves, if no other spec reads them
                self._reduce_parts(base)

    def _spec_for(self, field: Field, saved: Tensor, base: Node, value: Value) -> Spec | str:
        """Return the spec of a saved tensor, if need be one with narrow copies."""
        spec = self.deriver.spec_of(saved.grad_fn, saved.output_nr)
        operation = OPERATION_OF[type(base)]
        if operation is None or not operation.may_be_narrow:
            return spec
        # Narrow copies take memory, which a spec within the limits does not.
        if isinstance(spec, str) or self.deriver.obstacle(spec):
            return self._narrow_spec(field, base, value) or spec
        return spec

    def _narrow_spec(self, field: Field, base: Node, value: Value) -> Spec | str:
        """Return a spec with narrow copies for a saved tensor; "" if there is none.

        See NOTE [Narrow copies] in `narrow.py`.

        Args:
            field: The field in which a consumer saves the tensor.
            base: The operation that returned the tensor, or the base of which it is a view.
            value: The operation's value.
        """
        saved, original = field.tensor, field.original
        assert saved is not None
        assert original is not None
        output = whole_output(original, base)
        if output is None:
            return ""
        narrow = NarrowSpec(self.deriver.affordable_spec_of, self.deriver.call)
        spec = narrow.of(base, output.detach())
        if spec is None:
            if output is original:
                narrow.offer_slices(field.lasting)  # type: ignore[arg-type]
            return ""
        self._narrow += map(weakref.ref, narrow.own())
        value.spec = weakref.ref(spec)
        return self.deriver.spec_of(saved.grad_fn, saved.output_nr)

    def _replace_result(self, node: Node, operation: Operation, value: Value) -> None:
        """Replace the operation's own saved output by a spec, if there is one."""
        field = Field(node, operation.result)
        if _rewritable(field) is None:
            return
        spec = self.deriver.spec_from_inputs(node, operation, value)
        if isinstance(spec, str):
            reason = spec or self.deriver.why(reasons.output_of, node)
            return self._report(node, operation.result, reason)
        recomputed = self._recomputed(node, operation.result, field, spec, node)
        if recomputed is not None:
            self._save(node, operation.result, field, recomputed)

    def _recomputed(
        self, node: Node, name: str, field: Field, spec: Spec, base: Node
    ) -> Recomputed | None:
        """Return what replaces a saved tensor; None if it stays saved as PyTorch saves it."""
        turn, saved = self.turn, field.tensor
        assert saved is not None
        limit = self._limit(spec, saved, turn)
        if limit:
            self._report(node, name, limit)
            return None
        names = nodes.operation_name(base), nodes.operation_name(node)
        value = Recomputed(spec, saved, *names, turn)
        context = type(node), name, type(base), spec.cost
        if not is_verified(self.settings, self.ordinal, value, saved, *context):  # limit 7
            self._report(node, name, reasons.DIFFERENT)
            return None
        spec.add_consumer(turn)
        return value

    def norm_input(self, output: Tensor) -> Tensor | Recomputed | None:
        """Return a norm's input, or what the norm saves instead, to recompute its output from.

        Return None if there is neither, or if the output would take more than `max_ops` passes.
        """
        x = norms.input_of(output)
        packed = None if x is not None else nodes.packed(output.grad_fn, "input")
        if not isinstance(packed, Recomputed):
            return x
        if self.settings.rejects(math.floor(packed.spec.added_cost()) + 1):
            return None
        if not packed.spec.is_near(self.next_turn):
            return None
        is_like = (packed.shape, packed.dtype) == (output.shape, output.dtype)
        return packed if is_like else None

    def is_within_limits(self, spec: Spec) -> bool:
        """Whether the next node may save a spec with products: limits 4 and 6."""
        return not self.deriver.obstacle(spec) and spec.is_near(self.next_turn)

    def _limit(self, spec: Spec, saved: Tensor, turn: int) -> str:
        """Return which of the limits keeps a spec from replacing a tensor; "" if none does."""
        obstacle = self.deriver.obstacle(spec)
        if obstacle:  # limit 4
            return obstacle
        if spec.cost == 0 and any(_share_memory(leaf.tensor, saved) for leaf in spec.leaves()):
            return reasons.SAVED_ANYWAY  # limit 2
        if spec.auxiliary_bytes >= saved.nbytes:  # limit 5
            return reasons.AS_LARGE
        if spec.leaf_bytes > _LEAF_FACTOR * saved.nbytes:  # limit 5
            return reasons.MUCH_LARGER
        if not spec.is_near(turn):  # limit 6
            return reasons.FAR
        return ""

    def _save(self, node: Node, name: str, field: Field, value: Packed) -> None:
        """Save a packed value in a field of a node, instead of its tensor."""
        saved = field.tensor
        assert saved is not None
        if self.observer is not None:
            self.observer.replaced(node, name, saved, value)
        if isinstance(value, Recomputed) and value.spec.tolerance:
            self.keep_until_known(value, saved)
        if saved.is_cuda:
            value.stream = self.stream_of(saved.device)
        field.replace(value)

    def keep_until_known(self, value: Recomputed, saved: Tensor) -> None:
        """Keep the tensor that a spec replaces, until it is known whether its weights last.

        See 6 of NOTE [Weights are proved] in `weights.py`.
        """
        known, all_last = self.settings.weights, True
        for product in value.spec.products:
            product.lasts = product.lasts or known.all_last(product.weights)
            all_last = all_last and product.lasts
        if not all_last:
            weights = weights_of(value.spec)
            learn = partial(self.settings.weights.learn, weights)  # must not refer to the engine
            value.original = Original(Leaf(saved), learn)
            self._undecided.append(weakref.ref(value))

    @property
    def keeps_originals(self) -> bool:
        """Whether tensors stay saved until it is known whether their specs can be computed."""
        return any(value.original is not None for value in _alive(self._undecided))

    def release(self) -> None:
        """Release what only new specs need. Called when the model's forward has ended."""
        for value in _alive(self._holding):
            value.release()
        self._holding.clear()

    def finish(self) -> None:
        """Decide what is still open. Called when the model's forward has returned."""
        self.release()
        for recomputed in _alive(self._undecided):
            weights, known = weights_of(recomputed.spec), self.settings.weights
            if known.are_models(weights) and known.learn(weights):
                recomputed.original = None
        with nodes.no_graph():
            for leaf in _alive(self._narrow):
                leaf.settle()

    def _narrow_mask(self, node: Node, name: str) -> None:
        """Replace a saved mask by one bit per element."""
        field = Field(node, name)
        saved = _rewritable(field)
        if saved is None or saved.untyped_storage().nbytes() > _LEAF_FACTOR * saved.nbytes:
            return
        mask = mask_spec(saved, _alive(self._narrow))
        if mask is None:
            return
        spec, leaf = mask
        self._narrow.append(weakref.ref(leaf))
        value = Recomputed(spec, saved, "mask", nodes.operation_name(node))
        if is_verified(self.settings, self.ordinal, value, saved, type(node), name, "mask"):
            self._save(node, name, field, value)

    def _narrow_indices(self, node: Node, operation: Operation) -> None:
        """Replace the indices of max pooling by a copy in a smaller dtype."""
        field = Field(node, operation.indices)
        saved = _rewritable(field)
        if saved is None or saved.untyped_storage().nbytes() != saved.nbytes:
            return
        pooled = nodes.saved_tensor(node, operation.shape_only)
        # Where a window is outside of the plane, PyTorch's index may be too.
        is_short = pooled is not None and math.prod(pooled.shape[-operation.pooled_dims :]) <= 2**14
        spec, leaf = indices_spec(saved, is_short)
        self._narrow.append(weakref.ref(leaf))
        value = Recomputed(spec, saved, "indices", nodes.operation_name(node))
        self._save(node, operation.indices, field, value)

    def _reduce_parts(self, node: Node) -> None:
        """Reduce the parts of a concatenation to bits, where a ReLU or LeakyReLU returned them.

        Called if the operation after the concatenation reads no values in backward, or saves the
        concatenation. If that has a spec, the spec reads the parts, and so may the specs of other
        concatenations.
        """
        for edge in nodes.producers(node):
            base, _ = base_of(*edge)
            self._reduce_to_bits(base)

    def _reduce_to_bits(self, node: Node) -> None:
        """Replace the saved tensor of a ReLU or LeakyReLU by one bit per element.

        Called if the operation that consumes the activation's output reads no values in backward.
        """
        operation = None if node is None else OPERATION_OF[type(node)]
        if operation is None or operation.mask is None:
            return
        value = value_of(node)
        if value is None or value.is_saved:
            return
        field = Field(node, operation.activation_field)
        saved = _rewritable(field)
        if saved is not None and _ops.has_kernel(saved):
            self._save(node, operation.activation_field, field, Bits(saved, operation.mask))

    def _report(self, node: Node, name: str, reason: str) -> None:
        """Report that a saved tensor stays saved."""
        if self.observer is not None:
            self.observer.unchanged(node, name, reason)


def _rewritable(field: Field) -> Tensor | None:
    """Return the saved tensor if the engine may replace it: limit 1."""
    saved = field.tensor
    if saved is None or not is_plain(saved) or saved.nbytes < Settings.MIN_BYTES:
        return None
    return saved


def _alive(references: Iterable[weakref.ref[_T]]) -> Iterator[_T]:
    return (value for reference in references if (value := reference()) is not None)


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    return storage_id(tensor.untyped_storage()) == storage_id(other.untyped_storage())
