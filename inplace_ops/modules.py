"""In-place activations as modules: subclasses of those in `torch.nn`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy, Tracer
from torch.jit import is_scripting  # type: ignore[attr-defined]

from . import activations, functional
from .activations import Activation, MaskSave, OutputSave, check_bits, check_save
from .functional import check_approximate, check_leaky_relu

__all__ = ["GELU", "Hardswish", "LeakyReLU", "Mish", "ReLU", "ReLU6", "SiLU"]


def _is_traced(input: Tensor) -> bool:
    return isinstance(input, Proxy) and isinstance(input.tracer, Tracer)


def _traced(module: nn.Module, input: Any) -> Any:
    """Record a call of `module` in the graph that torch.fx traces, and return its proxy."""
    if type(input.tracer).__module__.startswith("torch.ao.quantization"):
        warnings.warn(
            "torch.ao.quantization recognizes only PyTorch's own module types, and not "
            f"inplace_ops.{type(module).__name__}: replace it with the module of torch.nn before "
            "you prepare the model",
            stacklevel=2,
        )
    path = input.tracer.path_of_module(module)
    return input.tracer.create_proxy("call_module", path, (input,), {})


def _has_no_kernel(input: Tensor) -> bool:
    """Whether the tensor is nested, jagged or sparse: PyTorch's own activation supports these."""
    return isinstance(input, Tensor) and (input.is_nested or input.layout is not torch.strided)


def _check_inplace(activation: Activation, inplace: Any) -> None:
    """Raise TypeError for a module that is called like a function: `ReLU(x)`."""
    if isinstance(inplace, Tensor):
        name = f"inplace_ops.{activation.name}"
        raise TypeError(
            f"{name} is a module, and inplace must be a bool: for a tensor call "
            f"inplace_ops.{activation.function}(x) or {name}()(x)"
        )


class _InPlaceModule(nn.Module):
    """Base class of the modules: decides how a call runs, and prints the arguments.

    torch.jit.script compiles only the first branch of `forward`, which is PyTorch's own activation.
    torch.fx records a call as a call of a module, as for the modules of `torch.nn`.

    Attributes:
        _default_activation: The activation, from the table; of GELU its default form.
    """

    _default_activation: ClassVar[Activation]
    if TYPE_CHECKING:
        inplace: bool
        save: Any

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation."""
        if is_scripting():
            return self._scripted(input)
        elif _is_traced(input):
            return _traced(self, input)
        elif not self.inplace or _has_no_kernel(input):
            return super().forward(input)
        else:
            return self._in_place(input)

    def _scripted(self, input: Tensor) -> Tensor:
        """Apply PyTorch's own activation, as the parent does: TorchScript has no `super`."""
        raise NotImplementedError

    def _in_place(self, input: Tensor) -> Tensor:
        """Apply this package's in-place activation."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the parent's arguments, and `save` and `bits` if they are not the defaults."""
        save, bits = vars(self)["save"], vars(self).get("bits")
        parts = [super().extra_repr()]
        if save != self._default_activation.save_modes[0]:
            parts.append(f"save={save!r}")
        if bits is not None:
            parts.append(f"bits={bits}")
        return ", ".join(filter(None, parts))


class _MaskModule(_InPlaceModule):
    """Base class of the piecewise-linear modules without scalar arguments."""

    def __init__(self, inplace: bool = True, *, save: MaskSave = "mask") -> None:
        _check_inplace(self._default_activation, inplace)
        check_save(self._default_activation, save)
        super().__init__(inplace)
        self.save = save

    def _in_place(self, input: Tensor) -> Tensor:
        function = getattr(functional, self._default_activation.function)
        return function(input, save=self.save)


class _OutputModule(_InPlaceModule):
    """Base class of the smooth modules without further arguments."""

    def __init__(
        self, inplace: bool = True, *, save: OutputSave = "output", bits: int | None = None
    ) -> None:
        _check_inplace(self._default_activation, inplace)
        check_save(self._default_activation, save)
        check_bits(self._default_activation.name, save, bits)
        super().__init__(inplace)
        self.save = save
        self.bits = bits

    def _in_place(self, input: Tensor) -> Tensor:
        function = getattr(functional, self._default_activation.function)
        return function(input, save=self.save, bits=self.bits)


class ReLU(_MaskModule, nn.ReLU):
    """`torch.nn.ReLU` that overwrites its input and saves one bit per element for backward.

    Args:
        inplace: False behaves like `torch.nn.ReLU()`.
        save: "mask" or "output": see `inplace_ops.relu_`.

    Shape: any. The output is the input itself.
    """

    _default_activation = activations.RELU

    def _scripted(self, input: Tensor) -> Tensor:
        return F.relu(input, self.inplace)


