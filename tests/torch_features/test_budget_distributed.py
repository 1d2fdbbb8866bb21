"""Budgets in several processes: candidates, DDP and FSDP2 of models with checkpointed blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _support.processes import Processes, device, mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import inplace_ops
from inplace_ops.conversion.blocks import paths_of_blocks
from inplace_ops.conversion.report import Report
from inplace_ops.conversion.verify import Run
from inplace_ops.conversion.wiring import Conversion, attach
from inplace_ops.recompute.checkpoints import Checkpoint, _Call, modes_of
from inplace_ops.recompute.settings import Settings

D = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(3)])
    return nn.Sequential(nn.Linear(D, D), blocks, nn.Linear(D, 2)).to(device())


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, 8, D, generator=generator).to(device())


def chosen_alike() -> None:
    """Each process measures other peaks and times, and rejects other limits."""
    rank, own, peak = dist.get_rank(), Run.seconds, Run.peak_bytes

    def seconds(run: Run) -> float:
        return own(run) * (1 + rank * (torch.rand(()).item() + 1))

    def peaks(run: Run) -> int:
        return int((peak(run) or 0) * (1 + 0.2 * rank))

    x = torch.randn(4 + rank, 64, D, device=device())
    with mock.patch.object(Run, "seconds", seconds), mock.patch.object(Run, "peak_bytes", peaks):
        table = inplace_ops.analyze(network(), x, memory=2**40)  # alone
        lowest = max(each.peak_bytes or 0 for each in table.candidates)
        everyone: list[int] = [0, 0]
        dist.all_gather_object(everyone, lowest)
        model = network()
        report = inplace_ops.convert(model, x, memory=max(everyone))
        candidates: list[list[tuple[object, ...]]] = [[], []]
        mine = [(c.max_ops, c.peak_bytes, c.seconds, c.is_chosen) for c in report.candidates]
        dist.all_gather_object(candidates, mine)
        assert candidates[0] == candidates[1]
        assert any(is_chosen for *_, is_chosen in mine)
        with pytest.raises(MemoryError):
            inplace_ops.convert(network(), x, memory=1)


def test_processes_choose_alike(processes: Processes) -> None:
    processes.run(chosen_alike)


def failed_together() -> None:
    x = tokens(0)
    own = Run.seconds

    def seconds(run: Run) -> float:
        if dist.get_rank() == 1:
            raise ValueError("the second process fails")
        return own(run)

    with (
        mock.patch.object(Run, "seconds", seconds),
        pytest.raises((ValueError, RuntimeError), match="the second process fails"),
    ):
        inplace_ops.convert(network(), x, memory="1 GiB")


def test_error_in_one_process_is_raised_in_all(processes: Processes) -> None:
    processes.run(failed_together)


def train(model: nn.Module) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), 1e-2), []
    for step in range(3):
        optimizer.zero_grad()
        model(tokens(step)).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        found += [gradient.clone() for gradient in full if gradient is not None]
        optimizer.step()
    return found


def trained(wrap: Callable[[nn.Module], nn.Module]) -> None:
    Settings.MIN_BYTES = 1
    model = network()
    twin = copy.deepcopy(model)
    checkpoints = {
        path: Checkpoint(Settings(64), modes_of(twin.get_submodule(path)))
        for path in paths_of_blocks(twin)
    }
    attach(twin, Conversion(Settings(64), Report(), checkpoints))
    runs = 0
    run_again = _Call._run_again

    def counted(*args: object) -> None:
        nonlocal runs
        runs += 1
        run_again(*args)  # type: ignore[arg-type]

    expected = train(wrap(model))
    with mock.patch.object(_Call, "_run_again", counted):
        actual = train(wrap(twin))
    # Three blocks, three steps. Where FSDP frees parameters inside a block, it runs once.
    assert runs == (0 if wrap is _layers_in_fsdp2 else 9)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


def _in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _whole_in_fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh_of())


def _blocks_in_fsdp2(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("1").children():
        fully_shard(block, mesh=mesh_of())
    return fully_shard(model, mesh=mesh_of())


def _layers_in_fsdp2(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh_of())
    return fully_shard(model, mesh=mesh_of())


@pytest.mark.parametrize("wrap", [_in_ddp, _whole_in_fsdp2, _blocks_in_fsdp2, _layers_in_fsdp2])
def test_wrapped_model_with_checkpoints_matches_pytorch(
    wrap: Callable[[nn.Module], nn.Module], processes: Processes
) -> None:
    """FSDP2 wraps after `convert`, and frees parameters until backward."""
    processes.run(trained, wrap)
