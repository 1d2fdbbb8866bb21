"""The engine does not affect other models, other hooks or later calls after an error."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import itertools
import pickle
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.plans import only_rules
from _support.twins import (
    SOURCES,
    C,
    Parts,
    Program,
    assert_same_step,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
    replaced,
    step_of,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import inplace_ops
from inplace_ops.recompute import activation_modules, nodes, packed, replace, run, verify
from inplace_ops.recompute.affine import NormFacts
from inplace_ops.recompute.nodes import Node
from inplace_ops.recompute.run import running_engine

pytestmark = pytest.mark.usefixtures("_small_tensors_too")
each_source = pytest.mark.usefixtures("source")


def blocks() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.SiLU()),
        nn.Sequential(nn.Conv2d(C, C, 3), nn.GroupNorm(2, C), nn.ReLU(inplace=True)),
        nn.Conv2d(C, 2, 1),
    )


def assert_switched_off() -> None:
    """Assert that the engine ignores operations of this thread."""
    assert run.running_engine() is None
    y = F.silu(nn.Conv2d(3, C, 1)(images()))
    output = nn.Conv2d(C, 2, 1)(y)
    assert replaced(output) == []
    assert nodes.is_python_function(type(y.grad_fn)) or "inplace_ops" not in y.grad_fn.metadata


def assert_same_gradients_of(*outputs: tuple[Tensor, nn.Module]) -> None:
    """Compare the gradients of outputs with those of the last one, given the model of each."""
    *found, expected = (
        torch.autograd.grad(output.square().sum(), list(m.parameters())) for output, m in outputs
    )
    for actual in found:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@each_source
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_error_in_any_module_does_not_affect_later_calls(error: type[BaseException]) -> None:

    model = blocks()
    twin, x = converted_twin(model), images()
    step_of(twin, x)

    def fail(*_: Any) -> None:
        raise error

    for module in twin.modules():
        for register in ("register_forward_pre_hook", "register_forward_hook"):
            handle = getattr(module, register)(fail)
            with pytest.raises(error):
                twin(x)
            handle.remove()
            assert_switched_off()
        if not list(module.children()):
            forward = vars(module).get("forward")
            module.forward = fail
            with pytest.raises(error):
                twin(x)
            del module.forward
            if forward is not None:
                module.forward = forward
            assert_switched_off()
    assert_same_steps(model, twin, x)


class _Failed(Exception):
    pass


@each_source
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, C), nn.BatchNorm2d(C)], ids=["group", "batch"])
def test_failed_forward_keeps_no_tensor(norm: nn.Module) -> None:
    """The statistics of a group norm lead to its node, whose metadata has them during forward."""
    storages: list[StorageWeakRef] = []

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        storages.append(StorageWeakRef(y.untyped_storage()))
        z = m.norm(y)
        if m.fails:
            raise _Failed
        return F.relu(z)

    parts = {"first": nn.Conv2d(C, C, 1), "norm": copy.deepcopy(norm)}
    twin = converted_twin(Parts(compute, **parts, fails=False))
    for twin.fails in (False, False, True, True, True):
        with contextlib.suppress(_Failed):
            twin(torch.randn(4, C, 16, 16)).sum().backward()
    gc.collect()
    assert [storage.expired() for storage in storages] == [True] * 5


@each_source
@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
@pytest.mark.filterwarnings("error")
def test_error_at_any_node_does_not_affect_later_calls(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at any node leaves tensors saved, while KeyboardInterrupt reaches the caller.

    The engine's warning of it does not reach the model if the user's filters make it an error.
    """
    model = blocks()
    twin, x = converted_twin(model), images()
    visit = replace.Replacer.visit
    for number in range(1, 6):  # the rules visit 5 nodes in forward
        calls = itertools.count(1)

        def failing(*args: Any, calls: Any = calls, number: int = number) -> None:
            if next(calls) == number:
                raise error
            visit(*args)

        with monkeypatch.context() as patch, only_rules():
            patch.setattr(replace.Replacer, "visit", failing)
            is_raised = error is KeyboardInterrupt
            with pytest.raises(error) if is_raised else contextlib.nullcontext():
                twin(x)
        assert_switched_off()
    assert_same_steps(model, twin, x)


