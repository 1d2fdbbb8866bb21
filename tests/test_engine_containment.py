"""What the engine leaves alone: other models, other hooks, calls that were interrupted."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import (
    SOURCES,
    C,
    Program,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
    replaced,
    step_of,
)

import inplace_ops
from inplace_ops.recompute import engine, nodes
from inplace_ops.recompute.engine import running_engine

pytestmark = pytest.mark.usefixtures("source", "_small_tensors_too")


def blocks() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.SiLU()),
        nn.Sequential(nn.Conv2d(C, C, 3), nn.GroupNorm(2, C), nn.ReLU(inplace=True)),
        nn.Conv2d(C, 2, 1),
    )


class Waits(nn.Module):
    """Says that it runs, and ends when it may."""

    def __init__(self, runs: threading.Event, may_end: threading.Event) -> None:
        super().__init__()
        self.runs, self.may_end = runs, may_end

    def forward(self, x: Tensor) -> Tensor:
        self.runs.set()
        assert self.may_end.wait(60)
        return x


def assert_switched_off() -> None:
    """Nothing of this thread is looked at."""
    assert engine.running_engine() is None
    y = F.silu(nn.Conv2d(3, C, 1)(images()))
    output = nn.Conv2d(C, 2, 1)(y)
    assert replaced(output) == []
    assert nodes.is_python_function(type(y.grad_fn)) or "inplace_ops" not in y.grad_fn.metadata


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_error_in_any_module(error: type[BaseException]) -> None:
    """In its forward, before or behind it: the next call is as if nothing had been."""
    model = blocks()
    twin, x = converted_twin(model), images()
    step_of(twin, x)

    def fail(*_: Any) -> None:
        raise error

    for name, module in twin.named_modules():
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
        assert name is not None
    assert_same_steps(model, twin, x)


@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
@pytest.mark.filterwarnings("ignore:inplace_ops:UserWarning")
def test_an_error_inside_of_the_engine(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each node in turn: a Ctrl-C arrives, all else leaves tensors saved."""
    model = blocks()
    twin, x = converted_twin(model), images()
    see = engine.Engine._visit
    seen, failing_at = 0, -1

    def failing(self: engine.Engine, *args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == failing_at:
            raise error
        see(self, *args)

    monkeypatch.setattr(engine.Engine, "_visit", failing)
    for number in range(1, 8):  # so many nodes are in the table
        seen, failing_at = 0, number
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                twin(x)
        else:
            twin(x)
        assert_switched_off()
    failing_at = -1
    assert_same_steps(model, twin, x)


@pytest.mark.parametrize("part", ["tree_leaves", "take_note", "base_of", "record_of"])
def test_an_error_in_a_part_of_the_engine(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine is told of a module's input or output: it warns once."""

    def fail(*_: Any) -> None:
        raise LookupError(part)

    class Containers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks()

        def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return {"output": self.blocks(inputs["x"])}

    model, inputs = Containers(), {"x": images()}
    twin = converted_twin(model)
    monkeypatch.setattr(engine, part, fail)
    if part == "tree_leaves" and engine.USE_CREATION_HOOK:
        outputs = [twin(inputs), model(inputs)]
    else:
        with pytest.warns(UserWarning, match=f"failed: LookupError: {part}"):
            outputs = [twin(inputs)]
        outputs += [twin(inputs), model(inputs)]
    assert_switched_off()
    *gradients, expected = [
        torch.autograd.grad(o["output"].square().sum(), list(m.parameters()))
        for o, m in zip(outputs, [*[twin] * (len(outputs) - 1), model], strict=True)
    ]
    for actual in gradients:
        torch.testing.assert_close(actual, expected)


def test_a_function_of_the_same_name_as_ours() -> None:
    class RecomputeFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = blocks(), nn.Conv2d(2, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(RecomputeFunction.apply(self.blocks(x)))

    model, x = Model(), images()
    twin = converted_twin(model)
    with no_warnings():
        assert_same_steps(model, twin, x)


def test_an_output_whose_grad_fn_cannot_be_read() -> None:
    """One of several views, whose base was written to: PyTorch raises at its `grad_fn`."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            first, _ = y.unbind(0)
            self.y = y.mul_(2)
            return first

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.linear = Part(), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            first = self.part(x).detach()
            return self.linear(self.part.y) * first.mean()

    model, x = Model(), torch.randn(2, 8, 64)
    twin = converted_twin(model)
    with no_warnings():
        assert_same_steps(model, twin, x)


def test_an_argument_that_contains_itself() -> None:
    """What it holds is not looked at."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks()

        def forward(self, state: dict[str, Any]) -> Tensor:
            return self.blocks(state["x"])

    state: dict[str, Any] = {"x": images()}
    state["self"] = state
    model = Loop()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        inplace_ops.convert(twin)
        torch.testing.assert_close(twin(state), model(state))


def test_a_backward_that_is_interrupted() -> None:
    model = blocks()
    twin, x = converted_twin(model), images()
    for m in (model, twin):
        output = m(x)
        output.register_hook(lambda gradient: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            output.sum().backward()
    assert_same_steps(model, twin, x)


def test_two_models_in_turn_and_one_in_another() -> None:
    """Nested conversions enter once, with the outer one's settings."""
    inner = blocks()[0]
    model = nn.Sequential(inner, *blocks()[1:])
    twin, x = copy.deepcopy(model), images()
    inplace_ops.convert(twin[0], max_ops=1)
    alone = recomputed(twin(x))
    inplace_ops.convert(twin, max_ops=20)
    assert len(recomputed(twin(x))) > len(alone)
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


def test_a_model_that_calls_itself() -> None:
    class Twice(Program):
        def __init__(self) -> None:
            super().__init__(lambda m, z: m.conv(m.silu(z)))

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            y = super().forward(x)
            return y if depth == 0 else y + self(x * 0.5, depth - 1)

    model = Twice()
    assert_same_steps(model, converted_twin(model), images())


def test_a_model_that_runs_in_a_hook_of_its_own_backward() -> None:
    model = blocks().eval()
    twin, x = converted_twin(model), images()
    found = []
    for m in (model, twin):
        m.zero_grad()
        output = m(x)
        output.register_hook(lambda gradient, m=m: gradient + m(x).detach())
        output.sum().backward()
        found.append([p.grad for p in m.parameters()])
    for actual, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_another_models_threads(source: str) -> None:
    """While a converted model runs in one thread, another model runs in a second one."""
    entered, left = threading.Event(), threading.Event()

    twin = blocks()
    twin.append(Waits(entered, left))
    inplace_ops.convert(twin)
    other, found = blocks(), []
    thread = threading.Thread(target=lambda: found.append(twin(images())))
    thread.start()
    assert entered.wait(60)
    output = other(images())
    left.set()
    thread.join()
    assert replaced(output) == []
    assert len(recomputed(found[0])) >= 2


@pytest.mark.skipif("hook" not in SOURCES, reason="of torch 2.14")
@pytest.mark.parametrize("where", ["around", "inside", "around and inside", "closed after"])
def test_node_creation_hooks_of_the_user(where: str, source: str) -> None:
    """They see every node, before and after, and none of ours goes in their place."""
    seen: list[str] = []

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks()

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if where == "closed after":
                hook.__enter__()
                return self.blocks[1:](x)
            with hook if "inside" in where else contextlib.nullcontext():
                return self.blocks[1:](x)

    hook = torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name()))
    outer = torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name()))
    model = Inside()
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


