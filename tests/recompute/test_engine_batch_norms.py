"""Activations whose backward returns the gradients of the batch norm before them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _support.twins import (
    C,
    OpCounter,
    Program,
    assert_same_step,
    converted_twin,
    images,
    no_warnings,
    nodes_of,
    step_of,
)
from torch import Tensor, nn

import inplace_ops
from inplace_ops.recompute import after_norm, bypass

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


def program(
    compute: Callable[[Any, Tensor], Any],
    act: Act,
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    dtype: torch.dtype = torch.float64,
) -> Program:
    return Program(compute, norm, act, dtype)


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


@each_act
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_gradients_are_pytorchs(
    act: str, norm: str, channels_last: bool, source: str, device: torch.device
) -> None:
    x = IMAGES.to(memory_format=torch.channels_last) if channels_last else IMAGES
    is_view = "instance" in norm and act not in INPLACE  # z is a view, which is not overwritten
    model = program(convolution, ACTS[act], NORMS[norm]).to(device)
    assert_pytorchs(model, x.to(device), fused=0 if is_view else 1)


@each_act
def test_second_derivatives_are_pytorchs(act: str, source: str, device: torch.device) -> None:
    """The pass that creates a graph is PyTorch's own; the next pass runs the graph of forward."""
    model = program(convolution, ACTS[act]).to(device)
    assert_pytorchs(model, IMAGES.to(device), fused=1, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@both_ways
def test_other_dtypes(act: str, dtype: torch.dtype, source: str, device: torch.device) -> None:
    """PyTorch saves statistics in float32 if the parameters have float32."""
    model = program(convolution, ACTS[act], dtype=dtype).to(device)
    model.norm.float()
    tolerance = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    assert_pytorchs(model, images(dtype).to(device), fused=1, tolerance=tolerance)


@both_ways
def test_other_ranks(act: str, source: str) -> None:
    for norm, shape in (
        (nn.BatchNorm1d, (20, 7)),
        (nn.BatchNorm1d, (5, 7, 11)),
        (nn.BatchNorm3d, (3, 7, 4, 3, 5)),
    ):
        model = nn.Sequential(nn.Tanh(), norm(7), ACTS[act](), nn.Tanh()).double()
        assert_pytorchs(model, torch.randn(shape, dtype=torch.float64), fused=1)


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


class Body(nn.Module):
    """The modules of a `Program`, with a forward of its own."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], act: Act) -> None:
        super().__init__()
        parts = program(convolution, act)
        self.first, self.norm, self.act = parts.first, parts.norm, parts.act
        self.conv, self.other = parts.conv, parts.other
        self.double()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


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
def test_gradients_add_to_those_of_others(
    act: str, consumer: str, create_graph: bool, source: str
) -> None:
    run, fused = CONSUMERS[consumer]
    assert_pytorchs(Body(run, ACTS[act]), IMAGES, fused, create_graph=create_graph)


FROZEN: dict[str, tuple[tuple[str, ...], int]] = {
    "weight": (("norm.weight",), 1),
    "bias": (("norm.bias",), 1),
    "both": (("norm.weight", "norm.bias"), 1),
    "all but the norm": (("first.weight", "first.bias", "conv.weight", "conv.bias"), 1),
}


@pytest.mark.parametrize("frozen", FROZEN)
@both_ways
def test_frozen_parameters(act: str, frozen: str, source: str) -> None:
    names, fused = FROZEN[frozen]
    model = program(convolution, ACTS[act])
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    assert_pytorchs(model, IMAGES, fused)


@both_ways
def test_input_without_gradient_is_pytorchs(act: str, source: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), ACTS[act](), nn.Conv2d(3, 4, 3)).double()
    twin = converted_twin(model)
    with OpCounter() as counter:
        twin(IMAGES).sum().backward()
    model(IMAGES).sum().backward()
    assert fused_ops(counter) == 0
    actual, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (twin, model))
    assert_same_step(actual, expected, 1e-9)


@both_ways
def test_eval_mode_is_pytorchs(act: str, source: str) -> None:
    model = program(convolution, ACTS[act])
    model(IMAGES)
    assert_pytorchs(model.eval(), IMAGES, fused=0)


@both_ways
def test_statistics_in_16_bits_are_pytorchs(act: str, source: str) -> None:
    model = program(convolution, ACTS[act], dtype=torch.bfloat16)
    assert_pytorchs(model, images(torch.bfloat16), fused=0, tolerance=0.02)


class Observer:
    """Sees gradients, and may change them."""

    def __init__(self, factor: float | None = None) -> None:
        self.seen: list[Tensor] = []
        self.factor = factor

    def __call__(self, grad: Tensor) -> Tensor | None:
        self.seen.append(grad.clone())
        return None if self.factor is None else grad * self.factor


def hook_before(z: Tensor, act: nn.Module, observer: Observer) -> Tensor:
    z.register_hook(observer)
    return act(z)


def hook_after(z: Tensor, act: nn.Module, observer: Observer) -> Tensor:
    y = act(z)
    z.register_hook(observer)
    return y


def hook_on_output(z: Tensor, act: nn.Module, observer: Observer) -> Tensor:
    y = act(z)
    y.register_hook(observer)
    return y


OBSERVED: dict[str, tuple[Callable[[Tensor, nn.Module, Observer], Tensor], dict[str, int]]] = {
    "before": (hook_before, {"relu": 0, "silu": 0, "silu out of place": 0}),
    # In place, z is the activation's output now.
    "after": (hook_after, {"relu": 1, "silu": 1, "silu out of place": 0}),
    "output": (hook_on_output, {"relu": 1, "silu": 1, "silu out of place": 1}),
}


@pytest.mark.parametrize("factor", [None, 0.5], ids=["sees", "changes"])
@pytest.mark.parametrize("observed", OBSERVED)
@both_ways
def test_hooks_get_the_gradient(act: str, observed: str, factor: float | None, source: str) -> None:
    observe, fused = OBSERVED[observed]
    observers = [Observer(factor) for _ in range(2)]
    found = []
    model = Body(lambda m, x: None, ACTS[act])  # type: ignore[arg-type, return-value]
    for m, observer in zip((model, copy.deepcopy(model)), observers, strict=True):
        m.run = lambda m, x, o=observer: m.conv(observe(m.norm(m.first(x)), m.act, o))
        if observer is observers[1]:
            inplace_ops.convert(m)
        found.append(gradients(m, IMAGES))
    (expected, _), (actual, count) = found
    assert_same_step(actual, expected, 1e-9)
    assert count == fused[act]
    (seen,), (other,) = (observer.seen for observer in observers)
    torch.testing.assert_close(seen, other)


@both_ways
@pytest.mark.parametrize("when", ["before", "after"])
def test_retained_gradients(act: str, when: str, source: str) -> None:
    """`retain_grad` of z, before the activation or after it, where z may be its output."""
    kept: list[Tensor] = []

    def run(m: Any, x: Tensor) -> Tensor:
        z = m.norm(m.first(x))
        if when == "before":
            z.retain_grad()
        y = m.act(z)
        if when == "after":
            z.retain_grad()
        kept.append(z)
        return m.conv(y)

    model = Body(run, ACTS[act])
    gradients(model, IMAGES)
    twin = converted_twin(model)
    gradients(twin, IMAGES)
    first, second = (z.grad for z in kept)
    assert (first is None) == (second is None)
    if first is not None:
        torch.testing.assert_close(first, second)


def kept_output(m: Any, x: Tensor) -> Tensor:
    m.kept = m.norm(m.first(x))
    return m.conv(m.act(m.kept))


def test_gradient_of_a_kept_output(source: str) -> None:
    """While code keeps the norm's output it may ask for its gradient; afterwards it cannot."""
    model = Body(kept_output, nn.SiLU)
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


HOOKS: dict[str, str] = {
    "forward": "register_forward_hook",
    "backward": "register_full_backward_hook",
    "before backward": "register_full_backward_pre_hook",
    "deprecated": "register_backward_hook",
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("part", ["norm", "act"])
@both_ways
def test_hooks_of_modules(act: str, part: str, kind: str, source: str) -> None:
    """A module's backward hooks get the gradients of its output and input."""
    model = program(convolution, ACTS[act])
    twin = converted_twin(model)
    found = []
    for m in (model, twin):
        seen: list[Tensor] = []

        def hook(module: nn.Module, *given: Any, seen: list[Tensor] = seen) -> None:
            values = [value for values in given for value in values]
            seen.extend(value.detach().clone() for value in values if isinstance(value, Tensor))

        if kind in ("backward", "before backward") and hasattr(m.act, "inplace"):
            m.act.inplace = False  # PyTorch allows no activation in place after these hooks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(m.get_submodule(part), HOOKS[kind])(hook)
            found.append((gradients(m, IMAGES), seen))
    ((expected, _), first), ((actual, count), second) = found
    assert_same_step(actual, expected, 1e-9)
    assert count == (1 if kind == "forward" else 0)
    torch.testing.assert_close(first, second)


@both_ways
def test_deprecated_hooks_of_all_modules(
    act: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch remembers which kind of global hooks was registered last.
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)
    found = []
    model = program(convolution, ACTS[act])
    for m in (model, converted_twin(model)):
        seen: list[Tensor] = []

        def hook(module: nn.Module, *given: Any, seen: list[Tensor] = seen) -> None:
            if isinstance(module, (nn.BatchNorm2d, type(model.act))):
                seen.extend(g.clone() for values in given for g in values if g is not None)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with nn.modules.module.register_module_backward_hook(hook):
                found.append((gradients(m, IMAGES), seen))
    ((expected, _), first), ((actual, count), second) = found
    assert_same_step(actual, expected, 1e-9)
    assert count == 0
    torch.testing.assert_close(first, second)


class Clamps:
    """A hook of a node: clamps the gradients that its backward returns."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, *given: Any) -> tuple[Tensor | None, ...]:
        of_inputs, _ = given[-2:]
        self.seen.append(of_inputs[0].clone())
        return tuple(None if g is None else g.clamp(min=0) for g in of_inputs)


@pytest.mark.parametrize("where", ["node", "container"])
@both_ways
def test_hooks_of_the_activations_node(act: str, where: str, source: str) -> None:
    """Guided backpropagation, by a hook on the node that a module's output has."""
    model = nn.Sequential(
        nn.Conv2d(3, C, 3), nn.Sequential(nn.BatchNorm2d(C), ACTS[act]()), nn.Conv2d(C, 4, 3)
    ).double()
    found = []
    for m in (model, converted_twin(model)):
        hook = Clamps()
        if where == "container":
            m[1].register_backward_hook(hook)
        else:
            m[1].register_forward_hook(lambda _, args, y, hook=hook: register(y, hook))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append((gradients(m, IMAGES), hook.seen))
    ((expected, _), first), ((actual, count), second) = found
    assert_same_step(actual, expected, 1e-9)
    assert count == 0
    torch.testing.assert_close(first, second)


def register(y: Tensor, hook: Callable[..., Any]) -> None:
    assert y.grad_fn is not None
    y.grad_fn.register_hook(hook)


def test_hook_of_an_output_that_was_detached(source: str) -> None:
    """z is a leaf then: its hook is not one of the norm's output any more."""

    def run(m: Any, x: Tensor) -> Tensor:
        z = m.norm(m.first(x))
        y = m.act(z)
        z.detach_().requires_grad_().register_hook(lambda grad: 3 * grad)
        m.kept = z
        return m.conv(y)

    assert_pytorchs(Body(run, nn.ReLU), IMAGES, fused=0)


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
def test_parameters_that_are_frozen_within_forward(
    act: str, name: str, for_norm: bool, source: str
) -> None:
    """Gradients go where the norm's node leads, whatever requires grad later."""
    model = Body(toggled(name, for_norm), ACTS[act])
    twin = converted_twin(model)
    assert_same_step(gradients(twin, IMAGES)[0], gradients(model, IMAGES)[0], 1e-9)


@both_ways
def test_compiled_autograd(act: str) -> None:
    """It runs backward with another ctx, and adds the gradients of all consumers of a tensor."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    model = program(convolution, ACTS[act])
    found = []
    for m in (model, converted_twin(model)):
        loss = m(IMAGES).square().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        found.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
    assert_same_step(found[1], found[0], 1e-9)


def test_hooks_of_parameters_run_once(source: str) -> None:
    model = converted_twin(program(convolution, ACTS["relu"]))
    calls: list[Tensor] = []
    model.norm.weight.register_hook(lambda grad: calls.append(grad))
    model.norm.bias.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
    with OpCounter() as counter:
        model(IMAGES).sum().backward()
    assert fused_ops(counter) == 1
    assert len(calls) == 2


@both_ways
def test_modified_parameters(act: str, source: str) -> None:
    """A write to the weight between forward and backward raises; the bias is not read again."""
    model = program(convolution, ACTS[act])
    twin = converted_twin(model)
    for m in (model, twin):
        loss = m(IMAGES).sum()
        with torch.no_grad():
            m.norm.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        m.zero_grad()
        loss = m(IMAGES).square().sum()
        with torch.no_grad():
            m.norm.bias.add_(1)
        loss.backward()
    actual, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (twin, model))
    assert_same_step(actual, expected, 1e-9)


@pytest.mark.usefixtures("without_products")
def test_modified_input_raises(source: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        y = m.conv(m.act(m.norm(h)))
        with torch.no_grad():
            h.mul_(2)
        return y

    twin = converted_twin(Body(run, ACTS["relu"]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twin(IMAGES).sum().backward()


@both_ways
def test_parts_of_a_backward(act: str, source: str) -> None:
    """Gradients of some inputs alone, twice over one graph, and of two losses one by one."""
    model = program(convolution, ACTS[act])
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


@both_ways
def test_batched_gradients(act: str, source: str) -> None:
    model = program(convolution, ACTS[act])
    twin = converted_twin(model)
    found = []
    for m in (model, twin):
        y = m(IMAGES)
        grads = torch.stack([torch.full_like(y, i + 1.0) for i in range(3)])
        inputs = [m.first.weight, m.norm.weight, m.norm.bias]
        found.append(torch.autograd.grad(y, inputs, grads, is_grads_batched=True))
    torch.testing.assert_close(*found)


def test_tangent_of_the_gradient(source: str) -> None:
    """Forward-mode AD through backward, which is linear in the gradient.

    PyTorch's backward of SiLU does not support it.
    """
    model = program(convolution, ACTS["relu"])
    twin = converted_twin(model)
    found = []
    for m in (model, twin):
        y = m(IMAGES)
        with torch.autograd.forward_ad.dual_level():
            grad = torch.autograd.forward_ad.make_dual(torch.ones_like(y), y.detach())
            results = torch.autograd.grad(y, [m.norm.weight, m.norm.bias], grad)
            found += [torch.autograd.forward_ad.unpack_dual(r).tangent for r in results]
    torch.testing.assert_close(found[:2], found[2:])


class Joined(nn.Module):
    """A norm of a concatenation: it saves a spec instead of its input."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, C, 3), nn.Conv2d(3, C, 3)
        self.norm, self.act, self.conv = nn.BatchNorm2d(2 * C), act(), nn.Conv2d(2 * C, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(x).sigmoid(), self.second(x).sigmoid()
        return self.conv(self.act(self.norm(torch.cat(parts, 1)))) + parts[0][:, :4, 1:-1, 1:-1]


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "second"])
@both_ways
def test_input_that_is_recomputed(
    act: str, create_graph: bool, source: str, device: torch.device
) -> None:
    model, x = Joined(ACTS[act]).double().to(device), IMAGES.to(device)
    assert_pytorchs(model, x, fused=1, create_graph=create_graph)
    (node,) = [n for n in nodes_of(converted_twin(model)(x)) if after_norm.is_after_norm(n)]
    assert node.saves_spec


@pytest.mark.usefixtures("without_products")
def test_recomputed_input_is_computed_once(source: str) -> None:
    """PyTorch's norm node reads it too, although it gets no gradient."""
    twin = converted_twin(Joined(ACTS["relu"]).double())
    twin(IMAGES)
    loss = twin(IMAGES).sum()
    with OpCounter() as counter:
        loss.backward()
    assert counter.ops["aten::cat"] == 1


def test_no_warning_and_equal_steps(source: str) -> None:
    """Gradients accumulate, buffers advance, and an optimizer's steps stay those of PyTorch."""
    model = nn.Sequential(
        *(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.ReLU(inplace=True)),
        *(nn.Conv2d(C, C, 3), nn.BatchNorm2d(C), nn.SiLU()),
        *(nn.Flatten(), nn.Linear(C * 16, 5)),
    ).double()
    twin = converted_twin(model)
    with no_warnings("inplace_ops"):
        for _ in range(4):
            actual, expected = step_of(twin, IMAGES), step_of(model, IMAGES)
            assert_same_step(actual, expected, 1e-8)
            for m in (model, twin):
                with torch.no_grad():
                    for p in m.parameters():
                        assert p.grad is not None
                        p -= 0.01 * p.grad


@pytest.fixture
def _wrong_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    original = bypass.gradients

    def wrong(ctx: Any, grad: Tensor) -> list[Any]:
        x, weight, bias = original(ctx, grad)
        assert x is not None
        assert bias is not None
        return [x + bias.view(-1, *(1 for _ in x.shape[2:])) / x.numel(), weight, bias]

    monkeypatch.setattr(bypass, "gradients", wrong)


@pytest.mark.usefixtures("_wrong_correction")
def test_these_tests_can_fail(source: str) -> None:
    with pytest.raises(AssertionError):
        assert_pytorchs(program(convolution, ACTS["relu"]), IMAGES, fused=1)
