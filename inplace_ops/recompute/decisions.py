"""What the rules have decided about a node or an activation, and whether it may be repeated.

`match` compares what a decision depends on: 2 of NOTE [Plans] in `plan.py`. `act` does the same
again. No decision refers to a node or to a tensor of a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, is_anomaly_enabled, is_grad_enabled, nn
from torch.autograd import forward_ad
from torch.cuda import is_initialized
from torch.nn import Parameter

from .. import _ops
from .._ops import OpArgs, layout_of, record_of
from .._torch_private import (
    default_saved_tensor_hooks,
    is_undisturbed,
    profiler_is_running,
    set_grad_enabled,
)
from ..supported import ActivationCall, Candidate, candidate_of
from . import bypass, nodes, norms
from .affine import NormAffine, NormFacts
from .after_norm import Merge, runs_in_place
from .calls import ViewCall
from .nodes import ACCUMULATE_GRAD_TYPE, Node, names_of, put
from .norms import Statistics
from .operations import CAST, Operation
from .packed import Recomputed
from .specs import Spec
from .values import KEY, Value, ensure_value, was_visited
from .views import VIEW_OF, View

if TYPE_CHECKING:
    from .replace import Replacer

# What the limits ask of a spec: 2e of NOTE [Plans].
facts_of = attrgetter(
    *("__class__", "cost", "rounding", "tolerance", "leaf_bytes", "auxiliary_bytes")
)


class Path(NamedTuple):
    """The nodes from the one that returned a tensor to that of its base.

    Attributes:
        views: The type of each view, that of the tensor first, and its entry in the table of views.
        base: The type of the node of the base.
    """

    views: tuple[tuple[type, View], ...]
    base: type


def path_of(tensor: Tensor) -> Path | None:
    """Return the path to the base of a saved tensor; None unless that is a first output."""
    node: Node = tensor.grad_fn
    index = tensor.output_nr
    views: list[tuple[type, View]] = []
    while (view := VIEW_OF[type(node)]) is not None:
        views.append((type(node), view))
        node, index = view.source_of(node, index)
    return Path(tuple(views), type(node)) if index == 0 else None


def base_on(tensor: Tensor, path: Path) -> Node:
    """Return the node that returned the base of a tensor; None if its path is another one: 2b."""
    node: Node = tensor.grad_fn
    index = tensor.output_nr
    views, base = path
    for node_type, view in views:
        if type(node) is not node_type:
            return None
        node, index = view.source_of(node, index)
    return node if type(node) is base and index == 0 else None


def _spec_of(node: Node, index: int, replacer: Replacer) -> Spec | None:
    """Return the spec that the rules return; None if they return none."""
    with nodes.no_graph():  # a node creation hook must not create nodes
        spec = replacer.deriver.spec_of(node, index)
    return None if isinstance(spec, str) else spec


@dataclass(frozen=True, slots=True)
class Views:
    """The views between the base and a saved tensor.

    A view of a layout of a base of a layout maps the same elements of the base, whatever its
    arguments are. So if both layouts are as they were, the calls are too.

    Attributes:
        layout_of_base: What `layout_of` returns for the base.
        calls: Function and arguments of each `ViewCall`, that of the base first.
    """

    layout_of_base: bytes
    calls: tuple[tuple[Callable[..., Tensor], tuple[Any, ...]], ...]

    def are_of(self, tensor: Tensor, base: Node) -> bool:
        """Whether a tensor with the same layout as before is the same view of its base."""
        whole = tensor._base
        if whole is None or whole.grad_fn is not base:
            return False
        return layout_of(whole) == self.layout_of_base


@dataclass(frozen=True, slots=True)
class OfBase:
    """A saved input that an operation returned, or a view of that.

    Attributes:
        handle: The node's attribute with autograd's handle of the tensor.
        saved: The node's attribute with the tensor.
        path: The path to the base of the tensor.
    """

    handle: str
    saved: str
    path: Path


@dataclass(frozen=True, slots=True)
class Replaced(OfBase):
    """An input that a spec replaces.

    Attributes:
        layout: What `layout_of` returns for the tensor.
        facts: What the limits ask of the spec.
        views: How the spec is made of the spec of the base; None if only the rules know.
        packed: What the rules have saved instead of the tensor, without the spec.
    """

    layout: bytes
    facts: tuple[Any, ...]
    views: Views | None
    packed: Recomputed = field(compare=False)

    def match(self, node: Node, replacer: Replacer) -> tuple[Any, Tensor, Spec] | None:
        """Return autograd's handle, the tensor and its spec, if all is as it was."""
        handle = getattr(node, self.handle)
        if handle is None or handle.unpack_hook is not None:  # 2a
            return None
        tensor = getattr(node, self.saved)
        if type(tensor) is not Tensor or layout_of(tensor) != self.layout:  # 2c
            return None
        base = base_on(tensor, self.path)  # 2b
        value: Value | None = None if base is None else base.metadata.get(KEY)
        if not value or value.saver is not None:  # 2d
            return None
        if not value.is_unmodified_in(tensor):
            return None
        value.note_saved(tensor)
        views, known = self.views, value.spec
        if views is None or (views.calls and not views.are_of(tensor, base)):
            spec = _spec_of(tensor.grad_fn, tensor.output_nr, replacer)
        else:
            spec = None if known is None else known()
            if spec is None or not spec.is_current():
                spec = _spec_of(base, 0, replacer)
            for function, arguments in views.calls:
                if spec is not None:
                    spec = ViewCall(function, (spec,), *arguments)
        if spec is None or facts_of(spec) != self.facts:  # 2e
            return None
        if spec.tolerance and not replacer.is_within_limits(spec):
            return None
        return handle, tensor, spec

    def act(self, node: Node, own: Value, replacer: Replacer, match: Any) -> None:
        """Replace the tensor."""
        handle, tensor, spec = match
        turn = replacer.turn
        packed = self.packed.again(spec, turn)
        spec.add_consumer(turn)
        if spec.tolerance:
            replacer.keep_until_known(packed, tensor)
        if tensor.is_cuda:
            packed.stream = replacer.stream_of(tensor.device)
        put(handle, packed)


