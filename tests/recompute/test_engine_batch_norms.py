"""Activations whose backward returns the gradients of the batch norm before them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from _support.hooks import Hooks, void
from _support.twins import (
    C,
    OpCounter,
    Parts,
    Program,
    assert_same_step,
    converted_twin,
    images,
    nodes_of,
)
from torch import Tensor, nn

from inplace_ops.recompute import after_norm

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

Act = Callable[[], nn.Module]
INPLACE: dict[str, Act] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.2, inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "mish": lambda: nn.Mish(inplace=True),
}
OUT_OF_PLACE: dict[str, Act] = {
    "relu out of place": nn.ReLU,
    "silu out of place": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
}
ACTS = INPLACE | OUT_OF_PLACE
each_act = pytest.mark.parametrize("act", ACTS)
both_ways = pytest.mark.parametrize("act", ["relu", "silu", "silu out of place"])


def fused_ops(counter: OpCounter) -> int:
    """Return how many ops have computed the gradients of a batch norm and its activation."""
    return sum(n for name, n in counter.ops.items() if name.endswith("_backward_batch_norm"))


def gradients(
    model: nn.Module, x: Tensor, create_graph: bool = False
) -> tuple[dict[str, Tensor | None], int]:
    """Return the gradients of x and of all parameters, and the number of fused ops."""
    x = x.detach().clone().requires_grad_()
    inputs = {"x": x, **dict(model.named_parameters())}
    inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    with OpCounter() as counter:
        loss = (model(x).double() + 1).square().mean()
        values = torch.autograd.grad(
            loss, [*inputs.values()], create_graph=create_graph, allow_unused=True
        )
        if create_graph:
            penalty = torch.stack([v.double().square().sum() for v in values if v is not None])
            values = torch.autograd.grad(penalty.sum(), [*inputs.values()], allow_unused=True)
    return dict(zip(inputs, values, strict=True)), fused_ops(counter)


def assert_pytorchs(
    model: nn.Module,
    x: Tensor,
    fused: int,
    tolerance: float = 1e-9,
    create_graph: bool = False,
) -> None:
    """Compare gradients with PyTorch's, and count those that are fused with a batch norm's.

    A graph of the model is needed again where create_graph is set, and is then fused.
    """
    twin = converted_twin(model)
    for _ in range(2):
        expected, _ = gradients(model, x, create_graph)
        actual, count = gradients(twin, x, create_graph)
        assert_same_step(actual, expected, tolerance)
        assert count == fused


class Case(NamedTuple):
    """A model with a batch norm before an activation.

    Attributes:
        make: Returns the model, given the activation.
        x: Its input.
        fused: How many gradients of a batch norm and its activation are computed together.
        tolerance: That of gradients.
    """

    make: Callable[[Act], nn.Module]
    x: Tensor
    fused: int = 1
    tolerance: float = 1e-9


def program(
    act: Act,
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    dtype: torch.dtype = torch.float64,
    parameters: torch.dtype | None = None,
) -> Program:
    model = Program(convolution, norm, act, dtype)
    model.norm.to(parameters or dtype)
    return model


def evaluated(act: Act) -> nn.Module:
    model = program(act)
    model(IMAGES)
    return model.eval()


def of_rank(norm: nn.Module, act: Act) -> nn.Module:
    return nn.Sequential(nn.Tanh(), norm, act(), nn.Tanh()).double()


def convolution(m: Any, y: Tensor) -> Tensor:
    return m.conv(y)


IMAGES = images(torch.float64)
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "not affine": lambda c: nn.BatchNorm2d(c, affine=False),
    "no statistics": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "instance": nn.InstanceNorm2d,
    "affine instance": lambda c: nn.InstanceNorm2d(c, affine=True),
}
CASES = {
    # PyTorch saves statistics in float32 if the parameters have float32.
    **{
        f"{dtype} and float32".removeprefix("torch."): Case(
            partial(program, dtype=dtype, parameters=torch.float32),
            images(dtype),
            tolerance=1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps,
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    "statistics in 16 bits": Case(
        partial(program, dtype=torch.bfloat16), images(torch.bfloat16), 0, 0.02
    ),
    "features": Case(partial(of_rank, nn.BatchNorm1d(7)), torch.randn(20, 7).double()),
    "sequences": Case(partial(of_rank, nn.BatchNorm1d(7)), torch.randn(5, 7, 11).double()),
    "volumes": Case(partial(of_rank, nn.BatchNorm3d(7)), torch.randn(3, 7, 4, 3, 5).double()),
    "eval mode": Case(evaluated, IMAGES, 0),
}


@each_act
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_gradients_are_pytorchs(
    act: str, norm: str, channels_last: bool, device: torch.device
) -> None:
    x = IMAGES.to(memory_format=torch.channels_last) if channels_last else IMAGES
    is_view = "instance" in norm and act not in INPLACE  # z is a view, which is not overwritten
    model = program(ACTS[act], NORMS[norm]).to(device)
    assert_pytorchs(model, x.to(device), fused=0 if is_view else 1)


@pytest.mark.parametrize("case", CASES)
@both_ways
def test_gradients_in_other_cases_are_pytorchs(act: str, case: str, device: torch.device) -> None:
    make, x, fused, tolerance = CASES[case]
    assert_pytorchs(make(ACTS[act]).to(device), x.to(device), fused, tolerance)


@each_act
def test_second_derivatives_are_pytorchs(act: str, device: torch.device) -> None:
    """The pass that creates a graph is PyTorch's own; the next pass runs the graph of forward."""
    model = program(ACTS[act]).to(device)
    assert_pytorchs(model, IMAGES.to(device), fused=1, create_graph=True)


