"""Masks are saved as one bit per element, and dropouts are recomputed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import saved_allocation
from _support.twins import (
    Parts,
    Program,
    assert_same_gradients,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    replaced,
)
from torch import Tensor, nn

from inplace_ops.recompute import nodes
from inplace_ops.recompute.packed import Recomputed
from inplace_ops.recompute.rewrites import Bits, noise_value
from inplace_ops.recompute.specs import Leaf

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def masks(output: Any) -> list[Leaf]:
    """Return the bits of the masks that are saved in the graph of an output."""
    found = (value.spec for value in replaced(output) if isinstance(value, Recomputed))
    return [leaf for spec in found if spec.how == Bits.how for leaf in spec.leaves()]


DROPOUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda m, z: F.dropout(z, 0.4),
    "in_place": lambda m, z: F.dropout(z.clone(), 0.1, inplace=True),
    "channels": lambda m, z: F.dropout2d(z, 0.4),
    "all": lambda m, z: F.dropout(z, 1.0),
    "none": lambda m, z: F.dropout(z, 0.0),
    "native": lambda m, z: torch.native_dropout(z, 0.3, True)[0],
    "native_all": lambda m, z: torch.native_dropout(z, 1.0, True)[0],
    "not_always_in_training": lambda m, z: torch.native_dropout(z, 0.3, m.step < 2)[0],
    "infinite": lambda m, z: z * torch.zeros_like(z).mul_(1.0).masked_fill_(z > 0, torch.inf),
    "alpha": lambda m, z: F.alpha_dropout(z, 0.3),
    "masked_fill": lambda m, z: z.masked_fill(z > 0, 0.5),
    "where": lambda m, z: torch.where(z > 0, z, m.scale),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout", DROPOUTS)
def test_dropout_matches_pytorch_bit_for_bit(dropout: str, dtype: torch.dtype) -> None:
    """With the same random numbers; a convolution saves the dropout's output."""
    model = Program(lambda m, z: m.convolved(DROPOUTS[dropout](m, m.other(z))), dtype=dtype)
    model.norm = nn.Identity()
    x = images(dtype)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, steps=3, tolerance=0)


@pytest.mark.parametrize(
    "dropout", ["dropout", "in_place", "infinite", "native", "masked_fill", "where"]
)
def test_masks_are_saved_as_bits(dropout: str) -> None:
    twin = converted_twin(Program(lambda m, z: DROPOUTS[dropout](m, z)))
    (leaf,) = masks(twin(images()))
    elements = 2 * 6 * 8 * 8
    assert leaf.tensor.nbytes * 8 == elements


def attention(layers: int, is_argument: bool) -> nn.Module:
    """Return layers that fill scores in one mask, which is an argument or computed from one."""

    def compute(m: Any, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = inputs
        mask = mask if is_argument else mask.logical_not()
        for layer in m.layers:
            x = layer(x).masked_fill(mask, 0.0)
        return x

    return Parts(compute, layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(layers)))


@pytest.mark.parametrize("is_argument", [False, True])
def test_mask_of_several_layers_is_stored_once(is_argument: bool) -> None:
    """A mask that the caller keeps alive is not stored a second time."""
    model, inputs = attention(6, is_argument), (torch.randn(256, 64), torch.rand(256, 64) > 0.5)
    twin = converted_twin(model)
    saved = [saved_allocation(lambda m=m: m(inputs)) for m in (model, twin)]
    bits = 256 * 64 / 8
    assert saved[0] - saved[1] == pytest.approx(0 if is_argument else 7 * bits, abs=256)
    assert len({id(leaf) for leaf in masks(twin(inputs))}) == 1
    assert_same_gradients(model, twin, inputs, *dict(model.named_parameters()), tolerance=0)


def test_write_to_a_mask_of_the_caller_raises_as_in_pytorch() -> None:
    model, inputs = attention(2, True), (torch.randn(256, 64), torch.rand(256, 64) > 0.5)
    for network in (model, converted_twin(model)):
        output = network(inputs)
        inputs[1].logical_not_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_write_through_data_between_two_uses_of_a_mask_is_detected() -> None:
    """Before torch 2.14 the engine sees the mask after the write, as PyTorch does."""

    def compute(m: Any, x: Tensor) -> Tensor:
        mask = x.sum(1, keepdim=True).expand(-1, 64) > 0
        y = m.first(x).masked_fill(mask, 0.0)
        mask.data.logical_not_()
        return m.second(y).masked_fill(mask, 0.0)

    model, x = Parts(compute, first=nn.Linear(8, 64), second=nn.Linear(64, 64)), torch.randn(32, 8)
    twin = converted_twin(model)
    is_seen = nodes.creation_hook is not None
    warns = pytest.warns(UserWarning, match="differs from the saved tensor")
    with warns if is_seen else no_warnings():
        output = twin(x)
    (actual,) = torch.autograd.grad(output.sum(), twin.second.bias)
    (expected,) = torch.autograd.grad(model(x).sum(), model.second.bias)
    assert torch.equal(actual, expected)


def test_view_of_a_mask_is_restored() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        mask = (z.detach() > 0).transpose(2, 3)[:, 1:2].expand(-1, 6, -1, -1)
        return z.masked_fill(mask, 2.0)

    model, x = Program(compute), images()
    twin = converted_twin(model)
    output = twin(x)
    assert len(masks(output)) == 1
    saved = output.grad_fn._saved_mask
    expected = model(x).grad_fn._saved_mask
    assert torch.equal(saved, expected)
    assert saved.stride() == expected.stride()
    assert_same_steps(model, twin, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_is_told_from_other_factors(dtype: torch.dtype) -> None:
    noise = torch.tensor([0.0, 1.25, 1.25, 0.0], dtype=dtype)
    assert noise_value(noise) == 1.25
    others = [[0.0, 1.25, 1.5], [-0.0, 1.25], [0.0, float("nan")], [0.0, 0.0], [0.0, -1.25]]
    others += [[1.25, -1.25], [0.0, 5e-8, 1.0]]
    assert [noise_value(torch.tensor(other, dtype=dtype)) for other in others] == [None] * 7
    assert noise_value(torch.tensor([0.0, float("inf")], dtype=dtype)) == float("inf")


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_other_factor_without_gradient_is_right(writes: int) -> None:
    """The version 2 of a dropout's noise is a hint alone: the values decide."""

    def compute(m: Any, z: Tensor) -> Tensor:
        factor = torch.rand(z.shape).round()
        for _ in range(writes):
            factor.mul_(m.step).add_(0.0 if m.step < 3 else 0.5)
        return m.conv(m.silu(z) * factor)

    model, x = Program(compute), images()
    assert_same_steps(model, converted_twin(model), x, steps=4)
