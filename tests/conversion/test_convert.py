"""Test `convert`, `analyze`, `revert` and `reverted`: arguments, examples, what they change."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.networks import examples, is_converted, network, number_of_hooks
from _support.twins import C, Parts, assert_same_steps, replaced
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops._torch_private import NO_PASS, running_pass
from inplace_ops.conversion.wiring import conversion_of
from inplace_ops.recompute import packed

# Arguments.


@pytest.mark.parametrize("function", [inplace_ops.convert, inplace_ops.analyze])
def test_removed_arguments_raise_with_hint(function: Callable[..., Any]) -> None:
    model, x = network(), examples()
    for arguments, hint in (
        ({"optimize": "speed"}, "max_ops"),
        ({"bits": 1}, r"inplace_ops\.SiLU"),
        ({"verify": False}, "without example_inputs"),
        ({"max_opps": 4}, "unexpected keyword argument 'max_opps'"),
    ):
        with pytest.raises(TypeError, match=hint):
            function(model, x, **arguments)
    assert not is_converted(model)


@pytest.mark.parametrize("max_ops", [0, -1, 1.5, "4", True])
def test_invalid_max_ops_raises(max_ops: Any) -> None:
    with pytest.raises(ValueError, match="max_ops must be a positive integer"):
        inplace_ops.convert(network(), max_ops=max_ops)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_unconvertible_models_raise() -> None:
    for wrong in (None, 3, F.silu, torch.ones(2), network):
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
            inplace_ops.convert(wrong)
        with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
            inplace_ops.revert(wrong)
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        inplace_ops.convert(torch.compile(network()))
    with pytest.raises(ValueError, match="scripted"):
        inplace_ops.convert(torch.jit.script(nn.Linear(2, 2)))
    for lazy in (nn.LazyLinear(2), nn.LazyBatchNorm2d(affine=False)):
        with pytest.raises(ValueError, match="uninitialized parameters"):
            inplace_ops.convert(nn.Sequential(lazy))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference mode"):
        inplace_ops.convert(network(), examples())


def test_converting_twice_returns_same_report() -> None:
    model, x = network(), examples()
    report = inplace_ops.convert(model)
    state = [dict(vars(m)) for m in model.modules()]
    assert inplace_ops.convert(model) is report
    assert [dict(vars(m)) for m in model.modules()] == state
    with pytest.warns(UserWarning, match="max_ops=4, which does not change"):
        inplace_ops.convert(model, max_ops=8)
    assert inplace_ops.convert(model, x) is report
    assert report.saved_bytes_after == inplace_ops.saved_bytes(model, x)
    assert report.peak_bytes_after is not None


def test_failing_example_leaves_report_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(), examples()
    report = inplace_ops.convert(model, x)
    before, kind = asdict(report), type(model)
    with pytest.raises(RuntimeError):
        inplace_ops.convert(model, torch.randn(2, 5, 32, 32))
    assert asdict(report) == before
    assert type(model) is kind


def test_module_that_rejects_hooks_leaves_model_unchanged() -> None:
    """If `convert` fails, the model is restored, and its converted part stays converted."""

    class RejectsHooks(nn.BatchNorm2d):
        def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("no hooks")

    part = network()
    inplace_ops.convert(part, max_ops=2)
    model = nn.Sequential(part, nn.BatchNorm2d(4), nn.SiLU(), RejectsHooks(4))
    before = [(type(m), dict(vars(m)), number_of_hooks(m)) for m in model.modules()]
    with pytest.raises(LookupError, match="no hooks"):
        inplace_ops.convert(model)
    after = [(type(m), dict(vars(m)), number_of_hooks(m)) for m in model.modules()]
    assert [row[::2] for row in after] == [row[::2] for row in before]
    assert [sorted(row[1]) for row in after] == [sorted(row[1]) for row in before]
    assert conversion_of(part).settings.max_ops == 2


def test_converting_inside_forward_pass_raises() -> None:
    def converts(m: Any, x: Tensor) -> Tensor:
        for function in (inplace_ops.convert, inplace_ops.analyze):
            with pytest.raises(RuntimeError, match="inside the forward pass"):
                function(nn.Linear(2, 2), torch.ones(2))
        return x

    model = nn.Sequential(nn.Linear(2, 2), Parts(converts))
    inplace_ops.convert(model)
    model(torch.ones(2))


class GuidedReLU(torch.autograd.Function):
    """ReLU, whose backward passes on positive gradients only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.clamp(min=0) * (x > 0)


