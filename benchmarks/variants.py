"""Every way to run an activation that the benchmarks compare, PyTorch's and ours: the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import inplace_ops
from inplace_ops import _ops
from inplace_ops.functional import default_bits

SLOPE = 0.01


@dataclass(frozen=True)
class Kernels:
    """The two private ops behind a variant, without autograd's and Python's cost around them."""

    forward_op: Callable[..., None]
    backward_op: Callable[..., Tensor]
    arguments: tuple[float, ...] = ()

    def forward(self, x: Tensor, bits: Tensor | None) -> None:
        """Replace x by its activation and write the packed bits, if it keeps any."""
        kept = [] if bits is None else [bits]
        self.forward_op(x, *kept, [], *self.arguments)

    def backward(self, grad: Tensor, *saved: Tensor) -> Tensor:
        """Return the gradient from the incoming one and what was saved: output, bits or both."""
        return self.backward_op(grad, *saved, [], *self.arguments)


@dataclass(frozen=True)
class Variant:
    """One way to run an activation, and the bytes an element that its training step must move.

    `forward_tensors` and `backward_tensors` count reads and writes of a whole tensor: a backward of
    three reads the gradient and the output (or input) and writes, one of two has no need of the
    output. `bits` are the packed bits an element, written once and read once.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    forward_tensors: int = 2
    backward_tensors: int = 3
    bits: int | str = 0  # or the default of this `save`
    kernels: Kernels | None = None  # of ours

    def bits_of(self, dtype: torch.dtype) -> int:
        """Packed bits an element."""
        return self.bits if isinstance(self.bits, int) else default_bits(dtype, self.bits)

    def bytes_moved(self, phase: str, dtype: torch.dtype, elements: int) -> float:
        """The least bytes that a phase ("forward", "backward" or "both") reads and writes."""
        packed = self.bits_of(dtype) / 8
        forward = self.forward_tensors * dtype.itemsize + packed
        backward = self.backward_tensors * dtype.itemsize + packed
        phases = {"forward": forward, "backward": backward, "both": forward + backward}
        return phases[phase] * elements


_SILU_KERNELS = Kernels(_ops.silu_with_bits_, _ops.silu_backward_output)

# PyTorch out of place first: it is the reference; PyTorch in place second: the ratios are to it.
VARIANTS: dict[str, list[Variant]] = {
    "ReLU": [
        Variant("torch out of place", F.relu),
        Variant("torch in place", F.relu_),
        Variant(
            "mask",
            inplace_ops.relu_,
            backward_tensors=2,
            bits=1,
            kernels=Kernels(_ops.relu_with_mask_, _ops.relu_backward_mask),
        ),
        Variant(
            "output",
            lambda x: inplace_ops.relu_(x, save="output"),
            kernels=Kernels(_ops.relu_, _ops.relu_backward_output),
        ),
    ],
    "LeakyReLU": [
        Variant("torch out of place", lambda x: F.leaky_relu(x, SLOPE)),
        Variant("torch in place", lambda x: F.leaky_relu_(x, SLOPE)),
        Variant(
            "mask",
            lambda x: inplace_ops.leaky_relu_(x, SLOPE),
            backward_tensors=2,
            bits=1,
            kernels=Kernels(_ops.leaky_relu_with_mask_, _ops.leaky_relu_backward_mask, (SLOPE,)),
        ),
        Variant(
            "output",
            lambda x: inplace_ops.leaky_relu_(x, SLOPE, save="output"),
            kernels=Kernels(_ops.leaky_relu_, _ops.leaky_relu_backward_output, (SLOPE,)),
        ),
    ],
    "SiLU": [
        Variant("torch out of place", F.silu),
        Variant("torch in place", lambda x: F.silu(x, inplace=True), forward_tensors=4),
        Variant("output", inplace_ops.silu_, bits="output", kernels=_SILU_KERNELS),
        Variant(
            "output, 1 bit",
            lambda x: inplace_ops.silu_(x, bits=1),
            bits=1,
            kernels=_SILU_KERNELS,
        ),
        Variant(
            "derivative",
            lambda x: inplace_ops.silu_(x, save="derivative"),
            backward_tensors=2,
            bits="derivative",
            kernels=Kernels(_ops.silu_with_derivative_, _ops.silu_backward_derivative),
        ),
    ],
}
