"""What convert puts in place, what is then kept, and how many bytes that are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviour import assert_same_behaviour, behaviour, differs, twin
from conversions import Convolutions, activations, images, site
from patterns import WIDTH, Network
from torch import Tensor, nn

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.conversion import rules


@activations
def test_one_module_in_many_places_is_decided_place_by_place(
    activation: type[nn.Module],
) -> None:
    model = Convolutions(activation).double()
    original, shared = twin(model), model.preactivation
    report = inplace_ops.convert(model, images().double())
    assert [(s.name, s.converted) for s in report.sites] == [
        ("preactivation", False),
        ("stem.2", True),
        ("block.2", True),
        ("head.2", True),
    ]
    assert model.preactivation is shared
    assert model.stem[2] is not model.block[2]
    assert isinstance(model.stem[2], activation)
    assert site(report, "preactivation").reason == "input is read again by `add`"
    x = images().double()
    assert_same_behaviour(behaviour(model, x), behaviour(original, x))


@activations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 1, 8])
@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm2d])
def test_bytes_are_those_that_autograd_holds(
    norm: type[nn.Module], activation: type[nn.Module], dtype: torch.dtype, bits: int | None
) -> None:
    # Statistics in 16 bits would not do.
    model, in_place = (
        Convolutions(act, norm).to(dtype).apply(_norms_in_float32)
        for act in (activation, _in_place(activation))
    )
    x = images().to(dtype)
    # PyTorch's best: LeakyReLU keeps its input out of place and its output in place.
    before = saved_bytes(model, x)
    best = min(before, saved_bytes(in_place, x))
    if activation is not nn.LeakyReLU:
        assert saved_bytes(model, x) == best
    report = inplace_ops.convert(model, x, bits=bits, verify=False)
    dropped = {d.name: d.bytes_before - d.bytes_after for d in report.dropped}
    assert bool(dropped) is (norm is nn.BatchNorm2d)
    for s in report.sites:
        assert s.bytes_after <= s.bytes_before + dropped.get(s.name, 0), s
        assert (s.bytes_after == s.bytes_before) or s.converted
    after = saved_bytes(model, x)
    assert (report.model_bytes_before, report.model_bytes_after) == (before, after)
    if activation is nn.LeakyReLU:
        assert after <= best
    else:
        assert best - after == report.bytes_before - report.bytes_after + sum(dropped.values())


def _norms_in_float32(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm2d):
        module.float()


def _in_place(activation: type[nn.Module]) -> Callable[[], nn.Module]:
    # The shared module's place before the addition cannot be in place.
    return lambda: activation(inplace=activation is nn.LeakyReLU)


def test_what_is_kept_where() -> None:
    report = inplace_ops.convert(Convolutions(nn.SiLU, nn.Identity), images())
    assert site(report, "stem.2").save == "output"
    assert "kept by `block.0.convolution`" in site(report, "stem.2").reason
    assert site(report, "block.2").save == "derivative"
    assert site(report, "head.2").save == "output"
    report = inplace_ops.convert(Convolutions(nn.ReLU, nn.Identity), images())
    assert [s.save for s in report.sites] == [None, "output", "mask", "output"]
    elements = 2 * 8 * 8 * 8
    assert site(report, "stem.2").bytes_before == site(report, "stem.2").bytes_after == 0
    assert site(report, "block.2").bytes_before == 4 * elements
    assert site(report, "block.2").bytes_after == elements / 8


def test_optimize() -> None:
    x = images()
    speed = inplace_ops.convert(Convolutions(nn.ReLU), x, optimize="speed")
    assert [s.save for s in speed.sites] == [None, "mask", "mask", "mask"]
    exact = inplace_ops.convert(Convolutions(nn.ReLU, nn.Identity), x, optimize="exact")
    assert [s.save for s in exact.sites] == [None, "output", "mask", "output"]
    exact = inplace_ops.convert(Convolutions(nn.SiLU, nn.Identity), x, optimize="exact")
    assert not any(s.converted for s in exact.sites)
    assert "lossy" in site(exact, "stem.2").reason
    for bits, saves in ((None, [None, "output", None, "output"]), (1, [None] * 4)):
        model = Convolutions(nn.SiLU, nn.Identity).bfloat16()
        exact = inplace_ops.convert(model, x.bfloat16(), optimize="exact", bits=bits)
        assert [s.save for s in exact.sites] == saves
    with pytest.raises(ValueError, match="optimize must be"):
        inplace_ops.convert(Convolutions(nn.ReLU), x, optimize="size")
    with pytest.raises(ValueError, match="bits must be"):
        inplace_ops.convert(Convolutions(nn.SiLU), x, bits=16)


def test_negative_slope_takes_the_mask() -> None:
    model = Convolutions(lambda: nn.LeakyReLU(-0.5), nn.Identity)
    report = inplace_ops.convert(model, images())
    assert [s.save for s in report.sites] == [None, "mask", "mask", "mask"]


def _unused_head(m: Network, x: Tensor) -> Any:
    """A layer keeps the output, which is then written to: right while its result is not used."""
    y = m.act(m.first(x))
    m.kept.append(m.second(y))
    y += 1
    return y.sum()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_an_output_that_is_written_to_is_not_kept(
    activation: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    # ReLU out of place keeps its output: PyTorch's own fails here, and ours does not.
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model = Network(_unused_head, activation)
    original = twin(model)
    (decision,) = inplace_ops.convert(model, x, verify=False).sites
    assert decision.save in ("mask", "derivative")
    assert "written to by `add_`" in decision.reason
    if activation is nn.SiLU:
        assert not differs(model, original, x)
    behaviour(model, x)
    monkeypatch.setattr(rules, "output_is_not_written", lambda call, run: None)
    (decision,) = inplace_ops.convert(model, x, verify=False).sites
    assert decision.save == "output"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        behaviour(model, x)


def test_what_pytorch_cannot_run() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        y = m.act(m.first(x))
        y += x  # PyTorch's ReLU kept y
        return m.second(y)

    model = Network(compute)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        inplace_ops.convert(model, x)
    assert raised.type is RuntimeError  # the original's own error
    (decision,) = inplace_ops.convert(model, x, verify=False).sites
    assert decision.save == "mask"
    actual = behaviour(model, x)
    model.compute = lambda m, x: m.second(F.relu(m.first(x)) + x)
    assert_same_behaviour(actual, behaviour(model, x))


def test_autocast() -> None:
    # The layer keeps a 16-bit copy: the float32 output is not kept by anything else.
    model = nn.Sequential(nn.Softsign(), nn.SiLU(), nn.Linear(8, 8))
    x = torch.randn(16, 8, requires_grad=True)
    (plain,) = inplace_ops.convert(model, x).sites
    inplace_ops.revert(model)
    with torch.autocast("cpu", torch.bfloat16):
        before = saved_bytes(model, x)
        (cast,) = inplace_ops.convert(model, x).sites
        assert before - saved_bytes(model, x) == cast.bytes_before - cast.bytes_after > 0
    assert (plain.save, cast.save) == ("output", "derivative")


def test_training_goes_on_under_the_same_autocast() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
            self.act1, self.act2 = nn.ReLU(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act1(self.first(x))
            with torch.autocast("cpu", enabled=False):
                x = self.act2(self.second(x.float()))
            return self.third(x)

    model = Mixed()
    original = twin(model)
    x = torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        report = inplace_ops.convert(model, x)
        actual, expected = behaviour(model, x), behaviour(original, x)
    assert [s.save for s in report.sites] == ["mask", "mask"]  # each consumer has a cast of its own
    assert_same_behaviour(actual, expected, rtol=0, atol=0)


def test_hooks_that_move_what_is_saved() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return m.second(m.act(m.first(x)))

    model = Network(compute, nn.SiLU)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    original = twin(model)
    (decision,) = inplace_ops.convert(model, x).sites
    assert decision.save == "derivative"  # the layer's copy would be another one
    assert not differs(model, original, x)


def test_a_slice_keeps_the_whole() -> None:
    def discarded(m: Network, x: Tensor) -> Tensor:
        return m.act(m.first(x)[:1]).sum()

    def kept(m: Network, x: Tensor) -> Tensor:
        return F.linear(m.act(m.first(x)[:1]), m.weight)

    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for compute, reason in (
        (discarded, "nothing else"),
        (kept, "would keep 144 bytes instead of 0"),
    ):
        model = Network(compute)
        model.weight = nn.Parameter(torch.randn(1, WIDTH).double())
        (decision,) = inplace_ops.convert(model, x).sites
        assert reason in decision.reason
        assert decision.converted is (compute is discarded)


def test_without_a_gradient_it_takes_what_is_free_with_one() -> None:
    model = Convolutions(nn.SiLU, nn.Identity).requires_grad_(False)
    report = inplace_ops.convert(model, images())
    assert [s.bytes_before for s in report.sites] == [0, 0, 0, 0]
    assert site(report, "block.2").save == "derivative"
    model.stem.requires_grad_(True)
    trained = [s.save for s in inplace_ops.convert(model, images()).sites]
    model.stem.requires_grad_(False)
    model.block[0].requires_grad_(True)  # it keeps the output of the stem, which needs no gradient
    frozen = [s.save for s in inplace_ops.convert(model, images()).sites]
    assert (trained[1], frozen[1]) == ("output", "output")


def test_without_grad_the_decisions_are_those_with_grad() -> None:
    model = Network(lambda m, x: m.second(m.act(m.first(x).exp())))
    with torch.no_grad():
        (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH).double()).sites
    assert decision.reason == "input is saved for backward by `exp`"


# Activations that follow upon each other, and modules that are left in place.


def test_chain() -> None:
    x = torch.randn(4, WIDTH, dtype=torch.float64)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
            self.relu, self.leaky, self.silu = nn.ReLU(), nn.LeakyReLU(), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(
                self.silu(self.leaky(self.relu(self.first(x)) + 0).view(-1)).view(4, -1)
            )

    model = Chain()
    original = twin(model)
    report = inplace_ops.convert(model, x)
    assert [(s.name, s.save) for s in report.sites] == [
        ("relu", "mask"),
        ("leaky", "mask"),
        ("silu", "output"),
    ]
    assert "written to by `silu`" in site(report, "leaky").reason
    assert not differs(model, original, x)


def test_relu_that_is_left_keeps_its_output() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.left(h)
        return m.second(m.act(y)) + h

    model = Network(compute)
    model.left = nn.ReLU()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    report = inplace_ops.convert(model, x)
    assert site(report, "left").reason == "input is read again by `add`"
    assert site(report, "act").reason == "input is saved for backward by `left`"


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_module_that_is_left_in_place_makes_input_and_output_one(
    activation: type[nn.Module],
) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.left(h)
        z = m.act(h)  # as h is y, in place this changes y
        return m.second(z * 1) + y

    model = Network(compute, activation)
    model.left = nn.ReLU(inplace=True)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    original = twin(model)
    report = inplace_ops.convert(model, x)
    assert not site(report, "act").converted
    assert not differs(model, original, x)


# Both modes, train and eval.


def test_an_output_that_is_written_to_in_another_mode_only() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.SiLU(), nn.Dropout(inplace=True), nn.Linear(4, 4)
    ).eval()
    (decision,) = inplace_ops.convert(model, torch.randn(2, 4)).sites
    assert decision.save == "derivative"
    model.train()
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_what_is_safe_in_one_mode_only(training: bool) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.second(m.act(m.dropout(h) if m.swap else h * 1)) + h

    for swap in (False, True):
        model = Network(compute)
        model.dropout, model.swap = nn.Dropout(), swap
        model.train(training)
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        (decision,) = inplace_ops.convert(model, x).sites
        assert decision.converted is not swap
        assert model.training is training
        original = Network(compute)
        original.dropout, original.swap = nn.Dropout(), swap
        original.load_state_dict(model.state_dict())
        model.eval()
        original.eval()
        assert not differs(model, original, x)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_dropout_that_is_in_train_mode_alone(training: bool) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.second(m.act(m.dropout(h))) + h

    model = Network(compute)
    model.dropout = nn.Dropout()
    model.train(training)
    model.dropout.train()
    (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites
    assert decision.reason == "input is read again by `add` in the other mode, train or eval"


def test_a_mode_that_does_not_run_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.SiLU(), nn.Linear(4, 4)).eval()
    assert inplace_ops.convert(model, torch.randn(1, 4)).sites[0].converted
    assert not any(module.training for module in model.modules())
