"""Concatenations whose parts several saved tensors share: see 5 of NOTE [Narrow copies]."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import saved_allocation
from _support.twins import (
    Parts,
    Program,
    TwoOutputs,
    assert_same_gradients,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    number_of_values,
    recomputed,
    replaced,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import inplace_ops
from inplace_ops.recompute import nodes
from inplace_ops.recompute.rewrites import Bits

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

Write = Callable[[list[Tensor]], object]
WIDTH, GROWTH = 16, 8


def layer(inputs: int, is_module: bool) -> nn.Module:
    """Return a layer of a DenseNet: a norm, an activation and a convolution of all parts."""
    norm, conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, GROWTH, 3, padding=1)
    if is_module:
        return Parts(lambda m, x: m.conv(m.act(m.norm(x))), norm=norm, act=nn.ReLU(), conv=conv)
    return nn.Sequential(norm, nn.ReLU(), conv)


class DenseBlock(nn.Module):
    """Layers that each read the outputs of all layers before; `write` may modify them between."""

    def __init__(
        self, depth: int, write: Write = lambda parts: None, is_module: bool = True
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(layer(WIDTH + i * GROWTH, is_module) for i in range(depth))
        self.pool, self.write, self.step = nn.AvgPool2d(2), write, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        parts = [self.pool(self.first(x))]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
            self.write(parts)
        return torch.cat(parts, 1).double()


@pytest.mark.parametrize("is_module", [True, False], ids=["modules", "sequences"])
def test_memory_of_a_dense_block_is_linear_in_its_depth(is_module: bool) -> None:
    """Each part is saved once, and nothing else: the convolutions save no input of their own."""
    x = torch.randn(4, 3, 32, 32)
    pixels = 4 * 16 * 16 * 4  # bytes of one channel after pooling
    with no_warnings():
        saved = {}
        for depth in (3, 6):
            twin = converted_twin(DenseBlock(depth, is_module=is_module), max_ops=4)
            saved[depth] = saved_allocation(lambda twin=twin: twin(x))
            assert saved[depth] == pytest.approx(inplace_ops.saved_bytes(twin, x), abs=2**20)
        outputs = {depth: 2 * (WIDTH + depth * GROWTH) * pixels for depth in saved}  # in float64
        more = (saved[6] - outputs[6]) - (saved[3] - outputs[3])
        assert 3 * GROWTH * pixels <= more <= 1.1 * 3 * GROWTH * pixels


class Activated(nn.Module):
    """Convolutions of all parts, each with an activation; of the first alone before a pooling."""

    def __init__(self, activation: nn.Module, is_pooled: bool) -> None:
        super().__init__()
        self.activation, self.is_pooled = activation, is_pooled
        widths = [WIDTH + (0 if is_pooled else i * GROWTH) for i in range(3)]
        self.convs = nn.ModuleList(nn.Conv2d(width, GROWTH, 3, padding=1) for width in widths)
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.activation(self.first(x))]
        for conv in self.convs:
            inputs = parts[0] if self.is_pooled else torch.cat(parts, 1)
            parts.append(self.activation(conv(inputs)))
        return F.avg_pool2d(torch.cat(parts, 1), 2) if self.is_pooled else parts[-1].mean()


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.2, inplace=True)], ids=str)
@pytest.mark.parametrize(("is_pooled", "parts", "bits"), [(False, 4, 1), (True, 2, 3)])
def test_activated_parts_are_saved_once(
    activation: nn.Module, is_pooled: bool, parts: int, bits: int
) -> None:
    """Concatenations are recomputed from their parts; of parts that nothing saves, bits suffice.

    The first part is as large as two others.
    """
    model, x = Activated(activation, is_pooled), torch.randn(4, WIDTH, 16, 16)
    twin = converted_twin(model)
    part = 4 * GROWTH * 16 * 16
    expected = parts * part * x.itemsize + bits * part // 8
    assert inplace_ops.saved_bytes(twin, x) == pytest.approx(expected, abs=256)
    assert_same_steps(model, twin, x, tolerance=0)


OTHER_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "without a rule": lambda h: F.max_pool2d(h, 3, 1, 1),
    "too expensive": lambda h: F.silu(F.gelu(h)),
}


@pytest.mark.parametrize("other", OTHER_PARTS)
def test_bits_suffice_of_a_part_of_a_concatenation_that_stays_saved(other: str) -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.last(torch.cat([F.relu(m.wide(h)), OTHER_PARTS[other](h)], 1))

    layers = {"first": nn.Conv2d(3, 8, 1), "wide": nn.Conv2d(8, 8, 1), "last": nn.Conv2d(16, 4, 1)}
    model, x = Parts(compute, **layers), torch.randn(2, 3, 8, 8)
    twin = converted_twin(model, max_ops=1)
    assert sum(isinstance(value, Bits) for value in replaced(twin(x))) == 1
    assert_same_steps(model, twin, x, tolerance=1e-6)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_block_matches_pytorch(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    model = DenseBlock(4).to(dtype, memory_format=memory_format)
    x = torch.randn(2, 3, 8, 8, dtype=dtype).to(memory_format=memory_format)
    assert_same_steps(
        model, converted_twin(model), x, tolerance=1e-5 if dtype == torch.float32 else 0
    )


def _no_grad(parts: list[Tensor]) -> None:
    with torch.no_grad():
        parts[1].mul_(2)


WRITES: dict[str, Write] = {
    "no_grad": _no_grad,
    "detached": lambda parts: parts[1].detach().add_(1),
    "first_part": lambda parts: parts[0].detach().add_(1),
    "view": lambda parts: parts[1].detach().view(-1)[:7].zero_(),
    "with_grad": lambda parts: parts[-1].mul_(0.5),
}


@pytest.mark.parametrize("begin", [1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_part_written_to_between_concatenations_matches_pytorch(write: str, begin: int) -> None:
    """A later concatenation has other values of the part: they may not share a copy."""

    def later(parts: list[Tensor], model: DenseBlock) -> None:
        if model.step >= begin:
            WRITES[write](parts)

    model = DenseBlock(4)
    model.write = lambda parts: later(parts, model)
    twin = converted_twin(model)
    twin.write = lambda parts: later(parts, twin)
    assert_same_steps(model, twin, images(), steps=3)


class Joins(nn.Module):
    """Concatenates a saved and an unsaved tensor twice; `join` makes the second concatenation."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.same = nn.GroupNorm(2, 16), nn.Identity()
        self.conv, self.shortcut = nn.Conv2d(16, 8, 3, padding=1), nn.LazyConv2d(8, 1)
        self.join, self.keeps = join, False
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.same(self.down(a))
        y = self.conv(self.norm(torch.cat([a, b], 1)))
        joined = self.join(a, b)
        self.bytes = joined.nbytes
        self.kept = [joined.detach()] if self.keeps else []
        return y + self.shortcut(joined)