@dataclass(frozen=True, slots=True)
class Saved(OfBase):
    """An input that stays saved, as the operation that returned it has no spec."""

    def match(self, node: Node, replacer: Replacer) -> Value | None:
        """Return the value of the tensor's base, if all is as it was."""
        handle = getattr(node, self.handle)
        if handle is None or handle.unpack_hook is not None:  # 2a
            return None
        tensor = getattr(node, self.saved)
        if type(tensor) is not Tensor:
            return None
        base = base_on(tensor, self.path)  # 2b
        if base is None or not was_visited(base):
            return None
        value = ensure_value(base)
        if value is None or value.saver is not None or value.product is not None:  # 2d
            return None
        if not value.is_unmodified_in(tensor):
            return None
        value.note_saved(tensor)
        return value

    def act(self, node: Node, own: Value, replacer: Replacer, match: Value) -> None:
        """Record that the node saves the tensor."""
        match.mark_saved_by(own)


@dataclass(frozen=True, slots=True)
class ReadParameter:
    """A saved operand of a product that is a parameter, or a view of one.

    Attributes:
        position: The index of the operand's edge.
        types: The types of the nodes from there to the parameter's; none of a frozen parameter.
    """

    position: int
    types: tuple[Any, ...]

    def match(self, node: Node, replacer: Replacer) -> bool | None:
        """Return True if the operand still is a parameter."""
        node, _ = node.next_functions[self.position]
        for node_type in self.types:
            if type(node) is not node_type:
                return None
            if node_type is not ACCUMULATE_GRAD_TYPE:
                node = node.next_functions[0][0]
        return True if self.types or node is None else None

    def act(self, node: Node, own: Value, replacer: Replacer, match: bool) -> None:
        """Leave it saved."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A saved input about which the rules decide in each forward pass.

    Attributes:
        name: The field.
        is_exact: Whether a spec must be exact.
    """

    name: str
    is_exact: bool

    def match(self, node: Node, replacer: Replacer) -> bool:
        """Return True: nothing is assumed."""
        return True

    def act(self, node: Node, own: Value, replacer: Replacer, match: bool) -> None:
        """Ask the rules."""
        with nodes.no_graph():
            replacer.replace_input(node, own, self.name, self.is_exact)


