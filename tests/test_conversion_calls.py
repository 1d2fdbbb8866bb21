"""A module that is called several times in a forward, decided call by call."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviour import assert_same_behaviour, behaviour, differs, twin
from conversions import activations
from patterns import WIDTH, Network
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.conversion import calls


class Block(nn.Module):
    """As a diffusion model's: one activation for the hidden states and for what all blocks read."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(WIDTH, 8)
        self.act = activation()

    def forward(self, x: Tensor, time: Tensor | None) -> Tensor:
        h = self.conv1(self.act(self.norm1(x)))
        if time is not None:
            h = h + self.time(self.act(time))[:, :, None, None]
        return x + self.conv2(self.act(self.norm2(h)))


class Denoiser(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(activation) for _ in range(2))
        self.has_time, self.checkpoints = True, False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(x.flatten(1)[:, :WIDTH]) if self.has_time else None
        h = self.stem(x)
        for block in self.blocks:
            if self.checkpoints:
                h = checkpoint(block, h, time, use_reentrant=False)
            else:
                h = block(h, time)
        return h if time is None else h + time.mean()


def example() -> Tensor:
    return torch.randn(2, 3, 6, 6, dtype=torch.float64)


@activations
def test_safe_calls_beside_an_unsafe_one(activation: type[nn.Module]) -> None:
    model, x = Denoiser(activation), example()
    original = twin(model)
    before = saved_bytes(original, x)
    report = inplace_ops.convert(model, x)
    first = Block.forward.__code__.co_firstlineno
    lines = [f"test_conversion_calls.py:{first + i}" for i in (1, 3, 4)]
    decided = [(s.name, s.call, s.converted, s.calls) for s in report.sites]
    assert decided == [
        (f"blocks.{i}.act", line, line != lines[1], 1) for i in range(2) for line in lines
    ]
    assert report.sites[1].reason == ("input is read again by `blocks.1.act` (call 2 of 3, 2 x 6)")
    assert f"blocks.0.act at {lines[1]}" in str(report)
    assert isinstance(model.blocks[0].act, activation)
    assert f"in place at {lines[0]}, {lines[2]}" in repr(model.blocks[0].act)
    assert saved_bytes(model, x) == report.model_bytes_after < 0.75 * before
    for mode in (True, False):
        model.train(mode)
        original.train(mode)
        for _ in range(2):
            x = example()
            assert_same_behaviour(behaviour(model, x), behaviour(original, x))
    inplace_ops.revert(model)
    assert saved_bytes(model, x) == before
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.act = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(self.act(self.first(x)))
            return self.second(self.act(h)) + h

    model, x = Two(), torch.randn(4, WIDTH)
    expected = model(x)
    assert [s.converted for s in inplace_ops.convert(model, x).sites] == [True, False]
    torch.testing.assert_close(torch.jit.script(model)(x), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate: Callable[[nn.Module], Any]) -> None:
    model, x = Denoiser(), example()
    original = twin(model)
    report = inplace_ops.convert(model, x)
    copied = duplicate(model)
    assert saved_bytes(copied, x) == report.model_bytes_after
    assert_same_behaviour(behaviour(copied, x), behaviour(original, x))
    inplace_ops.revert(copied)
    assert type(copied.blocks[0].act) is nn.SiLU
    assert_same_behaviour(behaviour(copied, x), behaviour(original, x))
    assert saved_bytes(model, x) == report.model_bytes_after


def test_where_the_producer_is_the_same() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.act(h) + h
        return m.second(m.act(m.second(y)))

    for activation in (nn.ReLU, nn.LeakyReLU, nn.SiLU):
        model = Network(compute, activation)
        original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
        first, second = inplace_ops.convert(model, x).sites
        assert (first.converted, second.converted) == (False, True)
        assert first.reason == "input is read again by `add` (call 1 of 2, 4 x 6)"
        assert not differs(model, original, x)


def test_calls_that_the_example_did_not_show() -> None:
    """They run as the original: its input stays what it was."""
    model, x = Denoiser(), example()
    original = twin(model)
    inplace_ops.convert(model, x)
    for changed in (model, original):
        changed.has_time = False  # the second call is then what was the third
    assert not differs(model, original, x)
    act, norm = model.blocks[0].act, model.blocks[0].norm1
    for h in (model.stem(x), norm(model.stem(x))):  # outside of the block's forward
        values = h.detach().clone()
        assert act(h) is not h
        torch.testing.assert_close(h.detach(), values, rtol=0, atol=0)


def test_one_more_call() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.act(h) + h
        if m.more:
            y = m.act(y) + y
        return m.second(m.act(m.second(y)))

    model = Network(compute, nn.SiLU)
    model.more = False
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
    assert [s.converted for s in inplace_ops.convert(model, x).sites] == [False, True]
    model.more = original.more = True
    in_place: list[bool] = []
    model.act.register_forward_hook(
        lambda m, args, y: in_place.append(y.data_ptr() == args[0].data_ptr())
    )
    assert not differs(model, original, x)
    assert in_place == [False, False, True]


