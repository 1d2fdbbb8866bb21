"""`Call` computes what the dispatcher does, and leaves to the dispatcher what only it can do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from _support.assertions import assert_identical
from _support.cases import FLOATS
from _support.op_calls import (
    LAYOUTS,
    OF_EACH_KIND,
    OPS,
    SHAPE,
    arguments_of,
    name_of,
    names_of,
)
from _support.twins import OpCounter
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import profile

import inplace_ops
from inplace_ops import _ops
from inplace_ops.activations import SILU
from inplace_ops.recompute.tensors import is_ordinary

has_calls = bool(_ops._C.calls)
needs_calls = pytest.mark.skipif(not has_calls, reason="PyTorch's stable ABI has them from 2.14 on")


class Failing:
    """Replaces an op that must not be called."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the dispatcher was called")


def without_dispatcher(op: torch._ops.OpOverload) -> _ops.Call:
    call = _ops.Call(op)
    call.op = Failing()  # type: ignore[assignment]
    return call


def copies_of(arguments: list[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in arguments]


def test_torch_2_14_has_calls_of_all_ops() -> None:
    from_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    assert has_calls == from_2_14
    names = {name_of(op) for op in OPS}
    for calls in (_ops._C.calls, _ops._cuda_calls):
        assert calls.keys() == (names if calls else set())
        assert {call.__name__ for call in calls.values()} == calls.keys()
    assert not set(_ops._C.calls.values()) & set(_ops._cuda_calls.values())


@needs_calls
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OF_EACH_KIND, ids=name_of)
def test_call_returns_what_the_dispatcher_returns(
    op: torch._ops.OpOverload, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    arguments = arguments_of(op, device, dtype, layout)
    own = copies_of(arguments)
    expected, actual = op(*arguments), without_dispatcher(op)(*own)
    outputs = [
        [*_tensors_in(value), *each] for value, each in ((expected, arguments), (actual, own))
    ]
    for one, other in zip(*outputs, strict=True):
        if isinstance(one, Tensor):
            assert_identical(other, one)
            assert other.stride() == one.stride()


@needs_calls
@pytest.mark.parametrize("op", OF_EACH_KIND, ids=name_of)
def test_call_rejects_what_the_dispatcher_rejects(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    arguments = arguments_of(op, device)
    for position, argument in enumerate(arguments):
        wrong: list[Any] = [object()]
        if isinstance(argument, Tensor):
            wrong += [argument.int(), argument[..., :1].squeeze(0), argument.to("meta"), 1.5]
        for value in wrong:
            changed = [*arguments[:position], value, *arguments[position + 1 :]]
            before = copies_of(arguments)
            errors = []
            for function in (op, _ops.Call(op)):
                try:
                    function(*changed)
                except Exception as error:
                    errors.append(type(error))
            assert len(errors) in (0, 2), (names_of(op)[position], value)
            if not isinstance(value, Tensor):
                assert len(errors) == 2
            if errors:
                for one, other in zip(arguments, before, strict=True):
                    if isinstance(one, Tensor):
                        assert_identical(one, other)


class Subclass(Tensor):
    pass


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


def inside(transform: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    """Return a function that returns the tensor that a transform passes on."""

    def seen(x: Tensor) -> Tensor:
        found = []

        def function(x: Tensor) -> Tensor:
            found.append(is_ordinary(x))
            kept.append(x)
            return x.sum()

        kept: list[Tensor] = []
        transform(function)(x)
        assert found == [False]
        return kept[0]  # its transform has ended

    return seen


NOT_ORDINARY: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": lambda x: x.as_subclass(Subclass),
    "fake": fake,
    "functional": torch._to_functional_tensor,
    "meta": lambda x: x.to("meta"),
    "zero": lambda x: torch._efficientzerotensor(x.shape, device=x.device),
    "negative": torch._neg_view,
    "complex": lambda x: x.to(torch.cfloat).conj(),
    "quantized": lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8),
    "integer": lambda x: x.long(),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "empty": lambda x: x[:0],
    "vmap": inside(torch.vmap),
    "grad": inside(torch.func.grad),
    "jvp": inside(lambda f: lambda x: torch.func.jvp(f, (x,), (x,))),
}


@needs_calls
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("op", OF_EACH_KIND, ids=name_of)
def test_only_the_dispatcher_takes_tensors_without_values_in_memory(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    arguments = arguments_of(op, device)
    function = (_ops._C.calls if device.type == "cpu" else _ops._cuda_calls)[name_of(op)]
    for position, argument in enumerate(arguments):
        for kind, change in NOT_ORDINARY.items():
            if not isinstance(argument, Tensor) or (
                kind == "jvp" and not argument.is_floating_point()
            ):
                continue
            if kind in ("grad", "complex", "quantized") and not argument.is_floating_point():
                continue
            changed = [*arguments[:position], change(argument), *arguments[position + 1 :]]
            assert function(*changed) is NotImplemented, (position, kind)


@needs_calls
@pytest.mark.parametrize("op", OF_EACH_KIND, ids=name_of)
def test_keyword_arguments_may_be_left_out_and_no_others(
    op: torch._ops.OpOverload, device: torch.device
) -> None:
    function = (_ops._C.calls if device.type == "cpu" else _ops._cuda_calls)[name_of(op)]
    arguments = arguments_of(op, device)
    defaults = [a.default_value for a in op._schema.arguments if a.kwarg_only]
    if defaults:  # these ops only return a tensor
        assert_identical(function(*arguments), function(*arguments, *defaults))
    assert function(*arguments[:-1]) is NotImplemented
    assert function(*arguments, *defaults, None) is NotImplemented


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2),
    "slice": lambda x: x[:, 1:3],
    "next slice": lambda x: x[:, 2:4],
    "reshaped": lambda x: x.view(4, 2, 4),
    "other dtype": Tensor.double,
    "expanded": lambda x: x[:1].expand(2, -1, -1),
    "more dimensions": lambda x: x[None],
    "scalar": lambda x: x[0, 0, 0],
}


