"""Every row of the behaviour table: what autograd sees of an in-place activation."""

from __future__ import annotations

import contextlib
import gc
import resource
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from activations import ACTIVATIONS, DERIVATIVE_ERROR, ONE_OF_EACH, Activation, activation_id
from comparison import (
    assert_gradient,
    assert_identical,
    assert_values,
    gradient,
    random_values,
    wording,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops import _ops

all_activations = pytest.mark.parametrize("activation", ACTIVATIONS, ids=activation_id)
one_of_each = pytest.mark.parametrize("activation", ONE_OF_EACH, ids=activation_id)
BITS_OF = {row.name: row for row in ACTIVATIONS}


def away_from_zero(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Float64 values away from the kink at 0, where a finite difference says nothing."""
    sign = torch.where(torch.rand(shape, device=device) < 0.5, -1.0, 1.0)
    return ((0.1 + 3 * torch.rand(shape, device=device)) * sign).double().requires_grad_()


def in_a_slice(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    base = x.clone()
    call(base[1:3])
    return base


def in_a_transpose(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    base = x.clone()
    call(base.t()[1:])
    return base


def in_the_middle(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    base = x * 1.5
    y = call(base[:, 1])
    return base.sin() + y.sum()


PLACES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "whole": lambda call, x: call(x.clone()),
    "transposed": lambda call, x: call(x.clone().t()),
    "slice": in_a_slice,
    "transpose": in_a_transpose,
    "middle": in_the_middle,
}


@all_activations
@pytest.mark.parametrize("place", PLACES)
def test_gradcheck(activation: Activation, place: str, device: torch.device) -> None:
    x = away_from_zero((4, 3), device)

    def function(value: Tensor) -> Tensor:
        return PLACES[place](activation.call, value)

    error = activation.derivative_error.get(torch.float64, 0.0)
    assert torch.autograd.gradcheck(
        function, x, atol=max(1e-5, 4 * error), check_batched_grad=True, check_forward_ad=True
    )
    if activation.is_twice_differentiable:
        assert torch.autograd.gradgradcheck(function, x, check_batched_grad=True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bits", [1, 5, 8])
def test_gradgradcheck_at_silus_minimum(place: str, bits: int, device: torch.device) -> None:
    x = -1.2784645427610738 + torch.randn(4, 3, dtype=torch.float64, device=device) * 1e-2

    def function(value: Tensor) -> Tensor:
        return PLACES[place](lambda v: inplace_ops.silu_(v, bits=bits), value)

    assert torch.autograd.gradgradcheck(function, x.requires_grad_())


@all_activations
def test_second_derivative_equals_pytorchs(activation: Activation, device: torch.device) -> None:
    if not activation.is_twice_differentiable:
        pytest.skip("refuses a second derivative, see test_derivative_mode_refuses")
    leaf = random_values((500,), torch.float64, device).requires_grad_()
    g = torch.randn(500, dtype=torch.float64, device=device, requires_grad=True)
    results = []
    for call in (activation.call, activation.reference):
        y = call(leaf.clone())
        (first,) = torch.autograd.grad(y, leaf, g, create_graph=True)
        results.append(
            torch.autograd.grad((first * first.detach().sin()).sum(), (leaf, g), allow_unused=True)
        )
    for actual, expected in zip(*results, strict=True):
        if expected is None:  # PyTorch knows that ReLU's second derivative is nowhere
            assert actual is None or not actual.any()
        else:
            actual = torch.zeros_like(expected) if actual is None else actual
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "name", [row.name for row in ACTIVATIONS if not row.is_twice_differentiable]
)
def test_derivative_mode_refuses_a_second_derivative(name: str, device: torch.device) -> None:
    activation = BITS_OF[name]
    leaf = torch.randn(50, dtype=torch.float64, device=device, requires_grad=True)
    y = activation.call(leaf.clone())
    for loss in (y.square().sum(), y.sum()):  # with and without a graph of the incoming gradient
        with pytest.raises(RuntimeError, match=r'save="derivative".*save="output"'):
            torch.autograd.grad(loss, leaf, create_graph=True)
        torch.autograd.grad(loss, leaf, retain_graph=True)


@pytest.mark.parametrize("call", [inplace_ops.relu_, inplace_ops.leaky_relu_])
def test_the_zero_second_derivative(call: Callable[..., Tensor], device: torch.device) -> None:
    leaf = torch.randn(50, device=device, requires_grad=True)
    weight = torch.randn(50, device=device, requires_grad=True)

    def second_derivative(save: str) -> Tensor | None:
        first = torch.autograd.grad(
            (call(leaf * 1, save=save) * weight).sum(), leaf, create_graph=True
        )
        return torch.autograd.grad(first[0].sum(), leaf, allow_unused=True)[0]

    assert torch.equal(second_derivative("output"), torch.zeros_like(leaf))
    assert second_derivative("mask") is None


@pytest.mark.parametrize("tail", [torch.sum, lambda y: y.square().sum()], ids=["linear", "square"])
def test_a_third_derivative_of_silu_raises(
    tail: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    leaf = torch.randn(50, dtype=torch.float64, device=device, requires_grad=True)
    first, second = [], []
    for silu in (inplace_ops.silu_, F.silu):
        (gradient,) = torch.autograd.grad(tail(silu(leaf * 1.5)), leaf, create_graph=True)
        first.append(gradient)
        second += torch.autograd.grad(gradient.sum(), leaf, create_graph=True)
    torch.testing.assert_close(first[0], first[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(second[0], second[1], rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="not a third time"):
        torch.autograd.grad(second[0].sum(), leaf)


@contextlib.contextmanager
def anything() -> Iterator[None]:
    yield


MODES = {"grad": anything, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@one_of_each
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_version_rises_by_one(
    activation: Activation, mode: str, requires_grad: bool, device: torch.device
) -> None:
    base = torch.randn(4, 6, device=device, requires_grad=requires_grad) * 1
    views = {"whole": base, "slice": base[1:3], "transpose": base.t(), "one": base[2, 3]}
    for name, x in views.items():
        before = base._version
        with MODES[mode]():
            assert activation.call(x) is x
        assert x._version == base._version == before + 1, name
    empty = torch.randn(0, 3, device=device, requires_grad=requires_grad) * 1
    with MODES[mode]():
        activation.call(empty)
    assert empty._version == 1


@one_of_each
def test_inference_tensor_in_inference_mode(activation: Activation, device: torch.device) -> None:
    with torch.inference_mode():
        x = torch.randn(20, device=device)
        expected = activation.reference(x)
        assert activation.call(x) is x
        assert_values(activation, x, expected)


@one_of_each
@pytest.mark.parametrize("earlier", [torch.exp, torch.sigmoid, torch.tanh])
def test_earlier_op_saved_the_input(
    activation: Activation, earlier: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    leaf = torch.randn(9, device=device, requires_grad=True)
    y = activation.call(earlier(leaf))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class ViewFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


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


# From a leaf that requires grad to a tensor that PyTorch does not let be modified.
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
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


@one_of_each
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_pytorch_refuses(
    activation: Activation, case: str, device: torch.device
) -> None:
    leaf = torch.randn(4, 3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError) as pytorchs:
        # ReLU's: leaky_relu_ with a negative slope and silu_ word nothing differently.
        torch.relu_(REFUSED[case](leaf.detach().clone().requires_grad_()))

    x = REFUSED[case](leaf)
    before = x.detach().clone()
    version = None if x.is_inference() else x._version
    with pytest.raises(RuntimeError) as ours:
        activation.call(x)

    assert type(ours.value) is type(pytorchs.value)
    assert wording(pytorchs.value) in wording(ours.value)
    assert_identical(x, before, "modified although refused:")
    assert x.is_inference() or x._version == version


@one_of_each
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(
    ("size", "stride"), [((3, 3), (1, 1)), ((2, 4), (3, 1)), ((2, 2, 2), (3, 2, 1)), ((5,), (0,))]
)
def test_refuses_overlapping_memory(
    activation: Activation,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    device: torch.device,
) -> None:
    base = torch.randn(20, device=device, requires_grad=requires_grad) * 1
    before = base.detach().clone()
    x = base.as_strided(size, stride)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        activation.call(x)
    assert_identical(base, before)
    assert base._version == 0


def quantized(device: torch.device) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but still there to be refused
        return torch.quantize_per_tensor(torch.randn(4, 3, device=device), 0.1, 0, torch.qint8)


UNSUPPORTED: dict[str, Callable[[torch.device], Tensor]] = {
    "complex64": lambda device: torch.randn(4, 3, dtype=torch.complex64, device=device),
    "complex128": lambda device: torch.randn(4, 3, dtype=torch.complex128, device=device),
    "bool": lambda device: torch.rand(4, 3, device=device) > 0.5,
    "float8_e4m3fn": lambda device: torch.randn(4, 3, device=device).to(torch.float8_e4m3fn),
    "qint8": quantized,
    "sparse_coo": lambda device: torch.randn(4, 3, device=device).to_sparse(),
}


@one_of_each
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_tensors(activation: Activation, case: str, device: torch.device) -> None:
    x = UNSUPPORTED[case](device)

    def bytes_of(t: Tensor) -> bytes:
        values = t.coalesce().values() if t.layout == torch.sparse_coo else t
        return bytes(values.cpu().untyped_storage())

    before, version = bytes_of(x), x._version
    op = activation.name.split("-")[0] + "_"
    with pytest.raises((RuntimeError, TypeError), match=rf"\b{op}.*support") as error:
        activation.call(x)
    got = {"sparse_coo": "sparse"}.get(case, f"{case}|{str(x.dtype)[6:]}")
    names = {"complex64": "ComplexFloat", "complex128": "ComplexDouble", "bool": "Bool"}
    assert any(
        name.lower() in str(error.value).lower()
        for name in [*got.split("|"), names.get(case, case)]
    )
    assert bytes_of(x) == before
    assert x._version == version


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_quantized_and_nested_tensors_are_named(device: torch.device) -> None:
    # Their layout and device are supported, which is all that the message would say otherwise.
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], device=device)
    for x in (quantized(device), nested):
        with pytest.raises(NotImplementedError, match=r"strided tensors, neither nested nor quant"):
            inplace_ops.relu_(x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
@one_of_each
def test_unsupported_dtypes_with_gradient(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(4, 3, device=device, requires_grad=True).to(dtype)
    before, version = x.detach().clone(), x._version
    with pytest.raises(RuntimeError, match=activation.name.split("-")[0]):
        activation.call(x)
    assert bytes(x.detach().cpu().untyped_storage()) == bytes(before.cpu().untyped_storage())
    assert x._version == version


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_only_relu_takes_integers(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.arange(6, dtype=dtype, device=device)
    for call in (inplace_ops.leaky_relu_, inplace_ops.silu_):
        with pytest.raises(RuntimeError, match="unsupported dtype"):
            call(x)
    assert torch.equal(x, torch.arange(6, dtype=dtype, device=device))
    assert x._version == 0


@pytest.mark.parametrize(
    "wrong", [None, 1.5, [1.0], np.zeros(3)], ids=["None", "number", "list", "array"]
)
@one_of_each
def test_no_tensor(activation: Activation, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        activation.call(wrong)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (inplace_ops.relu_, {"save": "input"}, "save must be"),
        (inplace_ops.relu_, {"save": None}, "save must be"),
        (inplace_ops.leaky_relu_, {"save": "derivative"}, "save must be"),
        (
            inplace_ops.leaky_relu_,
            {"negative_slope": -0.1, "save": "output"},
            "negative_slope >= 0",
        ),
        (
            inplace_ops.leaky_relu_,
            {"negative_slope": np.nan, "save": "output"},
            "negative_slope >= 0",
        ),
        (inplace_ops.silu_, {"save": "mask"}, "save must be"),
        *(
            (inplace_ops.silu_, {"bits": bits}, "bits must be")
            for bits in (0, 9, -1, True, 2.5, "5")
        ),
        *(
            (inplace_ops.silu_, {"save": "derivative", "bits": bits}, "bits must be")
            for bits in (0, 1, 7, 64)
        ),
    ],
)
def test_wrong_arguments(
    call: Callable[..., Tensor], arguments: dict[str, object], message: str, device: torch.device
) -> None:
    x = torch.randn(5, device=device)
    before = x.clone()
    with pytest.raises(ValueError, match=message):
        call(x, **arguments)
    assert_identical(x, before)
    assert x._version == 0


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda y: y.add_(torch.arange(y.numel(), dtype=y.dtype, device=y.device)),
    "mul": lambda y: y.mul_(3),
    "zero": lambda y: y.zero_(),
    "slice": lambda y: y[2:5].mul_(2),
    "relu": lambda y: torch.relu_(y),
}


@one_of_each
@pytest.mark.parametrize("write", WRITES)
def test_later_writes(activation: Activation, write: str, device: torch.device) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    y = activation.call(leaf.clone())
    WRITES[write](y)
    if not activation.allows_later_writes:
        hint = 'save="derivative"' if activation.name.startswith("silu") else ""
        with pytest.raises(RuntimeError, match=f"modified by an inplace operation.*{hint}"):
            y.sum().backward()
        return
    y.sum().backward()
    reference = leaf.detach().clone().requires_grad_()
    expected = activation.reference(reference).clone()
    WRITES[write](expected)
    expected.sum().backward()
    assert_values(activation, y, expected)
    assert_gradient(activation, leaf.grad, reference.grad, 3.0)


@one_of_each
def test_later_writes_through_a_base(activation: Activation, device: torch.device) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    base = leaf.clone()
    y = activation.call(base[2:])
    base.mul_(2)
    if not activation.allows_later_writes:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            base.sum().backward()
        return
    y.sum().backward()
    expected = 2 * gradient(activation.reference, leaf.detach()[2:])
    assert_gradient(activation, leaf.grad[2:], expected, 2.0)
    assert not leaf.grad[:2].any()


@one_of_each
def test_storage_seen_through_detach_and_clone(
    activation: Activation, device: torch.device
) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    x = leaf.clone()
    old = x.detach().clone()
    detached_before, cloned_before = x.detach(), x.clone()
    y = activation.call(x)
    detached_after, cloned_after = y.detach(), y.clone()
    expected = activation.reference(old)
    for seen in (detached_before, detached_after, cloned_after):
        assert_values(activation, seen.detach(), expected)
    assert_identical(cloned_before, old)
    assert detached_before._version == detached_after._version == y._version == 1

    # A clone's gradient goes to the input before or after the activation, as it was taken.
    (before,) = torch.autograd.grad(cloned_before.sum(), leaf)
    assert_identical(before, torch.ones_like(leaf))
    (after,) = torch.autograd.grad(cloned_after.sum(), leaf, retain_graph=True)
    assert_gradient(activation, after, gradient(activation.reference, old), 1.0)

    detached_before.mul_(2)  # autograd does not see this write but for the version
    if activation.allows_later_writes:
        (actual,) = torch.autograd.grad(y.sum(), leaf)
        assert_gradient(activation, actual, gradient(activation.reference, old), 1.0)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@one_of_each
def test_backward_twice(activation: Activation, device: torch.device) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    expected = gradient(activation.reference, leaf)
    y = activation.call(leaf.clone())
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert_gradient(activation, leaf.grad / 2, expected, 1.0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@one_of_each
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(activation: Activation, use_reentrant: bool, device: torch.device) -> None:
    leaf = torch.randn(11, device=device, requires_grad=True)
    y = checkpoint(lambda x: activation.call(x * 2), leaf, use_reentrant=use_reentrant)
    (y * y.detach()).sum().backward()
    reference = leaf.detach().clone().requires_grad_()
    expected = activation.reference(reference * 2)
    (expected * expected.detach()).sum().backward()
    assert_values(activation, y, expected)
    largest = 2 * expected.detach().abs().double()
    assert_gradient(activation, leaf.grad, reference.grad, largest)


@one_of_each
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_of_a_region_that_modifies_its_input(
    activation: Activation, use_reentrant: bool, device: torch.device
) -> None:
    def run(call: Callable[[Tensor], Tensor]) -> None:
        leaf = torch.randn(11, device=device, requires_grad=True)
        y = checkpoint(lambda x: call(x) * 2, leaf * 1, use_reentrant=use_reentrant)
        y.sum().backward()

    with pytest.raises(RuntimeError) as pytorchs:
        run(torch.relu_)
    with pytest.raises(RuntimeError) as ours:
        run(activation.call)
    assert type(ours.value) is type(pytorchs.value)
    assert str(ours.value)[:60] == str(pytorchs.value)[:60]


@one_of_each
@pytest.mark.parametrize("hooks", ["numpy", "save_on_cpu"])
@pytest.mark.parametrize("place", PLACES)
def test_saved_tensors_hooks(
    activation: Activation, hooks: str, place: str, device: torch.device
) -> None:
    to_numpy = saved_tensors_hooks(
        lambda t: (t.device, t.detach().cpu().numpy().copy()),
        lambda p: torch.tensor(p[1], device=p[0]),
    )
    leaf = torch.randn(4, 3, device=device, requires_grad=True)
    with to_numpy if hooks == "numpy" else save_on_cpu():
        y = PLACES[place](activation.call, leaf)
    (actual,) = torch.autograd.grad(y.sum(), leaf)
    expected = PLACES[place](lambda x: x.copy_(activation.reference(x.clone())), leaf)
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    assert_gradient(activation, actual, wanted, 1.0 + y.numel() * (place == "middle") * 1.5)


def saved_before(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return call(leaf.tanh())


def saved_before_in_part(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    base = leaf.tanh()
    call(base[1:3])
    return base


def written_after(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return call(leaf.clone()).mul_(2)


def written_without_grad(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    x = leaf.tanh()
    y = x * 1.5
    with torch.no_grad():
        call(x)
    return y + x


def in_a_row(call: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return call(call(leaf.clone()).add_(-0.5)).sigmoid()


MUTATIONS = (saved_before, saved_before_in_part, written_after, written_without_grad, in_a_row)


@one_of_each
@pytest.mark.parametrize("program", MUTATIONS)
def test_allow_mutation_on_saved_tensors(
    activation: Activation, program: Callable[..., Tensor], device: torch.device
) -> None:
    leaf = random_values((4, 30), torch.float32, device).requires_grad_()
    results = []
    for call in (activation.call, activation.torch_inplace):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = program(call, leaf)
            (grad,) = torch.autograd.grad(y, leaf, torch.full_like(y, 0.5))
        results.append((y.detach(), grad))
    (actual, actual_grad), (expected, expected_grad) = results
    assert_values(activation, actual, expected)
    assert_gradient(activation, actual_grad, expected_grad, 1.0)


def wait_until(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


class Token:
    """Something to hold a weak reference to."""


class Probe(torch.autograd.Function):
    """A node below the activation's, which holds a token as long as the graph is alive."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@one_of_each
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("used", ["not", "backward", "retain_graph", "create_graph"])
def test_graph_is_freed_without_the_garbage_collector(
    activation: Activation, place: str, used: str, device: torch.device
) -> None:
    if used == "create_graph" and not activation.is_twice_differentiable:
        pytest.skip("refuses a second derivative, see test_derivative_mode_refuses")
    leaf = torch.randn(4, 3, device=device, requires_grad=True)

    def run() -> weakref.ref[Token]:
        token = Token()
        y = PLACES[place](activation.call, Probe.apply(leaf, token))
        if used != "not":
            create, retain = used == "create_graph", used != "backward"
            torch.autograd.grad(y.sum(), leaf, retain_graph=retain, create_graph=create)
        return weakref.ref(token)

    gc.disable()
    try:
        token = run()
        if device.type == "cuda":  # whose thread lets go of the graph when grad has returned
            wait_until(lambda: token() is None)
        assert token() is None
    finally:
        gc.enable()


class Recorder(TorchDispatchMode):
    """Writes down the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


WITHOUT_GRAD = {
    "no_requires_grad": (anything, False),
    "no_grad": (torch.no_grad, True),
    "inference_mode": (torch.inference_mode, True),
}


@one_of_each
@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_nothing_is_allocated_without_grad(
    activation: Activation, mode: str, device: torch.device
) -> None:
    context, requires_grad = WITHOUT_GRAD[mode]
    x = torch.randn(1000, 100, device=device, requires_grad=requires_grad) * 1
    node = x.grad_fn
    with context(), Recorder() as recorder:
        activation.call(x)
    assert len(recorder.ops) == 1
    assert recorder.ops[0].startswith("inplace_ops.")
    assert x.grad_fn is node
    with context():
        assert allocated_bytes(lambda: activation.call(x), device) == 0


@one_of_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_allocates_what_it_keeps(
    activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(1003, 100, dtype=dtype, device=device, requires_grad=True) * 1
    groups = (x.numel() + 7) // 8
    kept = activation.packed_bits[dtype] * groups
    assert allocated_bytes(lambda: activation.call(x), device) == kept


def allocated_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Bytes allocated while function runs: what was asked for, of which allocators give more."""
    if device.type == "cuda":
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        function()
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")


def test_the_count_of_allocations_counts(device: torch.device) -> None:
    assert allocated_bytes(lambda: torch.empty(1003, 100, device=device), device) == 401_200


@one_of_each
def test_threads(activation: Activation, device: torch.device) -> None:
    inputs = [torch.randn(70_000, device=device) for _ in range(4)]
    expected = [gradient(activation.reference, x) for x in inputs]
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        for _ in range(3):
            results[i] = gradient(activation.call, inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, wanted in enumerate(expected):
        assert_gradient(activation, results[i], wanted, 1.0)


@one_of_each
@pytest.mark.parametrize("place", PLACES)
def test_anomaly_mode(activation: Activation, place: str, device: torch.device) -> None:
    leaf = torch.randn(4, 3, device=device, requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        detector = torch.autograd.detect_anomaly()
    with detector:
        y = PLACES[place](activation.call, leaf)
        (actual,) = torch.autograd.grad(y.sum(), leaf)
    expected = PLACES[place](lambda x: x.copy_(activation.reference(x.clone())), leaf)
    (wanted,) = torch.autograd.grad(expected.sum(), leaf)
    assert_gradient(activation, actual, wanted, 1.0 + y.numel() * (place == "middle") * 1.5)


@one_of_each
def test_functional_transforms(activation: Activation, device: torch.device) -> None:
    x = torch.randn(6, 5, dtype=torch.float64, device=device)
    tangent = torch.randn_like(x)

    def loss(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda row: (function(row * 1.5) ** 2).sum()

    ours, pytorchs = loss(activation.call), loss(activation.reference)
    transforms: list[Callable[[Callable[[Tensor], Tensor]], Tensor]] = [
        lambda f: torch.func.grad(f)(x),
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(f))(x),
        lambda f: torch.func.vmap(torch.func.grad(f), in_dims=1)(x),
        lambda f: torch.func.jvp(f, (x,), (tangent,))[1],
        lambda f: torch.func.grad(lambda v: torch.func.grad(f)(v).sum())(x),
        lambda f: torch.func.jacrev(f)(x),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(ours), transform(pytorchs))


@one_of_each
def test_forward_mode(activation: Activation, device: torch.device) -> None:
    x = torch.randn(9, dtype=torch.float64, device=device)
    tangent = torch.randn_like(x)
    results = []
    with torch.autograd.forward_ad.dual_level():
        for call in (activation.call, activation.reference):
            dual = torch.autograd.forward_ad.make_dual(x.clone(), tangent.clone())
            results.append(torch.autograd.forward_ad.unpack_dual(call(dual)))
    torch.testing.assert_close(results[0].primal, results[1].primal)
    torch.testing.assert_close(results[0].tangent, results[1].tangent)


@one_of_each
def test_batched_backward(activation: Activation, device: torch.device) -> None:
    leaf = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    incoming = 2 * torch.rand(3, 4, 5, dtype=torch.float64, device=device) - 1
    y = activation.call(leaf.clone())
    (actual,) = torch.autograd.grad(y, leaf, incoming, is_grads_batched=True)
    expected = torch.stack([gradient(activation.reference, leaf, g) for g in incoming])
    assert_gradient(activation, actual, expected, 1.0)


@pytest.mark.parametrize("place", ["whole", "rows"])
def test_time_is_linear_in_depth(place: str, device: torch.device) -> None:
    def seconds(depth: int) -> float:
        x = torch.randn(64, 8, device=device, requires_grad=True) * 1
        begin = time.perf_counter()
        for i in range(depth):
            inplace_ops.relu_(x if place == "whole" else x[i % 64])
        x.sum().backward()
        return time.perf_counter() - begin

    seconds(1000)
    # Quadratic in depth were 16.
    assert min(seconds(4000) for _ in range(3)) < 8 * min(seconds(1000) for _ in range(3))


@contextlib.contextmanager
def memory_limit(device: torch.device, more: int) -> Iterator[None]:
    """Let no more than `more` bytes be allocated."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = (torch.cuda.memory_reserved(device) + more) / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("create_graph", [False, True])
@one_of_each
def test_out_of_memory_in_backward(
    activation: Activation, create_graph: bool, device: torch.device
) -> None:
    if create_graph and not activation.is_twice_differentiable:
        pytest.skip("refuses a second derivative, see test_derivative_mode_refuses")
    leaf = torch.ones(2**24, device=device, requires_grad=True)
    incoming = torch.ones((), device=device).expand(2**24)
    y = activation.call(leaf * 1)
    gc.collect()  # nothing else may be freed meanwhile
    with memory_limit(device, 2**25):
        with pytest.raises(RuntimeError) as pytorchs:
            torch.empty_like(leaf)
        with pytest.raises(RuntimeError) as ours:
            torch.autograd.grad(y, leaf, incoming, create_graph=create_graph)
    assert type(ours.value) is type(pytorchs.value)
    assert str(ours.value)[:100] == str(pytorchs.value)[:100]
    torch.autograd.grad(y, leaf, incoming)  # the graph is as it was


def test_errors_of_the_grids_are_the_documented_ones() -> None:
    assert {bits: f"{error:.1e}" for bits, error in DERIVATIVE_ERROR.items()} == {
        8: "2.4e-03",
        16: "9.2e-06",
        32: "1.6e-10",
    }


def test_ops_are_private() -> None:
    assert not any(name in inplace_ops.__all__ for name in ("_ops", "FORWARD_OPS"))
    assert len(_ops.FUNCTIONAL_OPS) + len(_ops.FORWARD_OPS) + len(_ops.BACKWARD_OPS) == 18
