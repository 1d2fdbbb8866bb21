"""Products that widen: backward recomputes them, at most once.

See NOTE [Narrow points] in `products.py` and NOTE [Weights are proved] in `weights.py`.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.twins import (
    HAS_HOOK,
    OpCounter,
    Parts,
    assert_same_gradients,
    assert_same_step,
    assert_same_steps,
    recomputed,
    step_of,
    swap_in_forward,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import inplace_ops
from inplace_ops.conversion.wiring import conversion_of
from inplace_ops.recompute import costs
from inplace_ops.recompute.products import NEAR, ProductCall
from inplace_ops.recompute.tensors import WeakMemory

pytestmark = pytest.mark.usefixtures("_small_tensors_too")

MAX_OPS = 64


def converted(model: nn.Module, max_ops: int = MAX_OPS) -> Any:
    """Return a converted copy, whose parameters are known to last."""
    twin = copy.deepcopy(model)
    inplace_ops.convert(twin, max_ops=max_ops)
    return twin


def products_in(output: Any) -> set[ProductCall]:
    """Return the products that backward will compute."""
    values = [value for value in recomputed(output) if value.original is None]
    return {call for value in values for call in value.spec.products}


def flops_of(step: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


class Widen(nn.Module):
    """A product that widens, and an activation that saves the product's output."""

    def __init__(self, product: nn.Module, *, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.product, self.act = product, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.product(x))


def function(compute: Callable[..., Tensor], *shapes: tuple[int, ...]) -> nn.Module:
    """Return a product with parameters that a function computes."""
    weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
    return Parts(lambda m, x: compute(x, *m.weights), weights=weights)


IMAGES = 2, 4, 6, 6
# By name: the product, and the shape of its input.
PRODUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1 d": (lambda: nn.Conv1d(4, 9, 3), (2, 4, 12)),
    "2 d": (lambda: nn.Conv2d(4, 9, 3, padding=1), IMAGES),
    "2 d, no bias": (lambda: nn.Conv2d(4, 9, 1, bias=False), IMAGES),
    "2 d, same": (lambda: nn.Conv2d(4, 9, (5, 3), padding="same"), IMAGES),
    "2 d, reflected": (lambda: nn.Conv2d(4, 9, 3, padding=1, padding_mode="reflect"), IMAGES),
    "3 d": (lambda: nn.Conv3d(4, 9, 2, dilation=2, padding=1), (2, 4, 4, 4, 4)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), IMAGES),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 2, stride=2), IMAGES),
    "transposed, 1 d": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 12)),
    "transposed, 3 d": (
        lambda: nn.ConvTranspose3d(4, 2, 3, stride=2, output_padding=1),
        (1, 4, 3, 3, 3),
    ),
    "linear": (lambda: nn.Linear(6, 20), (5, 6)),
    "linear of tokens": (lambda: nn.Linear(6, 20), (2, 5, 6)),
    "linear, no bias": (lambda: nn.Linear(6, 20, bias=False), (2, 5, 6)),
    "F.linear": (lambda: function(F.linear, (20, 6), (20,)), (2, 5, 6)),
    "F.conv2d": (lambda: function(F.conv2d, (9, 4, 1, 1), (9,)), IMAGES),
    "x @ w": (lambda: function(torch.matmul, (6, 20)), (5, 6)),
    "w @ x": (lambda: function(lambda x, w: w @ x, (20, 6)), (6, 5)),
    "a part of w": (lambda: function(lambda x, w: F.linear(x, w[4:]), (24, 6)), (5, 6)),
    "bmm": (lambda: function(torch.bmm, (3, 6, 20)), (3, 5, 6)),
    "einsum": (lambda: function(lambda x, w: torch.einsum("bi,io->bo", x, w), (6, 20)), (5, 6)),
    "addmm": (
        lambda: function(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2), (6, 20), (20,)),
        (5, 6),
    ),
    "addmm, a matrix": (
        lambda: function(lambda x, w, b: torch.addmm(b, x, w, beta=2), (6, 20), (5, 20)),
        (5, 6),
    ),
}
# Before torch 2.14 only the modules of PyTorch tell the versions of their parameters.
MODULES = [name for name, (make, _) in PRODUCTS.items() if not isinstance(make(), Parts)]


