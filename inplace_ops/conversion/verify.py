"""Compare a converted model with the original on an example, and measure both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from .._ops import is_out_of_memory
from .._torch_private import (
    TorchDispatchMode,
    is_raised_by_disabling_hooks,
    saved_tensor_hooks_are_disabled,
)
from ..memory import bytes_of, peak_bytes
from ..recompute.tensors import is_stale
from ..saved import model_bytes, tensors_in
from .example import Example, append
from .state import State

# The largest allowed distance between the gradients of the converted and of the original model,
# relative to their norm, by the coarsest dtype in the run. It is much larger than a rounding error:
# rounding errors grow on their way through a network.
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_TOLERANCES = {
    **dict.fromkeys((torch.float64, torch.complex128), 1e-10),
    **dict.fromkeys((torch.float32, torch.complex64), 1e-4),
    **dict.fromkeys((torch.float16, torch.complex32), 2e-2),
    torch.bfloat16: 1e-1,
    **dict.fromkeys(_FLOAT8, 5e-1),
}

# The dtype in which random numbers are made for a dtype that has none of its own.
_WITH_RANDN = {**dict.fromkeys(_FLOAT8, torch.float32), torch.complex32: torch.complex64}

# On a GPU two runs of the original may differ, and a third run may differ by a bit more. So the
# distance between two runs of the original, times this factor, is allowed as well.
_NOISE_FACTOR = 4

_TIMED_PASSES = 3

_SMALLER = (
    "Running example_inputs needs memory itself: pass fewer samples, or none, as convert(model) "
    "runs nothing."
)


class VerificationError(RuntimeError):
    """Raised if the gradients of the converted model differ from those of the original."""


class Run:
    """Forward and backward passes of a model on an example, all from the same state.

    Each pass ends with a call of `finished`.
    """

    def __init__(
        self, model: nn.Module, example: Example, state: State, finished: Callable[[], object]
    ) -> None:
        self.model, self.example, self._state, self._finished = model, example, state, finished
        self._uses_backward, self._uses_hooks = False, not saved_tensor_hooks_are_disabled()

    def gradients(self) -> Gradients:
        """Run one pass and return all gradients."""
        try:
            return self._gradients()
        except RuntimeError as error:
            if self._uses_backward or "use_reentrant=True" not in str(error):
                raise
        # A reentrant checkpoint supports `backward()`, which writes to `.grad`, and nothing else.
        self._uses_backward = True
        return self._gradients()

    def _gradients(self) -> Gradients:
        with self._pass() as inputs:
            return Gradients(inputs, self.model, inputs.call(self.model), self._uses_backward)

    def gradients_and_flops(self) -> tuple[Gradients, int | None]:
        """Run one pass, and count the FLOPs of its products; None if no dispatch mode sees it."""
        try:
            with FlopCounter() as counter:
                gradients = self.gradients()
        except Exception:
            return self.gradients(), None
        return gradients, counter.flops

    def saved_bytes(self) -> int:
        """Return the bytes saved for backward, without parameters, buffers and arguments."""
        try:
            return self._saved_bytes()
        except Exception as error:
            if not is_raised_by_disabling_hooks(error):
                raise
        self._uses_hooks = False
        return self._saved_bytes()

    def _saved_bytes(self) -> int:
        with self._pass() as inputs:
            call = partial(inputs.call, self.model)
            return model_bytes(self.model, call, inputs.tensors(), self._uses_hooks)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that a pass allocates at one time; None under a profiler."""
        with self._pass() as inputs:

            def step() -> None:
                Gradients(inputs, self.model, inputs.call(self.model), self._uses_backward)

            return peak_bytes(step)

    def seconds(self) -> float:
        """Return the time of the fastest of a few passes."""
        return min(self._seconds() for _ in range(_TIMED_PASSES))

    def _seconds(self) -> float:
        with self._pass() as inputs:
            devices = {tensor.device for tensor in inputs.tensors() if tensor.is_cuda}
            for device in devices:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            Gradients(inputs, self.model, inputs.call(self.model), self._uses_backward)
            for device in devices:
                torch.cuda.synchronize(device)
            return time.perf_counter() - start

    def call(self) -> None:
        """Call the model without gradients."""
        with self._pass() as inputs, torch.no_grad():
            inputs.call(self.model)

    @contextmanager
    def _pass(self) -> Iterator[Example]:
        """Provide a copy of the example within a `with` block, and restore the model's state."""
        with self._state.preserved(), torch.enable_grad():
            try:
                yield self.example.copy()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    append(error, _SMALLER)
                raise
        self._finished()


