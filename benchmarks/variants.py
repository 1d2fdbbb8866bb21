"""What is compared: variants of an activation, and of a whole network.

An activation runs out of place and in place in PyTorch, and in each save mode of this package. A
network runs as it is, out of place, compiled, with checkpoints, and converted. PyTorch's variants
are the baselines. Before a variant is measured, `verify_op` or `verify_step` compares its results
with PyTorch's.
"""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch._inductor
from ablation import without
from common import IN_PLACE, OUT_OF_PLACE, Clock, MovedBytes, exact_convolutions, memory_of
from gradients import NO_SLACK, Gradients, Reference, Slack, gradients_of
from networks import LanguageModel, backward
from policies import POLICIES, Policy, autocast
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import inplace_ops
from inplace_ops.activations import ACTIVATIONS, Activation, Save
from inplace_ops.recompute.settings import MAX_OPS as DEFAULT_MAX_OPS

SCALARS = {"negative_slope": 0.01}


@dataclass(frozen=True)
class Kernels:
    """The two private ops of a variant, without autograd and Python around them."""

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
class OpVariant:
    """A variant of an activation, and the memory traffic of its training step.

    Packed bits are written once and read once.

    Attributes:
        name: The name in tables and result files.
        run: Computes the output.
        forward_tensors: The number of whole tensors that forward reads or writes.
        backward_tensors: The number of whole tensors that backward reads or writes: three if it
            reads the gradient and the output (or input) and writes a gradient, two if it does not
            need the output.
        kernels: The ops of one of our variants; None for PyTorch's.
    """

    name: str
    run: Callable[..., Any]
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


def _op_variants(entry: Activation) -> list[OpVariant]:
    scalars = {name: SCALARS[name] for name in entry.scalars}

    def ours(name: str, save: Save, bits: int | None = None) -> OpVariant:
        chosen = {} if bits is None else {"bits": bits}
        function = getattr(inplace_ops, entry.function)
        return OpVariant(
            name,
            partial(function, **entry.variant, **scalars, save=save, **chosen),
            backward_tensors=3 if save == "output" else 2,
            kernels=Kernels(entry, save, bits, tuple(scalars.values())),
        )

    found = [OpVariant(OUT_OF_PLACE, partial(entry.torch_function, **scalars))]
    if entry.torch_inplace:
        # Where backward needs the input, PyTorch clones it.
        forward_tensors = 2 if entry.torch_saves_output else 4
        in_place = partial(entry.torch_inplace, **scalars)
        found.append(OpVariant(IN_PLACE, in_place, forward_tensors=forward_tensors))
    for save in entry.save_modes:
        found.append(ours(save, save))
        if save == "output" and not entry.is_piecewise_linear:
            found.append(ours("output, 1 bit", save, 1))
    return found


ENTRIES = {" ".join([entry.name, *entry.variant.values()]): entry for entry in ACTIVATIONS}
# PyTorch out of place comes first: it is the reference.
OP_VARIANTS = {name: _op_variants(entry) for name, entry in ENTRIES.items()}


def baseline(variants: list[OpVariant]) -> OpVariant:
    """Return the denominator of the ratios: PyTorch in place if there is one, else out of place."""
    return next((v for v in variants if v.name == IN_PLACE), variants[0])


def check_op(
    activation: str, variant: OpVariant, x: Tensor, grad: Tensor, value: Tensor, gradient: Tensor
) -> None:
    """Raise unless value and gradient are PyTorch's.

    They must be equal for a piecewise-linear activation, and within the documented errors for a
    smooth one. These errors are for a unit gradient: `grad` is 1 or -1 everywhere.
    """
    leaf = x.detach().clone().requires_grad_()
    expected_value = OP_VARIANTS[activation][0].run(leaf)
    (expected_gradient,) = torch.autograd.grad(expected_value, leaf, grad)
    tolerance = {"rtol": 0.0, "atol": 0.0} if ENTRIES[activation].is_piecewise_linear else {}
    torch.testing.assert_close(value, expected_value.detach(), **tolerance)
    kernels, error = variant.kernels, None
    if kernels is not None:
        bits = kernels.bits_of(x.dtype)
        error = kernels.entry.derivative_error(kernels.save, x.dtype, bits)
    if error is not None:  # torch.testing's default tolerances do not cover it
        # Both sides add the rounding of their arithmetic.
        arithmetic = torch.finfo(torch.promote_types(x.dtype, torch.float32))
        tolerance = {"rtol": torch.finfo(x.dtype).eps, "atol": error + 4 * arithmetic.eps}
    torch.testing.assert_close(gradient, expected_gradient, **tolerance)


def verify_op(activation: str, variant: OpVariant, x: Tensor) -> None:
    """Run the variant on x, forward and backward, and check value and gradient."""
    grad = torch.randn_like(x).sign()
    leaf = x.clone().requires_grad_()
    output = variant.run(leaf.clone())
    (gradient,) = torch.autograd.grad(output, leaf, grad)
    check_op(activation, variant, x, grad, output.detach(), gradient)