def networks(name: str, *, normed: bool) -> tuple[nn.Module, Tensor]:
    """Return a product between others, so that all gradients are tested, and an example."""
    make, shape = PRODUCTS[name]
    first: nn.Module = nn.LayerNorm(shape[-1]) if normed else nn.Tanh()
    return nn.Sequential(first, Widen(make()), nn.Hardtanh(-0.3, 0.3)), torch.randn(shape)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_that_widens_runs_once_more(name: str, normed: bool) -> None:
    model, x = networks(name, normed=normed)
    twin = converted(model)
    if not HAS_HOOK and name not in MODULES:
        assert not products_in(twin(x))
        return
    (call,) = products_in(twin(x))
    assert_same_steps(model, twin, x, steps=3, tolerance=1e-6)
    flops = assert_each_runs_once_more(model, twin, x)
    report = inplace_ops.analyze(model, x.requires_grad_(), max_ops=MAX_OPS)
    assert (report.flops, report.recompute_flops) == (flops, call.flops)
    assert "products that backward recomputes" in str(report)


POLICIES = ["autocast", torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    "name", ["1 d", "2 d", "transposed", "linear of tokens", "linear, no bias", "F.linear"]
)
def test_product_in_another_dtype(name: str, policy: Any) -> None:
    """Autocast casts the weight. An optimizer may step between two backward passes."""
    is_autocast = policy == "autocast"
    model, x = networks(name, normed=True)
    if not is_autocast:
        model, x = model.to(policy), x.to(policy)
    if getattr(model[1].product, "bias", None) is not None:
        model[1].product.bias.requires_grad_(not is_autocast)
    twin = converted(model)
    found = []
    for m in (model, twin):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            y = m(x)
        assert bool(products_in(y)) == (m is twin and (HAS_HOOK or name in MODULES))
        y.double().square().mean().backward(retain_graph=is_autocast)
        if is_autocast:  # backward reads the casts
            torch.optim.SGD(m[1].parameters(), 1.0).step()
            y.double().mean().backward()
        found.append({name: p.grad for name, p in m.named_parameters() if p.requires_grad})
    assert_same_step(found[1], found[0], tolerance=1e-9 if policy is torch.float64 else 2e-2)


