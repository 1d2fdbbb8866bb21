"""Norms whose node lacks what a spec needs: the bias, eps, exact statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import saved_allocation
from _support.assertions import Severed
from _support.engine_norms import convolution, each_norm, each_norm_except_rms, names_of, norms
from _support.twins import (
    C,
    Parts,
    Program,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
    step_of,
    swap_in_forward,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from inplace_ops import saved_bytes
from inplace_ops.recompute.calls import Affine

pytestmark = pytest.mark.usefixtures("_small_tensors_too", "_fused_rms_norm")

each_in_place_activation = pytest.mark.parametrize(
    "activation", [partial(nn.LeakyReLU, 0.1), nn.Hardswish], ids=["leaky_relu", "hardswish"]
)

NORMS_OF_CONSTANT_ROWS = norms() | {
    "group_not_affine": nn.GroupNorm(2, C, affine=False),
    "instance_not_affine": nn.InstanceNorm2d(C),
    "layer_not_affine": nn.LayerNorm(8, elementwise_affine=False),
}


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("norm", NORMS_OF_CONSTANT_ROWS)
@pytest.mark.parametrize(
    ("constant", "bias"), [(1.0, 0.0), (0.3, 1e-6), (-7.77, 0.0), (1e-3, 1e-6)]
)
@pytest.mark.parametrize(
    "activation",
    [nn.ReLU, partial(nn.LeakyReLU, 0.1, inplace=True)],
    ids=["relu", "leaky_relu_in_place"],
)
def test_norm_of_constant_rows_matches_pytorch(
    activation: Callable[[], nn.Module], bias: float, constant: float, norm: str
) -> None:
    """The norm's output is the bias up to a rounding, whose sign decides ReLU's gradient."""
    model = Program(convolution, lambda c: copy.deepcopy(NORMS_OF_CONSTANT_ROWS[norm]), activation)
    nn.init.zeros_(model.first.weight)
    nn.init.constant_(model.first.bias, constant)
    if getattr(model.norm, "bias", None) is not None:
        nn.init.constant_(model.norm.bias, bias)
        nn.init.uniform_(model.norm.weight, 0.5, 1.5)
    twin, x = converted_twin(model), images()
    assert len(recomputed(twin(x))) == 1
    assert_same_steps(model, twin, x)


@each_norm_except_rms
@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_frozen_norm_parameters_come_from_the_module(
    norm: str, frozen: tuple[str, ...], training: bool
) -> None:
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: norms(c)[norm]).train(training)
    for name, parameter in model.norm.named_parameters():
        nn.init.uniform_(parameter, -1.5, 1.5).requires_grad_(name not in frozen)
    twin, x = converted_twin(model), images()
    assert len(recomputed(twin(x))) >= 1
    assert_same_steps(model, twin, x)


def test_repeated_bias_with_an_unrepeated_weight_matches_pytorch() -> None:
    """The graph resembles an instance norm's, and the values agree while all weights are 1."""

    def compute(m: Any, x: Tensor) -> Tensor:
        z = F.batch_norm(m.first(x), None, None, m.weight, m.bias.repeat(64), True)
        return m.last(F.silu(z))

    parameters = {"weight": nn.Parameter(torch.ones(64)), "bias": nn.Parameter(torch.zeros(1))}
    model = Parts(compute, first=nn.Linear(64, 64), last=nn.Linear(64, 4), **parameters)
    twin, x = converted_twin(model), torch.randn(32, 64)
    for weight in (torch.ones(64), torch.linspace(0.5, 1.5, 64)):
        model.weight.data.copy_(weight)
        assert_same_steps(model, twin, x)


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_write_to_repeated_parameters_matches_pytorch(changed: str) -> None:
    """From the third step on, write to the repeated copy; its edges still lead to the parameter."""

    def per_sample(m: Any, x: Tensor) -> Tensor:
        repeated = {name: p.repeat(len(x)) for name, p in m.named_parameters()}
        if m.noise:
            with torch.no_grad():
                repeated[changed][C:].add_(m.noise)
        z = F.batch_norm(x.reshape(1, -1, *x.shape[2:]), None, None, **repeated, training=True)
        return z.view(x.shape)

    parameters = {"weight": nn.Parameter(torch.ones(C)), "bias": nn.Parameter(torch.zeros(C))}
    norm = Parts(per_sample, **parameters, noise=0.0)
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: norm)
    twin, x = converted_twin(model), images()
    for noise in (0.0, 0.5):
        model.norm.noise = twin.norm.noise = noise
        assert_same_steps(model, twin, x)


