"""Which modules, models and examples convert takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patterns import WIDTH, Network
from torch import Tensor, nn

import inplace_ops


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
        (nn.ReLU6(), 1),
        (nn.Hardtanh(0, 6), 0),
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
    assert function.reason == (
        "a LeakyReLU that convert does not know: hold an nn.LeakyReLU, with numbers for arguments"
    )
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
    assert function.advice == "inplace_ops.silu_(x)"
    where = f"{Path(__file__).name}:{line}"
    assert function.reason.startswith(f"safe: write `inplace_ops.silu_(x)` at {where}: keeps ")
    assert function.bytes_before == function.bytes_after == x.numel() * 8  # the clone


def test_wrong_models() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        inplace_ops.convert(F.relu, x)
    with pytest.raises(ValueError, match="is itself a ReLU"):
        inplace_ops.convert(nn.ReLU(), x)
    with pytest.raises(ValueError, match="call it once before"):
        inplace_ops.convert(nn.Sequential(nn.LazyLinear(4), nn.SiLU()), x)


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


class TakesADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layers(batch["images"])


def test_a_dict_as_the_one_argument() -> None:
    batch = {"images": torch.randn(2, 4)}
    with pytest.raises(TypeError, match=r"passed as keyword arguments.*pass a tuple, \(batch,\)"):
        inplace_ops.convert(TakesADict(), batch)
    assert inplace_ops.convert(TakesADict(), (batch,)).sites[0].converted


def test_what_a_hook_makes_of_the_arguments() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda m, args, kwargs: ((kwargs["x"],), {}), with_kwargs=True)
    assert inplace_ops.convert(model, {"x": torch.randn(2, 4)}).sites[0].converted
