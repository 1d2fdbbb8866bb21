"""Whether a converted model computes what the original does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from ..activations import Save
from ..readers import outputs_saved_by
from .conversion import Conversion
from .progress import Progress
from .run import Example, preserved, reentrant_checkpoints_as_the_others
from .slots import Slot, intercepted
from .tensors import tensors_in

# A run may differ from another by some times what two others differ by. On CUDA these may be equal
# by chance where others would not be: there by some roundings of the largest value at least.
_NOISE = 4
_CUDA_ROUNDINGS = 16

# Two runs of what is nothing but noise, as the gradient of a bias before BatchNorm, may by chance
# differ by too little: before a difference is reported, so many more tell by how much they do.
_MORE_RUNS = 4

# What is formed again from a norm's input is off by so many roundings of its terms.
_ROUNDINGS = 16

# With outputs of two runs that differ by more than this share of the largest value no third can be
# compared.
_LARGEST_NOISE = 0.1


class VerificationError(RuntimeError):
    """The converted model does not compute what the original does."""


RUNS = 4


def verify(model: nn.Module, example: Example, conversion: Conversion, progress: Progress) -> None:
    """Raise VerificationError unless the model stays what it is with the conversion put in.

    First an exact in-place activation stands in the slots: outputs and gradients must then equal
    the original's up to what two runs of the original differ by. Then the modules themselves: each
    one's derivative must be within its documented error, for the values that it meets, and what
    readers form again must be what they read.
    """
    modules = conversion.modules
    if not modules and not conversion.readers:
        return

    def chosen(slot: Slot) -> nn.Module:
        """What runs the present call."""
        calls = getattr(modules[slot], "calls", None)
        return modules[slot] if calls is None else calls.chosen()

    def exactly(slot: Slot, x: Tensor) -> Tensor:
        """The present call, exact, in place where it is to be."""
        module = chosen(slot)
        return module.forward(x) if module is slot.original else _exact(slot, x)

    progress.next("the original")
    original = _gradients(model, example)
    progress.next("the original again")
    noise = _noise(original, _gradients(model, example, perturbation=1))

    progress.next("exact activations in place")
    with intercepted(modules, exactly, modules):
        exact = _run_converted(model, example)
    differing = _differing(exact, original, noise)
    if differing:
        for perturbation in range(2, 2 + _MORE_RUNS):
            more = _noise(original, _gradients(model, example, perturbation))
            noise = {name: max(tolerance, more[name]) for name, tolerance in noise.items()}
        differing = _differing(exact, original, noise)
    if differing:
        name = differing[0]
        tolerance = noise.get(name, 0.0)
        repeats = f" by more than its runs differ by ({tolerance:.3g})" if tolerance else ""
        raise VerificationError(
            f"{name} of the converted model differs from the original's{repeats}; "
            f"{_first_difference(model, example, modules, exactly)}"
        )
    del exact

    progress.next("the converted model")

    def checked(slot: Slot, x: Tensor) -> Tensor:
        module = chosen(slot)
        if module is not slot.original:
            _check_derivative(slot, module, x)
        return module.forward(x)

    with preserved(model, example), intercepted(modules, checked, modules):
        conversion.hook(_check_and_drop)
        _run_converted(model, example)


def _check_and_drop(module: nn.Module, args: Any, output: Any) -> None:
    for saved in outputs_saved_by(module, output):
        if not saved.tensor.is_meta and saved.tensor.numel() > 0:
            tolerance = _ROUNDINGS * torch.finfo(saved.tensor.dtype).eps * saved.magnitude()
            difference = (saved.formed() - saved.tensor.detach()).abs()
            finite = saved.tensor.isfinite()
            if not (difference <= tolerance)[finite].all():
                raise VerificationError(
                    f"a {type(module).__name__} would be given in backward another input than it "
                    f"reads: the two differ by up to {float(difference[finite].max()):.3g}"
                )
        saved.drop()


def _gradients(model: nn.Module, example: Example, perturbation: int = 0) -> dict[str, Tensor]:
    """Outputs, arguments and buffers after a run, the gradients of parameters and arguments.

    The gradients are those of a sum of the outputs with random weights, the same in every run. With
    a `perturbation` backward starts from weights that are larger by so many roundings, and what it
    ends in is divided by as much: the sums on the way are rounded otherwise, as they are where an
    activation in place gives them their terms in another layout.
    """
    with ExitStack() as stack:
        stack.enter_context(preserved(model, example))
        stack.enter_context(reentrant_checkpoints_as_the_others())
        stack.enter_context(torch.enable_grad())
        example = example.copy()
        outputs = _comparable(tensors_in(example.call(model)))
        if not outputs:
            raise VerificationError(
                "the model returns no tensor that could be compared: convert with verify=False, "
                "and compare what it computes yourself"
            )
        inputs: dict[str, Tensor] = {}
        inputs |= {f"the gradient of `{name}`": p for name, p in model.named_parameters()}
        inputs |= {f"the gradient of argument {i}": a for i, a in enumerate(example.tensors())}
        inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        results = {f"output {i}": tensor.detach() for i, tensor in enumerate(outputs)}
        results |= {
            f"requires_grad of output {i}": torch.tensor(tensor.requires_grad)
            for i, tensor in enumerate(outputs)
        }
        arguments = _comparable(example.tensors())
        results |= {f"argument {i}": a.detach() for i, a in enumerate(arguments)}
        results |= {f"buffer `{name}`": b.clone() for name, b in model.named_buffers()}
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        if differentiable and inputs:
            rounding = max(torch.finfo(t.dtype).eps for t in (*differentiable, *inputs.values()))
            factor = 1 + perturbation * rounding
            # Their own generators: the model's random state is not of their making.
            generators = {t.device: torch.Generator(t.device) for t in differentiable}
            for generator in generators.values():
                generator.manual_seed(0)
            gradients = torch.autograd.grad(
                differentiable,
                list(inputs.values()),
                [
                    torch.randn(
                        t.shape, generator=generators[t.device], dtype=t.dtype, device=t.device
                    )
                    * factor
                    for t in differentiable
                ],
                allow_unused=True,
            )
            for name, gradient in zip(inputs, gradients, strict=True):
                if gradient is not None:
                    results[name] = gradient / factor if perturbation else gradient
        return results


def _comparable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, and of nested ones their components."""
    return [
        part for tensor in tensors for part in (tensor.unbind() if tensor.is_nested else (tensor,))
    ]


