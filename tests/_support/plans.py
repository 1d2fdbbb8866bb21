"""Comparison of the decisions that a plan repeats with those of the rules."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inplace_ops.recompute import activation_modules, decisions, plan, run
from inplace_ops.recompute.after_norm import Merge
from inplace_ops.recompute.nodes import Node
from inplace_ops.recompute.values import KEY, Value, value_of


class _Expected(threading.local):
    """What the rules have to decide about the node that a thread visits."""

    decision: decisions.NodeDecision | None = None
    value: Value | None = None


@contextmanager
def compared_plans() -> Iterator[list[str]]:
    """Compare all decisions that plans repeat with those of the rules; yield the differences.

    Every second time that a node is as the plan expects it, the rules decide about it, and have to
    decide the same. The other times the plan acts, and has to leave the node as the rules would. An
    activation after a norm runs as the plan tells, which has to be what the rules tell.
    """
    differences: list[str] = []
    expected = _Expected()
    turns = itertools.count()
    repeat, learn = decisions.NodeDecision.repeat, plan.Plan.learn
    match = decisions.MergeDecision.match

    def compared_repeat(decision: decisions.NodeDecision, node: Node, replacer: Any) -> bool:
        expected.decision = None
        if next(turns) % 2:
            acted = repeat(decision, node, replacer)
            if acted:
                _compare(decision, plan.decision_of(node), "acted otherwise", differences)
            return acted
        probe = Value()
        is_match = KEY not in node.metadata and decision.match(node, replacer) is not None
        filling = decision.filling
        if is_match and (filling is None or filling.fill(node, probe, replacer)):
            expected.decision, expected.value = decision, probe
        return False

    def compared_learn(of_model: plan.Plan, node: Node, ordinal: int) -> None:
        decision, probe = expected.decision, expected.value
        expected.decision = expected.value = None
        if decision is not None:
            _compare(decision, plan.decision_of(node), "the rules differ", differences)
            if not _same_facts(probe, value_of(node)):
                differences.append(f"{type(node).__name__}: other facts")
        learn(of_model, node, ordinal)

    def compared_match(
        decision: decisions.MergeDecision, module: nn.Module, z: Any, replacer: Any
    ) -> Merge | None:
        merge = match(decision, module, z, replacer)
        engine = run.running_engine()
        if merge is not None and engine is not None:
            wanted = activation_modules._merge_of(engine, module, z, z)
            if wanted is None or not _same_merges(merge, wanted):
                differences.append(f"{type(module).__name__}: {merge} instead of {wanted}")
        return merge

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions.NodeDecision, "repeat", compared_repeat)
        patch.setattr(plan.Plan, "learn", compared_learn)
        patch.setattr(decisions.MergeDecision, "match", compared_match)
        yield differences


def _compare(
    decision: decisions.NodeDecision,
    actual: decisions.NodeDecision | None,
    what: str,
    differences: list[str],
) -> None:
    if not isinstance(actual, decisions.NodeDecision):
        differences.append(f"{decision.node_type.__name__}: {what}: {actual}")
        return
    for mine, other in zip(decision.inputs, actual.inputs, strict=True):
        # About the asked ones the rules may decide otherwise each time.
        if isinstance(mine, decisions.Asked) or mine == other:
            continue
        differing = f"{mine}, {other}"
        if isinstance(mine, decisions.Replaced) and isinstance(other, decisions.Replaced):
            calls = [None if one.views is None else one.views.calls for one in (mine, other)]
            if None not in calls and calls[0] != calls[1]:
                differing += f", views {calls}"
            elif dataclasses.replace(mine, views=None) == dataclasses.replace(other, views=None):
                continue
        differences.append(f"{decision.node_type.__name__}: {what}: {differing}")


def _same_facts(mine: Value | None, other: Value | None) -> bool:
    if mine is None or other is None or (mine.norm is None) != (other.norm is None):
        return False
    if mine.norm is None or other.norm is None:
        return True
    pairs = [
        (mine.norm.column_affine, other.norm.column_affine),
        *zip(mine.norm.statistics or (), other.norm.statistics or (), strict=True),
        *zip(mine.norm.affine or (), other.norm.affine or (), strict=True),
    ]
    return all(_same_tensors(a, b) for a, b in pairs)


def _same_tensors(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _same_merges(mine: Merge, other: Merge) -> bool:
    if mine.instead is None or other.instead is None:
        have_same_receivers = mine.instead is other.instead
    else:
        receivers = zip(mine.instead[:3], other.instead[:3], strict=True)
        have_same_receivers = all(_lead_to_one(a, b) for a, b in receivers)
    return (
        mine[:4] == other[:4]
        and mine.x is other.x
        and all(map(_same_tensors, mine.affine, other.affine))
        and have_same_receivers
    )


def _lead_to_one(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are one, or lead to one output in the graph."""
    if a is b or a is None or b is None or a.grad_fn is None:
        return a is b
    return (a.grad_fn, a.output_nr) == (b.grad_fn, b.output_nr)


@contextmanager
def only_rules() -> Iterator[None]:
    """Let no plan repeat a decision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions.NodeDecision, "repeat", lambda *_: False)
        patch.setattr(decisions.MergeDecision, "match", lambda *_: None)
        yield
