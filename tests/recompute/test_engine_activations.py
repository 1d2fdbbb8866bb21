"""An activation module after a norm, in a converted model, which runs a `RecomputeFunction`.

`test_engine_batch_norms.py` tests the gradients that bypass a batch norm's node.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.assertions import assert_identical
from _support.cases import ActivationCase
from _support.norm_cases import (
    NORMS,
    PIECEWISE,
    ROWS,
    SMOOTH,
    Norm,
    both_kinds,
    is_recomputed,
    one_of_each_norm,
    rounding,
)
from _support.smooth_references import SMOOTH_ACTIVATIONS
from _support.twins import Parts, converted_twin
from torch import Tensor, nn

from inplace_ops import _ops, saved_bytes

pytestmark = pytest.mark.usefixtures("_affines_of_any_size")

each_norm = pytest.mark.parametrize("name", NORMS)


def unchanged(*_: Any) -> None:
    pass


class Block(nn.Module):
    """A norm and PyTorch's module of an activation after it, in place unless it is GELU.

    Args:
        norm: The norm.
        activation: The activation.
        arrange: Computes the norm's input.
        between: Called with the norm, the input and the norm's output before the activation.
        after: Called with the norm, the input and the output.
    """

    def __init__(
        self,
        norm: nn.Module,
        activation: ActivationCase,
        arrange: Callable[[Tensor], Tensor] = lambda x: x,
        between: Callable[[nn.Module, Tensor, Tensor], object] = unchanged,
        after: Callable[[nn.Module, Tensor, Tensor], object] = unchanged,
    ) -> None:
        super().__init__()
        self.norm, self.arrange, self.between, self.after = norm, arrange, between, after
        entry = activation.entry
        inplace = {} if entry.torch_inplace is None else {"inplace": True}
        self.act = entry.torch_module(**entry.variant, **inplace)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.arrange(x))
        self.between(self.norm, x, z)
        y = self.act(z)
        self.after(self.norm, x, y)
        return y


def norm_and_input(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    norm = NORMS[name]
    return norm.module(torch.float64, device=device), norm.input(torch.float64, device)


def loss_of(y: Tensor) -> Tensor:
    """Return a loss whose gradient is not zero where y is zero."""
    return (y + 1).square().sum()


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and of all parameters that require one."""
    inputs = [t for t in (x, *model.parameters()) if t.requires_grad]
    return torch.autograd.grad(loss_of(model(x)), inputs, allow_unused=True)


