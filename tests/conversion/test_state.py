"""Measuring on an example leaves everything as it was, and measures whatever a model does."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.networks import examples, is_converted, network
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops.conversion.state import State
from inplace_ops.conversion.verify import Gradients

pytestmark = pytest.mark.usefixtures("source")

MEASURE = pytest.mark.parametrize("measure", [inplace_ops.convert, inplace_ops.analyze])


class Writes(nn.Module):
    """A model whose forward calls `write` with it."""

    def __init__(self, write: Callable[[Any], None] = lambda model: None) -> None:
        super().__init__()
        self.write = write
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, 8))
        self.frozen = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.tied = nn.Parameter(self.frozen.data[:2])  # shares memory
        self.narrow = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.register_buffer("nan", torch.full((4, 4), torch.nan))
        self.register_buffer("expanded", torch.randn(1, 4).expand(3, 4))
        self.register_buffer("observed", torch.empty(0))
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer(
            "quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        )
        self.cache = [torch.randn(4, 4)]
        self.inference = inference_tensor()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        return self.net(x) + self.complex.real.sum()


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def set_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value


def register_hooks(model: Writes) -> None:
    model.tied.register_hook(lambda gradient: None)
    model.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


WRITES: dict[str, Callable[[Writes], Any]] = {
    "new data": lambda m: set_data(m.frozen, m.frozen * 0.5),
    "new data of another layout": lambda m: set_data(m.frozen, m.frozen.t().contiguous().t() * 2),
    "new data of another shape": lambda m: set_data(m.frozen, torch.zeros(7)),
    "data in place": lambda m: m.frozen.data.mul_(2),
    "in place": lambda m: m.net[0].weight.add_(1),
    "part of shared memory": lambda m: m.tied[0].zero_(),
    "resized": lambda m: m.observed.resize_(4).fill_(1),
    "freed": lambda m: m.frozen.untyped_storage().resize_(0),
    "float8": lambda m: m.narrow.view(torch.uint8).add_(1),
    "complex": lambda m: m.complex.mul_(1j),
    "NaN": lambda m: m.nan.view(torch.int32).add_(1),
    "expanded": lambda m: m.expanded[0].add_(1),
    "sparse": lambda m: m.sparse.mul_(2),
    "new sparse": lambda m: set_data(m.sparse, torch.ones(4, 4).to_sparse()),
    "quantized": lambda m: m.quantized.copy_(torch.zeros(4)),
    "attribute": lambda m: m.cache[0].zero_(),
    "new attribute": lambda m: m.cache.append(m.frozen),
    "NumPy": lambda m: m.frozen.numpy().fill(3),
    "gradient needed": lambda m: m.frozen.requires_grad_(),
    "new parameter": lambda m: setattr(m, "frozen", nn.Parameter(torch.zeros(3))),
    "hooks": register_hooks,
    "nothing": lambda m: None,
}


def tensors_of(model: Writes) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
        "cache": model.cache[0],
        "inference": model.inference,
    }


def bytes_of(tensor: Tensor) -> list[int]:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).tolist()


def state_of(tensor: Tensor) -> Any:
    """Return all that may change of a tensor, except its version."""
    if tensor.layout is torch.sparse_coo:
        return [state_of(tensor._indices()), state_of(tensor._values())]
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [
        *(
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            bytes_of(tensor),
        ),
        *(tensor.requires_grad, [len(each or ()) for each in hooks]),
        None if tensor.grad is None else (id(tensor.grad), bytes_of(tensor.grad)),
    ]


@pytest.mark.parametrize("write", WRITES)
def test_tensors_are_as_before_whatever_forward_writes(
    write: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = Writes(WRITES[write])
    tensors = tensors_of(model)
    before = {name: (id(tensor), state_of(tensor)) for name, tensor in tensors.items()}
    versions = {name: t._version for name, t in model.named_parameters()}
    inplace_ops.convert(model, torch.randn(16, 8))
    tensors = tensors_of(model)
    assert {name: (id(tensor), state_of(tensor)) for name, tensor in tensors.items()} == before
    assert len(model.cache) == 1
    if write == "nothing":  # restoring writes only what differs
        assert versions == {name: t._version for name, t in model.named_parameters()}
    assert not [str(w.message) for w in recwarn if "restore" in str(w.message)]


@MEASURE
def test_gradients_are_as_before_if_hooks_write_to_them(measure: Callable[..., Any]) -> None:
    """The gradients are views of one buffer, as in DDP, to which a hook writes."""
    model, x = network(), examples()
    parameters = [*model.parameters()]
    buffer = torch.randn(sum(p.numel() for p in parameters))

    def write(gradient: Tensor) -> None:
        buffer.add_(1)

    for parameter, flat in zip(
        parameters, buffer.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = flat.view_as(parameter)
        parameter.register_hook(write)
    before, gradients = buffer.clone(), [p.grad for p in parameters]
    measure(model, x)
    assert torch.equal(buffer, before)
    assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))


def test_fake_tensors_are_not_called_changed() -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with State(nn.Linear(8, 8), []) as state, state.preserved():
            pass


@MEASURE
def test_tensor_that_cannot_be_restored_is_named(measure: Callable[..., Any]) -> None:
    class Mkldnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.register_buffer("opaque", torch.ones(4).to_mkldnn())
            self.writes = True

        def forward(self, x: Tensor) -> Tensor:
            if self.writes:
                self.opaque.mul_(2)
            return self.net(x)

    model = Mkldnn()
    with pytest.warns(UserWarning, match="changed `opaque`, which cannot be restored") as caught:
        measure(model, examples())
    assert len(caught) == 1
    model.writes = False
    inplace_ops.revert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(model, examples())


# Optimizers that hooks step.


class Projector:
    """State of an optimizer that is not a tensor, as GaLore's."""

    def __init__(self) -> None:
        self.basis = torch.zeros(3)
        self.calls = 0


