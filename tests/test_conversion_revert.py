"""Back to the original, and converting what is a copy, compiled or converted already."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviour import assert_same_behaviour, behaviour, twin
from conversions import Convolutions, activations, assert_reverted, images
from torch import nn

import inplace_ops
from inplace_ops import saved_bytes


@activations
def test_revert(activation: type[nn.Module]) -> None:
    model = Convolutions(activation)
    modules, keys = list(model.modules()), list(model.state_dict())
    inplace_ops.convert(model, images())
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] != [type(m) for m in modules]
    model.eval()
    inplace_ops.revert(model)
    assert_reverted(model, modules)
    assert not any(m.training for m in model.modules())
    inplace_ops.revert(model)
    assert_reverted(model, modules)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao.quantization's own
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_quantization_needs_the_reverted_model() -> None:
    """It goes by PyTorch's own module types."""
    quantization = torch.ao.quantization
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    inplace_ops.convert(model, images())
    with pytest.raises(AssertionError, match=r"fuser method.*inplace_ops\.modules\.ReLU"):
        quantization.fuse_modules_qat(model, [["0", "1", "2"]])
    inplace_ops.revert(model)
    fused = quantization.fuse_modules_qat(model, [["0", "1", "2"]])
    assert isinstance(fused[0], torch.ao.nn.intrinsic.ConvBnReLU2d)


def test_revert_keeps_what_was_set_since() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    inplace_ops.convert(model, torch.randn(2, 4))
    seen = []
    model[1].register_forward_hook(lambda m, inputs, output: seen.append("forward"))
    model[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append("backward"))
    inplace_ops.revert(model)
    model(torch.randn(2, 4)).sum().backward()
    assert seen == ["forward", "backward"]


def test_hooks_on_each_place_of_a_shared_module() -> None:
    """One SiLU in many places, as in YOLO: each place has hooks of its own."""
    shared = nn.SiLU()
    before: list[nn.Module] = []
    shared.register_forward_hook(lambda m, inputs, output: before.append(m))
    model = nn.Sequential(
        *(m for _ in range(5) for m in (nn.Linear(4, 4), shared)), nn.Linear(4, 4)
    )
    report = inplace_ops.convert(model, torch.randn(2, 4))
    places = [model.get_submodule(s.name) for s in report.sites]
    assert all(s.converted for s in report.sites)
    since: list[nn.Module] = []
    handles = [
        place.register_forward_hook(lambda m, inputs, output: since.append(m)) for place in places
    ]
    before.clear()
    model(torch.randn(2, 4))
    assert before == since == places
    handles[0].remove()
    since.clear()
    model(torch.randn(2, 4))
    assert since == places[1:]


def test_hooks_of_a_model_that_is_converted_again() -> None:
    shared, seen = nn.SiLU(), []
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 4))
    inplace_ops.convert(model, torch.randn(2, 4))
    model[1].register_forward_hook(lambda m, inputs, output: seen.append(m))
    inplace_ops.convert(model, torch.randn(2, 4))
    seen.clear()
    model(torch.randn(2, 4))
    assert seen == [model[1], model[3]]  # the one module's, as it was before


def test_an_earlier_hook_is_seen_and_a_removed_one_stays_away() -> None:
    shared, kept = nn.SiLU(), []
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 4))
    x = torch.randn(2, 4)
    handle = shared.register_forward_hook(lambda m, inputs, output: kept.append(inputs[0].sum()))
    inplace_ops.convert(model, x)
    handle.remove()
    inplace_ops.analyze(model, x)
    with inplace_ops.reverted(model):
        kept.clear()
        model(x)
        assert kept == []
    inplace_ops.revert(model)
    kept.clear()
    model(x)
    assert kept == []
    inplace_ops.convert(model, x)
    model[1].register_forward_hook(lambda m, inputs, output: kept.append(inputs[0]))
    reasons = [s.reason for s in inplace_ops.convert(model, x).sites]
    assert reasons == ["input is kept after forward, by a hook or an attribute"] * 2


def test_convert_within_reverted() -> None:
    model = Convolutions(nn.SiLU)
    x = images()
    inplace_ops.convert(model, x)
    with inplace_ops.reverted(model):
        report = inplace_ops.convert(model, x, bits=1)
    assert saved_bytes(model, x) == report.model_bytes_after
    inplace_ops.revert(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_hooks_of_a_module_that_is_left_in_some_places() -> None:
    model = Convolutions(nn.SiLU)
    inplace_ops.convert(model, images())
    seen: list[nn.Module] = []
    for place in (model.stem[2], model.preactivation):
        place.register_forward_hook(lambda m, inputs, output: seen.append(m))
    model(images())
    assert seen == [model.stem[2], model.preactivation]


def test_a_hook_set_on_each_place_is_set_once_on_the_original() -> None:
    shared, seen = nn.SiLU(), []
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, nn.Linear(4, 4))
    inplace_ops.convert(model, torch.randn(2, 4))

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(module)

    for place in (model[1], model[3]):
        place.register_forward_hook(hook)
    inplace_ops.revert(model)
    model(torch.randn(2, 4))
    assert seen == [shared, shared]


