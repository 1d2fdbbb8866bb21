"""save="recompute": an activation after a norm, whose output backward recomputes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from _support.assertions import ViewFunction, assert_identical, assert_values
from _support.cases import ActivationCase, activation_id
from _support.norm_cases import (
    NORMS,
    PIECEWISE,
    ROWS,
    SMOOTH,
    Call,
    Norm,
    assert_same_gradients,
    both_kinds,
    each_activation,
    exactly,
    is_recomputed,
    node_of,
    one_of_each_norm,
    recompute,
    rounding,
)
from _support.smooth_references import SMOOTH_ACTIVATIONS
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import inplace_ops
from inplace_ops import _ops, saved_bytes

pytestmark = pytest.mark.usefixtures("_one_thread")

each_norm = pytest.mark.parametrize("name", NORMS)


def derivative(activation: ActivationCase, z: Tensor) -> Tensor:
    """Return the derivative at z in float64.

    A smooth activation uses its formula, as PyTorch's derivative cancels where the slope nears 1.
    """
    for smooth in SMOOTH_ACTIVATIONS:
        if smooth.entry is activation.entry:
            return smooth.derivative(z)
    leaf = z.clone().requires_grad_()
    return torch.autograd.grad(activation.reference(leaf).sum(), leaf)[0]


def slope_and_spread(activation: ActivationCase, z: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float64 derivative at z, and by how much it differs if z is off by its error."""
    wide = z.double()
    slope, low, high = (derivative(activation, at) for at in (wide, wide - error, wide + error))
    return slope, torch.maximum((low - slope).abs(), (high - slope).abs())