@needs_calls
def test_layout_tells_tensors_apart() -> None:
    assert _ops.layout_of is not None
    x = torch.randn(2, 4, 4)
    layouts = [_ops.layout_of(view(x)) for view in VIEWS.values()]
    assert None not in layouts
    assert len({_ops.layout_of(x), *layouts}) == len(VIEWS) + 1
    for view in VIEWS.values():
        assert _ops.layout_of(view(x)) == _ops.layout_of(view(torch.randn(2, 4, 4)))
    assert _ops.layout_of(nn.Parameter(x)) == _ops.layout_of(x)


@needs_calls
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("kind", ["subclass", "fake", "quantized", "integer"])
def test_layout_of_other_objects_is_unknown(kind: str) -> None:
    assert _ops.layout_of is not None
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)
    for value in (NOT_ORDINARY[kind](torch.randn(2, 3)), freed, object(), None):
        assert _ops.layout_of(value) is None  # type: ignore[arg-type]
    before = sys.getrefcount(x := torch.randn(3))
    for _ in range(10):
        _ops.layout_of(x)
    assert sys.getrefcount(x) == before


@needs_calls
@pytest.mark.parametrize("op", OF_EACH_KIND, ids=name_of)
def test_call_keeps_no_reference(op: torch._ops.OpOverload, device: torch.device) -> None:
    arguments, call = arguments_of(op, device), _ops.Call(op)
    call(*arguments)  # imports and caches
    wrong = [*arguments[:-1], object()]
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    results = _tensors_in(call(*arguments))
    storages = [StorageWeakRef(result.untyped_storage()) for result in results]
    assert not any(storage.expired() for storage in storages)
    del results
    for _ in range(10):
        call(*arguments)
        with contextlib.suppress(Exception):
            call(*wrong)
    assert [sys.getrefcount(tensor) for tensor in tensors] == before
    assert all(storage.expired() for storage in storages)


def _tensors_in(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value or ())


def test_dispatch_mode_sees_calls(device: torch.device) -> None:
    x = torch.randn(SHAPE, device=device)
    with OpCounter() as counter:
        SILU.ops.call_in_place(x, None)
    assert counter.ops == {"inplace_ops::silu_": 1}


def test_profiler_sees_calls(device: torch.device) -> None:
    x = torch.randn(SHAPE, device=device)
    with profile() as profiler:
        SILU.ops.call_in_place(x, None)
    assert "inplace_ops::silu_" in {event.key for event in profiler.key_averages()}


def unusual(x: Tensor) -> Iterator[Tensor]:
    yield x.as_subclass(Subclass)
    yield torch._neg_view(x)
    yield nn.Parameter(x)


def test_call_takes_unusual_tensors(device: torch.device) -> None:
    x = torch.randn(SHAPE, device=device)
    affine = torch.randn(2, 1, SHAPE[1], 1, 1, device=device)
    for argument in unusual(x):
        contexts: list[AbstractContextManager[Any]] = [nullcontext(), torch.inference_mode()]
        for context in contexts:
            with context, torch.no_grad():
                actual = SILU.ops.call_recompute(argument, affine, None, None)
                expected = SILU.ops.recompute(argument, affine, None, None)
            assert type(actual) is type(expected)
            assert_identical(actual.as_subclass(Tensor), expected.as_subclass(Tensor))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
@pytest.mark.parametrize("kind", NOT_ORDINARY)
def test_tensor_without_values_in_memory_is_not_ordinary(kind: str, device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    assert is_ordinary(x)
    assert is_ordinary(nn.Parameter(x).t()[1:])
    assert not is_ordinary(NOT_ORDINARY[kind](x))


def test_freed_tensor_is_not_ordinary(device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    x.untyped_storage().resize_(0)
    assert not is_ordinary(x)


def test_call_works_under_vmap(device: torch.device) -> None:
    grad, x = (torch.randn(4, *SHAPE, device=device) for _ in range(2))
    affine = torch.randn(2, 1, SHAPE[1], 1, 1, device=device)

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        return SILU.ops.call_backward["recompute"](grad, x, affine, None, None)

    expected = torch.stack([backward(*pair) for pair in zip(grad, x, strict=True)])
    assert_identical(torch.vmap(backward)(grad, x), expected)


def twice_negated(x: Tensor) -> Tensor:
    return torch._neg_view(torch.neg(x))


@pytest.mark.parametrize("unpack", [twice_negated, torch._to_functional_tensor])
@pytest.mark.parametrize("save", ["output", "derivative"])
def test_saved_tensor_hooks_may_return_any_tensor(
    save: Any, unpack: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    def gradient(unpack: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = values.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x, lambda x: unpack(x) if x.is_floating_point() else x
        ):
            inplace_ops.silu_(leaf * 1, save=save).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    values = torch.randn(SHAPE, device=device)
    assert_identical(gradient(unpack), gradient(lambda x: x))
