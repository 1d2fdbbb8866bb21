"""Variants of each activation that the benchmarks compare: PyTorch's, and ours by save mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import inplace_ops
from inplace_ops.activations import ACTIVATIONS, Activation, Save

SCALARS = {"negative_slope": 0.01}


@dataclass(frozen=True)
class Kernels:
    """The two private ops of a variant, without the cost of autograd and Python around them."""

    entry: Activation
    save: Save
    bits: int | None = None
    arguments: tuple[float, ...] = ()

    def bits_of(self, dtype: torch.dtype) -> int:
        """Return the packed bits per element."""
        return self.bits or self.entry.default_bits(self.save, dtype)

    def forward(self, x: Tensor) -> Tensor | None:
        """Apply the activation to x in place, and return the packed bits, if any are saved."""
        ops, bits = self.entry.ops, self.bits_of(x.dtype)
        if bits:
            return ops.save_in_place[self.save](x, bits, None, *self.arguments)
        return ops.in_place(x, None, *self.arguments)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        """Return the gradient from the output's gradient and the saved output, bits or both."""
        return self.entry.ops.backward[self.save](grad, *saved, None, *self.arguments)


@dataclass(frozen=True)
class Variant:
    """A variant of an activation, and the memory traffic of its training step.

    Packed bits are written once and read once.

    Attributes:
        name: The variant's name.
        run: The activation.
        forward_tensors: The number of whole tensors that forward reads or writes.
        backward_tensors: The number of whole tensors that backward reads or writes: three if it
            reads the gradient and the output (or input) and writes a gradient, two if it does not
            need the output.
        kernels: The ops of one of our variants; None for PyTorch's.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    forward_tensors: int = 2
    backward_tensors: int = 3
    kernels: Kernels | None = None

    def bits_of(self, dtype: torch.dtype) -> int:
        """Return the packed bits per element."""
        return self.kernels.bits_of(dtype) if self.kernels else 0

    def bytes_moved(self, phase: str, dtype: torch.dtype, elements: int) -> float:
        """Return the fewest bytes that a phase ("forward", "backward", "both") reads and writes."""
        packed = self.bits_of(dtype) / 8
        forward = self.forward_tensors * dtype.itemsize + packed
        backward = self.backward_tensors * dtype.itemsize + packed
        phases = {"forward": forward, "backward": backward, "both": forward + backward}
        return phases[phase] * elements


def _variants(entry: Activation) -> list[Variant]:
    scalars = {name: SCALARS[name] for name in entry.scalars}

    def ours(name: str, save: Save, bits: int | None = None) -> Variant:
        chosen = {} if bits is None else {"bits": bits}
        function = getattr(inplace_ops, entry.function)
        return Variant(
            name,
            partial(function, **entry.variant, **scalars, save=save, **chosen),
            backward_tensors=3 if save == "output" else 2,
            kernels=Kernels(entry, save, bits, tuple(scalars.values())),
        )

    found = [Variant("torch out of place", partial(entry.torch_function, **scalars))]
    if entry.torch_inplace:
        # Where backward needs the input, PyTorch clones it.
        forward_tensors = 4 if entry.torch_saves == "input" else 2
        in_place = partial(entry.torch_inplace, **scalars)
        found.append(Variant("torch in place", in_place, forward_tensors=forward_tensors))
    for save in entry.save_modes:
        found.append(ours(save, save))
        if save == "output" and not entry.is_piecewise_linear:
            found.append(ours("output, 1 bit", save, 1))
    return found


ENTRIES = {" ".join([entry.name, *entry.variant.values()]): entry for entry in ACTIVATIONS}
# PyTorch out of place comes first: it is the reference.
VARIANTS = {name: _variants(entry) for name, entry in ENTRIES.items()}


def baseline(variants: list[Variant]) -> Variant:
    """Return the denominator of the ratios: PyTorch in place if there is one, else out of place."""
    return next((v for v in variants if v.name == "torch in place"), variants[0])
