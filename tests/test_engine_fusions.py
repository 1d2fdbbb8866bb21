"""Calls that one kernel computes: bit for bit what their composition gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import SOURCES, Step, assert_same_step, converted_twin, nodes_from, recomputed, step_of

from inplace_ops.recompute import fusions
from inplace_ops.recompute.specs import Call, Spec

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

HIDDEN = 24


class Recorder(TorchDispatchMode):
    """Counts the ops that run, and those that cast their results."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        cast = " and cast" if (kwargs or {}).get("dtype") and op.namespace == "inplace_ops" else ""
        self.ops[op.overloadpacket._qualified_op_name + cast] += 1
        return op(*args, **(kwargs or {}))


class LlamaBlock(nn.Module):
    """The feed-forward half of one, in float32 but for its matrix products.

    With a layer norm: of an RMS norm PyTorch has no kernel for the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, 40, bias=False), nn.Linear(HIDDEN, 40, bias=False)
        self.down = nn.Linear(40, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.norm(x)
            return x + self.down(F.silu(self.gate(z)) * self.up(z))


class UNetBlock(nn.Module):
    """A convolution of an activation after a group norm in float32."""

    def __init__(self, act: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), act
        self.conv, self.dtype = nn.Conv2d(8, 8, 3), dtype

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.norm(self.first(x)))
        with torch.autocast("cpu", self.dtype):
            return self.conv(z)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 9, HIDDEN, dtype=dtype)


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 7, 5)


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, int]]

# A model, its input, and by op how many more run in backward than where the calls are composed.
CASTS: dict[str, Case] = {
    "llama": (  # the gate and the up projection cast the norm's output each
        LlamaBlock,
        tokens,
        {"inplace_ops::normalize": -2, "aten::_to_copy": -2, "inplace_ops::normalize and cast": 2},
    ),
    **{
        f"group norm, {act}, {dtype}".replace("torch.", ""): (
            lambda act=act, dtype=dtype: UNetBlock(getattr(nn, act)(), dtype),
            images,
            {
                f"inplace_ops::{name}_recompute": -1,
                "aten::_to_copy": -1,
                f"inplace_ops::{name}_recompute and cast": 1,
            },
        )
        for act, name in (("SiLU", "silu"), ("ReLU", "relu"), ("GELU", "gelu"))
        for dtype in (torch.bfloat16, torch.float16)
    },
}


def all_of(spec: Spec) -> Iterator[Call]:
    """The calls that a spec consists of."""
    if isinstance(spec, Call):
        yield spec
        for part in spec.inputs:
            yield from all_of(part)


def composed(function: Any, inputs: Any, arguments: Any) -> type[Call]:
    return Call


def assert_fused(
    case: Case, source: str, monkeypatch: pytest.MonkeyPatch, channels_last: bool = False
) -> None:
    """The same step in other ops."""
    make, example, difference = case
    model, x = make(), example()
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x
        x = x.contiguous(memory_format=torch.channels_last)
    steps: list[Step] = []
    ops: list[Counter[str]] = []
    with nodes_from(source):
        for is_fused in (True, False):
            if not is_fused:
                monkeypatch.setattr(fusions, "_kind_of", composed)
            twin = converted_twin(model, max_ops=4)
            twin(x).sum().backward()  # the first use compares the values
            specs = [spec for value in recomputed(twin(x)) for spec in all_of(value.spec)]
            assert any(type(spec).compute is not Call.compute for spec in specs) == is_fused
            output = twin(x)
            with Recorder() as recorder:
                output.sum().backward()
            ops.append(recorder.ops)
            steps.append(step_of(twin, x))
    assert_same_step(*steps, tolerance=0)
    more = {op: ops[0][op] - ops[1][op] for op in {*ops[0], *ops[1]}}
    assert {op: count for op, count in more.items() if count} == difference


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", CASTS)
def test_casts(case: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_fused(CASTS[case], source, monkeypatch)