class RenamedReLU(nn.ReLU):
    pass


class ReLU1(nn.ReLU6):
    """Clamps to [0, 1], by the forward of ReLU6, which reads the bounds from attributes."""

    def __init__(self) -> None:
        nn.Hardtanh.__init__(self, 0.0, 1.0)


class OtherForward(nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def normed(activation: nn.Module, norm: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, C, 3), norm or nn.BatchNorm2d(C), activation)


ACTIVATIONS = [RenamedReLU(), ReLU1(), nn.ReLU6(), nn.LeakyReLU(0.1), OtherForward(), nn.Tanh()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: type(a).__name__)
def test_activations_run_with_norms_by_their_forward(activation: nn.Module) -> None:
    """A subclass with the forward of a supported activation runs with the norm, whatever its name.

    Its attributes are read at each call.
    """
    model, x = normed(copy.deepcopy(activation)).append(nn.Conv2d(C, 2, 1)), examples()
    twin = copy.deepcopy(model)
    inplace_ops.convert(twin)
    is_fused = not isinstance(activation, (ReLU1, OtherForward, nn.Tanh))
    assert ("forward" in vars(twin[2])) == is_fused
    assert_same_steps(model, twin, x)
    outputs: list[tuple[Tensor, Tensor]] = []
    twin[1].register_forward_hook(lambda m, args, z: outputs.append((z, z.detach().clone())))
    for name, values in {
        "negative_slope": (0.5, -0.3, 0.0),
        "max_val": (6.0, 2.0),
        "min_val": (-1.0, 0.0),
    }.items():
        for value in values if hasattr(activation, name) else ():
            for inplace in (False, True):
                for m in (model, twin):
                    setattr(m[2], name, value)
                    m[2].inplace = inplace
                if name != "negative_slope" or value > 0 or not inplace:
                    assert_same_steps(model, twin, x)
                outputs.clear()
                twin(x)
                assert torch.equal(*outputs[0]) == (not inplace)


