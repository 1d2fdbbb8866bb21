"""DTensor, tensor parallelism, DDP and FSDP2: several processes compute what one computes."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from activations import ACTIVATIONS, ONE_OF_EACH, Activation, activation_id
from comparison import assert_gradient, assert_identical, assert_values, random_values, unsigned_zeros
from processes import Processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

one_of_each = pytest.mark.parametrize("name", [row.name for row in ONE_OF_EACH])
BY_NAME = {row.name: row for row in ACTIVATIONS}


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Two processes: on the CPU, or with a GPU each."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    pair = Processes(2, "nccl" if request.param == "cuda" else "gloo")
    yield pair
    pair.stop()


def device() -> torch.device:
    """The device of this process."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


@functools.cache  # torch.compile fails on two meshes that are equal, with PyTorch's ops too
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh(device().type, shape or (dist.get_world_size(),))


def pytorchs_inplace(activation: Activation) -> Callable[[Tensor], Tensor]:
    """PyTorch's own in-place activation; before 2.12 silu_ has no sharding strategy."""
    if activation.name.startswith("silu") and torch.__version__ < "2.12":
        return lambda x: x.copy_(F.silu(x.clone()))
    return activation.torch_inplace


def collectives(function: Callable[[], Any]) -> tuple[Any, int]:
    """What function returns, and how often the processes communicate meanwhile."""
    with CommDebugMode() as count:
        result = function()
    return result, count.get_total_counts()


# ---- DTensor ----


def incoming_gradients(shape: torch.Size, mesh: DeviceMesh) -> list[DTensor]:
    full = random_values(tuple(shape), torch.float32, device())
    part = random_values(tuple(shape), torch.float32, device()) * (1 + dist.get_rank())
    partial = DTensor.from_local(part, mesh, [Partial()] * mesh.ndim, run_check=False)
    return [
        partial,
        *(
            distribute_tensor(full, mesh, [placement] * mesh.ndim)
            for placement in (Replicate(), *(Shard(d) for d in range(full.dim())))
        ),
    ]


