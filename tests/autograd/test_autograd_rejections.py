"""Rejected calls: tensors that PyTorch rejects too, tensors without a kernel, wrong arguments."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from _support.assertions import ViewFunction, assert_identical, assert_values, wording
from _support.cases import (
    ONE_OF_EACH,
    ONE_OF_EACH_FUNCTION,
    ActivationCase,
    activation_id,
    call_id,
)
from _support.marks import readable_id
from torch import Tensor, nn

import inplace_ops

each_function = pytest.mark.parametrize("activation", ONE_OF_EACH_FUNCTION, ids=activation_id)


def hooked_module_output(x: Tensor) -> Tensor:
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, inputs, outputs: None)
    return module(x)


def view_made_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x[1:]


def inference_tensor(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.detach().clone()


# By name: a function from a leaf that requires grad to a tensor that PyTorch's in-place
# operations reject.
REJECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda leaf: leaf,
    "view_of_leaf": lambda leaf: leaf[1:],
    "transpose_of_leaf": lambda leaf: leaf.t(),
    "no_grad_view": lambda leaf: view_made_without_grad(leaf * 1),
    "split": lambda leaf: (leaf * 1).split(2)[1],
    "chunk": lambda leaf: (leaf * 1).chunk(2)[0],
    "unbind": lambda leaf: (leaf * 1).unbind()[2],
    "view_of_split": lambda leaf: (leaf * 1).split(2)[1][:, 1:],
    "function_view": lambda leaf: ViewFunction.apply(leaf * 1),
    "hooked_module": lambda leaf: hooked_module_output(leaf * 1),
    "expanded": lambda leaf: (leaf * 1)[:1].expand(5, 3),
    "expanded_without_grad": lambda leaf: leaf.detach().clone()[:, :1].expand(4, 7),
    "inference_tensor": inference_tensor,
}


@each_function
@pytest.mark.parametrize("case", REJECTED)
def test_rejects_what_pytorch_rejects(
    activation: ActivationCase, case: str, device: torch.device
) -> None:
    leaf = torch.randn(4, 3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError) as pytorchs:
        # relu_'s error: leaky_relu_ with a negative slope and silu_ raise the same messages.
        torch.relu_(REJECTED[case](leaf.detach().clone().requires_grad_()))

    x = REJECTED[case](leaf)
    before = x.detach().clone()
    version = None if x.is_inference() else x._version
    with pytest.raises(RuntimeError) as ours:
        activation.call(x)

    assert type(ours.value) is type(pytorchs.value)
    assert wording(pytorchs.value) in wording(ours.value)
    assert_identical(x, before, "modified although rejected:")
    assert x.is_inference() or x._version == version


@each_function
def test_rejects_exactly_the_layouts_that_overlap(
    activation: ActivationCase, device: torch.device
) -> None:
    """Some layouts interleave dimensions without overlap, as sizes (3, 2) with strides (2, 3)."""
    # The message begins with the function, not with a file of this package.
    message = (
        rf"^{activation.function}_: unsupported operation: more than one element of the written"
    )
    leaf = torch.arange(-20.0, 20.0, device=device).requires_grad_()
    interleaved = 0
    for dims in (2, 3):
        for size in itertools.product((2, 3), repeat=dims):
            for stride in itertools.product(range(7), repeat=dims):
                base = leaf.clone()
                x = base.as_strided(size, stride)
                if leaf.detach().as_strided(size, stride).unique().numel() < x.numel():
                    with pytest.raises(RuntimeError, match=message):
                        activation.call(x)
                    assert_identical(base, leaf)
                    assert base._version == 0
                    continue
                expected = activation.reference(leaf.detach().as_strided(size, stride))
                assert_values(activation, activation.call(x).detach(), expected)
                ordered = sorted(zip(stride, size, strict=True))
                reach = itertools.accumulate(s * (n - 1) for s, n in ordered)
                interleaved += any(s <= r for (s, _), r in zip(ordered[1:], reach, strict=False))
    assert interleaved > 0


def quantized(leaf: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but not removed yet
        return torch.quantize_per_tensor(leaf.detach(), 0.1, 0, torch.qint8)


# By name: a function from a leaf that requires grad, and what the error names.
UNSUPPORTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "complex64": (lambda leaf: leaf.to(torch.complex64), "complex64|ComplexFloat"),
    "complex128": (lambda leaf: leaf.detach().to(torch.complex128), "complex128|ComplexDouble"),
    "bool": (lambda leaf: leaf > 0.5, "bool"),
    "float8_e4m3fn": (lambda leaf: leaf.to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "qint8": (quantized, "neither nested nor quantized"),
    "nested": (
        lambda leaf: torch.nested.as_nested_tensor([leaf.detach()[0], leaf.detach()[0, 1:]]),
        "neither nested nor quantized",
    ),
    "sparse_coo": (lambda leaf: leaf.detach().to_sparse(), "sparse"),
}


@each_function
@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_unsupported_tensors_raise_unmodified(
    activation: ActivationCase, case: str, device: torch.device
) -> None:
    make, named = UNSUPPORTED[case]
    x = make(torch.randn(4, 3, device=device, requires_grad=True))

    def bytes_of(t: Tensor) -> bytes:
        values = t.coalesce().values() if t.layout == torch.sparse_coo else t
        return bytes(values.detach().cpu().untyped_storage())

    before, version = bytes_of(x), x._version
    op = activation.entry.function
    with pytest.raises((RuntimeError, TypeError), match=rf"\b{op}.*support") as error:
        activation.call(x)
    assert re.search(named, str(error.value), re.IGNORECASE)
    assert bytes_of(x) == before
    assert x._version == version


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=readable_id
)
def test_smooth_activations_and_leaky_relu_reject_integers(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.arange(6, dtype=dtype, device=device)
    calls = [a.call for a in ONE_OF_EACH if not a.entry.takes_integers]
    assert len(calls) > 5
    for call in calls:
        with pytest.raises(RuntimeError, match=f"unsupported dtype {dtype}; ") as raised:
            call(x)
        assert str(raised.value).endswith("float64, float32, float16, bfloat16")
        assert "csrc" not in str(raised.value)
    assert torch.equal(x, torch.arange(6, dtype=dtype, device=device))
    assert x._version == 0


@pytest.mark.parametrize("wrong", [None, 1.5, [1.0], np.zeros(3)], ids=repr)
@each_function
def test_non_tensor_raises_type_error(activation: ActivationCase, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        activation.call(wrong)


WRONG_ARGUMENTS: list[tuple[Callable[..., Tensor], dict[str, object], str]] = [
    (inplace_ops.relu_, {"save": "input"}, "save must be"),
    (inplace_ops.relu_, {"save": None}, "save must be"),
    (inplace_ops.leaky_relu_, {"save": "derivative"}, "save must be"),
    (inplace_ops.leaky_relu_, {"negative_slope": -0.1, "save": "output"}, "negative_slope >= 0"),
    (
        inplace_ops.leaky_relu_,
        {"negative_slope": math.nan, "save": "output"},
        "negative_slope >= 0",
    ),
    *(
        (inplace_ops.leaky_relu_, {"negative_slope": slope}, "negative_slope must be a real number")
        for slope in ("0.1", None, 1j)
    ),
    (inplace_ops.gelu_, {"approximate": "erf"}, 'approximate must be "none" or "tanh"'),
    (inplace_ops.silu_, {"save": "mask"}, "save must be"),
    *(
        (inplace_ops.silu_, {"bits": bits}, "bits must be")
        for bits in (0, 2, 5, 7, 9, -1, True, 2.5, "5")
    ),
    *(
        (inplace_ops.silu_, {"save": "derivative", "bits": bits}, "bits must be")
        for bits in (0, 1, 7, 64)
    ),
]


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    WRONG_ARGUMENTS,
    ids=[call_id(call, arguments) for call, arguments, _ in WRONG_ARGUMENTS],
)
def test_wrong_arguments_raise(
    call: Callable[..., Tensor], arguments: dict[str, object], message: str, device: torch.device
) -> None:
    x = torch.randn(5, device=device)
    before = x.clone()
    with pytest.raises((TypeError, ValueError), match=message):
        call(x, **arguments)
    assert_identical(x, before)
    assert x._version == 0