def test_product_of_an_image_reads_the_image() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 4, 1))
    twin, x = converted(model), torch.randn(2, 3, 9, 9)
    (call,) = products_in(twin(x))
    assert call.weights[0].parameter is twin[0].weight
    assert_same_steps(model, twin, x)
    twin(x).sum().backward()
    y = twin(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("width", [3, 6])
def test_product_that_does_not_widen_stays_saved(width: int) -> None:
    twin = converted(nn.Sequential(nn.Tanh(), nn.Linear(6, width), nn.SiLU(), nn.Linear(width, 4)))
    x = torch.randn(4, 6)
    assert not products_in(twin(x))
    report = inplace_ops.analyze(twin, x, max_ops=MAX_OPS)
    assert report.recompute_flops == 0
    assert "Addmm does not widen: never recomputed" in {row.reason for row in report.remaining}


@pytest.mark.parametrize("is_module", [False, True])
def test_saved_bytes_are_those_of_a_step(is_module: bool) -> None:
    """A sum of a product is proved also while `saved_bytes` counts."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.product(torch.tanh(x))
        return F.silu(y + (m.sin(y) if is_module else torch.sin(y)))

    model = Parts(compute, product=nn.Linear(6, 20), sin=Widen(nn.Identity(), act=torch.sin))
    x = torch.randn(4, 6)
    report = inplace_ops.convert(model)
    for _ in range(2):
        model(x).sum().backward()
    assert inplace_ops.saved_bytes(model, x) == report.saved_bytes_after


def _of_a_parameter(m: Any, x: Tensor) -> Tensor:
    """An owner may free the memory of a parameter that is a product's input."""
    return F.silu(m.linear(m.tokens)) * x


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        pytest.param(
            lambda: nn.Sequential(
                nn.Tanh(), Widen(nn.utils.parametrizations.weight_norm(nn.Linear(6, 20)))
            ),
            (4, 6),
            id="computed weight",
        ),
        pytest.param(
            lambda: Parts(
                _of_a_parameter, tokens=nn.Parameter(torch.randn(4, 6)), linear=nn.Linear(6, 20)
            ),
            (20,),
            id="of a parameter",
        ),
    ],
)
def test_product_is_not_recomputed(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    twin = converted(model)
    assert not products_in(twin(x))
    assert_same_steps(model, twin, x)


def test_cost_is_counted_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert costs.flops_per_byte("cuda", torch.float32, in_tf32=True) == 55
    assert costs.flops_per_byte("cuda", torch.bfloat16, in_tf32=True) == 110
    monkeypatch.setattr(costs, "FLOPS_PER_BYTE", {"cpu": {torch.float32: 10.0}})
    twin = converted(nn.Sequential(nn.Tanh(), Widen(nn.Linear(100, 400, bias=False))))
    (call,) = products_in(twin(torch.randn(8, 100)))
    output, moved = 4 * 8 * 400, 4 * (8 * 100 + 100 * 400 + 8 * 400)
    assert call.cost == moved / (2 * output) + 2 * 100 * 8 * 400 / (output * 10)
    twin.append(nn.Linear(400, 3))
    for max_ops, names in (
        (int(call.cost), ["SiLU, saved by Addmm"]),
        # The activation is one pass more than the product, which runs anyway.
        (int(call.cost) + 1, ["Mm, saved by SiLU", "SiLU, saved by Addmm"]),
    ):
        assert call.cost + 1 > max_ops
        inplace_ops.revert(twin)
        inplace_ops.convert(twin, max_ops=max_ops)
        assert sorted(v.name for v in recomputed(twin(torch.randn(8, 100)))) == names


# Values that several consumers read.


class Attention(nn.Module):
    """Queries, keys and values: three views of one product, which one operation saves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(2, 8, 16))


class Bottleneck(nn.Module):
    """A residual block whose last convolution widens, as in a ResNet."""

    def __init__(self, downsample: bool) -> None:
        super().__init__()
        wide = [nn.Conv2d(4, 16, 1), nn.BatchNorm2d(16)]
        self.first = nn.Sequential(nn.Conv2d(4 if downsample else 16, 4, 1), nn.BatchNorm2d(4))
        self.last = nn.Sequential(nn.ReLU(), *wide)
        self.skip = nn.Sequential(*copy.deepcopy(wide)) if downsample else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.last(self.first(x)) + self.skip(x))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def chained(m: Any, x: Tensor) -> Tensor:
    """Compute two products that widen, of which the second one has many consumers."""
    y = m.second(F.silu(m.first(x)))
    return m.last(torch.tanh(y) * torch.sigmoid(y) + F.silu(y) * torch.sin(y))


def tied(m: Any, x: Tensor) -> Tensor:
    """Read one weight twice, and once transposed."""
    y = F.silu(m.linear(torch.tanh(x)))
    return F.silu(m.linear(torch.tanh(F.linear(y, m.linear.weight.t()))))


# By name: a network, the shape of its input, and the number of its products that run once more.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "chain": (
        lambda: Parts(
            chained, first=nn.Linear(4, 8), second=nn.Linear(8, 16), last=nn.Linear(16, 3)
        ),
        (5, 4),
        2,
    ),
    "tied weights": (lambda: Parts(tied, linear=nn.Linear(4, 12)), (3, 4), 2),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 8, 16), 2),
    "bottlenecks": (
        lambda: nn.Sequential(Bottleneck(True), *[Bottleneck(False) for _ in range(3)]),
        (2, 4, 6, 6),
        5,
    ),
    "gated": (lambda: nn.Sequential(GatedMLP(), GatedMLP()), (2, 5, 8), 4),
    "inverted residuals": (
        lambda: nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(4, 16, 1),
                    nn.BatchNorm2d(16),
                    nn.SiLU(inplace=True),
                    nn.Conv2d(16, 16, 3, padding=1, groups=16),
                    nn.BatchNorm2d(16),
                    nn.SiLU(),
                    nn.Conv2d(16, 4, 1),
                    nn.BatchNorm2d(4),
                )
                for _ in range(2)
            ]
        ),
        (2, 4, 6, 6),
        2,
    ),
}


def assert_each_runs_once_more(model: nn.Module, twin: nn.Module, x: Tensor) -> int:
    """Assert that backward runs each product at most once more, and return FLOPs of the model."""
    before, after = (flops_of(lambda m=m: step_of(m, x)) for m in (model, twin))
    assert after - before == sum(call.flops for call in products_in(twin(x)))
    return before


@pytest.mark.parametrize("name", NETWORKS)
def test_each_product_runs_at_most_once_more(name: str) -> None:
    make, shape, count = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    twin = converted(model)
    assert len(products_in(twin(x))) == count
    assert_same_steps(model, twin, x, tolerance=1e-5)
    assert_each_runs_once_more(model, twin, x)
    saved = [inplace_ops.saved_bytes(m, x) for m in (model, twin)]
    assert saved[1] < 0.6 * saved[0]


def test_input_of_a_product_is_recomputed_once() -> None:
    """The norm's output, which the product and the layer that has it as an input both read."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), Widen(nn.Linear(6, 20)))
    twin, x = converted(model.append(nn.Linear(20, 2))), torch.randn(4, 6)
    assert_same_steps(model, twin, x)
    y = twin(x)
    with OpCounter() as counter:
        y.sum().backward()
    assert counter.ops["inplace_ops::normalize"] == 1


def test_saved_bytes_do_not_rise_with_max_ops() -> None:
    model, x = NETWORKS["bottlenecks"][0](), torch.randn(2, 4, 6, 6)
    saved = []
    for max_ops in (1, 2, 4, 8, 16, 64):
        twin = converted(model, max_ops)
        twin(x).sum().backward()
        saved.append(inplace_ops.saved_bytes(twin, x))
    assert saved == sorted(saved, reverse=True)


def test_far_consumer_saves_its_tensor() -> None:
    """A skip connection over many operations: its tensor stays saved, the near one does not."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(torch.tanh(x))
        z = m.middle(y.sin())
        return m.last(torch.cat([F.silu(y), z], 1))

    middle = nn.Sequential(*[nn.Conv2d(8, 8, 1) for _ in range(NEAR + 1)])
    ends = {"first": nn.Conv2d(3, 8, 3, padding=1), "last": nn.Conv2d(16, 3, 1)}
    model, x = Parts(compute, **ends, middle=middle), torch.randn(2, 3, 8, 8)
    twin = converted(model)
    reasons = {row.reason for row in inplace_ops.analyze(twin, x, max_ops=MAX_OPS).remaining}
    assert any("far apart" in reason for reason in reasons)
    assert_same_steps(model, twin, x)
    assert_each_runs_once_more(model, twin, x)


@pytest.mark.parametrize("ends", ["all", "in part", "with an error"])
def test_kept_value_dies_with_the_pass(ends: str) -> None:
    """In a partial backward, or after an error, the product's last consumer does not run."""

    def fail(grad: Tensor) -> None:
        raise ValueError("a hook fails")

    model = nn.Sequential(nn.Tanh(), nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 4))
    twin, x = converted(model), torch.randn(3, 4)
    y, other = twin(x), twin(x)
    (call,) = products_in(y)
    assert call._reads == 2  # by the activation, and inside of the last layer's input
    if ends == "with an error":
        y.grad_fn.next_functions[1][0].register_prehook(fail)
        with pytest.raises(ValueError, match="a hook fails"):
            y.sum().backward()
        other.sum().backward()
    else:
        parameters = [*twin[3 if ends == "in part" else 1].parameters()]
        torch.autograd.grad(y.sum(), parameters, retain_graph=True)
        assert call._kept_value is None
        torch.autograd.grad(y.sum(), [*twin.parameters()])
    assert call._kept_value is None


