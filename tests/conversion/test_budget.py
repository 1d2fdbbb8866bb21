"""Budgets: `convert` and `analyze` with `memory`."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inplace_ops
from inplace_ops.conversion import budget
from inplace_ops.conversion.blocks import Blocks, blocks_of
from inplace_ops.conversion.budget import Budget
from inplace_ops.conversion.report import Report
from inplace_ops.conversion.verify import Run
from inplace_ops.memory import peak_bytes
from inplace_ops.recompute.checkpoints import RecomputationError

pytestmark = pytest.mark.usefixtures("_one_thread")

D = 64


class Block(nn.Module):
    """A block of a transformer with two layers of equal width instead of attention."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh())
        self.norm, self.drop = nn.LayerNorm(D), nn.Dropout(p)
        self.up, self.act, self.down = nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        out: Tensor = x + self.drop(self.down(self.act(self.up(self.norm(x)))))
        return out


class Transformer(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[block() for _ in range(count)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


def convolutional() -> nn.Module:
    """A network whose blocks have batch norms, and are not checkpointed."""

    def block() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 16, 1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 4, 1), nn.SiLU()
        )

    return nn.Sequential(*[block() for _ in range(4)])


def tokens() -> Tensor:
    return torch.randn(4, 64, D)


def images() -> Tensor:
    return torch.randn(2, 4, 24, 24)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (lambda: Transformer(count=4), tokens),
    "convolutional": (convolutional, images),
}


def peak(model: nn.Module, x: Tensor) -> int:
    """Return the peak of a step, as a report counts it."""

    def step() -> None:
        out = model(x)
        torch.autograd.grad(out, [*model.parameters()], torch.randn_like(out))

    found = peak_bytes(step)
    assert found is not None
    return found


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fail if the block changes the model, its state or PyTorch's random state."""
    state = copy.deepcopy(model.state_dict())
    attributes = [{**vars(module)} for module in model.modules()]
    types, generator = [*map(type, model.modules())], torch.get_rng_state()
    yield
    assert [*map(type, model.modules())] == types
    for module, before in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == before.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    torch.testing.assert_close({**model.state_dict()}, state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generator)


def shares(report: Report, *fractions: float) -> list[int]:
    """Return budgets between the lowest and the highest peak of a report's candidates."""
    peaks = [each.peak_bytes for each in report.candidates if each.peak_bytes is not None]
    low, high = min(peaks), max(peaks)
    return [int(1.05 * low + fraction * (high - low)) for fraction in fractions]


# What memory may be.


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (1000, 1000),
        ("8 GiB", 8 * 2**30),
        ("8GiB", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        (" 1.5 MB ", 1_500_000),
        ("512 MiB", 512 * 2**20),
        ("2kB", 2000),
        ("3 KiB", 3072),
        ("1 TiB", 2**40),
        (".5 TB", 5 * 10**11),
        ("100 B", 100),
    ],
)
def test_bytes_and_units_are_understood(memory: int | str, expected: int) -> None:
    assert Budget.of(memory).limit(None) == expected


def test_a_share_is_one_of_pytorchs_peak() -> None:
    assert Budget.of(0.25).limit(1000) == 250


BAD_VALUES: list[tuple[Any, type[Exception]]] = [
    *((value, TypeError) for value in (True, False, [8], b"8 GiB", torch.tensor(5))),
    *((value, ValueError) for value in (0, -1, 0.0, -0.5, 1.0, 1.5, float("nan"), float("inf"))),
    *((value, ValueError) for value in ("8 gigs", "8", "", "GiB", "-8 GiB", "0 GiB", "8 GiB free")),
]


@pytest.mark.parametrize(("memory", "error"), BAD_VALUES)
@pytest.mark.parametrize("function", [inplace_ops.convert, inplace_ops.analyze])
def test_bad_values_raise_and_say_what_is_understood(
    function: Callable[..., Any], memory: Any, error: type[Exception]
) -> None:
    model, x = Transformer(), tokens()
    with unchanged(model), pytest.raises(error, match="memory must be a number of bytes") as info:
        function(model, x, memory=memory)
    assert "8 GiB" in str(info.value)
    assert repr(memory) in str(info.value)


def test_memory_without_an_example_raises() -> None:
    model = Transformer()
    with unchanged(model), pytest.raises(TypeError, match="memory needs an example"):
        inplace_ops.convert(model, memory="8 GiB")


# The choice.