def check(norm: Norm, module: nn.Module, activation: ActivationCase, x: Tensor) -> Tensor:
    """Check values and gradients of an activation after a norm, and return its output.

    The gradient that reaches the norm is computed with the derivative at the norm's output, which
    may be off by its rounding error. For that gradient, the gradients of the norm's input and
    parameters are PyTorch's.
    """
    reference = copy.deepcopy(module)
    leaf = x.detach().clone().requires_grad_()
    expected_z = reference(leaf)
    z = module(x)
    reached: list[Tensor] = []
    node_of(z).register_prehook(lambda grads: reached.extend(grads[:1]))
    y = recompute(activation)(z)
    assert y is z
    assert_identical(y, activation.call(expected_z.detach().clone()), "value")
    assert_values(activation, y.detach(), activation.reference(expected_z).detach())

    incoming = (2 * torch.rand(y.shape, device=y.device) - 1).to(y.dtype)
    actual = torch.autograd.grad(y, (x, *module.parameters()), incoming, retain_graph=True)
    gradient = reached[0].view_as(z)
    assert gradient.stride() == expected_z.stride()
    slope, spread = slope_and_spread(
        activation, expected_z.detach(), norm.error(module, x, expected_z)
    )
    exact = torch.float64 if y.dtype == torch.float64 else torch.float32
    formula = activation.entry.arithmetic_error * torch.finfo(exact).eps / 2**-23
    if activation.entry.is_piecewise_linear:
        formula = 0.0
    wanted = incoming.double() * slope
    tolerance = incoming.double().abs() * (1.01 * spread + formula) + 2 * rounding(wanted, y.dtype)
    assert ((gradient.double() - wanted).abs() <= tolerance).all()

    expected = torch.autograd.grad(expected_z, (leaf, *reference.parameters()), gradient)
    for mine, theirs in zip(actual, expected, strict=True):
        if y.is_cuda:
            torch.testing.assert_close(mine, theirs)
        else:
            assert_identical(mine, theirs)
    for mine, theirs in zip(module.buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    return y


@each_norm
@pytest.mark.parametrize(
    ("dtype", "training"),
    [
        *((torch.float32, training) for training in (True, False)),
        *((torch.float64, True), (torch.bfloat16, True), (torch.float16, False)),
    ],
)
def test_values_and_gradients_match_pytorch(
    name: str, training: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """With a 16-bit input, the norm's parameters and statistics are float32."""
    norm = NORMS[name]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for activation in ROWS:
        module = norm.module(wide, training, device)
        is_mixed = dtype.itemsize == 2 and list(module.parameters())
        if is_mixed and device.type == "cuda" and name.startswith(("group", "layer")):
            pytest.skip(
                "PyTorch's norm requires one dtype for its input and its parameters on a GPU"
            )
        y = check(norm, module, activation, norm.input(dtype, device))
        if dtype.itemsize > 2 or module.state_dict():
            assert is_recomputed(y)


@each_norm
@pytest.mark.parametrize(("dtype", "training"), [(torch.float16, True), (torch.bfloat16, False)])
def test_norm_with_16_bit_statistics_is_not_recomputed(
    name: str, training: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """An activation does not recompute the output of a norm that rounds its statistics to 16 bits.

    On a CPU all norms do, except with running statistics in eval mode. On a GPU only a group norm
    does.
    """
    norm = NORMS[name]
    for activation in (PIECEWISE, SMOOTH):
        module = norm.module(dtype, training, device)
        y = check(norm, module, activation, norm.input(dtype, device))
        is_given = not training and getattr(module, "running_mean", None) is not None
        is_exact = device.type == "cuda" and not name.startswith("group")
        assert is_recomputed(y) == (is_given or is_exact)


SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch": (partial(nn.BatchNorm2d, 2), (3, 2, 2, 1)),
    "batch_eval": (lambda: nn.BatchNorm1d(2).eval(), (4, 2)),
    "group": (partial(nn.GroupNorm, 1, 2), (2, 2, 3)),
    "instance": (partial(nn.InstanceNorm1d, 2, affine=True), (2, 2, 3)),
    "layer": (partial(nn.LayerNorm, 4), (1, 2, 4)),
}


def both_kinds_after(names: Iterable[str], every_kind_after: str) -> pytest.MarkDecorator:
    """Parametrize: both kinds of activations after each norm, and all activations after one."""
    pairs = [(name, row) for name in names for row in ROWS]
    return pytest.mark.parametrize(
        ("name", "activation"),
        [
            pytest.param(name, row, id=f"{name}-{row.name}")
            for name, row in pairs
            if name == every_kind_after or row in (PIECEWISE, SMOOTH)
        ],
    )


@both_kinds_after(SMALL, "group")
def test_gradcheck(name: str, activation: ActivationCase) -> None:
    make, shape = SMALL[name]
    norm = make().double()
    while True:  # until no finite difference crosses a kink
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        z = norm(x).detach()
        if all((z - kink).abs().min() > 1e-4 for kink in (-3.0, 0.0, 3.0, 6.0)):
            break
    inputs = (x, *norm.parameters())

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return recompute(activation)(norm(x))

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@both_kinds_after(NORMS, "batch_2d")
def test_second_derivatives_match_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    norm = NORMS[name]
    module, x = norm.module(torch.float64, device=device), norm.input(torch.float64, device)
    incoming = torch.randn_like(x).requires_grad_()
    inputs = (x, incoming, *module.parameters())
    results = []
    for call in (lambda z: recompute(activation)(z).mul_(1), activation.reference):
        y = call(module(x))
        (first,) = torch.autograd.grad(y, x, incoming, create_graph=True)
        weighted = (first * torch.linspace(-1, 1, first.numel()).to(first).view_as(first)).sum()
        results.append(torch.autograd.grad(weighted, inputs, allow_unused=True))
    for tensor, actual, expected in zip(inputs, *results, strict=True):
        zeros = torch.zeros_like(tensor)  # a gradient of zeros may be None
        torch.testing.assert_close(
            zeros if actual is None else actual, zeros if expected is None else expected
        )


@one_of_each_norm
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["linear", "square"])
def test_third_derivative_matches_pytorch(
    name: str, loss: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    norm = NORMS[name]
    module, x = norm.module(torch.float64, device=device), norm.input(torch.float64, device)

    def third(call: Call) -> Tensor:
        (first,) = torch.autograd.grad(loss(call(module(x))), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), x)[0]

    try:
        expected = third(exactly(SMOOTH))
    except RuntimeError as error:  # from torch 2.14 on
        if "batch_norm does not support 3rd" not in str(error):
            raise
        with pytest.raises(RuntimeError, match="batch_norm does not support 3rd"):
            third(recompute(SMOOTH))
        return
    torch.testing.assert_close(third(recompute(SMOOTH)), expected, rtol=1e-8, atol=1e-8)


@each_norm
@both_kinds
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_only_the_affine_and_the_anchor_are_saved(
    name: str, activation: ActivationCase, training: bool, device: torch.device
) -> None:
    norm = NORMS[name]
    module, x = norm.module(torch.float32, training, device), norm.input(torch.float32, device)
    alone = saved_bytes(nn.Sequential(module), x)
    both = saved_bytes(nn.Sequential(module, activation.module(save="recompute")), x)
    anchor = 0 if activation.entry.is_piecewise_linear else 4
    assert both == alone + 4 * norm.affine_numel + anchor


@one_of_each_norm
@each_activation
def test_output_is_not_saved(name: str, activation: ActivationCase, device: torch.device) -> None:
    norm = NORMS[name]
    module, x = norm.module(torch.float32, device=device), norm.input(torch.float32, device)

    def is_saved(call: Call) -> bool:
        y = call(module(x))
        storage = StorageWeakRef(y.untyped_storage())
        loss = y.sum()
        del y
        is_alive = not storage.expired()
        loss.backward()
        return is_alive

    assert not is_saved(recompute(activation))
    assert is_saved(partial(activation.call, save="output"))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda y: y.add_(torch.arange(y.numel(), device=y.device).to(y).view_as(y)),
    "mul": lambda y: y.mul_(2),
    "zero": lambda y: y.zero_(),
    "slice": lambda y: y[1:].mul_(3),
    "detached": lambda y: y.detach().mul_(1),
    "relu": lambda y: torch.relu_(y),
    "copy": lambda y: y.copy_(y.detach().flip(0)),
}


