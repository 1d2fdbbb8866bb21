"""Leaves that other consumers save, proofs that come late, and notes inside modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.twins import (
    OpCounter,
    Parts,
    Program,
    TwoOutputs,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import inplace_ops

pytestmark = pytest.mark.usefixtures("source", "_small_tensors_too")

Between = Callable[[nn.Module, Tensor], object]


class NewGELU(nn.Module):
    """GELU with tanh, as GPT-2 computes it."""

    def __init__(self, between: Between = lambda module, t: None) -> None:
        super().__init__()
        self.between, self.step = between, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        half = 0.5 * x
        self.between(self, half)
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return half * (1.0 + torch.tanh(inner))


class RMSNorm(nn.Module):
    """An RMS norm, as transformers computes it."""

    def __init__(self, size: int, between: Between = lambda module, t: None) -> None:
        super().__init__()
        self.weight, self.between = nn.Parameter(torch.rand(size)), between
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        dtype, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        self.between(self, x)
        return self.weight * x.to(dtype)


def mlp(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), activation, nn.Linear(64, 32))


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize(("max_ops", "tensors"), [(4, 2), (8, 1)])
def test_activation_of_several_operations_saves_its_input(max_ops: int, tensors: int) -> None:
    """PyTorch saves x, half, tanh, 1 + tanh and the product; the engine x and tanh, or x alone."""
    model, x = mlp(NewGELU()), torch.randn(256, 32)
    size = 256 * 64 * 4
    with no_warnings():
        twin = converted_twin(model, max_ops)
        assert inplace_ops.saved_bytes(model, x) == 5 * size
        assert inplace_ops.saved_bytes(twin, x) == pytest.approx(tensors * size, abs=100)
        assert_same_steps(model, twin, x, tolerance=0)


def test_norm_of_several_operations_saves_its_input() -> None:
    """In bfloat16 the engine saves x, and one number for each row."""
    layers = [nn.Linear(64, 64), RMSNorm(64), nn.Linear(64, 64)]
    model, x = nn.Sequential(*layers).bfloat16(), torch.randn(256, 64, dtype=torch.bfloat16)
    size = 256 * 64 * 2
    with no_warnings():
        twin = converted_twin(model, max_ops=4)
        assert inplace_ops.saved_bytes(model, x) == pytest.approx(4 * size, abs=4096)
        assert inplace_ops.saved_bytes(twin, x) == pytest.approx(size, abs=4096)
        assert_same_steps(model, twin, x, tolerance=0)


def from_step(begin: int, write: Callable[[Tensor], object]) -> Between:
    def between(module: nn.Module, t: Tensor) -> None:
        if module.step >= begin:
            write(t)

    return between


def _no_grad(t: Tensor) -> None:
    with torch.no_grad():
        t.add_(0.5)


HIDDEN_WRITES: dict[str, Callable[[Tensor], object]] = {
    "no_grad": _no_grad,
    "detached": lambda t: t.detach().mul_(2),
    "view": lambda t: t.detach().view(-1)[:5].zero_(),
}


@pytest.mark.parametrize("begin", [1, 3])
@pytest.mark.parametrize("write", HIDDEN_WRITES)
def test_hidden_write_inside_a_module_matches_pytorch(write: str, begin: int) -> None:
    between = from_step(begin, HIDDEN_WRITES[write])
    models = [
        (mlp(NewGELU(between)), torch.randn(8, 32)),
        (
            nn.Sequential(nn.Linear(32, 32), RMSNorm(32, between), nn.Linear(32, 8)).bfloat16(),
            torch.randn(8, 32, dtype=torch.bfloat16),
        ),
    ]
    for model, x in models:
        assert_same_steps(model, converted_twin(model), x, steps=4, tolerance=0)


class Sums(nn.Module):
    """Adds a number in one of several ways; the number changes at every step."""

    def __init__(self, add: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.add, self.step = add, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return x.sigmoid() * self.add(x.tanh(), 0.25 * self.step)


SUMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": lambda t, n: t + n,
    "radd": lambda t, n: n + t,
    "function": lambda t, n: torch.add(t, n),
    "alpha": lambda t, n: torch.add(t, n, alpha=3),
    "keyword": lambda t, n: torch.add(input=t, other=n),
    "sub": lambda t, n: t - n,
    "rsub": lambda t, n: n - t,
    "in_place": lambda t, n: t.clone().add_(n),
    "int": lambda t, n: t + int(4 * n),
    "bool": lambda t, n: t + (n > 0.5),
    "tensor": lambda t, n: t + torch.tensor(n),
    "double_tensor": lambda t, n: t + torch.tensor(n, dtype=torch.double),
    "large": lambda t, n: t + (1e30 * n + 1e-3),
    # In the first step the number, or the constant, equals the dimension.
    "then_a_view": lambda t, n: (t + (n - 0.25)).unsqueeze(0)[0],
    "constant_then_a_view": lambda t, n: (t + torch.full_like(t, n - 0.25)).unsqueeze(0)[0],
    "then_flattened": lambda t, n: (t.flatten() - (n - 0.25)).flatten(0).view_as(t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sums", SUMS)
def test_sum_with_a_number_matches_pytorch(sums: str, dtype: torch.dtype) -> None:
    model, x = mlp(Sums(SUMS[sums])).to(dtype), torch.randn(64, 32, dtype=dtype)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, steps=3, tolerance=0)


def test_product_with_a_number_is_recomputed_under_a_dispatch_mode() -> None:
    """The mode passes on the number that the product saves as a float, not as a tensor."""
    twin = converted_twin(Program(lambda m, z: m.conv(m.other(z).sigmoid() * 0.2)))
    with OpCounter(), no_warnings():
        output = twin(images())
    assert "Mul" in {spec.producer for spec in recomputed(output)}


@pytest.mark.usefixtures("without_products")
def test_sum_with_a_number_is_recomputed() -> None:
    model, x = mlp(Sums(SUMS["add"])), torch.randn(256, 32)
    size = 256 * 64 * 4
    assert inplace_ops.saved_bytes(model, x) == 4 * size  # sigmoid, tanh, the sum, the product
    assert inplace_ops.saved_bytes(converted_twin(model, 4), x) == pytest.approx(2 * size, abs=100)


def test_number_that_is_added_without_a_gradient_is_not_recorded() -> None:
    """The write changes y, but neither its node nor the negative. The number grows in each step."""

    class Writes(nn.Module):
        step = 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            y = x.sigmoid() + 1.0
            negative = -y
            with torch.no_grad():
                y.add_(float(self.step))
            return negative

    model, x = mlp(Writes()), torch.randn(64, 32)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, steps=3, tolerance=0)


def test_number_and_a_view_without_a_gradient_are_told_apart() -> None:
    """Neither has a producer. In the first step the view holds the number."""

    class Views(nn.Module):
        value = torch.ones(1, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.value * 1.0
            with torch.no_grad():
                view = y.view(1, 1)
            return (view + 1.0).expand(64, 64) * x.sigmoid()

    model, x = mlp(Views()), torch.randn(64, 32)
    twin = converted_twin(model)
    with no_warnings():
        for value in (1.0, 2.0):
            Views.value = torch.full((1,), value, requires_grad=True)
            assert_same_steps(model, twin, x, steps=1, tolerance=0)


def test_number_that_a_subclass_changes_is_not_recorded() -> None:
    class Scales(Tensor):
        factor = 1.0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                if func in (Tensor.add, Tensor.__add__):
                    return args[0].as_subclass(Tensor) + args[1] * cls.factor
                return func(*args, **(kwargs or {}))

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(x) * (x.as_subclass(Scales) + 2.0)

    model, x = mlp(Sum()), torch.randn(64, 32)
    twin = converted_twin(model)
    with no_warnings():
        for factor in (1.0, 3.0):
            Scales.factor = factor
            assert_same_steps(model, twin, x, steps=1, tolerance=0)


def _add_to_a_slice(y: Tensor) -> None:
    y[:, 1:] += 1.0


VIEW_WRITES: dict[str, Callable[[Tensor], object]] = {
    "slice": _add_to_a_slice,
    "transposed": lambda y: y.t().sub_(1.0),
    "chunk": lambda y: y.chunk(2)[0].add_(1.0),
    "unbind": lambda y: y.unbind()[0].mul_(2.0),
}


@pytest.mark.parametrize("write", VIEW_WRITES)
def test_write_to_a_view_without_a_gradient_matches_pytorch(write: str) -> None:
    """Reading the `grad_fn` of such a view raises."""

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2.0
            with torch.no_grad():
                VIEW_WRITES[write](y)
            return y.tanh() * 3.0

    model, x = mlp(Writes()), torch.randn(64, 32)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, tolerance=0)


class Raising(nn.Module):
    """Raises in the middle of its forward, in its first call."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error, self.calls = error, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            raise self.error("first call")
        return x.tanh() * 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_inside_a_module_leaves_no_mode(error: type[BaseException]) -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.raising = nn.Linear(8, 8), Raising(error)
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            try:
                y = self.raising(x)
            except ValueError:
                y = self.raising(x)
            return self.last(y)

    twin, x = converted_twin(Catching()), torch.randn(4, 8)
    depth = torch._C._len_torch_function_stack()
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            twin(x)
    else:
        twin(x)
    assert torch._C._len_torch_function_stack() == depth
    fresh = Catching()
    fresh.raising.calls = 1
    assert_same_steps(fresh, converted_twin(fresh), x, tolerance=0)