@pytest.mark.parametrize("name", MODELS)
def test_chosen_candidate_is_the_fastest_that_fits_and_trains_as_pytorch(name: str) -> None:
    make, example = MODELS[name]
    model, x = make().double(), example().double()
    for limit in shares(inplace_ops.analyze(model, x, memory=2**40), 0.0, 0.3, 1.0):
        twin, reference = copy.deepcopy(model), copy.deepcopy(model)
        report = inplace_ops.convert(twin, x, memory=limit)
        assert_same_state(twin, reference, tolerance=0)
        (chosen,) = [each for each in report.candidates if each.is_chosen]
        fitting = [c for c in report.candidates if (c.peak_bytes or limit + 1) <= limit]
        assert chosen.seconds == min(each.seconds or float("inf") for each in fitting)
        assert (report.memory_limit, report.peak_bytes_after) == (limit, chosen.peak_bytes)
        assert report.saved_bytes_after == chosen.saved_bytes == inplace_ops.saved_bytes(twin, x)
        assert peak(twin, x) <= limit  # also in the first step after `convert`
        assert peak(twin, x) <= limit
        twin.load_state_dict(reference.state_dict())  # a step has updated running statistics
        for step in range(3):
            y = torch.randn_like(x)
            for each in (twin, reference):
                torch.manual_seed(step)
                optimizer = torch.optim.SGD(each.parameters(), 1e-3)
                optimizer.zero_grad()
                each(y).square().mean().backward()
                optimizer.step()
            gradients = [[p.grad for p in each.parameters()] for each in (twin, reference)]
            torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)
        assert_same_state(twin, reference, tolerance=1e-8)


def assert_same_state(actual: nn.Module, expected: nn.Module, tolerance: float) -> None:
    states = [{**model.state_dict()} for model in (actual, expected)]
    torch.testing.assert_close(*states, rtol=tolerance, atol=tolerance * 1e-2)


def test_lower_budgets_than_products_reach_need_checkpoints() -> None:
    model, x = Transformer(count=8), tokens()
    table = inplace_ops.analyze(model, x, memory=2**40).candidates
    products = min(each.peak_bytes or 0 for each in table if not each.checkpointed)
    report = inplace_ops.convert(model, x, memory=int(0.9 * products))
    (chosen,) = [each for each in report.candidates if each.is_chosen]
    assert chosen.checkpointed == tuple(f"blocks.{i}" for i in range(len(chosen.checkpointed)))
    assert 0 < len(chosen.checkpointed) <= 8
    assert peak(model, x) <= 0.9 * products


def limits_of(report: Report) -> list[int]:
    return [each.max_ops for each in report.candidates if not each.checkpointed]


def test_candidates_have_growing_limits_and_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more limits than measurements the largest one is measured all the same."""
    model, x = Transformer(count=4), tokens()
    report = inplace_ops.analyze(model, x, memory=0.9)
    limits = limits_of(report)
    assert limits[0] == 1
    assert limits == sorted(set(limits))
    assert limits[-1] > 2
    assert len(report.candidates) <= 20
    saved = [each.saved_bytes for each in report.candidates if not each.checkpointed]
    assert saved == sorted(saved, reverse=True)
    bounded = inplace_ops.analyze(model, x, memory=0.9, max_ops=2)
    assert max(each.max_ops for each in bounded.candidates) <= 2
    monkeypatch.setattr(budget, "MOST_CANDIDATES", 3)
    monkeypatch.setattr(budget, "_FOR_BLOCKS", 1)
    few = inplace_ops.analyze(model, x, memory=0.9)
    assert len(few.candidates) <= 3
    assert limits_of(few)[0] == 1
    assert limits[-1] >= max(each.max_ops for each in few.candidates) > 2


# Budgets that nothing meets.


@pytest.mark.parametrize("memory", [1, 1e-6])
def test_impossible_budget_raises_and_leaves_the_model(memory: Any) -> None:
    model, x = Transformer(count=3), tokens()
    with unchanged(model), pytest.raises(MemoryError) as info:
        inplace_ops.convert(model, x, memory=memory)
    text = str(info.value)
    for part in ("the lowest peak", "saved for backward", "gradients", "fewer samples"):
        assert part in text
    with unchanged(model):
        report = inplace_ops.analyze(model, x, memory=memory)
    assert report.candidates
    assert not any(each.is_chosen for each in report.candidates)
    assert any("no candidate fits" in remark for remark in report.remarks)
    assert "no candidate fits" in str(report)


def test_message_says_why_blocks_are_not_checkpointed() -> None:
    with pytest.raises(MemoryError, match=r"Not checkpointed: 0 and 3 more, as a batch norm"):
        inplace_ops.convert(convolutional(), images(), memory=1)
    with pytest.raises(MemoryError, match="has no blocks to checkpoint"):
        inplace_ops.convert(nn.Sequential(nn.Linear(D, D), nn.Tanh()), tokens(), memory=1)


# Memory that runs out.


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Let a measured step run out of memory where a condition holds."""

    def install(condition: Callable[[], bool]) -> None:
        original = Run.gradients

        def gradients(self: Run) -> Any:
            if condition():
                torch.empty(2**50)  # PyTorch's allocator raises
            return original(self)

        monkeypatch.setattr(Run, "gradients", gradients)

    return install


