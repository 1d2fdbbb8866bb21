"""The reasons why a tensor stays saved as PyTorch saves it: texts for the report."""

from __future__ import annotations

from . import nodes
from .nodes import Node
from .operations import OPERATION_OF, OPERATIONS
from .values import value_of, was_visited
from .views import base_of

# Prefixes of the names of operations that are never recomputed: other products than those with a
# rule, attention, reductions, random numbers and the like.
_EXPENSIVE = (
    *("Baddbmm", "Addbmm", "Addmv", "Mv", "Linear", "GroupedMm", "Einsum"),
    *("ScaledDotProduct", "EfficientAttention", "FlashAttention", "NativeMultiHeadAttention"),
    *("Trilinear", "GridSampler", "NativeDropout", "Bernoulli", "Softmax", "LogSoftmax"),
    *("Mean", "Sum", "Var", "Std", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"),
    *("Cumsum", "Sort", "Fft"),
)

_WITH_RULE = {nodes.name_of_type(name) for name, each in OPERATIONS.items() if each.has_spec}

PARAMETER_COPY = "autocast's copy of a parameter"
PARAMETER_CAST = "a parameter in another dtype: never recomputed"
NO_GRADIENT = "computed outside autograd: input, statistics, mask"
SMALL = "smaller than 4 KiB"
SMALL_PART = "only a part of it smaller than 4 KiB is read"
NOT_PLAIN = "not a plain tensor"
OTHER_STREAM = "made on another CUDA stream"
WRITTEN_TO = "may have been written to since it was made"
CHECKPOINT_INPUT = "the input of a checkpoint"
CACHED_BY_CHECKPOINT = "the policy of a selective checkpoint saves it"
NEEDED_BY_CHECKPOINT = "a checkpoint recomputes from it: random states, what its function refers to"
OUTSIDE = "computed outside of the model's forward"
SAVED_ANYWAY = "another operation saves the same memory"
AS_LARGE = "the copies needed to recompute it are as large"
MUCH_LARGER = "the tensors needed to recompute it are much larger"
FAR = "the operations that read it are far apart: its product would run twice"
FIRST_STEP = "kept in the first step, which shows whether its weight is there in backward"
MANY_PRODUCTS = "too many products would run one after another"
FREED = "the memory of a weight is freed when forward has returned"
ROUNDED = "its consumer compares it, and its recomputed value would be rounded"
DIFFERENT = "its recomputed value differed at the first use"


def output_of(node: Node) -> str:
    """Return the reason for the output of an operation without an output rule."""
    if node is None or nodes.autograd_leaf_of(node) is not None:
        return "a parameter"
    name = nodes.operation_name(node)
    if name.startswith(_EXPENSIVE):
        return "too expensive: never recomputed"
    operation = OPERATION_OF[type(node)]
    if operation is not None and operation.has_spec and not was_visited(node):
        return OUTSIDE
    if name in _WITH_RULE:  # for other arguments: a product has one for a tensor, not for a number
        name = type(node).__name__
    return f"no rule for the output of {name}"


def this_call(node: Node) -> str:
    """Return the reason for the output of an operation whose rule does not hold for its arguments.

    Also for an output of a norm that is not its first.
    """
    return f"the rule for {nodes.operation_name(node)} does not hold for this call"


def no_product(node: Node) -> str:
    """Return the reason for the output of a product that the engine does not run again."""
    return f"{nodes.operation_name(node)} does not widen: never recomputed"


def unknown_factors(node: Node) -> str:
    """Return the reason for the output of a product whose weight or bias is not proved."""
    return f"the weight or bias of {nodes.operation_name(node)} is computed, or not known"


def stored(node: Node, how: str) -> str:
    """Return the reason for the output of an operation that saves less of its input or output."""
    return f"{nodes.operation_name(node)} saves its tensor otherwise: {how}"


def saved_by(node: Node) -> str:
    """Return the reason for a tensor that an operation saves in a field without a rule."""
    return f"no rule for what {nodes.operation_name(node)} saves"


def too_many(max_ops: int) -> str:
    """Return the reason for a tensor whose spec takes more than `max_ops` passes."""
    return f"takes more than {max_ops} passes: raise max_ops"


def unsaved_input(node: Node, producer: Node, index: int = 0) -> str:
    """Return the reason for the output of an operation that does not save one of its inputs.

    Args:
        node: The operation's node.
        producer: The node that produced the input; None if the input has no gradient.
        index: The index of the producer's output.
    """
    name = nodes.operation_name(node)
    producer, _ = base_of(producer, index)
    if producer is None:
        return f"{name} does not save an input without a gradient"
    if nodes.autograd_leaf_of(producer) is not None:
        return f"{name} does not save the parameter that it reads"
    return f"{name} does not save its input from {nodes.operation_name(producer)}"


def unproved_input(node: Node) -> str:
    """Return the reason for the output of an operation whose inputs are not proved unmodified."""
    name, own = nodes.operation_name(node), value_of(node)
    edges = nodes.producers(node)
    positions = range(len(edges)) if own is None else own.unproved
    bases = [base_of(*edges[position])[0] for position in sorted(positions)]
    unknown = [base for base in bases if not _is_available(base)]
    if unknown:  # prefer an operation's output to a parameter, and the last one: f(x) in x + f(x)
        return unsaved_input(node, max(reversed(unknown), key=_is_an_operation))
    for base in bases:
        value = value_of(base)
        tensor = None if value is None else value.noted
        if value is None or tensor is None or nodes.grad_fn_of(tensor) is not base:
            continue
        if not value.is_unmodified_in(tensor):
            return f"an input of {name} was written to"
    producers = [*dict.fromkeys(nodes.operation_name(base) for base in bases)]
    return f"{name} does not save its input from {producers[-1]}, which is not proved unmodified"


def _is_available(node: Node) -> bool:
    """Whether an operation's output is saved, or has an output rule."""
    value = None if node is None else value_of(node)
    if value is None:
        return False
    operation = OPERATION_OF[type(node)]
    if operation is None or not operation.has_spec:
        return value.is_saved
    return value.is_saved or value.product is not None or not operation.is_product


def _is_an_operation(node: Node) -> bool:
    return node is not None and nodes.autograd_leaf_of(node) is None


def amplified_rounding(node: Node) -> str:
    """Return the reason for the output of an operation whose inputs would have to be exact."""
    return f"{nodes.operation_name(node)} may amplify the rounding of a recomputed norm"


def unknown_strides(node: Node) -> str:
    """Return the reason for the output of an operation whose input's strides are not known."""
    return f"{nodes.operation_name(node)} rounds by strides, and a copy hides those of its input"


def hidden_input(node: Node) -> str:
    """Return the reason for the output of an operation whose saved input no spec may read."""
    name = nodes.operation_name(node)
    return f"an input of {name} is a large parameter or constant, or not a plain tensor"


def hidden_output(node: Node, is_hidden: bool) -> str:
    """Return the reason for the output of an operation whose saved output is not readable."""
    return hooked(node) if is_hidden else NOT_PLAIN


def hooked(node: Node) -> str:
    """Return the reason for the output of an operation that saves a tensor under other hooks."""
    return f"a checkpoint or other hooks have what {nodes.operation_name(node)} saves"


def unknown_parameters(node: Node) -> str:
    """Return the reason for the output of a norm whose parameters are unknown."""
    return f"the weight, bias or eps of {nodes.operation_name(node)} is not known"
