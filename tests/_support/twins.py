"""A model and its twin, which is its converted copy, and the comparison of their training steps."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import inplace_ops
from inplace_ops.memory import Packed
from inplace_ops.recompute import nodes
from inplace_ops.recompute.packed import Recomputed
from inplace_ops.recompute.values import Value

from .marks import quick

# How the engine receives autograd nodes: see NOTE [Where nodes come from] in `run.py`. Where
# PyTorch has the hook, the engine never walks. There slow tests let it walk too, in the files about
# writes, notes and containment. All others have the source of the installed PyTorch.
HAS_HOOK = nodes.creation_hook is not None
SOURCES = ["hook", "walk"] if HAS_HOOK else ["walk"]
EACH_SOURCE = quick(SOURCES, always=SOURCES[:1])
C = 6


@contextmanager
def nodes_from(source: str) -> Iterator[None]:
    """Let the engine receive nodes from PyTorch's node creation hook or from module hooks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "USE_CREATION_HOOK", source == "hook")
        yield


@contextmanager
def no_warnings(prefix: str = "") -> Iterator[None]:
    """Fail if the block issues a warning whose text starts with `prefix`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(w.message) for w in caught if str(w.message).startswith(prefix)]
    assert not found, found


class Program(nn.Module):
    """A convolution, a norm, an activation, then `compute(self, z)`, which may use more layers."""

    def __init__(
        self,
        compute: Callable[[Any, Tensor], Any],
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        activation: Callable[[], nn.Module] = nn.Identity,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, C, 3, padding=1), norm(C), activation()
        self.conv, self.other = nn.Conv2d(C, 4, 3, padding=1), nn.Conv2d(C, C, 1)
        self.linear, self.silu = nn.Linear(8, 8), nn.SiLU()
        self.scale = nn.Parameter(torch.randn(1, C, 1, 1))
        self.compute = compute
        self.step = 0
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        self.step += 1
        return self.compute(self, self.act(self.norm(self.first(x))))

    def convolved(self, y: Tensor) -> Tensor:
        """Convolve y, with the weight cast to the dtype of y."""
        return nn.functional.conv2d(y, self.conv.weight.to(y.dtype), padding=1)


class Parts(nn.Module):
    """A model of modules, parameters and other attributes by name, with `compute(self, x)`."""

    def __init__(self, compute: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.compute(self, x)


class TwoOutputs(torch.autograd.Function):
    """Two outputs of one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first * 2 + second * 3


def images(dtype: torch.dtype = torch.float32, samples: int = 2) -> Tensor:
    return torch.randn(samples, 3, 8, 8, dtype=dtype)


def converted_twin(model: nn.Module, max_ops: int = 20) -> Any:
    """Return a converted copy of the model."""
    twin = copy.deepcopy(model)
    inplace_ops.convert(twin, max_ops=max_ops)
    return twin


class OpCounter(TorchDispatchMode):
    """Count the ops that run, and separately those of this package that cast."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, casts = op.overloadpacket._qualified_op_name, kwargs or {}
        if op.namespace == "inplace_ops":
            name += " and cast" if casts.get("dtype") else ""
            name += " in float32" if casts.get("in_float32") else ""
        self.ops[name] += 1
        return op(*args, **(kwargs or {}))


Step = dict[str, Tensor | None]


def step_of(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] | None = None) -> Step:
    """Run one training step and return its outputs, buffers and gradients."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    model.zero_grad()
    state = torch.get_rng_state()
    outputs = [t for t in tree_leaves(model(x)) if isinstance(t, Tensor)]
    torch.set_rng_state(state)
    found: Step = {f"output {i}": output.detach().clone() for i, output in enumerate(outputs)}
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        weighted = loss or (lambda output: (output.double() * random_like(output)).sum())
        torch.stack([weighted(output) for output in differentiable]).sum().backward()
    found["x"] = x.grad
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return found


def random_like(output: Tensor) -> Tensor:
    """Return random float64 values of the output's shape, the same ones at every call."""
    generator = torch.Generator(output.device).manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=torch.double, device=output.device)


def assert_same_step(actual: Step, expected: Step, tolerance: float = 1e-5) -> None:
    """Assert that each tensor differs by at most `tolerance` times its norm; 0: bit for bit."""
    assert actual.keys() == expected.keys()
    # The gradient of a bias before a norm is zero except for rounding errors, so its own norm is
    # not a useful scale. The errors are as large as those of its terms: each tolerance is relative
    # to at least a tenth of the largest norm of the step.
    gradients = [g.double().norm() for n, g in expected.items() if g is not None and n != "x"]
    largest = max((float(g) for g in gradients if g.isfinite()), default=0.0)
    for name, value in expected.items():
        other = actual[name]
        assert (other is None) == (value is None), name
        if value is None or other is None:
            continue
        same = (other == value) | (other.isnan() & value.isnan())
        if tolerance == 0:
            assert same.all(), name
            continue
        finite = value.isfinite()
        assert same[~finite].all(), name
        difference = (other[finite].double() - value[finite].double()).norm()
        allowed = tolerance * max(float(value[finite].double().norm()), 0.1 * largest)
        assert difference <= allowed, f"{name}: {difference:.3g} of {allowed / tolerance:.3g}"


def swap_in_forward(module: nn.Module, name: str, other: Callable[[], Any]) -> None:
    """Let a module have `other()` as an attribute, only while its forward runs."""
    value = getattr(module, name)
    module.register_forward_pre_hook(lambda m, args: setattr(m, name, other()))
    module.register_forward_hook(lambda m, args, output: setattr(m, name, value), prepend=True)


def assert_same_steps(
    model: nn.Module, twin: nn.Module, x: Tensor, steps: int = 2, tolerance: float = 1e-5
) -> None:
    twin.load_state_dict(model.state_dict())  # an earlier run may have changed the buffers
    for _ in range(steps):
        assert_same_step(step_of(twin, x), step_of(model, x), tolerance)


def assert_same_gradients(
    model: nn.Module,
    twin: nn.Module,
    x: Any,
    *names: str,
    between: Callable[[Any], object] = lambda m: None,
    tolerance: float | None = None,
) -> None:
    """Assert that the gradients of these parameters alone are equal, of the model's last output.

    No backward runs that only other parameters need: it might raise after a write. `between` is
    called with each model between its forward and backward.
    """
    found = []
    for m in (twin, model):
        loss = tree_leaves(m(x))[-1].square().sum()
        between(m)
        found.append(torch.autograd.grad(loss, [m.get_parameter(name) for name in names]))
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def nodes_of(output: Any) -> list[Any]:
    """Return all nodes of the autograd graph of an output."""
    found: dict[Any, None] = {}
    pending = [t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor)]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found[node] = None
            pending += [producer for producer, _ in node.next_functions]
    return list(found)


def number_of_values() -> int:
    """Return how many values of operations are alive: those of graphs that are alive."""
    gc.collect()
    return sum(type(obj) is Value for obj in gc.get_objects())


def replaced(output: Any) -> list[Packed]:
    """Return everything that replaces a saved tensor in the graph of an output."""
    return [value for node in nodes_of(output) for value in nodes.packed_values(node)]


def recomputed(output: Any) -> list[Recomputed]:
    """Return the specs that replace saved tensors in the graph of an output."""
    return [value for value in replaced(output) if isinstance(value, Recomputed)]