def test_norm_with_inference_tensor_parameters_runs() -> None:
    with torch.inference_mode():
        model = Program(convolution)
    twin, x = converted_twin(model), images()
    with torch.inference_mode():
        torch.testing.assert_close(twin(x), model(x))


# Norms that compute something else than their module says. As long as `SWITCH.on` is 0 it is equal,
# so that a spec's first use detects nothing. Tests set it after the second step.
SWITCH = SimpleNamespace(on=0)


def _writing(norm: Any, x: Tensor) -> Tensor:
    y = nn.InstanceNorm2d._apply_instance_norm(norm, x)
    with torch.no_grad():
        norm.weight.mul_(1 + SWITCH.on)
    return y


def _of_other_parameters(norm: Any, x: Tensor) -> Tensor:
    factor = 1 + SWITCH.on
    return F.instance_norm(x, None, None, factor * norm.weight, factor * norm.bias)


def _factor_of(name: str) -> property:
    """Return a property that hides a parameter, and scales it."""
    return property(lambda norm: (1 + SWITCH.on) * nn.Module.__getattr__(norm, name))


# By name: a class of norms, and what its subclass has instead.
OTHERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "forward": (
        nn.GroupNorm,
        {"forward": lambda m, x: F.group_norm(x, 2, m.weight, m.bias + SWITCH.on, m.eps)},
    ),
    "eps": (
        nn.GroupNorm,
        {"forward": lambda m, x: F.group_norm(x, 2, m.weight, m.bias, 100 * m.eps)},
    ),
    "bias": (nn.GroupNorm, {"bias": _factor_of("bias")}),
    "weight": (nn.InstanceNorm2d, {"weight": _factor_of("weight")}),
    "method": (nn.InstanceNorm2d, {"_apply_instance_norm": _of_other_parameters}),
    "method that writes": (nn.InstanceNorm2d, {"_apply_instance_norm": _writing}),
    "class of a parameter": (nn.InstanceNorm2d, {}),
}


