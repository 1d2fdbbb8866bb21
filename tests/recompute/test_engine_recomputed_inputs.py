"""Activations after a norm whose input is recomputed too: the input of a cast, or a concatenation.

Backward of the fused activation then reads what the norm saves instead of its input.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.allocations import saved_allocation
from _support.twins import (
    OpCounter,
    assert_same_step,
    assert_same_steps,
    converted_twin,
    nodes_of,
    step_of,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.recompute import after_norm, nodes
from inplace_ops.recompute.packed import Recomputed

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

C = 8


class Upcast(nn.Module):
    """16-bit convolutions, and between them a float32 norm and an activation, as under autocast."""

    def __init__(self, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, C, 3, padding=1), norm, act
        self.last = nn.Conv2d(C, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        with torch.autocast(device, torch.bfloat16):
            x = self.first(x)
        z = self.norm(x.float())
        with torch.autocast(device, torch.bfloat16):
            return self.last(self.act(z)).float()


class Layer(nn.Module):
    """A concatenation, a norm, an activation and a convolution."""

    def __init__(self, inputs: int, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm, self.act, self.conv = norm, act, nn.Conv2d(inputs, C, 3, padding=1)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.conv(self.act(self.norm(torch.cat(parts, 1))))


class Dense(nn.Module):
    """Layers that read the concatenation of all outputs before, as in a DenseNet."""

    def __init__(self, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), norm(C), act())
        sizes = [C * (i + 1) for i in range(4)]
        self.layers = nn.ModuleList(Layer(size, norm(size), act()) for size in sizes)
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for layer in self.layers:
            parts.append(layer(parts))
        if self.writes:
            with torch.no_grad():
                parts[1].mul_(2)
        return torch.cat(parts, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda c: nn.GroupNorm(2, c),
    "group without parameters": lambda c: nn.GroupNorm(2, c, affine=False),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
}
ACTIVATIONS: dict[str, Callable[[bool], nn.Module]] = {
    "relu": lambda inplace: nn.ReLU(inplace),
    "leaky_relu": lambda inplace: nn.LeakyReLU(0.2, inplace),
    "silu": lambda inplace: nn.SiLU(inplace),
    "gelu": lambda inplace: nn.GELU(),
    "mish": lambda inplace: nn.Mish(inplace),
}
MODELS: dict[str, Callable[[Callable[[int], nn.Module], Callable[[], nn.Module]], nn.Module]] = {
    "upcast": lambda norm, act: Upcast(norm(C), act()),
    "dense": Dense,
}


def images() -> Tensor:
    return torch.randn(2, 3, 9, 7)


def recomputed_inputs(output: Tensor) -> list[Recomputed]:
    """Return what the fused activations in the graph of an output save instead of x."""
    fused = [node for node in nodes_of(output) if after_norm.is_after_norm(node)]
    packed = [nodes.packed(node, "x") for node in fused]
    return [value for value in packed if isinstance(value, Recomputed)]


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_pytorchs(
    model: str, norm: str, act: str, inplace: bool, source: str
) -> None:
    original = MODELS[model](NORMS[norm], lambda: ACTIVATIONS[act](inplace))
    twin, x = converted_twin(original), images()
    assert_same_steps(original, twin, x, tolerance=1e-2 if model == "upcast" else 1e-5)
    if source == "hook" and norm != "instance":
        assert recomputed_inputs(twin(x))
    assert saved_bytes(twin, x) < saved_bytes(original, x)
    assert saved_allocation(lambda: twin(x)) < saved_allocation(lambda: original(x))


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_on_a_gpu_are_pytorchs(
    model: str, norm: str, memory_format: torch.memory_format, device: torch.device
) -> None:
    original = MODELS[model](NORMS[norm], nn.SiLU).to(device, memory_format=memory_format)
    x = images().to(device, memory_format=memory_format)
    twin = converted_twin(original)
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        assert_same_steps(original, twin, x, tolerance=1e-2 if model == "upcast" else 1e-4)


def upcast(act: Callable[[], nn.Module] = nn.SiLU) -> nn.Module:
    return Upcast(nn.GroupNorm(2, C), act())


def test_norm_and_activation_share_the_input() -> None:
    """Both read one recomputed value, and the norm's output is not recomputed for backward."""
    twin, x = converted_twin(upcast()), images()
    twin(x)
    output = twin(x)
    with OpCounter() as counted:
        output.sum().backward()
    assert counted.ops["inplace_ops::silu_backward_recompute"] == 1
    assert counted.ops["inplace_ops::normalize"] == 0
    assert counted.ops["aten::silu_backward"] == 0