def assert_same_gradients(model: nn.Module, x: Tensor) -> None:
    """Assert that a float64 model and its converted twin have equal gradients and buffers."""
    twin = converted_twin(model)
    torch.testing.assert_close(gradients(twin, x), gradients(model, x), rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(twin.buffers(), model.buffers(), strict=True):
        assert torch.equal(mine, theirs)


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
    parameters are PyTorch's. With a hook on the norm's output no gradient bypasses its node.
    """
    reached: list[Tensor] = []

    def watch(_: nn.Module, x: Tensor, z: Tensor) -> None:
        base = z if z._base is None else z._base
        base.register_hook(reached.append)

    twin = converted_twin(Block(module, activation, between=watch))
    leaf = x.detach().clone().requires_grad_()
    z = module(leaf)
    y = twin(x)
    assert y._version == (0 if activation.entry.torch_inplace is None else 1)
    assert_identical(y, activation.reference(z), "value")

    incoming = (2 * torch.rand(y.shape, device=y.device) - 1).to(y.dtype)
    actual = torch.autograd.grad(y, (x, *twin.parameters()), incoming, retain_graph=True)
    gradient = reached[0].view_as(z)
    assert gradient.stride() == z.stride()
    slope, spread = slope_and_spread(activation, z.detach(), norm.error(module, x, z))
    exact = torch.float64 if y.dtype == torch.float64 else torch.float32
    formula = activation.entry.arithmetic_error * torch.finfo(exact).eps / 2**-23
    if activation.entry.is_piecewise_linear:
        formula = 0.0
    wanted = incoming.double() * slope
    tolerance = incoming.double().abs() * (1.01 * spread + formula) + 2 * rounding(wanted, y.dtype)
    assert ((gradient.double() - wanted).abs() <= tolerance).all()

    expected = torch.autograd.grad(z, (leaf, *module.parameters()), gradient)
    for mine, theirs in zip(actual, expected, strict=True):
        if y.is_cuda:
            torch.testing.assert_close(mine, theirs)
        else:
            assert_identical(mine, theirs)
    for mine, theirs in zip(twin.buffers(), module.buffers(), strict=True):
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
@both_kinds
def test_second_derivatives_match_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    block = Block(module, activation)
    results = []
    for model in (converted_twin(block), block):
        incoming = torch.linspace(-1, 2, x.numel()).to(x).view_as(x).requires_grad_()
        inputs = (x, incoming, *model.parameters())
        (first,) = torch.autograd.grad(model(x), x, incoming, create_graph=True)
        weighted = (first * torch.linspace(-1, 1, first.numel()).to(first).view_as(first)).sum()
        found = torch.autograd.grad(weighted, inputs, allow_unused=True)
        # A gradient of zeros may be None.
        pairs = zip(found, inputs, strict=True)
        results.append([torch.zeros_like(t) if g is None else g for g, t in pairs])
    torch.testing.assert_close(*results)


@one_of_each_norm
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["linear", "square"])
def test_third_derivative_matches_pytorch(
    name: str, loss: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    block = Block(module, SMOOTH)

    def third(model: nn.Module) -> Tensor:
        (first,) = torch.autograd.grad(loss(model(x)), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), x)[0]

    try:
        expected = third(block)
    except RuntimeError as error:  # from torch 2.14 on
        if "batch_norm does not support 3rd" not in str(error):
            raise
        with pytest.raises(RuntimeError, match="batch_norm does not support 3rd"):
            third(converted_twin(block))
        return
    torch.testing.assert_close(third(converted_twin(block)), expected, rtol=1e-8, atol=1e-8)


@each_norm
@both_kinds
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_only_the_affine_and_the_anchor_are_saved(
    name: str, activation: ActivationCase, training: bool, device: torch.device
) -> None:
    norm = NORMS[name]
    module, x = norm.module(torch.float32, training, device), norm.input(torch.float32, device)
    alone = saved_bytes(module, x)
    both = saved_bytes(converted_twin(Block(module, activation)), x)
    anchor = 0 if activation.entry.is_piecewise_linear else 4
    assert both == alone + 4 * norm.affine_numel + anchor


def test_gradient_in_another_memory_format_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is slow if the gradient has another memory format than the norm's input."""
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x).to(memory_format=torch.channels_last)
    block, in_order = Block(nn.GroupNorm(2, 4).double(), SMOOTH), []
    twin, original = converted_twin(block), _ops.in_order
    monkeypatch.setattr(
        _ops, "in_order", lambda *args: in_order.append(original(*args)) or in_order[-1]
    )
    (actual,) = torch.autograd.grad(twin(x), x, grad)
    assert [gradient.stride() for gradient in in_order] == [x.stride()]
    (expected,) = torch.autograd.grad(block(x), x, grad)
    torch.testing.assert_close(actual, expected)
    grads = torch.randn(3, 2, 5, 6, 4, dtype=torch.float64)
    batched = [
        torch.autograd.grad(model(x).permute(0, 2, 3, 1), x, grads, is_grads_batched=True)
        for model in (twin, block)
    ]
    torch.testing.assert_close(*batched)


@one_of_each_norm
@both_kinds
def test_batched_gradients_match_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    block = Block(module, activation)
    twin = converted_twin(block)
    y, expected = twin(x), block(x)
    incoming = torch.randn(3, *y.shape, dtype=y.dtype, device=device)
    inputs = (x, *twin.parameters())
    batched = torch.autograd.grad(y, inputs, incoming, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(y, inputs, g, retain_graph=True) for g in incoming]
    for i, g in enumerate(incoming):
        torch.testing.assert_close(batched[0][i], torch.autograd.grad(expected, x, g, True)[0])
    for together, *each in zip(batched, *rows, strict=True):
        torch.testing.assert_close(together, torch.stack(each))


@both_kinds
def test_second_backward_frees_the_norms_input(
    activation: ActivationCase, device: torch.device
) -> None:
    norm, x = norm_and_input("layer", device)
    twin, inner = converted_twin(Block(norm, activation)), x * 1
    alive = weakref.ref(inner)
    y = twin(inner)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    loss = gradient.square().sum()
    del inner, y, gradient
    loss.backward()
    assert alive() is None


