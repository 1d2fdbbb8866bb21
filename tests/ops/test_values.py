"""Values and gradients against PyTorch's, in every dtype and layout."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import torch.nn.functional as F
from _support.assertions import (
    assert_gradient,
    assert_identical,
    assert_values,
    gradient,
    random_values,
    unsigned_zeros,
)
from _support.cases import (
    ACTIVATIONS,
    FLOATS,
    SAVE_MODES,
    ActivationCase,
    activation_id,
    all_activations,
    all_floats,
    one_of_each,
)
from _support.layouts import GRADIENTS, LAYOUTS, random_view
from _support.marks import in_turn, quick, readable_id, slow
from torch import Tensor

import inplace_ops

# Each activation in each layout, with the dtypes in turn; and all combinations for SAVE_MODES.
COMBINATIONS = [
    (layout, dtype, activation)
    for activation, layout, dtype in in_turn(ACTIVATIONS, LAYOUTS, FLOATS)
]
EVERY_COMBINATION = dict.fromkeys([*COMBINATIONS, *itertools.product(LAYOUTS, FLOATS, SAVE_MODES)])


@pytest.mark.parametrize(
    ("layout", "dtype", "activation"),
    quick(EVERY_COMBINATION, set(COMBINATIONS)),
    ids=readable_id,
)
def test_values_and_gradients(
    layout: str, dtype: torch.dtype, activation: ActivationCase, device: torch.device
) -> None:
    shape, arrange = LAYOUTS[layout]
    leaf = random_values(shape, dtype, device).requires_grad_()
    expected = activation.reference(arrange(leaf))
    x = arrange(leaf)
    strides = x.stride()

    y = activation.call(x)

    assert y is x
    assert y.stride() == strides
    assert_values(activation, y, expected)
    for name, arrange_gradient in GRADIENTS.items():
        # At most 1 in size, as SiLU's error is proportional to the incoming gradient.
        incoming = arrange_gradient(
            y.shape, lambda s: 2 * torch.rand(s, dtype=dtype, device=device) - 1
        )
        before = incoming.clone()
        (actual,) = torch.autograd.grad(y, leaf, incoming, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, leaf, incoming, retain_graph=True)
        if y._is_view():
            actual, wanted = unsigned_zeros(actual), unsigned_zeros(wanted)
        assert_gradient(activation, actual, wanted, 1.0, f"{name} gradient:")
        assert_identical(incoming, before, "the incoming gradient was written to:")


@one_of_each
@all_floats
def test_random_views_match_pytorch(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    choose = random.Random(seed)
    for _ in range(15):
        shape = tuple(choose.randrange(1, 9) for _ in range(choose.randrange(5)))
        leaf = random_values(shape, dtype, device).requires_grad_()
        base, reference_base = leaf.clone(), leaf.clone()
        state = choose.getstate()
        x = random_view(base, choose)
        choose.setstate(state)
        reference_x = random_view(reference_base, choose)
        activation.call(x)
        activation.copied(reference_x)
        assert_values(activation, base, reference_base)

        incoming = 2 * torch.rand(shape, dtype=dtype, device=device) - 1
        (actual,) = torch.autograd.grad(base, leaf, incoming)
        (wanted,) = torch.autograd.grad(reference_base, leaf, incoming)
        assert_gradient(activation, unsigned_zeros(actual), unsigned_zeros(wanted), 1.0)


# Without -100: SiLU's output underflows there, and its derivative is 0 here, -3.7e-42 in PyTorch.
EDGES = [0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 5.0, -5.0, 6.0, torch.inf, -torch.inf, torch.nan]
INCOMING = [1.0, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]


def edge_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    finfo = torch.finfo(dtype)
    subnormal = finfo.smallest_normal / 4
    tiny = [finfo.smallest_normal, subnormal, finfo.smallest_normal * finfo.eps]
    values = EDGES + [sign * v for sign in (1, -1) for v in (*tiny, finfo.max, finfo.eps)]
    return torch.tensor(values, dtype=dtype, device=device)


def pytorchs_edges(activation: ActivationCase, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the edge values at which our value and gradient equal PyTorch's."""
    x = edge_values(dtype, device)
    for edge in activation.own_edges(dtype):
        x = x[x != edge]
    return x