# Proofs of weights and biases.


def first_layer() -> tuple[nn.Sequential, Tensor]:
    """A first layer that widens: PyTorch does not read its weight in backward."""
    model = nn.Sequential(nn.Linear(6, 20), nn.SiLU(), nn.Linear(20, 2))
    return model, torch.randn(4, 6)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("name", ["2 d", "linear of tokens"])
def test_frozen_parameters(name: str, frozen: str) -> None:
    """With a frozen weight another operation must save the input of a linear layer."""
    make, shape = PRODUCTS[name]
    product = make()
    for parameter in ("weight", "bias") if frozen == "both" else (frozen,):
        getattr(product, parameter).requires_grad_(False)

    model = nn.Sequential(nn.LayerNorm(shape[-1]), nn.Tanh(), Widen(product))
    twin, x = converted(model), torch.randn(shape)
    (call,) = products_in(twin(x))
    assert len(call.weights) == 2
    assert_same_steps(model, twin, x)
    # A bias that was frozen later is not known: there is no hook.
    thawed = make()
    later = converted(nn.Sequential(nn.Tanh(), Widen(thawed)))
    later[1].product.bias.requires_grad_(False)
    assert bool(products_in(later(x))) == (not HAS_HOOK)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, 0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "fused Adam": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
}


def step_with(optimizer: str, *parameters: Tensor) -> None:
    made = OPTIMIZERS[optimizer](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()


def set_data(parameter: Tensor, value: Tensor) -> None:
    parameter.data = value


# By name: what happens to the first layer between forward and backward.
CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    **{
        name: lambda linear, name=name: step_with(name, linear.weight, linear.bias)
        for name in OPTIMIZERS
    },
    "step of an alias": lambda linear: step_with(
        "fused SGD", linear.weight.detach().requires_grad_()
    ),
    "step of memory that has more": lambda linear: step_with(
        "fused SGD",
        linear.weight.new_empty(0).set_(linear.weight.untyped_storage()).requires_grad_(),
    ),
    "other data": lambda linear: set_data(linear.weight, torch.zeros(20, 6)),
    "another layout": lambda linear: set_data(linear.weight, linear.weight.data.view(6, 20).t()),
    "loaded": lambda linear: linear.load_state_dict(nn.Linear(6, 20).state_dict()),
    "cast": lambda linear: linear.double(),
    "the bias": lambda linear: nn.init.ones_(linear.bias),
    "freed": lambda linear: linear.weight.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameter_raises(change: str) -> None:
    model, x = first_layer()
    twin = converted(model)
    weight = twin[0].weight  # a part of the tensor that an optimizer may have instead of it
    weight.data = torch.cat([weight.detach().flatten(), torch.zeros(3)])[:-3].view_as(weight)
    twin(x).sum().backward()
    y = twin(x)
    assert products_in(y)
    CHANGES[change](twin[0])
    with pytest.raises(RuntimeError, match=r"inplace operation|was freed between"):
        y.sum().backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_step_that_changes_nothing_of_the_graph_does_not_raise(optimizer: str) -> None:
    """Of another model, or of each parameter when its gradient is there, in backward."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), Widen(nn.Linear(6, 20)))
    model, x = model.append(nn.Linear(20, 2)), torch.randn(4, 6)
    twin = converted(model)
    for m in (model, twin):
        for parameter in m.parameters():
            made = OPTIMIZERS[optimizer]([parameter])

            def step(p: Tensor, made: torch.optim.Optimizer = made) -> None:
                made.step()
                made.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        for m in (model, twin):
            y = m(x)
            assert m is model or products_in(y)
            step_with(optimizer, *nn.Linear(3, 3).parameters())
            y.square().sum().backward()
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "frozen"])
def test_weight_that_is_written_to_before_its_product_is_saved(is_frozen: bool) -> None:
    """The write begins after the first use. PyTorch does not read a first layer's weight again.

    Frozen, the product reads an alias with its own version.
    """

    def compute(m: Any, x: Tensor) -> Tensor:
        y = F.linear(torch.tanh(m.norm(x)), m.kernel.data) if is_frozen else m.linear(x)
        if m.writes:
            with torch.no_grad():
                (m.kernel if is_frozen else m.linear.weight).mul_(2)
        return m.last(F.silu(y))

    layers = {"linear": nn.Linear(6, 20), "norm": nn.LayerNorm(6), "last": nn.Linear(20, 2)}
    model = Parts(compute, **layers, kernel=nn.Buffer(torch.randn(20, 6)), writes=False)
    twin, x = converted(model), torch.randn(4, 6)
    for writes in (False, True):
        model.writes = twin.writes = writes
        assert_same_gradients(model, twin, x, "last.weight")
        is_known = HAS_HOOK or not is_frozen
        assert bool(products_in(twin(x))) == (is_known and not writes)


def test_unsaved_input_that_is_written_to_before_its_product_is_proved() -> None:
    """With a frozen weight the node saves no input. The write begins after the first use."""

    def compute(m: Any, x: Tensor) -> Tensor:
        h = m.norm(m.first(x))
        if m.writes:
            with torch.no_grad():
                h.mul_(2)
        return F.silu(m.linear(h))

    parts = {"first": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "linear": nn.Linear(6, 20)}
    model = Parts(compute, **parts, writes=False)
    model.linear.weight.requires_grad_(False)
    twin, x = converted(model), torch.randn(4, 6)
    for writes in (False, True):
        model.writes = twin.writes = writes
        assert bool(products_in(twin(x))) == (not writes)
        assert_same_steps(model, twin, x, steps=1)


def test_bias_that_is_a_view_of_a_cast_is_not_known() -> None:
    """A bias of zeros does not show at the first use that it is transposed."""

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias.bfloat16().t(), x.bfloat16(), weight.bfloat16())

    model = nn.Sequential(nn.Linear(6, 6), Widen(function(compute, (6, 20), (20, 1))))
    bias, x = model[1].product.weights[1], torch.randn(20, 6)
    twin = converted(model)
    for value in (torch.zeros(20, 1), torch.randn(20, 1)):
        bias.data.copy_(value)
        twin[1].product.weights[1].data.copy_(value)
        assert_same_steps(model, twin, x, steps=1)


def test_nothing_is_kept_of_a_weight_that_is_gone() -> None:
    """PyTorch's first layer keeps the parameter, and not its memory: until the graph is gone."""
    model, x = first_layer()
    twin = converted(model)
    twin(x).sum().backward()
    y, weight = twin(x), weakref.ref(twin[0].weight)
    assert products_in(y)
    lasting = conversion_of(twin).settings.weights._of
    assert lasting(twin[0].weight).lasts
    assert lasting(nn.Parameter(torch.zeros(20, 6))) is None
    for dtype in (torch.float, torch.half):  # other data, then moved
        memory = WeakMemory(twin[0].weight)
        twin[0].weight.data = torch.zeros(20, 6, dtype=dtype)
        gc.collect()
        assert memory() is None
    del twin, model, y, lasting
    gc.collect()
    assert weight() is None


def test_frozen_bias_of_another_forward_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = lambda m, x: F.linear(x, m.weight, m.bias * 3)  # noqa: E731
    monkeypatch.setattr(nn.Linear, "forward", forward)
    model, x = first_layer()
    nn.init.zeros_(model[0].bias).requires_grad_(False)
    assert not products_in(converted(model)(x))


class OtherBias(TorchFunctionMode):
    """Adds 1 to the bias that convolutions read."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.conv2d:
            x, weight, bias, *others = args
            args = (x, weight, bias + 1, *others)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("by", ["hooks", "mode"])
def test_frozen_bias_that_is_replaced_from_the_second_step_on_is_not_known(by: str) -> None:
    model, x = networks("2 d", normed=False)
    model[1].product.bias.requires_grad_(False)
    twin = converted(model)
    assert_same_steps(model, twin, x, steps=1)
    if by == "hooks":
        other = nn.Parameter(model[1].product.bias + 1, requires_grad=False)
        for m in (model, twin):
            swap_in_forward(m[1].product, "bias", lambda: other)
    with OtherBias() if by == "mode" else nullcontext():
        assert_same_steps(model, twin, x, steps=1)


def test_parameters_can_be_swapped() -> None:
    """`torch.utils.swap_tensors` fails for a tensor with a weak reference."""
    model, x = first_layer()
    model[0].bias.requires_grad_(False)
    twin = converted(model)
    twin(x).sum().backward()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        twin.load_state_dict(model.state_dict())
        twin.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same_step(step_of(twin, x.double()), step_of(model.double(), x.double()))


@pytest.mark.parametrize("name", ["2 d", "linear of tokens"])
def test_parameters_that_are_frozen_thawed_and_loaded_between_steps(name: str) -> None:
    """Of zeros a comparison of values finds no difference to a product without a bias."""
    model, x = networks(name, normed=False)
    nn.init.zeros_(model[1].product.bias)
    twin = converted(model)
    for step, bias in enumerate((None, None, None, 3.0, None)):
        for m in (model, twin):
            m[1].product.weight.requires_grad_(step % 2 == 0)
            m[1].product.bias.requires_grad_(step not in (2, 3))
            if bias is not None:
                nn.init.constant_(m[1].product.bias, bias)
        assert_same_step(step_of(twin, x), step_of(model, x))


def test_product_runs_under_the_flags_of_forward() -> None:
    model, x = networks("2 d", normed=False)
    twin = converted(model)
    y = twin(x)
    (call,) = products_in(y)
    was_enabled, seen = torch.backends.mkldnn.enabled, []
    run = call.function

    def function(*args: Any) -> Tensor:
        seen.append(torch.backends.mkldnn.enabled)
        return run(*args)

    call.function = function
    torch.backends.mkldnn.set_flags(not was_enabled)
    try:
        y.sum().backward()
        assert torch.backends.mkldnn.enabled != was_enabled
    finally:
        torch.backends.mkldnn.set_flags(was_enabled)
    assert seen == [was_enabled]


@pytest.mark.parametrize("policy", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", ["1 d", "transposed", "linear, no bias"])
def test_write_through_data_is_found(name: str, normed: bool, policy: str) -> None:
    make, shape = PRODUCTS[name]

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.product(m.first(x))
        y.data.mul_(1.01)
        return F.silu(y)

    dtype = torch.bfloat16 if policy == "bfloat16" else torch.float32
    first = nn.LayerNorm(shape[-1]) if normed else nn.Tanh()
    twin = converted(Parts(compute, first=first, product=make()).to(dtype))
    on = torch.autocast("cpu", torch.bfloat16) if policy == "autocast" else nullcontext()
    with on, pytest.warns(UserWarning, match="differs from the saved tensor"):
        y = twin(torch.randn(shape, dtype=dtype, requires_grad=True))
    assert not products_in(y)


# Memory that its owner frees.


class Owner(nn.Module):
    """Frees the memory of a linear layer's weight after its forward, as FSDP2 does."""

    def __init__(self, linear: nn.Linear, *, is_its_own: bool) -> None:
        super().__init__()
        self.linear, self.is_its_own = linear, is_its_own
        self.values = linear.weight.detach().clone()

    def restore(self) -> None:
        if not self.is_its_own:  # as FSDP2, which gives modules another parameter than they had
            self.linear.weight = nn.Parameter(torch.empty(0))
            self.linear.weight.data = self.values.clone()
        self.linear.weight.untyped_storage().resize_(self.values.untyped_storage().nbytes())
        self.linear.weight.data.copy_(self.values)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.linear(x))
        self.linear.weight.untyped_storage().resize_(0)
        return y


