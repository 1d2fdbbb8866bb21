"""In-place activations as functions."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from .activations import (
    GELU,
    GELU_TANH,
    HARDSWISH,
    LEAKY_RELU,
    MISH,
    RELU,
    RELU6,
    SILU,
    MaskSave,
    OutputSave,
    check_bits,
    check_save,
)
from .dispatch import dispatch

__all__ = ["gelu_", "hardswish_", "leaky_relu_", "mish_", "relu6_", "relu_", "silu_"]


def relu_(input: Tensor, *, save: MaskSave = "mask") -> Tensor:
    """Replace `input` by max(input, 0) and return `input` itself.

    Args:
        input: A tensor of any shape and strides, on the CPU or a CUDA device, in float64, float32,
            float16 or bfloat16. Integer tensors have no gradient and are passed to `torch.relu_`.
        save: What to save for backward if `input` needs a gradient:

            - "mask": one bit per element. The output may be modified afterwards.
            - "output": the output itself, as `torch.relu_` does. That takes no extra memory if the
              next layer saves its input anyway. The output must not be modified before backward.

            After a norm PyTorch's activation saves less than either, if the model is converted: see
            `inplace_ops.convert`.

    Raises:
        RuntimeError: If `torch.relu_` raises too: for a leaf that requires grad, a view that
            autograd does not allow to be modified, overlapping memory, an unsupported dtype.
            `input` is unchanged.
        NotImplementedError: If there is no kernel for the tensor's layout or device.
        TypeError: If `input` is not a tensor, or `save` is "recompute", which was removed.
        ValueError: If `save` is not one of the above.
    """
    if has_torch_function_unary(input):
        return _overridden(relu_, input, save=save)
    check_save(RELU, save)
    return dispatch(RELU, input, save, None)


def leaky_relu_(input: Tensor, negative_slope: float = 0.01, *, save: MaskSave = "mask") -> Tensor:
    """Multiply `input` by `negative_slope` where it is not positive and return `input` itself.

    Args:
        input: See `relu_`, but floating point only.
        negative_slope: Any real number. With save="mask" the gradient is also right for a negative
            one.
        save: See `relu_`: "mask" saves one bit per element, "output" the output itself. "output"
            requires `negative_slope >= 0`, because backward reads the sign of the input from the
            output.

    Raises:
        TypeError: If `negative_slope` is not a real number.
        ValueError: If `save` is unknown, or if it is "output" and `negative_slope` is not at
            least 0.
        RuntimeError, NotImplementedError: See `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(leaky_relu_, input, negative_slope=negative_slope, save=save)
    check_leaky_relu(negative_slope, save)
    return dispatch(LEAKY_RELU, input, save, None, (negative_slope,))


def relu6_(input: Tensor, *, save: MaskSave = "mask") -> Tensor:
    """Replace `input` by min(max(input, 0), 6) and return `input` itself.

    Args:
        input: See `relu_`. Integer tensors are passed to `torch.nn.functional.relu6`.
        save: See `relu_`: "mask" saves one bit per element, "output" the output itself.

    Raises:
        RuntimeError, NotImplementedError, TypeError, ValueError: See `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(relu6_, input, save=save)
    check_save(RELU6, save)
    return dispatch(RELU6, input, save, None)


