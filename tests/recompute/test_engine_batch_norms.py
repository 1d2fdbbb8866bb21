"""Activations whose backward returns the gradients of the batch norm before them."""

from __future__ import annotations

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
    act: str, norm: str, channels_last: bool, device: torch.device
) -> None:
    x = IMAGES.to(memory_format=torch.channels_last) if channels_last else IMAGES
    is_view = "instance" in norm and act not in INPLACE  # z is a view, which is not overwritten
    model = program(convolution, ACTS[act], NORMS[norm]).to(device)
    assert_pytorchs(model, x.to(device), fused=0 if is_view else 1)


@each_act
def test_second_derivatives_are_pytorchs(act: str, device: torch.device) -> None:
    """The pass that creates a graph is PyTorch's own; the next pass runs the graph of forward."""
    model = program(convolution, ACTS[act]).to(device)
    assert_pytorchs(model, IMAGES.to(device), fused=1, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@both_ways
def test_other_dtypes(act: str, dtype: torch.dtype, device: torch.device) -> None:
    """PyTorch saves statistics in float32 if the parameters have float32."""
    model = program(convolution, ACTS[act], dtype=dtype).to(device)
    model.norm.float()
    tolerance = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    assert_pytorchs(model, images(dtype).to(device), fused=1, tolerance=tolerance)


@both_ways
def test_other_ranks(act: str) -> None:
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
def test_gradients_add_to_those_of_others(act: str, consumer: str, create_graph: bool) -> None:
    run, fused = CONSUMERS[consumer]
    assert_pytorchs(Body(run, ACTS[act]), IMAGES, fused, create_graph=create_graph)


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
    model = program(convolution, ACTS[act])
    for name in FROZEN[frozen]:
        model.get_parameter(name).requires_grad_(False)
    assert_pytorchs(model, IMAGES, fused=1, create_graph=create_graph)


@both_ways
def test_input_without_gradient_is_pytorchs(act: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), ACTS[act](), nn.Conv2d(3, 4, 3)).double()
    twin = converted_twin(model)
    with OpCounter() as counter:
        twin(IMAGES).sum().backward()
    model(IMAGES).sum().backward()
    assert fused_ops(counter) == 0
    actual, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (twin, model))
    assert_same_step(actual, expected, 1e-9)


@both_ways
def test_eval_mode_is_pytorchs(act: str) -> None:
    model = program(convolution, ACTS[act])
    model(IMAGES)
    assert_pytorchs(model.eval(), IMAGES, fused=0)


@both_ways
def test_statistics_in_16_bits_are_pytorchs(act: str) -> None:
    model = program(convolution, ACTS[act], dtype=torch.bfloat16)
    assert_pytorchs(model, images(torch.bfloat16), fused=0, tolerance=0.02)


class Watched(nn.Module):
    """A convolution, a container of a batch norm and an activation, and a convolution."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, C, 3), nn.Conv2d(C, 4, 3)
        self.norm, self.act = nn.BatchNorm2d(C), act()
        self.block = nn.Sequential(self.norm, self.act)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


class Hook:
    """A hook on a tensor, a node or a module, which changes gradients if it is on a tensor or node.

    It records the tensors that it gets.
    """

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.retained: list[Tensor] = []

    def of_tensor(self, grad: Tensor) -> Tensor:
        self.seen.append(grad.clone())
        return grad * 0.5

    def of_node(self, *given: Any) -> tuple[Tensor | None, ...]:
        self.of_module(*given)
        return tuple(None if g is None else g.clamp(min=0) for g in given[-2])

    def of_module(self, *given: Any) -> None:
        tensors = [value for values in given if isinstance(values, tuple) for value in values]
        self.seen += [tensor.detach().clone() for tensor in tensors if tensor is not None]

    def of_batch_norms(self, module: nn.Module, *given: Any) -> None:
        if isinstance(module, nn.BatchNorm2d):
            self.of_module(*given)

    def retain(self, tensor: Tensor) -> None:
        tensor.retain_grad()
        self.retained.append(tensor)


def void(_: Any) -> None:
    """Return None, as a forward hook does that leaves the output."""


def of_backward(part: str, kind: str) -> Callable[[Any, Hook], Any]:
    def register(m: Any, hook: Hook) -> Any:
        m.act.inplace = False  # PyTorch allows no activation in place after these hooks
        return getattr(m.get_submodule(part), kind)(hook.of_module)

    return register


# By what a hook is on: how it is registered, and whether the gradients of the batch norm and of the
# activation are computed together all the same; None: if z is the activation's output now.
WATCHERS: dict[str, tuple[Callable[[Any, Hook], Any], bool | None]] = {
    "z": (
        lambda m, h: m.norm.register_forward_hook(
            lambda _, a, z: void(z.register_hook(h.of_tensor))
        ),
        False,
    ),
    "z, after the activation": (
        lambda m, h: m.act.register_forward_hook(
            lambda _, a, y: void(a[0].register_hook(h.of_tensor))
        ),
        None,
    ),
    "the output": (
        lambda m, h: m.act.register_forward_hook(
            lambda _, a, y: void(y.register_hook(h.of_tensor))
        ),
        True,
    ),
    "the output's node": (
        lambda m, h: m.act.register_forward_hook(
            lambda _, a, y: void(y.grad_fn.register_hook(h.of_node))
        ),
        False,
    ),
    "retained z": (
        lambda m, h: m.norm.register_forward_hook(lambda _, a, z: h.retain(z)),
        False,
    ),
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
    model, hooks, found = Watched(ACTS[act]), [Hook(), Hook()], []
    for m, hook in zip((model, converted_twin(model)), hooks, strict=True):
        handle = register(m, hook)
        found.append(gradients(m, IMAGES))
        handle.remove()
    (expected, _), (actual, count) = found
    assert_same_step(actual, expected, 1e-9)
    assert count == (act in INPLACE if is_fused is None else is_fused)
    assert hooks[0].seen or hooks[0].retained or watcher == "forward"
    torch.testing.assert_close(hooks[1].seen, hooks[0].seen)
    grads = [[z.grad for z in hook.retained if z.grad is not None] for hook in hooks]
    torch.testing.assert_close(*grads)


def kept_output(m: Any, x: Tensor) -> Tensor:
    m.kept = m.norm(m.first(x))
    return m.conv(m.act(m.kept))


def test_gradient_of_a_kept_output() -> None:
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


def test_hook_of_an_output_that_was_detached() -> None:
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
def test_parameters_that_are_frozen_within_forward(act: str, name: str, for_norm: bool) -> None:
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


def test_hooks_of_parameters_run_once() -> None:
    model = converted_twin(program(convolution, ACTS["relu"]))
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


def test_tangent_of_the_gradient() -> None:
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
def test_input_that_is_recomputed(act: str, create_graph: bool, device: torch.device) -> None:
    model, x = Joined(ACTS[act]).double().to(device), IMAGES.to(device)
    assert_pytorchs(model, x, fused=1, create_graph=create_graph)
    (node,) = [n for n in nodes_of(converted_twin(model)(x)) if after_norm.is_after_norm(n)]
    assert node.saves_spec


@pytest.mark.usefixtures("without_products")
def test_recomputed_input_is_computed_once() -> None:
    """PyTorch's norm node reads it too, although it gets no gradient."""
    twin = converted_twin(Joined(ACTS["relu"]).double())
    twin(IMAGES)
    loss = twin(IMAGES).sum()
    with OpCounter() as counter:
        loss.backward()
    assert counter.ops["aten::cat"] == 1
