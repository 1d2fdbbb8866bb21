"""Around training: networks with our activations train as with PyTorch's, whatever is around them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from activations import ONE_OF_EACH, Activation, activation_id
from comparison import assert_gradient, assert_identical
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.parallel import parallel_apply
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import inplace_ops
from inplace_ops import _ops

one_of_each = pytest.mark.parametrize("activation", ONE_OF_EACH, ids=activation_id)

Step = Callable[[nn.Module, Tensor], Tensor]  # from a model and its input to a loss


class Reference(nn.Module):
    """PyTorch's activation, out of place."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.reference(x)


def network(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), activation(), nn.GroupNorm(2, 8)),
        nn.Sequential(nn.Conv2d(8, 4, 3), activation(), nn.Flatten(), nn.Linear(36, 2)),
    )


def twins(activation: Activation, device: torch.device, build: Any = network) -> Any:
    """A network with our activation, and the same with PyTorch's."""
    ours = build(activation.module).to(device, torch.float64)
    pytorchs = build(lambda: Reference(activation)).to(device, torch.float64)
    pytorchs.load_state_dict(ours.state_dict())
    return ours, pytorchs


def tolerances(activation: Activation) -> dict[str, float]:
    # The networks here change a derivative's error to less than 20 times that in a gradient.
    return {"rtol": 1e-7, "atol": max(1e-7, 20 * activation.derivative_error.get(torch.float64, 0))}


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def assert_same_gradients(
    activation: Activation, device: torch.device, step: Step, build: Any = network
) -> None:
    ours, pytorchs = twins(activation, device, build)
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64, device=device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, leaf in zip((ours, pytorchs), inputs, strict=True):
        step(model, leaf).backward()
    pairs = [*zip(ours.parameters(), pytorchs.parameters(), strict=True), inputs]
    for mine, reference in pairs:
        assert reference.grad.any()
        torch.testing.assert_close(mine.grad, reference.grad, **tolerances(activation))


# ---- Mixed precision ----


def amp_steps(
    model: nn.Module, inputs: list[Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[list[float], list[float]]:
    """Losses and scales; the third step's loss overflows."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    losses, scales = [], []
    for step, x in enumerate(inputs):
        with torch.autocast(device.type, dtype):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


@one_of_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_and_grad_scaler(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    ours, pytorchs = (model.float() for model in twins(activation, device))
    inputs = [torch.randn(4, 3, 7, 7, device=device) for _ in range(6)]
    losses, scales = amp_steps(ours, inputs, dtype, device)
    expected, expected_scales = amp_steps(pytorchs, inputs, dtype, device)
    assert scales == expected_scales
    assert scales[2] == scales[1] / 2  # the step of infinite gradients was skipped
    error = activation.derivative_error.get(dtype, 0.0)
    torch.testing.assert_close(losses, expected, rtol=1e-3 + error, atol=1e-4)
    for mine, reference in zip(ours.parameters(), pytorchs.parameters(), strict=True):
        assert mine.isfinite().all()
        if activation.is_exact:
            assert_identical(mine, reference)


@one_of_each
def test_infinite_gradients_reach_the_weights_as_pytorchs(
    activation: Activation, device: torch.device
) -> None:
    ours, pytorchs = twins(activation, device, lambda make: nn.Sequential(nn.Linear(6, 5), make()))
    x = torch.randn(4, 6, dtype=torch.float64, device=device)
    incoming = torch.randn(4, 5, dtype=torch.float64, device=device)
    incoming[0, 0], incoming[1, 1], incoming[2, 2] = float("inf"), float("-inf"), float("nan")
    for model in (ours, pytorchs):
        model(x).backward(incoming)
    for mine, reference in zip(ours.parameters(), pytorchs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, equal_nan=True)


# ---- Recomputation ----


def policy(saved: bool, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_ours = op in _ops.FORWARD_OPS
    return CheckpointPolicy.MUST_SAVE if saved == is_ours else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, Step] = {
    "reentrant": lambda m, x: m[1](checkpoint(m[0], x, use_reentrant=True)).square().mean(),
    "not_reentrant": lambda m, x: m[1](checkpoint(m[0], x, use_reentrant=False)).square().mean(),
    "not_reentrant_all": lambda m, x: checkpoint(m, x, use_reentrant=False).square().mean(),
    "nested": lambda m, x: checkpoint(
        lambda v: checkpoint(m[1], checkpoint(m[0], v, use_reentrant=False), use_reentrant=False),
        x,
        use_reentrant=False,
    )
    .square()
    .mean(),
    "sequential": lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False).square().mean(),
}


@one_of_each
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(activation: Activation, name: str, device: torch.device) -> None:
    assert_same_gradients(activation, device, CHECKPOINTS[name])