class OtherParameter(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.instance_norm:
                kwargs["bias"] = kwargs["bias"] * (1 + SWITCH.on)
            return function(*args, **kwargs)


def other_norm(name: str) -> nn.Module:
    kind, body = OTHERS[name]
    made: Any = type("Other", (kind,), body)
    norm: Any = made(2, C) if kind is nn.GroupNorm else made(C, affine=True)
    if name == "class of a parameter":
        norm.bias = OtherParameter(norm.bias.detach())
    return norm


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("activation", [nn.Identity, nn.SiLU])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_with_code_of_its_own_matches_pytorch(
    other: str,
    activation: Callable[[], nn.Module],
    is_frozen: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Program(convolution, lambda c: other_norm(other), activation, dtype)
    model.norm._parameters["bias"].data.fill_(0.5)
    model.norm._parameters["bias"].requires_grad_(not is_frozen)
    twin, x = converted_twin(model), images(dtype)
    for on in (0, 1):
        monkeypatch.setattr(SWITCH, "on", on)
        assert_same_steps(model, twin, x, tolerance=1e-5 if dtype is torch.float32 else 0)


def _with_eps(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return the output of a norm with the same weight and another eps, instead of the module's."""
    if not SWITCH.on or not isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        return output
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(args[0], (8,), module.weight, module.bias, 0.5)
    return F.group_norm(args[0], 2, module.weight, module.bias, 0.5)


def _swap(norm: nn.Module, name: str, other: Any) -> None:
    """Change an attribute only while the module's forward runs, and the switch is on."""
    value = getattr(norm, name)
    swap_in_forward(norm, name, lambda: other if SWITCH.on else value)


class _OtherEps(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if SWITCH.on and function in (F.layer_norm, F.group_norm):
            kwargs = {**kwargs, "eps": 0.5}
        return function(*args, **(kwargs or {}))


def _with_tensor_eps(m: Program) -> None:
    """Let the model write to eps after the norm has run."""

    def write(*_: Any) -> None:
        m.norm.eps.fill_(0.5 if SWITCH.on else 1e-3)

    m.norm.eps = torch.tensor(1e-3)
    m.conv.register_forward_pre_hook(write)


# By name: what is registered on the model, and returns a handle that must be removed, if any.
CHANGES: dict[str, Callable[[Program], Any]] = {
    "output": lambda m: m.norm.register_forward_hook(_with_eps, prepend=True),
    "output, globally": lambda m: nn.modules.module.register_module_forward_hook(_with_eps),
    "eps": lambda m: _swap(m.norm, "eps", 0.5),
    "bias": lambda m: _swap(
        m.norm.requires_grad_(False), "bias", nn.Parameter(m.norm.bias + 1, requires_grad=False)
    ),
    "tensor eps": _with_tensor_eps,
    "eps, by a mode": lambda m: None,  # nothing on the model
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_what_changes_a_norm_while_it_runs_matches_pytorch(
    norm: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits PyTorch's own norm runs again, with the module's eps."""
    model = Program(convolution, lambda c: norms(c)[norm], dtype=torch.bfloat16)
    twin, x = converted_twin(model), images(torch.bfloat16)
    handles = [CHANGES[change](m) for m in (model, twin)]
    with _OtherEps() if change == "eps, by a mode" else nullcontext():
        for on in (0, 1):
            monkeypatch.setattr(SWITCH, "on", on)
            assert_same_steps(model, twin, x, tolerance=0)
    for handle in filter(None, handles):
        handle.remove()


@pytest.mark.parametrize("inplace", [False, True], ids=["out_of_place", "in_place"])
@pytest.mark.parametrize(
    "norm",
    [
        *(partial(nn.LayerNorm, C), partial(nn.LayerNorm, (C, C)), partial(nn.BatchNorm2d, C)),
        *(partial(nn.GroupNorm, 2, C), partial(nn.GroupNorm, 2, C, affine=False)),
    ],
    ids=["layer", "layer_2d", "batch", "group", "group_not_affine"],
)
def test_activation_of_a_view_of_one_sample_matches_pytorch(
    norm: Callable[[], nn.Module], inplace: bool
) -> None:
    """The view of one sample looks like the output of an instance norm, which is a view too.

    With as many rows as columns, a layer norm's column affine fits the channels by its size.
    """
    model = Program(lambda m, z: m.last(m.silu(z.view_as(z))), lambda c: norm())
    model.first, model.last, model.silu = nn.Linear(C, C), nn.Linear(C, C), nn.SiLU(inplace=inplace)
    for parameter in model.norm.parameters():
        nn.init.normal_(parameter)
    assert_same_steps(model, converted_twin(model), torch.randn(1, C, C, C))


@pytest.mark.parametrize(
    ("norm", "samples"),
    [(nn.GroupNorm(4, 64), 16), (nn.BatchNorm1d(64), 2), (nn.LayerNorm(64), 2)],
    ids=["group", "batch", "layer"],
)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_norms_of_flat_features_need_no_extra_memory(
    norm: nn.Module, samples: int, activation: Callable[[], nn.Module]
) -> None:
    """A group norm of flat features has one scale and one shift per element."""
    layers = nn.Linear(8, 64), copy.deepcopy(norm), activation(), nn.Linear(64, 8)
    model, x = nn.Sequential(*layers), torch.randn(samples, 8)
    twin = converted_twin(model)
    assert_same_steps(model, twin, x)
    assert saved_bytes(twin, x) <= saved_bytes(model, x)
    assert saved_allocation(lambda: twin(x)) <= saved_allocation(lambda: model(x))


def test_norm_rerun_on_a_recomputed_input_is_exact() -> None:
    """The rerun reads its input in the original strides, as PyTorch's rounding depends on them."""
    norm = partial(nn.InstanceNorm2d, C)
    for _ in range(4):
        model = Program(
            lambda m, z: m.conv(m.act(m.second(z.transpose(2, 3)))), norm, nn.ReLU, torch.bfloat16
        )
        model.first, model.second = nn.Identity(), norm()
        twin, x = converted_twin(model), torch.randn(2, C, 8, 8, dtype=torch.bfloat16)
        with no_warnings():
            assert_same_steps(model, twin, x, tolerance=0)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("activation", [nn.SiLU, nn.ReLU6, nn.Hardswish, nn.Mish])
def test_in_place_activation_after_a_16_bit_norm_is_recomputed(
    activation: Callable[..., nn.Module],
) -> None:
    """The activation saves a clone of its input, to which no edge leads."""
    dtype = torch.bfloat16
    model = Program(convolution, activation=lambda: activation(inplace=True), dtype=dtype)
    twin, x = converted_twin(model), images(dtype)
    names = names_of(twin, x)
    assert len(names) == 2
    assert names[0].endswith("saved by Convolution")
    assert names[1].startswith("Clone, saved by")
    assert_same_steps(model, twin, x, tolerance=0)


@each_norm
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_missing_gradient_stays_none(norm: str, activation: Callable[[], nn.Module]) -> None:
    """If backward passes no gradient to the activation, the layers before the norm get none."""
    model = Program(lambda m, y: m.conv(Severed.apply(y)), lambda c: norms(c)[norm], activation)
    twin, x = converted_twin(model), images()
    assert_same_steps(model, twin, x, steps=1)
    assert twin.first.weight.grad is None


@each_in_place_activation
@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_activation_of_an_instance_norm_keeps_views_and_hooks(
    dtype: torch.dtype, samples: int, has_hook: bool, activation: Callable[..., nn.Module]
) -> None:
    """No `CopySlices` node hides what the activation saves, unless the view has a hook."""

    def compute(m: Any, y: Tensor) -> Tensor:
        assert y is m.normalized
        assert y._version == 1
        return m.conv(y)

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        if has_hook:
            output.register_hook(lambda grad: 2 * grad)
        model_of[module].normalized = output

    in_place = partial(activation, inplace=True)
    model = Program(compute, lambda c: nn.InstanceNorm2d(c, affine=True), in_place, dtype)
    twin, x = converted_twin(model), images(dtype, samples)
    model_of = {m.norm: m for m in (model, twin)}
    for m in (model, twin):
        m.norm.register_forward_hook(remember)
    with no_warnings():
        names = [value.name for value in recomputed(twin(x))]
    assert any(name.endswith("saved by Convolution") for name in names) == (not has_hook)
    assert_same_steps(model, twin, x, tolerance=0 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_view_that_autograd_rejects_is_not_modified(dtype: torch.dtype, samples: int) -> None:
    """An in-place activation on one of several views raises PyTorch's error and writes nothing."""

    def compute(m: Any, z: Tensor) -> Tensor:
        (view,) = (z if z._base is None else z._base).split(samples * C, 1)
        original = view.detach().clone()
        try:
            m.silu(view)
        except RuntimeError as error:
            assert torch.equal(view, original)
            return m.conv(z), str(error)
        raise AssertionError("PyTorch was expected to reject the view")

    model = Program(compute, lambda c: nn.InstanceNorm2d(c, affine=True), dtype=dtype)
    model.silu = nn.SiLU(inplace=True)
    twin, x = converted_twin(model), images(dtype, samples)
    (expected, expected_error), (actual, error) = model(x), twin(x)
    assert error == expected_error
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("affine", [True, False], ids=["", "not affine"])
@pytest.mark.parametrize("activation", [nn.Identity, nn.SiLU])
def test_running_statistics_updated_after_an_eval_norm_match_pytorch(
    activation: Callable[[], nn.Module], affine: bool
) -> None:
    """From the third step on a training call updates the statistics, which raises no version.

    The input of the second norm is replaced. Only its module tells that it has no bias.
    """

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.second(m.silu(z))
        if m.changes:
            with torch.no_grad():
                for norm in (m.norm, m.second):
                    norm.train()(3 * z + 1)
                    norm.eval()
        return m.conv(m.silu(y) * y)

    model = Program(compute, nn.BatchNorm2d, activation)
    model.second, model.changes = nn.BatchNorm2d(C, affine=affine), False
    model.eval()
    twin, x = converted_twin(model), images()
    assert any(name.startswith("NativeBatchNorm, ") for name in names_of(twin, x))
    for changes in (False, True):
        model.changes = twin.changes = changes
        assert_same_steps(model, twin, x)


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
def test_bias_written_between_two_calls_matches_pytorch(is_frozen: bool, norm: str) -> None:
    """The first call bypasses hooks, so the version at the second call does not prove its bias."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.conv2d(m.norm.forward(m.other(z)), m.other.weight)
        if m.is_written_to:
            with torch.no_grad():
                m.norm.bias += 1
        return m.conv(m.norm(y))

    model = Program(compute, lambda c: norms(c)[norm])
    model.norm.bias.requires_grad_(not is_frozen)
    model.is_written_to = False
    twin, x = converted_twin(model), images()
    assert_same_steps(model, twin, x)
    model.is_written_to = twin.is_written_to = True
    assert_same_steps(model, twin, x)


@each_norm_except_rms
@pytest.mark.parametrize("comes_first", [False, True], ids=["", "hook first"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
def test_bias_written_by_a_forward_hook_matches_pytorch(
    norm: str, is_frozen: bool, comes_first: bool
) -> None:
    """From the third step on a hook writes to the bias, before or after the engine's own hook."""
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: norms(c)[norm])
    model.norm.bias.requires_grad_(not is_frozen)

    def write(module: nn.Module, args: Any, output: Tensor) -> None:
        if module.is_written_to:
            with torch.no_grad():
                module.bias += 1

    twin, x = converted_twin(model), images()
    for m in (model, twin):
        m.norm.is_written_to = False
        m.norm.register_forward_hook(write, prepend=comes_first)
    assert_same_steps(model, twin, x)
    for m in (model, twin):
        m.norm.is_written_to = True
        if norm == "layer":  # it saves its bias
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step_of(m, x)
    if norm != "layer":
        assert_same_steps(model, twin, x)


class Noisy(nn.Module):
    calls = 0

    def forward(self, bias: Tensor) -> Tensor:
        self.calls += 1
        return bias + torch.randn_like(bias)


@each_norm_except_rms
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
def test_parametrization_of_a_bias_runs_once(norm: str, is_frozen: bool) -> None:
    """Conversion runs it neither for a norm nor for a convolution."""
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: norms(c)[norm])
    for layer in (model.norm, model.conv):
        nn.utils.parametrize.register_parametrization(layer, "bias", Noisy())
        layer.parametrizations.bias.original.requires_grad_(not is_frozen)
    noisy = [m for m in model.modules() if isinstance(m, Noisy)]
    calls = [m.calls for m in noisy]
    twin, x = converted_twin(model), images()
    assert [m.calls for m in twin.modules() if isinstance(m, Noisy)] == calls
    assert_same_steps(model, twin, x)


@pytest.mark.usefixtures("without_products")
@each_norm_except_rms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_norm_with_16_bit_statistics_is_rerun(
    norm: str, dtype: torch.dtype, training: bool
) -> None:
    """PyTorch's own norm recomputes the statistics, so the output is equal bit for bit."""
    model = Program(convolution, lambda c: norms(c)[norm], dtype=dtype).train(training)
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.uniform_(-1.5, 1.5)
    twin, x = converted_twin(model), images(dtype)
    (value,) = recomputed(twin(x))
    if training or norm in ("group", "layer"):
        assert not isinstance(value.spec, Affine)
        assert value.spec.rounding == 0
    assert_same_steps(model, twin, x, tolerance=0 if value.spec.rounding == 0 else 2e-2)


@pytest.mark.usefixtures("without_products")
def test_16_bit_norm_with_unknown_eps_stays_saved() -> None:
    """The node of a layer norm does not save eps, and a function call has no module."""

    def compute(m: Any, z: Tensor) -> Tensor:
        return m.linear(F.layer_norm(z, (8,), None, None, 0.5))

    model, x = Program(compute, nn.Identity, dtype=torch.bfloat16), images(torch.bfloat16)
    twin = converted_twin(model)
    assert recomputed(twin(x)) == []
    assert_same_steps(model, twin, x, tolerance=0)
