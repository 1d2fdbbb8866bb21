"""Activations that are called as functions: judged as modules are, by line of code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviour import assert_same_behaviour, behaviour, differs, twin
from conversions import site
from patterns import PATTERNS, WIDTH, Network, Pattern
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops import Site, saved_bytes

FUNCTIONS = {nn.ReLU: F.relu, nn.LeakyReLU: F.leaky_relu, nn.SiLU: F.silu}

cases = pytest.mark.parametrize(
    ("pattern", "function"),
    [
        pytest.param(pattern, FUNCTIONS[activation], id=f"{pattern.name}-{activation.__name__}")
        for pattern in PATTERNS
        for activation in pattern.activations
    ],
)


def example() -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64)


def functions_of(model: nn.Module, x: Tensor) -> list[Site]:
    return [s for s in inplace_ops.analyze(model, x).sites if s.name != "act"]


@cases
def test_what_refuses_a_module_refuses_a_line(
    pattern: Pattern, function: Callable[[Tensor], Tensor]
) -> None:
    model = Network(pattern.unsafe, lambda: function)
    (found,) = functions_of(model, example())
    assert (found.converted, found.advice) == (False, None)
    assert re.search(pattern.reason, found.reason), found.reason
    assert "patterns.py:" in found.reason


@cases
def test_what_is_safe_is_advised_or_gains_nothing(
    pattern: Pattern, function: Callable[[Tensor], Tensor]
) -> None:
    model = Network(pattern.safe, lambda: function)
    original, x = twin(model), example()
    sites = functions_of(model, x)
    assert all("nothing to gain" in s.reason or s.advice for s in sites)
    advice = next((s.advice for s in sites if s.advice), None)
    if advice is not None:
        model.act = eval(f"lambda x: {advice}", {"inplace_ops": inplace_ops})
        assert_same_behaviour(behaviour(model, x), behaviour(original, x))
        assert saved_bytes(model, x) <= saved_bytes(original, x)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "inplace_ops.relu_(x)": torch.relu,
    "inplace_ops.relu_(x) ": lambda x: x.relu(),
    "inplace_ops.relu_(x)  ": torch.relu_,
    "inplace_ops.leaky_relu_(x, 0.2)": lambda x: F.leaky_relu(x, 0.2),
    "inplace_ops.leaky_relu_(x, -0.5)": lambda x: F.leaky_relu(x, -0.5),
    "inplace_ops.relu6_(x)": F.relu6,
    'inplace_ops.silu_(x, save="derivative")': lambda x: F.silu(x, inplace=True),
    "inplace_ops.gelu_(x, 'none', save=\"derivative\")": F.gelu,
    "inplace_ops.gelu_(x, 'tanh', save=\"derivative\")": lambda x: F.gelu(x, approximate="tanh"),
    'inplace_ops.hardswish_(x, save="derivative")': F.hardswish,
    'inplace_ops.mish_(x, save="derivative")': F.mish,
}


@pytest.mark.parametrize("advice", SPELLINGS)
def test_the_advice_is_right_and_keeps_what_it_says(advice: str) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        return m.second(m.act(m.first(x)) * 1)  # nothing else keeps the output

    model = Network(compute, lambda: SPELLINGS[advice])
    original, x = twin(model), example()
    (found,) = functions_of(model, x)
    assert found.advice == advice.strip()
    kept = re.search(r"keeps (\d+) bytes instead of (\d+)", found.reason)
    assert kept is not None
    assert int(kept[2]) == found.bytes_before == found.bytes_after
    before = saved_bytes(model, x)
    model.act = eval(f"lambda x: {advice}", {"inplace_ops": inplace_ops})
    assert saved_bytes(model, x) - before == int(kept[1]) - int(kept[2])
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-6, atol=1e-6)


class Gate(nn.Module):
    """One line of code for all instances; the input of those that add is read again."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        y = F.silu(h)
        return y + h if self.adds else y + x


def test_a_line_is_safe_if_all_its_calls_are() -> None:
    line = Gate.forward.__code__.co_firstlineno + 2
    where = f"test_conversion_functions.py:{line}"
    sites = functions_of(nn.Sequential(Gate(False), Gate(False)), example())
    assert [s.name for s in sites] == ["0.silu", "1.silu"]
    assert all(s.advice == 'inplace_ops.silu_(x, save="derivative")' for s in sites)
    reason = f"safe: write `{sites[0].advice}` at {where}, 2 calls: keeps "
    assert all(s.reason.startswith(reason) for s in sites)
    sites = functions_of(nn.Sequential(Gate(False), Gate(True)), example())
    objection = "input is read again by `1.add` (call 2 of 2, 4 x 6)"
    reason = f"called as a function in {where}, 2 calls: {objection}"
    assert [(s.advice, s.reason) for s in sites] == [(None, reason)] * 2


def test_a_line_is_judged_with_the_others_as_they_are() -> None:
    """In place, the second would write to what the first, PyTorch's ReLU, keeps."""

    def compute(m: Network, x: Tensor) -> Tensor:
        return F.silu(m.act(m.first(x))).sum()

    for activation in (lambda: F.relu, nn.ReLU):
        *_, last = functions_of(Network(compute, activation), example())
        assert last.advice is None
        assert "input is saved for backward by" in last.reason


def test_what_a_checkpoint_saves_is_not_the_functions_before_it() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.act(m.first(x) * 1)
        return checkpoint(lambda t: m.second(F.silu(t)), h, use_reentrant=False)

    *_, inside = functions_of(Network(compute, lambda: F.relu), example())
    assert inside.advice is None