class Projected(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.5
            for parameter in group["params"]:
                projector = self.state[parameter].setdefault("projector", Projector())
                projector.basis += 1
                projector.calls += 1
        super().step()


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "projected": partial(Projected, lr=0.1),
}


def optimizer_state(optimizer: torch.optim.Optimizer) -> Any:
    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return id(value), value.tolist()
        if isinstance(value, Projector):
            return id(value), copied(vars(value))
        if isinstance(value, dict):
            return {id(k) if isinstance(k, Tensor) else k: copied(v) for k, v in value.items()}
        if isinstance(value, list):
            return [*map(copied, value)]
        return value

    return copied(optimizer.state), copied(optimizer.param_groups), {*vars(optimizer)}


class Attributes(nn.Module):
    """Forward writes to tensors and lists in tuples, and backward to an attribute's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = network(), torch.ones(1, requires_grad=True)
        self.pair: tuple[Any, ...] = (torch.zeros(3), [], {"inner": (torch.ones(2),)})

    def forward(self, x: Tensor) -> Tensor:
        self.pair[0].add_(1)
        self.pair[1].append(1)
        self.pair[2]["inner"][0].data = torch.zeros(5)
        return checkpoint(self.net, x * self.scale, use_reentrant=True)

    def look(self) -> Any:
        first, second, third = self.pair
        gradient = None if self.scale.grad is None else self.scale.grad.tolist()
        return first.tolist(), list(second), third["inner"][0].tolist(), gradient


@pytest.mark.parametrize("has_gradient", [False, True])
def test_attributes_in_tuples_are_as_before(has_gradient: bool) -> None:
    model = Attributes()
    if has_gradient:
        model.scale.grad = torch.full((1,), 3.0)
    before = model.look()
    inplace_ops.convert(model, examples())
    assert model.look() == before


def test_optimizer_of_another_thread_keeps_its_step() -> None:
    """A thread that trains another model, in gradient hooks, while an example is measured."""
    other = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([other], 1.0)
    steps = []

    def step(parameter: Tensor) -> None:
        optimizer.step()
        steps.append(1)
        parameter.grad = None

    other.register_post_accumulate_grad_hook(step)

    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: other.sum().backward())
            thread.start()
            thread.join()
            return self.net(x)

    inplace_ops.convert(Training(), examples())
    assert len(steps) > 0
    assert other.tolist() == [1.0 - len(steps)] * 5


@pytest.mark.parametrize("has_stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("after", [False, True], ids=["gradient hook", "accumulation hook"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_that_hooks_step_are_as_before(
    make: str, after: bool, has_stepped: bool
) -> None:
    """One optimizer for each parameter, as GaLore and LOMO have, and one of another model."""

    class Reentrant(nn.Module):
        """Only `backward()` accumulates, and only a reentrant checkpoint makes a run call it."""

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=True)

    model, x = Reentrant() if after else network(), examples().requires_grad_()
    other = nn.Parameter(torch.randn(5))
    parameters = [*model.parameters()]
    optimizers = {p: OPTIMIZERS[make]([p]) for p in parameters}
    optimizers[other] = OPTIMIZERS[make]([other])

    def step(parameter: Tensor) -> None:
        if not after:
            parameter.grad = torch.ones_like(parameter)
        other.grad = torch.ones_like(other)
        for each in (parameter, other):
            optimizers[each].step()
            optimizers[each].zero_grad()

    if has_stepped:
        for p in [*parameters, other]:
            p.grad = torch.ones_like(p)
            optimizers[p].step()
            p.grad = None
    for p in parameters:
        if after:
            p.register_post_accumulate_grad_hook(step)
        else:
            p.register_hook(lambda gradient, p=p: step(p))

    before = [(p.tolist(), optimizer_state(o)) for p, o in optimizers.items()]
    inplace_ops.convert(model, x)
    assert [(p.tolist(), optimizer_state(o)) for p, o in optimizers.items()] == before
    assert not _global_optimizer_pre_hooks
    loss = model(x).square().sum()
    loss.backward()  # the hooks still work
    assert all(p.tolist() != old[0] for p, old in zip(optimizers, before, strict=True))


# Models that are hard to measure.


class Complex(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32, dtype=dtype))
        self.register_buffer("phase", torch.randn(32, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.to(self.weight.dtype) @ self.weight) * self.phase


class Float8(nn.Module):
    def __init__(self, is_output: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32).to(torch.float8_e4m3fn))
        self.register_buffer("scale", torch.ones(32).to(torch.float8_e5m2))
        self.norm, self.is_output = nn.LayerNorm(32), is_output

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(x @ self.weight.float())) * self.scale.float()
        return y.to(torch.float8_e5m2) if self.is_output else y


class Transforms(nn.Module):
    """A model whose forward calls `transform` with a function of a tensor and the tensor."""

    def __init__(self, transform: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 16))
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return y * self.transform(lambda v: v.sin().sum(), y.detach())


def without_hooks(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return function(x)


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(()))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "disabled": without_hooks,
}


def assert_trains_alike(model: nn.Module, x: Tensor) -> None:
    """Convert a model on an example, and compare its gradients with the original's."""

    def gradients() -> list[Tensor]:
        y = model(x)
        weights = torch.ones(y.shape).to(y.dtype)
        return [*torch.autograd.grad(y, [*model.parameters()], weights)]

    expected, before = gradients(), [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inplace_ops.analyze(model, x)
        report = inplace_ops.convert(model, x)
    assert is_converted(model)
    assert report.saved_bytes_after <= report.saved_bytes_before
    assert [bytes_of(p) for p in model.parameters()] == [bytes_of(p) for p in before]
    for actual, each in zip(gradients(), expected, strict=True):
        assert actual.dtype == each.dtype
        both = [g if g.is_complex() else g.float() for g in (actual, each)]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [Complex, partial(Complex, torch.complex128), partial(Float8, True), partial(Float8, False)],
    ids=["complex64", "complex128", "float8 output", "float8"],
)
def test_models_of_rare_dtypes_are_measured(make: Callable[[], nn.Module]) -> None:
    assert_trains_alike(make(), torch.randn(64, 16))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_models_that_disable_saved_tensor_hooks_are_measured(transform: str) -> None:
    model, x = Transforms(TRANSFORMS[transform]), torch.randn(64, 16)
    plain = Transforms(lambda f, x: f(x))
    inplace_ops.convert(plain, x)
    saved = inplace_ops.saved_bytes(model, x)
    report = inplace_ops.analyze(model, x)
    assert report.saved_bytes_before == saved > 0
    assert report.saved_bytes_after < saved
    assert_trains_alike(model, x)
    assert inplace_ops.saved_bytes(model, x) == report.saved_bytes_after
    with torch.autograd.graph.disable_saved_tensors_hooks("nor here"):
        assert inplace_ops.saved_bytes(model, x) == report.saved_bytes_after


