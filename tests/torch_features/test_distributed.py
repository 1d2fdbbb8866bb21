"""DTensor, tensor parallelism, DDP and FSDP2: several processes compute what one computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _support.assertions import (
    Severed,
    assert_gradient,
    assert_identical,
    assert_values,
    gradient,
    random_values,
    unsigned_zeros,
)
from _support.cases import ACTIVATIONS, SAVE_MODES, ActivationCase
from _support.marks import slow
from _support.processes import Processes, device, mesh_of
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from inplace_ops import saved_bytes

BY_NAME = {row.name: row for row in ACTIVATIONS}


def pytorchs_inplace(activation: ActivationCase) -> Callable[[Tensor], Tensor]:
    """Return PyTorch's in-place activation, or a copy where it has no sharding strategy.

    Before torch 2.12 silu_ has none.
    """
    if not activation.entry.torch_saves_output and torch.__version__ < "2.12":
        return activation.copied
    return activation.torch_inplace


class Collectives(TorchDispatchMode):
    """Counts collectives.

    CommDebugMode is not used: it hooks modules, whose outputs then cannot be modified in place.
    """

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        self.count += func.namespace in (
            "_c10d_functional",
            "_dtensor",
        ) and not func.name().endswith(("wait_tensor", "_wrap_tensor_autograd"))
        return func(*args, **(kwargs or {}))


def collectives(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the function's result, and the number of collectives that it calls."""
    with Collectives() as mode:
        result = function()
    return result, mode.count


# ---- DTensor ----


def incoming_gradients(shape: torch.Size, mesh: DeviceMesh) -> list[DTensor]:
    full = random_values(tuple(shape), torch.float32, device())
    # Integers, so that their sums are exact.
    part = torch.randint(-9, 9, shape, device=device()).float() * (1 + dist.get_rank())
    partial = DTensor.from_local(part, mesh, [Partial()] * mesh.ndim, run_check=False)
    return [
        partial,
        *(
            distribute_tensor(full, mesh, [placement] * mesh.ndim)
            for placement in (Replicate(), *(Shard(d) for d in range(full.dim())))
        ),
    ]


