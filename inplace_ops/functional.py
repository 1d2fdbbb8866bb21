"""The in-place activations as functions."""

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


def relu_(input: Tensor, *, save: MaskSave = "mask") -> Tensor:
    """Replace `input` by max(input, 0) and return `input` itself.

    Args:
        input: A tensor of any shape and strides, on the CPU or a CUDA device, in float64, float32,
            float16 or bfloat16. Integers, which have no gradient, go to `torch.relu_`.
        save: What is kept for backward where a gradient is needed. "mask": one bit per element, so
            that the result may be modified afterwards. "output": the result itself, as
            `torch.relu_` does; free where the next layer keeps it anyway, and then it must not be
            modified before backward. "recompute": nothing, if `input` is the unchanged output of a
            batch, group, instance or layer norm: backward forms it again from the norm's input,
            which the norm keeps; the result may be modified. Where the norm's input or bias cannot
            be had (the norm ran inside a checkpoint or under saved-tensor hooks, the bias beside
            its weight is frozen), the default is kept instead; compiled code has PyTorch's own
            activation, which the compiler recomputes.

    Raises:
        RuntimeError: Where `torch.relu_` raises too: a leaf that requires grad, a view that
            autograd cannot modify, overlapping memory, ... With "recompute" for another input than
            a norm's output. `input` is unchanged.
        NotImplementedError: For a tensor with no kernel here (sparse, another device, ...).
        TypeError: If `input` is no tensor.
        ValueError: If `save` is none of these.
    """
    if has_torch_function_unary(input):
        return _overridden(relu_, input, save=save)
    check_save(RELU, save)
    return dispatch(RELU, input, save, None)


def leaky_relu_(input: Tensor, negative_slope: float = 0.01, *, save: MaskSave = "mask") -> Tensor:
    """Multiply `input` by `negative_slope` where it is not positive and return `input` itself.

    Args:
        input: As for `relu_`, but floating point only.
        negative_slope: Any number; the gradient is right for a negative one too.
        save: As for `relu_`; "output" needs `negative_slope >= 0`, as the sign of the output must
            tell that of the input.

    Raises:
        TypeError: If `negative_slope` is no real number.
        ValueError: If `save` is unknown, or "output" with a negative slope.
        Otherwise as `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(leaky_relu_, input, negative_slope=negative_slope, save=save)
    check_leaky_relu(negative_slope, save)
    return dispatch(LEAKY_RELU, input, save, None, (negative_slope,))


def relu6_(input: Tensor, *, save: MaskSave = "mask") -> Tensor:
    """Replace `input` by min(max(input, 0), 6) and return `input` itself.

    Args:
        input: As for `relu_`; integers go to `torch.nn.functional.relu6`.
        save: As for `relu_`.

    Raises:
        As `relu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(relu6_, input, save=save)
    check_save(RELU6, save)
    return dispatch(RELU6, input, save, None)


def silu_(input: Tensor, *, save: OutputSave = "output", bits: int | None = None) -> Tensor:
    """Replace `input` by input * sigmoid(input) and return `input` itself.

    Args:
        input: As for `relu_`, but floating point only.
        save: What is kept for backward where a gradient is needed. "output": the result itself,
            free where the next layer keeps it anyway, and `bits` per element of the input, from
            which backward recovers the input (x = y + W(y exp(-y)), Lambert's W); the result must
            not be modified before backward. "derivative": silu'(x) rounded to a grid of `bits`
            bits; the result may be modified, and there is no second derivative. "recompute": as for
            `relu_`.
        bits: With "output" 1, 8 or None for the fewest with which the gradient passes
            torch.testing's default tolerances against PyTorch's: 1 in float64, 6 in float32, 7 in
            float16, 5 in bfloat16. With "derivative" 8, 16, 32 or None for 8 in float16 and
            bfloat16 (largest error of the derivative 2.4e-3), 16 in float32 (1e-5) and 32 in
            float64 (1.4e-10).

    Raises:
        ValueError: If `save` or `bits` is none of these.
        Otherwise as `relu_`.
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

    Phi is the normal distribution's function, or, with `approximate="tanh"`,
    (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks, Gimpel, "Gaussian Error Linear
    Units", 2016). PyTorch has no in-place form of it.

    Args:
        input: As for `relu_`, but floating point only.
        approximate: "none" or "tanh".
        save: As for `silu_`.
        bits: As for `silu_`, but that the errors with "derivative" are 2.5e-3, 1e-5 and 1.5e-10.

    Raises:
        ValueError: If `approximate`, `save` or `bits` is none of these.
        Otherwise as `relu_`.
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

    Args:
        input: As for `relu_`, but floating point only.
        save: As for `silu_`.
        bits: As for `silu_`, but that `None` takes 6 in float16, and the errors with "derivative"
            are 4e-3, 1.6e-5 and 2.4e-10.

    Raises:
        As `silu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(hardswish_, input, save=save, bits=bits)
    check_save(HARDSWISH, save)
    check_bits("hardswish_", save, bits)
    return dispatch(HARDSWISH, input, save, bits)


def mish_(input: Tensor, *, save: OutputSave = "output", bits: int | None = None) -> Tensor:
    """Replace `input` by input * tanh(log(1 + exp(input))) and return `input` itself.

    Args:
        input: As for `relu_`, but floating point only.
        save: As for `silu_`.
        bits: As for `silu_`.

    Raises:
        As `silu_`.
    """
    if has_torch_function_unary(input):
        return _overridden(mish_, input, save=save, bits=bits)
    check_save(MISH, save)
    check_bits("mish_", save, bits)
    return dispatch(MISH, input, save, bits)


def check_approximate(name: str, approximate: str) -> None:
    """Raise ValueError unless it names one of gelu's forms."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'{name}: approximate must be "none" or "tanh", got {approximate!r}')


def check_leaky_relu(negative_slope: float, save: str) -> None:
    """Raise TypeError or ValueError for arguments that leaky_relu_ does not take."""
    check_save(LEAKY_RELU, save)
    # Real, an abstract class, takes long to ask.
    if type(negative_slope) is not float and not isinstance(
        negative_slope, (int, Real, torch.SymInt, torch.SymFloat)
    ):
        raise TypeError(
            f"leaky_relu_: negative_slope must be a real number, got {negative_slope!r}"
        )
    if save == "output" and not LEAKY_RELU.allows_output(negative_slope):
        raise ValueError(
            f'leaky_relu_: save="output" needs negative_slope >= 0, got {negative_slope}: the sign '
            'of the output does not tell that of the input; use save="mask"'
        )


def _overridden(function: Callable[..., Tensor], input: Any, **arguments: Any) -> Any:
    return handle_torch_function(function, (input,), input, **arguments)