def _run_converted(model: nn.Module, example: Example) -> dict[str, Tensor]:
    try:
        return _gradients(model, example)
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(f"the converted model fails: {error}") from error


def _noise(original: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> dict[str, float]:
    """By how much another run may differ from two of the original, for each value."""
    noise = {}
    for name, value in original.items():
        difference = _difference(again[name], value) if name in again else torch.inf
        largest = _largest(value)
        # A gradient may be nothing but noise: that of a bias before BatchNorm.
        is_noise = name.startswith("output") and difference > _LARGEST_NOISE * largest
        if is_noise or name not in again:
            raise VerificationError(
                f"{name} differs between two runs of the original by {difference:.3g}, its largest "
                f"value being {largest:.3g}: with random numbers that no seed of PyTorch, NumPy or "
                "Python repeats nothing can be compared; convert with verify=False"
            )
        noise[name] = _NOISE * difference
        if value.is_cuda and value.is_floating_point():
            rounding = torch.finfo(value.dtype).eps * largest
            noise[name] = max(noise[name], _CUDA_ROUNDINGS * rounding)
    return noise


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _largest(value: Tensor) -> float:
    """The largest finite magnitude."""
    if value.is_meta or value.numel() == 0:
        return 0.0
    value = _dense(value)
    wide = value.to(torch.complex128 if value.is_complex() else torch.double)
    return float(wide.abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _differing(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], noise: Mapping[str, float]
) -> list[str]:
    names = {**expected, **actual}
    return [name for name in names if not _agree(name, actual, expected, noise.get(name, 0.0))]


def _agree(
    name: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> bool:
    """Whether both have this value, and it differs by no more than the tolerance."""
    if name not in actual or name not in expected:
        return False
    return _difference(actual[name], expected[name]) <= tolerance


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; 0 between NaNs, and between equal infinities."""
    if a.shape != b.shape:
        return torch.inf
    if a.is_meta and b.is_meta:
        return 0.0
    a, b = _dense(a), _dense(b)
    if torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.double
    difference = (a.to(wide) - b.to(wide)).abs()
    difference[(a == b) | (a.isnan() & b.isnan())] = 0
    return float(difference.nan_to_num(nan=torch.inf).max())


class _ExactFunction(Function):
    """Overwrites x by function(clone), and then saves the clone, through which the gradient goes.

    As with the ops themselves nothing is saved before x is overwritten: a checkpoint that runs
    again stops behind the last tensor that is saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, clone: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(clone)
        ctx.mark_dirty(x)
        return x.copy_(function(clone))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (clone,) = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        with torch.enable_grad():
            x = clone.view_as(clone) if twice else clone.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(ctx.function(x), x, grad, create_graph=twice)
        return None, gradient, None


def _exact(slot: Slot, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return x.copy_(slot.recognised.function(x))
    return _ExactFunction.apply(x, x.clone(), slot.recognised.function)


def _original(slot: Slot, x: Tensor) -> Tensor:
    return type(slot.original).forward(slot.original, x)


def _first_difference(
    model: nn.Module,
    example: Example,
    modules: Mapping[Slot, nn.Module],
    exactly: Callable[[Slot, Tensor], Tensor],
) -> str:
    """Where the original and the exact activations in place part first, in words."""

    def fingerprints(
        activation: Callable[[Slot, Tensor], Tensor],
        put_in: Mapping[Slot, nn.Module] | None = None,
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def forward(slot: Slot, x: Tensor) -> Tensor:
            y = activation(slot, x)

            def note(what: str, value: Tensor) -> None:
                key = f"the {what} of `{slot.name}`"
                while key in found:
                    key += " when called again"
                found[key] = torch.stack([value.sum(dtype=torch.double), value.abs().sum()])

            note("output", y.detach())
            if y.requires_grad:
                y.register_hook(lambda gradient: note("incoming gradient", gradient))
            return y

        with intercepted(modules, forward, put_in):
            _gradients(model, example)
        return found

    original, again = fingerprints(_original), fingerprints(_original)
    exact = fingerprints(exactly, modules)
    for key, value in original.items():
        if not _agree(key, exact, original, _NOISE * _difference(again[key], value)):
            return f"first in {key}"
    return "but not at any converted place"


def _check_derivative(slot: Slot, module: nn.Module, x: Tensor) -> None:
    """Compare `module` alone, on a copy of x, with PyTorch's activation.

    Not with another library's formula, which in 16 bits may be far off.
    """
    recognised = slot.recognised
    expected_function = partial(recognised.activation.torch_function, **recognised.scalars)
    results = []
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        for activation in (module.forward, expected_function):
            leaf = x.detach().clone().requires_grad_()
            y = activation(leaf.clone())
            (derivative,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
            results.append((y.detach(), derivative))
    (value, derivative), (expected_value, expected_derivative) = results
    rtol, atol = _tolerances(slot, module, x.dtype)
    # Elsewhere PyTorch's own may depend on the layout, or overflow.
    usual = x.abs() < 1e15
    value, derivative = value[usual], derivative[usual]
    expected_value, expected_derivative = expected_value[usual], expected_derivative[usual]
    try:
        torch.testing.assert_close(value, expected_value, equal_nan=True)
        torch.testing.assert_close(
            derivative, expected_derivative, rtol=rtol, atol=atol, equal_nan=True
        )
    except AssertionError as error:
        raise VerificationError(f"the activation at `{slot.name}` is wrong: {error}") from None


def _tolerances(
    slot: Slot, module: nn.Module, dtype: torch.dtype
) -> tuple[float | None, float | None]:
    """Relative and absolute: the documented error of the derivative, or torch.testing's default."""
    activation = slot.recognised.activation
    # With "recompute" it is called here without the norm.
    save: Save = module.save if module.save != "recompute" else module.fallback  # type: ignore[assignment]
    if activation.has_mask:
        return 0.0, 0.0
    bits = module.bits
    kept = bits if isinstance(bits, int) else activation.default_bits(save, dtype)
    error = activation.derivative_error(save, dtype, kept)
    return (None, None) if error is None else (1.5 * torch.finfo(dtype).eps, error)