_MODULES = tuple(entry.torch_module for entry in ACTIVATIONS)


def out_of_place(model: nn.Module, blocks: Collection[str] = ()) -> nn.Module:
    """Set all of PyTorch's activations out of place, and return the model."""
    for module in model.modules():
        if isinstance(module, _MODULES):
            module.inplace = False
    return model


def blocks_of(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Return the outermost modules whose class has one of these names."""
    found = []
    for child in model.children():
        found += [child] if type(child).__name__ in names else blocks_of(child, names)
    return found


def checkpointed(model: nn.Module, blocks: Collection[str], each: int = 1) -> nn.Module:
    """Checkpoint each block, or only each second one, and return the model."""
    found = blocks_of(model, blocks)
    if not found:
        raise ValueError(f"the model has no blocks of these classes: {', '.join(blocks)}")
    for block in found[::each]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def compiled(model: nn.Module, blocks: Collection[str], budget: float) -> Callable[..., Any]:
    """Return the model compiled with this `activation_memory_budget`.

    Activations are out of place: the compiler decides what to write in place. Each call makes a new
    backend: models of one class with the same backend share compiled code.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._inductor.compile(graph, inputs)

    return torch.compile(out_of_place(model), backend=backend)


def converted(
    model: nn.Module, blocks: Collection[str] = (), max_ops: int = DEFAULT_MAX_OPS
) -> nn.Module:
    """Convert the model, and return it."""
    inplace_ops.convert(model, max_ops=max_ops)
    return model


def with_norms_apart(model: nn.Module, blocks: Collection[str]) -> Callable[..., Any]:
    """Return the converted model without the backward that batch norms share with activations."""
    converted(model)

    def run(x: Tensor) -> Any:
        with without("bypass of batch norms"):
            return model(x)

    return run


def with_compiled_blocks(model: nn.Module, blocks: Collection[str]) -> nn.Module:
    """Compile each second block of a converted model, and return the model."""
    for block in blocks_of(converted(model), blocks)[::2]:
        out_of_place(block).compile()
    return model


def offloaded(model: nn.Module) -> Callable[..., Any]:
    """Return the model with all saved tensors, parameters too, moved to the host's memory.

    On a CPU they are moved out of the memory that PyTorch allocates, which has the effect that
    `torch.autograd.graph.save_on_cpu` has on a GPU's memory. The time then says nothing.
    """
    graph = torch.autograd.graph

    def pack(tensor: Tensor) -> Any:
        flat = tensor.detach().contiguous().view(-1)
        return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().copy()

    def unpack(packed: Any) -> Tensor:
        dtype, shape, values = packed
        return torch.from_numpy(values).clone().view(dtype).view(shape)

    def run(x: Tensor) -> Any:
        on_cpu = graph.saved_tensors_hooks(pack, unpack)
        with graph.save_on_cpu(pin_memory=True) if x.is_cuda else on_cpu:
            return model(x)

    return run


def with_chunked_loss(model: nn.Module) -> nn.Module:
    """Let a `LanguageModel` compute its head and loss in chunks, and return the model."""
    if not isinstance(model, LanguageModel):
        raise TypeError(f"{type(model).__name__} does not compute its loss")
    model.chunks = nn.LinearCrossEntropyOptions()
    return model


CONVERT, NORMS_APART = "convert, max_ops=4", "convert, backward of norms apart"
CHECKPOINTS = "checkpoint of each block"
HALF_CHECKPOINTS = "checkpoint of each second block"
OFFLOAD, LOSS_IN_CHUNKS = "all saved tensors offloaded", "loss in chunks"
MAX_OPS = (1, 4, 8, 16, 32)
COMPILED = {"torch.compile": 1.0}
COMPILED |= {f"torch.compile, memory budget {b}": b for b in (0.9, 0.7, 0.5, 0.3, 0.1)}
# By name: changes a model in training mode, whose blocks have these class names, and returns what
# runs it. `TOOLS` are other tools, and combinations of them with `convert`.
Changes = dict[str, Callable[[nn.Module, Collection[str]], Callable[..., Any]]]
TOOLS: Changes = {
    **{name: partial(compiled, budget=budget) for name, budget in COMPILED.items()},
    CHECKPOINTS: checkpointed,
    HALF_CHECKPOINTS: partial(checkpointed, each=2),
    f"convert, {HALF_CHECKPOINTS}": lambda model, blocks: checkpointed(
        converted(model), blocks, each=2
    ),
    "convert, each second block compiled": with_compiled_blocks,
    OFFLOAD: lambda model, blocks: offloaded(model),
    f"convert, {OFFLOAD}": lambda model, blocks: offloaded(converted(model)),
    LOSS_IN_CHUNKS: lambda model, blocks: with_chunked_loss(model),
    f"convert, {LOSS_IN_CHUNKS}": lambda model, blocks: with_chunked_loss(converted(model)),
}
VARIANTS: Changes = {
    OUT_OF_PLACE: out_of_place,
    IN_PLACE: lambda model, blocks: model,  # as its author wrote it
    **TOOLS,
    **{f"convert, max_ops={n}": partial(converted, max_ops=n) for n in MAX_OPS},
    NORMS_APART: with_norms_apart,
}
BASELINES = ("torch.compile", "torch.compile, memory budget 0.5", CHECKPOINTS, HALF_CHECKPOINTS)


FUTURES = str(Path(concurrent.futures.__file__).parent)
FLOAT32 = POLICIES["float32"]


class Step(NamedTuple):
    """A training step of a network.

    Attributes:
        call: Returns the outputs for `x`: the model, or what a tool makes of it.
        model: The network, which has the parameters.
        x: The input.
        policy: The dtype policy.
    """

    call: Callable[..., Any]
    model: nn.Module
    x: Tensor
    policy: Policy = FLOAT32

    def forward(self) -> Any:
        """Return the outputs."""
        with autocast(self.policy, self.x.device.type):
            return self.call(self.x)

    def run(self) -> Any:
        """Run forward, loss and backward, and return the outputs."""
        outputs = self.forward()
        backward(outputs)
        return outputs

    def reset(self) -> None:
        """Set gradients to None, as backward would add to them."""
        self.model.zero_grad()

    def run_seeded(self) -> None:
        """Run the step, always with the same random numbers."""
        torch.manual_seed(0)
        self.run()

    def gradients(self) -> Gradients:
        """Return the gradients, always with the same random numbers."""
        self.run_seeded()
        return gradients_of(self.model)

    def memory(self) -> Memory:
        """Return the bytes that forward saves, and the peak."""
        saved = memory_of(self.forward, self.x.device.type)[1]
        peak = memory_of(self.run, self.x.device.type)[0]
        self.reset()
        return Memory(saved, peak)

    def work(self) -> Work:
        """Return the bytes that a step reads and writes, and the FLOPs of its products."""
        return Work(self.moved(), self.flops())  # counting FLOPs decomposes operations

    def moved(self) -> int:
        """Return the bytes that a step reads and writes."""
        with MovedBytes() as moved:
            self.run()
        self.reset()
        return moved.count

    def flops(self) -> int:
        """Return the FLOPs of a step's products."""
        for _ in range(2):  # under the counter specs may differ: the first step compares them
            with FlopCounterMode(display=False) as flops:
                self.run()
            self.reset()
        return flops.get_total_flops()

    def calls(self) -> int:
        """Return how many functions of Python and C forward calls.

        How many of them `concurrent.futures` calls, with which products are emulated, depends on
        time: they do not count.
        """
        count = 0
        waiting: FrameType | None = None

        def profile(frame: FrameType, event: str, _: Any) -> None:
            nonlocal count, waiting
            if waiting is None and event in ("call", "c_call"):
                count += 1
                waiting = frame if frame.f_code.co_filename.startswith(FUTURES) else None
            elif event == "return" and frame is waiting:
                waiting = None

        gc.collect()
        gc.disable()  # what it frees may call functions
        sys.setprofile(profile)
        try:
            _outputs = self.forward()  # not freed meanwhile
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    def timed(self, clock: Clock, run: Callable[[], Any] | None = None) -> float:
        """Return the milliseconds of a step, or of `run`, which is its CUDA graph."""
        milliseconds = clock.time(run or self.run)[0] / 1e3
        self.reset()
        return milliseconds


def step_of(
    name: str,
    model: nn.Module,
    x: Tensor,
    policy: Policy = FLOAT32,
    blocks: Collection[str] = (),
) -> Step:
    """Return the step of a variant of a copy of the model; `blocks` are its blocks' class names."""
    own = copy.deepcopy(model)
    return Step(VARIANTS[name](own, blocks), own, x, policy)


class Memory(NamedTuple):
    """Bytes that a step saves for backward, and the most that it allocates at one time."""

    saved: int
    peak: int


class Work(NamedTuple):
    """Bytes that all operations of a step read and write, and the FLOPs of its products."""

    moved: int
    flops: int


def expected_of(step: Step) -> Reference:
    """Return PyTorch's gradients, to compare those of other variants with."""

    def run(model: nn.Module) -> None:
        step._replace(call=model, model=model).run_seeded()

    def gradients_in(dtype: torch.dtype) -> Gradients:
        model, x = copy.deepcopy(step.model).to(dtype), step.x
        return Step(model, model, x.to(dtype) if x.is_floating_point() else x).gradients()

    with exact_convolutions():
        in_float32 = None if step.policy.is_float32 else gradients_in(torch.float32)
        in_float64 = partial(gradients_in, torch.float64)
        return Reference(step.model, run, step.gradients(), in_float32, in_float64)


def verify_step(step: Step, expected: Reference, slack: Slack = NO_SLACK) -> float:
    """Raise if a step's gradients are wrong; return their distance from PyTorch's.

    As the loss depends on all outputs, so do the gradients.
    """
    with exact_convolutions():
        return expected._replace(slack=slack).verify(step.gradients())[0]
