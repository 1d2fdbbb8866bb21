"""Hooks on tensors and modules see in a converted model what they see in PyTorch.

A hook scales the gradient that it gets, so that a lost hook changes gradients.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _support.hooks import Hooks, void
from _support.twins import C, Parts, assert_same_step, converted_twin, images, step_of
from torch import Tensor, nn

import inplace_ops

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(C),
    "group": lambda: nn.GroupNorm(2, C),
    "instance": lambda: nn.InstanceNorm2d(C, affine=True),
    "instance without parameters": lambda: nn.InstanceNorm2d(C),
}
IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.1, inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
}
OUT_OF_PLACE: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class Block(nn.Module):
    """A convolution, a norm and an activation, as in `sequential`."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, C, 3), norm, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))

    def __getitem__(self, index: int) -> nn.Module:
        return (self.conv, self.norm, self.act)[index]


def sequential(norm: nn.Module, activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, C, 3), norm, activation)


def assert_same_as_pytorch(
    model: nn.Module, places: dict[str, Callable[[Any], nn.Module]], on_output: bool = False
) -> None:
    """Train a model and its converted twin with hooks at places, and compare all that they see.

    Args:
        model: The model.
        places: By what a hook is on: returns the module that registers it.
        on_output: Whether the training code registers a hook on the model's output too.
    """
    x = images()
    steps, hooks = [], []
    for m in (model, converted_twin(model)):
        seen = Hooks()
        for place, module_of in places.items():
            seen.at(place, module_of(m))

        def loss(output: Tensor, seen: Hooks = seen) -> Tensor:
            if on_output:
                seen.on(output, "own output")
            return output.square().sum()

        hooks.append(seen)
        steps.append(step_of(m, x, loss))
    hooks[1].assert_saw(hooks[0])
    assert_same_step(steps[1], steps[0], 1e-4)


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "output of norm": lambda m: m[1],
    "removed hook of norm": lambda m: m[1],
    "retained gradient of norm": lambda m: m[1],
    "input of activation": lambda m: m[2],
    "output of activation": lambda m: m[2],
    "retained gradient of activation": lambda m: m[2],
    "output of block": lambda m: m,
}


def combinations(norm: str, activation: str) -> Iterator[tuple[str, ...]]:
    """Yield sets of places, pairs in both orders. Triples where SiLU overwrites a view."""
    for size in range(4 if (norm, activation) == ("instance", "silu") else 3):
        for places in itertools.combinations(PLACES, size):
            yield places
            if size == 2:
                yield places[::-1]


@pytest.mark.parametrize(
    ("norm", "activation", "block"),
    [
        *(("instance", "relu", Block), ("instance", "leaky_relu", sequential)),
        *(("instance", "silu", Block), ("instance", "hardswish", sequential)),
        *(("instance without parameters", "relu", sequential), ("batch", "silu", sequential)),
        ("group", "relu", Block),
    ],
)
def test_hooks_around_an_in_place_activation(norm: str, activation: str, block: Any) -> None:
    """An instance norm returns a view, which the activation overwrites."""
    for places in combinations(norm, activation):
        model = block(NORMS[norm](), IN_PLACE[activation]())
        chosen = {place: PLACES[place] for place in places}
        assert_same_as_pytorch(model, chosen, on_output=len(places) % 2 == 0)


@pytest.mark.parametrize(
    ("norm", "activation"), [("batch", "silu"), ("batch", "relu"), ("instance", "gelu")]
)
def test_hooks_around_an_activation(norm: str, activation: str) -> None:
    for places in combinations(norm, activation):
        model = sequential(NORMS[norm](), OUT_OF_PLACE[activation]())
        assert_same_as_pytorch(model, {place: PLACES[place] for place in places}, on_output=True)


# A hook on a norm's output z sees all of z's gradient, whichever operations read z, and whenever
# the hook comes.

CONSUMERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "silu": lambda m, z: m.silu(z),
    "gelu": lambda m, z: m.gelu(z),
    "relu": lambda m, z: m.relu(z),
    "silu again": lambda m, z: m.silu(z),
    "function": lambda m, z: torch.tanh(z),
}


class Consumers(nn.Module):
    """Several consumers of a norm's output z, and actions on z between them."""

    def __init__(self, norm: nn.Module, steps: tuple[str, ...], hooks: Hooks) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, C, 3), norm
        self.silu, self.gelu, self.relu = nn.SiLU(), nn.GELU(), nn.ReLU()
        self.steps, self.hooks = steps, hooks

    def forward(self, x: Tensor) -> Tensor:
        z, hooks = self.norm(self.conv(x)), self.hooks
        actions = {
            "hook": lambda: hooks.on(z, "z", 3.0),
            "removed hook": lambda: hooks.on(z, "removed").remove(),
            "retain": lambda: hooks.retain(z),
        }
        results: list[Tensor] = []
        for step in self.steps:
            actions[step]() if step in actions else results.append(CONSUMERS[step](self, z))
        return torch.stack(results).prod(0)


def programs_of_consumers() -> Iterator[tuple[str, ...]]:
    """Yield one to three consumers with one or two actions on z, in all places."""
    for consumers in [
        ("silu",),
        ("silu", "gelu"),
        ("silu", "silu again"),
        ("relu", "silu"),
        ("function", "gelu"),
        ("silu", "gelu", "relu"),
    ]:
        for actions in [("hook",), ("removed hook",), ("hook", "removed hook"), ("retain",)]:
            for places in itertools.product(range(len(consumers) + 1), repeat=len(actions)):
                steps = list(consumers)
                for place, action in zip(places, actions, strict=True):
                    steps.insert(place, action)
                yield tuple(steps)


