"""Norms whose node lacks what a spec needs: the bias, eps, exact statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import saved_allocation
from _support.assertions import Severed
from _support.engine_norms import convolution, each_norm, each_norm_except_rms, names_of, norms
from _support.twins import (
    SOURCES,
    C,
    Program,
    assert_same_step,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
    step_of,
)
from torch import Tensor, nn

from inplace_ops import saved_bytes
from inplace_ops.recompute.calls import Affine

pytestmark = pytest.mark.usefixtures("source", "_small_tensors_too", "_fused_rms_norm")

each_in_place_activation = pytest.mark.parametrize(
    "activation", [partial(nn.LeakyReLU, 0.1), nn.Hardswish], ids=["leaky_relu", "hardswish"]
)

NORMS_OF_CONSTANT_ROWS = norms() | {
    "group_not_affine": nn.GroupNorm(2, C, affine=False),
    "instance_not_affine": nn.InstanceNorm2d(C),
    "layer_not_affine": nn.LayerNorm(8, elementwise_affine=False),
}


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("source", SOURCES[:1], indirect=True)
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


FROZEN: dict[str, Callable[[nn.Module], Any]] = {
    "weight": lambda norm: norm.weight.requires_grad_(False),
    "bias": lambda norm: norm.bias.requires_grad_(False),
    "both": lambda norm: norm.requires_grad_(False),
}


@each_norm_except_rms
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_frozen_norm_parameters_come_from_the_module(
    norm: str, frozen: str, training: bool
) -> None:
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: norms(c)[norm]).train(training)
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.uniform_(-1.5, 1.5)
    FROZEN[frozen](model.norm)
    twin, x = converted_twin(model), images()
    assert len(recomputed(twin(x))) >= 1
    assert_same_steps(model, twin, x)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize(
    "function",
    [
        lambda z, w, b: F.group_norm(z, 2, w, b),
        lambda z, w, b: F.batch_norm(z, None, None, w, b, True),
        lambda z, w, b: F.instance_norm(z, None, None, w, b),
    ],
    ids=["group", "batch", "instance"],
)
@pytest.mark.parametrize("given", ["weight_and_frozen_bias", "frozen_bias", "nothing"])
def test_unknown_bias_prevents_recomputation(function: Callable[..., Tensor], given: str) -> None:
    """A norm called as a function has no edge for its bias if the bias is frozen or absent."""

    class Functional(Program):
        def __init__(self) -> None:
            super().__init__(self.computed, nn.Identity)
            self.weight = nn.Parameter(torch.randn(C)) if "weight" in given else None
            self.register_buffer("bias", torch.randn(C) if "bias" in given else None)

        def computed(self, _: Any, z: Tensor) -> Tensor:
            return self.conv(self.silu(function(z, self.weight, self.bias)))

    model, x = Functional(), images()
    twin = converted_twin(model)
    assert not any("Norm" in name for name in names_of(twin, x))
    assert_same_steps(model, twin, x)


def test_repeated_bias_with_an_unrepeated_weight_matches_pytorch() -> None:
    """The graph resembles an instance norm's, and the values agree while all weights are 1."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 4)
            self.weight, self.bias = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            bias = self.bias.repeat(64)
            z = F.batch_norm(self.first(x), None, None, self.weight, bias, True)
            return self.last(F.silu(z))

    model, x = Repeats(), torch.randn(32, 64)
    twin = converted_twin(model)
    assert_same_steps(model, twin, x)
    with torch.no_grad():
        for m in (model, twin):
            m.weight.copy_(torch.linspace(0.5, 1.5, 64))
    assert_same_steps(model, twin, x)


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_write_to_repeated_parameters_matches_pytorch(changed: str) -> None:
    """From the third step on, write to the repeated copy; its edges still lead to the parameter."""

    class PerSample(nn.Module):
        noise = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))

        def forward(self, x: Tensor) -> Tensor:
            repeated = {"weight": self.weight.repeat(len(x)), "bias": self.bias.repeat(len(x))}
            if self.noise:
                with torch.no_grad():
                    repeated[changed][C:].add_(self.noise)
            z = F.batch_norm(x.reshape(1, -1, *x.shape[2:]), None, None, **repeated, training=True)
            return z.view(x.shape)

    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: PerSample())
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


class ShiftedNorm(nn.GroupNorm):
    """Pass `bias + shift` to the operation; tests change `shift` after the first steps."""

    shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias + self.shift, self.eps)