@one_of_each_norm
@both_kinds
@pytest.mark.parametrize("write", WRITES)
def test_later_writes_to_the_output_match_pytorch(
    name: str, activation: ActivationCase, write: str, device: torch.device
) -> None:
    norm = NORMS[name]

    def then_written(call: Call) -> Call:
        def function(z: Tensor) -> Tensor:
            y = call(z)
            WRITES[write](y)
            return y

        return function

    assert_same_gradients(
        then_written(recompute(activation)),
        then_written(lambda z: activation.reference(z).clone()),
        norm.module(torch.float64, device=device),
        norm.input(torch.float64, device),
    )


MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@one_of_each_norm
@both_kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_version_rises_by_one(
    name: str, activation: ActivationCase, mode: str, requires_grad: bool, device: torch.device
) -> None:
    norm = NORMS[name]
    module = norm.module(torch.float32, device=device).requires_grad_(requires_grad)
    z = module(norm.input(torch.float32, device).requires_grad_(requires_grad))
    expected = activation.reference(z.detach().clone())
    before = z._version
    with MODES[mode]():
        assert recompute(activation)(z) is z
    assert z._version == before + 1
    assert z._base is None or z._base._version == before + 1
    assert_values(activation, z.detach(), expected)


def viewed_without_grad(z: Tensor) -> Tensor:
    with torch.no_grad():
        return z.view_as(z)


