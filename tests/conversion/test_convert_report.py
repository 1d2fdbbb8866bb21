"""The report of convert and analyze: rows, reasons and lines, and the memory that it promises."""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import largest_allocation, saved_allocation
from _support.assertions import ViewFunction
from _support.networks import examples, network, number_of_hooks
from _support.twins import Parts, Program
from torch import Tensor, nn

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.activations import ACTIVATIONS, Activation
from inplace_ops.conversion.plot import groups
from inplace_ops.conversion.report import Auxiliary, Report
from inplace_ops.recompute import nodes, operations


def sum_after_write(z: Tensor) -> Tensor:
    """Write to a tensor outside autograd, and return a sum of it."""
    z.detach().add_(1)
    return z + z


def test_first_step_with_gradients_fills_in_report() -> None:
    model, x = network(), examples()
    report = inplace_ops.convert(model)
    hooks = number_of_hooks(model)
    assert isinstance(report, inplace_ops.Report)
    assert (report.saved_bytes_before, report.replaced, report.remaining) == (None, [], [])
    assert "first forward pass" in str(report)
    with torch.no_grad():
        model(x)
    assert report.saved_bytes_after is None
    model(x)
    assert report.saved_bytes_before is not None
    assert report.saved_bytes_after is not None
    assert report.peak_bytes_before is report.peak_bytes_after is None
    original = network()
    before, after = (saved_allocation(lambda m=m: m(x)) for m in (original, model))
    output = 4 * 2 * 4 * 16 * 16
    assert report.saved_bytes_before == pytest.approx(before - output, rel=0.03)
    assert report.saved_bytes_after == pytest.approx(after - output, rel=0.03)
    first = asdict(report)
    model(torch.cat([x, x]))
    assert asdict(report) == first
    assert number_of_hooks(model) == hooks


def test_report_lists_replaced_and_remaining_tensors() -> None:
    """Each storage is in one row, so the rows add up to the saved bytes."""
    report = inplace_ops.convert(network(), examples())
    size = 4 * 2 * 16 * 32 * 32
    rows = {(r.producer, r.consumer, r.module, r.bytes, r.how) for r in report.replaced}
    assert rows == {
        ("Convolution", "NativeBatchNorm", "1", size, "recomputed"),  # it widens the images
        ("NativeBatchNorm", "SiLU", "2", size, "recomputed"),
        ("SiLU", "Convolution", "3", size, "recomputed"),
        ("ReLU", "ReLU", "5", size, "recomputed"),  # pooling saves the same storage
        ("(no grad_fn)", "MaxPool2DWithIndices", "6", size // 2, "stored as int16"),
    }
    assert [r.bytes for r in report.replaced] == sorted([r.bytes for r in report.replaced])[::-1]
    largest = report.remaining[0]
    assert (largest.producer, largest.bytes) == ("Convolution", size)
    assert largest.reason == "Convolution does not widen: never recomputed"
    assert largest.module == "4"
    pooled = next(r for r in report.remaining if r.consumer == "Convolution" and r.module == "7")
    assert pooled.reason == "too expensive: never recomputed"
    replaced, remaining = (
        sum(r.bytes for r in rows) for rows in (report.replaced, report.remaining)
    )
    assert replaced + remaining == report.saved_bytes_before
    assert remaining + report.recompute_bytes == report.saved_bytes_after


def test_tensor_saved_by_another_consumer_is_listed_as_remaining() -> None:
    """A convolution recomputes a norm's output, and an arctangent, which has no rule, saves it."""
    model = Program(lambda m, z: (m.conv(z), z.atan()))
    report = inplace_ops.convert(model, torch.randn(8, 3, 16, 16))
    assert ("NativeBatchNorm", "Atan") in {(r.producer, r.consumer) for r in report.remaining}
    assert "NativeBatchNorm" not in {r.producer for r in report.replaced}
    total = sum(r.bytes for r in (*report.replaced, *report.remaining))
    assert total == report.saved_bytes_before


def test_report_names_tensors_above_max_ops() -> None:
    model = Program(lambda m, z: m.conv(F.softplus(F.silu(z) * m.scale)))
    model.to(torch.float32)
    report = inplace_ops.convert(model, torch.randn(8, 3, 16, 16), max_ops=3)
    reasons = {r.reason for r in report.remaining}
    assert "takes more than 3 passes: raise max_ops" in reasons


# A model, the operation that computes a tensor that stays saved, and the reported reason.
REASONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str, str]] = {
    "unsaved_first_input": (
        lambda m, z: m.conv(m.other(z) + m.scale),
        "Add",
        "Add does not save its input from Convolution",
    ),
    "unsaved_second_input": (
        lambda m, z: m.conv(z + m.other(z)),
        "Add",
        "Add does not save its input from Convolution",
    ),
    "unsaved_parameter": (
        lambda m, z: m.conv(z + m.scale),
        "Add",
        "Add does not save the parameter that it reads",
    ),
    "unsaved_constant": (
        lambda m, z: m.conv(z + torch.ones_like(z)),
        "Add",
        "Add does not save an input without a gradient",
    ),
    "expensive": (lambda m, z: m.conv(z.cumsum(1)), "Cumsum", "too expensive: never recomputed"),
    "no_output_rule": (lambda m, z: m.conv(z.atan()), "Atan", "no rule for the output of Atan"),
    "written": (lambda m, z: m.conv(sum_after_write(z)), "Add", "an input of Add was written to"),
    "no_consumer_rule": (
        lambda m, z: z.atan(),
        "NativeBatchNorm",
        "no rule for what Atan saves",
    ),
    "amplified_rounding": (
        lambda m, z: m.conv(z.exp()),
        "Exp",
        "Exp may amplify the rounding of a recomputed norm",
    ),
}


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("case", REASONS)
def test_reasons_of_remaining_tensors(case: str) -> None:
    compute, producer, reason = REASONS[case]
    report = inplace_ops.convert(Program(compute), torch.randn(8, 3, 16, 16))
    assert (producer, reason) in {(r.producer, r.reason) for r in report.remaining}


