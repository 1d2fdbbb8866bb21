"""Why a tensor stays saved as PyTorch saves it: the texts of the report."""

from __future__ import annotations

from . import nodes
from .nodes import Node
from .operations import base_of
from .versions import record_of

# Beginnings of the names of operations that are never repeated: matrix products and the like,
# reductions, random numbers.
_EXPENSIVE = (
    *("Convolution", "Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Addmv", "Mv", "Linear"),
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
SAVED_ANYWAY = "its operation saves the same memory"
AS_LARGE = "what it would be recomputed from is as large"
MUCH_LARGER = "what it would be recomputed from is much larger"
DIFFERENT = "came out different at its first use"


def output_of(node: Node) -> str:
    """Of the output of an operation without a rule."""
    if node is None or nodes.autograd_leaf_of(node) is not None:
        return "a parameter"
    name = nodes.operation_name(node)
    if name.startswith(_EXPENSIVE):
        return "too expensive: never recomputed"
    return f"no rule for the output of {name}"


def saved_by(node: Node) -> str:
    """Of what an operation without a rule saves."""
    return f"no rule for what {nodes.operation_name(node)} saves"


def too_many(max_ops: int) -> str:
    """Of a spec that takes more operations than it may."""
    return f"takes more than {max_ops} operations: raise max_ops"


def unsaved_input(node: Node, before: Node, index: int = 0) -> str:
    """Of what follows from a tensor that its operation does not save."""
    name = nodes.operation_name(node)
    before, _ = base_of(before, index)
    if before is None:
        return f"{name} does not save an input without a gradient"
    if nodes.autograd_leaf_of(before) is not None:
        return f"{name} reads a parameter: no rule"
    return f"{name} does not save its input from {nodes.operation_name(before)}"


def unproved_input(node: Node) -> str:
    """Of what follows from tensors of which it is not proved that nobody wrote to them."""
    bases = [base_of(before, index)[0] for before, index in nodes.producers(node)]
    unknown = [base for base in bases if base is None or record_of(base) is None]
    if unknown:  # an operation's rather than a parameter, the last, as in x + f(x)
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


def _is_an_operation(node: Node) -> bool:
    return node is not None and nodes.autograd_leaf_of(node) is None


def hidden_input(node: Node) -> str:
    """Of what follows from a tensor that is behind others' hooks, or too large to copy."""
    return f"an input of {nodes.operation_name(node)} cannot be read again"


def unknown_parameters(node: Node) -> str:
    """Of a norm's output."""
    return f"the weight, bias or eps of {nodes.operation_name(node)} is not known"