def silu_(input: Tensor, *, save: OutputSave = "output", bits: int | None = None) -> Tensor:
    """Replace `input` by input * sigmoid(input) and return `input` itself.

    SiLU is due to Elfwing, Uchibe and Doya (2017), and to Ramachandran, Zoph and Le (2017) as
    swish.

    Args:
        input: See `relu_`, but floating point only.
        save: What to save for backward if `input` needs a gradient:

            - "output": the output y itself, and `bits` bits per element of the input x. Saving y
              takes no extra memory if the next layer saves its input anyway. Backward recovers
              x = y + W(y exp(-y)) with Lambert's W (Corless, Gonnet, Hare, Jeffrey, Knuth, 1996).
              The output must not be modified before backward.
            - "derivative": silu'(x), rounded to a grid of `bits` bits per element. The output may
              be modified afterwards. There is no second derivative.

            After a norm PyTorch's activation saves less than either, if the model is converted: see
            `inplace_ops.convert`.
        bits: The number of bits per element. With "output" it is 1, 8 or None; None is the fewest
            with which the gradient passes `torch.testing`'s default tolerances against PyTorch's:
            1 in float64, 6 in float32, 7 in float16 and 5 in bfloat16. The derivative is then off
            by at most 5e-9 in float64 and 3.5e-6 in float32; in float16 and bfloat16 x is
            recovered exactly wherever y is a normal number. With "derivative" it is 8, 16, 32 or
            None; None is 8 in float16 and bfloat16, 16 in float32 and 32 in float64. Rounding
            changes the derivative by at most 2.4e-3 with 8 bits, 1e-5 with 16 and 1.4e-10 with 32.
            docs/accuracy.md has the errors for other numbers of bits.

    Raises:
        ValueError: If `save` or `bits` is not one of the above.
        RuntimeError, NotImplementedError, TypeError: See `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(silu_, input, save=save, bits=bits)
    check_save(SILU, save)
    check_bits("silu_", save, bits)
    return dispatch(SILU, input, save, bits)


def gelu_(
    input: Tensor,
    approximate: str = "none",
    *,
    save: OutputSave = "output",
    bits: int | None = None,
) -> Tensor:
    """Replace `input` by input * Phi(input) and return `input` itself.

    Phi is the cumulative distribution function of the standard normal distribution, or with
    `approximate="tanh"` its approximation (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    (Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016). PyTorch has no in-place GELU.

    Args:
        input: See `relu_`, but floating point only.
        approximate: "none" or "tanh".
        save: See `silu_`: "output" saves the output and `bits` bits per element, "derivative"
            `bits` bits per element.
        bits: See `silu_`. With "output" the derivative is off by at most 3.8e-6 in float32. With
            "derivative" rounding changes it by at most 2.5e-3, 1e-5 and 1.5e-10 with 8, 16 and 32
            bits.

    Raises:
        ValueError: If `approximate`, `save` or `bits` is not one of the above.
        RuntimeError, NotImplementedError, TypeError: See `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(gelu_, input, approximate=approximate, save=save, bits=bits)
    check_approximate("gelu_", approximate)
    activation = GELU if approximate == "none" else GELU_TANH
    check_save(activation, save)
    check_bits("gelu_", save, bits)
    return dispatch(activation, input, save, bits)


def hardswish_(input: Tensor, *, save: OutputSave = "output", bits: int | None = None) -> Tensor:
    """Replace `input` by input * min(max(input + 3, 0), 6) / 6 and return `input` itself.

    See Howard et al., "Searching for MobileNetV3", 2019.

    Args:
        input: See `relu_`, but floating point only.
        save: See `silu_`: "output" saves the output and `bits` bits per element, "derivative"
            `bits` bits per element.
        bits: See `silu_`, except that None with "output" is 6 in float16. With "output" the
            derivative is off by at most 5.2e-6 in float32. With "derivative" rounding changes it
            by at most 4e-3, 1.6e-5 and 2.4e-10 with 8, 16 and 32 bits.

    Raises:
        RuntimeError, NotImplementedError, TypeError, ValueError: See `silu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(hardswish_, input, save=save, bits=bits)
    check_save(HARDSWISH, save)
    check_bits("hardswish_", save, bits)
    return dispatch(HARDSWISH, input, save, bits)


def mish_(input: Tensor, *, save: OutputSave = "output", bits: int | None = None) -> Tensor:
    """Replace `input` by input * tanh(log(1 + exp(input))) and return `input` itself.

    See Misra, "Mish: A Self Regularized Non-Monotonic Activation Function", 2019.

    Args:
        input: See `relu_`, but floating point only.
        save: See `silu_`: "output" saves the output and `bits` bits per element, "derivative"
            `bits` bits per element.
        bits: See `silu_`. With "output" the derivative is off by at most 4.5e-6 in float32.

    Raises:
        RuntimeError, NotImplementedError, TypeError, ValueError: See `silu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(mish_, input, save=save, bits=bits)
    check_save(MISH, save)
    check_bits("mish_", save, bits)
    return dispatch(MISH, input, save, bits)


def check_approximate(name: str, approximate: str) -> None:
    """Raise ValueError unless `approximate` is "none" or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'{name}: approximate must be "none" or "tanh", got {approximate!r}')


def check_leaky_relu(negative_slope: float, save: str) -> None:
    """Raise TypeError or ValueError for invalid arguments of leaky_relu_."""
    check_save(LEAKY_RELU, save)
    # isinstance is slow for Real, an abstract base class.
    if type(negative_slope) is not float and not isinstance(
        negative_slope, (int, Real, torch.SymInt, torch.SymFloat)
    ):
        raise TypeError(
            f"leaky_relu_: negative_slope must be a real number, got {negative_slope!r}"
        )
    if save == "output" and not LEAKY_RELU.allows_output(negative_slope):
        raise ValueError(
            f'leaky_relu_: save="output" needs negative_slope >= 0, got {negative_slope}: backward '
            'cannot read the sign of the input from the output; use save="mask"'
        )


def _overridden(function: Callable[..., Tensor], input: Any, **arguments: Any) -> Any:
    return handle_torch_function(function, (input,), input, **arguments)
