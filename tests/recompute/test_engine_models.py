"""Converted models match PyTorch where overwriting tensors is unsafe, and on random networks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from _support.behavior import assert_same_behavior, behavior
from _support.twins import converted_twin
from _support.unsafe_writes import ACTIVATIONS, ACTIVATIONS_OF, PATTERNS, WIDTH, Network
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("_small_tensors_too")


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_unsafe_patterns_match_pytorch(pattern: str, inplace: bool) -> None:
    """Each pattern matches PyTorch, out of place and, where PyTorch allows it, in place."""
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for activation in ACTIVATIONS_OF.get(pattern, ACTIVATIONS):
        model = Network(PATTERNS[pattern], partial(activation, inplace=inplace))
        original = copy.deepcopy(model)
        twin = converted_twin(model)
        for _ in range(2):
            try:
                expected = behavior(original, x)
            except RuntimeError:
                if not inplace:
                    raise
                continue  # PyTorch rejects the in-place activation
            assert_same_behavior(behavior(twin, x), expected, rtol=1e-10, atol=1e-10)


# Each takes the network, the index of the step and two earlier tensors, and returns a new one.
OPERATIONS = {
    "linear": lambda m, k, a, b: m.layers[k](a),
    "activation": lambda m, k, a, b: m.activations[k](a),
    "in-place activation": lambda m, k, a, b: m.inplace_activations[k](a),
    "shared activation": lambda m, k, a, b: m.shared(a),
    "normalize": lambda m, k, a, b: m.norms[k](a),
    "normalize and activate": lambda m, k, a, b: m.activations[k](m.norms[k](a)),
    "add": lambda m, k, a, b: a + b,
    "multiply": lambda m, k, a, b: a * b,
    "add in place": lambda m, k, a, b: a.add_(b),
    "multiply in place": lambda m, k, a, b: a.mul_(b),
    "sigmoid": lambda m, k, a, b: a.sigmoid(),
    "relu in place": lambda m, k, a, b: a.relu_(),
    "view": lambda m, k, a, b: a.view(-1).view(a.shape),
    "transpose": lambda m, k, a, b: a.t().reshape(a.shape),
    "chunk": lambda m, k, a, b: torch.cat(a.chunk(2, 1)[::-1], 1),
    "cast": lambda m, k, a, b: a.to(torch.float32).to(a.dtype),
    "detach": lambda m, k, a, b: a.detach(),
    "mean": lambda m, k, a, b: a.mean(0, keepdim=True).repeat(len(a), 1),
    "without grad": lambda m, k, a, b: _without_grad(m, k, a),
    "written without grad": lambda m, k, a, b: _written_without_grad(a),
    "checkpoint": lambda m, k, a, b: checkpoint(
        lambda t: m.activations[k](m.norms[k](m.layers[k](t))) + t, a, use_reentrant=False
    ),
}
BINARY = ("add", "multiply", "add in place", "multiply in place")
Step = tuple[str, int, int]


def _without_grad(m: Any, k: int, a: Tensor) -> Tensor:
    with torch.no_grad():
        return m.activations[k](m.layers[k](a))


def _written_without_grad(a: Tensor) -> Tensor:
    with torch.no_grad():
        a.mul_(0.5)
    return a


class RandomNetwork(nn.Module):
    """Run the steps, each with separate layers, and combine all unused results in the output."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        kinds = [ACTIVATIONS[i % 3] for _, i, _ in steps]
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in steps)
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in steps)
        self.activations = nn.ModuleList(kind() for kind in kinds)
        self.inplace_activations = nn.ModuleList(kind(inplace=True) for kind in kinds)
        self.shared, self.last = nn.SiLU(), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tensors, used = [x * 1, self.last(x)], {0}
        for k, (operation, i, j) in enumerate(self.steps):
            first, second = len(tensors) - 1 - i % len(tensors), len(tensors) - 1 - j % len(tensors)
            used |= {first, second} if operation in BINARY else {first}
            tensors.append(OPERATIONS[operation](self, k, tensors[first], tensors[second]))
        unused = [tensor for i, tensor in enumerate(tensors) if i not in used]
        return self.last(torch.cat(unused)).sin()


steps = st.lists(
    st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 4), st.integers(0, 4)),
    min_size=1,
    max_size=12,
)


@given(steps=steps)
@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
def test_random_networks_match_pytorch(steps: list[Step]) -> None:
    torch.manual_seed(0)
    model, x = RandomNetwork(steps), torch.randn(3, 4, dtype=torch.float64)
    try:
        expected = behavior(model, x)
    except RuntimeError:
        assume(False)
    twin = converted_twin(model)
    for _ in range(2):
        assert_same_behavior(behavior(twin, x), expected, rtol=1e-9, atol=1e-9)
