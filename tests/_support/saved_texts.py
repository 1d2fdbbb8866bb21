"""What the nodes of a converted model save, as readable texts."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import inplace_ops
from inplace_ops.recompute import nodes
from inplace_ops.recompute.calls import Affine, Call, ViewCall
from inplace_ops.recompute.narrow import NarrowLeaf
from inplace_ops.recompute.packed import Recomputed
from inplace_ops.recompute.specs import Leaf, Spec
from inplace_ops.recompute.weights import Weight

from .twins import nodes_of


class Names:
    """The names of tensors, by their memory."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.by_memory: list[tuple[str, StorageWeakRef]] = []
        self.add("x", x)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.add(name, tensor)
        for name, module in model.named_children():
            module.register_forward_hook(lambda m, args, y, name=name: self.add(name, y))

    def add(self, name: str, tensor: Tensor) -> None:
        self.by_memory.append((name, StorageWeakRef(tensor.untyped_storage())))

    def of(self, tensor: Tensor) -> str:
        memory = StorageWeakRef(tensor.untyped_storage()).cdata
        found = [name for name, other in self.by_memory if other.cdata == memory]
        shape = f"{tensor.dtype}{[*tensor.shape]}".removeprefix("torch.")
        return found[0] if found else shape

    def of_field(self, field: nodes.Field) -> str:
        """Return what a node saves in a field; empty if nothing."""
        value: Any = field.packed
        if value is None:
            return "" if field.tensor is None else self.of(field.tensor)
        is_recomputed = isinstance(value, Recomputed) and value.how == "recomputed"
        return self.of_spec(value.spec) if is_recomputed else value.how

    def of_spec(self, spec: Spec) -> str:
        if isinstance(spec, NarrowLeaf):
            return f"<{spec.how}>"
        if isinstance(spec, Leaf):
            return self.of(spec.tensor)
        if isinstance(spec, Weight):
            return self.of(spec.parameter)
        if isinstance(spec, Affine):
            norm = f"affine({self.of_spec(spec.x)})"
            return f"{spec.activation.name.lower()}({norm})" if spec.activation else norm
        assert isinstance(spec, Call)
        if isinstance(spec, ViewCall):
            return self.of_spec(spec.inputs[0])
        return f"{spec.function.__name__.strip('_')}({', '.join(map(self.of_spec, spec.inputs))})"


def saved_by(model: nn.Module, x: Tensor) -> list[str]:
    """Return all that the nodes of a converted model save, in the order of forward."""
    model = copy.deepcopy(model)
    inplace_ops.convert(model)
    names, lines = Names(model, x), []
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    for node in sorted(nodes_of(model(x)), key=lambda node: node._sequence_nr()):
        fields = nodes._FUNCTION_FIELDS.get(type(node).__name__)  # of an activation after a norm
        for field in fields or nodes.tensor_fields(type(node)):
            text = names.of_field(nodes.Field(node, field))
            if text and text not in own:
                lines.append(f"{nodes.operation_name(node)}.{field}: {text}")
    return lines


def bytes_of(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Return the bytes that a model saves, and that its converted copy saves from the second step.

    Only then products are known to last: NOTE [Weights are proved].
    """
    twin = copy.deepcopy(model)
    inplace_ops.convert(twin)
    twin(x)
    return inplace_ops.saved_bytes(model, x), inplace_ops.saved_bytes(twin, x)