def is_original(model: nn.Module) -> bool:
    return "_inplace_ops" not in vars(model)


def test_original_that_does_not_fit_is_left_out(failing: Any) -> None:
    model, x = Transformer(count=3), tokens()
    failing(lambda: is_original(model))
    with unchanged(model), pytest.raises(MemoryError, match="pass bytes"):
        inplace_ops.convert(model, x, memory=0.5)
    report = inplace_ops.convert(model, x, memory="1 GiB")
    assert report.peak_bytes_before is None
    assert any(each.is_chosen for each in report.candidates)
    assert "compared with the first candidate's" in str(report)


def test_candidates_that_do_not_fit_have_empty_cells(failing: Any) -> None:
    model, x = Transformer(count=3), tokens()
    failing(lambda: not is_original(model) and vars(model)["_inplace_ops"].settings.max_ops == 1)
    first, *others = inplace_ops.analyze(model, x, memory="1 GiB").candidates
    assert (first.max_ops, first.peak_bytes, first.seconds, first.flops) == (1, None, None, None)
    assert all(each.peak_bytes is not None for each in others)
    assert not first.is_chosen
    assert " ?" in str(inplace_ops.convert(model, x, memory="1 GiB"))


def test_nothing_that_fits_raises(failing: Any) -> None:
    model, x = Transformer(count=3), tokens()
    failing(lambda: True)
    with unchanged(model), pytest.raises(MemoryError, match="memory runs out in all of them"):
        inplace_ops.convert(model, x, memory="1 GiB")


# The report.


def test_report_names_what_comes_in_addition() -> None:
    model, x = Transformer(), tokens()
    model.norm.requires_grad_(False)
    report = inplace_ops.analyze(model, x, memory="1 GiB")
    parameters = sum(p.nbytes for p in model.parameters())
    assert report.parameter_bytes == parameters
    assert report.trainable_bytes == parameters - 2 * 4 * D
    assert report.buffer_bytes == 0
    text = str(report)
    assert "float32[4, 64, 64]" in text
    assert f"Adam would add {2 * report.trainable_bytes / 2**20:.3f} MiB" in text
    rows = [line for line in text.splitlines() if line.endswith("chosen")]
    assert len(rows) == 1
    assert report.to_dict()["candidates"][0]["max_ops"] == 1


def test_converted_model_warns_and_does_not_change() -> None:
    model, x = Transformer(), tokens()
    inplace_ops.convert(model)
    with pytest.warns(UserWarning, match="already converted with max_ops=4"):
        inplace_ops.convert(model, x, memory=0.5)


# Which blocks may run twice.


def blocks_in(model: nn.Module, x: Tensor) -> Blocks:
    return blocks_of(model, torch.no_grad()(lambda: model(x)))


