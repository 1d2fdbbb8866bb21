"""convert, analyze and revert, beside the rules."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from behaviour import assert_same_behaviour, behaviour, differs, twin
from memory import largest_allocation
from patterns import PATTERNS, WIDTH, Network, Pattern, pattern_id
from torch import Tensor, nn

import inplace_ops
from inplace_ops import VerificationError, saved_bytes
from inplace_ops.__main__ import main
from inplace_ops.conversion import rules
from inplace_ops.conversion.verify import _difference

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.SiLU)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


class Convolutions(nn.Module):
    """Every kind of neighbour: convolution, addition, pooling, linear; one activation for all."""

    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        shared = activation()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), shared)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), shared)
        self.norm = nn.BatchNorm2d(8)
        self.preactivation = shared
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 10), activation())
        self.last = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        h = self.norm(x)
        h = h + self.preactivation(h)
        return self.last(self.head(F.avg_pool2d(h, 2)))


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def site(report: inplace_ops.Report, name: str) -> inplace_ops.Site:
    return next(site for site in report.sites if site.name == name)


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
def test_bytes_are_those_that_autograd_holds(
    activation: type[nn.Module], dtype: torch.dtype, bits: int | None
) -> None:
    model = Convolutions(activation).to(dtype)
    x = images().to(dtype)
    # PyTorch's best: LeakyReLU keeps its input out of place and its output in place.
    best = min(saved_bytes(model, x), saved_bytes(Convolutions(_in_place(activation)).to(dtype), x))
    if activation is not nn.LeakyReLU:
        assert saved_bytes(model, x) == best
    report = inplace_ops.convert(model, x, bits=bits, verify=False)
    for s in report.sites:
        assert s.bytes_after <= s.bytes_before, s
        assert (s.bytes_after == s.bytes_before) or s.converted
    if activation is nn.LeakyReLU:
        assert saved_bytes(model, x) <= best
    else:
        assert best - saved_bytes(model, x) == report.bytes_before - report.bytes_after


def _in_place(activation: type[nn.Module]) -> Callable[[], nn.Module]:
    # The shared module's place before the addition cannot be in place.
    return lambda: activation(inplace=activation is nn.LeakyReLU)


def test_what_is_kept_where() -> None:
    report = inplace_ops.convert(Convolutions(nn.SiLU), images())
    assert site(report, "stem.2").save == "output"
    assert "kept by `block.0.convolution`" in site(report, "stem.2").reason
    assert site(report, "block.2").save == "derivative"
    assert site(report, "head.2").save == "output"
    report = inplace_ops.convert(Convolutions(nn.ReLU), images())
    assert [s.save for s in report.sites] == [None, "output", "mask", "output"]
    elements = 2 * 8 * 8 * 8
    assert site(report, "stem.2").bytes_before == site(report, "stem.2").bytes_after == 0
    assert site(report, "block.2").bytes_before == 4 * elements
    assert site(report, "block.2").bytes_after == elements / 8


def test_optimize() -> None:
    x = images()
    speed = inplace_ops.convert(Convolutions(nn.ReLU), x, optimize="speed")
    assert [s.save for s in speed.sites] == [None, "mask", "mask", "mask"]
    exact = inplace_ops.convert(Convolutions(nn.ReLU), x, optimize="exact")
    assert [s.save for s in exact.sites] == [None, "output", "mask", "output"]
    exact = inplace_ops.convert(Convolutions(nn.SiLU), x, optimize="exact")
    assert not any(s.converted for s in exact.sites)
    assert "lossy" in site(exact, "stem.2").reason
    for bits, saves in ((None, [None, "output", None, "output"]), (4, [None] * 4)):
        model = Convolutions(nn.SiLU).bfloat16()
        exact = inplace_ops.convert(model, x.bfloat16(), optimize="exact", bits=bits)
        assert [s.save for s in exact.sites] == saves
    with pytest.raises(ValueError, match="optimize must be"):
        inplace_ops.convert(Convolutions(nn.ReLU), x, optimize="size")
    with pytest.raises(ValueError, match="bits must be"):
        inplace_ops.convert(Convolutions(nn.SiLU), x, bits=16)


def test_negative_slope_takes_the_mask() -> None:
    report = inplace_ops.convert(Convolutions(lambda: nn.LeakyReLU(-0.5)), images())
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


def test_an_output_that_is_written_to_in_another_mode_only() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.SiLU(), nn.Dropout(inplace=True), nn.Linear(4, 4)
    ).eval()
    (decision,) = inplace_ops.convert(model, torch.randn(2, 4)).sites
    assert decision.save == "derivative"
    model.train()
    model(torch.randn(2, 4)).sum().backward()


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
    model = nn.Sequential(nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 8))
    x = torch.randn(16, 8)
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


# Which modules are recognised.


class Renamed(nn.SiLU):
    pass


class Other(nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Scaled(nn.SiLU):
    gain = 1.7


class Called(nn.SiLU):
    def __call__(self, input: Tensor) -> Tensor:
        return super().__call__(input) * 2


class WithArguments(nn.LeakyReLU):
    """With another default."""

    def __init__(self) -> None:
        super().__init__(0.2)
        self.note = "mine"


def test_subclasses() -> None:
    changed = nn.SiLU()
    changed.forward = lambda x: x * 2  # type: ignore[method-assign]
    for module, expected in (
        (Renamed(), 1),
        (WithArguments(), 1),
        (Other(), 0),
        (Scaled(), 0),
        (Called(), 0),
        (nn.ReLU6(), 0),
        (changed, 0),
    ):
        model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4))
        report = inplace_ops.convert(model, torch.randn(2, 4))
        assert sum(s.converted for s in report.sites) == expected
    mine = nn.Sequential(nn.Linear(4, 4), inplace_ops.SiLU(), nn.Linear(4, 4))
    kept = mine[1]
    inplace_ops.convert(mine, torch.randn(2, 4))
    assert mine[1] is kept


def test_a_slope_that_is_a_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(torch.tensor(0.2)), nn.ReLU())  # type: ignore[arg-type]
    leaky = model[1]
    relu, function = inplace_ops.convert(model, torch.randn(2, 4)).sites
    assert relu.activation == "ReLU"
    assert "called as a function" in function.reason
    assert model[1] is leaky


def test_functions_are_reported_with_their_line() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        return m.second(F.silu(m.first(x), inplace=True))

    line = compute.__code__.co_firstlineno + 1
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    report = inplace_ops.convert(Network(compute), x)
    called, function = report.sites
    assert called.reason == "not called with this input"
    assert (function.name, function.activation, function.converted) == ("silu_", "SiLU", False)
    assert function.reason == f"called as a function in test_conversion.py:{line}"
    assert function.bytes_before == function.bytes_after == x.numel() * 8  # the clone


def test_called_otherwise() -> None:
    model = Network(lambda m, x: m.second(m.act(input=m.first(x))))
    report = inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64))
    assert site(report, "act").reason == "called otherwise than with one tensor"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[:2], x[:3]], layout=layout)
        return torch.cat([y.sum(0) for y in m.second(m.act(m.first(rows))).unbind()])

    model = Network(compute)
    (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites
    assert "nested tensor" in decision.reason


def test_a_nested_tensor_that_shares_the_input() -> None:
    def compute(m: Network, x: Tensor, reads: bool) -> Tensor:
        h = m.first(x)
        rows = torch.nested.nested_tensor_from_jagged(h.detach(), torch.tensor([0, 1, 4]))
        if not reads:
            rows = rows * 1
        y = m.act(h)
        return m.second(y) + (rows * 1).values()

    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for reads in (False, True):
        model = Network(lambda m, x, reads=reads: compute(m, x, reads))
        (decision,) = inplace_ops.convert(model, x).sites
        assert decision.converted is not reads, decision.reason


def test_models_that_cannot_be_followed() -> None:
    def energy(m: Network, h: Tensor) -> Tensor:
        return m.second(m.act(h * 1)).sum()

    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model = Network(lambda m, x: torch.func.grad(lambda h: energy(m, h))(m.first(x)))
    with pytest.raises(RuntimeError, match=r"calls a gradient transform of torch\.func"):
        inplace_ops.convert(model, x)
    model = Network(
        lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (m.second(m.act(m.first(x))),))
    )
    with pytest.raises(RuntimeError, match="calls a higher-order operator"):
        inplace_ops.convert(model, x)


def test_inside_vmap() -> None:
    model = Network(lambda m, x: m.second(torch.func.vmap(lambda h: m.act(h * 1))(m.first(x))))
    (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites
    assert decision.reason == "called inside a transform of torch.func"


def test_wrong_models() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        inplace_ops.convert(F.relu, x)
    with pytest.raises(ValueError, match="is itself a ReLU"):
        inplace_ops.convert(nn.ReLU(), x)
    with pytest.raises(ValueError, match="call it once before"):
        inplace_ops.convert(nn.Sequential(nn.LazyLinear(4), nn.SiLU()), x)


def test_without_a_gradient_it_takes_what_is_free_with_one() -> None:
    model = Convolutions(nn.SiLU).requires_grad_(False)
    report = inplace_ops.convert(model, images())
    assert [s.bytes_before for s in report.sites] == [0, 0, 0, 0]
    assert site(report, "block.2").save == "derivative"
    model.stem.requires_grad_(True)
    trained = [s.save for s in inplace_ops.convert(model, images()).sites]
    model.stem.requires_grad_(False)
    model.block[0].requires_grad_(True)  # it keeps the output of the stem, which needs no gradient
    frozen = [s.save for s in inplace_ops.convert(model, images()).sites]
    assert (trained[1], frozen[1]) == ("output", "output")


# What is left as it was.


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


@pytest.mark.parametrize(
    "inputs", [lambda x: x, lambda x: (x,), lambda x: {"x": x}], ids=["tensor", "tuple", "dict"]
)
def test_example_inputs(inputs: Callable[[Tensor], Any]) -> None:
    model = Network(lambda m, x: m.second(m.act(m.first(x))))
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    assert inplace_ops.convert(model, inputs(x)).sites[0].converted
    with pytest.raises(TypeError, match="example_inputs must be"):
        inplace_ops.convert(model, [x])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        inplace_ops.convert(model, x)


def test_without_grad_the_decisions_are_those_with_grad() -> None:
    model = Network(lambda m, x: m.second(m.act(m.first(x).exp())))
    with torch.no_grad():
        (decision,) = inplace_ops.convert(model, torch.randn(4, WIDTH).double()).sites
    assert decision.reason == "input is saved for backward by `exp`"


# Back again.


def assert_reverted(model: nn.Module, modules: list[nn.Module]) -> None:
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


@activations
def test_revert(activation: type[nn.Module]) -> None:
    model = Convolutions(activation)
    modules, keys = list(model.modules()), list(model.state_dict())
    inplace_ops.convert(model, images())
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] != [type(m) for m in modules]
    model.eval()
    inplace_ops.revert(model)
    assert_reverted(model, modules)
    assert not any(m.training for m in model.modules())
    inplace_ops.revert(model)
    assert_reverted(model, modules)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao.quantization's own
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_quantization_needs_the_reverted_model() -> None:
    """It goes by PyTorch's own module types."""
    quantization = torch.ao.quantization
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    inplace_ops.convert(model, images())
    with pytest.raises(AssertionError, match=r"fuser method.*inplace_ops\.modules\.ReLU"):
        quantization.fuse_modules_qat(model, [["0", "1", "2"]])
    inplace_ops.revert(model)
    fused = quantization.fuse_modules_qat(model, [["0", "1", "2"]])
    assert isinstance(fused[0], torch.ao.nn.intrinsic.ConvBnReLU2d)