def test_reason_for_autocast_copies_of_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with torch.autocast("cpu", torch.bfloat16):
        report = inplace_ops.convert(model, torch.randn(32, 64))
    copies = [r for r in report.remaining if r.reason == "autocast's copy of a parameter"]
    assert [r.bytes for r in copies] == [64 * 64 * 2]  # the first layer's input requires no grad


def test_reason_for_other_casts_of_weights() -> None:
    """A model that casts its weights itself does not blame autocast."""

    class Casting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.bfloat16(), self.weight.bfloat16()).float()

    model = nn.Sequential(Casting(64, 64), nn.GELU(), Casting(64, 64))
    report = inplace_ops.convert(model, torch.randn(32, 64))
    found = [r.reason for r in report.remaining if r.bytes == 64 * 64 * 2]
    assert found == ["a parameter in another dtype: never recomputed"]


def test_report_as_dict_and_as_table() -> None:
    report = inplace_ops.analyze(network(), examples())
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded == report.to_dict()
    assert loaded["saved_bytes_before"] == report.saved_bytes_before
    assert loaded["remaining"][0]["bytes"] == report.remaining[0].bytes
    text = str(report)
    mib = f"{report.saved_bytes_before / 2**20:.3f}"
    assert f"{mib}" in text.splitlines()[2]
    assert "peak of forward and backward" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_ordinals_follow_forward() -> None:
    """Each row has its consumer's place, and what is saved up to the end is all that is saved."""
    report = inplace_ops.convert(network(), examples())
    before, after = (
        sorted((row.ordinal, int(row.module)) for row in rows)
        for rows in (
            [*report.replaced, *report.remaining],
            [*report.remaining, *report.auxiliary],
        )
    )
    for places in (before, after):
        modules = [module for _, module in places]
        assert modules == sorted(modules)  # a sequential network runs its modules in order
        assert all(ordinal >= 0 for ordinal, _ in places)
    assert {row.consumer for row in report.auxiliary} == {"SiLU", "ReLU", "MaxPool2DWithIndices"}
    assert sum(row.bytes for row in report.auxiliary) == report.recompute_bytes > 0


def test_bytes_in_no_list_are_printed() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.convolution(x) * 1
        F.silu(y[:, :6], inplace=True)
        return y

    report = inplace_ops.convert(
        Parts(compute, convolution=nn.Conv2d(2, 8, 3)), torch.randn(2, 2, 32, 32)
    )
    assert report.unlisted_bytes == pytest.approx(4 * 2 * 6 * 30 * 30, rel=0.01)
    assert "saved by operations whose saved tensors PyTorch does not show" in str(report)