@pytest.mark.parametrize("is_its_own", [True, False])
def test_weight_whose_memory_is_freed_after_its_module(is_its_own: bool) -> None:
    owner = Owner(nn.Linear(6, 20), is_its_own=is_its_own)
    twin = nn.Sequential(owner, nn.Identity(), nn.Linear(20, 2))
    inplace_ops.convert(twin, max_ops=MAX_OPS)
    x = torch.randn(4, 6)
    expected = nn.Sequential(nn.Linear(6, 20), nn.SiLU(), nn.Linear(20, 2))
    for step in range(3):
        owner.restore()
        values = {"0.weight": owner.values, "0.bias": owner.linear.bias}
        values |= {f"2.{name}": p for name, p in twin[2].named_parameters()}
        expected.load_state_dict(values)
        y = twin(x)
        assert not products_in(y), step
        # The walk comes after the memory was freed. A parameter that is new is not known.
        is_undecided = HAS_HOOK and (step == 0 or not is_its_own)
        assert any(value.original for value in recomputed(y)) == is_undecided
        y.square().sum().backward()
        expected.zero_grad()
        expected(x).square().sum().backward()
        torch.testing.assert_close(twin[2].weight.grad, expected[2].weight.grad)
        twin.zero_grad()


def test_parameters_of_others_last_from_the_second_step_on() -> None:
    """A parameter that the model did not have when it was converted is known after one step."""
    model, x = first_layer()
    twin = converted(model)
    twin[0].weight = nn.Parameter(twin[0].weight.detach().clone())
    for step in range(3):
        y = twin(x)
        assert bool(products_in(y)) == (step > 0)
        y.square().sum().backward()
    report = conversion_of(twin).report
    assert report.recompute_flops  # the second call has filled it in again
    model(x).square().sum().backward()
    torch.testing.assert_close(twin[0].weight.grad, 3 * model[0].weight.grad)


