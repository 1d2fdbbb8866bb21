"""Training matches PyTorch's activations: autocast, checkpoints, hooks, threads, frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from _support.assertions import assert_gradient, assert_identical
from _support.cases import ONE_OF_EACH_FUNCTION, ActivationCase, activation_id
from torch import Tensor, nn
from torch.nn.parallel import parallel_apply
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

each_function = pytest.mark.parametrize("activation", ONE_OF_EACH_FUNCTION, ids=activation_id)

Step = Callable[[nn.Module, Tensor], Tensor]  # from a model and its input to a loss


class Reference(nn.Module):
    """PyTorch's activation, out of place."""

    def __init__(self, activation: ActivationCase) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.reference(x)


def network(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), activation(), nn.GroupNorm(2, 8)),
        nn.Sequential(nn.Conv2d(8, 4, 3), activation(), nn.Flatten(), nn.Linear(36, 2)),
    )


def twins(activation: ActivationCase, device: torch.device, build: Any = network) -> Any:
    """Return a network with our activation, and the same network with PyTorch's."""
    ours = build(activation.module).to(device, torch.float64)
    pytorchs = build(lambda: Reference(activation)).to(device, torch.float64)
    pytorchs.load_state_dict(ours.state_dict())
    return ours, pytorchs


def tolerances(activation: ActivationCase) -> dict[str, float]:
    # In these networks a gradient's error is less than 20 times the derivative's error.
    return {"rtol": 1e-7, "atol": max(1e-7, 20 * activation.derivative_error.get(torch.float64, 0))}


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def assert_same_gradients(
    activation: ActivationCase, device: torch.device, step: Step, build: Any = network
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
) -> tuple[list[list[Tensor]], list[float]]:
    """Return the weights and the scale after each step; the third step's loss overflows."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    weights, scales = [], []
    for step, x in enumerate(inputs):
        with torch.autocast(device.type, dtype):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append([p.detach().clone() for p in model.parameters()])
        scales.append(scaler.get_scale())
    return weights, scales


@each_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_and_grad_scaler_match_pytorch(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    ours, pytorchs = (model.float() for model in twins(activation, device))
    before = [p.detach().clone() for p in ours.parameters()]
    inputs = [torch.randn(4, 3, 7, 7, device=device) for _ in range(6)]
    weights, scales = amp_steps(ours, inputs, dtype, device)
    expected, expected_scales = amp_steps(pytorchs, inputs, dtype, device)
    assert scales == expected_scales
    assert scales[2] == scales[1] / 2
    for skipped, same in zip(weights[2], weights[1], strict=True):
        assert_identical(skipped, same)
    assert all(p.isfinite().all() for p in weights[-1])
    if activation.is_exact and device.type == "cpu":  # cuDNN may sum in another order each time
        for mine, reference in zip(weights[-1], expected[-1], strict=True):
            assert_identical(mine, reference)
    # The allowed error, relative to the first step: ten times the derivative's error and eps.
    error = 10 * (activation.derivative_error.get(dtype, 0.0) + torch.finfo(dtype).eps)
    for mine, reference, old in zip(weights[0], expected[0], before, strict=True):
        assert (mine - reference).norm() <= error * (reference - old).norm()


# ---- Steps of a network ----


def nested(m: nn.Module, x: Tensor) -> Tensor:
    def whole(v: Tensor) -> Tensor:
        return checkpoint(m[1], checkpoint(m[0], v, use_reentrant=False), use_reentrant=False)

    return checkpoint(whole, x, use_reentrant=False).square().mean()


def selectively(saves: Callable[[str], bool], model: nn.Module, x: Tensor) -> Tensor:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saves(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


def saves_ours(op: str) -> bool:
    return op.startswith("inplace_ops")


def with_module_hooks(model: nn.Module, x: Tensor) -> Tensor:
    model[0][1].register_forward_hook(lambda module, inputs, output: output * 1.5)
    model[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    model[1].register_full_backward_hook(lambda m, grads, outputs: (grads[0] * 3,))
    return square(model, x)


def penalty(critic: nn.Module, x: Tensor) -> Tensor:
    """Return WGAN-GP's loss: the critic's value and a penalty that pulls its gradient to norm 1."""
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return critic(x).mean() + 10 * (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def replicas_in_threads(model: nn.Module, x: Tensor) -> Tensor:
    inputs = [x * (1 + i) for i in range(4)]
    if x.is_cuda:
        outputs = parallel_apply([model] * 4, inputs)
    else:  # parallel_apply needs an accelerator
        with ThreadPoolExecutor(4) as pool:
            outputs = list(pool.map(model, inputs))
    return torch.stack([output.square().mean() for output in outputs]).sum()


STEPS: dict[str, Step] = {
    "checkpoint_reentrant": lambda m, x: square(m[1], checkpoint(m[0], x, use_reentrant=True)),
    "checkpoint_of_a_part": lambda m, x: square(m[1], checkpoint(m[0], x, use_reentrant=False)),
    "checkpoint_nested": nested,
    "checkpoint_sequential": lambda m, x: (
        checkpoint_sequential(m, 2, x, use_reentrant=False).square().mean()
    ),
    # Whatever the policy says, the ops run again: replaying the value that an op returned would not
    # repeat its write.
    "selective_none": lambda m, x: selectively(lambda op: False, m, x).square().mean(),
    "selective_ours": lambda m, x: selectively(saves_ours, m, x).square().mean(),
    "selective_ours_and_addmm": lambda m, x: (
        selectively(lambda op: saves_ours(op) or "addmm" in op, m, x).square().mean()
    ),
    "module_hooks": with_module_hooks,
    "gradient_penalty": penalty,
    "replicas_in_threads": replicas_in_threads,
}


@each_function
@pytest.mark.parametrize("name", STEPS)
def test_steps_match_pytorch(activation: ActivationCase, name: str, device: torch.device) -> None:
    if name == "gradient_penalty" and not activation.is_twice_differentiable:
        return  # raises, see test_save_derivative_rejects_second_derivative
    assert_same_gradients(activation, device, STEPS[name])


@each_function
def test_selective_checkpoint_of_saved_input_raises(
    activation: ActivationCase, device: torch.device
) -> None:
    ours, _ = twins(activation, device)
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64, device=device)
    for model in (
        ours,
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True)).to(ours[0][0].weight),
    ):
        y = selectively(lambda op: "convolution" in op, model, x)
        with pytest.raises(RuntimeError, match="cached during selective activation checkpoint"):
            y.sum().backward()


# ---- Hooks ----


@each_function
@pytest.mark.parametrize("used", ["output", "input"])
def test_tensor_hooks_and_retained_gradients_match_pytorch(
    activation: ActivationCase, used: str, device: torch.device
) -> None:
    """Hooks stay with the value that they were registered on, as with PyTorch's in-place ops."""
    values = torch.randn(40, dtype=torch.float64, device=device)
    results = []
    for call in (activation.call, activation.torch_inplace):
        seen: dict[str, Tensor] = {}
        leaf = values.clone().requires_grad_()
        x = leaf * 1.5
        x.register_hook(lambda g, seen=seen: seen.update(before=g.clone()))
        x.retain_grad()
        y = call(x)
        y.register_hook(lambda g, seen=seen: seen.update(after=g.clone()))
        y.register_hook(lambda g: g * 2)
        y.retain_grad()
        (y if used == "output" else x).sin().sum().backward()
        results.append({**seen, "retained": y.grad, "of the input": x.grad, "leaf": leaf.grad})
    ours, pytorchs = results
    assert ours.keys() == pytorchs.keys()
    for name, expected in pytorchs.items():
        assert_gradient(activation, ours[name], expected, 3.0, name)