def assert_like_pytorchs(
    activation: Activation, values: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    leaves = [distribute_tensor(values, mesh, placements).requires_grad_() for _ in range(2)]
    outputs = []
    for call, leaf in zip((activation.call, pytorchs_inplace(activation)), leaves, strict=True):
        x = leaf * 1
        memory = x.to_local().data_ptr()
        y, communications = collectives(lambda call=call, x=x: call(x))
        assert y is x
        assert x._version == 1
        assert x.to_local().data_ptr() == memory
        assert list(y.placements) == placements
        assert y.stride() == values.stride()
        assert communications == 0
        outputs.append(y)
    assert_values(activation, outputs[0].detach().full_tensor(), activation.reference(values))

    for incoming in incoming_gradients(values.shape, mesh):
        (ours, communications), (pytorchs, of_pytorch) = (
            collectives(lambda y=y, leaf=leaf: torch.autograd.grad(y, leaf, incoming, None, True)[0])
            for y, leaf in zip(outputs, leaves, strict=True)
        )
        assert list(ours.placements) == placements
        assert (ours.shape, ours.stride()) == (values.shape, values.stride())
        largest = incoming.full_tensor().abs()
        assert_gradient(activation, ours.full_tensor(), pytorchs.full_tensor(), largest)
        if list(incoming.placements) == placements:
            assert communications == 0
        # PyTorch itself does not shard a backward over more processes than a dimension has rows,
        # and lets one of replicated values come out sharded if the gradient is.
        if all(size >= dist.get_world_size() for size in values.shape):
            if list(incoming.placements) == placements:
                assert ours.placements == pytorchs.placements
            if not any(p.is_replicate() for p in placements):
                assert communications <= of_pytorch


def one_mesh_dimension(name: str) -> None:
    for shape in ((4, 6), (5, 7), (1, 3)):  # divisible, not, and nothing for the last process
        for placement in (Shard(0), Shard(1), Replicate()):
            values = random_values(shape, torch.float32, device())
            assert_like_pytorchs(BY_NAME[name], values, mesh_of(), [placement])
    images = random_values((2, 3, 5, 4), torch.float32, device())
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        channels_last = images.contiguous(memory_format=torch.channels_last)
        assert_like_pytorchs(BY_NAME[name], channels_last, mesh_of(), [placement])


@one_of_each
def test_dtensor(name: str, processes: Processes) -> None:
    processes.run(one_mesh_dimension, name)


def two_mesh_dimensions() -> None:
    mesh = mesh_of(2, 2)
    for activation in ONE_OF_EACH:
        for placements in (
            [Shard(0), Shard(1)],
            [Shard(0), Shard(0)],
            [Shard(1), Replicate()],
            [Replicate(), Shard(0)],
            [Replicate(), Replicate()],
        ):
            values = random_values((5, 6), torch.float32, device())
            assert_like_pytorchs(activation, values, mesh, placements)


def test_dtensor_on_a_mesh_of_two_dimensions() -> None:
    four = Processes(4)
    try:
        four.run(two_mesh_dimensions)
    finally:
        four.stop()


def dtensor_without_grad() -> None:
    values = random_values((5, 7), torch.float32, device())
    for activation in ONE_OF_EACH:
        for placement in (Shard(0), Shard(1), Replicate()):
            leaf = distribute_tensor(values, mesh_of(), [placement]).requires_grad_()
            for context in (torch.no_grad, torch.inference_mode):
                x = leaf * 1
                node = x.grad_fn
                with context():
                    y, communications = collectives(lambda x=x: activation.call(x))  # noqa: B023
                assert y is x
                assert x.grad_fn is node
                assert x._version == 1
                assert x.placements == (placement,)
                assert communications == 0
                with torch.no_grad():
                    assert_values(activation, x.full_tensor(), activation.reference(values))


def test_dtensor_without_grad(processes: Processes) -> None:
    processes.run(dtensor_without_grad)


def refused_dtensors() -> None:
    mesh = mesh_of()
    part = torch.randn(4, 6, device=device())

    def partial_sums() -> DTensor:
        return DTensor.from_local(part.clone(), mesh, [Partial()], run_check=False)

    def leaf() -> DTensor:
        return distribute_tensor(part, mesh, [Shard(0)]).requires_grad_()

    cases: list[Callable[[], DTensor]] = [
        partial_sums,
        lambda: partial_sums().requires_grad_() * 1,
        leaf,
        lambda: leaf().view(-1, 2, 3),
        lambda: (leaf() * 1).chunk(2, dim=1)[1],
        lambda: DTensor.from_local(part[:, :1].expand(4, 5), mesh, [Shard(0)], run_check=False),
    ]
    for activation in ONE_OF_EACH:
        for case in cases:
            with pytest.raises(RuntimeError) as pytorchs:
                torch.relu_(case())
            x = case()
            before, version = x.to_local().detach().clone(), x._version
            with pytest.raises(RuntimeError) as ours:
                activation.call(x)
            # "in-place operations that require placement ...", "a leaf Variable that requires ..."
            assert str(pytorchs.value).split(": ")[-1][:40] in str(ours.value), str(ours.value)
            assert_identical(x.to_local().detach(), before)
            assert x._version == version


def test_refused_dtensors(processes: Processes) -> None:
    processes.run(refused_dtensors)


def writes_after_the_activation() -> None:
    values = random_values((5, 7), torch.float32, device())
    for activation in ONE_OF_EACH:
        leaf = distribute_tensor(values, mesh_of(), [Shard(0)]).requires_grad_()
        y = activation.call(leaf * 1)
        y.mul_(2)
        if not activation.allows_later_writes:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
            continue
        y.sum().backward()
        reference = values.clone().requires_grad_()
        (2 * activation.reference(reference)).sum().backward()
        assert_gradient(activation, leaf.grad.full_tensor(), reference.grad, 2.0)


def test_writes_after_the_activation(processes: Processes) -> None:
    processes.run(writes_after_the_activation)


def activations_of_views() -> None:
    views: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.view(x.shape[0], 3, 2),
        lambda x: x.t(),
        lambda x: x[:, 1:4],
        lambda x: x.select(1, 2),
    ]
    values = random_values((5, 6), torch.float32, device())
    for activation in ONE_OF_EACH:
        for view in views:
            for placement in (Shard(0), Replicate()):
                base = distribute_tensor(values, mesh_of(), [placement]).requires_grad_()
                y = base * 1
                activation.call(view(y))
                assert y._version == 1
                reference = values.clone().requires_grad_()
                expected = reference * 1
                view(expected).copy_(activation.reference(view(expected).clone()))
                assert_values(activation, y.detach().full_tensor(), expected.detach())
                incoming = random_values((5, 6), torch.float32, device())
                y.backward(distribute_tensor(incoming, mesh_of(), [placement]))
                expected.backward(incoming)
                largest = incoming.abs()
                actual = unsigned_zeros(base.grad.full_tensor())
                assert_gradient(activation, actual, unsigned_zeros(reference.grad), largest)