# By name: what else reads the norm's output z, its input x or its parameters.
def reads_z(m: Any, x: Tensor) -> Tensor:
    z = m.norm(m.first(x))
    other = z * 1.5
    return m.conv(m.act(z)).sum() + (other.sum() + 3) ** 2


def reads_x(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    return m.conv(m.act(m.norm(h))).mean() + m.other(h.sin()).square().mean()


def reads_parameters(m: Any, x: Tensor) -> Tensor:
    y = m.conv(m.act(m.norm(m.first(x))))
    return y.mean() + (m.norm.weight * m.norm.bias).sum()


def runs_twice(m: Any, x: Tensor) -> Tensor:
    y = m.act(m.norm(m.first(x)))
    return m.conv(m.act(m.norm(m.other(y))))


def drops_y(m: Any, x: Tensor) -> Tensor:
    z = m.norm(m.first(x))
    other = (z * 1.5).sum()
    m.act(z)
    return other + m.conv(m.first(x).repeat(1, 1, 1, 1)).mean()


def body(run: Callable[[Any, Tensor], Tensor], act: Act) -> nn.Module:
    """Return a model of the modules of a `Program`, with a forward of its own."""
    layers = dict(program(act).named_children())
    return Parts(run, **layers, block=nn.Sequential(layers["norm"], layers["act"]))


CONSUMERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "z": (reads_z, 1),
    "x": (reads_x, 1),
    "parameters": (reads_parameters, 1),
    "twice": (runs_twice, 2),
    "unused": (drops_y, 0),
}


@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("consumer", CONSUMERS)
@both_ways
def test_gradients_add_to_those_of_others(act: str, consumer: str, create_graph: bool) -> None:
    run, fused = CONSUMERS[consumer]
    assert_pytorchs(body(run, ACTS[act]), IMAGES, fused, create_graph=create_graph)


FROZEN: dict[str, tuple[str, ...]] = {
    "weight": ("norm.weight",),
    "bias": ("norm.bias",),
    "both": ("norm.weight", "norm.bias"),
    "all but the norm": ("first.weight", "first.bias", "conv.weight", "conv.bias"),
}


@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("frozen", FROZEN)
@both_ways
def test_frozen_parameters(act: str, frozen: str, create_graph: bool) -> None:
    model = program(ACTS[act])
    for name in FROZEN[frozen]:
        model.get_parameter(name).requires_grad_(False)
    assert_pytorchs(model, IMAGES, fused=1, create_graph=create_graph)


def test_input_without_gradient_is_pytorchs() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.SiLU(), nn.Conv2d(3, 4, 3)).double()
    twin = converted_twin(model)
    with OpCounter() as counter:
        twin(IMAGES).sum().backward()
    model(IMAGES).sum().backward()
    assert fused_ops(counter) == 0
    actual, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (twin, model))
    assert_same_step(actual, expected, 1e-9)


class Watcher(Hooks):
    """Hooks on nodes and modules too, which record all tensors that they get."""

    def of_node(self, *given: Any) -> tuple[Tensor | None, ...]:
        self.of_module(*given)
        return tuple(None if g is None else g.clamp(min=0) for g in given[-2])

    def of_module(self, *given: Any) -> None:
        tensors = [value for values in given if isinstance(values, tuple) for value in values]
        self.seen += [("", tensor.detach().clone()) for tensor in tensors if tensor is not None]

    def of_batch_norms(self, module: nn.Module, *given: Any) -> None:
        if isinstance(module, nn.BatchNorm2d):
            self.of_module(*given)


