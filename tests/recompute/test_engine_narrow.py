"""Narrow copies: what an operation has widened, stored in place of its output.

See NOTE [Narrow copies] in `narrow.py`. Concatenations of shared parts have a file of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import saved_allocation
from _support.twins import (
    HAS_HOOK,
    Parts,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
)
from torch import Tensor, nn

import inplace_ops

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

Compute = Callable[[Tensor], Tensor]
CHANNELS, SIZE = 6, 8


class Widened(nn.Module):
    """A convolution saves `widen(h)`; nothing saves h, the sum of two convolutions."""

    def __init__(self, widen: Compute, keeps: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(3, CHANNELS, 1)
        self.conv = nn.LazyConv2d(4, 3, padding=1)
        self.same = nn.Identity()
        self.widen, self.keeps, self.step = widen, keeps, 0
        self.kept: list[Tensor] = []
        self.write: Callable[[Tensor, int], object] = lambda wide, step: None

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        widened = self.widen(self.same(self.first(x) + self.second(x)))
        self.kept = [widened.detach()] if self.keeps else []
        y = self.conv(widened)
        self.write(widened, self.step)
        return y


def two_convolutions(compute: Callable[[Any, Tensor], Any]) -> nn.Module:
    first, second = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(3, CHANNELS, 1)
    return Parts(compute, first=first, second=second, same=nn.Identity())


def _write_after(h: Tensor) -> Tensor:
    wide = F.interpolate(h, scale_factor=2)
    h.add_(1)
    return wide


def _write_to_expanded(h: Tensor) -> Tensor:
    wide = h[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2)
    with torch.no_grad():
        h.mul_(2)
    return wide


def _repeated(h: Tensor) -> Tensor:
    shape = 2, CHANNELS, 4, SIZE, SIZE
    return h[:, :, None].expand(shape).reshape(2, 4 * CHANNELS, SIZE, SIZE)


# How h is widened, and how many times larger the result is.
WIDER: dict[str, tuple[Compute, float]] = {
    "nearest": (lambda h: F.interpolate(h, scale_factor=2), 4),
    "nearest_to_size": (lambda h: F.interpolate(h, size=(3 * SIZE, SIZE)), 3),
    "nearest_by_three": (lambda h: F.interpolate(h, scale_factor=3), 9),
    "nearest_1d": (lambda h: F.interpolate(h.flatten(2), scale_factor=2)[:, :, None], 2),
    "nearest_3d": (lambda h: F.interpolate(h[:, :, None], scale_factor=2).flatten(1, 2), 8),
    "channels_last": (
        lambda h: F.interpolate(h.to(memory_format=torch.channels_last), scale_factor=2),
        4,
    ),
    "repeat": (lambda h: h.repeat(1, 2, 1, 1), 2),
    "repeat_with_more_dims": (lambda h: h.repeat(2, 1, 1, 1, 1).flatten(0, 1), 2),
    "repeat_interleave": (lambda h: h.repeat_interleave(3, dim=1), 3),
    "expand_and_reshape": (_repeated, 4),
    "expand_and_clone": (lambda h: h[0].expand(5, -1, -1, -1).contiguous(), 5),
    "cast": (lambda h: h.bfloat16().float(), 2),
    "cast_and_upsampling": (
        lambda h: F.interpolate(h.bfloat16().float(), scale_factor=2),
        8,
    ),
    "view_of_nearest": (lambda h: F.interpolate(h, scale_factor=2).transpose(2, 3), 4),
    # Its parts are as large together, and nothing else reads them.
    "cast_of_a_concatenation": (
        lambda h: torch.cat([h.bfloat16(), h.bfloat16() * 2], 1).float(),
        2,
    ),
    "write_after": (_write_after, 4),
    "write_to_expanded": (_write_to_expanded, 3),
}


@pytest.mark.parametrize("name", WIDER)
def test_what_was_widened_is_stored_narrow(name: str) -> None:
    widen, times = WIDER[name]
    model, x = Widened(widen), images()
    model(x)
    with no_warnings():
        twin = converted_twin(model)
        wide = inplace_ops.saved_bytes(model, x)
        # Without a note nothing proves that the cast was not written to before it was upsampled.
        known = 4 if name == "cast_and_upsampling" else times
        assert inplace_ops.saved_bytes(twin, x) == pytest.approx(wide / known)
        assert_same_steps(model, twin, x, steps=3, tolerance=0)


# h is not stored: the result is not twice as large, or h cannot be read off it.
AS_WIDE: dict[str, Compute] = {
    "nearest_to_fraction": lambda h: F.interpolate(h, size=(SIZE * 5 // 2, SIZE)),
    "bilinear": lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"),
    "little": lambda h: F.interpolate(h[..., :6], size=(SIZE, SIZE)),
    "clone": lambda h: h.clone(),
    "lossy_cast": lambda h: h.bfloat16().sigmoid_(),
    "doubled_and_changed": lambda h: torch.cat([h, h * 2], 1).mul_(2),
}


@pytest.mark.parametrize("name", AS_WIDE)
def test_what_is_not_narrow_stays_saved(name: str) -> None:
    model, x = Widened(AS_WIDE[name]), images()
    if name == "lossy_cast":
        model.conv = nn.LazyConv2d(4, 3, padding=1, dtype=torch.bfloat16)
    model(x)
    with no_warnings():
        twin = converted_twin(model)
        assert inplace_ops.saved_bytes(twin, x) == inplace_ops.saved_bytes(model, x)
        assert not recomputed(twin(x))
        assert_same_steps(model, twin, x)


def _joined(m: Any, x: Tensor) -> Tensor:
    """Concatenate an upsampled tensor with a skip, which another convolution saves."""
    m.step += 1
    skip = m.first(x)
    y = m.down(skip)
    wide = m.upsample(m.same(F.avg_pool2d(m.second(x), 2) + 1))
    m.write(wide, m.step)
    return m.conv(torch.cat([wide, skip], 1)) + y.mean()


def _rounded(m: Any, x: Tensor) -> Tensor:
    """As under autocast on CUDA: an upsampling in float32, and a convolution in 16 bits."""
    m.step += 1
    wide = m.upsample(m.first(x))
    m.write(wide, m.step)
    return m.rounded(wide.to(torch.bfloat16))


# By name: a forward, and which share of PyTorch's bytes the engine saves.
JOINS: dict[str, tuple[Callable[[Any, Tensor], Tensor], float]] = {
    # Instead of the skip, what the pooling reads and the two parts: the skip and a quarter of one.
    "joined": (_joined, 1.25 / 4),
    "rounded": (_rounded, 1 / 4),
}


def joining(name: str, write: Callable[[Tensor, int], object]) -> nn.Module:
    layers = {"first": nn.Conv2d(3, CHANNELS, 1), "second": nn.Conv2d(3, CHANNELS, 1)}
    layers |= {"down": nn.Conv2d(CHANNELS, 2, 1), "conv": nn.Conv2d(2 * CHANNELS, 4, 3)}
    layers |= {"upsample": nn.Upsample(scale_factor=2), "same": nn.Identity()}
    rounded = nn.Conv2d(CHANNELS, 4, 3, dtype=torch.bfloat16)
    return Parts(JOINS[name][0], **layers, rounded=rounded, write=write, step=0)


def _no_grad(wide: Tensor) -> None:
    with torch.no_grad():
        wide.mul_(2)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "no_grad": _no_grad,
    "one_pixel": lambda wide: wide.detach()[0, 0, 0].zero_(),
    "with_grad": lambda wide: wide.mul_(0.5),
}


@pytest.mark.parametrize("begin", [1, 3])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", JOINS)
def test_write_between_upsampling_and_consumer_matches_pytorch(
    name: str, write: str, begin: int
) -> None:
    """Every other pixel then is not what was upsampled."""

    def later(wide: Tensor, step: int) -> None:
        if step >= begin:
            WRITES[write](wide)

    model, x = joining(name, later), images()
    assert_same_steps(model, converted_twin(model), x, steps=4)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("name", JOINS)
def test_upsampling_before_another_operation_is_stored_narrow(name: str) -> None:
    """A copy in 16 bits has all values that a convolution in 16 bits reads."""
    model, x = joining(name, lambda wide, step: None), images()
    with no_warnings():
        twin = converted_twin(model)
        saved = [inplace_ops.saved_bytes(m, x) for m in (twin, model)]
        assert saved[0] / saved[1] == pytest.approx(JOINS[name][1])
        assert_same_steps(model, twin, x, steps=3, tolerance=0)


@pytest.mark.parametrize("widen", ["nearest", "repeat", "expand_and_reshape", "cast"])
def test_copy_is_given_up_for_an_original_that_stays_alive(widen: str) -> None:
    """The caller keeps the wide tensor: a copy would add memory."""
    model, x = Widened(WIDER[widen][0], keeps=True), images()
    model(x)
    twin = converted_twin(model)
    output = twin(x)
    (value,) = recomputed(output)
    (leaf,) = value.spec.leaves()
    storage = twin.kept[0].untyped_storage()
    assert leaf.tensor.untyped_storage().data_ptr() == storage.data_ptr()
    assert_same_steps(model, twin, x, tolerance=0)


def test_original_that_was_written_to_in_forward_is_not_read() -> None:
    """PyTorch's backward raises. The copy has the values that the convolution has read."""
    model, x = Widened(WIDER["nearest"][0], keeps=True), images()
    model(x)
    expected = converted_twin(model)
    expected(x).sum().backward()
    model.write = lambda wide, step: wide.detach().zero_()
    twin = converted_twin(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    twin(x).sum().backward()
    torch.testing.assert_close(twin.conv.weight.grad, expected.conv.weight.grad)


def test_repeated_keys_that_a_product_reads_transposed_are_stored_narrow() -> None:
    """As in attention in which several heads share keys and values."""

    def attention(m: Any, x: Tensor) -> Tensor:
        repeated = _repeated(m.first(x) + m.second(x))
        return x.repeat(1, 8, 1, 1) @ repeated.transpose(2, 3) @ repeated

    model, x = two_convolutions(attention), images()
    size = 2 * 4 * CHANNELS * SIZE * SIZE * 4
    with no_warnings():
        twin = converted_twin(model)
        assert_same_steps(model, twin, x, tolerance=0)
        allocated = [saved_allocation(lambda m=m: m(x)) for m in (model, twin)]
        assert allocated[0] - allocated[1] == size * 3 / 4
        if HAS_HOOK:  # else the tensor that the saved one is a view of is freed too early
            counted = [inplace_ops.saved_bytes(m, x) for m in (model, twin)]
            assert counted[0] - counted[1] == size * 3 / 4


def _returned(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The copy gives way to its original, which is wider than the second operation expects."""
    h = m.same((m.first(x) + m.second(x)).bfloat16())
    wide = h.float()
    y = F.silu(wide)
    return y, F.silu(h.expand(2, -1, -1, -1, -1).contiguous()).float(), wide


def _promoted(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The concatenation has cast h: it is wider there."""
    h = m.same((m.first(x) + m.second(x)).bfloat16())
    joined = torch.cat([h, m.first(x) + 1, m.second(x) + 1], 1)
    y = F.silu(joined)  # stays saved: more than an eighth of it would have to be copied
    return y, F.silu(h.expand(2, -1, -1, -1, -1).contiguous()).float()


@pytest.mark.parametrize("compute", [_returned, _promoted])
def test_tensor_that_is_wider_elsewhere_is_not_read_there(compute: Callable[..., Any]) -> None:
    model, x = two_convolutions(compute), images()
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, tolerance=0)


def test_input_is_read_off_any_upsampling_by_whole_numbers() -> None:
    """Also where `scale_factor` is a fraction, but all sizes are multiples."""
    found = 0
    for _ in range(300):
        size = random.randrange(1, 40), random.randrange(1, 40)
        scale = random.choice([float(random.randrange(1, 6)), random.uniform(1, 1.1)])
        x = torch.randn(1, 1, *size, requires_grad=True)
        large = [each * random.randrange(1, 6) for each in size]
        if random.random() < 0.5:
            y = F.interpolate(x, large)
        else:
            y = F.interpolate(x, scale_factor=scale)
        rule = inplace_ops.recompute.operations.OPERATION_OF[type(y.grad_fn)].output
        pieces = rule.narrow(y.grad_fn, y.detach())
        if pieces is not None:
            found += 1
            torch.testing.assert_close(pieces[0], x.detach(), rtol=0, atol=0)
    assert found > 50