class Odd(Block):
    """A block that runs `run(block, plain, x)`, where `plain` is the forward of `Block`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run, self.state, self.depth = run, [], 0
        self.register_buffer("book", torch.zeros(D))
        self.generator, self.others = torch.Generator(), [nn.Parameter(torch.zeros(D))]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, super().forward, x)


def _after(change: Callable[[Any], object]) -> Callable[..., Tensor]:
    """Return a forward that changes something first."""

    def run(block: Any, plain: Any, x: Tensor) -> Tensor:
        change(block)
        return plain(x)

    return run


def _remembering(block: Any, plain: Any, x: Tensor) -> Tensor:
    block.last = plain(x)
    return block.last


def _undoing(block: Any, plain: Any, x: Tensor) -> Tensor:
    """Change an attribute, and undo that after what is saved last."""
    block.depth += 1
    y = plain(x) * block.depth
    block.depth -= 1
    return y


def _swallowing(block: Any, plain: Any, x: Tensor) -> Tensor:
    try:
        return plain(x)
    except BaseException:
        return x


def _random_of_python(block: Any, plain: Any, x: Tensor) -> Tensor:
    return plain(x) if random.random() < 0.5 else plain(x).sin()


def _growing(block: Any, plain: Any, x: Tensor) -> Tensor:
    """Build a table at the first call, which later ones read."""
    if not hasattr(block, "table"):
        block.table = torch.linspace(0, 1, D)
    return plain(x) + block.table


def _with_hook() -> Block:
    block = Block()
    block.act.register_forward_hook(lambda *args: None)
    return block


def _with_forward() -> Block:
    block = Block()
    block.forward = block.forward  # type: ignore[method-assign]
    return block


CHANGED = "it changes a buffer or an attribute"
# By name: what a block does, and why it is not checkpointed.
EXCLUDED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        name: (lambda run=run: Odd(run), reason)
        for name, run, reason in (
            ("number", _after(lambda b: setattr(b, "depth", b.depth + 1)), CHANGED),
            ("list", _after(lambda b: b.state.append(1)), CHANGED),
            ("buffer without a version", _after(lambda b: b.book.data.add_(1)), CHANGED),
            ("generator", _after(lambda b: torch.rand(1, generator=b.generator)), CHANGED),
            ("tensor", _remembering, CHANGED),
            ("undone", _undoing, "it leaves an attribute changed when its second run ends early"),
            ("exception", _swallowing, "it catches the exception that ends its second run"),
            ("random", _random_of_python, "it draws random numbers from Python or NumPy"),
            (
                "parameter",
                lambda b, plain, x: plain(x) + b.others[0],
                "it reads a parameter that is not its own",
            ),
            (
                "argument",
                lambda b, plain, x: plain(x.clone()) + x.mul_(0.5),
                "it changes its arguments",
            ),
        )
    },
    "hook": (_with_hook, "hooks inside it would run twice"),
    "forward": (_with_forward, "its forward was replaced"),
}


@pytest.mark.parametrize("name", EXCLUDED)
def test_block_that_changes_something_is_not_checkpointed(name: str) -> None:
    block, reason = EXCLUDED[name]
    found = blocks_in(Transformer(block, 3), tokens())
    assert found.usable == []
    assert {*found.reasons.values()} == {reason}


@pytest.mark.parametrize("block", [Block, lambda: Odd(_growing)])
def test_block_that_changes_nothing_may_be_checkpointed(block: Callable[[], nn.Module]) -> None:
    """Blocks are listed in the order in which they run. They have new containers of arguments."""

    class Backwards(Transformer):
        def forward(self, x: Tensor) -> Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            out: Tensor = self.head(x)
            return out

    model, x = Backwards(block, 3), tokens()
    torch.manual_seed(0)
    expected = model(x)
    for _ in range(10):
        torch.manual_seed(0)
        outputs = []
        found = blocks_of(model, torch.no_grad()(lambda o=outputs: o.append(model(x))))
        assert found.usable == ["blocks.2", "blocks.1", "blocks.0"]
        torch.testing.assert_close(outputs[0], expected, rtol=0, atol=0)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Calls(Transformer):
    """A model that calls its blocks by `call(block, state)`, where the state has an x and keys."""

    def __init__(self, call: Callable[..., Tensor], block: type[nn.Module] = Block) -> None:
        super().__init__(block, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        state = State(x.clone(), [])
        for block in self.blocks:
            state.x = self.call(block, state)
        out: Tensor = self.head(state.x)
        return out


@dataclass
class State:
    x: Tensor
    keys: list[Tensor]


class Filling(Block):
    """Fills a cache of keys among its arguments."""

    def forward(self, state: State) -> Tensor:  # type: ignore[override]
        state.keys.append(state.x)
        return super().forward(torch.stack(state.keys).mean(0))


class Reading(Block):
    def forward(self, state: State) -> Tensor:  # type: ignore[override]
        return super().forward(state.x)


class WithGradients(Transformer):
    """A model that differentiates inside forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return gradient


class Adding(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1)


def _written(block: nn.Module, state: State) -> Tensor:
    y = block(state.x)
    state.x.mul_(0.5)
    return state.x + y


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Calls(lambda block, state: block(state), Filling), "it changes its arguments"),
        # It overwrites an attribute of the argument of a block after its run.
        (lambda: Calls(lambda block, s: block(s), Reading), "the model changes its arguments"),
        (lambda: Calls(_written, Adding), "the model changes its arguments"),
        (lambda: WithGradients(count=3), "raises without gradients"),
    ],
    ids=["cache", "attribute", "write", "gradients"],
)
def test_model_that_forbids_checkpoints_is_fitted_without(
    make: Callable[[], Transformer], reason: str
) -> None:
    model, x = make(), tokens()
    found = blocks_in(model, x)
    assert found.usable == []
    assert reason in {*found.reasons.values()}.pop()
    report = inplace_ops.convert(model, x, memory="1 GiB")
    assert not any(each.checkpointed for each in report.candidates)


def test_checkpoints_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Transformer(count=3), tokens()

    def fails(*args: Any) -> None:
        raise RecomputationError("the checkpointed Block saved more tensors")

    monkeypatch.setattr("inplace_ops.recompute.checkpoints._Call._run_again", fails)
    report = inplace_ops.convert(model, x, memory="1 GiB")
    (failed,) = [each for each in report.candidates if each.checkpointed]
    assert failed.peak_bytes is None
    assert any("checkpoints of blocks fail" in remark for remark in report.remarks)