class HundredfoldEpsNorm(nn.GroupNorm):
    """Pass 100 times the module's eps to the operation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, 100 * self.eps)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("kind", [ShiftedNorm, HundredfoldEpsNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_with_custom_forward_matches_pytorch(
    kind: type[nn.GroupNorm], is_frozen: bool, dtype: torch.dtype
) -> None:
    """The engine does not assume that the operation read the module's bias and eps."""
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: kind(2, c), dtype=dtype)
    model.norm.bias.requires_grad_(not is_frozen)
    twin, x = converted_twin(model), images(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 0
    assert_same_steps(model, twin, x, tolerance=tolerance)
    model.norm.shift = twin.norm.shift = 1.0
    assert_same_steps(model, twin, x, tolerance=tolerance)


class _DoubledBias(nn.GroupNorm):
    @property
    def bias(self) -> Tensor:
        return 2 * super().__getattr__("bias")


class _SquaredWeight(nn.InstanceNorm2d):
    @property
    def weight(self) -> Tensor:
        return super().__getattr__("weight").square()


@pytest.mark.parametrize(
    "norm",
    [partial(_DoubledBias, 2, C), partial(_SquaredWeight, C, affine=True)],
    ids=["bias", "weight"],
)
def test_norm_whose_parameter_is_a_property_matches_pytorch(norm: Callable[[], nn.Module]) -> None:
    """The property equals the registered parameter at first, so the first use detects nothing."""
    model = nn.Sequential(nn.Conv2d(3, C, 1), norm(), nn.SiLU(), nn.Conv2d(C, 3, 1))
    nn.init.ones_(model[1]._parameters["weight"])
    nn.init.zeros_(model[1]._parameters["bias"])
    twin = converted_twin(model)
    for _ in range(2):
        x = torch.randn(2, 3, 8, 8)
        assert_same_step(step_of(twin, x), step_of(model, x))
        for network in (model, twin):
            for parameter in network[1]._parameters.values():
                parameter.data.add_(0.5)


class _ScaledInstanceNorm(nn.InstanceNorm2d):
    gain = 1.0

    def _apply_instance_norm(self, x: Tensor) -> Tensor:
        return F.instance_norm(x, None, None, self.gain * self.weight, self.gain * self.bias)


class _WritingInstanceNorm(nn.InstanceNorm2d):
    gain = 1.0

    def _apply_instance_norm(self, x: Tensor) -> Tensor:
        y = super()._apply_instance_norm(x)
        with torch.no_grad():
            self.weight.mul_(self.gain)
        return y


class _ScaledParameter(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.instance_norm:
                kwargs["bias"] = kwargs["bias"] * _ScaledInstanceNorm.gain
            return function(*args, **kwargs)


def _with_scaled_bias() -> nn.Module:
    norm = nn.InstanceNorm2d(C, affine=True)
    norm.bias = _ScaledParameter(norm.bias.detach())
    return norm


@pytest.mark.parametrize(
    "make",
    [
        partial(_ScaledInstanceNorm, C, affine=True),
        partial(_WritingInstanceNorm, C, affine=True),
        _with_scaled_bias,
    ],
    ids=["scaled", "writing", "parameter"],
)
@pytest.mark.parametrize("activation", [nn.Identity, nn.SiLU])
def test_instance_norm_with_custom_parameters_matches_pytorch(
    make: Callable[[], nn.Module],
    activation: Callable[[], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The class inherits `forward`, and from the third step on the operation reads other values."""
    model = Program(convolution, lambda c: make(), activation)
    with torch.no_grad():
        model.norm.bias.fill_(0.5)
    twin, x = converted_twin(model), images()
    for gain in (1.0, 1.5):
        for cls in (_ScaledInstanceNorm, _WritingInstanceNorm):
            monkeypatch.setattr(cls, "gain", gain)
        assert_same_steps(model, twin, x)


@pytest.mark.parametrize("norm", ["group", "batch", "layer"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_norms_of_flat_features_need_no_extra_memory(
    norm: str, activation: Callable[[], nn.Module]
) -> None:
    """A group norm of flat features has one scale and one shift per element."""
    kinds = {
        "group": (nn.GroupNorm(4, 64), 16),
        "batch": (nn.BatchNorm1d(64), 2),
        "layer": (nn.LayerNorm(64), 2),
    }
    module, samples = kinds[norm]
    model = nn.Sequential(nn.Linear(8, 64), module, activation(), nn.Linear(64, 8))
    twin, x = converted_twin(model), torch.randn(samples, 8)
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


class ScaledEpsLayerNorm(nn.LayerNorm):
    """Normalize the channels, with `factor` times the module's eps."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        eps = self.factor * self.eps
        return F.layer_norm(x, (C,), self.weight, self.bias, eps).permute(0, 3, 1, 2)


class ScaledEpsGroupNorm(nn.GroupNorm):
    """Normalize with `factor` times the module's eps."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        eps = self.factor * self.eps
        return F.group_norm(x, self.num_groups, self.weight, self.bias, eps)


@pytest.mark.usefixtures("without_products")
def with_another_eps(norm: Any, is_on: Callable[[], bool]) -> None:
    """Replace the module's output by that of a norm with the same weight and another eps."""

    def replace(module: Any, args: Any, output: Tensor) -> Tensor:
        if not is_on():
            return output
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(args[0], (8,), module.weight, module.bias, 0.5)
        return F.group_norm(args[0], 2, module.weight, module.bias, 0.5)

    norm.register_forward_hook(replace, prepend=True)


def with_a_swapped_eps(norm: Any, is_on: Callable[[], bool]) -> None:
    """Change the module's eps only while its forward runs."""
    eps = norm.eps
    norm.register_forward_pre_hook(lambda m, args: setattr(m, "eps", 0.5 if is_on() else eps))
    norm.register_forward_hook(lambda m, args, output: setattr(m, "eps", eps), prepend=True)


def with_a_swapped_bias(norm: Any, is_on: Callable[[], bool]) -> None:
    """Change the module's frozen bias only while its forward runs."""
    bias = norm.bias.requires_grad_(False)
    other = nn.Parameter(bias + 1, requires_grad=False)
    norm.register_forward_pre_hook(lambda m, args: setattr(m, "bias", other if is_on() else bias))
    norm.register_forward_hook(lambda m, args, output: setattr(m, "bias", bias), prepend=True)


@pytest.mark.parametrize("hooks", [with_another_eps, with_a_swapped_eps, with_a_swapped_bias])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_hooks_that_change_a_norm_match_pytorch(norm: str, hooks: Callable[..., None]) -> None:
    """From the third step on, the output is computed with another eps or bias than the module's."""
    model = Program(convolution, lambda c: norms(c)[norm], dtype=torch.bfloat16)
    twin, x = converted_twin(model), images(torch.bfloat16)
    is_on = False
    for m in (model, twin):
        hooks(m.norm, lambda: is_on)
    for _ in range(2):
        assert_same_steps(model, twin, x, tolerance=0)
        is_on = True


def test_tensor_eps_changed_after_the_norm_matches_pytorch() -> None:
    """The model writes to the eps tensor after the norm has run."""

    def compute(m: Any, z: Tensor) -> Tensor:
        m.norm.eps.fill_(0.5 if m.is_on else 1e-3)
        return m.conv(z)

    model = Program(compute, lambda c: nn.GroupNorm(2, c), dtype=torch.bfloat16)
    model.norm.eps, model.is_on = torch.tensor(1e-3), False
    twin, x = converted_twin(model), images(torch.bfloat16)
    for _ in range(2):
        assert_same_steps(model, twin, x, tolerance=0)
        model.is_on = twin.is_on = True


def test_global_forward_hook_that_replaces_the_output_matches_pytorch() -> None:
    """A global forward hook, which runs before the module's hooks, replaces the output."""
    model = Program(convolution, lambda c: norms(c)["group"], dtype=torch.bfloat16)
    twin, x = converted_twin(model), images(torch.bfloat16)
    is_on = False

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        if not is_on or not isinstance(module, nn.GroupNorm):
            return output
        return F.group_norm(args[0], 2, module.weight, module.bias, 0.5)

    handle = torch.nn.modules.module.register_module_forward_hook(replace)
    try:
        for _ in range(2):
            assert_same_steps(model, twin, x, tolerance=0)
            is_on = True
    finally:
        handle.remove()


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
def test_in_place_activation_after_an_instance_norm_is_recomputed(
    activation: Callable[..., nn.Module],
) -> None:
    """The convolution saves a view; one kernel recomputes the norm and the activation for it."""
    in_place = partial(activation, inplace=True)
    model = Program(lambda m, y: m.conv(y), lambda c: nn.InstanceNorm2d(c, affine=True), in_place)
    twin, x = converted_twin(model), images()
    assert any(value.name.endswith("saved by Convolution") for value in recomputed(twin(x)))
    assert_same_steps(model, twin, x)


@each_in_place_activation
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_activation_of_an_instance_norm_keeps_views_and_hooks(
    dtype: torch.dtype, samples: int, activation: Callable[..., nn.Module]
) -> None:
    """No `CopySlices` node hides what the activation saves, and views and hooks are unchanged."""

    def compute(m: Any, y: Tensor) -> Tensor:
        assert y is m.normalized
        assert y._version == 1
        return m.conv(y)

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: 2 * grad)
        model_of[module].normalized = output

    in_place = partial(activation, inplace=True)
    model = Program(compute, lambda c: nn.InstanceNorm2d(c, affine=True), in_place, dtype)
    twin, x = converted_twin(model), images(dtype, samples)
    model_of = {m.norm: m for m in (model, twin)}
    for m in (model, twin):
        m.norm.register_forward_hook(remember)
    with no_warnings():
        assert any(value.name.endswith("saved by Convolution") for value in recomputed(twin(x)))
    assert_same_steps(model, twin, x, tolerance=0 if dtype is torch.bfloat16 else 1e-5)


class ViewOfNorm(nn.Module):
    """An activation module of a view that has the shape of the norm's output."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.act, self.last = (
            nn.Linear(C, C),
            norm,
            activation,
            nn.Linear(C, C),
        )
        for parameter in norm.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.first(x))
        return self.last(self.act(z.view_as(z)))


@pytest.mark.parametrize("inplace", [False, True], ids=["out_of_place", "in_place"])
@pytest.mark.parametrize(
    "norm",
    [
        partial(nn.LayerNorm, C),
        partial(nn.LayerNorm, (C, C)),
        partial(nn.GroupNorm, 2, C),
        partial(nn.GroupNorm, 2, C, affine=False),
        partial(nn.BatchNorm2d, C),
    ],
    ids=["layer", "layer_2d", "group", "group_not_affine", "batch"],
)
def test_activation_of_a_view_of_one_sample_matches_pytorch(
    norm: Callable[[], nn.Module], inplace: bool
) -> None:
    """The view of one sample looks like the output of an instance norm, which is a view too.

    With as many rows as columns, a layer norm's column affine fits the channels by its size.
    """
    model = ViewOfNorm(norm(), nn.SiLU(inplace=inplace))
    assert_same_steps(model, converted_twin(model), torch.randn(1, C, C, C))


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


@pytest.mark.parametrize("activation", [nn.Identity, nn.SiLU])
def test_running_statistics_updated_after_an_eval_norm_match_pytorch(
    activation: Callable[[], nn.Module],
) -> None:
    """From the third step on a training call updates the statistics, which raises no version."""

    def compute(m: Any, z: Tensor) -> Tensor:
        if m.changes:
            with torch.no_grad():
                m.norm.train()(3 * z + 1)
            m.norm.eval()
        return m.conv(m.silu(z) * z)

    model = Program(compute, lambda c: nn.BatchNorm2d(c).eval(), activation)
    model.changes = False
    twin, x = converted_twin(model), images()
    assert len(recomputed(twin(x))) > 0
    assert_same_steps(model, twin, x)
    model.changes = twin.changes = True
    assert_same_steps(model, twin, x)


def test_running_statistics_updated_after_a_norm_of_a_recomputed_input() -> None:
    """The norm's input is replaced, and only the module determines that the norm has no bias."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.second(m.silu(z))
        if m.changes:
            with torch.no_grad():
                m.second.train()(3 * z + 1)
            m.second.eval()
        return m.conv(y)

    model = Program(compute)
    model.second = nn.BatchNorm2d(C, affine=False).eval()
    model.changes = False
    twin, x = converted_twin(model), images()
    assert "NativeBatchNorm, saved by Convolution" in names_of(twin, x)
    twin.load_state_dict(model.state_dict())
    assert_same_steps(model, twin, x)
    model.changes = twin.changes = True
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

    model.norm.is_written_to = False
    twin, x = converted_twin(model), images()
    for m in (model, twin):
        m.norm.register_forward_hook(write, prepend=comes_first)
    assert_same_steps(model, twin, x)
    model.norm.is_written_to = twin.norm.is_written_to = True
    if norm != "layer":
        return assert_same_steps(model, twin, x)
    for m in (model, twin):  # a layer norm saves its bias
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step_of(m, x)


class Noisy(nn.Module):
    def forward(self, bias: Tensor) -> Tensor:
        return bias + torch.randn_like(bias)


@each_norm_except_rms
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
def test_parametrization_of_a_bias_runs_once(norm: str, is_frozen: bool) -> None:
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: norms(c)[norm])
    nn.utils.parametrize.register_parametrization(model.norm, "bias", Noisy())
    model.norm.parametrizations.bias.original.requires_grad_(not is_frozen)
    twin, x = converted_twin(model), images()
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