@each_source
@pytest.mark.parametrize("how", ["paused", "failed"])
@pytest.mark.filterwarnings("ignore:inplace_ops:UserWarning")
def test_operation_without_a_visit_proves_no_input(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later consumer gives its output a value. Its inputs may have been written to all the same.

    The write begins after the first use of all specs, whose comparison would find it.
    """

    def compute(m: Any, x: Tensor) -> Tensor:
        z = m.first(x) * m.second(x)
        with torch.no_grad():
            z.add_(float(m.writes))
        engine = run.running_engine()
        if engine is None:
            return z.neg().pow(2)
        with engine.paused(z) if how == "paused" else monkeypatch.context() as patch:
            if how == "failed":
                patch.setattr(replace, "prove", None)  # calling it raises
            y = z.neg()
            engine.walk(y)
        return y.pow(2)

    model = Parts(compute, first=nn.Linear(3, 8), second=nn.Linear(3, 8), writes=False)
    twin, x = converted_twin(model, max_ops=8), torch.randn(4, 3)
    for writes in (False, True):
        model.writes = twin.writes = writes
        assert_same_steps(model, twin, x, steps=1)


def _fail(*_: Any) -> None:
    raise RuntimeError("of the engine")


@each_source
@pytest.mark.parametrize(
    ("owner", "part", "replacement"),
    [
        (replace.Replacer, "visit", _fail),  # at a node
        (run, "base_of", _fail),  # after a module
        (run, "value_of", _fail),
        (replace.Replacer, "norm_input", _fail),  # before an activation after a norm
        (activation_modules, "bypass", None),  # reading an attribute of it raises
        (activation_modules, "_AFFINE_FACTOR", None),  # multiplying by it raises
    ],
)
def test_error_of_the_engine_warns_once(
    owner: Any, part: str, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the arguments and outputs of the model are, the tensors stay saved."""

    model = Parts(lambda m, inputs: {"output": m.blocks(inputs["x"])}, blocks=blocks())
    inputs = {"x": images()}
    twin = converted_twin(model)
    monkeypatch.setattr(owner, part, replacement)
    with pytest.warns(UserWarning, match=r"failed: (Runtime|Attribute|Type)Error") as caught:
        outputs = [(m(inputs)["output"], m) for m in (twin, twin, model)]
    assert len(caught) == 1
    assert_switched_off()
    assert_same_gradients_of(*outputs)


# An allocation fails while the engine compares, prepares or evaluates a spec.

OUT_OF_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:137] data. DefaultCPUAllocator: can't allocate memory"
)


@each_source
@pytest.mark.parametrize("failing", [1, 3], ids=lambda count: f"allocation {count}")
@pytest.mark.parametrize(
    ("owner", "part"),
    [(packed.Recomputed, "compute"), (verify, "_excess"), (NormFacts, "affine_of")],
    ids=["first use", "comparison", "activation after a norm"],
)
def test_allocation_failure_switches_nothing_off(
    owner: Any, part: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning says what ran out, and the next step saves as little as if nothing had failed."""
    model = blocks()
    twin, x = converted_twin(model), images()
    original, calls = getattr(owner, part), itertools.count(1)

    def fail(*args: Any) -> Any:
        if next(calls) == failing:
            raise (RuntimeError if failing == 1 else torch.OutOfMemoryError)(OUT_OF_MEMORY)
        return original(*args)

    with warnings.catch_warnings(record=True) as caught, monkeypatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(owner, part, fail)
        first = twin(x)
    if next(calls) > failing:
        assert ["can't allocate memory" in str(w.message) for w in caught] == [True]
        assert ".data" not in str(caught[0].message)
    with no_warnings():
        second, expected = twin(x), converted_twin(model)(x)
    assert len(recomputed(second)) == len(recomputed(expected))
    assert_same_gradients_of((first, twin), (second, twin), (model(x), model))


class RecomputeFunction(torch.autograd.Function):
    """A user's function with the name of the engine's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def keeps_a_modified_base(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    first, _ = y.unbind(0)
    m.y = y.mul_(2)
    return first


def with_unreadable_grad_fn(m: Any, x: Tensor) -> Tensor:
    """PyTorch raises when `grad_fn` is read of one of several views with a modified base."""
    first = m.part(x.flatten(2)).detach()
    return m.linear(m.part.y) * first.mean()


def of_itself(m: Any, x: Tensor) -> Tensor:
    """Call the model inside its own forward, twice."""
    y = m.block(x)
    if m.depth == 2:
        return y
    m.depth += 1
    y = y + m(x * 0.5)
    m.depth -= 1
    return y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a function with the engine's name": lambda: Parts(
        lambda m, x: m.last(RecomputeFunction.apply(m.blocks(x))),
        blocks=blocks(),
        last=nn.Conv2d(2, 3, 1),
    ),
    "an unreadable grad_fn": lambda: Parts(
        with_unreadable_grad_fn,
        part=Parts(keeps_a_modified_base, linear=nn.Linear(64, 64)),
        linear=nn.Linear(64, 64),
    ),
    "a model that calls itself": lambda: Parts(
        of_itself, block=Program(lambda m, z: m.conv(m.silu(z))), depth=0
    ),
}


