"""`saved_bytes`: what counts, checkpoints, and threads. What measurements of memory count."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from _support.allocations import largest_allocation, saved_allocation
from _support.networks import examples, network
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.memory import peak_bytes

FROZEN = nn.Linear(100, 100).requires_grad_(False)


class Holder:
    """A callable object, and one with methods."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(100, 100).requires_grad_(False)]

    def __call__(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    def method(self, x: Tensor) -> Tensor:
        return self(x)


def uses_global(x: Tensor) -> Tensor:
    return FROZEN(x)


def uses_function(x: Tensor) -> Tensor:
    return next(uses_global(each) for each in [x])


def callables() -> dict[str, Callable[[Tensor], Tensor]]:
    frozen = nn.Linear(100, 100).requires_grad_(False)
    weight = nn.Parameter(torch.randn(100, 100), requires_grad=False)
    leaf = torch.randn(100, 100, requires_grad=True)

    def closure(x: Tensor) -> Tensor:
        return frozen(x)

    return {
        "method": frozen.forward,
        "method of an object": Holder().method,
        "object": Holder(),
        "partial": partial(lambda layer, x: layer(x), frozen),
        "closure": closure,
        "closure in a closure": lambda x: closure(x),
        "list in a closure": (lambda layers: lambda x: layers[0](x))([frozen]),
        "global": uses_global,
        "global of a function": uses_function,
        "frozen parameter": lambda x: x @ weight,
        "leaf": lambda x: x @ leaf,
    }


@pytest.mark.parametrize("name", callables())
def test_parameters_that_a_callable_refers_to_do_not_count(name: str) -> None:
    x = torch.randn(10, 100, requires_grad=True)
    assert saved_bytes(callables()[name], x) == 0


def test_saved_bytes_does_not_walk_objects_of_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise AssertionError("gc")

    for name in ("get_objects", "get_referrers", "collect"):
        monkeypatch.setattr(gc, name, fail)
    assert saved_bytes(torch.exp, torch.randn(100, requires_grad=True)) == 400


def is_raised_in_pytorchs_backward(error: BaseException) -> bool:
    """Whether PyTorch itself has built a tuple from an iterator: see `test_sources.py`."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return isinstance(error, SystemError) and last.filename == torch.autograd.__file__


@pytest.mark.parametrize("looks", [False, True], ids=["", "while one looks at all objects"])
def test_threads_train_and_measure_one_model(looks: bool) -> None:
    """A thread that looks at all objects keeps some alive: sizes may differ then."""
    model, x = network(), examples()
    inplace_ops.convert(model, x)
    sizes, problems, done = set(), [], threading.Event()

    def train() -> None:
        try:
            for _ in range(5):
                model(x).square().sum().backward()
                sizes.add(saved_bytes(model, x))
        except BaseException as error:
            if not (looks and is_raised_in_pytorchs_backward(error)):
                problems.append(error)

    def look() -> None:
        while looks and not done.is_set():
            gc.get_objects()

    threads = [threading.Thread(target=train) for _ in range(4)]
    looker = threading.Thread(target=look)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in [looker, *threads]:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        done.set()
        looker.join()
        sys.setswitchinterval(interval)
    assert problems == []
    assert looks or len(sizes) == 1


# Checkpoints.


def policy_for(*ops: Any) -> Callable[..., Any]:
    def policy(context: Any, op: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        is_saved = op in ops
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


class Checkpoints(nn.Module):
    """Layers around a checkpoint, which has parts of its own."""

    def __init__(self, with_mask: bool = False, **arguments: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 8)
        self.inner = nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256), nn.Linear(256, 128))
        self.with_mask, self.arguments = with_mask, arguments

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        mask = torch.ones_like(y, requires_grad=False) if self.with_mask else None

        def run(y: Tensor) -> Tensor:
            return self.inner(y if mask is None else y * mask)

        return self.last(checkpoint(run, y, use_reentrant=False, **self.arguments))


CHECKPOINTS: dict[str, Callable[[], nn.Module]] = {
    "plain": Checkpoints,
    "captured": partial(Checkpoints, True),
    "no random state": partial(Checkpoints, preserve_rng_state=False),
    "selective": partial(Checkpoints, context_fn=policy_for(torch.ops.aten.addmm.default)),
    "nothing cached": partial(Checkpoints, context_fn=policy_for()),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_count_the_memory_that_they_keep(name: str) -> None:
    model, x = CHECKPOINTS[name](), torch.randn(512, 64)
    original = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # measuring gives no warning that training does not give
        report = inplace_ops.convert(model, x)
        saved = [saved_bytes(each, x) for each in (original, model)]
    assert [report.saved_bytes_before, report.saved_bytes_after] == saved
    for each, size in zip((original, model), saved, strict=True):
        allocated = saved_allocation(lambda each=each: each(x)) - 4 * 512 * 8
        assert size == pytest.approx(allocated, abs=256)
    assert report.unlisted_bytes == 0
    rows = [row for row in report.remaining if row.consumer == "checkpoint"]
    assert ("Addmm", 4 * 512 * 128) in {(row.producer, row.bytes) for row in rows}
    first = "" if name == "captured" else "inner.0"  # the first operation's
    assert {row.module for row in rows} == {first}


def test_result_that_a_selective_checkpoint_caches_does_not_count() -> None:
    layer, x = nn.Linear(64, 128), torch.randn(512, 64)
    contexts = policy_for(torch.ops.aten.addmm.default)

    def call(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    with torch.no_grad():
        call(x)
    assert saved_bytes(call, x) == torch.get_rng_state().nbytes
    assert saved_bytes(lambda x: call(x).sum(), x) > 4 * 512 * 128


def test_function_without_a_module() -> None:
    """Such as the forward of a graph module, or what `exec` has made."""
    namespace: dict[str, Any] = {}
    exec("def f(x): return x.sigmoid()", namespace)
    assert namespace["f"].__module__ is None
    assert inplace_ops.saved_bytes(namespace["f"], torch.ones(8, requires_grad=True)) == 32


# Measurements of allocated memory.


class Cycle:
    """An object that only the garbage collector frees, with memory that PyTorch counted."""

    def __init__(self) -> None:
        self.cycle = self
        self.memory = torch.zeros(100_000)


def largest(call: Callable[[], object]) -> int:
    with largest_allocation() as found:
        call()
    return found[0]


@pytest.mark.parametrize("measure", [saved_allocation, largest, peak_bytes])
def test_garbage_of_an_earlier_measurement_does_not_count(
    measure: Callable[[Callable[[], object]], int],
) -> None:
    """PyTorch's profiler subtracts freed memory if it saw the allocation, in any measurement."""

    def allocate() -> Tensor:
        gc.collect()
        return torch.zeros(1000)

    measure(Cycle)
    assert measure(allocate) == 4000