@pytest.mark.skipif("hook" not in SOURCES, reason="of torch 2.14")
def test_a_node_creation_hook_that_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for ours at the end, and ours stays: no node is looked at twice."""
    hook = torch.autograd.graph.node_creation_hook(lambda node: None)

    def compute(m: Program, z: Tensor) -> Tensor:
        if m.step == 1:
            hook.__enter__()
        return m.conv(m.silu(z))

    model = Program(compute)
    twin, x = converted_twin(model), images()
    twin(x)
    seen: list[str] = []
    visit = engine.Engine.visit
    monkeypatch.setattr(
        engine.Engine, "visit", lambda self, node: (seen.append(node.name()), visit(self, node))
    )
    try:
        assert_same_steps(model, twin, x)
        seen.clear()
        twin(x)
    finally:
        hook.__exit__()
        hook.__exit__()
    assert seen.count("ConvolutionBackward0") == 2


@pytest.mark.parametrize("source", ["walk"], indirect=True)
def test_an_argument_of_another_threads_graph() -> None:
    """Its nodes have numbers as if the model had just made them, and stay as they are."""
    outer = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU())
    twin, x = converted_twin(Program(lambda m, z: m.conv(m.silu(z)))), images()
    found: list[Tensor] = []

    def elsewhere(number: int) -> None:
        while nodes.next_sequence_number() < number + 4:
            torch.ones(2, requires_grad=True) * 2
        found.append(nn.functional.silu(outer(x)))

    thread = threading.Thread(target=elsewhere, args=(nodes.next_sequence_number(),))
    thread.start()
    thread.join()
    output = twin(found[0])
    assert len(recomputed(output)) >= 1
    assert found[0].grad_fn._raw_saved_self.unpack_hook is None
    assert not any("inplace_ops" in str(key) for key in found[0].grad_fn.metadata)


def test_a_call_is_known_to_its_thread_alone() -> None:
    inside, seen = threading.Event(), threading.Event()

    twin = blocks()
    twin.append(Waits(inside, seen))
    inplace_ops.convert(twin)
    thread = threading.Thread(target=twin, args=(images(),))
    thread.start()
    assert inside.wait(60)
    elsewhere = running_engine()
    seen.set()
    thread.join()
    assert elsewhere is None


def test_foreign_graphs_in_an_attribute() -> None:
    """A graph that another thread has made, with numbers of its own, reached past the arguments."""

    class Holds(Program):
        def __init__(self) -> None:
            super().__init__(lambda m, z: m.conv(m.silu(z) + m.held))
            self.value: Any = None

    model = Holds()
    twin, x = converted_twin(model), images()
    outer = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), nn.BatchNorm2d(C), nn.SiLU())

    def elsewhere() -> None:
        for _ in range(200):
            torch.ones(2, requires_grad=True) * 2
        model.held = outer(x)
        twin.held = outer(x)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    output = twin(x)
    assert not any("inplace_ops" in str(key) for key in twin.held.grad_fn.metadata)
    assert twin.held.grad_fn._raw_saved_self.unpack_hook is None
    output.sum().backward()


# What tools do to a model.


def test_a_replica() -> None:
    """As DataParallel makes one for each device: it runs its own parameters."""
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


def test_a_direct_call_of_forward() -> None:
    """As Lightning calls it."""
    model = blocks()
    twin, x = converted_twin(model), images()
    assert len(recomputed(twin.forward(x))) == len(recomputed(twin(x))) >= 2
    called = inplace_ops.saved_bytes(lambda t: twin(t), x)
    assert inplace_ops.saved_bytes(twin.forward, x) == called


DUPLICATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m).module,
}


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_copies_are_converted_and_revert_by_themselves(duplicate: str) -> None:
    model = blocks()
    twin, x = converted_twin(model), images()
    other = DUPLICATES[duplicate](twin)
    assert type(other) is type(twin)
    assert list(other.state_dict()) == list(model.state_dict())
    assert len(recomputed(other(x))) == len(recomputed(twin(x))) >= 2
    if duplicate != "copy":
        assert_same_steps(model, other, x)
    inplace_ops.revert(other)
    assert type(other) is nn.Sequential
    assert replaced(other(x)) == []
    assert isinstance(twin, nn.Sequential)
    if duplicate != "copy":  # which shares its parts
        assert len(recomputed(twin(x))) >= 2


def test_a_pickle_of_a_class_that_reduces_itself() -> None:
    other = pickle.loads(pickle.dumps(converted_twin(ReducesItself())))
    assert type(other) is ReducesItself


class ReducesItself(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def __reduce__(self) -> Any:
        return ReducesItself, ()


def test_parametrizations_that_come_and_go() -> None:
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.ao.quantization's own
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_tools_that_go_by_types() -> None:
    """The classes of a model's parts stay what they are."""
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