class Recording(TorchFunctionMode):
    """Records the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", func))
        return func(*args, **(kwargs or {}))


def test_mode_of_a_module_that_calls_itself_stays_active() -> None:
    """The end of the inner call removes neither the user's mode nor the outer call's."""

    class Calling(nn.Module):
        def forward(self, x: Tensor, depth: int = 1) -> Tensor:
            if depth == 0:
                return x * 2.0
            with Recording() as mode:
                active = torch._C._len_torch_function_stack()
                x = self(x, depth - 1)
                assert torch._C._len_torch_function_stack() == active
                x = 0.5 + torch.tanh(x)
            assert "tanh" in mode.seen
            return x * x.sigmoid()

    model, x = mlp(Calling()), torch.randn(4, 32)
    assert_same_steps(model, converted_twin(model), x, tolerance=0)


def test_number_that_a_user_mode_changes_is_not_recorded() -> None:
    """The mode adds another number from the second step on."""

    class Changing(TorchFunctionMode):
        number = 0.5

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is Tensor.add and args[1:] == (0.5,):
                args = args[0], self.number
            return func(*args, **(kwargs or {}))

    model, x = mlp(Sums(lambda t, n: t + 0.5)), torch.randn(64, 32)
    twin = converted_twin(model)
    for step in range(3):
        with Changing() as mode:
            mode.number = 0.5 * (step + 1)
            assert_same_steps(model, twin, x, steps=1, tolerance=0)


def test_tensor_that_only_a_dropped_graph_saves_is_not_a_leaf() -> None:
    """As in PyTorch, the tensor may be modified when the graph of the probe is gone."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.other(z)
        y.square().mean().item()  # a probe
        w = F.relu(y)
        with torch.no_grad():
            y.mul_(1.5)
        return m.conv(m.other(w)) + y.mean()

    model, x = Program(compute), images()
    assert_same_steps(model, converted_twin(model), x)


