"""Activations after a norm whose input is recomputed too: the input of a cast, or a concatenation.

Backward of the activation then reads what the norm saves instead of its input.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.allocations import saved_allocation
from _support.twins import (
    HAS_HOOK,
    OpCounter,
    Parts,
    assert_same_steps,
    converted_twin,
    nodes_of,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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
    """Return what the activations after norms in the graph of an output save instead of x."""
    fused = [node for node in nodes_of(output) if after_norm.is_after_norm(node)]
    packed = [nodes.packed(node, "x") for node in fused]
    return [value for value in packed if isinstance(value, Recomputed)]


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_pytorchs(model: str, norm: str, act: str, inplace: bool) -> None:
    original = MODELS[model](NORMS[norm], lambda: ACTIVATIONS[act](inplace))
    twin, x = converted_twin(original), images()
    assert_same_steps(original, twin, x, tolerance=1e-2 if model == "upcast" else 1e-5)
    if HAS_HOOK and norm != "instance":
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


@pytest.mark.parametrize("retains", [False, True], ids=["frees graph", "retains graph"])
@pytest.mark.parametrize("model", ["upcast", "batch"])
def test_spec_of_an_activation_is_freed_by_its_backward(model: str, retains: bool) -> None:
    """The node owns the spec for consumers that are yet to come, but no longer than its tensors.

    So it does although its output is alive.
    """
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 3)
    twin, x = converted_twin(upcast() if model == "upcast" else nn.Sequential(*layers)), images()
    twin(x)
    output = twin(x)
    (node,) = [node for node in nodes_of(output) if after_norm.is_after_norm(node)]
    tensors = [leaf.tensor for leaf in node.spec.leaves()]
    tensors += [tensor for packed in recomputed_inputs(output) for tensor in packed.tensors()]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    output.sum().backward(retain_graph=retains)
    assert node.spec is None
    gc.collect()
    assert [storage.expired() for storage in storages] == [not retains] * len(storages)


def test_consumer_that_comes_after_backward_gets_pytorchs_gradient() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.block(x)
        m.early = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
        return m.conv(y)

    model, x = (
        Parts(
            compute,
            block=nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU()),
            conv=nn.Conv2d(4, 4, 3),
        ),
        images(),
    )
    assert_same_steps(model, converted_twin(model), x)
