"""The reasons why a tensor stays saved as PyTorch saves it: texts for the report."""

from __future__ import annotations

from . import nodes
from .nodes import Node
from .operations import OPERATION_OF, base_of
from .versions import record_of

# Prefixes of the names of operations that are never recomputed: matrix products, convolutions,
# attention, reductions, random numbers and the like.
_EXPENSIVE = (
    *("Convolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Addmv", "Mv", "Linear"),
    *("GroupedMm", "Einsum"),
    *("ScaledDotProduct", "EfficientAttention", "FlashAttention", "NativeMultiHeadAttention"),
    *("Trilinear", "GridSampler", "NativeDropout", "Bernoulli", "Softmax", "LogSoftmax"),
    *("Mean", "Sum", "Var", "Std", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"),
    *("Cumsum", "Sort", "Fft"),
)

PARAMETER_COPY = "autocast's copy of a parameter"
NO_GRADIENT = "computed outside autograd: input, statistics, mask"
SMALL = "smaller than 4 KiB"
NOT_PLAIN = "not a plain tensor"
OTHER_STREAM = "made on another CUDA stream"
WRITTEN_TO = "may have been written to since it was made"
SAVED_ANYWAY = "another operation saves the same memory"
AS_LARGE = "the copies needed to recompute it are as large"
MUCH_LARGER = "the tensors needed to recompute it are much larger"
DIFFERENT = "its recomputed value differed at the first use"


def output_of(node: Node) -> str:
    """Return the reason for the output of an operation without an output rule."""
    if node is None or nodes.autograd_leaf_of(node) is not None:
        return "a parameter"
    name = nodes.operation_name(node)
    if name.startswith(_EXPENSIVE):
        return "too expensive: never recomputed"
    return f"no rule for the output of {name}"


def saved_by(node: Node) -> str:
    """Return the reason for a tensor that an operation saves in a field without a rule."""
    return f"no rule for what {nodes.operation_name(node)} saves"


def inexact(node: Node) -> str:
    """Return the reason for a tensor with an inexact spec, saved by an operation without a rule."""
    return f"no rule for {nodes.operation_name(node)}, which may need exact values"


def too_many(max_ops: int) -> str:
    """Return the reason for a tensor whose spec takes more than `max_ops` operations."""
    return f"takes more than {max_ops} operations: raise max_ops"


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
    bases = [base_of(producer, index)[0] for producer, index in nodes.producers(node)]
    unknown = [base for base in bases if not _is_available(base)]
    if unknown:  # prefer an operation's output to a parameter, and the last one: f(x) in x + f(x)
        return unsaved_input(node, max(reversed(unknown), key=_is_an_operation))
    name = nodes.operation_name(node)
    for base in bases:
        record = record_of(base)
        tensor = record.note() if record is not None and record.note is not None else None
        if record is None or tensor is None or tensor.grad_fn is not base:
            continue
        if tensor._version not in (0, record.version):
            return f"an input of {name} was written to"
    return f"{name} does not save its inputs"


def _is_available(node: Node) -> bool:
    """Whether an operation's output is saved, or has an output rule."""
    record = None if node is None else record_of(node)
    if record is None:
        return False
    operation = OPERATION_OF[type(node)]
    return record.is_saved or (operation is not None and operation.output is not None)


def _is_an_operation(node: Node) -> bool:
    return node is not None and nodes.autograd_leaf_of(node) is None


def amplified_rounding(node: Node) -> str:
    """Return the reason for the output of an operation whose inputs would have to be exact."""
    return f"{nodes.operation_name(node)} may amplify the rounding of a recomputed norm"


def unknown_strides(node: Node) -> str:
    """Return the reason for the output of an operation whose input's strides are not known."""
    return f"{nodes.operation_name(node)} rounds by strides, and a copy hides those of its input"


def hidden_input(node: Node) -> str:
    """Return the reason for the output of an operation whose saved input the engine does not read.

    The saved input has other code's hooks, or it is a parameter or constant that is too large to
    copy.
    """
    return f"an input of {nodes.operation_name(node)} is not available for recomputation"


def unknown_parameters(node: Node) -> str:
    """Return the reason for the output of a norm whose parameters are unknown."""
    return f"the weight, bias or eps of {nodes.operation_name(node)} is not known"