Input = Replaced | Saved | ReadParameter | Asked


@dataclass(frozen=True, slots=True)
class FilledByRules:
    """The rules fill in the value in each forward pass.

    Attributes:
        operation: The node's entry in the table of operations.
    """

    operation: Operation

    def fill(self, node: Node, value: Value, replacer: Replacer) -> bool:
        """Return True, with the value filled in."""
        assert self.operation.output is not None
        with nodes.no_graph():
            replacer.fill(node, value, self.operation, self.operation.output)
        return True


@dataclass(frozen=True, slots=True)
class FilledNorm:
    """The value of a norm that has computed statistics, and whose weight and bias are parameters.

    Attributes:
        is_batch_norm: Whether it is a batch norm, and not a layer norm.
        shape: The shape of its channel or column affine.
        weight_shape: That of the weight.
        dims: The number of dimensions of its input.
    """

    is_batch_norm: bool
    shape: tuple[int, ...]
    weight_shape: torch.Size
    dims: int

    def fill(self, node: Node, value: Value, replacer: Replacer) -> bool:
        """Fill in the value. Return False if something is not as it was."""
        if _handle_of_weight(node).unpack_hook is not None:  # 2a: a read would call the hook
            return False
        if profiler_is_running():  # it does not see a direct call
            return False
        weight, mean, rstd = _weight_mean_rstd(node)
        if self.is_batch_norm:
            leaf = node.next_functions[2][0]
            if type(leaf) is not ACCUMULATE_GRAD_TYPE or not _is_training(node):
                return False
            bias, dims = leaf.variable, len(nodes.output_shape(node, 0))
        else:
            bias, dims = _bias(node), mean.dim()
        if not (type(weight) is type(bias) is Parameter):
            return False
        if weight.shape != self.weight_shape or dims != self.dims:  # they determine `shape`
            return False
        call = _ops.CALL_NORM_AFFINE.without_dispatcher(weight)
        try:
            if self.is_batch_norm:
                affine = call(rstd, mean, weight, bias, self.shape, 1)
            else:
                affine = call(None, None, weight, bias, self.shape, 1)
        except RuntimeError:  # parameters of other dtypes or layouts than before
            return False
        if affine is NotImplemented:
            return False
        value.norm = facts = NormFacts()
        facts.statistics = record_of(Statistics, (mean, rstd))
        if self.is_batch_norm:
            facts.affine = record_of(NormAffine, (affine, None))
        else:
            facts.column_affine = affine
        replacer.release_later(value)
        return True


_weight_mean_rstd = attrgetter(*[names_of(name)[1] for name in ("weight", "result1", "result2")])
_bias, _is_training = attrgetter(names_of("bias")[1]), attrgetter(names_of("training")[1])
_handle_of_weight = attrgetter(names_of("weight")[0])


@dataclass(frozen=True, slots=True)
class NodeDecision:
    """What the rules have decided for a node.

    Attributes:
        node_type: The type of the node.
        operation: Its entry in the table of operations.
        filling: How the node's value is filled in; None if it needs nothing more.
        inputs: Its saved inputs.
    """

    node_type: type
    operation: Operation
    filling: FilledByRules | FilledNorm | None
    inputs: tuple[Input, ...]

    def match(self, node: Node, replacer: Replacer) -> list[tuple[Input, Any]] | None:
        """Return what the inputs need to do the same again; None if something is not as it was."""
        if not is_undisturbed():  # 2a
            return None
        if is_initialized() and not replacer.is_first_on_its_device(nodes.stream_of(node)):  # 2d
            return None
        if self.operation is CAST and nodes.downcasts_autograd_leaf(node):
            return None  # the rules do not count it
        matches = []
        for each in self.inputs:
            match = each.match(node, replacer)
            if match is None:
                return None
            matches.append((each, match))
        return matches

    def repeat(self, node: Node, replacer: Replacer) -> bool:
        """Do the same again. Return False, and do nothing, if something is not as it was."""
        metadata, filling = node.metadata, self.filling
        matches = None if KEY in metadata else self.match(node, replacer)
        if matches is None:
            return False
        value = Value()
        if filling is not None and not filling.fill(node, value, replacer):
            return False
        metadata[KEY] = value
        replacer.ordinal += 1
        for each, match in matches:
            each.act(node, value, replacer, match)
        if self.operation.has_rewrites:
            with nodes.no_graph():
                replacer.rewrite(node, self.operation, value)
        return True


