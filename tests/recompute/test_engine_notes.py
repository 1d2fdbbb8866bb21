"""Leaves that other consumers save, proofs that come late, and notes inside modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.networks import RMSNorm
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


# Forwards of a module, which know the number of the step. In the first one the engine compares.


def added_without_a_gradient(m: Any, x: Tensor) -> Tensor:
    """The write changes y, but neither its node nor the negative."""
    y = x.sigmoid() + 1.0
    negative = -y
    with torch.no_grad():
        y.add_(float(m.step))
    return negative


def view_without_a_gradient(m: Any, x: Tensor) -> Tensor:
    """Neither the view nor the number has a producer. In the first step the view holds 1.0."""
    y = torch.full((1,), float(m.step), requires_grad=True) * 1.0
    with torch.no_grad():
        view = y.view(1, 1)
    return (view + 1.0).expand(64, 64) * x.sigmoid()


class Scales(Tensor):
    """Multiplies numbers before it adds them."""

    factor = 1.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func in (Tensor.add, Tensor.__add__):
                return args[0].as_subclass(Tensor) + args[1] * cls.factor
            return func(*args, **(kwargs or {}))


def changed_by_a_subclass(m: Any, x: Tensor) -> Tensor:
    Scales.factor = float(m.step)
    return F.silu(x) * (x.as_subclass(Scales) + 2.0)


class Changing(TorchFunctionMode):
    """Adds another number than 0.5."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.add and args[1:] == (0.5,):
            args = args[0], self.number
        return func(*args, **(kwargs or {}))


def changed_by_a_mode(m: Any, x: Tensor) -> Tensor:
    with Changing(0.5 * m.step):
        return m.inner(x)


def written_to(write: Callable[[Tensor], object]) -> Callable[[Any, Tensor], Tensor]:
    """Write to a view under no_grad. Reading the `grad_fn` of such a view raises."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = x * 2.0
        with torch.no_grad():
            write(y)
        return y.tanh() * 3.0

    return compute


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "number added without a gradient": added_without_a_gradient,
    "number and a view without a gradient": view_without_a_gradient,
    "number changed by a subclass": changed_by_a_subclass,
    "number changed by the user's mode": changed_by_a_mode,
    "write to a slice": written_to(lambda y: y[:, 1:].add_(1.0)),
    "write to a transposed view": written_to(lambda y: y.t().sub_(1.0)),
    "write to a chunk": written_to(lambda y: y.chunk(2)[0].add_(1.0)),
    "write to an unbound row": written_to(lambda y: y.unbind()[0].mul_(2.0)),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_forward_of_a_module_matches_pytorch(forward: str) -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        m.step += 1
        return FORWARDS[forward](m, x)

    inner = Sums(lambda t, n: t + 0.5)
    model, x = mlp(Parts(compute, step=0, inner=inner)), torch.randn(64, 32)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, steps=3, tolerance=0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_inside_a_module_leaves_no_mode(error: type[BaseException]) -> None:
    def raising(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        if m.calls == 1:
            raise error("first call")
        return x.tanh() * 2

    def catching(m: Any, x: Tensor) -> Tensor:
        try:
            return m.raising(x)
        except ValueError:
            return m.raising(x)

    model, x = mlp(Parts(catching, raising=Parts(raising, calls=0))), torch.randn(4, 32)
    twin = converted_twin(model)
    depth = torch._C._len_torch_function_stack()
    with pytest.raises(error) if error is KeyboardInterrupt else nullcontext():
        twin(x)
    assert torch._C._len_torch_function_stack() == depth
    model[1].raising.calls = 1
    assert_same_steps(model, converted_twin(model), x, tolerance=0)


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

    def compute(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        first = m.first(x)
        return m.norm(first).double(), m.conv(F.relu(first))

    parts = Program(lambda *_: None)
    model = Parts(compute, first=parts.first, norm=parts.norm, conv=parts.conv)
    x = images(samples=16)
    twin = converted_twin(model, max_ops=4)
    assert_same_steps(model, twin, x)
    saved = inplace_ops.saved_bytes(model, x) - inplace_ops.saved_bytes(twin, x)
    assert saved == pytest.approx(16 * 6 * 8 * 8 * 4, abs=256)


# Functions of a norm's output, which know the number of the step.


def saved_by_a_dropped_graph_alone(m: Any, z: Tensor) -> Tensor:
    """As in PyTorch, y may be modified when the graph of the probe is gone."""
    y = m.other(z)
    y.square().mean().item()  # a probe
    w = F.relu(y)
    with torch.no_grad():
        y.mul_(1.5)
    return m.conv(m.other(w)) + y.mean()


def unpacked_by_a_hook(m: Any, z: Tensor) -> Tensor:
    """The hook's copy of y has a version of its own. In the first step the write adds 0."""
    y = m.other(z)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        energy = (y * y).square().sum()
    (force,) = torch.autograd.grad(energy, y, create_graph=True)
    with torch.no_grad():
        y.add_(m.step - 1)
    return m.conv(F.relu(y) + force)