@each_source
@pytest.mark.parametrize("name", MODELS)
def test_unusual_model_matches_pytorch(name: str) -> None:
    model, x = MODELS[name](), images()
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x)


@each_source
def test_argument_that_contains_itself_is_ignored() -> None:

    model = Parts(lambda m, state: m.blocks(state["x"]), blocks=blocks())
    state: dict[str, Any] = {"x": images()}
    state["self"] = state
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        inplace_ops.convert(twin)
        torch.testing.assert_close(twin(state), model(state))


@each_source
def test_nested_and_alternating_conversions_match_pytorch() -> None:
    """Nested conversions enter the engine once, with the settings of the outer one."""
    inner = blocks()[0]
    model = nn.Sequential(inner, *blocks()[1:])
    twin, x = copy.deepcopy(model), images()
    inplace_ops.convert(twin[0], max_ops=1)
    inner_only = recomputed(twin(x))
    inplace_ops.convert(twin, max_ops=20)
    assert len(recomputed(twin(x))) > len(inner_only)
    assert_same_steps(model, twin, x)
    other = converted_twin(model)
    for _ in range(2):
        assert_same_steps(model, twin, x, steps=1)
        assert_same_steps(model, other, x, steps=1)
    with inplace_ops.reverted(twin):
        assert replaced(twin(x)) == []
    inplace_ops.revert(twin)
    assert type(twin) is type(twin[0]) is nn.Sequential
    assert_switched_off()


@each_source
def test_forward_inside_a_backward_hook_matches_pytorch() -> None:
    model = blocks().eval()
    outputs, x = [], images()
    for m in (converted_twin(model), model):
        output = m(x)
        output.register_hook(lambda gradient, m=m: gradient + m(x).detach())
        outputs.append((output, m))
    assert_same_gradients_of(*outputs)


@each_source
def test_model_in_another_thread_is_not_affected() -> None:

    entered, left = threading.Event(), threading.Event()

    def wait(m: Any, x: Tensor) -> Tensor:
        entered.set()
        assert left.wait(60)
        return x

    twin = blocks().append(Parts(wait))
    inplace_ops.convert(twin)
    other, found = blocks(), []
    thread = threading.Thread(target=lambda: found.append(twin(images())))
    thread.start()
    assert entered.wait(60)
    output, engine_of_this_thread = other(images()), run.running_engine()
    left.set()
    thread.join()
    assert replaced(output) == []
    assert engine_of_this_thread is None
    assert len(recomputed(found[0])) >= 2


@pytest.mark.skipif("hook" not in SOURCES, reason="needs torch 2.14")
@pytest.mark.parametrize("where", ["around", "inside", "around and inside", "closed after"])
def test_node_creation_hooks_of_the_user_see_every_node(where: str) -> None:
    """Hooks of the user see the same nodes of the model before and after conversion."""
    seen: list[str] = []

    def compute(m: Any, x: Tensor) -> Tensor:
        x = m.blocks[0](x)
        if where == "closed after":
            hook.__enter__()
            return m.blocks[1:](x)
        with hook if "inside" in where else contextlib.nullcontext():
            return m.blocks[1:](x)

    hook = torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name()))
    outer = torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name()))
    model = Parts(compute, blocks=blocks())
    twin, x = converted_twin(model), images()
    counts = []
    for m in (model, twin, twin):
        seen.clear()
        with outer if "around" in where else contextlib.nullcontext():
            output = m(x)
            if where == "closed after":
                hook.__exit__()
        (output * 2).sum()
        counts.append(seen.count("ConvolutionBackward0"))
        assert len(recomputed(output)) == 0 or m is twin
    assert counts[0] == counts[1] == counts[2] > 0
    assert_switched_off()