@pytest.mark.parametrize("bits", [1, 8])
def test_the_advice_has_the_bits(bits: int) -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        return m.second(F.silu(m.first(x)))

    (found,) = (
        s for s in inplace_ops.analyze(Network(compute), example(), bits=bits).sites if s.calls
    )
    assert found.advice == f"inplace_ops.silu_(x, bits={bits})"


def test_inside_of_a_transform() -> None:
    model = Network(lambda m, x: m.second(torch.vmap(F.silu)(m.first(x))))
    (found,) = functions_of(model, example())
    assert found.advice is None
    assert "torch.func" in found.reason


def test_decisions_of_modules_are_as_the_lines_are_now() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        y = m.act(m.first(x))
        m.second(y)
        return F.silu(y).sum()  # it keeps y as it is; in place it would write to it

    model, x = Network(compute), example()
    original = twin(model)
    report = inplace_ops.convert(model, x)
    assert site(report, "act").save == "output"
    assert not differs(model, original, x)


def test_functions_called_inside_of_torch_nn() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    (found,) = inplace_ops.analyze(model, torch.randn(2, 4, 8)).sites
    assert re.search(r"torch/nn/modules/transformer\.py:\d+: PyTorch's own", found.reason)
    assert "give it an nn.ReLU()" in found.reason
    advised = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=nn.ReLU())
    (found,) = inplace_ops.analyze(advised, torch.randn(2, 4, 8)).sites
    assert found.converted


def test_a_forward_that_somebody_has_replaced() -> None:
    """As accelerate's hooks do."""
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    forward = model[1].forward
    model[1].forward = lambda *args: forward(*args)  # type: ignore[method-assign]
    (found,) = inplace_ops.analyze(model, torch.randn(2, 4)).sites
    assert (found.name, found.activation, found.advice) == ("1.silu", "SiLU", None)
    assert "its `forward` was replaced" in found.reason


def test_other_modules_of_torch_that_compute_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Hardtanh(0, 6), nn.Linear(4, 4))
    (found,) = inplace_ops.analyze(model, torch.randn(2, 4)).sites
    assert found.reason.startswith("a Hardtanh that convert does not know: hold an nn.ReLU6")


def test_modules_in_a_plain_list() -> None:
    """The line is the one that calls them."""

    def compute(m: Network, x: Tensor) -> Tensor:
        return m.second(m.kept[0](m.first(x)) * 1)

    model = Network(compute)
    model.kept = [nn.SiLU()]  # type: ignore[list-item]
    (found,) = functions_of(model, example())
    line = compute.__code__.co_firstlineno + 1
    assert f"at {Path(__file__).name}:{line}" in found.reason


def test_chunks() -> None:
    """Autograd lets nobody write to one; the advice works."""

    def compute(m: Network, x: Tensor) -> Tensor:
        gate, up = m.first(x).chunk(2, -1)
        return m.second((F.silu(gate) * up).repeat(1, 2))

    def advised(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        half = WIDTH // 2
        gate, up = h.narrow(-1, 0, half), h.narrow(-1, half, half)
        return m.second((inplace_ops.silu_(gate) * up).repeat(1, 2))

    model, x = Network(compute), example()
    (found,) = functions_of(model, x)
    assert found.reason.endswith(
        "input is one of several views made at once, as by `chunk` or `split`; cut by `narrow` "
        "or slices, `inplace_ops.silu_` may overwrite one before the rest is read"
    )
    original = twin(model)
    before = saved_bytes(model, x)
    model.compute = advised
    assert_same_behaviour(behaviour(model, x), behaviour(original, x))
    assert saved_bytes(model, x) < before


OTHERS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "silu": (lambda x: x * torch.sigmoid(x), "x * sigmoid(x), which is SiLU", "write nn.SiLU()"),
    "silu, module": (lambda x: nn.Sigmoid()(x) * x, "x * sigmoid(x), which is SiLU", "nn.SiLU()"),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), "Sigmoid", "no in-place form"),
    "clamp": (lambda x: x.clamp(min=0), "clamp(min=0), which is ReLU", "write nn.ReLU()"),
    "clamp_min": (lambda x: x.clamp_min(0), "clamp(min=0), which is ReLU", "write nn.ReLU()"),
    "tanh": (torch.tanh, "Tanh", "no in-place form of this kind here"),
    "gated": (lambda x: x * torch.sigmoid(x.flip(0)), "Sigmoid", "no in-place form"),
    "half": (lambda x: x * torch.sigmoid(x[:, :1]), "Sigmoid", "no in-place form"),
    "doubled": (lambda x: x * torch.sigmoid(x).mul_(2), "Sigmoid", "no in-place form"),
    "elu": (F.elu, "ELU", "no in-place form"),
    "prelu": (lambda x: F.prelu(x, torch.ones(1).double()), "PReLU", "no in-place form"),
    "hardtanh": (F.hardtanh, "Hardtanh", "no in-place form"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds(name: str) -> None:
    function, kind, advice = OTHERS[name]
    model, x = Network(lambda m, x: m.second(function(m.first(x)) * 1)), example()
    report = inplace_ops.analyze(model, x)
    (other,) = report.others
    assert (other.kind, other.calls) == (kind, 1)
    plain = Network(lambda m, x: m.second(m.first(x) * 1))
    if kind != "Sigmoid":  # whose output the product holds, too
        assert other.bytes_held == saved_bytes(model, x) - saved_bytes(plain, x) > 0
    assert advice in str(report)


def test_nothing_that_is_no_activation() -> None:
    def compute(m: Network, x: Tensor) -> Tensor:
        h = m.first(x)
        h = torch.clamp(h, min=torch.zeros(WIDTH).double())
        return m.second(h.clamp(min=1) + h.clamp(0, 1) + h.clamp(max=0) + h * h)

    report = inplace_ops.analyze(Network(compute), example())
    assert report.others == []
