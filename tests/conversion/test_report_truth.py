"""No line of a report is untrue: rows, reasons, modules, names, and what the numbers mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.networks import examples, network
from _support.twins import Parts
from torch import Tensor, nn

import inplace_ops
from inplace_ops.activations import ACTIVATIONS, Activation
from inplace_ops.conversion.report import Report
from inplace_ops.recompute import nodes, operations


class Block(nn.Module):
    """A transformer's block with dropouts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(attention.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(self.drop(self.act(self.up(self.norm2(x))))))


def gpt() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 64), nn.Dropout(0.1), Block(64), Block(64), nn.LayerNorm(64)
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation=F.gelu)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU6())
        self.block = nn.Sequential(
            *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Dropout2d(0.2)),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Dropout(0.1)),
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1), nn.Sigmoid())
        self.head = nn.Sequential(
            nn.LeakyReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Conv2d(16, 4, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.block(x)
        return self.head(x + y * self.gate(y))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (gpt, lambda: torch.randint(0, 50, (8, 32))),
    "encoder": (encoder, lambda: torch.randn(8, 32, 64)),
    "convolutional": (Convolutional, lambda: torch.randn(8, 3, 32, 32)),
}


def check_reasons(report: Report) -> None:
    """Check reasons against the tables of rules, and against the rows of the same report."""
    handled = {row.producer for row in report.replaced if row.how == "recomputed"}
    named = {nodes.name_of_type(n) for n, each in operations.OPERATIONS.items() if each.has_spec}
    for row in report.remaining:
        without_rule = re.fullmatch(r"no rule for the output of (\w+)", row.reason)
        if without_rule is not None:
            assert without_rule[1] not in named | handled, row
        if row.reason == "too expensive: never recomputed":
            assert row.producer not in handled, row
        # A dropout's mask is the only input without a gradient here, and is saved as bits.
        assert "without a gradient" not in row.reason or row.producer != "Mul", row
        assert row.reason != "another operation saves the same memory", row
        assert "smaller" not in row.reason or row.bytes < 4096 or "a part" in row.reason, row


@pytest.mark.parametrize("max_ops", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_reasons_do_not_blame_what_is_handled(name: str, max_ops: int) -> None:
    make, inputs = MODELS[name]
    report = inplace_ops.analyze(make(), inputs(), max_ops=max_ops)
    check_reasons(report)
    saved = [sum(row.bytes for row in rows) for rows in (report.replaced, report.remaining)]
    assert sum(saved) == report.saved_bytes_before
    paths = {path for path, _ in make().named_modules()}
    for row in (*report.replaced, *report.remaining, *report.auxiliary):
        assert row.module in paths


def test_rows_are_in_the_module_that_runs_the_operation() -> None:
    """In a TransformerEncoderLayer too, whose parts get no hooks from `convert`."""
    for with_an_example in (True, False):
        model, x = encoder(), torch.randn(8, 32, 64)
        report = inplace_ops.convert(model, x if with_an_example else None)
        model(x)
        modules = dict(model.named_modules())
        expected = {"NativeLayerNorm": nn.LayerNorm, "Addmm": nn.Linear}
        found = 0
        for row in (*report.replaced, *report.remaining):
            kind, module = expected.get(row.consumer), modules[row.module]
            if kind is not None and not isinstance(module, nn.MultiheadAttention):
                assert isinstance(module, kind), row
                found += 1
            if row.consumer == "GELU":  # called in the layer's own code, before its linear2
                assert row.module in ("layers.0", "layers.1")
        assert found > 4


def test_module_of_an_operation_before_an_inner_module_is_the_outer_one() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        return m.last(m.first(x).sin()).cos()

    report = inplace_ops.analyze(
        Parts(compute, first=nn.Linear(8, 64), last=nn.Linear(64, 8)), torch.randn(64, 8)
    )
    found = {row.consumer: row.module for row in (*report.replaced, *report.remaining)}
    assert (found["Sin"], found["Cos"], found["Addmm"]) == ("", "", "last")


# Names.


@pytest.mark.parametrize(
    "activation", ACTIVATIONS, ids=lambda a: " ".join([a.name, *a.variant.values()])
)
@pytest.mark.parametrize("inplace", [False, True])
def test_activations_have_one_name(activation: Activation, inplace: bool) -> None:
    """Whether PyTorch's node runs, that of this package's function, or one after a norm."""
    arguments = {**activation.variant, **({"inplace": True} if inplace else {})}
    if inplace and activation.torch_inplace is None:
        pytest.skip("PyTorch has no in-place function")
    x = torch.randn(64, 64, requires_grad=True)
    pytorchs = activation.torch_module(**arguments)
    own = getattr(inplace_ops, activation.name)(**activation.variant)
    for module in (pytorchs, own):
        assert nodes.operation_name(module(x * 1).grad_fn) == activation.name
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), pytorchs, nn.Linear(64, 64))
    report = inplace_ops.convert(model, torch.randn(64, 64))
    assert activation.name in {row.consumer for row in report.replaced}
    assert nodes.operation_name(F.hardtanh(x, -1, 6).grad_fn) == "Hardtanh"


# Lines.


def test_line_says_why_numbers_are_unknown() -> None:
    frozen = network().requires_grad_(False)
    assert "no parameter and no argument requires a gradient" in str(
        inplace_ops.analyze(frozen, examples())
    )

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).detach()

    assert "no output requires a gradient" in str(inplace_ops.analyze(Detached(), examples()))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise NotImplementedError("no backward here")

    class WithoutBackward(Detached):
        def forward(self, x: Tensor) -> Tensor:
            return Fails.apply(self.net(x))

    text = str(inplace_ops.analyze(WithoutBackward(), examples()))
    assert "backward raises: NotImplementedError: no backward here" in text
    model = network()
    report = inplace_ops.convert(model)
    model(examples())
    assert "peaks are measured with an example only" in str(report)
    with torch.autograd.profiler.profile():
        report = inplace_ops.analyze(network(), examples())
    assert "profiler is already running" in str(report)
    assert "?" not in str(inplace_ops.analyze(network(), examples()))


def test_line_bounds_the_rest_of_the_peak() -> None:
    """Wide outputs and weights, which are not saved, have most of the peak."""
    layers = nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 4096)
    model = nn.Sequential(*layers)
    report = inplace_ops.convert(model, torch.randn(256, 64))
    weights = sum(p.nbytes for p in model.parameters())
    assert report.gradient_bytes == weights
    rest = report.peak_bytes_after - report.saved_bytes_after - weights
    line = next(line for line in str(report).splitlines() if line.startswith("of the converted"))
    assert f"at least {rest / 2**20:.3f} MiB are outputs and temporary" in line