def test_revert_keeps_what_was_set_since() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    inplace_ops.convert(model, torch.randn(2, 4))
    seen = []
    model[1].register_forward_hook(lambda m, inputs, output: seen.append("forward"))
    model[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append("backward"))
    inplace_ops.revert(model)
    model(torch.randn(2, 4)).sum().backward()
    assert seen == ["forward", "backward"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_compute_and_revert(duplicate: Callable[[nn.Module], Any]) -> None:
    model = Convolutions(nn.SiLU).double()
    original = twin(model)
    x = images().double()
    inplace_ops.convert(model, x)
    copied = duplicate(model)
    assert isinstance(copied.stem[2], inplace_ops.SiLU)
    assert copied.stem[2] is not model.stem[2]
    assert_same_behaviour(behaviour(copied, x), behaviour(original, x))
    inplace_ops.revert(copied)
    assert type(copied.stem[2]) is nn.SiLU
    assert copied.stem[2] is copied.block[2] is copied.preactivation  # one module again
    assert isinstance(model.stem[2], inplace_ops.SiLU)


def test_convert_again_and_analyze_a_converted_model() -> None:
    model = Convolutions(nn.SiLU)
    modules = list(model.modules())
    report = inplace_ops.convert(model, images())
    converted = list(model.modules())
    assert inplace_ops.analyze(model, images()).sites == report.sites
    assert_reverted(model, converted)
    assert inplace_ops.convert(model, images(), bits=1).sites != report.sites
    assert model.stem[2].bits == 1
    inplace_ops.revert(model)
    assert_reverted(model, modules)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:.*when there are global hooks on modules:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("runs_before", [False, True])
def test_a_compiled_model(backend: str, runs_before: bool) -> None:
    torch._dynamo.reset()
    model = Convolutions(nn.SiLU).double()
    x = images().double()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend=backend)

    def assert_gradients() -> None:
        gradients = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-6)

    if runs_before:
        assert_gradients()
    inplace_ops.convert(compiled, x)
    assert isinstance(model.stem[2], inplace_ops.SiLU)
    assert_gradients()
    inplace_ops.revert(compiled)
    assert type(model.stem[2]) is nn.SiLU
    assert_gradients()


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