@one_of_each_norm
@both_kinds
def test_parameters_freed_until_backward_match_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    """FSDP frees parameters after a norm's forward, so the activation cannot read them."""

    def free(norm: nn.Module, x: Tensor, z: Tensor) -> None:
        for parameter in norm.parameters():
            parameter.untyped_storage().resize_(0)

    module, x = norm_and_input(name, device)
    expected = gradients(Block(module, activation), x)
    values = [parameter.detach().clone() for parameter in module.parameters()]
    twin = converted_twin(Block(module, activation, between=free))
    y = twin(x)
    for parameter, value in zip(twin.parameters(), values, strict=True):
        parameter.untyped_storage().resize_(value.nbytes)
        parameter.data.copy_(value)
    actual = torch.autograd.grad(loss_of(y), (x, *twin.parameters()))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# Norms as functions of the input, weight and bias.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "batch_eval": lambda x, w, b: F.batch_norm(
        x, torch.linspace(-1, 1, 6).to(x), torch.linspace(0.5, 2, 6).to(x), w, b
    ),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "layer": lambda x, w, b: F.layer_norm(x, (6,), w, b),
}
GIVEN: dict[str, Callable[[Tensor], Tensor | None]] = {
    "parameter": lambda leaf: leaf,
    "frozen": lambda leaf: leaf.detach(),
    "computed": lambda leaf: leaf * 1.5,
    "repeated": lambda leaf: leaf[:3].repeat(2),
    "none": lambda leaf: None,
}


def outcome(model: nn.Module, x: Tensor) -> tuple[Tensor | None, ...] | str:
    """Return the gradients, or the beginning of PyTorch's error in backward."""
    inputs = (x, *model.parameters())
    loss = loss_of(model(x))
    try:
        return torch.autograd.grad(loss, inputs, allow_unused=True)
    except RuntimeError as error:
        return str(error).partition(" operation:")[0]


def assert_same_outcome(model: nn.Module, x: Tensor) -> None:
    """Assert that a float64 model and its converted twin have equal gradients or errors."""
    twin, inputs = converted_twin(model), [x.detach().clone().requires_grad_() for _ in range(2)]
    actual, expected = outcome(twin, inputs[0]), outcome(model, inputs[1])
    if isinstance(actual, str) or isinstance(expected, str):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("weight", GIVEN)
@pytest.mark.parametrize("bias", GIVEN)
def test_functional_norms_with_any_parameters_match_pytorch(
    function: str, weight: str, bias: str, device: torch.device
) -> None:
    """Without a module, only a layer norm's node and an edge to a parameter determine the bias."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device)

    def compute(m: Any, x: Tensor) -> Tensor:
        return FUNCTIONS[function](x, GIVEN[weight](m.weight), GIVEN[bias](m.bias))

    norm = Parts(compute, weight=nn.Parameter(leaf(6)), bias=nn.Parameter(leaf(6)))
    block = Block(norm, SMOOTH)
    is_known = function == "layer" or (bias == "parameter" and function != "instance")
    assert is_recomputed(converted_twin(block)(leaf(5, 6, 6).requires_grad_())) == is_known
    assert_same_outcome(block, leaf(5, 6, 6))


CHANGED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "input": lambda norm, x: x,
    "weight": lambda norm, x: norm.weight,
    "bias": lambda norm, x: norm.bias,
    "running_mean": lambda norm, x: norm.running_mean,
    "running_var": lambda norm, x: norm.running_var,
}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        (name, changed)
        for name in ("batch_2d", "group", "instance_statistics", "layer")
        for changed in CHANGED
        if not changed.startswith("running") or name in ("batch_2d", "instance_statistics")
    ],
)
@pytest.mark.parametrize("when", ["between", "after"])
@pytest.mark.parametrize(
    ("training", "activation"), [(True, SMOOTH), (False, PIECEWISE)], ids=["train", "eval"]
)
def test_tensor_changed_before_backward_matches_pytorch(
    name: str,
    changed: str,
    when: str,
    training: bool,
    activation: ActivationCase,
    device: torch.device,
) -> None:
    """A tensor changed before or after the activation gives PyTorch's error or gradients."""

    def change(norm: nn.Module, x: Tensor, _: Tensor) -> None:
        with torch.no_grad():
            CHANGED[changed](norm, x).add_(1)

    norm, x = norm_and_input(name, device)
    assert_same_outcome(Block(norm.train(training), activation, **{when: change}), x)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "stepped": lambda x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda x: x[:1].expand(x.shape),
    "permuted": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        (name, strides)
        for name in ("batch_1d", "batch_2d", "group", "instance_2d", "layer")
        for strides in STRIDES
        if strides != "empty" or name == "layer"  # PyTorch's other norms reject an empty input
    ],
)
@both_kinds
def test_inputs_of_any_strides_match_pytorch(
    name: str, strides: str, activation: ActivationCase, device: torch.device
) -> None:
    """The norm's output has other strides than its input."""
    module, x = norm_and_input(name, device)
    block = Block(module, activation, STRIDES[strides])
    assert is_recomputed(converted_twin(block)(x)) == (strides != "empty")
    assert_same_gradients(block, x)