def written(z: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    write(z)
    return z


# Maps a norm's output to a rejected input, with the text of the error.
REJECTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "leaf": (lambda z: z.detach().requires_grad_(), "leaf Variable that requires grad"),
    "view_of_leaf": (lambda z: z.detach().requires_grad_()[1:], "view of a leaf Variable"),
    "function_view": (ViewFunction.apply, "is a view and is being modified inplace"),
    "view_made_without_grad": (viewed_without_grad, "no_grad mode"),
    "product": (lambda z: z * 1, "that of MulBackward0"),
    "view": (lambda z: z[1:], "that of SliceBackward0"),
    "whole_view": (lambda z: z.view_as(z), "that of ViewBackward0"),
    "transposed": (lambda z: z.transpose(0, 1), "that of TransposeBackward0"),
    "written": (lambda z: written(z, lambda z: z.add_(1)), "written to"),
    "part_written": (lambda z: written(z, lambda z: z[0].zero_()), "written to"),
    "written_unseen": (lambda z: written(z, lambda z: z.detach().add_(1)), "written to"),
    "activated": (lambda z: inplace_ops.relu_(z, save="recompute"), "written to"),
}


@both_kinds
@pytest.mark.parametrize("name", ["batch_2d", "group", "layer"])
@pytest.mark.parametrize("case", REJECTED)
def test_rejected_input_raises_and_is_not_modified(
    case: str, name: str, activation: ActivationCase, device: torch.device
) -> None:
    norm = NORMS[name]
    change, reason = REJECTED[case]
    z = change(norm.module(torch.float32, device=device)(norm.input(torch.float32, device)))
    before, version = z.detach().clone(), z._version
    with pytest.raises(RuntimeError, match=reason) as error:
        recompute(activation)(z)
    if reason.startswith(("that of", "written")):
        save = activation.entry.save_modes[0]
        assert f'{activation.entry.function}: save="recompute" needs' in str(error.value)
        assert f'right after the norm, or save="{save}"' in str(error.value)
    assert_identical(z, before, "modified although rejected:")
    assert z._version == version


@both_kinds
def test_output_of_a_convolution_is_rejected(
    activation: ActivationCase, device: torch.device
) -> None:
    z = nn.Conv2d(3, 4, 3, device=device)(torch.randn(2, 3, 5, 5, device=device))
    before = z.detach().clone()
    with pytest.raises(RuntimeError, match=r"that of \w*Convolution\w*: use it right after"):
        recompute(activation)(z)
    assert_identical(z, before)
    assert z._version == 0


@pytest.mark.parametrize(
    "row", [row for row in ROWS if not row.entry.is_piecewise_linear], ids=activation_id
)
def test_bits_argument_is_rejected(row: ActivationCase, device: torch.device) -> None:
    norm = NORMS["batch_2d"]
    z = norm.module(torch.float32, device=device)(norm.input(torch.float32, device))
    before = z.detach().clone()
    for bits in (1, 8, 32):
        with pytest.raises(ValueError, match='save="recompute" saves no bits'):
            row.call(z, save="recompute", bits=bits)
        with pytest.raises(ValueError, match='save="recompute" saves no bits'):
            row.module(save="recompute", bits=bits)
    assert_identical(z, before)
    assert z._version == 0


def test_gradient_in_another_memory_format_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is slow if the gradient has another memory format than the norm's input."""
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x).to(memory_format=torch.channels_last)
    norm, in_order = nn.GroupNorm(2, 4).double(), []
    original = _ops.in_order
    monkeypatch.setattr(
        _ops, "in_order", lambda *args: in_order.append(original(*args)) or in_order[-1]
    )
    y = inplace_ops.silu_(norm(x), save="recompute")
    (actual,) = torch.autograd.grad(y, x, grad)
    assert [gradient.stride() for gradient in in_order] == [x.stride()]
    (expected,) = torch.autograd.grad(F.silu(norm(x)), x, grad)
    torch.testing.assert_close(actual, expected)
    grads = torch.randn(3, 2, 5, 6, 4, dtype=torch.float64)
    batched = [
        torch.autograd.grad(y.permute(0, 2, 3, 1), x, grads, is_grads_batched=True)
        for y in (inplace_ops.silu_(norm(x), save="recompute"), F.silu(norm(x)))
    ]
    torch.testing.assert_close(*batched)