@pytest.mark.usefixtures("without_products")
def test_plot_draws_both_models(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = inplace_ops.Report()
    with pytest.raises(RuntimeError, match="the report is empty"):
        report.plot(tmp_path / "empty.png")
    assert not list(tmp_path.iterdir())
    report = inplace_ops.convert(network(), examples())
    report.plot(tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    for name, count in (
        ("original", report.saved_bytes_before),
        ("converted", report.saved_bytes_after),
    ):
        assert f"{name}: {count / 2**20:.2f} MiB" in drawn
    share = report.saved_bytes_after / report.saved_bytes_before
    assert f"Sequential, float32{[*examples().shape]}: {share:.0%} stays saved" in drawn
    largest = max(report.replaced, key=lambda tensor: tensor.bytes).module
    assert f"<!-- {largest} -->" in drawn  # on the axis
    layers = {"first": nn.Conv2d(2, 8, 3), "_norm": nn.BatchNorm2d(8), "$\\frac{$": nn.SiLU()}
    named = nn.Sequential(OrderedDict(layers))
    inplace_ops.analyze(named, torch.randn(2, 2, 32, 32)).plot(tmp_path / "names.svg")
    assert "in _norm" in (tmp_path / "names.svg").read_text()
    inplace_ops.analyze(nn.Linear(2, 2), torch.randn(2, 2)).plot(tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")


def test_plot_groups_modules_by_path() -> None:
    def tensor(path: str, size: int, ordinal: int) -> Auxiliary:
        return Auxiliary("Mul", path, size, ordinal)

    shallow = [tensor("stem", 50, 0), tensor("blocks.0.a", 30, 1), tensor("blocks.1.a", 20, 2)]
    assert groups(shallow) == {"stem": "stem", "blocks.0.a": "blocks", "blocks.1.a": "blocks"}
    small_stem = [tensor("stem", 1, 0), *shallow[1:]]  # blocks have nearly all
    assert list(groups(small_stem).values()) == ["stem", "blocks.0", "blocks.1"]
    many = groups([tensor(f"{i}", 10 + i, i) for i in range(12)])
    assert list(many.values()) == ["other modules"] * 5 + [*map(str, range(5, 12))]
    assert groups([]) == {}


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    report = inplace_ops.analyze(nn.Linear(2, 2), torch.randn(2, 2))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot("plot.png")


class Bar:
    """Records the arguments and updates of a progress bar."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.updates, self.is_closed = arguments, 0, False

    def update(self) -> None:
        self.updates += 1

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_closed = True


def test_analyze_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        bars.append(Bar(**arguments))
        return bars[-1]

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=make))
    inplace_ops.analyze(network(), examples())
    (bar,) = bars
    assert bar.updates == bar.arguments["total"]
    assert (bar.arguments["delay"], bar.is_closed) == (2, True)
    inplace_ops.convert(network(), examples())
    assert len(bars) == 1
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert inplace_ops.analyze(network(), examples()).is_filled


def test_user_function_that_saves_its_input_is_counted() -> None:
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x.sigmoid()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    calls = Parts(lambda m, x: Swish.apply(x))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), calls, nn.AvgPool2d(2))
    report = inplace_ops.analyze(model, torch.randn(2, 3, 16, 16))
    (row,) = [r for r in report.remaining if r.consumer == "Swish"]
    assert (row.producer, row.module, row.bytes) == ("Convolution", "1", 4 * 2 * 8 * 14 * 14)
    assert report.peak_bytes_after is not None
    del Swish.backward
    report = inplace_ops.analyze(model, torch.randn(2, 3, 16, 16))
    assert row in report.remaining
    assert report.peak_bytes_after is None
    with pytest.raises(NotImplementedError):
        inplace_ops.convert(model, torch.randn(2, 3, 16, 16))


def test_pass_under_saved_tensor_hooks_does_not_fill_in_report() -> None:
    model, x = network(), examples()
    report = inplace_ops.convert(model)
    with torch.autograd.graph.save_on_cpu():
        model(x)
    assert not report.is_filled
    model(x)
    assert report.is_filled


def test_report_finds_outputs_in_objects() -> None:
    class Output:
        __slots__ = ("value",)

        def __init__(self, value: Tensor) -> None:
            self.value = value

    def wraps() -> nn.Module:
        return Parts(lambda m, x: Output(m.network(x)), network=network())

    model = wraps()
    report = inplace_ops.convert(model)
    model(examples())
    assert len(report.replaced) >= 3
    assert inplace_ops.convert(wraps(), examples()).saved_bytes_after > 0


def test_error_in_report_warns_and_does_not_reach_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("error in the report")

    monkeypatch.setattr(Report, "fill", fail)
    model, x = network(), examples()
    report = inplace_ops.convert(model)
    with pytest.warns(UserWarning, match="LookupError"):
        model(x).sum().backward()
    assert not report.is_filled


def test_peaks_are_none_under_profiler() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        report = inplace_ops.convert(network(), examples())
    assert report.saved_bytes_after < report.saved_bytes_before
    assert report.peak_bytes_before is report.peak_bytes_after is None


def branches(compute: Callable[[nn.ModuleList, Tensor], Any], *layers: nn.Module) -> nn.Module:
    return Parts(lambda m, x: compute(m.layers, x), layers=nn.ModuleList(layers))


def conv() -> nn.Module:
    return nn.Conv2d(16, 16, 1)


def block(*layers: nn.Module, frozen: tuple[str, ...] = ()) -> nn.Module:
    norm = nn.BatchNorm2d(16)
    for name in frozen:
        norm.get_parameter(name).requires_grad_(False)
    return nn.Sequential(conv(), norm, *layers, conv())


def hooked() -> nn.Module:
    """A full backward hook inserts a Function before its layer, which hides the producer."""
    model = nn.Sequential(conv(), nn.BatchNorm2d(16), nn.ReLU(), *block(nn.ReLU()))
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            layer.register_full_backward_hook(lambda *_: None)
    return model


def aliased(alias: str, activation: nn.Module) -> nn.Module:
    """A convolution reads an activation's output, or its input, by an alias."""

    def compute(m: nn.ModuleList, x: Tensor) -> Tensor:
        z = m[1](m[0](x))
        y = m[2](z)
        return m[4](ViewFunction.apply(z if alias == "input" else y)) + m[3](y)

    return branches(compute, conv(), nn.BatchNorm2d(16), activation, conv(), conv())


def residual() -> nn.Module:
    def compute(m: nn.ModuleList, x: Tensor) -> Tensor:
        for conv1, norm1, conv2, norm2 in zip(*[iter(m)] * 4, strict=True):
            y = norm2(conv2(F.relu(norm1(conv1(x)), inplace=True)))
            y += x
            x = F.relu(y, inplace=True)
        return x.sum()

    layers = [(conv(), nn.BatchNorm2d(16), conv(), nn.BatchNorm2d(16)) for _ in range(3)]
    return branches(compute, *itertools.chain.from_iterable(layers))


def sum_with_a_view(view: Callable[[Tensor], Tensor]) -> nn.Module:
    """The sum's input is saved by a view of all its elements."""
    compute = lambda m, x: m[1](F.gelu(view(y := m[0](x))) + y)  # noqa: E731
    return branches(compute, conv(), conv())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.Sequential(conv(), nn.GroupNorm(4, 16), nn.SiLU(), conv()),
    # Its statistics have their own node.
    "group norm alone": lambda: nn.Sequential(conv(), nn.GroupNorm(4, 16), conv()),
    "layer norm": lambda: nn.Sequential(conv(), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16)),
    # Pools the argument.
    "pooling": lambda: nn.Sequential(nn.MaxPool2d(2), conv(), nn.BatchNorm2d(16), conv()),
    "index": lambda: branches(
        lambda m, x: m[0](x).relu().mean() + m[1](x)[x > 0].sum(), conv(), conv()
    ),
    "dropped branch": lambda: branches(
        lambda m, x: m[0](x) + m[1](F.silu(m[0](x))).detach(), conv(), conv()
    ),
    "ReLU": lambda: block(nn.ReLU()),
    "ReLU in place": lambda: block(nn.ReLU(inplace=True)),
    "LeakyReLU": lambda: block(nn.LeakyReLU()),
    "LeakyReLU in place": lambda: block(nn.LeakyReLU(inplace=True)),
    "ReLU6": lambda: block(nn.ReLU6()),
    "SiLU in place": lambda: block(nn.SiLU(inplace=True)),
    "frozen weight": lambda: block(nn.SiLU(), frozen=("weight",)),
    "frozen bias": lambda: block(nn.SiLU(), frozen=("bias",)),
    "frozen norm": lambda: block(nn.SiLU(), frozen=("weight", "bias")),
    "hooks": hooked,
    **{
        f"alias of the {alias} of {act.__name__}": lambda alias=alias, act=act: aliased(
            alias, act()
        )
        for alias in ("input", "output")
        for act in (nn.ReLU, nn.SiLU, nn.Tanh)
    },
    "residual": residual,
    "sum with a slice": lambda: sum_with_a_view(lambda y: y[:, :, 0:]),
    "sum with a view": lambda: sum_with_a_view(lambda y: y[:].flatten(1).view_as(y)),
    "sum with itself": lambda: sum_with_a_view(lambda y: y.narrow(0, 0, len(y))),
}


@pytest.mark.parametrize("with_an_example", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_report_add_up_to_saved_bytes(name: str, with_an_example: bool) -> None:
    """The saved bytes are those of a step, and of its allocations, before and after."""
    model, x = MODELS[name](), torch.randn(8, 16, 16, 16, requires_grad=True)
    original = copy.deepcopy(model)
    report = inplace_ops.convert(model, *([x] if with_an_example else []))
    after = saved_bytes(model, x)
    if not with_an_example:
        model(x)  # the call in saved_bytes has saved-tensor hooks, and does not fill in the report
    assert (report.saved_bytes_before, report.saved_bytes_after) == (
        saved_bytes(original, x),
        after,
    )
    remaining = sum(r.bytes for r in report.remaining)
    assert sum(r.bytes for r in report.replaced) + remaining == report.saved_bytes_before
    assert remaining + report.recompute_bytes == after
    assert report.unlisted_bytes == 0
    if name != "dropped branch":  # its output is larger than what is saved
        output = model(x)
        allocated = saved_allocation(lambda: model(x)) - output.nbytes
        assert after == pytest.approx(allocated, abs=1024)


def test_report_of_model_after_converted_model_lists_own_rows() -> None:
    """The report of a discriminator does not list tensors of the converted generator before it."""
    first, second = (nn.Sequential(conv(), nn.GroupNorm(4, 16), nn.SiLU(), conv()) for _ in "GD")
    x = torch.randn(8, 16, 16, 16)
    alone = inplace_ops.convert(copy.deepcopy(second), x)
    inplace_ops.convert(first)
    report = inplace_ops.convert(second)
    second(first(x))
    assert report.saved_bytes_before == alone.saved_bytes_before
    assert report.saved_bytes_after == alone.saved_bytes_after
    assert len(report.replaced) == len(alone.replaced) == 2


def peak_of_a_forward(model: nn.Module, x: Tensor) -> int:
    with torch.enable_grad(), largest_allocation() as peak:
        y = model(x)
    del y
    return peak[0]


def test_observation_does_not_keep_dropped_graph_alive() -> None:
    """A teacher's graph is freed before the student runs."""

    def compute(m: nn.ModuleList, x: Tensor) -> Tensor:
        target = m[0](x).detach().mean()
        with torch.no_grad():
            large = torch.cat([x] * 6).mean()
        return m[1](x) * target * large

    teacher = nn.Sequential(conv(), nn.BatchNorm2d(16), nn.SiLU(), conv())
    model = branches(compute, teacher, conv())
    x = torch.randn(8, 16, 32, 32)
    original = copy.deepcopy(model)
    inplace_ops.convert(model)
    for m in (original, model):
        m(x)
    assert peak_of_a_forward(model, x) <= peak_of_a_forward(original, x)


@pytest.mark.parametrize(
    ("norm", "activation"),
    [
        pytest.param(nn.BatchNorm2d(16), nn.SiLU(), id="batch-SiLU"),
        pytest.param(nn.GroupNorm(4, 16), nn.Hardswish(), id="group-Hardswish"),
    ],
)
def test_first_step_of_block_needs_less_peak_memory(norm: nn.Module, activation: nn.Module) -> None:
    """The comparison at first use computes differences in parts, so it adds little to the peak."""
    original = nn.Sequential(conv(), copy.deepcopy(norm), copy.deepcopy(activation), conv())
    x = torch.randn(8, 16, 128, 128)
    model = copy.deepcopy(original)
    inplace_ops.convert(model)
    peaks = []
    for m in (original, model):
        with largest_allocation() as peak:
            m(x).sum().backward()
        peaks += peak
    assert peaks[1] < 0.9 * peaks[0]


# No line of a report is untrue.


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


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
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
@pytest.mark.parametrize("name", NETWORKS)
def test_reasons_do_not_blame_what_is_handled(name: str, max_ops: int) -> None:
    make, inputs = NETWORKS[name]
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

    detached = Parts(lambda m, x: m.net(x).detach(), net=network())
    assert "no output requires a gradient" in str(inplace_ops.analyze(detached, examples()))

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise NotImplementedError("no backward here")

    without_backward = Parts(lambda m, x: Fails.apply(m.net(x)), net=network())
    text = str(inplace_ops.analyze(without_backward, examples()))
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
