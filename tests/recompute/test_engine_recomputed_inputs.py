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


def upcast(m: Any, x: Tensor) -> Tensor:
    """Run 16-bit convolutions, between them a float32 norm and an activation, as under autocast."""
    with torch.autocast(x.device.type, torch.bfloat16):
        x = m.first(x)
    z = m.norm(x.float())
    with torch.autocast(x.device.type, torch.bfloat16):
        return m.last(m.act(z)).float()


def upcasting(norm: nn.Module, act: nn.Module) -> nn.Module:
    convolutions = {"first": nn.Conv2d(3, C, 3, padding=1), "last": nn.Conv2d(C, 4, 3)}
    return Parts(upcast, **convolutions, norm=norm, act=act)


def dense(m: Any, x: Tensor) -> Tensor:
    """Run layers that read the concatenation of all outputs before, as in a DenseNet."""
    parts = [m.first(x)]
    for layer in m.layers:
        parts.append(layer(parts))
    return torch.cat(parts, 1)


def joined(m: Any, parts: list[Tensor]) -> Tensor:
    return m.conv(m.act(m.norm(torch.cat(parts, 1))))


def denser(norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> nn.Module:
    def layer(inputs: int) -> nn.Module:
        conv = nn.Conv2d(inputs, C, 3, padding=1)
        return Parts(joined, norm=norm(inputs), act=act(), conv=conv)

    first = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), norm(C), act())
    return Parts(dense, first=first, layers=nn.ModuleList(layer(C * i) for i in range(1, 5)))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda c: nn.GroupNorm(2, c),
    "group without parameters": lambda c: nn.GroupNorm(2, c, affine=False),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
}
# Smooth or not, in place or not.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu_": lambda: nn.LeakyReLU(0.2, inplace=True),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "silu_": lambda: nn.SiLU(inplace=True),
}
MODELS: dict[str, Callable[[Callable[[int], nn.Module], Callable[[], nn.Module]], nn.Module]] = {
    "upcast": lambda norm, act: upcasting(norm(C), act()),
    "dense": denser,
}


def images() -> Tensor:
    return torch.randn(2, 3, 9, 7)


def recomputed_inputs(output: Tensor) -> list[Recomputed]:
    """Return what the activations after norms in the graph of an output save instead of x."""
    fused = [node for node in nodes_of(output) if after_norm.is_after_norm(node)]
    packed = [nodes.packed(node, "x") for node in fused]
    return [value for value in packed if isinstance(value, Recomputed)]


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_pytorchs(model: str, norm: str, act: str) -> None:
    original = MODELS[model](NORMS[norm], ACTIVATIONS[act])
    twin, x = converted_twin(original), images()
    assert_same_steps(original, twin, x, tolerance=1e-2 if model == "upcast" else 1e-5)
    if HAS_HOOK and norm != "instance":
        assert recomputed_inputs(twin(x))
    assert saved_bytes(twin, x) < saved_bytes(original, x)
    assert saved_allocation(lambda: twin(x)) < saved_allocation(lambda: original(x))


@pytest.mark.usefixtures("_deterministic_cudnn")
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
    assert_same_steps(original, twin, x, tolerance=1e-2 if model == "upcast" else 1e-4)


def of_group_norm() -> nn.Module:
    return upcasting(nn.GroupNorm(2, C), nn.SiLU())


def test_norm_and_activation_share_the_input() -> None:
    """Both read one recomputed value, and the norm's output is not recomputed for backward."""
    twin, x = converted_twin(of_group_norm()), images()
    twin(x)
    output = twin(x)
    with OpCounter() as counted:
        output.sum().backward()
    assert counted.ops["inplace_ops::silu_backward_recompute"] == 1
    assert counted.ops["inplace_ops::normalize"] == 0
    assert counted.ops["aten::silu_backward"] == 0


def test_few_operations_leave_the_activation_unfused() -> None:
    """The norm's output then takes more than `max_ops` operations to recompute."""
    model, x = of_group_norm(), images()
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
    original = of_group_norm() if model == "upcast" else nn.Sequential(*layers)
    twin, x = converted_twin(original), images()
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

    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU())
    model = Parts(compute, block=block, conv=nn.Conv2d(4, 4, 3))
    assert_same_steps(model, converted_twin(model), images())