def test_a_handle_from_before_removes_its_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    seen: list[nn.Module] = []
    handle = model[1].register_forward_hook(lambda m, inputs, output: seen.append(m))
    inplace_ops.convert(model, torch.randn(2, 4))
    seen.clear()
    handle.remove()
    model(torch.randn(2, 4))
    assert seen == []


class GoesByExactTypes:
    """As Captum's DeepLift: what is no `nn.ReLU` itself is passed over without a word."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def activations(self, x: torch.Tensor) -> int:
        seen: list[nn.Module] = []
        handles = [
            module.register_forward_hook(lambda m, inputs, output: seen.append(m))
            for module in self.model.modules()
            if type(module) is nn.ReLU
        ]
        self.model(x)
        for handle in handles:
            handle.remove()
        return len(seen)


def test_reverted_for_what_goes_by_exact_types() -> None:
    model = Convolutions(nn.ReLU)
    x = images()
    tool, modules = GoesByExactTypes(model), list(model.modules())
    assert tool.activations(x) == 4
    with inplace_ops.reverted(model):  # nothing to revert
        assert tool.activations(x) == 4
    report = inplace_ops.convert(model, x)
    converted = list(model.modules())
    assert tool.activations(x) == 1
    with inplace_ops.reverted(model):
        assert tool.activations(x) == 4
        assert_reverted(model, modules)
        model.eval()
    assert_reverted(model, converted)
    assert not any(module.training for module in model.modules())
    model.train()
    assert saved_bytes(model, x) == report.model_bytes_after
    with pytest.raises(KeyError), inplace_ops.reverted(model):
        raise KeyError
    assert_reverted(model, converted)
    with inplace_ops.reverted(model):
        model.preactivation = nn.Tanh()
        model.stem[2] = nn.ELU()
    assert type(model.preactivation) is nn.Tanh
    assert type(model.stem[2]) is nn.ELU
    assert isinstance(model.block[2], inplace_ops.ReLU)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Captum's own
def test_deeplift() -> None:
    attribution = pytest.importorskip("captum.attr")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
    )
    model.eval()
    x, baseline = images(), torch.zeros(2, 3, 8, 8)
    expected = attribution.DeepLift(model).attribute(x, baseline, target=1)
    inplace_ops.convert(model, x)
    with inplace_ops.reverted(model):
        actual = attribution.DeepLift(model).attribute(x, baseline, target=1)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao.quantization's own
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_quantization_that_traces_says_so() -> None:
    quantization = torch.ao.quantization
    prepare = importlib.import_module("torch.ao.quantization.quantize_fx").prepare_qat_fx
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    inplace_ops.convert(model, images())
    mapping = quantization.get_default_qat_qconfig_mapping()
    with pytest.warns(UserWarning, match=r"inplace_ops\.reverted"):
        prepare(copy.deepcopy(model), mapping, images())
    with inplace_ops.reverted(model):
        prepared = prepare(copy.deepcopy(model), mapping, images())
    assert any("ConvBnReLU2d" in type(m).__name__ for m in prepared.modules())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_compute_and_revert(duplicate: Callable[[nn.Module], Any]) -> None:
    model = Convolutions(nn.SiLU).double()
    original = twin(model)
    x = images().double()
    inplace_ops.convert(model, x)
    copied = duplicate(model)
    assert isinstance(copied.stem[2], inplace_ops.SiLU)
    assert copied.stem[2] is not model.stem[2]
    assert_same_behaviour(behaviour(copied, x), behaviour(original, x))
    inplace_ops.revert(copied)
    assert type(copied.stem[2]) is nn.SiLU
    assert copied.stem[2] is copied.block[2] is copied.preactivation  # one module again
    assert isinstance(model.stem[2], inplace_ops.SiLU)


def test_convert_again_and_analyze_a_converted_model() -> None:
    model = Convolutions(nn.SiLU)
    modules = list(model.modules())
    report = inplace_ops.convert(model, images())
    converted = list(model.modules())
    assert inplace_ops.analyze(model, images()).sites == report.sites
    assert_reverted(model, converted)
    assert inplace_ops.convert(model, images(), bits=1).sites != report.sites
    assert model.stem[2].bits == 1
    inplace_ops.revert(model)
    assert_reverted(model, modules)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:.*when there are global hooks on modules:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("runs_before", [False, True])
def test_a_compiled_model(backend: str, runs_before: bool) -> None:
    torch._dynamo.reset()
    model = Convolutions(nn.SiLU).double()
    x = images().double()
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend=backend)

    def assert_gradients() -> None:
        gradients = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
        torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-6)

    if runs_before:
        assert_gradients()
    inplace_ops.convert(compiled, x)
    assert isinstance(model.stem[2], inplace_ops.SiLU)
    assert_gradients()
    inplace_ops.revert(compiled)
    assert type(model.stem[2]) is nn.SiLU
    assert_gradients()