class FlopCounter(TorchDispatchMode):
    """Counts the floating point operations of convolutions, matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        return result


class Gradients:
    """Gradients of a randomly weighted sum of a model's outputs.

    The weights are the same in every run.

    Attributes:
        outputs: The output tensors that require grad, without their graph.
        values: The gradients by the names of parameters and arguments; None where there is none.
        autocast_dtypes: The dtypes of the autocasts that were on.
        remarks: Why there are no gradients, for the report.
    """

    def __init__(
        self, example: Example, model: nn.Module, outputs: Any, uses_backward: bool = False
    ) -> None:
        # Autograd raises for a stale view, whose grad_fn cannot be read.
        leaves = [t for t in tensors_in(outputs) if t.requires_grad and not is_stale(t)]
        inputs: dict[str, Tensor] = {f"`{name}`": p for name, p in model.named_parameters()}
        inputs |= {f"argument {i}": a for i, a in enumerate(example.tensors())}
        inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
        self.outputs = [leaf.detach() for leaf in leaves]
        self.autocast_dtypes = {
            torch.get_autocast_dtype(device)
            for device in {leaf.device.type for leaf in leaves}
            if torch.is_autocast_enabled(device)
        }
        self.values: dict[str, Tensor | None] = {}
        self.remarks: list[str] = []
        if not inputs:
            self.remarks.append(
                "nothing to differentiate: no parameter and no argument requires a gradient"
            )
        elif not leaves:
            self.remarks.append("nothing to differentiate: no output requires a gradient")
        if leaves and inputs:
            weights = [_random_like(leaf) for leaf in leaves]
            if uses_backward:
                torch.autograd.backward(leaves, weights)
                self.values = {name: tensor.grad for name, tensor in inputs.items()}
            else:
                values = torch.autograd.grad(leaves, [*inputs.values()], weights, allow_unused=True)
                self.values = dict(zip(inputs, values, strict=True))

    @property
    def bytes(self) -> int:
        """The memory of the gradients; an upper bound for layouts other than strided."""
        return bytes_of(value for value in self.values.values() if value is not None)

    def to_host(self) -> Gradients:
        """Move outputs and gradients to the host, so that no measurement counts them."""
        self.outputs = [output.cpu() for output in self.outputs]
        self.values = {n: None if v is None else v.cpu() for n, v in self.values.items()}
        return self

    def distance(self, other: Gradients) -> float:
        """Return the norm of the difference, relative to the norm of these gradients.

        All gradients are taken as one vector. The distance is infinite if a gradient is None, or
        not finite, in one of the two alone.
        """
        total = difference = 0.0
        for name, value in self.values.items():
            theirs = other.values.get(name)
            if value is None or theirs is None:
                if value is not theirs:
                    return float("inf")
                continue
            value, theirs = _real_numbers(value), _real_numbers(theirs)
            if not torch.equal(value.isfinite(), theirs.isfinite()):
                return float("inf")
            value, theirs = value.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
            total += float(value.norm() ** 2)
            difference += float((value - theirs).norm() ** 2)
        return (difference / total) ** 0.5 if total else difference**0.5

    def tolerance(self) -> float:
        """Return the largest `distance` that rounding errors may cause."""
        tensors = [*self.outputs, *(v for v in self.values.values() if v is not None)]
        dtypes = {*self.autocast_dtypes, *(tensor.dtype for tensor in tensors)}
        return max((_TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _random_like(output: Tensor) -> Tensor:
    # A separate generator leaves the random state of the model unchanged.
    generator = torch.Generator(output.device).manual_seed(output.numel())
    dtype = _WITH_RANDN.get(output.dtype, output.dtype)
    weights = torch.randn(output.shape, generator=generator, dtype=dtype, device=output.device)
    return weights.to(output.dtype)


def _real_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers in float64; of complex numbers both parts."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    if dense.is_complex():
        return torch.view_as_real(dense.to(torch.complex128))
    return dense.double()


def compare(original: Gradients, repeated: Gradients, converted: Gradients) -> None:
    """Raise VerificationError if the converted model's gradients differ from the original's.

    Args:
        original: The gradients of the original.
        repeated: The gradients of a second run of the original.
        converted: The gradients of the converted model.
    """
    distance = original.distance(converted)
    allowed = max(original.tolerance(), _NOISE_FACTOR * original.distance(repeated))
    if not distance <= allowed:
        raise VerificationError(
            "the gradients of the converted model differ from those of the original by "
            f"{distance:.3g} of their norm, and at most {allowed:.3g} is allowed; the model is "
            "unchanged"
        )
