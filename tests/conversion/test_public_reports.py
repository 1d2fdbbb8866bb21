"""Bugs that users reported of other packages, each as a test of its general case.

Tests elsewhere cover other reports: attributes that are set after the conversion
(`test_convert.py`); reports that promise too much (`test_convert_report.py`); direct calls of
`forward`, hooks that look modules up (`test_engine_containment.py`); parameters whose memory is
freed (`test_engine_rules.py`); subclasses of tensors (`test_engine_containment.py`).
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.twins import C, images
from torch import Tensor, nn

import inplace_ops


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, C, 3), nn.GroupNorm(2, C), nn.SiLU(), nn.Conv2d(C, 4, 1), nn.ReLU()
    )


class PerSample:
    """Hooks that store inputs in lists and set attributes of parameters, as those of Opacus."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[nn.Module, list[Tensor]] = {}
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_hook(self.forward_hook)
                module.register_full_backward_hook(self.backward_hook)

    def forward_hook(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inputs.setdefault(module, []).append(args[0].detach())
        for parameter in module.parameters(recurse=False):
            parameter.counter = getattr(parameter, "counter", 0) + 1

    def backward_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        x = self.inputs[module].pop()
        for parameter in module.parameters(recurse=False):
            parameter.counter -= 1
            if parameter.counter == 0:
                parameter.per_sample = x.flatten(1).sum(1), outputs[0].flatten(1).sum(1)


@pytest.mark.parametrize("function", [inplace_ops.convert, inplace_ops.analyze])
def test_hooks_that_set_attributes_of_parameters_still_work(function: Callable[..., Any]) -> None:
    """opacus#414, #433, #578: per-sample gradients were None."""
    model, x = network(), images().requires_grad_()  # otherwise a backward hook warns
    PerSample(model)
    for inputs in ((), (x,)) if function is inplace_ops.convert else ((x,),):
        function(model, *inputs)
        inplace_ops.revert(model)
        assert not any(vars(parameter) for parameter in model.parameters())
    inplace_ops.convert(model)
    model(x).sum().backward()
    assert all(p.counter == 0 for p in model.parameters())
    assert all(p.per_sample is not None for p in model.parameters())


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="opacus is not installed")
@pytest.mark.filterwarnings("default")  # opacus warns
def test_opacus_per_sample_gradients_match() -> None:
    from opacus import GradSampleModule

    model, x = network(), images()
    reference, ours = GradSampleModule(copy.deepcopy(model)), GradSampleModule(model)
    inplace_ops.analyze(ours, x)
    inplace_ops.convert(ours, x)
    for m in (ours, reference):
        m(x).sum().backward()
    for actual, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual.grad_sample, expected.grad_sample)


ACTIVATIONS = (nn.ReLU, nn.GELU)  # those that PyTorch's fast path supports


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_converted", [True, False], ids=["convert", "module"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_transformer_encoder_with_padding_matches_pytorch(
    activation: Callable[[], nn.Module], is_converted: bool
) -> None:
    """pytorch#97111, #128413: in eval mode PyTorch's encoder switches to nested tensors."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=activation())
    model = nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    ours = copy.deepcopy(model)
    if is_converted:
        inplace_ops.convert(ours, {"src": x, "src_key_padding_mask": mask})
    else:
        for part in ours.layers:
            part.activation = getattr(inplace_ops, activation.__name__)()
    with torch.no_grad():
        torch.testing.assert_close(
            ours(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask)
        )
    ours.train()(x, src_key_padding_mask=mask).sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["nested", "jagged"])
def test_modules_accept_nested_and_sparse_tensors(layout: torch.layout) -> None:
    """PyTorch's activation runs on nested tensors, which no kernel of this package supports."""
    for activation in ACTIVATIONS:
        parts = [torch.randn(3, 4), torch.randn(2, 4)]
        found = []
        for module in (activation(), getattr(inplace_ops, activation.__name__)()):
            leaves = [part.clone().requires_grad_() for part in parts]
            nested = torch.nested.as_nested_tensor(leaves, layout=layout) * 1.0
            output = module(nested)
            output.to_padded_tensor(0.0).sum().backward()
            found.append((output.detach().to_padded_tensor(0.0), *(p.grad for p in leaves)))
        torch.testing.assert_close(found[1], found[0])
    sparse = torch.eye(3).to_sparse()
    torch.testing.assert_close(inplace_ops.ReLU()(sparse), nn.ReLU(inplace=True)(sparse))