# How the second concatenation is made, and how many of its channels are saved for it.
JOINS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "plain": (lambda a, b: torch.cat([a, b], 1), 0),
    "negative_dim": (lambda a, b: torch.cat([b, a], -3), 0),
    "one_part": (lambda a, b: torch.cat([b], 1), 0),
    "the_same_twice": (lambda a, b: torch.cat([a, b, b], 1), 0),
    "empty_part": (lambda a, b: torch.cat([b[:, :0], a], 1), 0),
    "new_part": (lambda a, b: torch.cat([b, b * 1.5], 1), 8),
    "constant": (lambda a, b: torch.cat([b, b.detach() * 2], 1), 8),
    "two_constants": (lambda a, b: torch.cat([b, *(b.detach() * 2).chunk(2, 1)], 1), 16),
    "more_than_half_is_new": (lambda a, b: torch.cat([b, b * 1.5, b * 0.5], 1), 24),
    "chunks": (lambda a, b: torch.cat([*b.chunk(2, 1), *a.chunk(2, 1)], 1), 16),
    "cast": (lambda a, b: torch.cat([a, b.bfloat16()], 1), 16),
    "small_part": (lambda a, b: torch.cat([a, a.mean(1, keepdim=True)], 1), 1),
}


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("join", JOINS)
def test_second_concatenation_is_computed_from_shared_parts(join: str) -> None:
    compute, channels = JOINS[join]
    x = torch.randn(4, 3, 16, 16)
    model = Joins(compute)
    model(x)
    with no_warnings():
        twin = converted_twin(model, max_ops=4)
        assert_same_steps(model, twin, x)
        pixels = 4 * 16 * 16 * 4
        saved = inplace_ops.saved_bytes(model, x) - inplace_ops.saved_bytes(twin, x)
    # The norm's output is never saved; its scale and shift are.
    assert saved == pytest.approx((16 - channels) * pixels + model.bytes, abs=1024)