@pytest.mark.skipif("hook" not in SOURCES, reason="needs torch 2.14")
def test_node_creation_hook_left_open_visits_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch pops the user's hook in place of the engine's."""
    hook = torch.autograd.graph.node_creation_hook(lambda node: None)

    def compute(m: Program, z: Tensor) -> Tensor:
        if m.step == 1:
            hook.__enter__()
        return m.conv(m.silu(z))

    model = Program(compute)
    twin, x = converted_twin(model), images()
    twin(x)
    seen: list[str] = []
    visit = replace.Replacer.visit

    def counted(self: replace.Replacer, node: Node, *arguments: Any) -> None:
        seen.append(node.name())
        visit(self, node, *arguments)

    monkeypatch.setattr(replace.Replacer, "visit", counted)
    try:
        assert_same_steps(model, twin, x)
        seen.clear()
        with only_rules():
            twin(x)
    finally:
        hook.__exit__()
        hook.__exit__()
    assert seen.count("ConvolutionBackward0") == 2


def in_a_thread(run: Callable[[], Any]) -> Any:
    """Call a function in a new thread, whose nodes are numbered from 0, and return its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    (result,) = found
    return result


@each_source
@pytest.mark.parametrize("is_argument", [True, False], ids=["argument", "attribute"])
@pytest.mark.parametrize("makes", [lambda run: run(), in_a_thread], ids=["same", "other thread"])
def test_graph_of_another_network_is_not_modified(makes: Any, is_argument: bool) -> None:
    """In another thread its nodes may have sequence numbers in the model's range."""

    outer = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU())
    inner = Program(lambda m, z: m.conv(m.silu(z)))
    twin, x = converted_twin(Parts(lambda m, x: m.inner(x + m.value), inner=inner)), images()

    foreign = makes(lambda: F.silu(outer(x)))
    twin.value = 0.0 if is_argument else foreign

    def call() -> Tensor:
        # An argument's last node then has the number of the model's first one in another thread.
        numbers = foreign.grad_fn._sequence_nr() + (not is_argument)
        for _ in range(numbers if makes is in_a_thread else 0):
            torch.ones(2, requires_grad=True) * 2
        return twin(foreign if is_argument else x)

    output = makes(call)
    assert len(recomputed(output)) >= 1
    node = foreign.grad_fn
    assert node._raw_saved_self.unpack_hook is None
    while node is not None:
        assert not any("inplace_ops" in str(key) for key in node.metadata)
        node = node.next_functions[0][0] if node.next_functions else None
    output.sum().backward()


@each_source
@pytest.mark.parametrize("error", [None, ValueError])
def test_engine_is_freed_when_forward_ends(error: type[Exception] | None) -> None:
    """It refers to nodes of the arguments, so a reference cycle would keep their graph alive."""

    def activation(m: Any, x: Tensor) -> Tensor:  # the engine takes notes inside its module
        engines.append(weakref.ref(running_engine()))
        y = x.tanh() * 2
        if error is not None:
            raise error
        return y

    engines: list[weakref.ref[Any]] = []
    layers = nn.Conv2d(3, C, 1), nn.BatchNorm2d(C), Parts(activation)
    twin = converted_twin(nn.Sequential(*layers))
    x = images().requires_grad_() * 2
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            twin(x)
        assert engines[0]() is None
    finally:
        gc.enable()


# Tools that copy, wrap or modify a model.


def test_replica_runs_its_own_parameters() -> None:

    model = blocks()
    twin, x = converted_twin(model), images()
    twin(x)
    replica = twin._replicate_for_data_parallel()
    for name, child in list(replica._modules.items()):
        replica._modules[name] = copy.deepcopy(child)
    with torch.no_grad():
        replica[2].weight.zero_()
        replica[2].bias.fill_(3.0)
    output = replica(x)
    assert (output == 3.0).all()
    assert len(recomputed(output)) >= 2


DUPLICATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m).module,
}


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_copies_are_converted_and_revert_independently(duplicate: str) -> None:
    model = blocks()
    twin, x = converted_twin(model), images()
    other = DUPLICATES[duplicate](twin)
    assert type(other) is type(twin)
    assert list(other.state_dict()) == list(model.state_dict())
    # Lightning calls `forward` directly.
    assert len(recomputed(other(x))) == len(recomputed(twin.forward(x))) >= 2
    if duplicate != "copy":
        assert_same_steps(model, other, x)
    inplace_ops.revert(other)
    assert type(other) is nn.Sequential
    assert replaced(other(x)) == []
    assert isinstance(twin, nn.Sequential)
    if duplicate != "copy":  # a shallow copy shares its modules
        assert len(recomputed(twin(x))) >= 2


class Final(type):
    """A metaclass whose classes cannot be subclassed."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if name in globals():
            raise TypeError(f"{name} is final")
        return super().__new__(mcs, name, bases, body)


class KeepsItsClass(nn.Module, metaclass=Final):
    """A model that keeps its class, and gets a `forward` attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Module = blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


each_duplicate = pytest.mark.parametrize(
    "duplicate", [*DUPLICATES.values()][:3], ids=[*DUPLICATES][:3]
)


@pytest.mark.usefixtures("without_products")
@each_duplicate
@pytest.mark.parametrize("is_again", [False, True], ids=["copy", "copy of a copy"])
def test_copy_of_an_activation_is_its_own_module(duplicate: Any, is_again: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, C, 1), nn.BatchNorm2d(C), nn.LeakyReLU(0.1))
    twin, x = converted_twin(model), images()
    other = duplicate(duplicate(twin[2])) if is_again else duplicate(twin[2])
    assert set(vars(other)) == set(vars(twin[2]))
    other.negative_slope, other.inplace = 0.5, True
    assert other(torch.tensor([-1.0])).item() == -0.5
    assert twin[2](torch.tensor([-1.0])).item() == pytest.approx(-0.1)
    twin[2] = model[2] = other
    assert_same_steps(model, twin, x)
    assert len(recomputed(twin(x))) == 0  # LeakyReLU in place is fused, and its output the last
    inplace_ops.revert(twin)
    assert set(vars(other)) == set(vars(nn.LeakyReLU()))


def scaled(scale: float, x: Tensor) -> Tensor:
    return torch.relu(x) * scale


@each_duplicate
def test_copy_keeps_the_forward_that_convert_or_a_tool_has_set(duplicate: Any) -> None:
    """Of a model that keeps its class, and of an activation in it."""
    model = KeepsItsClass()
    inplace_ops.convert(model)
    model.layers[1][2].forward = functools.partial(scaled, 2.0)
    assert type(model) is KeepsItsClass
    other, activation, x = duplicate(model), duplicate(model.layers[1][2]), images()
    assert torch.equal(activation(x), scaled(2.0, x))
    assert vars(activation).keys() == vars(nn.ReLU()).keys() | {"forward"}
    other._modules = dict(other._modules, layers=nn.Conv2d(3, 2, 1))
    assert other(x).shape == (2, 2, 8, 8)  # it runs its own modules
    assert len(recomputed(model(x))) >= 2
    inplace_ops.revert(other)
    assert "forward" not in vars(other)
    inplace_ops.revert(model)
    assert vars(model.layers[1][2]).keys() == vars(activation).keys()
    assert torch.equal(duplicate(model.layers[1][2])(x), scaled(2.0, x))


# Tools that replace a model's forward.


def unwrap_as_accelerate(model: nn.Module) -> None:
    """Follow `__wrapped__` from the model's forward to its end, as `unwrap_model` does."""
    forward = model.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    model.forward = types.MethodType(getattr(forward, "__func__", forward), model)


def wrap(model: nn.Module) -> None:
    """Wrap the model's forward, as accelerate does."""

    @functools.wraps(type(model).forward)
    def wrapped(self: nn.Module, x: Tensor) -> Tensor:
        return type(self).forward(self, x)

    model.forward = types.MethodType(wrapped, model)


