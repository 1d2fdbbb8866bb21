"""The in-place activations as modules, in place of those of `torch.nn`.

torch.jit.script takes PyTorch's own activation in their place, and compiles the branch of it alone.
torch.fx keeps their calls as calls of a module, as it does those of `torch.nn`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy, Tracer
from torch.jit import is_scripting  # type: ignore[attr-defined]

from . import functional
from .functional import check_leaky_relu, check_save, check_silu


def _is_traced(input: Tensor) -> bool:
    return isinstance(input, Proxy) and isinstance(input.tracer, Tracer)


def _traced(module: nn.Module, input: Any) -> Any:
    """The call of `module` in the graph that torch.fx traces."""
    path = input.tracer.path_of_module(module)
    return input.tracer.create_proxy("call_module", path, (input,), {})


class ReLU(nn.ReLU):
    """`torch.nn.ReLU` that overwrites its input and keeps one bit an element for backward.

    Args:
        inplace: False behaves as `torch.nn.ReLU()` does.
        save: "mask" or "output", see `inplace_ops.relu_`.

    Shape: any, and the same for the output, which is the input itself.
    """

    def __init__(self, inplace: bool = True, *, save: str = "mask") -> None:
        check_save("ReLU", save, ("mask", "output"))
        super().__init__(inplace)
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation."""
        if is_scripting():
            return F.relu(input, self.inplace)
        elif _is_traced(input):
            return _traced(self, input)
        elif self.inplace:
            return functional.relu_(input, save=self.save)
        else:
            return F.relu(input)

    def extra_repr(self) -> str:
        """Return the arguments, as the parent prints them."""
        return super().extra_repr() + ("" if self.save == "mask" else f", save={self.save!r}")


class LeakyReLU(nn.LeakyReLU):
    """`torch.nn.LeakyReLU` that overwrites its input and keeps one bit an element for backward.

    Args:
        negative_slope: Any number, negative ones included with `save="mask"`.
        inplace: False behaves as `torch.nn.LeakyReLU(negative_slope)` does.
        save: "mask" or "output", see `inplace_ops.leaky_relu_`.

    Shape: any, and the same for the output, which is the input itself.
    """

    def __init__(
        self, negative_slope: float = 0.01, inplace: bool = True, *, save: str = "mask"
    ) -> None:
        check_leaky_relu(negative_slope, save)
        super().__init__(negative_slope, inplace)
        self.save = save

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation."""
        if is_scripting():
            return F.leaky_relu(input, self.negative_slope, self.inplace)
        elif _is_traced(input):
            return _traced(self, input)
        elif self.inplace:
            return functional.leaky_relu_(input, self.negative_slope, save=self.save)
        else:
            return F.leaky_relu(input, self.negative_slope)

    def extra_repr(self) -> str:
        """Return the arguments, as the parent prints them."""
        return super().extra_repr() + ("" if self.save == "mask" else f", save={self.save!r}")


class SiLU(nn.SiLU):
    """`torch.nn.SiLU` that overwrites its input and keeps its output and a few bits an element.

    Args:
        inplace: False behaves as `torch.nn.SiLU()` does.
        save: "output" or "derivative", see `inplace_ops.silu_`.
        bits: Bits kept an element, None for the default, see `inplace_ops.silu_`.

    Shape: any, and the same for the output, which is the input itself.
    """

    def __init__(
        self, inplace: bool = True, *, save: str = "output", bits: int | None = None
    ) -> None:
        check_silu(save, bits)
        super().__init__(inplace)
        self.save = save
        self.bits = bits

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation."""
        if is_scripting():
            return F.silu(input, self.inplace)
        elif _is_traced(input):
            return _traced(self, input)
        elif self.inplace:
            return functional.silu_(input, save=self.save, bits=self.bits)
        else:
            return F.silu(input)

    def extra_repr(self) -> str:
        """Return the arguments, as the parent prints them."""
        save = "" if self.save == "output" else f", save={self.save!r}"
        return super().extra_repr() + save + ("" if self.bits is None else f", bits={self.bits}")
