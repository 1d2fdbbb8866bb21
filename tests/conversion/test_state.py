"""Measuring on an example leaves everything as it was, and measures whatever a model does."""

from __future__ import annotations

import pickle
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _support.networks import examples, is_converted, network
from _support.twins import Parts
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops.conversion.state import State
from inplace_ops.conversion.verify import Gradients

MEASURE = pytest.mark.parametrize("measure", [inplace_ops.convert, inplace_ops.analyze])


class Writes(nn.Module):
    """A model whose forward calls `write` with it and its argument, and may fail then."""

    def __init__(self, write: Callable[[Any, Tensor], object], fails: bool = False) -> None:
        super().__init__()
        self.write, self.fails = write, fails
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
        self.nested = {"calls": [Counter()], "pair": (torch.zeros(3), [], (torch.ones(2),))}
        self.inference, self.generator = inference_tensor(), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self, x)
        if self.fails:
            raise LookupError
        return self.net(x) + self.complex.real.sum()


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def set_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value


def register_hooks(model: Writes) -> None:
    model.tied.register_hook(lambda gradient: None)
    model.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model.net[3].register_forward_hook(lambda m, args, output: None)


def draw(model: Writes) -> None:
    random.random(), np.random.rand(), torch.rand(1), torch.rand(1, generator=model.generator)


def write_in_containers(model: Writes) -> None:
    first, second, (third,) = model.nested["pair"]
    first.add_(1), second.append(1), set_data(third, torch.zeros(5))
    model.nested["calls"][0]["forward"] += 1
    model.nested["x"] = 1


WRITES: dict[str, Callable[[Writes, Tensor], Any]] = {
    "new data": lambda m, x: set_data(m.frozen, m.frozen * 0.5),
    "new data of another layout": lambda m, x: set_data(
        m.frozen, m.frozen.t().contiguous().t() * 2
    ),
    "new data of another shape": lambda m, x: set_data(m.frozen, torch.zeros(7)),
    "data in place": lambda m, x: m.frozen.data.mul_(2),
    "in place": lambda m, x: m.net[0].weight.add_(1),
    "part of shared memory": lambda m, x: m.tied[0].zero_(),
    "resized": lambda m, x: m.observed.resize_(4).fill_(1),
    "freed": lambda m, x: m.frozen.untyped_storage().resize_(0),
    "float8": lambda m, x: m.narrow.view(torch.uint8).add_(1),
    "complex": lambda m, x: m.complex.mul_(1j),
    "NaN": lambda m, x: m.nan.view(torch.int32).add_(1),
    "expanded": lambda m, x: m.expanded[0].add_(1),
    "sparse": lambda m, x: m.sparse.mul_(2),
    "new sparse": lambda m, x: set_data(m.sparse, torch.ones(4, 4).to_sparse()),
    "quantized": lambda m, x: m.quantized.copy_(torch.zeros(4)),
    "attribute": lambda m, x: m.cache[0].zero_(),
    "new attribute": lambda m, x: m.cache.append(m.frozen),
    "NumPy": lambda m, x: m.frozen.numpy().fill(3),
    "gradient needed": lambda m, x: m.frozen.requires_grad_(),
    "new parameter": lambda m, x: setattr(m, "frozen", nn.Parameter(torch.zeros(3))),
    "new buffer": lambda m, x: setattr(m, "nan", m.nan + 1),
    "hooks": lambda m, x: register_hooks(m),
    "training flag": lambda m, x: m.net[1].eval(),
    "attribute of a parameter": lambda m, x: setattr(m.net[0].weight, "note", 1),
    "containers": lambda m, x: write_in_containers(m),
    "random states": lambda m, x: draw(m),
    "argument": lambda m, x: x.add_(1),
    "nothing": lambda m, x: None,
}


def write_everything(model: Writes, x: Tensor) -> None:
    for name in ("in place", "attribute", *[*WRITES][-9:]):
        WRITES[name](model, x)


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


def tensors_of(model: Writes) -> dict[str, Tensor]:
    first, _, (second,) = model.nested["pair"]
    return {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
        **{"cache": model.cache[0], "inference": model.inference, "first": first, "second": second},
    }


