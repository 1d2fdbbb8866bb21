"""PyTorch's OpInfo entries for the activations, applied to our activations.

Needs `expecttest`, which torch.testing._internal imports; without it this file is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from _support.assertions import assert_gradient, assert_identical, assert_values, unsigned_zeros
from _support.cases import (
    FLOATS,
    ONE_OF_EACH,
    ONE_OF_EACH_FUNCTION,
    ActivationCase,
    activation_id,
    all_floats,
    one_of_each,
)
from _support.marks import slow
from torch import Tensor

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
NAMES = {f"nn.functional.{activation.function}" for activation in ONE_OF_EACH}
ENTRIES = {
    (op.name.removeprefix("nn.functional."), op.variant_test_name): op
    for op in op_db
    if op.name in NAMES
}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REJECTED = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)

pytestmark = slow
each_function = pytest.mark.parametrize("activation", ONE_OF_EACH_FUNCTION, ids=activation_id)


def name_of(activation: ActivationCase) -> str:
    return activation.function


def entry_of(activation: ActivationCase) -> OpInfo:
    return ENTRIES[name_of(activation), ""]


def of_variant(activation: ActivationCase, found: Iterable[SampleInput]) -> Iterator[SampleInput]:
    """Yield the samples of an activation's variant: the entry of gelu has samples of both."""
    for sample in found:
        assert not sample.args
        if {**activation.entry.variant, **sample.kwargs} == activation.entry.variant:
            yield sample


def samples(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, tuple[int, ...], tuple[int, ...], int]]:
    """Yield each reference input: its storage as a flat tensor, and the view's size and strides."""
    for sample in of_variant(
        activation, entry_of(activation).reference_inputs(device, dtype, requires_grad=False)
    ):
        for x in (sample.input, sample.noncontiguous().input):
            if dtype == torch.float32 or x.numel() < 20_000:
                elements = x.untyped_storage().size() // x.element_size()
                storage = x.as_strided((elements,), (1,), 0).clone()
                yield storage, tuple(x.shape), x.stride(), x.storage_offset()


def overlaps(view: tuple[tuple[int, ...], tuple[int, ...], int], elements: int) -> bool:
    indices = torch.arange(elements).as_strided(*view)
    return indices.unique().numel() < indices.numel()


def test_opinfo_has_only_known_entries() -> None:
    # So far PyTorch has no other variants, and error inputs only for gelu.
    names = {name_of(activation) for activation in ONE_OF_EACH}
    assert set(ENTRIES) == {*((name, "") for name in names), ("silu", "complex")}
    errors = {name for (name, _), entry in ENTRIES.items() if entry.error_inputs_func}
    assert errors == {"gelu"}


@one_of_each
def test_supported_dtypes_match_pytorch(activation: ActivationCase, device: torch.device) -> None:
    """PyTorch's dtypes are supported except complex ones; tensors of others stay unmodified."""
    entry = entry_of(activation)
    supported = entry.dtypesIfCUDA if device.type == "cuda" else entry.dtypes
    takes_integers = activation.entry.takes_integers
    assert supported == {*FLOATS, *(INTEGERS if takes_integers else ())}
    for dtype in (*INTEGERS, *REJECTED):
        x = torch.tensor([-2.0, 0.0, 3.0], device=device).abs().to(dtype)
        before, version = bytes(x.cpu().untyped_storage()), x._version
        if dtype in supported:
            assert torch.equal(activation.call(x), entry.op(x.clone()))
        else:
            with pytest.raises(RuntimeError, match=rf"{name_of(activation)}\w*_: unsupported"):
                activation.call(x)
            assert (bytes(x.cpu().untyped_storage()), x._version) == (before, version)


@one_of_each
@all_floats
def test_values_and_gradients_match_pytorch(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    op = activation.reference
    seen = 0
    for storage, *view in samples(activation, dtype, device):
        leaf = storage.requires_grad_()
        x = leaf.clone().as_strided(*view)
        if overlaps(view, storage.numel()):
            with pytest.raises(RuntimeError, match="more than one element of the written-to"):
                activation.call(x)
            assert_identical(x.detach(), leaf.detach().as_strided(*view))
            continue
        assert x.stride() == view[1]
        y = activation.call(x)
        assert y is x
        expected = op(leaf.clone().as_strided(*view))
        assert_values(activation, y, expected)
        for incoming in (torch.ones_like(y), 2 * torch.rand_like(y) - 1):
            (actual,) = torch.autograd.grad(y, leaf, incoming, retain_graph=True)
            (wanted,) = torch.autograd.grad(expected, leaf, incoming, retain_graph=True)
            if activation.nan_gradient is not None:
                actual, wanted = (g.masked_fill(leaf.isnan(), 0.0) for g in (actual, wanted))
            assert_gradient(activation, unsigned_zeros(actual), unsigned_zeros(wanted), 1.0)
        seen += 1
    assert seen >= 8


def double_inputs(activation: ActivationCase, device: torch.device) -> list[Tensor]:
    inputs = []
    entry = entry_of(activation)
    for sample in of_variant(
        activation, entry.sample_inputs(device, torch.float64, requires_grad=True)
    ):
        if sample.input.numel() <= 100:
            inputs += [sample.input, sample.noncontiguous().input]
    return inputs


@each_function
def test_gradcheck(activation: ActivationCase, device: torch.device) -> None:
    def function(x: Tensor) -> Tensor:
        return activation.call(x * 1)

    tolerance = max(1e-5, 4 * activation.derivative_error.get(torch.float64, 0.0))
    for x in double_inputs(activation, device):
        assert torch.autograd.gradcheck(
            function,
            x,
            atol=tolerance,
            check_undefined_grad=True,
            check_batched_grad=True,
            check_forward_ad=True,
            check_batched_forward_grad=True,
            fast_mode=False,
        )