# ---- Parametrizations, threads, modes ----


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@each_function
@pytest.mark.usefixtures("_deterministic")
def test_deterministic_algorithms_repeat_gradients(
    activation: ActivationCase, device: torch.device
) -> None:
    # Deterministic algorithms fill new memory with NaN and the largest integers.
    assert torch.utils.deterministic.fill_uninitialized_memory
    x = torch.randn(3, 1001, device=device)
    gradients = []
    for call in (activation.call, activation.call, activation.reference):
        leaf = x.clone().requires_grad_()
        call(leaf * 1).sum().backward()
        gradients.append(leaf.grad)
    assert_identical(gradients[0], gradients[1])
    assert_gradient(activation, gradients[0], gradients[2], 1.0)


# ---- CUDA only ----

on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)
# PyTorch warns if a parameter's gradient comes from another stream, as it does here.
several_streams = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")


@each_function
@on_cuda
@several_streams
def test_stream_for_each_branch_matches_pytorch(
    activation: ActivationCase, device: torch.device
) -> None:
    """Backward runs on forward's streams, to which the packed bits' memory belongs."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = torch.randn(2**20, device=device)
    gradients = []
    for call in (activation.call, activation.reference):
        leaf = x.clone().requires_grad_()
        current, outputs = torch.cuda.current_stream(), []
        for i, stream in enumerate(streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
                outputs.append(call(leaf * (i + 1)).sum())
        for stream, output in zip(streams, outputs, strict=True):
            current.wait_stream(stream)
            output.record_stream(current)
        torch.stack(outputs).sum().backward()
        gradients.append(leaf.grad)
    torch.cuda.synchronize()
    assert_gradient(activation, gradients[0], gradients[1], 6.0)


# ---- Frameworks ----
