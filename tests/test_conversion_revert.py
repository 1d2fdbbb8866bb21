"""Back to the original, and converting what is a copy, compiled or converted already."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviour import assert_same_behaviour, behaviour, twin
from conversions import Convolutions, activations, assert_reverted, images
from torch import nn

import inplace_ops


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