class ReplacingMode(TorchFunctionMode):
    """Calls another function instead of one of PyTorch's."""

    def __init__(self, function: Callable[..., Any], other: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.other = function, other

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (self.other if func is self.function else func)(*args, **(kwargs or {}))


def guided(x: Tensor, inplace: bool = False) -> Tensor:
    return GuidedReLU.apply(x)


RELU, BATCH_NORM = F.relu, F.batch_norm


def shifted(x, mean, var, weight, bias, *args, **kwargs):
    return BATCH_NORM(x, mean, var, weight, bias + 0.5, *args, **kwargs)


def shifted_forward(self: Any, x: Tensor) -> Tensor:
    return shifted(x, self.running_mean, self.running_var, self.weight, self.bias, True)


# By name: a model, and what replaces a function of it: arguments of `setattr`, or a mode. The graph
# does not show a frozen bias.
REPLACED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "function": (lambda: normed(nn.ReLU()), (F, "relu", guided)),
    "forward": (lambda: normed(nn.ReLU()), (nn.ReLU, "forward", lambda self, x: guided(x))),
    "forward of a subclass": (
        lambda: normed(RenamedReLU()),
        (RenamedReLU, "forward", lambda self, x: guided(x)),
    ),
    "mode": (lambda: normed(nn.ReLU()), ReplacingMode(RELU, guided)),
    "mode that is not in place": (
        lambda: normed(nn.ReLU(inplace=True), nn.InstanceNorm2d(C, affine=True)),
        ReplacingMode(RELU, lambda x, inplace: RELU(x, inplace=inplace) * 2),
    ),
    "norm's function": (lambda: normed(nn.SiLU()), (F, "batch_norm", shifted)),
    "norm's forward": (
        lambda: normed(nn.SiLU()),
        (nn.modules.batchnorm._BatchNorm, "forward", shifted_forward),
    ),
    "norm's mode": (lambda: normed(nn.SiLU()), ReplacingMode(BATCH_NORM, shifted)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_function_matches_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that explain a model's output replace ReLU, whose values stay the same."""
    make, replacement = REPLACED[name]
    model, x = make().append(nn.Conv2d(C, 2, 1)), examples()
    model[1].bias.requires_grad_("norm" not in name)
    twin = copy.deepcopy(model)
    inplace_ops.convert(twin)
    assert_same_steps(model, twin, x)
    if isinstance(replacement, tuple):
        monkeypatch.setattr(*replacement)
        replacement = contextlib.nullcontext()
    with replacement:
        assert_same_steps(model, twin, x)


@pytest.mark.parametrize("is_class", [True, False], ids=["class", "instance"])
def test_forward_may_have_any_keyword_names(is_class: bool) -> None:
    class Keywords(nn.Linear):
        def forward(self, input: Tensor, *, model: int, forward: int) -> Tensor:
            return super().forward(input) * model * forward

    model, x = Keywords(64, 64), torch.randn(4, 64)
    expected = model(x, model=2, forward=3)
    if not is_class:
        model.forward = partial(Keywords.forward, model)
    inplace_ops.convert(model)
    torch.testing.assert_close(model(x, model=2, forward=3), expected)


def test_encoder_layers_get_no_hooks() -> None:
    """With a hook on one of its parts an encoder layer leaves its fast path."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    inplace_ops.convert(layer)
    parts = list(layer.modules())[1:]
    assert number_of_hooks(nn.ModuleList(parts)) == 0


# Examples.


@pytest.mark.parametrize(
    "inputs", [lambda x: x, lambda x: (x,), lambda x: {"input": x}], ids=["tensor", "tuple", "dict"]
)
def test_example_inputs_may_be_tensor_tuple_or_dict(inputs: Callable[[Tensor], Any]) -> None:
    model, x = network(), examples()
    assert inplace_ops.convert(model, inputs(x)).saved_bytes_after > 0


def test_invalid_example_inputs_raise() -> None:
    model = network()
    with pytest.raises(
        TypeError, match=r"a tensor, a tuple of arguments or a dict.*pass batch\[0\]"
    ):
        inplace_ops.convert(model, [examples()])
    assert not is_converted(model)


class TwoInputs(nn.Module):
    """A model that also has a keyword-only argument."""

    def forward(self, image: Tensor, mask: Tensor, *, scale: float = 1) -> Tensor:
        return image * mask * scale


SECOND = torch.ones(2)
# What the model is called with, the error's type, and what its message says besides PyTorch's.
UNSUITABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Any], type, str]] = {
    "labels": (network, lambda x: (x, SECOND), TypeError, r"\(input\).*pass example_inputs\[0\]"),
    "metadata": (TwoInputs, lambda x: (x, x, 1), TypeError, r"pass example_inputs\[:2\]"),
    "labels in a dict": (
        network,
        lambda x: {"input": x, "label": SECOND},
        TypeError,
        "takes alone: 'input'",
    ),
    "size": (network, lambda x: (2, 2, 8, 8), TypeError, r"pass torch\.randn\(2, 2, 8, 8\)"),
    "dict": (network, lambda x: {"image": x}, TypeError, "pass a tuple"),
    "missing": (
        TwoInputs,
        lambda x: x,
        TypeError,
        "image: .*mask: .*what the training loop passes",
    ),
    "shape": (network, lambda x: x[:, :1], RuntimeError, "what the training loop passes"),
    "float64": (network, lambda x: x.double(), RuntimeError, r"pass x\.to\(torch\.float32\)"),
    "uint8": (network, lambda x: x.byte(), RuntimeError, r"pass x\.to\(torch\.float32\)"),
    "device": (network, lambda x: x.to("meta"), RuntimeError, r'is on cpu: pass x\.to\("cpu"\)'),
    "ids": (
        lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)),
        lambda x: x,
        RuntimeError,
        r"pass x\.long\(\)",
    ),
}


@pytest.mark.parametrize("function", [inplace_ops.convert, inplace_ops.analyze])
@pytest.mark.parametrize("case", UNSUITABLE)
def test_error_on_example_says_what_would_be_right(case: str, function: Callable[..., Any]) -> None:
    make, inputs, kind, advice = UNSUITABLE[case]
    model, given = make(), inputs(examples())
    with pytest.raises(kind) as raised:
        function(model, given)
    expected = rf"(?s).+\n\nwhile running example_inputs: model\(.*whose forward takes .*{advice}"
    assert re.match(expected, str(raised.value))
    assert str(raised.value).count("while running") == 1
    assert not is_converted(model)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_out_of_memory_on_example_says_that_it_needs_memory(fails: str) -> None:
    class Large(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if fails == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            y.register_hook(lambda _: torch.empty(2**60))
            return y

    with pytest.raises(
        RuntimeError, match=r"needs memory itself: pass fewer samples, or none"
    ) as e:
        inplace_ops.convert(Large(2, 2), torch.ones(2))
    assert isinstance(e.value, torch.OutOfMemoryError) == (fails == "forward")
    assert "training loop" not in str(e.value)


def test_swapped_arguments_are_named() -> None:
    model, x = network(), examples()
    for function in (inplace_ops.convert, inplace_ops.analyze, inplace_ops.saved_bytes):
        with pytest.raises(TypeError, match=rf"got Tensor: call {function.__name__}\(model, x\)"):
            function(x, model)
    with pytest.raises(TypeError, match=r"fn must be a module or a function, got Tensor$"):
        inplace_ops.saved_bytes(x, x)


@pytest.mark.parametrize("function", [inplace_ops.convert, inplace_ops.analyze])
def test_model_error_on_example_is_raised_as_it_is(function: Callable[..., Any]) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    model = nn.Sequential(*network(), Fails())
    for error in (LookupError("error of the model"), KeyError("name"), OSError(2, "no file")):
        text = str(error)
        with pytest.raises(type(error)) as raised:
            function(model, examples())
        assert raised.value is error
        assert str(error).startswith(text)
    assert not is_converted(model)
    assert type(model) is nn.Sequential


def test_float32_outputs_under_autocast_are_compared_as_16_bits() -> None:
    """What runs in 16 bits decides how much gradients may differ, not the outputs' dtype."""

    blocks = [
        layer
        for inputs in (3, 16)
        for layer in (nn.Conv2d(inputs, 16, 3), nn.BatchNorm2d(16), nn.Hardswish())
    ]
    layers = nn.Sequential(*blocks, nn.Conv2d(16, 4, 1))
    model = Parts(lambda m, x: m.layers(x).float().mean((2, 3)), layers=layers)
    x = torch.randn(2, 3, 24, 24)
    with torch.autocast("cpu", torch.bfloat16):
        report = inplace_ops.convert(model, x)
    assert report.saved_bytes_after < report.saved_bytes_before


def test_example_under_autocast_in_eval_mode_and_with_checkpoints() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        x = checkpoint(m.layers[:3], x, use_reentrant=True)
        return checkpoint(m.layers[3:], x, use_reentrant=False)

    x = examples()
    with torch.autocast("cpu", torch.bfloat16):
        report = inplace_ops.convert(network(), x)
    assert report.saved_bytes_after < 0.6 * report.saved_bytes_before
    assert inplace_ops.convert(network().eval(), x).saved_bytes_after > 0
    report = inplace_ops.convert(Parts(compute, layers=network()), x.requires_grad_())
    assert report.saved_bytes_after <= report.saved_bytes_before


def test_model_without_gradients_saves_zero_bytes() -> None:
    frozen = network().requires_grad_(False)
    report = inplace_ops.convert(frozen, examples())
    assert (report.saved_bytes_before, report.saved_bytes_after) == (0, 0)
    returns_none = Parts(lambda m, x: None)
    assert inplace_ops.convert(returns_none, examples()).saved_bytes_after == 0


def test_wrong_recomputed_tensor_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec is right at its first use, and wrong when backward unpacks it."""
    compute = packed.Recomputed.compute

    def wrong(value: packed.Recomputed) -> Tensor:
        is_wrong = running_pass() != NO_PASS and value.name.startswith("SiLU")
        return compute(value) * 1.001 if is_wrong else compute(value)

    monkeypatch.setattr(packed.Recomputed, "compute", wrong)
    model = network()
    with pytest.raises(inplace_ops.VerificationError, match="gradients of the converted model"):
        inplace_ops.convert(model, examples())
    assert not is_converted(model)
    assert type(model) is nn.Sequential
    assert not any(m._forward_hooks for m in model.modules())


def test_wrong_gradient_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """All recomputed tensors are right, and the backward of an activation after a norm is wrong."""
    from inplace_ops.recompute import after_norm

    right = after_norm._gradient_of_input
    monkeypatch.setattr(after_norm, "_gradient_of_input", lambda ctx, g: right(ctx, g) * 1.01)
    model = network()
    with pytest.raises(inplace_ops.VerificationError, match="gradients of the converted model"):
        inplace_ops.convert(model, examples())
    assert not is_converted(model)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels": lambda y: y[:, ::2],
    "rows": lambda y: y.chunk(2, dim=2)[0],
    "transposed": lambda y: y.transpose(1, 3)[:, 1:],
    "expanded": lambda y: y[:1].expand(4, -1, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_tensor_in_channels_last_pass_verification(view: str) -> None:
    """A copy of the saved view has other strides than the recomputed one."""

    def compute(m: Any, x: Tensor) -> Tensor:
        return m.silu(VIEWS[view](m.gelu(m.norm(m.conv(x)))))

    x = torch.randn(8, 3, 18, 18).contiguous(memory_format=torch.channels_last)
    report = inplace_ops.convert(
        Parts(
            compute,
            conv=nn.Conv2d(3, 8, 3),
            norm=nn.BatchNorm2d(8, affine=False),
            gelu=nn.GELU(),
            silu=nn.SiLU(),
        ),
        x,
    )
    assert any((row.producer, row.consumer) == ("GELU", "SiLU") for row in report.replaced)


def test_dropout_and_noise_pass_verification() -> None:
    noise = Parts(lambda m, x: x + random.gauss(0, 1e-3) * torch.randn_like(x))
    model = nn.Sequential(*network()[:5], nn.Dropout(), noise, *network()[3:])
    assert inplace_ops.convert(model, examples()).saved_bytes_after > 0


def test_threads_convert_one_at_a_time() -> None:
    """Runs on an example set the random state, which all threads share."""
    running: list[int] = []
    numbers_running: list[int] = []

    def slow(m: Any, x: Tensor) -> Tensor:
        running.append(1)
        time.sleep(0.002)
        numbers_running.append(len(running))
        running.pop()
        return x

    def work() -> None:
        inplace_ops.convert(nn.Sequential(nn.Linear(4, 4), Parts(slow)), torch.randn(2, 4))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(numbers_running) == {1}


# Reverting.


def test_reverted_restores_conversion_at_exit() -> None:
    model, x = network(), examples()
    report = inplace_ops.convert(model, x)
    kind, modules = type(model), list(model.modules())
    with inplace_ops.reverted(model):
        assert type(model) is nn.Sequential
        assert replaced(model(x)) == []
        model[2] = nn.ELU()
    assert type(model) is kind
    assert type(model[2]) is nn.ELU
    model[2] = modules[3]
    saved = inplace_ops.saved_bytes(model, x)
    assert saved == pytest.approx(report.saved_bytes_after, rel=1e-4)
    with pytest.raises(KeyError), inplace_ops.reverted(model):
        raise KeyError
    assert is_converted(model)
    with inplace_ops.reverted(model):
        inplace_ops.convert(model, max_ops=1)
    assert conversion_of(model).settings.max_ops == 1
    with inplace_ops.reverted(nn.Linear(2, 2)):  # nothing to revert
        pass


def test_reverted_restores_conversion_of_part() -> None:
    part = network()
    report = inplace_ops.convert(part, max_ops=2)
    model = nn.Sequential(part)
    with inplace_ops.reverted(model):
        assert not is_converted(part)
    assert conversion_of(part).report is report
    assert not is_converted(model)


def test_analyze_changes_nothing() -> None:
    model, x = network(), examples()
    before = [dict(vars(m)) for m in model.modules()]
    report = inplace_ops.analyze(model, x)
    assert [dict(vars(m)) for m in model.modules()] == before
    assert type(model) is nn.Sequential
    assert report.to_dict() == inplace_ops.convert(model, x).to_dict()
    assert inplace_ops.analyze(model, x).saved_bytes_after == report.saved_bytes_after
    assert is_converted(model)
