"""Shared values: consumers that are near each other read one recomputed value.

See NOTE [Shared values] in `specs.py`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.twins import (
    OpCounter,
    Parts,
    assert_same_steps,
    converted_twin,
    nodes_of,
    recomputed,
)
from torch import Tensor, nn

import inplace_ops
from inplace_ops.recompute import specs
from inplace_ops.recompute.calls import Affine

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

N = 12
NORM, RELU_OF_NORM = "inplace_ops::normalize", "inplace_ops::relu_recompute"
RELU_OF_SUM = "inplace_ops::normalize_add_relu"


class Layers(nn.Module):
    """A linear layer and a norm, then `compute(self, z)`, which may use more layers."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Linear(N, N), nn.LayerNorm(N), nn.ReLU()
        self.q, self.k, self.v, self.o = (nn.Linear(N, N) for _ in range(4))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.norm(self.first(x)))


def projections(m: Layers, z: Tensor) -> Tensor:
    return m.q(z) * torch.tanh(m.k(z)) + m.v(z)


def projections_in_bfloat16(m: Layers, z: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # casts z for each of them
        return projections(m, z).float()


def residual(m: Layers, z: Tensor) -> Tensor:
    branch = m.norm(m.q(z))
    return m.k(m.relu(branch + z))  # ReLU saves its output


def gated(m: Layers, z: Tensor) -> Tensor:
    y = m.relu(z)  # saved by the product, and read by what the last layer saves
    return m.o(y * torch.sigmoid(m.q(z)))


def swiglu(m: Layers, z: Tensor) -> Tensor:
    return m.o(F.silu(m.q(z)) * m.k(z))


def far_apart(m: Layers, z: Tensor) -> Tensor:
    y = m.q(z)
    for _ in range(specs.REACH + 1):
        y = m.relu(y + 0.5)
    return y + m.k(z)


def squared(m: Layers, z: Tensor) -> Tensor:
    return m.q(z * z)


def chunks(m: Layers, z: Tensor) -> Tensor:
    """Views of one value, two of which the same consumers read."""
    first, second = (part.repeat(1, 1, 2) for part in z.chunk(2, -1))
    return m.q(first) * m.k(second) + m.v(z)


def cast_and_float32(m: Layers, z: Tensor) -> Tensor:
    """A cast, which one kernel computes with all that it depends on, and a float32 product."""
    y = m.relu(z)
    with torch.autocast("cpu", torch.bfloat16):
        projected = m.k(y).float()
    return projected + y * torch.sigmoid(projected)


# By name: a program, an op, and how often backward runs it with sharing and without.
PROGRAMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, int, int]] = {
    "projections": (projections, NORM, 1, 3),
    "casts": (projections_in_bfloat16, f"{NORM} and cast", 1, 3),
    "ReLU of a sum": (residual, RELU_OF_SUM, 1, 2),
    "product and its factor": (gated, RELU_OF_NORM, 1, 2),
    "product and its factor of one operation": (swiglu, "aten::silu", 1, 2),
    "far apart": (far_apart, NORM, 2, 2),
}


def tokens() -> Tensor:
    return torch.randn(3, 5, N)


def count_of(model: nn.Module, x: Tensor, op: str) -> int:
    """Return how often backward runs an op, after the first use of all specs."""
    model(x)
    output = model(x)
    with OpCounter() as counted:
        output.sum().backward()
    return counted.ops[op]


@pytest.mark.parametrize("name", PROGRAMS)
def test_near_consumers_share_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, op, shared, alone = PROGRAMS[name]
    model, x = Layers(compute), tokens()
    twin = converted_twin(model)
    assert count_of(twin, x, op) == shared
    assert_same_steps(model, twin, x, steps=3)
    monkeypatch.setattr(specs, "REACH", 0)
    assert count_of(converted_twin(model), x, op) == alone


def specs_in(output: Any) -> Iterator[specs.Computed]:
    """Return the specs in the graph of an output, and the specs inside them, except leaves."""
    pending: list[Any] = [value.spec for value in recomputed(output)]
    while pending:
        spec = pending.pop()
        if isinstance(spec, specs.Computed):
            yield spec
            pending += spec.inner()


def kept(output: Any) -> list[Tensor]:
    """Return the values that the specs in the graph of an output keep."""
    values = (spec._kept.value for spec in specs_in(output) if spec._kept is not None)
    return list({id(value): value for value in values}.values())


@pytest.mark.parametrize(
    "compute", [*(c for c, *_ in PROGRAMS.values()), chunks, cast_and_float32, squared]
)
def test_no_value_is_kept_after_backward(compute: Callable[[Any, Tensor], Tensor]) -> None:
    """Also if one consumer reads a value twice."""
    model, x = Layers(compute), tokens()
    twin = converted_twin(model)
    assert_same_steps(model, twin, x, steps=3)
    output = twin(x)
    assert not kept(output)  # the comparison at the first use keeps none
    output.sum().backward(retain_graph=True)
    assert not kept(output)