def test_a_loop_is_one_place_in_the_code() -> None:
    """The last call alone is safe, and in a longer loop it is no longer the last."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
            self.act = nn.SiLU()

        def forward(self, xs: Tensor) -> Tensor:
            before, result = None, xs.new_zeros(())
            for x in xs.unbind(1):
                h = self.cell(x)
                if before is not None:
                    result = result + before * 0.5
                result = result + self.out(self.act(h))
                before = h
            return result

    model = Loop()
    original = twin(model)
    (site,) = inplace_ops.convert(model, torch.randn(4, 3, WIDTH, dtype=torch.float64)).sites
    assert (site.converted, site.calls) == (False, 3)
    assert not differs(model, original, torch.randn(4, 5, WIDTH, dtype=torch.float64))


def test_a_forward_that_was_interrupted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
            self.act = nn.SiLU()

        def head(self, h: Tensor) -> Tensor:
            y = self.second(h)
            return self.act(y) + y

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(self.act(self.first(x))))

    model, x = Two(), torch.randn(4, WIDTH, dtype=torch.float64)
    original = twin(model)
    assert [s.converted for s in inplace_ops.convert(model, x).sites] == [True, False]
    with pytest.raises(RuntimeError):
        model(torch.randn(4, WIDTH + 1).double())
    torch.testing.assert_close(model.head(x), original.head(x))
    model.forward = torch.compile(model.forward, backend="eager")
    torch.testing.assert_close(model(x), original(x))


def test_without_a_gradient() -> None:
    model, x = Denoiser(), example()
    original = twin(model)
    inplace_ops.convert(model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), original(x))


@pytest.mark.parametrize("converted_before", [True, False])
def test_checkpoints_of_the_caller(converted_before: bool) -> None:
    model, x = Denoiser(), example()
    original = twin(model)
    if converted_before:
        inplace_ops.convert(model, x)
    model.checkpoints = original.checkpoints = True
    if not converted_before:
        report = inplace_ops.convert(model, x)
        assert [s.converted for s in report.sites] == [True, False, True] * 2
    assert not differs(model, original, x)


def test_a_checkpoint_inside_of_the_caller() -> None:
    """A part of its forward runs again alone, called by the checkpoint."""

    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.act(h) + h
        return checkpoint(lambda y: m.second(m.act(m.second(y))), y, use_reentrant=False)

    model = Network(compute, nn.SiLU)
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
    assert [s.converted for s in inplace_ops.convert(model, x).sites] == [False, True]
    assert not differs(model, original, x)


def test_two_callers() -> None:

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Network(lambda m, x: m.second(m.act(m.first(x))), nn.SiLU)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            y = self.inner.act(h) + h
            return self.inner.second(self.inner.act(self.inner.second(y)))

    model, x = Two(), torch.randn(4, WIDTH, dtype=torch.float64)
    original = twin(model)
    assert [s.converted for s in inplace_ops.convert(model, x).sites] == [True, False, True]
    assert not differs(model, original, x)


def test_a_call_in_the_other_mode_alone() -> None:
    """It runs as the original there, and keeps its input."""

    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.act(h) + h
        h = m.second(m.act(m.second(y)))
        z = 0 if m.training else m.act(h).sum()
        return m.second(m.other(h)) + z

    model = Network(compute, nn.SiLU)
    model.other = nn.ReLU()
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
    report = inplace_ops.convert(model, x)
    assert [s.converted for s in report.sites] == [False, True, False]
    assert report.sites[2].reason.endswith("in the other mode, train or eval")
    for changed in (model, original):
        changed.eval()
    assert not differs(model, original, x)


def test_a_block_that_is_called_twice() -> None:
    """Its lines are the same in both: decided together."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Network(
                lambda m, x: m.second(m.act(m.second(m.act(h := m.first(x)) + h))), nn.SiLU
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    model = Twice()
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
    first, second = inplace_ops.convert(model, x).sites
    assert [(s.converted, s.calls) for s in (first, second)] == [(False, 2), (True, 2)]
    assert not differs(model, original, x)


def test_threads_that_share_a_model() -> None:

    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.act(h) + h
        return m.second(m.act(m.second(y)))

    model = Network(compute, nn.SiLU)
    original, x = twin(model), torch.randn(4, WIDTH, dtype=torch.float64)
    assert [s.converted for s in inplace_ops.convert(model, x).sites] == [False, True]

    def gradients(model: nn.Module) -> tuple[Tensor, ...]:
        weights = [p for p in model.parameters() if p.requires_grad]
        return torch.autograd.grad(model(x).square().sum(), weights)

    expected = gradients(original)
    barrier = threading.Barrier(2)

    def wait(*_: Any) -> None:
        barrier.wait(60)

    model.first.register_forward_hook(wait)  # both have begun, and neither has called it
    model.act.register_forward_hook(wait)
    results: list[Any] = []

    def train() -> None:
        for _ in range(3):
            results.append(gradients(model))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_compiled() -> None:
    torch._dynamo.reset()
    model, x = Denoiser(), example()
    original = twin(model)
    inplace_ops.convert(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(original(x).square().sum(), list(original.parameters()))
    torch.testing.assert_close(actual, expected)
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), original(x))


@pytest.mark.parametrize("optimize", ["memory", "speed", "exact"])
@pytest.mark.parametrize("bits", [None, 1])
def test_what_each_call_keeps(optimize: str, bits: int | None) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.act(h) + h
        return m.second(m.act(m.second(y))) + m.act(m.second(y)) * 0.5

    x = torch.randn(4, WIDTH, dtype=torch.float32)
    saves = {}
    for activation in (nn.ReLU, nn.SiLU):
        model = Network(compute, activation).float()
        original = twin(model)
        sites = inplace_ops.convert(model, x, optimize=optimize, bits=bits).sites
        saves[activation] = [s.save for s in sites]
        assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-3, atol=1e-3)
    assert saves[nn.ReLU] == [None, "mask" if optimize == "speed" else "output", "mask"]
    assert saves[nn.SiLU] == ([None] if optimize == "exact" else [None, "output", "derivative"])


def test_verification_finds_a_wrong_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def always(self: calls.CallByCall) -> nn.Module:
        return next(iter(self.in_place.values())).module

    monkeypatch.setattr(calls.CallByCall, "chosen", always)
    with pytest.raises(inplace_ops.VerificationError):
        inplace_ops.convert(Denoiser(), example())
