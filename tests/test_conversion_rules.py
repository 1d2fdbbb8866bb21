"""Each rule refuses what breaks, accepts its safe twin, and is needed."""

from __future__ import annotations

import re

import pytest
import torch
from behaviour import assert_same_behaviour, behaviour, differs, twin
from patterns import PATTERNS, WIDTH, Network, Pattern, pattern_id
from torch import Tensor, nn

import inplace_ops
from inplace_ops.conversion import rules

cases = pytest.mark.parametrize(
    ("pattern", "activation"),
    [
        pytest.param(pattern, activation, id=f"{pattern_id(pattern)}-{activation.__name__}")
        for pattern in PATTERNS
        for activation in pattern.activations
    ],
)


def example() -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64)


@cases
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_unsafe_is_refused(pattern: Pattern, activation: type[nn.Module], training: bool) -> None:
    model = Network(pattern.unsafe, activation).train(training)
    (site,) = inplace_ops.convert(model, example()).sites
    assert (site.name, site.converted, site.save) == ("act", False, None)
    torch.testing.assert_close(site.bytes_before, site.bytes_after)
    assert type(model.act) is activation
    assert re.search(pattern.reason, site.reason), site.reason


@cases
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_safe_is_converted(pattern: Pattern, activation: type[nn.Module], inplace: bool) -> None:
    model = Network(pattern.safe, lambda: activation(inplace=inplace))
    original = twin(model)
    x = example()
    (site,) = inplace_ops.convert(model, x).sites
    assert site.converted, site.reason
    assert_same_behaviour(behaviour(model, x), behaviour(original, x))


@cases
def test_without_its_rule_a_wrong_model_gets_through(
    pattern: Pattern, activation: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Network(pattern.unsafe, activation)
    original = twin(model)
    x = example()
    left = [rule for rule in rules.SAFETY if rule.__name__ != pattern.rule]
    assert len(left) == len(rules.SAFETY) - 1
    monkeypatch.setattr(rules, "SAFETY", left)
    (site,) = inplace_ops.convert(model, x, verify=False).sites
    assert site.converted, site.reason
    assert differs(model, original, x)


def test_every_rule_is_shown_to_be_needed() -> None:
    assert {pattern.rule for pattern in PATTERNS} == {rule.__name__ for rule in rules.SAFETY}