def all_state(model: Writes, x: Tensor) -> list[Any]:
    """Return all that a forward may change."""
    nested = model.nested
    return [
        {name: (id(tensor), state_of(tensor)) for name, tensor in tensors_of(model).items()},
        [(m.training, len(m._forward_hooks)) for m in model.modules()],
        (len(model.cache), {*nested}, dict(nested["calls"][0]), list(nested["pair"][1])),
        [{**vars(parameter)} for parameter in model.parameters()],
        [g.tolist() for g in (model.generator.get_state(), torch.get_rng_state(), x)],
        (random.getstate(), pickle.dumps(np.random.get_state()), torch.is_grad_enabled()),
    ]


def assert_as_before(
    measure: Callable[..., Any], write: Callable[[Writes, Tensor], object], fails: bool
) -> None:
    model, x = Writes(write), torch.randn(16, 8)
    model.net(x).sum().backward()
    model.fails = fails
    before = all_state(model, x)
    versions = {name: t._version for name, t in model.named_parameters()}
    with pytest.raises(LookupError) if fails else nullcontext():
        measure(model, x)
    assert is_converted(model) == (measure is inplace_ops.convert and not fails)
    inplace_ops.revert(model)
    for actual, expected in zip(all_state(model, x), before, strict=True):
        assert actual == expected
    if write is WRITES["nothing"]:  # restoring writes only what differs
        assert versions == {name: t._version for name, t in model.named_parameters()}


@pytest.mark.parametrize("write", WRITES)
def test_state_is_as_before_whatever_forward_writes(
    write: str, recwarn: pytest.WarningsRecorder
) -> None:
    assert_as_before(inplace_ops.convert, WRITES[write], fails=False)
    assert not [str(w.message) for w in recwarn if "restore" in str(w.message)]


@MEASURE
@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_state_is_as_before_if_forward_writes_everything(
    measure: Callable[..., Any], fails: bool
) -> None:
    assert_as_before(measure, write_everything, fails)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_gradient_of_an_attribute_is_as_before(has_gradient: bool) -> None:
    """A reentrant checkpoint accumulates it."""

    def compute(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.net, x * m.scale, use_reentrant=True)

    model = Parts(compute, net=network(), scale=torch.ones(1, requires_grad=True))
    model.scale.grad = torch.full((1,), 3.0) if has_gradient else None
    inplace_ops.convert(model, examples())
    assert model.scale.grad == (3.0 if has_gradient else None)


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

    def compute(m: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: other.sum().backward())
        thread.start()
        thread.join()
        return m.net(x)

    inplace_ops.convert(Parts(compute, net=network()), examples())
    assert len(steps) > 0
    assert other.tolist() == [1.0 - len(steps)] * 5


@pytest.mark.parametrize("has_stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("after", [False, True], ids=["gradient hook", "accumulation hook"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_that_hooks_step_are_as_before(
    make: str, after: bool, has_stepped: bool
) -> None:
    """One optimizer for each parameter, as GaLore and LOMO have, and one of another model."""

    def compute(m: Any, x: Tensor) -> Tensor:
        """Only `backward()` accumulates, and only a reentrant checkpoint makes a run call it."""
        return checkpoint(m.net, x, use_reentrant=True)

    model, x = Parts(compute, net=network()) if after else network(), examples().requires_grad_()
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


def transforming(transform: Callable[..., Tensor]) -> nn.Module:
    """Return a model that calls `transform` with a function of a tensor and the tensor."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.net(x)
        return y * transform(lambda v: v.sin().sum(), y.detach())

    layers = nn.Linear(16, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 16)
    return Parts(compute, net=nn.Sequential(*layers))


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
    model, x = transforming(TRANSFORMS[transform]), torch.randn(64, 16)
    plain = transforming(lambda f, x: f(x))
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

    def compute(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        raise RuntimeError("saved tensors default hooks are disabled")

    model = Parts(compute, net=network(), calls=0)
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

    def compute(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.net(x)
        _, stale = y.chunk(2, 1)
        y.mul_(2)
        return y.mean(), stale

    for measured in (True, False):
        model = Parts(compute, net=network())
        with warnings.catch_warnings(), nullcontext():
            warnings.simplefilter("error")
            report = inplace_ops.convert(model, examples() if measured else None)
            model(examples())[0].backward()
        assert report.saved_bytes_after < report.saved_bytes_before
