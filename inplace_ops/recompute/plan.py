"""A plan: what the rules have decided for each node of a forward pass, to repeat it in the next.

The rules (`replace.py`, `derive.py`) ask a few hundred small questions at each node, most of which
have the same answer in every step of a training run. A plan remembers the answers.

NOTE [Plans]

1. The rules alone decide. When they have visited a node, `decision_of` reads off the node what they
   have done, and the plan of the model stores it under the node's ordinal. In the next forward pass
   the node with that ordinal is compared with the decision. If all that the decision depends on is
   the same, the plan repeats it. Otherwise the rules run, and their decision replaces it.
2. What replaces a saved tensor must be right whatever happened since. So before a decision is
   repeated, these are compared, and the branches cite this list:
   a. nothing else sees the operations: no tracer, transform, mode, profiler, and no hooks of other
      code have the saved tensor;
   b. the types of the node and of the operations up to the base of the saved tensor;
   c. the layout, dtype and device of the saved tensor;
   d. the base was visited in this forward pass, on the same stream; no other operation saves it;
      its version proves that nothing has written to it;
   e. the spec, which the rules have made for this forward pass: its kind, cost, sizes and
      roundings. On these the limits depend.
   Products are compared with the limits anew, as these depend on turns: NOTE [Narrow points] in
   `products.py`.
3. The comparison with the saved tensor at its first use is not repeated: a decision is stored only
   after it, and the key of NOTE [First use] in `verify.py` depends on nothing else.
4. Where the rules leave a tensor as it is, leaving it needs no proof. A decision repeats that only
   where the rules could not do otherwise: for a parameter, and for the output of an operation that
   has no spec. Elsewhere the rules decide about this tensor in each forward pass.
5. An ordinal may be another operation's than before, for example where a forward has branches. The
   comparison proves everything from the node itself, so this costs time alone.
6. Plans are used from torch 2.14 on, where PyTorch passes each node when it is created: what the
   operation has read is unmodified then. An observed forward pass has no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from .._ops import layout_of
from . import nodes, norms
from .calls import ViewCall
from .decisions import (
    Asked,
    FilledByRules,
    FilledNorm,
    Input,
    MergeDecision,
    NodeDecision,
    ReadParameter,
    Replaced,
    Saved,
    Views,
    base_on,
    facts_of,
    path_of,
)
from .nodes import ACCUMULATE_GRAD_TYPE, Node, names_of
from .operations import OPERATION_OF, Operation, ProductRule
from .packed import Recomputed
from .products import widens
from .settings import MAX_KEYS
from .specs import Spec
from .values import Value, value_of
from .views import VIEW_OF


def decision_of(node: Node) -> NodeDecision | None:
    """Return what the rules have decided for a node; None if there is nothing to repeat."""
    operation, value = OPERATION_OF[type(node)], value_of(node)
    if operation is None or value is None:
        return None
    inputs = [_input_of(node, operation, name, value) for name in operation.reads]
    inputs += [Asked(name, is_exact=True) for name in operation.reads_exact]
    filling = _filling_of(node, operation, value)
    return NodeDecision(type(node), operation, filling, tuple(inputs))


def _input_of(node: Node, operation: Operation, name: str, own: Value) -> Input:
    """Return what the rules have decided about a saved input of a node."""
    asked, rule = Asked(name, is_exact=False), operation.output
    if isinstance(rule, ProductRule):
        parameter = _parameter_at(node, dict(rule.operands)[name])
        if parameter is not None:
            return parameter
    packed = nodes.packed(node, name)
    if isinstance(packed, Recomputed):
        return _replaced(node, name, packed) or asked
    tensor = nodes.saved_tensor(node, name)
    path = None if tensor is None or tensor.grad_fn is None else path_of(tensor)
    if tensor is None or path is None:
        return asked
    value = value_of(base_on(tensor, path))
    if value is None or value.saver is None or value.saver() is not own:
        return asked
    of_base = OPERATION_OF[path.base]
    has_no_spec = of_base is None or (of_base.is_product and value.product is None)
    return Saved(*names_of(name), path) if has_no_spec else asked


def _parameter_at(node: Node, position: int) -> ReadParameter | None:
    """Return the parameter that a product reads; None if it reads something else."""
    types: list[type] = []
    node, _ = nodes.producer(node, position)
    while node is not None:
        types.append(type(node))
        if VIEW_OF[type(node)] is None:
            break
        node = node.next_functions[0][0]
    is_parameter = not types or types[-1] is ACCUMULATE_GRAD_TYPE
    return ReadParameter(position, tuple(types)) if is_parameter else None


def _replaced(node: Node, name: str, packed: Recomputed) -> Replaced | None:
    """Return how a spec has replaced an input; None if that depends on more than a match tells."""
    spec = packed.spec
    if packed.original is not None or packed.turn is None or spec.cost == 0:
        return None
    tensor = nodes.tensor_without_values(node, name)
    path = path_of(tensor)
    if path is None or packed.layout is None:
        return None
    of_base = OPERATION_OF[path.base]
    if of_base is not None and of_base.may_be_narrow:  # its spec may need narrow copies
        return None
    views, like = _views_of(base_on(tensor, path), len(path.views), spec), packed.without_spec()
    return Replaced(*names_of(name), path, packed.layout, facts_of(spec), views, like)


def _views_of(base: Node, count: int, spec: Spec) -> Views | None:
    """Return how a spec is made of that of a base by a number of views; None if it is not."""
    operation, value = OPERATION_OF[type(base)], value_of(base)
    if operation is None or operation.saves_output or value is None or value.spec is None:
        return None
    calls: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []
    for _ in range(count):
        if type(spec) is not ViewCall:
            return None
        calls.insert(0, (spec.function, tuple(spec.arguments)))
        (spec,) = spec.inputs
    if spec is not value.spec():
        return None
    if not calls:
        return Views(b"", ())
    noted = value.noted
    whole = noted if noted is None or noted._base is None else noted._base
    layout = None if whole is None else layout_of(whole)
    return None if layout is None else Views(layout, tuple(calls))


def _filling_of(
    node: Node, operation: Operation, value: Value
) -> FilledByRules | FilledNorm | None:
    """Return how the value of a node is filled in; None if it needs nothing more."""
    rule = operation.output
    if rule is None or (isinstance(rule, ProductRule) and not widens(node, rule)):
        return None
    facts = value.norm
    if facts is not None and facts.statistics is not None:
        formula, parameters = norms.known_kind_of(node).formula, norms.parameters_of(node)
        computed = {
            "batch": None if facts.affine is None else facts.affine.channel_affine,
            "layer": facts.column_affine,
        }.get(formula)
        # Other parameters are cast or copied first.
        are_usual = parameters is not None and all(
            type(p) is nn.Parameter and p.dtype is facts.statistics.rstd.dtype and p.is_contiguous()
            for p in parameters
        )
        if computed is not None and are_usual and parameters is not None:
            weight, dims = parameters.weight, len(nodes.output_shape(node, 0))
            assert weight is not None
            return FilledNorm(formula == "batch", tuple(computed.shape), weight.shape, dims)
    return FilledByRules(operation)


class Plan:
    """The decisions of a model's rules, by ordinal. All forward passes of the model share them.

    Attributes:
        of_nodes: The decision about the node with an ordinal.
        of_merges: The decision about the activation after the norm with an ordinal.
    """

    def __init__(self) -> None:
        self.of_nodes: dict[int, NodeDecision | None] = {}
        self.of_merges: dict[int, MergeDecision | None] = {}

    def learn(self, node: Node, ordinal: int) -> None:
        """Store what the rules have decided for the node with an ordinal."""
        _store(self.of_nodes, ordinal, decision_of(node))

    def learn_merge(self, decision: MergeDecision | None, ordinal: int) -> None:
        """Store how an activation runs with the norm with an ordinal."""
        _store(self.of_merges, ordinal, decision)


_D = TypeVar("_D")


def _store(decisions: dict[int, _D], ordinal: int, decision: _D) -> None:
    if ordinal in decisions or len(decisions) < MAX_KEYS:
        decisions[ordinal] = decision