class LeakyReLU(_InPlaceModule, nn.LeakyReLU):
    """`torch.nn.LeakyReLU` that overwrites its input and saves one bit per element for backward.

    Args:
        negative_slope: Any real number; save="output" requires that it is at least 0.
        inplace: False behaves like `torch.nn.LeakyReLU(negative_slope)`.
        save: "mask" or "output": see `inplace_ops.leaky_relu_`.

    Shape: any. The output is the input itself.
    """

    _default_activation = activations.LEAKY_RELU

    def __init__(
        self, negative_slope: float = 0.01, inplace: bool = True, *, save: MaskSave = "mask"
    ) -> None:
        check_leaky_relu(negative_slope, save)
        super().__init__(negative_slope, inplace)
        self.save = save

    def _scripted(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input, self.negative_slope, self.inplace)

    def _in_place(self, input: Tensor) -> Tensor:
        return functional.leaky_relu_(input, self.negative_slope, save=self.save)


class ReLU6(_MaskModule, nn.ReLU6):
    """`torch.nn.ReLU6` that overwrites its input and saves one bit per element for backward.

    Args:
        inplace: False behaves like `torch.nn.ReLU6()`.
        save: "mask" or "output": see `inplace_ops.relu6_`.

    Shape: any. The output is the input itself.
    """

    _default_activation = activations.RELU6

    def _scripted(self, input: Tensor) -> Tensor:
        return F.relu6(input, self.inplace)


class SiLU(_OutputModule, nn.SiLU):
    """`torch.nn.SiLU` that overwrites its input and saves its output and a few bits per element.

    Args:
        inplace: False behaves like `torch.nn.SiLU()`.
        save: "output" or "derivative": see `inplace_ops.silu_`.
        bits: Bits per element to save, None for the default: see `inplace_ops.silu_`.

    Shape: any. The output is the input itself.
    """

    _default_activation = activations.SILU

    def _scripted(self, input: Tensor) -> Tensor:
        return F.silu(input, self.inplace)


class GELU(_InPlaceModule, nn.GELU):
    """`torch.nn.GELU` that overwrites its input and saves its output and a few bits per element.

    Args:
        approximate: "none" or "tanh": see `inplace_ops.gelu_`.
        inplace: False behaves like `torch.nn.GELU(approximate)`.
        save: "output" or "derivative": see `inplace_ops.gelu_`.
        bits: Bits per element to save, None for the default: see `inplace_ops.gelu_`.

    Shape: any. The output is the input itself.
    """

    __constants__ = ["approximate", "inplace"]  # noqa: RUF012  # for torch.jit.script
    _default_activation = activations.GELU

    def __init__(
        self,
        approximate: str = "none",
        inplace: bool = True,
        *,
        save: OutputSave = "output",
        bits: int | None = None,
    ) -> None:
        check_approximate("GELU", approximate)
        check_save(activations.GELU, save)
        check_bits("GELU", save, bits)
        super().__init__(approximate)
        self.inplace = inplace
        self.save = save
        self.bits = bits

    def _scripted(self, input: Tensor) -> Tensor:
        output = F.gelu(input, approximate=self.approximate)
        return input.copy_(output) if self.inplace else output

    def _in_place(self, input: Tensor) -> Tensor:
        return functional.gelu_(input, self.approximate, save=self.save, bits=self.bits)

    def extra_repr(self) -> str:
        """Return the arguments, and `inplace`, which the parent does not print."""
        first, *others = super().extra_repr().split(", ")
        return ", ".join([first, *(["inplace=True"] if self.inplace else []), *others])


class Hardswish(_OutputModule, nn.Hardswish):
    """`torch.nn.Hardswish` that overwrites its input, saves its output and a few bits per element.

    Args:
        inplace: False behaves like `torch.nn.Hardswish()`.
        save: "output" or "derivative": see `inplace_ops.hardswish_`.
        bits: Bits per element to save, None for the default: see `inplace_ops.hardswish_`.

    Shape: any. The output is the input itself.
    """

    _default_activation = activations.HARDSWISH

    def _scripted(self, input: Tensor) -> Tensor:
        return F.hardswish(input, self.inplace)


class Mish(_OutputModule, nn.Mish):
    """`torch.nn.Mish` that overwrites its input and saves its output and a few bits per element.

    Args:
        inplace: False behaves like `torch.nn.Mish()`.
        save: "output" or "derivative": see `inplace_ops.mish_`.
        bits: Bits per element to save, None for the default: see `inplace_ops.mish_`.

    Shape: any. The output is the input itself.
    """

    _default_activation = activations.MISH

    def _scripted(self, input: Tensor) -> Tensor:
        return F.mish(input, self.inplace)