def test_concatenation_written_to_after_forward_raises_as_in_pytorch() -> None:
    """The caller keeps it, so the spec reads it instead of a copy."""
    model, x = Joins(JOINS["new_part"][0]), images()
    model.keeps = True
    model(x)
    twin = converted_twin(model)
    for network in (model, twin):
        output = network(x)
        network.kept[0].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output.sum(), network.shortcut.weight)


def written_before_it_is_saved(m: Any, z: Tensor, begin: int) -> Tensor:
    """The first concatenation is saved last, after the part was written to and read again."""
    a, b, c = m.act(m.other(z)), m.other(z).sigmoid(), m.other(z).tanh()
    first = torch.cat([a, b], 1)
    if m.step >= begin:
        with torch.no_grad():
            a.add_(1)
    second = torch.cat([a, c], 1)
    return (F.silu(second) * F.silu(first)).double()


def of_two_outputs(m: Any, z: Tensor, begin: int, written: int) -> Tensor:
    """A note of one output of an operation proves nothing of another one."""
    outputs = TwoOutputs.apply(m.other(z))
    kept = [m.act(output) for output in outputs]  # the module's hook takes notes
    first = F.silu(torch.cat(kept, 1))
    if m.step >= begin:
        kept[written].detach().mul_(1.5)
    second = F.silu(torch.cat(kept[::-1], 1))
    third = F.silu(torch.cat([*kept, first], 1))
    return first.double() * second + third[:, :12]


@pytest.mark.parametrize("begin", [1, 3])
@pytest.mark.parametrize(
    "compute",
    [
        written_before_it_is_saved,
        pytest.param(partial(of_two_outputs, written=0), id="first of two outputs"),
        pytest.param(partial(of_two_outputs, written=1), id="second of two outputs"),
    ],
)
def test_copy_of_a_part_that_was_written_to_is_not_used_for_earlier_values(
    compute: Callable[..., Tensor], begin: int
) -> None:
    model, x = Program(partial(compute, begin=begin), activation=nn.Identity), images()
    assert_same_steps(model, converted_twin(model), x, steps=4)