def of_backward(part: str, kind: str) -> Callable[[Any, Watcher], Any]:
    def register(m: Any, hook: Watcher) -> Any:
        m.act.inplace = False  # PyTorch allows no activation in place after these hooks
        return getattr(m.get_submodule(part), kind)(hook.of_module)

    return register


# By what a hook is on: how it is registered, and whether the gradients of the batch norm and of the
# activation are computed together all the same; None: if z is the activation's output now.
WATCHERS: dict[str, tuple[Callable[[Any, Watcher], Any], bool | None]] = {
    "z": (lambda m, h: h.at("output of norm", m.norm), False),
    "z, after the activation": (
        lambda m, h: m.act.register_forward_hook(lambda _, a, y: void(h.on(a[0], "z"))),
        None,
    ),
    "the output": (lambda m, h: h.at("output of activation", m.act), True),
    "the output's node": (
        lambda m, h: m.act.register_forward_hook(
            lambda _, a, y: void(y.grad_fn.register_hook(h.of_node))
        ),
        False,
    ),
    "retained z": (lambda m, h: h.at("retained gradient of norm", m.norm), False),
    "retained z, after the activation": (
        lambda m, h: m.act.register_forward_hook(lambda _, a, y: h.retain(a[0])),
        None,
    ),
    "forward": (lambda m, h: m.norm.register_forward_hook(lambda *_: None), True),
    "the container": (lambda m, h: m.block.register_backward_hook(h.of_node), False),
    "all modules": (
        lambda m, h: nn.modules.module.register_module_backward_hook(h.of_batch_norms),
        False,
    ),
    **{
        f"{part}, {kind}": (of_backward(part, kind), False)
        for part in ("norm", "act")
        for kind in (
            *("register_full_backward_hook", "register_full_backward_pre_hook"),
            "register_backward_hook",
        )
    },
}


@pytest.mark.filterwarnings("ignore")  # PyTorch deprecates some hooks
@pytest.mark.parametrize("watcher", WATCHERS)
@both_ways
def test_hooks_get_the_gradient(act: str, watcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch remembers which kind of global hooks was registered last.
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)
    register, is_fused = WATCHERS[watcher]
    model = body(lambda m, x: m.conv(m.block(m.first(x))), ACTS[act])
    hooks, found = [Watcher(), Watcher()], []
    for m, hook in zip((model, converted_twin(model)), hooks, strict=True):
        handle = register(m, hook)
        found.append(gradients(m, IMAGES))
        if handle is not None:
            handle.remove()
    (expected, _), (actual, count) = found
    assert_same_step(actual, expected, 1e-9)
    assert count == (act in INPLACE if is_fused is None else is_fused)
    assert hooks[0].seen or hooks[0].retained or watcher == "forward"
    hooks[1].assert_saw(hooks[0], 1e-7)


def kept_output(m: Any, x: Tensor) -> Tensor:
    m.kept = m.norm(m.first(x))
    return m.conv(m.act(m.kept))


def of_two_parts(m: Any, x: Tensor) -> Tensor:
    """Compute a norm of a concatenation, which saves a spec instead of its input."""
    parts = m.first(x).sigmoid(), m.second(x).sigmoid()
    return m.conv(m.act(m.norm(torch.cat(parts, 1)))) + parts[0][:, :4, 1:-1, 1:-1]


def joined(act: Act) -> nn.Module:
    first, second = nn.Conv2d(3, C, 3), nn.Conv2d(3, C, 3)
    layers = {"first": first, "second": second, "conv": nn.Conv2d(2 * C, 4, 3)}
    return Parts(of_two_parts, **layers, norm=nn.BatchNorm2d(2 * C), act=act()).double()


def test_gradient_of_a_kept_output() -> None:
    """While code keeps the norm's output it may ask for its gradient; afterwards it cannot."""
    model = body(kept_output, nn.SiLU)
    twin = converted_twin(model)
    losses = [m(IMAGES).square().sum() for m in (model, twin)]
    of_kept = [
        torch.autograd.grad(loss, [m.kept, m.norm.weight], retain_graph=True)
        for loss, m in zip(losses, (model, twin), strict=True)
    ]
    torch.testing.assert_close(*of_kept)
    del twin.kept
    with OpCounter() as counter:
        (later,) = torch.autograd.grad(losses[1], twin.norm.weight)
    assert fused_ops(counter) == 1
    torch.testing.assert_close(later, of_kept[0][1])


