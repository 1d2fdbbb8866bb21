"""Random networks: what convert accepts computes as before, and little is refused without need."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from behaviour import assert_same_behaviour, behaviour, differs, twin
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from selection import exhaustive
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops.conversion.slots import find_slots

WIDTH = 4
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.SiLU)

# Each takes the network, the step's number and two of the tensors so far, and returns a new one.
OPERATIONS = {
    "linear": lambda m, k, a, b: m.layers[k](a),
    "activation": lambda m, k, a, b: m.activations[k](a),
    "in-place activation": lambda m, k, a, b: m.inplace_activations[k](a),
    "shared activation": lambda m, k, a, b: m.shared(a),
    "linear and activation": lambda m, k, a, b: m.activations[k](m.layers[k](a)),
    "normalize": lambda m, k, a, b: m.norms[k](a),
    "add": lambda m, k, a, b: a + b,
    "multiply": lambda m, k, a, b: a * b,
    "add in place": lambda m, k, a, b: a.add_(b),
    "tanh": lambda m, k, a, b: a.tanh(),
    "view": lambda m, k, a, b: a.view(-1).view(a.shape),
    "chunk": lambda m, k, a, b: a.chunk(1)[0],
    "detach": lambda m, k, a, b: a.detach(),
    "mean": lambda m, k, a, b: a.mean(0, keepdim=True).repeat(len(a), 1),
    "keep": lambda m, k, a, b: m.kept.append(a) or a,
    "without grad": lambda m, k, a, b: _without_grad(m, k, a),
    "checkpoint": lambda m, k, a, b: _checkpoint(m, k, a),
}

BINARY = ("add", "multiply", "add in place")

Step = tuple[str, int, int]


def _without_grad(m: Any, k: int, a: Tensor) -> Tensor:
    with torch.no_grad():
        return m.activations[k](m.layers[k](a))


def _checkpoint(m: Any, k: int, a: Tensor) -> Tensor:
    return checkpoint(lambda t: m.activations[k](m.layers[k](t)) + t, a, use_reentrant=False)


class RandomNetwork(nn.Module):
    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        kinds = [ACTIVATIONS[i % 3] for _, i, _ in steps]
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in steps)
        self.activations = nn.ModuleList(kind() for kind in kinds)
        self.inplace_activations = nn.ModuleList(kind(inplace=True) for kind in kinds)
        self.shared = nn.SiLU()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.kept: list[Tensor] = []
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tensors, used = [x, self.last(x)], {0}
        for k, (operation, i, j) in enumerate(self.steps):
            first, second = len(tensors) - 1 - i % len(tensors), len(tensors) - 1 - j % len(tensors)
            used |= {first, second} if operation in BINARY else {first}
            tensors.append(OPERATIONS[operation](self, k, tensors[first], tensors[second]))
        # Every result counts: what nothing depends on may be wrong without harm.
        unused = [tensor for i, tensor in enumerate(tensors) if i not in used]
        return self.last(torch.cat(unused)).sin()


def example() -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64)


def runs(model: nn.Module, x: Tensor) -> bool:
    try:
        behaviour(model, x)
    except RuntimeError:
        return False
    return True


steps = st.lists(
    st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 4), st.integers(0, 4)),
    min_size=1,
    max_size=10,
)


@given(steps)
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
def test_what_is_accepted_computes_as_before(steps: list[Step]) -> None:
    torch.manual_seed(0)
    model = RandomNetwork(steps)
    original = twin(model)
    x = example()
    assume(runs(original, x))
    report = inplace_ops.convert(model, x, verify=False)
    assert_same_behaviour(behaviour(model, x), behaviour(original, x))
    assert all(site.bytes_after <= site.bytes_before for site in report.sites)
    inplace_ops.revert(model)
    assert inplace_ops.convert(model, x).sites == report.sites  # and is verified


@exhaustive
def test_few_refusals_are_needless() -> None:
    """Each refused place is put in place alone: it should then break or change something."""
    generator = random.Random(0)
    refused, needless = 0, []
    while refused < 60:
        steps = [
            (generator.choice(list(OPERATIONS)), generator.randrange(5), generator.randrange(5))
            for _ in range(generator.randint(1, 10))
        ]
        model = RandomNetwork(steps)
        original = twin(model)
        x = example()
        if not runs(original, x):
            continue
        report = inplace_ops.convert(model, x, verify=False)
        reasons = {site.name: site.reason for site in report.sites if not site.converted}
        for slot in find_slots(model):
            reason = reasons.get(slot.name)
            if reason is None or reason == "not called with this input":
                continue
            left = slot.parent._modules[slot.key]
            slot.put(slot.converted(slot.recognised.saves[0], slot.recognised.saves[0], None))
            refused += 1
            if not differs(model, original, x):
                needless.append(f"{reason}: {slot.name} of {steps}")
            slot.put(left)
    print("\n".join(needless))
    print(f"{len(needless)} of {refused} refusals were needless")
    assert len(needless) <= 0.25 * refused