def test_error_of_hooks_that_forward_disables_itself_is_raised() -> None:
    """Only the error of a forward that rejects measuring is handled, whatever its message."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = network(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            raise RuntimeError("saved tensors default hooks are disabled")

    model = Fails()
    with pytest.raises(RuntimeError, match="are disabled"):
        inplace_ops.saved_bytes(model, examples())
    assert model.calls == 1


def test_distance_counts_imaginary_parts() -> None:
    model = Complex()
    results = [Gradients.__new__(Gradients) for _ in range(2)]
    for each, value in zip(results, (1 + 1j, 1 - 1j), strict=True):
        each.values = {"weight": torch.full_like(model.weight, value)}
    assert results[0].distance(results[1]) == pytest.approx(2**0.5)


def test_stale_output_is_left_out() -> None:
    """Autograd raises for a stale view, which is legal while nothing uses it."""

    class Stale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.net(x)
            _, stale = y.chunk(2, 1)
            y.mul_(2)
            return y.mean(), stale

    for measured in (True, False):
        model = Stale()
        with warnings.catch_warnings(), nullcontext():
            warnings.simplefilter("error")
            report = inplace_ops.convert(model, examples() if measured else None)
            model(examples())[0].backward()
        assert report.saved_bytes_after < report.saved_bytes_before