def activated(
    call: Callable[[Tensor], Tensor], values: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> tuple[DTensor, DTensor]:
    """Return a leaf and the activation's output, and assert what holds for PyTorch's and ours."""
    leaf = distribute_tensor(values, mesh, placements).requires_grad_()
    x = leaf * 1
    memory = x.to_local().data_ptr()
    y, communications = collectives(lambda: call(x))
    assert y is x
    assert x._version == 1
    assert x.to_local().data_ptr() == memory
    assert list(y.placements) == placements
    assert y.stride() == values.stride()
    assert communications == 0
    return leaf, y


def assert_right(
    activation: ActivationCase, values: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    leaf, y = activated(activation.call, values, mesh, placements)
    assert_values(activation, y.detach().full_tensor(), activation.reference(values))
    for incoming in incoming_gradients(values.shape, mesh):
        actual, communications = collectives(
            lambda incoming=incoming: torch.autograd.grad(y, leaf, incoming, retain_graph=True)[0]
        )
        assert list(actual.placements) == placements
        assert (actual.shape, actual.stride()) == (values.shape, values.stride())
        if list(incoming.placements) == placements:
            assert communications == 0
        full = incoming.full_tensor()
        expected = gradient(activation.reference, values, full)
        assert_gradient(activation, actual.full_tensor(), expected, full.abs())


def assert_like_pytorchs(activation: ActivationCase, values: Tensor, placement: Placement) -> None:
    """Assert PyTorch's placements of gradients, and no more collectives than PyTorch's."""
    results = []
    for call in (activation.call, pytorchs_inplace(activation)):
        leaf, y = activated(call, values, mesh_of(), [placement])
        results.append(
            [
                collectives(lambda: torch.autograd.grad(y, leaf, g, retain_graph=True)[0])  # noqa: B023
                for g in incoming_gradients(values.shape, mesh_of())
            ]
        )
    incoming = incoming_gradients(values.shape, mesh_of())
    for g, (actual, communications), (expected, of_pytorch) in zip(incoming, *results, strict=True):
        if g.placements == (placement,):
            assert actual.placements == expected.placements
            assert communications == of_pytorch == 0
        # If the incoming gradient is sharded, PyTorch's gradient of a replicated tensor is too.
        if placement.is_shard():
            assert communications <= of_pytorch


def dtensor_matches_plain_tensor(name: str) -> None:
    for shape in ((4, 6), (5, 7), (1, 3)):  # divisible, not divisible, empty on the last
        for placement in (Shard(0), Shard(1), Replicate()):
            values = random_values(shape, torch.float32, device())
            assert_right(BY_NAME[name], values, mesh_of(), [placement])
            if min(shape) >= dist.get_world_size():
                assert_like_pytorchs(BY_NAME[name], values, placement)
    images = random_values((2, 3, 5, 4), torch.float32, device())
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        channels_last = images.contiguous(memory_format=torch.channels_last)
        assert_right(BY_NAME[name], channels_last, mesh_of(), [placement])


def two_mesh_dimensions() -> None:
    mesh = mesh_of(2, 2)
    for activation in SAVE_MODES:
        for placements in (
            [Shard(0), Shard(1)],
            [Shard(0), Shard(0)],
            [Shard(1), Replicate()],
            [Replicate(), Shard(0)],
            [Replicate(), Replicate()],
        ):
            values = random_values((5, 6), torch.float32, device())
            assert_right(activation, values, mesh, placements)


@slow
def test_dtensor_on_2d_mesh_matches_plain_tensor() -> None:
    four = Processes(4)
    try:
        four.run(two_mesh_dimensions)
    finally:
        four.stop()


def without_grad_it_is_modified_in_place() -> None:
    values = random_values((5, 7), torch.float32, device())
    for activation in SAVE_MODES:
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


def bytes_of_local_shards_are_saved() -> None:
    values = torch.randn(80, 10, device=device())
    for activation in SAVE_MODES:
        for placement, elements in ((Shard(0), 800 // dist.get_world_size()), (Replicate(), 800)):
            leaf = distribute_tensor(values, mesh_of(), [placement]).requires_grad_()
            expected = elements * 4 * activation.saves_output
            expected += activation.packed_bits[torch.float32] * elements // 8
            call = activation.call
            assert saved_bytes(lambda x: call(x * 1).mean(), leaf) == expected  # noqa: B023


def what_pytorch_rejects_is_rejected() -> None:
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
    for activation in SAVE_MODES:
        for case in cases:
            with pytest.raises(RuntimeError) as pytorchs:
                torch.relu_(case())
            x = case()
            before, version = x.to_local().detach().clone(), x._version
            with pytest.raises(RuntimeError) as ours:
                activation.call(x)
            # Such as "in-place operations that require placement ...", "a leaf Variable that ...".
            assert str(pytorchs.value).split(": ")[-1][:40] in str(ours.value), str(ours.value)
            assert_identical(x.to_local().detach(), before)
            assert x._version == version


def assert_like_plain_tensor(
    activation: ActivationCase,
    compute: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
    placement: Placement,
    factor: float = 1.0,
) -> None:
    """Compare `compute(activation, x)` of a DTensor with that of a plain tensor.

    The gradients are `factor` times those of the activation.
    """
    values = random_values((5, 6), torch.float32, device())
    leaf = distribute_tensor(values, mesh_of(), [placement]).requires_grad_()
    y = compute(activation.call, leaf)
    plain = values.clone().requires_grad_()
    expected = compute(activation.copied, plain)
    assert_values(activation, y.detach().full_tensor(), expected.detach())
    incoming = random_values(tuple(expected.shape), torch.float32, device())
    y.backward(distribute_tensor(incoming, mesh_of(), [placement]))
    expected.backward(incoming)
    found = (unsigned_zeros(g) for g in (leaf.grad.full_tensor(), plain.grad))
    assert_gradient(activation, *found, factor * incoming.abs())


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(x.shape[0], 3, 2),
    lambda x: x.t(),
    lambda x: x[:, 1:4],
    lambda x: x.select(1, 2),
]


def views_match_plain_tensors() -> None:
    for activation in SAVE_MODES:
        for view in VIEWS:

            def compute(call: Any, x: Tensor, view: Any = view) -> Tensor:
                y = x * 1
                call(view(y))
                assert y._version == 1
                return y

            for placement in (Shard(0), Replicate()):
                assert_like_plain_tensor(activation, compute, placement)


def later_write_raises_if_output_is_saved() -> None:
    for activation in SAVE_MODES:
        with (
            contextlib.nullcontext()
            if activation.allows_later_writes
            else pytest.raises(RuntimeError, match="modified by an inplace operation")
        ):
            assert_like_plain_tensor(activation, lambda call, x: call(x * 1).mul_(2), Shard(0), 2.0)


def output_of_async_redistribution_matches_plain_tensor() -> None:
    def compute(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            return call(x.redistribute(placements=[Replicate()], async_op=True))
        return call(x * 1)

    for activation in SAVE_MODES:
        assert_like_plain_tensor(activation, compute, Shard(0))


def compiled_code_matches_eager() -> None:
    def scaled(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return call(x * 2) + 1

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for activation in (BY_NAME["relu-output"], BY_NAME["silu-derivative-default"]):
        torch._dynamo.reset()
        assert_like_plain_tensor(
            activation,
            lambda call, x: (compiled if isinstance(x, DTensor) else scaled)(call, x),
            Shard(0),
            factor=2.0,
        )


def second_derivatives_match_plain_tensors() -> None:
    values = random_values((5, 6), torch.float64, device())
    for activation in SAVE_MODES:
        for placement in (Shard(0), Shard(1), Replicate()):
            results = []
            ours = activation.call
            for call in (ours, activation.reference):
                leaf = values.clone()
                if call is ours:
                    leaf = distribute_tensor(leaf, mesh_of(), [placement])
                leaf.requires_grad_()
                loss = call(leaf * 1).square().sum()
                if call is ours and not activation.is_twice_differentiable:
                    with pytest.raises(RuntimeError, match=r'save="derivative".*save="output"'):
                        torch.autograd.grad(loss, leaf, create_graph=True)
                    break
                (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
                (second,) = torch.autograd.grad(first.square().sum(), leaf)
                results.append(second.full_tensor() if isinstance(second, DTensor) else second)
            if results:
                torch.testing.assert_close(results[0], results[1])


def undefined_gradient_stays_none_and_plain_gradient_raises() -> None:
    values = random_values((5, 6), torch.float32, device())
    for activation in SAVE_MODES:
        leaf = distribute_tensor(values, mesh_of(), [Shard(0)]).requires_grad_()
        Severed.apply(activation.call(leaf * 1)).sum().backward()
        assert leaf.grad is None
        y = activation.call(leaf * 1)
        with pytest.raises(RuntimeError, match="DTensor"):
            y.backward(torch.ones(5, 6, device=device()))


@pytest.mark.parametrize(
    "check",
    [
        without_grad_it_is_modified_in_place,
        bytes_of_local_shards_are_saved,
        what_pytorch_rejects_is_rejected,
        later_write_raises_if_output_is_saved,
        views_match_plain_tensors,
        second_derivatives_match_plain_tensors,
        undefined_gradient_stays_none_and_plain_gradient_raises,
        output_of_async_redistribution_matches_plain_tensor,
        pytest.param(compiled_code_matches_eager, marks=slow),
    ],
)
def test_of_dtensors(check: Callable[[], None], processes: Processes) -> None:
    processes.run(check)


# ---- Tensor parallelism ----


class Reference(nn.Module):
    """PyTorch's activation, out of place."""

    def __init__(self, activation: ActivationCase) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.reference(x)


def twins(build: Callable[[Callable[[], nn.Module]], nn.Module], activation: ActivationCase) -> Any:
    """Return a network with our activation, and the same network with PyTorch's."""
    ours = build(activation.module).to(device(), torch.float64)
    pytorchs = build(lambda: Reference(activation)).to(device(), torch.float64)
    pytorchs.load_state_dict(ours.state_dict())
    return ours, pytorchs


def tolerances(activation: ActivationCase) -> dict[str, float]:
    # In these networks a gradient's error is less than 20 times the derivative's error.
    return {"rtol": 1e-7, "atol": max(1e-7, 20 * activation.derivative_error.get(torch.float64, 0))}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def my_part() -> slice:
    """Return the part of 8 examples that this process trains on."""
    rank, count = dist.get_rank(), dist.get_world_size()
    return slice(rank * 8 // count, (rank + 1) * 8 // count)


def assert_same_training(
    activation: ActivationCase,
    ours: nn.Module,
    pytorchs: nn.Module,
    part: slice,
    steps: int = 2,
) -> None:
    """Train `ours` on its part of the examples and `pytorchs` on all, and compare the weights."""
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (ours, pytorchs)]
    for _ in range(steps):
        x = torch.randn(8, 6, dtype=torch.float64, device=device())
        for model, optimizer, examples in zip(
            (ours, pytorchs), optimizers, (x[part], x), strict=True
        ):
            optimizer.zero_grad()
            model(examples).square().mean().backward()
            optimizer.step()
    for mine, reference in zip(ours.parameters(), pytorchs.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), reference, **tolerances(activation))
        assert (mine.grad is None) == (reference.grad is None)
        if reference.grad is not None:
            torch.testing.assert_close(whole(mine.grad), reference.grad, **tolerances(activation))


def mlp(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), activation(), nn.Linear(10, 6))


def normalized_mlp(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(6), activation(), *mlp(activation))


def tensor_parallel(name: str) -> None:
    activation = BY_NAME[name]
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    sequence_plan = {
        "0": SequenceParallel(sequence_dim=0),
        "2": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "4": RowwiseParallel(),
    }
    for build, styles, part in ((mlp, plan, slice(8)), (normalized_mlp, sequence_plan, my_part())):
        ours, pytorchs = twins(build, activation)
        inplace = twins(build, activation)[0]
        for index, module in enumerate(inplace):
            if isinstance(module, type(activation.module())):
                inplace[index] = PyTorchsInplace(activation)
        for model in (ours, inplace):
            parallelize_module(model, mesh_of(), styles)
        assert_same_training(activation, ours, pytorchs, part)
        x = torch.randn(8, 6, dtype=torch.float64, device=device())
        with torch.no_grad():
            torch.testing.assert_close(ours(x[part]), pytorchs(x), **tolerances(activation))
        _, communications = collectives(lambda: ours(x[part]).sum().backward())  # noqa: B023
        _, of_pytorch = collectives(lambda: inplace(x[part]).sum().backward())  # noqa: B023
        assert communications == of_pytorch


class PyTorchsInplace(Reference):
    def forward(self, x: Tensor) -> Tensor:
        return pytorchs_inplace(self.activation)(x)


# ---- Data parallelism ----


class WithAnUnusedLayer(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.used = mlp(activation)
        self.unused = mlp(activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def data_parallel(name: str) -> None:
    activation = BY_NAME[name]
    options: list[tuple[Callable[..., nn.Module], dict[str, bool]]] = [
        (normalized_mlp, {}),
        (normalized_mlp, {"gradient_as_bucket_view": True}),
        (normalized_mlp, {"static_graph": True}),
        (WithAnUnusedLayer, {"find_unused_parameters": True}),
    ]
    for build, option in options:
        ours, pytorchs = twins(build, activation)
        assert_same_training(
            activation, DistributedDataParallel(ours, **option), pytorchs, my_part(), steps=3
        )


def sharded_data_parallel(name: str) -> None:
    activation = BY_NAME[name]

    def blocks(make: Callable[[], nn.Module]) -> nn.Module:
        return nn.Sequential(mlp(make), make(), normalized_mlp(make))

    for checkpointed in (False, True):
        ours, pytorchs = twins(blocks, activation)
        if checkpointed:
            ours[0] = checkpoint_wrapper(ours[0])
            ours[2] = checkpoint_wrapper(ours[2])
        for block in (ours[0], ours[2]):
            fully_shard(block, mesh=mesh_of())
        fully_shard(ours, mesh=mesh_of())
        assert_same_training(activation, ours, pytorchs, my_part())


@pytest.mark.parametrize("name", [row.name for row in SAVE_MODES])
@pytest.mark.parametrize(
    "check",
    [dtensor_matches_plain_tensor, tensor_parallel, data_parallel, sharded_data_parallel],
)
def test_processes_compute_what_one_computes(
    check: Callable[[str], None], name: str, processes: Processes
) -> None:
    processes.run(check, name)