def written_to_between_two_reads(m: Any, z: Tensor, begin: int) -> Tensor:
    """The second consumer saves the tensor at a version that the first one has not read."""
    y = m.other(z)
    doubled = y * 2.0
    if m.step >= begin:
        with torch.no_grad():
            y.add_(1)
    return m.conv(m.other(doubled)) + y.atan().mean() + m.conv(doubled + 0 * y.pow(2))


def of_two_outputs(split: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], list[Tensor]]:
    """One consumer saves the first output of one node; an activation reads the second one."""

    def compute(m: Any, z: Tensor) -> list[Tensor]:
        first, second = split(z)
        saved = first.atan()
        return [saved, second.atan().double(), F.relu(second).sin(), torch.sigmoid(first) * first]

    return compute


PROGRAMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "saved by a dropped graph alone": saved_by_a_dropped_graph_alone,
    "unpacked by a hook": unpacked_by_a_hook,
    "written to between two reads": partial(written_to_between_two_reads, begin=1),
    "written to between two reads, later": partial(written_to_between_two_reads, begin=3),
    "two outputs of a function": of_two_outputs(TwoOutputs.apply),
    "topk": of_two_outputs(lambda z: tuple(torch.topk(z, 8, -1)[:1]) * 2),
    "unbind": of_two_outputs(lambda z: z.repeat(2, 1, 1, 1, 1).unbind(0)),
    "layer_norm": of_two_outputs(lambda z: torch.native_layer_norm(z, (8,), None, None, 1e-5)[:2]),
    "split": of_two_outputs(lambda z: z.clamp(-1, 1).split(3, 1)),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_matches_pytorch(program: str) -> None:
    model, x = Program(PROGRAMS[program]), images()
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, steps=4)


def test_module_that_returns_another_output_matches_pytorch() -> None:
    """The module keeps tensors that read the first output. In the first step both are equal."""

    def halves(m: Any, x: Tensor) -> Tensor:
        first, second = torch.unsafe_chunk(x, 2, -1)
        m.scaled, m.pair = m.weight * first, torch.cat([first, first], -1)
        return second

    def compute(m: Any, x: Tensor) -> Tensor:
        second = m.halves(m.first(x))
        return m.last(m.halves.pair) + second + m.halves.scaled

    inner = Parts(halves, weight=nn.Parameter(torch.rand(32)))
    model = Parts(compute, first=nn.Linear(32, 64), halves=inner, last=nn.Linear(64, 32))
    x, weight, bias = torch.randn(64, 32), model.first.weight.data, model.first.bias.data
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

    sizes = {"first": (32, 64), "second": (size, 8), "third": (size, 8)}
    layers = {name: nn.Linear(*each) for name, each in sizes.items()}
    model, x = Parts(compute, **layers, noted=nn.Identity()), torch.randn(64, 32)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, tolerance=0)