# Verification.

# Not what a run's outputs and gradients show: what a hook keeps, a frozen parameter.
SEEN_BY_VERIFY = [
    p for p in PATTERNS if not ("kept" in p.name or p.name in ("parameter", "view of a buffer"))
]


@pytest.mark.parametrize("pattern", SEEN_BY_VERIFY, ids=pattern_id)
def test_verify_finds_what_a_missing_rule_lets_through(
    pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    activation = pattern.activations[-1]
    model = Network(pattern.unsafe, activation)
    modules = list(model.modules())
    left = [rule for rule in rules.SAFETY if rule.__name__ != pattern.rule]
    monkeypatch.setattr(rules, "SAFETY", left)
    with pytest.raises(VerificationError):
        inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64))
    assert_reverted(model, modules)


def test_verify_names_the_first_site(monkeypatch: pytest.MonkeyPatch) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(4, 4), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x) * 1
            return self.act(h) + h

    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), Residual(), Residual())
    monkeypatch.setattr(rules, "SAFETY", [])
    with pytest.raises(VerificationError, match=r"first in the output of `3\.act`"):
        inplace_ops.convert(model, torch.randn(2, 4))


def test_verify_checks_each_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    modules = list(model.modules())
    true = inplace_ops.SiLU.forward
    monkeypatch.setattr(inplace_ops.SiLU, "forward", lambda self, x: true(self, x * 1.001))
    with pytest.raises(VerificationError, match=r"the activation at `1` is wrong"):
        inplace_ops.convert(model, torch.randn(2, 4))
    assert_reverted(model, modules)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, *range(1, 9)])
