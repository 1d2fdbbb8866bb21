"""What convert and analyze leave as it was."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from behaviour import differs, twin
from patterns import WIDTH, Network
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inplace_ops


def test_attributes_that_forward_sets() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        if m.cache is None:
            m.cache = m.first.weight.exp()
        m.last, m.new = m.act, x
        return m.second(m.act(m.first(x)) @ m.cache)

    model = Network(compute)
    model.cache = None
    original, buffers = twin(model), model._buffers
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    inplace_ops.convert(model, x)
    assert model._buffers is buffers
    assert model.cache is None
    assert not hasattr(model, "last")
    assert not hasattr(model, "new")
    assert not differs(model, original, x)


class HooksItself(nn.Module):
    """As models of transformers, which register hooks in their first run and note that they did."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = nn.SiLU()
        self.hooked = False
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.layer.register_forward_hook(lambda module, inputs, output: self.seen.append(x))
            self.hooked = True
        return self.layer(self.act(self.layer(x)))


@pytest.mark.parametrize("function", [inplace_ops.convert, inplace_ops.analyze])
def test_hooks_that_forward_registers(function: Callable[..., Any]) -> None:
    model = HooksItself()
    function(model, torch.randn(2, 4))
    assert not model.hooked
    model.seen.clear()
    model(torch.randn(2, 4))
    assert len(model.seen) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_child() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.SiLU()))
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4), scripted)
    first, *_ = inplace_ops.convert(model, torch.randn(2, 4)).sites
    assert (first.name, first.converted) == ("1", True)
    assert scripted.training


@pytest.mark.parametrize(
    "buffer",
    [torch.eye(3).to_sparse(), torch.tensor([torch.nan]).expand(3), torch.ones(3, device="meta")],
    ids=["sparse", "expanded NaN", "meta"],
)
def test_kinds_of_buffers(buffer: Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    model.register_buffer("buffer", buffer)
    assert inplace_ops.convert(model, torch.randn(2, 4)).sites[0].converted


def test_buffers_that_forward_resizes_and_flags_that_it_sets() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        m.observed.resize_(WIDTH).copy_(x.amax(0))  # as the observers of torch.ao.quantization
        m.first.requires_grad_(False)
        return m.second(m.act(m.first(x)))

    model = Network(compute)
    model.register_buffer("observed", torch.empty(0))
    inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64))
    assert model.observed.shape == (0,)
    assert all(p.requires_grad for p in model.first.parameters())