def test_views_of_dtensors(processes: Processes) -> None:
    processes.run(activations_of_views)


def second_derivatives() -> None:
    values = random_values((5, 6), torch.float64, device())
    for activation in ONE_OF_EACH:
        for placement in (Shard(0), Shard(1), Replicate()):
            results = []
            for call in (activation.call, activation.reference):
                leaf = values.clone()
                if call is activation.call:
                    leaf = distribute_tensor(leaf, mesh_of(), [placement])
                leaf.requires_grad_()
                (first,) = torch.autograd.grad(
                    call(leaf * 1).square().sum(), leaf, create_graph=True
                )
                if call is activation.call and not activation.is_twice_differentiable:
                    with pytest.raises(RuntimeError, match=r'save="derivative".*save="output"'):
                        first.sum().backward()
                    break
                (second,) = torch.autograd.grad(first.square().sum(), leaf)
                results.append(second.full_tensor() if isinstance(second, DTensor) else second)
            if results:
                torch.testing.assert_close(results[0], results[1])


def test_second_derivatives(processes: Processes) -> None:
    processes.run(second_derivatives)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def unusual_gradients() -> None:
    values = random_values((5, 6), torch.float32, device())
    for activation in ONE_OF_EACH:
        leaf = distribute_tensor(values, mesh_of(), [Shard(0)]).requires_grad_()
        NoGradient.apply(activation.call(leaf * 1)).sum().backward()
        assert leaf.grad is None
        y = activation.call(leaf * 1)
        with pytest.raises(RuntimeError, match="DTensor"):
            y.backward(torch.ones(5, 6, device=device()))


def test_no_gradient_and_a_plain_one(processes: Processes) -> None:
    processes.run(unusual_gradients)


def unfinished_redistribution() -> None:
    values = random_values((5, 6), torch.float32, device())
    for activation in ONE_OF_EACH:
        leaf = distribute_tensor(values, mesh_of(), [Shard(0)]).requires_grad_()
        y = activation.call(leaf.redistribute(placements=[Replicate()], async_op=True))
        y.sum().backward()
        reference = values.clone().requires_grad_()
        expected = activation.reference(reference)
        expected.sum().backward()
        assert_values(activation, y.detach().full_tensor(), expected.detach())
        assert_gradient(activation, leaf.grad.full_tensor(), reference.grad, 1.0)


def test_unfinished_redistribution(processes: Processes) -> None:
    processes.run(unfinished_redistribution)


def scaled(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return call(x * 2) + 1


def compiled_on_dtensors() -> None:
    for activation in ONE_OF_EACH:
        torch._dynamo.reset()
        compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
        values = random_values((5, 6), torch.float32, device())
        leaf = distribute_tensor(values, mesh_of(), [Shard(0)]).requires_grad_()
        y = compiled(activation.call, leaf)
        y.sum().backward()
        reference = values.clone().requires_grad_()
        expected = scaled(activation.reference, reference)
        expected.sum().backward()
        assert_values(activation, y.detach().full_tensor(), expected.detach())
        assert_gradient(activation, leaf.grad.full_tensor(), reference.grad, 2.0)


def test_compiled_on_dtensors(processes: Processes) -> None:
    processes.run(compiled_on_dtensors)