def test_frozen_weight_whose_memory_another_one_has_is_not_known() -> None:
    """The two weights exchange their memory inside forward, after the engine has looked it up."""

    def compute(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x * m.scale)
        y = F.silu(F.linear(h, m.first)).detach().sum()
        if m.swaps:
            m.first.data, m.second.data = m.second.data, m.first.data
        return y + m.last(F.silu(F.linear(h, m.second))).sum()

    first, second = (nn.Parameter(torch.randn(256, 64), requires_grad=False) for _ in range(2))
    parts = {"first": first, "second": second, "scale": nn.Parameter(torch.ones(64))}
    model = Parts(compute, **parts, last=nn.Linear(256, 64), swaps=False)
    twin, x = converted(model, max_ops=32), torch.randn(64, 64)
    for swaps in (False, True, True):
        model.swaps = twin.swaps = swaps
        assert_same_gradients(model, twin, x, "scale", tolerance=1e-4)


def test_weight_that_is_freed_before_its_consumer_runs_is_not_read() -> None:
    """From the second step on, when the weight is known to last."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(torch.tanh(x))
        if m.frees:
            m.first.weight.untyped_storage().resize_(0)
        return m.last(F.silu(y))

    model = Parts(compute, first=nn.Linear(64, 256), last=nn.Linear(256, 64), frees=False)
    twin, x = converted(model, max_ops=32), torch.randn(64, 64).requires_grad_()
    for m in (model, twin):
        m(x).sum().backward()
        m.frees = True
    assert_same_gradients(model, twin, x, "last.weight")