def test_user_mode_sees_the_same_calls() -> None:
    model, x = mlp(NewGELU()), torch.randn(4, 32)
    watched = {"mul", "add", "tanh", "pow", "linear", "clone", "detach", "to", "sub", "abs"}
    seen = []
    for network in (model, converted_twin(model)):
        network(x)
        with Recording() as mode:
            network(x)
        seen.append([name for name in mode.seen if name in watched])
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("without_products")
def test_output_that_a_norm_saves_is_a_leaf() -> None:
    """ReLU of a convolution is recomputed from the convolution's output, which a norm saves."""

    class Branches(Program):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first = self.first(x)
            return self.norm(first).double(), self.conv(F.relu(first))

    model, x = Branches(lambda *_: None), images(samples=16)
    twin = converted_twin(model, max_ops=4)
    assert_same_steps(model, twin, x)
    saved = inplace_ops.saved_bytes(model, x) - inplace_ops.saved_bytes(twin, x)
    assert saved == pytest.approx(16 * 6 * 8 * 8 * 4, abs=256)


OUTPUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "function": TwoOutputs.apply,
    "topk": lambda z: tuple(torch.topk(z, 8, -1)[:1]) * 2,
    "unbind": lambda z: z.repeat(2, 1, 1, 1, 1).unbind(0),
    "layer_norm": lambda z: torch.native_layer_norm(z, (8,), None, None, 1e-5)[:2],
    "split": lambda z: z.clamp(-1, 1).split(3, 1),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_other_outputs_of_an_operation_are_told_apart(name: str) -> None:
    """One consumer saves the first output; an activation reads the second one."""

    def compute(m: Any, z: Tensor) -> list[Tensor]:
        first, second = OUTPUTS[name](z)
        saved = first.atan()
        return [saved, second.atan().double(), F.relu(second).sin(), torch.sigmoid(first) * first]

    model, x = Program(compute), images()
    assert_same_steps(model, converted_twin(model), x)