def test_a_value_of_another_backward_pass_is_not_used() -> None:
    """What a partial backward has kept is not read by the next one, and freed with the graph."""
    twin, x = converted_twin(Layers(projections)), tokens()
    twin(x)
    output = twin(x)
    torch.autograd.grad(output.sum(), twin.v.weight, retain_graph=True)
    (left,) = kept(output)
    expected = torch.autograd.grad(output.sum(), twin.q.weight, retain_graph=True)
    left.fill_(torch.nan)
    actual = torch.autograd.grad(output.sum(), twin.q.weight, retain_graph=True)
    assert torch.equal(actual[0], expected[0])
    torch.autograd.grad(output.sum(), twin.v.weight, retain_graph=True)
    (reference,) = map(weakref.ref, kept(output))
    del left, output
    gc.collect()
    assert reference() is None


def test_a_spec_is_not_reused_after_a_write_to_a_leaf() -> None:
    """Else the gradient of a consumer that was added after the write would raise."""

    def write_between(m: Any, z: Tensor) -> Tensor:
        y = m.q(z)
        if m.writes:
            with torch.no_grad():
                m.h.mul_(2)
        return y + m.k(z)

    model, x = Layers(write_between), tokens()
    twin = converted_twin(model)
    gradients = []
    for m in (model, twin):
        m.first.register_forward_hook(lambda *call, m=m: setattr(m, "h", call[-1]))
        m.writes = False
        m(x)  # the first use of the specs
        m.writes = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            m(x).sum().backward()
        gradients += torch.autograd.grad(m(x).sum(), m.k.weight)
    assert torch.equal(*gradients)


def test_a_value_is_dropped_when_backward_has_passed_its_consumer() -> None:
    """The heads of these blocks do not run in this backward pass."""

    def compute(m: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        heads = []
        for block in m.blocks:
            x = block(x)
            heads.append(block.q(x))
        return x, heads

    twin = converted_twin(
        Parts(compute, blocks=nn.ModuleList(Layers(lambda m, z: m.relu(z)) for _ in range(4)))
    )
    x = tokens()
    twin(x)
    output, heads = twin(x)
    for each in reversed(heads):
        torch.autograd.grad(each.sum(), next(twin.parameters()), retain_graph=True)
        assert len(kept(output)) <= 1
    output.sum().backward()
    assert len(kept(heads)) <= 1


def test_consumers_of_different_calls_share_nothing() -> None:
    """Two blocks are converted on their own, and the second one reads what the first one reads."""
    first, second, x = Layers(projections), nn.Sequential(nn.Linear(N, N)), tokens()
    inplace_ops.convert(first)
    inplace_ops.convert(second)
    outputs: list[Tensor] = []
    first.norm.register_forward_hook(lambda *call: outputs.append(call[-1]))
    for _ in range(2):
        outputs.clear()
        y = first(x)
        y = y + second(outputs[0])
    later = [value for value in recomputed(y) if value.consumer == "Addmm"]
    numbers = sorted(value.turn for value in later if value.turn is not None)
    assert len(numbers) == 4
    assert numbers[-1] - numbers[-2] > specs.REACH
    y.sum().backward(retain_graph=True)
    assert not kept(y)


def test_reading_a_saved_tensor_outside_of_backward_keeps_nothing() -> None:
    twin, x = converted_twin(Layers(projections)), tokens()
    twin(x)
    output = twin(x)
    consumers = [node for node in nodes_of(output) if hasattr(node, "_saved_mat1")]
    assert len(consumers) >= 3
    for node in consumers:
        assert node._saved_mat1 is not None
        assert not kept(output)


def test_equal_calls_of_one_input_share_a_spec() -> None:
    """Casts of a norm's output for several consumers have one spec, which each reads as a view."""
    twin, x = converted_twin(Layers(projections_in_bfloat16)), tokens()
    twin(x)
    views = [value.spec for value in recomputed(twin(x)) if value.consumer == "Addmm"]
    assert len(views) == 3
    casts = {id(spec) for view in views for spec in view.inner()}  # type: ignore[attr-defined]
    assert len(casts) == 1


SLOPES = (0.0, -0.0, 0.5)


def test_different_calls_of_one_input_have_their_own_specs() -> None:
    def program(m: Any, z: Tensor) -> Tensor:
        slopes = [m.q(F.leaky_relu(z, slope)) for slope in SLOPES]
        return sum(slopes) + m.k(z[..., :6].repeat(1, 1, 2)) + m.v(torch.sigmoid(z))

    model, x = Layers(program), tokens()
    twin = converted_twin(model)
    assert_same_steps(model, twin, x, steps=3)
    affines = [spec for spec in specs_in(twin(x)) if isinstance(spec, Affine)]
    slopes = {repr(spec.scalars) for spec in affines if spec.activation is not None}
    assert slopes == {repr([slope]) for slope in SLOPES}
