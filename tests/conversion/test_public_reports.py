"""Bugs that users reported of other packages, each as a test of its general case.

Tests elsewhere cover other reports: attributes of parameters that hooks set (`test_state.py`), and
attributes that are set after the conversion (`test_convert.py`); reports that promise too much
(`test_convert_report.py`); direct calls of `forward`, hooks that look modules up
(`test_engine_containment.py`); parameters whose memory is freed (`test_engine_rules.py`);
subclasses of tensors (`test_engine_containment.py`).
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import pytest
import torch
from _support.twins import C, images
from torch import nn

import inplace_ops


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, C, 3), nn.GroupNorm(2, C), nn.SiLU(), nn.Conv2d(C, 4, 1), nn.ReLU()
    )


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