class SmallPart(nn.Module):
    """A tensor that a convolution saves, and a small one that nothing saves, for `join`."""

    def __init__(self, join: Callable[[Any, Tensor, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.conv, self.down = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.small, self.same, self.join = nn.Conv2d(3, 2, 1), nn.Identity(), join
        self.heads = nn.ModuleList(nn.LazyConv2d(3, 1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.conv(x)
        y = self.down(h)
        joined = self.join(self, h, self.same(self.small(x) + 1))
        self.kept = joined[0].detach()
        return [y, *(head(each) for head, each in zip(self.heads, joined, strict=True))]


def chunks(m: SmallPart, h: Tensor, small: Tensor, first: int) -> list[Tensor]:
    """Concatenate the chunks of one tensor, which have one node."""
    parts = small.chunk(2, 1)
    return [torch.cat([h, parts[i]], 1) for i in (first, 1 - first)]


def rounded(m: SmallPart, h: Tensor, small: Tensor) -> list[Tensor]:
    """The first head reads a rounded part, which the second one must not read."""
    return [m.same(torch.cat([h, small], 1)).bfloat16(), torch.cat([small, small], 1)]


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize(
    ("join", "count"), [(partial(chunks, first=0), 2), (partial(chunks, first=1), 2), (rounded, 1)]
)
def test_copies_of_parts_are_told_apart(join: Callable[..., list[Tensor]], count: int) -> None:
    model, x = SmallPart(join), images()
    if join is rounded:
        model.heads[0].to(torch.bfloat16)
    model(x)
    twin = converted_twin(model)
    with no_warnings():
        assert len(recomputed(twin(x))) == count
        assert_same_steps(model, twin, x, tolerance=0)


@pytest.mark.usefixtures("without_products")
def test_shared_copy_does_not_give_way_to_the_concatenation() -> None:
    """PyTorch does not keep the first one for the second one's backward."""
    model = SmallPart(lambda m, h, small: [torch.cat([h, small], 1), torch.cat([small, small], 1)])
    x = images()
    model(x)
    twin = converted_twin(model)
    assert len(recomputed(twin(x)[-1])) == 1
    write = lambda m: m.kept.zero_()  # noqa: E731
    assert_same_gradients(model, twin, x, "heads.1.weight", between=write)


def with_auxiliary_head(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two heads read a tensor that nothing saves, one of them in a larger concatenation."""
    h = m.same(m.first(x) + m.second(x))
    joined = torch.cat([h, m.large(x) + m.large(x)], 1)
    m.storage = StorageWeakRef(joined.untyped_storage())
    auxiliary = m.aux(joined)
    m.write(joined)
    return auxiliary, m.head(torch.cat([h, h * 1.5], 1))


def auxiliary_model(
    width: int, compute: Callable[[Any, Tensor], Any] = with_auxiliary_head, **parts: Any
) -> nn.Module:
    channels = {"first": (3, 6), "second": (3, 6), "large": (3, width), "aux": (6 + width, 4)}
    layers = {name: nn.Conv2d(*sizes, 1) for name, sizes in {**channels, "head": (12, 3)}.items()}
    return Parts(compute, **layers, same=nn.Identity(), write=lambda joined: None, **parts)


def test_part_of_a_much_larger_concatenation_does_not_keep_it_alive() -> None:
    """PyTorch frees it after the backward of the operation that saves it."""
    twin, x = converted_twin(auxiliary_model(width=90)), images()
    for _ in range(2):
        auxiliary, output = twin(x)
        auxiliary.sum().backward(retain_graph=False, inputs=[twin.aux.weight])
        del auxiliary
        assert twin.storage.expired()
        output.sum().backward()


def test_part_of_a_concatenation_that_was_written_to_is_not_read() -> None:
    """Only the other head's backward runs, so nothing raises in PyTorch."""
    model, x = auxiliary_model(width=18), images()
    twin = converted_twin(model)
    for writes in (False, True, True):  # after the first use
        if writes:
            model.write = twin.write = lambda joined: joined.detach().zero_()
        assert_same_gradients(model, twin, x, "head.weight", "first.weight")


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("on_side", ["neither", "first", "second"])
def test_copy_of_a_part_is_not_shared_across_streams(
    on_side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready on the stream on which it was made: the other one's operations have no value."""
    main, side = (SimpleNamespace(device=torch.device("cpu")) for _ in range(2))
    current = main
    monkeypatch.setattr(nodes, "stream_of", lambda node: current)

    def compute(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        nonlocal current
        h = m.same(m.first(x) + m.second(x))
        current = side if on_side == "first" else main
        large = m.large(x)
        y = m.down(large)  # saves the other part
        auxiliary = m.aux(torch.cat([h, large], 1))
        current = side if on_side == "second" else main
        return auxiliary, y, m.head(torch.cat([h, h * 1.5], 1))

    model = auxiliary_model(90, compute, down=nn.Conv2d(90, 2, 1))
    auxiliary, _, output = converted_twin(model)(images())
    assert (nodes.packed(auxiliary.grad_fn, "input") is not None) == (on_side != "first")
    assert (nodes.packed(output.grad_fn, "input") is not None) == (on_side == "neither")


LEAKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "large_parts": lambda m, z: torch.cat([m.other(z), m.other(z)]),
    "slices_of_one_tensor": lambda m, y: torch.cat([m.other(y)[:1], m.other(y)[1:]]),
    "small_part": lambda m, z: torch.cat([z, z, z, z, m.other(z)]),
    "shared_part": lambda m, z: m.act(torch.cat([y := m.other(z), z])) + torch.cat([y, z.sin()]),
}


@pytest.mark.parametrize("runs_backward", [False, True])
@pytest.mark.parametrize("program", LEAKS)
def test_graph_of_a_concatenation_is_freed(program: str, runs_backward: bool) -> None:
    """A record that referred to its node would keep the graph alive forever."""
    twin = converted_twin(Program(lambda m, z: m.conv(LEAKS[program](m, z))))
    before = number_of_values()
    for _ in range(3):
        output = twin(images())
        if runs_backward:
            output.sum().backward()
        del output
    assert number_of_values() == before