def twin_with_hooks(model: Any) -> Any:
    """Return a converted copy of a model, with hooks of its own."""
    twin = copy.deepcopy(model)
    twin.hooks = Hooks()
    inplace_ops.convert(twin, max_ops=20)
    return twin


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_hook_sees_the_gradient_of_every_consumer(norm: str) -> None:
    x = images()
    for steps in programs_of_consumers():
        model = Consumers(NORMS[norm](), steps, Hooks())
        twin = twin_with_hooks(model)
        expected, actual = step_of(model, x), step_of(twin, x)
        assert model.hooks.seen or "hook" not in steps
        twin.hooks.assert_saw(model.hooks)
        assert_same_step(actual, expected, 1e-4)


def of_an_alias(m: Any, x: Tensor) -> Tensor:
    z = m.conv(x)
    z = z.view_as(z)
    m.hooks.on(z, "alias", 0.5)
    return m.act(z)


def of_an_instance_norm(m: Any, x: Tensor) -> Tensor:
    """The activation overwrites the view that the norm returns."""
    z = m.norm(m.conv(x))
    m.hooks.on(z, "z", 0.5)
    return m.act(z)


@pytest.mark.parametrize("compute", [of_an_alias, of_an_instance_norm])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.SiLU, nn.Mish, nn.Hardswish])
def test_hook_on_an_overwritten_view_sees_second_derivatives(
    act: Callable[..., nn.Module], compute: Callable[[Any, Tensor], Tensor]
) -> None:
    layers = {"conv": nn.Conv2d(3, C, 3), "norm": nn.InstanceNorm2d(C), "act": act(inplace=True)}
    model = Parts(compute, **layers, hooks=Hooks()).double()
    twin, x, found = twin_with_hooks(model), images().double(), []
    for m in (model, twin):
        (gradient,) = torch.autograd.grad(m(x).square().sum(), m.conv.weight, create_graph=True)
        gradient.square().sum().backward()
        found.append(m.conv.weight.grad)
    twin.hooks.assert_saw(model.hooks)
    torch.testing.assert_close(found[1], found[0])


def test_view_with_another_sign_is_not_an_alias() -> None:
    model = Parts(
        lambda m, x: m.act(torch._neg_view(m.conv(x))),
        conv=nn.Conv2d(3, C, 3),
        act=nn.ReLU(inplace=True),
    )
    assert_same_as_pytorch(model, {})


# Full backward hooks: a module gets and returns aliases.


def with_backward_hooks(norm: str, activation: str) -> nn.Sequential:
    layers = [
        [nn.Conv2d(width, C, 3, padding=1), NORMS[norm](), OUT_OF_PLACE[activation]()]
        for width in (3, C, C)
    ]
    return nn.Sequential(*itertools.chain(*layers), nn.Conv2d(C, 2, 1))


KINDS: dict[str, tuple[type, ...]] = {
    "convolutions": (nn.Conv2d,),
    "norms": tuple({type(make()) for make in NORMS.values()}),
    "activations": tuple({type(make()) for make in OUT_OF_PLACE.values()}),
    "all": (nn.Module,),
}


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", OUT_OF_PLACE)
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_full_backward_hooks_see_the_same_and_cost_no_memory(
    norm: str, activation: str, kind: str
) -> None:
    model = with_backward_hooks(norm, activation)
    plain = converted_twin(model)
    seen: list[list[tuple[Tensor, ...]]] = [[], []]
    twin = copy.deepcopy(model)
    for m, found in zip((model, twin), seen, strict=True):
        for module in m.modules():
            if isinstance(module, KINDS[kind]) and not isinstance(module, nn.Sequential):
                module.register_full_backward_hook(
                    lambda _, of_inputs, of_outputs, found=found: void(
                        found.append((*of_inputs, *of_outputs))
                    )
                )
    inplace_ops.convert(twin, max_ops=20)
    x = images()
    expected, actual = step_of(model, x), step_of(twin, x)
    assert_same_step(actual, expected, 1e-4)
    assert len(seen[0]) == len(seen[1]) > 0
    for mine, theirs in zip(*seen, strict=True):
        for a, e in zip(mine, theirs, strict=True):
            assert (a is None) == (e is None)
            if a is not None:
                torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    assert inplace_ops.saved_bytes(twin, x.requires_grad_()) <= 1.02 * inplace_ops.saved_bytes(
        plain, x
    )


# Anomaly mode.


def error_of(model: Callable[[Tensor], Tensor]) -> str:
    """Return the error of a backward that makes NaN, in anomaly mode."""
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Error detected in"),
        pytest.raises(RuntimeError, match="returned nan values") as raised,
    ):
        (model(images(samples=4)).sum() * float("inf")).backward()
    return str(raised.value)


@pytest.mark.parametrize("norm", ["batch", "instance"])
@pytest.mark.parametrize("activation", [*OUT_OF_PLACE, "silu in place"])
def test_anomaly_mode_names_the_operation(norm: str, activation: str) -> None:
    makes = {**OUT_OF_PLACE, "silu in place": IN_PLACE["silu"]}
    model = nn.Sequential(
        nn.Conv2d(3, C, 3), NORMS[norm](), makes[activation](), nn.AdaptiveAvgPool2d(1)
    )
    twin = converted_twin(model)
    assert error_of(twin) == error_of(model)


@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_anomaly_mode_in_backward_alone_names_the_norm(norm: str) -> None:
    """A batch norm's own node computes its gradients, also if forward ran without the mode."""
    model = sequential(NORMS[norm](), nn.SiLU(inplace=norm == "instance"))
    inplace_ops.convert(model)
    loss = model(images(samples=4)).sum()
    assert "NativeBatchNormBackward0" in error_of(lambda x: loss)