@dataclass(frozen=True, slots=True)
class MergeDecision:
    """How the rules have run an activation together with the norm before it.

    Attributes:
        module_type: The type of the activation's module.
        candidate: What recognizes the activation.
        call: The activation.
        is_in_place: Whether it runs in place.
        op_args: The last arguments of its ops.
        anchor: What its anchors are aliases of.
        norm_type: The type of the norm's node.
        layout: What `layout_of` returns for the norm's output.
        is_batch_norm: Whether the norm is a batch norm.
        saves_spec: Whether the norm saves a spec instead of its input.
        affine_bytes: The size of the norm's affine.
    """

    module_type: type[nn.Module]
    candidate: Candidate
    call: ActivationCall
    is_in_place: bool
    op_args: OpArgs
    anchor: Tensor | None = field(compare=False)
    norm_type: Any
    layout: bytes
    is_batch_norm: bool
    saves_spec: bool
    affine_bytes: int

    @classmethod
    def of(cls, module: nn.Module, z: Tensor, output: Tensor, merge: Merge) -> MergeDecision | None:
        """Return the decision; None where z is a view."""
        if output is not z:
            return None
        _, call, is_in_place, op_args, anchor, *_ = merge
        layout, is_batch_norm = layout_of(z), norms.is_batch_norm(z.grad_fn)
        if layout is None:
            return None
        return cls(
            type(module),
            candidate_of(module),
            call,
            is_in_place,
            op_args,
            anchor,
            type(z.grad_fn),
            layout,
            is_batch_norm,
            isinstance(merge.x, Recomputed),
            merge.affine.nbytes,
        )

    def match(self, module: nn.Module, z: Any, replacer: Replacer) -> Merge | None:
        """Return how the activation runs with the norm before it, if all is as it was."""
        if type(module) is not self.module_type or type(z) is not Tensor:
            return None
        node: Node = z.grad_fn
        if type(node) is not self.norm_type or z._version or z.output_nr:  # so it is not a view
            return None
        if layout_of(z) != self.layout:
            return None
        is_usual = (
            is_grad_enabled()
            and is_undisturbed()  # 2a
            and default_saved_tensor_hooks() is None
            and forward_ad._current_level < 0
            and not is_anomaly_enabled()
        )
        if not is_usual or self.candidate.call_of(module) != self.call:
            return None
        is_in_place = self.is_in_place
        if runs_in_place(module, self.call.activation) is not is_in_place:
            return None
        if is_initialized() and not replacer.is_first_on_its_device(nodes.stream_of(node)):
            return None
        value = node.metadata.get(KEY)
        facts = value.norm if value else None
        if facts is None:
            return None
        x: Any = replacer.norm_input(z) if self.saves_spec else nodes.saved_tensor(node, "input")
        tensor = None if self.saves_spec else x
        if type(x) is not (Recomputed if self.saves_spec else Tensor):
            return None
        if tensor is not None and tensor.is_neg():  # its layout follows from z's
            return None
        affine, instead = facts.affine, None
        if self.is_batch_norm:
            instead = bypass.bypass_of_batch_norm(node, facts, module, tensor, z, is_in_place)
        elif affine is None:
            set_grad_enabled(False)
            try:
                affine = facts.affine_of(node)
            finally:
                set_grad_enabled(True)
        if affine is None or affine.nbytes != self.affine_bytes:
            return None
        call, op_args, anchor = self.call, self.op_args, self.anchor
        fields = module, call, is_in_place, op_args, anchor, x, affine, instead
        return record_of(Merge, fields)