def bind_class_forward(model: nn.Module) -> None:
    model.forward = types.MethodType(type(model).forward, model)


def bind_original_forward(model: nn.Module) -> None:
    model.forward = types.MethodType(nn.Sequential.forward, model)


def run_layers(model: nn.Module) -> None:
    model.forward = lambda x: functools.reduce(lambda y, layer: layer(y), model.children(), x)


@pytest.mark.parametrize(
    ("tools", "stays"),
    [
        ([unwrap_as_accelerate], True),
        ([wrap, unwrap_as_accelerate], True),
        ([wrap], True),
        ([bind_class_forward], True),
        ([bind_original_forward], True),
        ([run_layers], False),
    ],
)
def test_engine_stays_or_a_warning_names_the_remedy(tools: list[Any], stays: bool) -> None:
    model = blocks()
    twin, x = converted_twin(model), images()
    expected = len(recomputed(twin(x)))
    for tool in tools:
        tool(twin)
    if stays:
        with no_warnings():
            assert len(recomputed(twin(x))) == expected
    else:
        with torch.no_grad(), no_warnings():
            twin(x)
        with pytest.warns(
            UserWarning, match=r"call inplace_ops\.revert\(model\), then inplace_ops"
        ):
            assert replaced(twin(x)) == []
        with no_warnings():
            twin(x)
    assert_same_steps(model, twin, x)
    inplace_ops.revert(twin)
    inplace_ops.convert(twin, max_ops=20)
    with no_warnings():
        assert len(recomputed(twin(x))) == expected


def call_another(model: nn.Module, original: Any, x: Tensor) -> None:
    other = converted_twin(blocks())
    model.forward = lambda x: original(x) + other(x)
    model(x)


def differentiate(model: nn.Module, original: Any, x: Tensor) -> None:
    model.eval()  # a transform may not write to running statistics
    parameters = dict(model.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)


def trace(model: nn.Module, original: Any, x: Tensor) -> None:
    torch.jit.trace(model, x, check_trace=False)


def call_in_another(model: nn.Module, original: Any, x: Tensor) -> None:
    """The engine of the whole model runs."""
    whole = nn.Sequential(nn.Identity(), model)
    inplace_ops.convert(whole, max_ops=20)
    run_layers(model)
    assert len(recomputed(whole(x))) >= 2


@pytest.mark.parametrize("use", [call_another, call_in_another, differentiate, trace])
def test_wrapped_forward_needs_no_warning(use: Any) -> None:
    """The wrapper calls the converted forward, whatever else runs, or keeps the engine from it."""
    twin, x = converted_twin(blocks()), images()
    original = twin.forward
    twin.forward = lambda x: original(x)
    with no_warnings("inplace_ops"):
        use(twin, original, x)


class NestsItsState(nn.Sequential):
    """A class whose `__getstate__` hides its attributes from others: a copy is not converted."""

    def __getstate__(self) -> Any:
        return {"nested": dict(vars(self))}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state["nested"])


# Replicas of `nn.DataParallel`, whose parameters are not autograd leaves.


class ReducesItself(nn.Sequential):
    """A class that is pickled without its attributes: a copy is not converted."""

    def __reduce__(self) -> Any:
        return ReducesItself, tuple(self)


@pytest.mark.parametrize("kind", [NestsItsState, ReducesItself])
def test_copy_that_lost_its_conversion_can_be_converted(kind: type[nn.Sequential]) -> None:
    model, x = kind(*blocks()), images()
    inplace_ops.convert(model)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert kind is NestsItsState or type(other) is kind
    inplace_ops.convert(other)
    assert len(recomputed(other(x))) == len(recomputed(model(x))) >= 2