def test_a_norm_that_is_replaced_after_the_conversion() -> None:
    model = blocks()
    twin, x = converted_twin(model), images()
    for m in (model, twin):
        torch.manual_seed(0)
        m[0][1] = nn.GroupNorm(3, C)
        m[1][1] = nn.Identity()
        m[1][2] = nn.LeakyReLU(0.3)
    assert_same_steps(model, twin, x)
    assert len(recomputed(twin(x))) >= 1


def test_an_instance_attribute_forward() -> None:
    """Set by hand before the conversion, as some wrappers do: it still runs."""
    model = blocks()
    twin, x, calls = copy.deepcopy(model), images(), []
    original = twin.forward

    def wrapped(x: Tensor) -> Tensor:
        calls.append(1)
        return original(x)

    twin.forward = wrapped
    inplace_ops.convert(twin)
    assert len(recomputed(twin(x))) >= 2
    assert calls == [1]
    assert_same_steps(model, twin, x)
    inplace_ops.revert(twin)
    assert vars(twin)["forward"] is wrapped
    assert replaced(twin(x)) == []


def test_the_model_itself_gets_no_hook() -> None:
    """`torch.cuda.make_graphed_callables` takes no module that has one."""
    model = blocks()
    inplace_ops.convert(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_hooks_and_attributes_of_the_user_stay() -> None:
    """Hooks are given the user's own modules, in the user's order."""
    twin, x = blocks(), images()
    names = {module: name for name, module in twin.named_modules()}
    seen: list[str] = []
    for module in twin.modules():
        module.register_forward_hook(lambda m, args, output: seen.append(names[m]))
    twin[0].note = "mine"
    modules, parameters = list(twin.modules()), list(twin.parameters())
    twin(x)
    before = list(seen)
    inplace_ops.convert(twin)
    assert all(a is b for a, b in zip(modules, twin.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, twin.parameters(), strict=True))
    assert not any(vars(parameter) for parameter in parameters)
    seen.clear()
    twin(x)
    assert seen == before
    assert twin[0].note == "mine"
    inplace_ops.revert(twin)
    seen.clear()
    twin(x)
    assert seen == before


def test_revert_leaves_nothing_behind() -> None:
    model = blocks()
    twin = copy.deepcopy(model)
    before = [set(vars(module)) for module in twin.modules()]
    inplace_ops.convert(twin)
    twin(images()).sum().backward()
    inplace_ops.revert(twin)
    assert [set(vars(module)) for module in twin.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    inplace_ops.revert(twin)
    assert repr(twin) == repr(model)
