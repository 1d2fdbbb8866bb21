"""Comparing a converted model with the original on an example, and measuring both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import Packed, model_bytes, peak_bytes
from ..recompute.nodes import Node
from ..recompute.specs import Recomputed
from .example import Example, preserved, tensors_in
from .observation import Observation

# How far the converted model's gradients may be from the original's, as a share of their norm, by
# the coarsest dtype in the run: rounding errors grow on their way through a network.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# Two runs of the original may differ, as on a GPU, and a third by a bit more.
_NOISE = 4


class VerificationError(RuntimeError):
    """The converted model's gradients are not the original's."""


class Run:
    """Forward and backward passes of a model on an example, each from the same state."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.model, self.example = model, example
        self._into_grad = False

    def gradients(self) -> Gradients:
        """Return all gradients of one pass."""
        try:
            return self._gradients()
        except RuntimeError as error:
            if self._into_grad or "use_reentrant=True" not in str(error):
                raise
        self._into_grad = True  # the only way for a reentrant checkpoint
        return self._gradients()

    def _gradients(self) -> Gradients:
        with preserved(self.model, self.example), torch.enable_grad():
            inputs = self.example.copy()
            return Gradients(inputs, self.model, inputs.call(self.model), self._into_grad)

    def saved_bytes(self) -> int:
        """Return what the model saves for backward, besides parameters, buffers and arguments."""
        with preserved(self.model, self.example), torch.enable_grad():
            inputs = self.example.copy()
            return model_bytes(self.model, lambda: inputs.call(self.model), inputs.tensors())

    def peak_bytes(self) -> int | None:
        """Return the most bytes that a pass allocates at one time."""
        with preserved(self.model, self.example), torch.enable_grad():
            inputs = self.example.copy()

            def step() -> None:
                Gradients(inputs, self.model, inputs.call(self.model), self._into_grad)

            return peak_bytes(step)


class Gradients:
    """The gradients of a sum of a model's outputs with random weights, the same in every run."""

    def __init__(
        self, example: Example, model: nn.Module, outputs: Any, into_grad: bool = False
    ) -> None:
        leaves = [t for t in tensors_in(outputs) if t.requires_grad]
        inputs: dict[str, Tensor] = {f"`{name}`": p for name, p in model.named_parameters()}
        inputs |= {f"argument {i}": a for i, a in enumerate(example.tensors())}
        inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        self.outputs = [leaf.detach() for leaf in leaves]
        self.values: dict[str, Tensor | None] = {}
        if leaves and inputs:
            weights = [_random_like(leaf) for leaf in leaves]
            if into_grad:
                torch.autograd.backward(leaves, weights)
                self.values = {name: tensor.grad for name, tensor in inputs.items()}
            else:
                found = torch.autograd.grad(leaves, [*inputs.values()], weights, allow_unused=True)
                self.values = dict(zip(inputs, found, strict=True))

    def distance(self, other: Gradients) -> float:
        """Return the norm of the difference over the norm, of all gradients together."""
        total = difference = 0.0
        for name, value in self.values.items():
            theirs = other.values.get(name)
            if value is None or theirs is None:
                if value is not theirs:
                    return float("inf")
                continue
            value, theirs = _dense(value), _dense(theirs)
            if not torch.equal(value.isfinite(), theirs.isfinite()):
                return float("inf")
            value, theirs = value.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
            total += float(value.norm(dtype=torch.double) ** 2)
            difference += float((value.double() - theirs.double()).norm() ** 2)
        return (difference / total) ** 0.5 if total else difference**0.5

    def tolerance(self) -> float:
        """Return how far other gradients may be off by roundings."""
        tensors = [*self.outputs, *(v for v in self.values.values() if v is not None)]
        return max((_TOLERANCES.get(tensor.dtype, 0.0) for tensor in tensors), default=0.0)


def _random_like(output: Tensor) -> Tensor:
    # Its own generator: the model's random state is not changed.
    generator = torch.Generator(output.device).manual_seed(output.numel())
    dtype = output.dtype if output.is_floating_point() else torch.complex64
    return torch.randn(output.shape, generator=generator, dtype=dtype, device=output.device)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class Verification(Observation):
    """An observed pass in which every recomputed tensor is compared with what it replaces."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.differences: list[str] = []

    def replaced(self, node: Node, field: str, saved: Tensor, packed: Packed) -> Packed:
        super().replaced(node, field, saved, packed)
        if not isinstance(packed, Recomputed):
            return packed
        place = f"the output of {packed.name} in `{self._path[-1]}`"
        return _Checked(packed, saved.detach(), place, self.differences)


class _Checked(Recomputed):
    """A spec beside the tensor that it replaces."""

    def __init__(
        self, packed: Recomputed, saved: Tensor, place: str, differences: list[str]
    ) -> None:
        super().__init__(packed.spec, saved, packed.producer, packed.consumer)
        self.saved, self.place, self.differences = saved.clone(), place, differences

    def compute(self) -> Tensor:
        value = super().compute()
        difference = self.difference_of(value, self.saved)
        if difference is not None:
            self.differences.append(f"{self.place} is recomputed with a difference of {difference}")
        return value


def compare(
    original: Gradients, again: Gradients, converted: Gradients, found: Iterable[str]
) -> None:
    """Raise VerificationError if the converted model's gradients are not the original's.

    Args:
        original: Those of the original.
        again: Those of another run of it.
        converted: Those of the converted model.
        found: What was recomputed otherwise than it was.
    """
    for text in found:
        raise VerificationError(f"{text}; the model is as it was")
    distance = original.distance(converted)
    allowed = max(original.tolerance(), _NOISE * original.distance(again))
    if not distance <= allowed:
        raise VerificationError(
            f"the gradients of the converted model differ from the original's by {distance:.3g} "
            f"of their norm, where {allowed:.3g} is allowed; the model is as it was"
        )