class Merged(nn.Linear):
    """Adds to its weight for eval mode and takes it away again, as some do with LoRA's."""

    merged = False

    def train(self, mode: bool = True) -> Merged:
        if self.merged is mode:
            self.merged = not mode
            self.weight.data += 1 if self.merged else -1
        return super().train(mode)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_train_method_that_writes_to_parameters(training: bool) -> None:
    model = nn.Sequential(Merged(4, 4), nn.SiLU(), Merged(4, 4)).train(training)
    before = copy.deepcopy(model.state_dict())
    inplace_ops.convert(model, torch.randn(2, 4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(layer.merged is not training for layer in (model[0], model[2]))


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.SiLU(), nn.Linear(4, 4)
        )
        self.register_buffer("steps", torch.zeros(()))
        self.error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        self.layers[1].train(not self.layers[1].training)
        random.random()
        np.random.rand()
        x += 1
        y = self.layers(x)
        if self.error is not None:
            raise self.error
        return y


def test_parameters_that_forward_writes_to() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.frozen.mul_(2)
        return m.second(m.act(m.first(x)))

    model = Network(compute)
    with pytest.warns(UserWarning, match="wrote to its parameter `frozen`"):
        inplace_ops.analyze(model, torch.randn(4, WIDTH, dtype=torch.float64))


def test_a_backward_inside_forward() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        m.second(m.first(x)).sum().backward()
        return m.second(m.act(m.first(x)))

    model = Network(compute)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model(x)
    gradients = [p.grad for p in model.parameters()]
    before = [g.clone() for g in gradients if g is not None]
    inplace_ops.convert(model, x)
    assert [id(p.grad) for p in model.parameters()] == [id(g) for g in gradients]
    torch.testing.assert_close([g for g in gradients if g is not None], before, rtol=0, atol=0)


def test_a_patched_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    function = torch.utils.checkpoint.CheckpointFunction
    mine = staticmethod(lambda run, preserve, *args: run(*args))
    monkeypatch.setattr(function, "apply", mine)
    inplace_ops.convert(nn.Sequential(nn.Linear(4, 4), nn.SiLU()), torch.randn(2, 4))
    assert vars(function)["apply"] is mine


@pytest.mark.parametrize("is_reentrant", [False, True], ids=["", "reentrant"])
def test_a_reentrant_checkpoint_in_another(
    is_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With derivatives taken by a thread of autograd's own, as on a GPU: there it runs again."""

    def compute(m: Network, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return m.second(m.act(m.first(h)))

        def outer(h: Tensor) -> Tensor:
            return m.second(checkpoint(inner, h, use_reentrant=True))

        return checkpoint(outer, m.first(x), use_reentrant=is_reentrant)

    grad = torch.autograd.grad

    def grad_elsewhere(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            return other.submit(grad, *args, **kwargs).result()

    model = Network(compute, nn.SiLU)
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad_elsewhere)
        report = inplace_ops.convert(model, x)
    assert all(site.converted for site in report.sites)
    assert not differs(model, original, x)


def state(model: Stateful, x: Tensor) -> list[Any]:
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        [p.grad.clone() if p.grad is not None else None for p in model.parameters()],
        [id(p.grad) for p in model.parameters()],
        [id(b) for b in model.buffers()],
        [module.training for module in model.modules() if not isinstance(module, nn.SiLU)],
        x.clone(),
        torch.get_rng_state(),
        random.getstate(),
        pickle.dumps(np.random.get_state()),
        torch.is_grad_enabled(),
    ]


def assert_same_state(actual: list[Any], expected: list[Any]) -> None:
    assert actual[2:5] == expected[2:5]
    torch.testing.assert_close(
        actual[:2] + actual[5:7], expected[:2] + expected[5:7], rtol=0, atol=0
    )
    assert actual[7:] == expected[7:]


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("function", [inplace_ops.convert, inplace_ops.analyze])
def test_everything_else_is_left_as_it_was(function: Callable[..., Any], fails: bool) -> None:
    model = Stateful()
    x = torch.randn(8, 4)
    model(x).sum().backward()
    modules = list(model.modules())
    before = state(model, x)
    if fails:
        model.error = LookupError("the model's own")
        with pytest.raises(LookupError) as raised:
            function(model, x)
        assert raised.value is model.error
    else:
        function(model, x)
    assert_same_state(state(model, x), before)
    if fails or function is inplace_ops.analyze:
        assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)


def test_a_failing_model_stays_converted() -> None:
    model = Stateful()
    inplace_ops.convert(model, torch.randn(8, 4), verify=False)
    model.error = LookupError()
    converted = model.layers[3]
    with pytest.raises(LookupError):
        inplace_ops.convert(model, torch.randn(8, 4))
    assert model.layers[3] is converted


def test_hooks_and_attributes_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)).eval()
    model[1].note = "mine"
    means = []
    handle = model[1].register_forward_hook(lambda m, inputs, output: means.append(output.mean()))
    assert inplace_ops.convert(model, torch.randn(2, 4)).sites[0].converted
    assert isinstance(model[1], inplace_ops.SiLU)
    assert (model[1].note, model[1].training, repr(model[1])) == (
        "mine",
        False,
        "SiLU(inplace=True)",
    )
    means.clear()
    model(torch.randn(2, 4))
    assert len(means) == 1
    handle.remove()
    model(torch.randn(2, 4))
    assert len(means) == 1


def test_threads_that_convert_at_once() -> None:
    """One after the other: the runs take hooks that are everybody's, and the random state."""
    running: list[int] = []
    at_once: list[int] = []

    def compute(m: Network, x: Tensor) -> Tensor:
        running.append(1)
        time.sleep(0.002)
        at_once.append(len(running))
        running.pop()
        return m.second(m.act(m.first(x)))

    x = torch.randn(4, WIDTH, dtype=torch.float64)
    reports: list[inplace_ops.Report] = []
    done = threading.Event()

    def convert() -> None:
        model = Network(compute, nn.SiLU)
        for function in (inplace_ops.convert, inplace_ops.analyze):
            reports.append(function(model, x))

    def train() -> None:  # what runs beside is not part of any of them
        trained = Network(lambda m, x: m.second(m.act(m.first(x))), nn.SiLU)
        while not done.is_set():
            checkpoint(trained, x.clone().requires_grad_(), use_reentrant=True).sum().backward()

    converting = [threading.Thread(target=convert) for _ in range(3)]
    training = threading.Thread(target=train)
    for thread in (training, *converting):
        thread.start()
    for thread in converting:
        thread.join()
    done.set()
    training.join()
    assert len(reports) == 6
    assert all(report == reports[0] for report in reports)
    assert set(at_once) == {1}


def test_another_thread_inside_of_a_module() -> None:
    """What it calls meanwhile is not taken for the model's."""
    inside, may_leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            may_leave.wait(60)
            return x

    def twice(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.second(m.act(m.norm(m.act(h) + h)))

    def compute(m: Network, x: Tensor, with_thread: bool) -> Tensor:
        if not with_thread:
            return twice(m, x)
        inside.clear()
        may_leave.clear()
        thread = threading.Thread(target=Waits(), args=(x,))
        thread.start()
        inside.wait(60)
        y = twice(m, x)
        may_leave.set()
        thread.join()
        return y

    reports = []
    for with_thread in (False, True):
        model = Network(lambda m, x, w=with_thread: compute(m, x, w), nn.SiLU)
        model.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        reports.append(inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64)))
    assert reports[0] == reports[1]
    assert [s.converted for s in reports[0].sites] == [False, True]
    assert reports[0].dropped[0].readers == ("second.addmm",)