@all_activations
@all_floats
def test_edge_values(activation: ActivationCase, dtype: torch.dtype, device: torch.device) -> None:
    x = pytorchs_edges(activation, dtype, device)
    expected = activation.reference(x)
    with torch.no_grad():
        assert_values(activation, activation.call(x.clone()), expected)
    # Sign of zero, infinities and NaN in every position of a vector, in blocks and in their tails.
    for count in (1, 3, 700):
        many = x.repeat_interleave(count)
        assert_values(
            activation,
            activation.call(many.clone().requires_grad_().clone()),
            activation.reference(many),
        )


@all_activations
@all_floats
def test_edge_gradients(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    x = pytorchs_edges(activation, dtype, device)
    if activation.nan_gradient is not None:
        x = x[~x.isnan()]
    if activation.function == "hardswish" and activation.save == "derivative":
        x = x[x > -3]  # PyTorch's gradient is 0 there, ours the incoming one times 0
    # Every pair of an edge and an incoming gradient.
    incoming = torch.tensor(INCOMING, dtype=dtype, device=device).repeat_interleave(x.numel())
    x = x.repeat(len(INCOMING))
    actual = gradient(activation.call, x, incoming)
    expected = gradient(activation.reference, x, incoming)
    finite = incoming.isfinite()
    assert_gradient(activation, actual[finite], expected[finite], 1.0)
    actual, expected = actual[~finite], expected[~finite]
    if activation.function == "gelu":
        # Infinity times a derivative near 0 has either sign or is NaN: it is not finite.
        assert torch.equal(actual.isfinite(), expected.isfinite())
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "activation", [row for row in ACTIVATIONS if row.own_edges(torch.float32)], ids=activation_id
)
@all_floats
def test_values_where_pytorchs_formula_overflows(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    for edge, (value, slope) in activation.own_edges(dtype).items():
        x = torch.full((40,), edge, dtype=dtype, device=device)
        assert_identical(activation.call(x.clone()), torch.full_like(x, value))
        actual = gradient(activation.call, x)
        expected = torch.full_like(x, slope)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize(
    "activation",
    [row for row in ACTIVATIONS if row.nan_gradient is not None],
    ids=activation_id,
)
@all_floats
def test_gradient_at_nan(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    """Our gradient at NaN is fixed, where PyTorch's depends on how its code was vectorized.

    test_edge_gradients tests the other activations.
    """
    x = torch.full((40,), torch.nan, dtype=dtype, device=device)
    assert_identical(gradient(activation.call, x), torch.full_like(x, activation.nan_gradient))


@one_of_each
@all_floats
def test_views_of_every_length_match_pytorch(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Also at random alignments; nothing outside of the view is written, with and without grad."""
    choose = random.Random(seed)
    lengths = [*range(41), *range(62, 67), *range(509, 530, 3), 1023, 1025, 32769, 65537]
    for length in lengths:
        offset = choose.randrange(17)
        view = slice(offset, offset + length)
        # Every activation except the identity changes -3.
        leaf = torch.full((offset + length + 17,), -3.0, dtype=dtype, device=device)
        leaf[view] = random_values((length,), dtype, device)
        expected = leaf.clone()
        expected[view] = activation.reference(leaf[view])
        where = f"length {length}, offset {offset}:"
        for requires_grad in (False, True):
            base = leaf.clone().requires_grad_(requires_grad).clone()
            y = activation.call(base[view])
            assert_identical(base[:offset], expected[:offset], where)
            assert_identical(base[view.stop :], expected[view.stop :], where)
            assert_values(activation, y.detach(), expected[view])
        x, incoming = leaf[view], 2 * torch.rand(length, dtype=dtype, device=device) - 1
        actual = gradient(activation.call, x, incoming)
        assert_gradient(activation, actual, gradient(activation.reference, x, incoming), 1.0, where)


EVERY_16_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)
OF_16_BITS = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("slope", [None, 0.01, -0.5, 1 / 3, 3.0, 2.0**-12])
@pytest.mark.parametrize("dtype", OF_16_BITS, ids=lambda dtype: str(dtype)[6:])
def test_every_16_bit_value_is_rounded_as_in_pytorch(
    dtype: torch.dtype, slope: float | None, device: torch.device
) -> None:
    def call(x: Tensor) -> Tensor:
        return inplace_ops.relu_(x) if slope is None else inplace_ops.leaky_relu_(x, slope)

    def reference(x: Tensor) -> Tensor:
        return F.relu(x) if slope is None else F.leaky_relu(x, slope)

    every = EVERY_16_BITS.to(device).view(dtype)
    for count in (len(every), 517):  # the last few of 517 do not fill a vector
        x = every[torch.randperm(len(every))][:count]
        incoming = every[torch.randperm(len(every))][:count]
        actual, expected = call(x.clone()), reference(x)
        if x.is_cuda:  # see assert_values
            actual, expected = unsigned_zeros(actual), unsigned_zeros(expected)
        assert_identical(actual, expected)
        assert_identical(gradient(call, x, incoming), gradient(reference, x, incoming))


@pytest.mark.parametrize("dtype", OF_16_BITS, ids=lambda dtype: str(dtype)[6:])
def test_nan_payload_is_preserved(dtype: torch.dtype) -> None:
    """On a CPU NaN has its payload in each instruction set, and arithmetic makes it quiet.

    A GPU has one NaN.
    """
    x = EVERY_16_BITS.view(dtype)
    x = x[x.isnan()].repeat(3)
    quiet = x.view(torch.int16) | {torch.float16: 0x200, torch.bfloat16: 0x40}[dtype]
    assert torch.equal(inplace_ops.leaky_relu_(x.clone()).view(torch.int16), quiet)
    assert torch.equal(inplace_ops.relu_(x.clone()).view(torch.int16), x.view(torch.int16))


@pytest.mark.parametrize("function", ["relu", "relu6"])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=readable_id
)
def test_integers_match_pytorch(dtype: torch.dtype, function: str, device: torch.device) -> None:
    """PyTorch's own in-place activation overwrites them, also a strided view.

    It modifies inference tensors before it raises.
    """
    info = torch.iinfo(dtype)
    shape, arrange = LAYOUTS["stepped"]
    x = arrange(torch.randint(info.min, info.max, shape, dtype=dtype, device=device))
    before, expected = x.clone(), getattr(F, function)(x.clone())
    call = getattr(inplace_ops, f"{function}_")
    assert call(x) is x
    assert torch.equal(x, expected)
    with torch.inference_mode():
        inference_tensor = before.clone()
    with pytest.raises(RuntimeError, match="inference"):
        call(inference_tensor)
    assert torch.equal(inference_tensor, before)


def available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@slow
@pytest.mark.parametrize("step", [1, 2])
def test_more_than_2_to_the_31_elements(step: int, device: torch.device) -> None:
    if os.environ.get("INPLACE_OPS_LARGE") != "1":
        pytest.skip("slow and large: set INPLACE_OPS_LARGE=1")
    if available_bytes(device) < 17 * 2**30:
        pytest.skip("needs 17 GiB of free memory")
    elements = 2**31 + 1000
    leaf = torch.zeros((), dtype=torch.float16, device=device, requires_grad=True)
    x = leaf.expand(elements) + 0 if step == 1 else (leaf.expand(elements * step) + 0)[::step]
    with torch.no_grad():
        x[-1000:] = torch.randn(1000, dtype=torch.float16, device=device)
        expected = torch.relu(x[-1000:])
        slope = (x[-1000:] > 0).half()
    seen: list[Tensor] = []
    if step == 1:
        x.register_hook(seen.append)  # receives the gradient of the activation's input
    y = inplace_ops.relu_(x)
    assert torch.equal(y[-1000:], expected)
    assert not y[:-1000].any()
    if step == 1:
        y.backward(torch.ones((), dtype=torch.float16, device=device).expand(elements))
        assert torch.equal(seen[0][-1000:], slope)
        assert not seen[0][:-1000].any()


@one_of_each
def test_empty_tensor_of_any_number_of_dimensions(
    activation: ActivationCase, device: torch.device
) -> None:
    # For the second shape backward needs strides that PyTorch itself cannot compute.
    for sizes in ([2] * 40 + [0], [0] + [2] * 300):
        x = torch.empty(0, device=device, requires_grad=True)
        y = activation.call(x.clone().as_strided(sizes, [1] * len(sizes)))
        assert y.shape == torch.Size(sizes)
        if len(sizes) < 60:
            assert torch.autograd.grad(y.sum(), x)[0].shape == (0,)


def test_unsupported_dtypes_raise_under_vmap_and_on_meta(device: torch.device) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64, device=device)
    with pytest.raises(RuntimeError, match="silu_: unsupported dtype"):
        torch.func.vmap(inplace_ops.silu_)(x)
    with pytest.raises(RuntimeError, match="silu_: unsupported dtype"):
        inplace_ops.silu_(torch.ones(3, dtype=torch.int64, device="meta"))