def test_hook_of_an_output_that_was_detached() -> None:
    """z is a leaf then: its hook is not one of the norm's output any more."""

    def run(m: Any, x: Tensor) -> Tensor:
        z = m.norm(m.first(x))
        y = m.act(z)
        z.detach_().requires_grad_().register_hook(lambda grad: 3 * grad)
        m.kept = z
        return m.conv(y)

    assert_pytorchs(body(run, nn.ReLU), IMAGES, fused=0)


def toggled(name: str, for_norm: bool) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward in which a parameter requires grad for the norm, or for the activation."""

    def run(m: Any, x: Tensor) -> Tensor:
        parameter = m.norm.get_parameter(name)
        h = m.first(x)
        parameter.requires_grad_(for_norm)
        z = m.norm(h)
        parameter.requires_grad_(not for_norm)
        y = m.act(z)
        parameter.requires_grad_(True)
        return m.conv(y)

    return run


@pytest.mark.parametrize("for_norm", [True, False], ids=["norm", "activation"])
@pytest.mark.parametrize("name", ["weight", "bias"])
@both_ways
def test_parameters_that_are_frozen_within_forward(act: str, name: str, for_norm: bool) -> None:
    """Gradients go where the norm's node leads, whatever requires grad later."""
    model = body(toggled(name, for_norm), ACTS[act])
    twin = converted_twin(model)
    assert_same_step(gradients(twin, IMAGES)[0], gradients(model, IMAGES)[0], 1e-9)


def test_compiled_autograd() -> None:
    """It runs backward with another ctx, and adds the gradients of all consumers of a tensor."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    model = program(ACTS["silu"])
    found = []
    for m in (model, converted_twin(model)):
        loss = m(IMAGES).square().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        found.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    assert_same_step(found[1], found[0], 1e-9)


def test_hooks_of_parameters_run_once() -> None:
    model = converted_twin(program(ACTS["relu"]))
    calls: list[Tensor] = []
    model.norm.weight.register_hook(lambda grad: calls.append(grad))
    model.norm.bias.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
    with OpCounter() as counter:
        model(IMAGES).sum().backward()
    assert fused_ops(counter) == 1
    assert len(calls) == 2


@both_ways
def test_parts_of_a_backward(act: str) -> None:
    """Gradients of some inputs alone, twice over one graph, and of two losses one by one."""
    model = program(ACTS[act])
    twin = converted_twin(model)
    found: list[list[Tensor]] = []
    for m in (model, twin):
        x = IMAGES.clone().requires_grad_()
        y = m(x)
        losses = y.square().sum(), y[:, :1].sum()
        values: list[Tensor] = []
        for loss in losses:
            for inputs in ([x], [m.norm.weight], [m.norm.bias], [m.first.weight, m.norm.bias]):
                values += torch.autograd.grad(loss, inputs, retain_graph=True)
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        assert x.grad is not None
        found.append([*values, x.grad])
    torch.testing.assert_close(*found)


def test_tangent_of_the_gradient() -> None:
    """Forward-mode AD through backward, which is linear in the gradient.

    PyTorch's backward of SiLU does not support it.
    """
    model = program(ACTS["relu"])
    twin = converted_twin(model)
    found = []
    for m in (model, twin):
        y = m(IMAGES)
        with torch.autograd.forward_ad.dual_level():
            grad = torch.autograd.forward_ad.make_dual(torch.ones_like(y), y.detach())
            results = torch.autograd.grad(y, [m.norm.weight, m.norm.bias], grad)
            found += [torch.autograd.forward_ad.unpack_dual(r).tangent for r in results]
    torch.testing.assert_close(found[:2], found[2:])


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "second"])
@both_ways
def test_input_that_is_recomputed(act: str, create_graph: bool, device: torch.device) -> None:
    model, x = joined(ACTS[act]).to(device), IMAGES.to(device)
    assert_pytorchs(model, x, fused=1, create_graph=create_graph)
    (node,) = [n for n in nodes_of(converted_twin(model)(x)) if after_norm.is_after_norm(n)]
    assert node.saves_spec


@pytest.mark.usefixtures("without_products")
def test_recomputed_input_is_computed_once() -> None:
    """PyTorch's norm node reads it too, although it gets no gradient."""
    twin = converted_twin(joined(ACTS["relu"]))
    twin(IMAGES)
    loss = twin(IMAGES).sum()
    with OpCounter() as counter:
        loss.backward()
    assert counter.ops["aten::cat"] == 1