def test_module_that_returns_another_output_matches_pytorch() -> None:
    """The module keeps tensors that read the first output. In the first step both are equal."""

    def compute(m: Any, x: Tensor) -> Tensor:
        first, second = torch.unsafe_chunk(x, 2, -1)
        m.scaled, m.pair = m.weight * first, torch.cat([first, first], -1)
        return second

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 64)
            self.halves = Parts(compute, weight=nn.Parameter(torch.rand(32)))
            self.last = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            second = self.halves(self.first(x))
            return self.last(self.halves.pair) + second + self.halves.scaled

    model, x = Network(), torch.randn(64, 32)
    weight, bias = model.first.weight.data, model.first.bias.data
    weight[32:], bias[32:] = weight[:32], bias[:32]
    twin = converted_twin(model)
    with no_warnings():
        assert_same_steps(model, twin, x, tolerance=0)
        weight[32:] *= -1.5
        assert_same_steps(model, twin, x, tolerance=0)


@pytest.mark.parametrize(
    ("outputs", "size"),
    [(TwoOutputs.apply, 64), (lambda h: torch.unsafe_chunk(h, 2, -1), 32)],
    ids=["function", "unsafe_chunk"],
)
def test_first_output_may_be_written_to_if_only_the_second_is_saved(
    outputs: Callable[[Tensor], tuple[Tensor, ...]], size: int
) -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        first, second = outputs(m.first(x))
        first = m.noted(first)
        total = m.second(second) + m.third(F.relu(first))
        with torch.no_grad():
            first.zero_()
        return total

    model, x = (
        Parts(
            compute,
            first=nn.Linear(32, 64),
            noted=nn.Identity(),
            second=nn.Linear(size, 8),
            third=nn.Linear(size, 8),
        ),
        torch.randn(64, 32),
    )
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, tolerance=0)


def test_tensor_that_a_hook_unpacks_is_not_noted_as_the_output() -> None:
    """It is a copy with a version of its own. In the first step the write changes nothing."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.other(z)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            energy = (y * y).square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        with torch.no_grad():
            y.add_(m.step - 1)
        return m.conv(F.relu(y) + force)

    model, x = Program(compute), images()
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, steps=3)


@pytest.mark.parametrize("begin", [1, 3])
def test_write_between_two_reads_matches_pytorch(begin: int) -> None:
    """The second consumer saves the tensor at a version that the first one has not read."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.other(z)
        doubled = y * 2.0
        if m.step >= begin:
            with torch.no_grad():
                y.add_(1)
        return m.conv(m.other(doubled)) + y.atan().mean() + m.conv(doubled + 0 * y.pow(2))

    model, x = Program(compute), images()
    assert_same_steps(model, converted_twin(model), x, steps=4)