class Broadcast(torch.autograd.Function):
    """Copies of tensors for two devices: on the first one the tensors themselves."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (*tensors, *[tensor.clone() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        half = len(grads) // 2
        return tuple([a + b for a, b in zip(grads[:half], grads[half:], strict=True)])


@pytest.fixture
def replicate(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], list[nn.Module]]:
    """`nn.parallel.replicate` for two devices, with copies on the CPU."""
    module = importlib.import_module("torch.nn.parallel.replicate")

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> Any:
        if not tensors:
            return [[], []]
        if detach:
            return [tensors, [tensor.detach().clone() for tensor in tensors]]
        copies = Broadcast.apply(*tensors)
        return [copies[: len(tensors)], copies[len(tensors) :]]

    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
    return lambda model: module.replicate(model, [0, 1])


@each_source
@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize(
    "make_norm", [nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c), nn.InstanceNorm2d]
)
def test_replicas_save_as_little_as_the_model(
    make_norm: Any, frozen: tuple[str, ...], replicate: Any
) -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, C, 3), make_norm(C), nn.SiLU()),
        *(nn.Conv2d(C, C, 3), make_norm(C), nn.ReLU(inplace=True), nn.Conv2d(C, 2, 1)),
    )
    for norm in (model[1], model[4]):
        for name, parameter in norm.named_parameters():
            parameter.requires_grad_(name not in frozen)
    twin, x = converted_twin(model), images(samples=4)
    expected = len(recomputed(twin(x)))
    assert expected >= 2
    found = []
    for m in (model, twin):
        m.zero_grad()
        outputs = [r(x[2 * i : 2 * i + 2]) for i, r in enumerate(replicate(m))]
        if m is twin:
            assert [len(recomputed(output)) for output in outputs] == [expected, expected]
        torch.cat(outputs).square().sum().backward()
        found.append({n: p.grad for n, p in m.named_parameters()})
    assert_same_step(found[1], found[0], 1e-4)


# Subclasses of Tensor without `__torch_dispatch__`.


class Wrapping(Tensor):
    """Wraps each result, as MONAI's MetaTensor does: an operation returns an alias."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(cls) if isinstance(result, Tensor) else result


class Rounding(Wrapping):
    """Also rounds the results of ReLU, so that it is another function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result.round() if func in (torch.relu_, F.relu) else result


class Subclass(Tensor):
    """Has PyTorch's own `__torch_function__`."""


class Residual(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, C, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(C, C, 3, padding=1), norm(), activation()) for _ in range(2)
        )
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.act(x + block(x))
        return torch.cat([x, self.first(x[:, :3])], 1)


@each_source
@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("norm", "activation"),
    [
        (lambda: nn.BatchNorm2d(C), nn.GELU),
        (lambda: nn.GroupNorm(2, C), partial(nn.SiLU, inplace=True)),
        (lambda: nn.InstanceNorm2d(C, affine=True), partial(nn.LeakyReLU, 0.1, inplace=True)),
        (nn.Identity, partial(nn.ReLU, inplace=True)),
    ],
    ids=["batch", "group", "instance", "none"],
)
def test_saving_does_not_depend_on_a_subclass(
    norm: Callable[[], nn.Module],
    activation: Callable[[], nn.Module],
    memory_format: torch.memory_format,
) -> None:
    model = Residual(norm, activation)
    twin, x = converted_twin(model), images().to(memory_format=memory_format)
    expected = inplace_ops.saved_bytes(twin, x)
    for cls in (Subclass, Wrapping):
        assert type(twin(x.as_subclass(cls))) is cls
        saved = inplace_ops.saved_bytes(twin, x.as_subclass(cls))
        assert saved == pytest.approx(expected, rel=0.001)
        assert_same_gradients(model, twin, x.as_subclass(cls))


def assert_same_gradients(model: nn.Module, twin: nn.Module, x: Tensor) -> None:
    """Compare outputs and gradients, for an argument that is not a plain tensor."""
    steps = []
    for m in (model, twin):
        y = m(x).as_subclass(Tensor)
        gradients = torch.autograd.grad(y.square().sum(), list(m.parameters()))
        steps.append({"y": y.detach(), **dict(enumerate(gradients))})
    assert_same_step(*({str(k): v for k, v in step.items()} for step in steps), 1e-4)


def test_subclass_that_changes_an_activation_keeps_its_results() -> None:
    model = nn.Sequential(nn.Conv2d(3, C, 3), nn.GroupNorm(2, C), nn.ReLU(inplace=True))
    twin, x = converted_twin(model), images().as_subclass(Rounding)
    assert torch.equal(twin(x), model(x))
    assert (model(x) == model(x).round()).all()
    assert_same_gradients(model, twin, x)