def test_verify_accepts_the_documented_errors(dtype: torch.dtype, bits: int | None) -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 64), nn.SiLU()).to(dtype)
    inplace_ops.convert(model, 4 * torch.randn(64, 64, dtype=dtype), bits=bits)


@pytest.mark.parametrize(
    "scale", [lambda m: 2 if type(m) is nn.SiLU else 1, lambda m: {nn.SiLU: 2}[type(m)]]
)
def test_verify_runs_the_modules_that_are_put_in(scale: Callable[[nn.Module], int]) -> None:
    model = Network(lambda m, x: m.second(m.act(m.first(x)) * scale(m.act)), nn.SiLU)
    with pytest.raises(VerificationError):
        inplace_ops.convert(model, torch.randn(4, WIDTH, dtype=torch.float64))
    assert type(model.act) is nn.SiLU


def test_verify_compares_every_kind_of_tensor() -> None:
    first = torch.tensor([1 + 1j, 2])
    assert _difference(first, torch.tensor([1 + 3j, 2])) == 2
    assert _difference(first.to_sparse(), first.to_sparse()) == 0
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.SiLU())
    assert inplace_ops.convert(model, torch.arange(4)).sites[0].converted


class Result:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclass
class Results:
    results: list[Result]


def test_verify_looks_into_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(m: Network, x: Tensor) -> Results:
        h = m.first(x)
        return Results([Result(m.second(m.act(h))), Result(h)])

    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model = Network(compute)
    assert inplace_ops.convert(model, x).sites[0].reason == "input is returned by the model"
    monkeypatch.setattr(rules, "SAFETY", [])
    with pytest.raises(VerificationError, match="output 1"):
        inplace_ops.convert(model, x)