def test_few_operations_leave_the_activation_unfused() -> None:
    """The norm's output then takes more than `max_ops` operations to recompute."""
    model, x = upcast(), images()
    for max_ops, count in ((1, 0), (2, 1)):
        twin = converted_twin(model, max_ops)
        assert_same_steps(model, twin, x, tolerance=1e-2)
        fused = [node for node in nodes_of(twin(x)) if after_norm.is_after_norm(node)]
        assert len(fused) == count


def test_second_derivatives(source: str) -> None:
    model = Dense(nn.BatchNorm2d, nn.SiLU).double()
    twin, x = converted_twin(model), images().double().requires_grad_()
    results = []
    for m in (model, twin):
        (gradient,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), list(m.parameters())[2:4]))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_backward_twice() -> None:
    model, x = upcast(), images()
    twin = converted_twin(model)
    step_of(twin, x)
    results = []
    for m in (model, twin):
        m.zero_grad()
        output = m(x).square().sum()
        output.backward(retain_graph=True)
        output.backward()
        results.append({name: p.grad for name, p in m.named_parameters()})
    assert_same_step(*results, tolerance=1e-2)


def test_memory_is_freed_by_backward() -> None:
    """The graph frees what the activation saves, although its output is alive."""
    twin, x = converted_twin(upcast()), images()
    twin(x)
    output = twin(x)
    (packed,) = recomputed_inputs(output)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in packed.tensors()]
    assert storages
    assert not any(storage.expired() for storage in storages)
    del packed
    output.sum().backward()
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("retains", [False, True], ids=["frees graph", "retains graph"])
def test_spec_of_an_activation_is_freed_by_its_backward(retains: bool, source: str) -> None:
    """The node owns the spec for consumers that are yet to come, but no longer than its tensors."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3))
    twin, x = converted_twin(model), images()
    twin(x)
    output = twin(x)
    (node,) = [node for node in nodes_of(output) if after_norm.is_after_norm(node)]
    assert node.spec is not None
    storages = [StorageWeakRef(leaf.tensor.untyped_storage()) for leaf in node.spec.leaves()]
    output.sum().backward(retain_graph=retains)
    assert node.spec is None
    gc.collect()
    assert [storage.expired() for storage in storages] == [not retains] * len(storages)


def test_consumer_that_comes_after_backward_gets_pytorchs_gradient(source: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            self.early = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
            return self.conv(y)

    model, x = Model(), images()
    assert_same_steps(model, converted_twin(model), x)


def test_write_to_a_part_of_a_concatenation() -> None:
    """The concatenation is recomputed from copies of its parts, which the write does not change."""
    model: Any = Dense(nn.BatchNorm2d, nn.ReLU)
    twin, x = converted_twin(model), images()
    assert recomputed_inputs(twin(x))
    for m in (model, twin):
        m.writes = True
    assert_same_steps(model, twin, x)


def test_report_counts_the_recomputed_input_once() -> None:
    model, x = Dense(nn.BatchNorm2d, nn.ReLU), images()
    before = saved_bytes(model, x)
    report = inplace_ops.convert(model, x)
    assert report.saved_bytes_before == before
    assert report.saved_bytes_after == saved_bytes(model, x)
