"""That the converted model is compared with the original."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from behaviour import differs, twin
from conversions import ACTIVATIONS, assert_reverted
from patterns import PATTERNS, WIDTH, Network, Pattern, pattern_id
from torch import Tensor, nn

import inplace_ops
from inplace_ops import VerificationError
from inplace_ops.conversion import rules
from inplace_ops.conversion.verify import _difference

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


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x * 1.001, lambda x: torch.lerp(x.detach(), x, 1.001)],
    ids=["value", "derivative"],
)
def test_verify_checks_each_activation(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    modules = list(model.modules())
    true = inplace_ops.SiLU.forward
    monkeypatch.setattr(inplace_ops.SiLU, "forward", lambda self, x: true(self, wrong(x)))
    with pytest.raises(VerificationError, match=r"the activation at `1` is wrong"):
        inplace_ops.convert(model, torch.randn(2, 4), bits=1)
    assert_reverted(model, modules)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [None, 1, 8])
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


def test_verify_allows_noise_and_names_it() -> None:
    factors = itertools.repeat(1.0)

    def compute(m: Network, x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return m.second(m.act(m.first(x))) * next(factors)

    def convert(*factors_of_runs: float) -> inplace_ops.Report:
        nonlocal factors
        factors = iter([1.0] * before + [*factors_of_runs] + [1.0] * 10)
        return inplace_ops.convert(Network(compute), x)

    runs = 0
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    inplace_ops.convert(Network(compute), x, verify=False)
    # What the model holds is measured after the conversion is verified, before and after it.
    before = runs - 2
    # Two runs of the original, the converted model's, and where that differs by more further ones
    # of the original.
    assert convert(1.0, 1.001, 1.003).sites[0].converted
    assert convert(1.0, 1.001, 1.01, 1.001, 1.0, 1.0, 1.01).sites[0].converted
    assert convert(1.0, 1.0, 1.01, 1.0, 1.005).sites[0].converted
    with pytest.raises(VerificationError, match="differs from the original's by more than its"):
        convert(1.0, 1.001, 1.01, 1.001, 1.001, 1.001, 1.001)
    with pytest.raises(VerificationError, match="differs from the original's; but"):
        convert(1.0, 1.0, 1.01)


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
    for is_terminal, seconds, lines in ((True, 10, 8), (True, 0.1, 0), (False, 10, 0)):
        clock = itertools.count(step=seconds)
        monkeypatch.setattr("time.monotonic", lambda clock=clock: next(clock))
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        inplace_ops.convert(model, torch.randn(2, 4))
        shown = capsys.readouterr().err.splitlines()
        assert len(shown) == lines
        assert all(f"convert: run {i + 1} of {lines} (" in line for i, line in enumerate(shown))