def test_parametrizations_can_be_added_and_removed_after_conversion() -> None:
    class Scaled(nn.Linear):
        pass

    twin, x = Scaled(8, 8), torch.randn(4, 8)
    inplace_ops.convert(twin)
    nn.utils.parametrizations.weight_norm(twin)
    twin(x).sum().backward()
    inplace_ops.revert(twin)
    twin(x).sum().backward()
    nn.utils.parametrize.remove_parametrizations(twin, "weight")
    twin(x).sum().backward()
    assert isinstance(twin, Scaled)
    inplace_ops.revert(twin)
    assert type(twin) is Scaled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch.ao.quantization
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_tools_that_check_module_types_work() -> None:
    """Conversion does not change the classes of a model's submodules."""
    model = nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.ReLU(), nn.Conv2d(C, 2, 1))
    twin, x = converted_twin(model), images()
    assert [type(m) for m in twin.children()] == [type(m) for m in model.children()]
    fused = torch.ao.quantization.fuse_modules_qat(copy.deepcopy(twin), [["0", "1", "2"]])
    assert isinstance(fused[0], torch.ao.nn.intrinsic.ConvBnReLU2d)
    fused(x).sum().backward()
    fused = torch.ao.quantization.fuse_modules(copy.deepcopy(twin).eval(), [["0", "1", "2"]])
    torch.testing.assert_close(fused(x), copy.deepcopy(twin).eval()(x), rtol=1e-4, atol=1e-4)
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(twin))
    assert type(synchronized[1]) is nn.SyncBatchNorm
    synchronized.eval()(x).sum().backward()
    traced = torch.fx.symbolic_trace(twin)
    traced(x).sum().backward()
    inplace_ops.convert(traced)
    assert len(recomputed(traced(x))) >= 1
    assert [node.op for node in traced.graph.nodes].count("call_module") == 4


@each_source
def test_modules_replaced_after_conversion_match_pytorch() -> None:
    model = blocks()
    twin, x = converted_twin(model), images()
    for m in (model, twin):
        m[0][1], m[1][1], m[1][2] = nn.GroupNorm(3, C), nn.Identity(), nn.LeakyReLU(0.3)
    assert_same_steps(model, twin, x)
    assert len(recomputed(twin(x))) >= 1


def test_forward_set_on_the_instance_still_runs() -> None:
    twin, x, calls = blocks(), images(), []
    original = twin.forward
    twin.forward = wrapped = lambda x: calls.append(1) or original(x)
    inplace_ops.convert(twin)
    assert len(recomputed(twin(x))) >= 2
    assert calls == [1]
    inplace_ops.revert(twin)
    assert vars(twin)["forward"] is wrapped
    assert replaced(twin(x)) == []


def test_conversion_and_its_reversal_leave_what_the_user_has_set() -> None:
    """Hooks of the user run in their order, with the user's own modules.

    The converted model itself has no hooks: `torch.cuda.make_graphed_callables` rejects those.
    """
    twin, x, seen = blocks(), images(), []
    names = {module: name for name, module in twin.named_modules()}
    for module in list(twin.modules())[1:]:
        module.register_forward_hook(lambda m, args, output: seen.append(names[m]))
    twin[0].note = "mine"
    twin(x)
    expected = list(seen)

    def state() -> list[Any]:
        return [(m, type(m), set(vars(m)), len(m._forward_hooks)) for m in twin.modules()]

    before, parameters, text = state(), list(twin.parameters()), repr(twin)
    inplace_ops.convert(twin)
    assert not twin._forward_hooks
    assert not twin._forward_pre_hooks
    assert [m for m, *_ in before] == list(twin.modules())
    assert all(a is b for a, b in zip(parameters, twin.parameters(), strict=True))
    assert not any(vars(parameter) for parameter in parameters)
    for _ in range(3):  # converted, and reverted twice
        seen.clear()
        twin(x).sum().backward()
        assert seen == expected
        inplace_ops.revert(twin)
    assert state() == before
    assert not any(m._forward_pre_hooks for m in twin.modules())
    assert repr(twin) == text