class Slots:
    __slots__ = ("hidden", "value")

    def __init__(self, value: Tensor, hidden: Tensor) -> None:
        self.value, self.hidden = value, hidden


def test_verify_looks_into_slots() -> None:
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model = Network(lambda m, x: Slots(m.second(m.act(m.first(x))), x.mean()))
    assert inplace_ops.convert(model, x).sites[0].converted
    model = Network(lambda m, x: Slots(m.second(m.act(h := m.first(x))), h))
    assert inplace_ops.convert(model, x).sites[0].reason == "input is returned by the model"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize(
    "output",
    [
        lambda y: torch.nested.as_nested_tensor([y[:1], y[1:]]),
        lambda y: torch.nested.nested_tensor_from_jagged(y, torch.tensor([0, 1, 4])),
        lambda y: y.to_sparse_csr(),
    ],
    ids=["nested", "jagged", "csr"],
)
def test_verify_compares_outputs_of_other_layouts(
    output: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model = Network(lambda m, x: output(m.second(m.act(m.first(x)))))
    assert inplace_ops.convert(model, x).sites[0].converted
    model = Network(lambda m, x: output(m.second(m.act(h := m.first(x)) + h)))
    monkeypatch.setattr(rules, "SAFETY", [])
    with pytest.raises(VerificationError, match=r"output \d of"):
        inplace_ops.convert(model, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_verify_compares_nested_arguments(layout: torch.layout) -> None:
    model = Network(lambda m, rows: m.second(m.act(m.first(rows.unbind()[0]))))
    rows = [torch.randn(n, WIDTH, dtype=torch.float64) for n in (3, 2)]
    report = inplace_ops.convert(model, torch.nested.nested_tensor(rows, layout=layout))
    assert report.sites[0].converted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_verify_allows_sums_in_another_order(dtype: torch.dtype) -> None:
    # The gradient that comes to the SiLU is transposed, and its input a view: in place the rows
    # are rounded otherwise than out of place.
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(8, 8), nn.SiLU()
            self.norm, self.lstm = nn.BatchNorm1d(8), nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.linear(x).mT).mT if self.training else self.linear(x)
            return self.lstm(self.act(h))[0]

    for training in (True, False):
        model = Recurrent().to(dtype).train(training)
        assert inplace_ops.convert(model, torch.randn(16, 50, 8, dtype=dtype)).sites[0].converted


def test_verify_refuses_what_it_cannot_compare() -> None:
    x = torch.randn(4, WIDTH, dtype=torch.float64)

    def nothing(m: Network, x: Tensor) -> float:
        return m.second(m.act(m.first(x))).sum().item()

    factors = (2.0**i for i in itertools.count())

    def noise(m: Network, x: Tensor) -> Tensor:
        return m.second(m.act(m.first(x))) * next(factors)

    for compute, error in ((nothing, "returns no tensor"), (noise, "differs between two runs")):
        model = Network(compute)
        with pytest.raises(VerificationError, match=error):
            inplace_ops.convert(model, x)
        assert type(model.act) is nn.ReLU
        assert inplace_ops.convert(model, x, verify=False).sites[0].converted


def test_verify_names_the_noise_it_allows() -> None:
    factors = itertools.repeat(1.0)

    def compute(m: Network, x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return m.second(m.act(m.first(x))) * next(factors)

    runs = 0
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    inplace_ops.convert(Network(compute), x, verify=False)
    # The two runs of the original differ by little, the converted model's from them by much.
    factors = iter([1.0] * runs + [1.0, 1.001] + [2.0] * 10)
    with pytest.raises(VerificationError, match="differs from the original's by more than its"):
        inplace_ops.convert(Network(compute), x)


def test_verify_follows_a_second_derivative() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        energy = m.second(m.act(h * 1)).square().sum()
        (force,) = torch.autograd.grad(energy, h, create_graph=True)
        return force

    for activation in ACTIVATIONS:
        model = Network(compute, activation)
        original = twin(model)
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        inplace_ops.convert(model, x)
        assert not differs(model, original, x)


def test_verify_leaves_the_generators_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    inplace_ops.convert(model, torch.randn(2, 4))
    assert not seeds


def test_progress_is_shown_where_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    for is_terminal, seconds, lines in ((True, 10, 4), (True, 0.1, 0), (False, 10, 0)):
        clock = itertools.count(step=seconds)
        monkeypatch.setattr("time.monotonic", lambda clock=clock: next(clock))
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        inplace_ops.convert(model, torch.randn(2, 4))
        shown = capsys.readouterr().err.splitlines()
        assert len(shown) == lines
        assert all("convert: verifying, run" in line for line in shown)


# The trace.


def test_an_address_used_again_is_not_taken_for_the_old_tensor() -> None:
    addresses = []

    def compute(m: Network, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(20):
                h = m.first(x)
                addresses.append(h.data_ptr())
                x = m.second(m.act(h))
                del h
        return m.second(x)

    model = Network(compute)
    assert inplace_ops.analyze(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites[0].converted
    assert len(set(addresses)) < len(addresses)


def test_an_input_kept_by_the_activations_own_hook() -> None:
    model = Network(lambda m, x: m.second(m.act(m.first(x))))

    def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        module.saved = inputs[0]

    model.act.register_forward_hook(keep)
    (decision,) = inplace_ops.analyze(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites
    assert decision.reason == "input is kept after forward, by a hook or an attribute"


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


def test_garbage_does_not_keep_an_input_alive() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        cycle: list[Any] = [h]
        cycle.append(cycle)
        return m.second(m.act(h))

    gc.collect()
    model = Network(compute)
    assert inplace_ops.analyze(model, torch.randn(4, WIDTH, dtype=torch.float64)).sites[0].converted


def test_memory_of_the_analysis() -> None:
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(inplace=True)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(copy.deepcopy(layers) * 8))
    x = torch.randn(2, 3, 64, 64)
    model(x).sum().backward()
    with largest_allocation() as step:
        model(x).sum().backward()
    with largest_allocation() as analysis:
        inplace_ops.analyze(model, x)
    assert analysis[0] <= 2 * step[0]


# What is printed.


def test_report() -> None:
    text = str(inplace_ops.analyze(Convolutions(nn.SiLU), images()))
    header, _, *rows, _, total = text.splitlines()
    assert header.split() == ["site", "activation", "decision", "before", "after", "reason"]
    assert rows[0].split()[:3] == ["preactivation", "SiLU", "left"]
    assert "read again by `add`" in rows[0]
    assert 'save="output"' in rows[1]
    assert "3 of 4" in total
    assert max(map(len, text.splitlines())) < 120


def test_analyze_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2))\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "inplace_ops", "analyze", "mine:build", "--input", "2,4"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "1 of 1" in result.stdout
    assert 'save="output"' in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["torch:nn"], "required: --input"),
        (["nonsense", "--input", "2,4"], "expected LIBRARY:NAME"),
        (["no_such_module:x", "--input", "2,4"], "No module named"),
        (["torch:no_such_name", "--input", "2,4"], "no_such_name"),
        (["torch:nn", "--input", "2xfour"], "invalid shape value"),
        (["torch:nn", "--input", "2,4", "--bits", "9"], "invalid choice: 9"),
    ],
)
def test_wrong_analyze_commands(
    arguments: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["inplace_ops", "analyze", *arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert "usage:" in message
    assert error in message
