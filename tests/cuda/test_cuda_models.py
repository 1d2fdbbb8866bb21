"""Converted models on a GPU: gradients, threads, streams, CUDA graphs, memory."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from _support.gpu import (
    BFLOAT,
    DOUBLE,
    FLOAT,
    HALF,
    captured,
    each_backend,
    fast_products,
    in_both_formats,
    no_synchronization,
    on_a_gpu,
    only,
)
from _support.twins import (
    Step,
    assert_same_step,
    no_warnings,
    random_like,
    recomputed,
    step_of,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import inplace_ops
from inplace_ops.conversion.report import Report
from inplace_ops.recompute import norms
from inplace_ops.recompute.packed import Recomputed

pytestmark = on_a_gpu


class Network(NamedTuple):
    """A model, the shape of its input, and the modules that save less after conversion."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    saving: tuple[str, ...]


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv1, self.norm1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), norm(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), norm(16)
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x)))))
        return self.last(self.act2(x + y))


class SqueezeExcitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.inner, self.gate = nn.SiLU(), nn.Sigmoid()
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        scale = self.gate(self.up(self.inner(self.down(self.pool(x)))))
        return self.last(x * scale)


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Linear(32, 64), nn.RMSNorm(64), nn.SiLU()
        self.gate, self.up = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = self.norm(x)
        return x + self.down(self.act(self.gate(z)) * self.up(z))


class Attention(nn.Module):
    """Attention as in ViTs, with norms before the linear layer and of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 128), nn.LayerNorm(128)
        self.qkv, self.out = nn.Linear(128, 3 * 128), nn.Linear(128, 128)
        self.norm_of_queries, self.norm_of_keys = nn.LayerNorm(64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        query, key = self.norm_of_queries(query), self.norm_of_keys(key)
        y = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Bottleneck(nn.Module):
    """A convolution that widens, between a pooling and a convolution that makes it narrow again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
        self.pool = nn.MaxPool2d(3, 2)
        self.wide, self.norm_of_wide = nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64)
        self.last = nn.Conv2d(64, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.norm(self.stem(x))))
        return self.last(F.silu(self.norm_of_wide(self.wide(x))))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


def stack(
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    activation: Callable[[], nn.Module] = nn.SiLU,
    width: int = 16,
    depth: int = 2,
) -> nn.Sequential:
    """Return convolutions, each except the last followed by a norm and an activation."""
    layers: list[nn.Module] = []
    for index in range(depth):
        channels = width if index else 3
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), activation()]
    return nn.Sequential(*layers, nn.Conv2d(width, 8, 3, padding=1))


def groups(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def instances(channels: int) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=True)


PICTURES = (4, 3, 16, 16)
NETWORKS: dict[str, Network] = {
    "batch_silu": Network(stack, PICTURES, ("3", "6")),
    "batch_relu": Network(lambda: stack(activation=nn.ReLU), PICTURES, ("2", "5")),
    "batch_relu_in_place": Network(
        lambda: stack(activation=lambda: nn.ReLU(inplace=True)), PICTURES, ("2", "5")
    ),
    "group_silu": Network(lambda: stack(groups), PICTURES, ("3", "6")),
    "instance_leaky_relu": Network(
        lambda: stack(instances, lambda: nn.LeakyReLU(inplace=True)), PICTURES, ("2", "5")
    ),
    "residual": Network(Residual, PICTURES, ("act1",)),
    "squeeze_excitation": Network(SqueezeExcitation, PICTURES, ("last",)),
    "layer_gelu": Network(
        lambda: nn.Sequential(
            nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.Tanh()
        ),
        (4, 32, 32),
        ("3",),
    ),
    "gated_mlp": Network(GatedMLP, (4, 32, 32), ("down",)),
    "attention": Network(Attention, (2, 64, 32), ("qkv",)),
    "bottleneck": Network(Bottleneck, PICTURES, ("pool", "norm_of_wide")),
    "mlp": Network(MLP, (4, 32, 32), ("", "down")),
}
each_network = pytest.mark.parametrize("name", NETWORKS)
each_network_in_both_formats = in_both_formats({name: n.shape for name, n in NETWORKS.items()})


def network_and_input(
    name: str, device: torch.device, dtype: torch.dtype = FLOAT
) -> tuple[nn.Module, Tensor]:
    network = NETWORKS[name]
    model = network.make().to(device, dtype)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (*norms.MODULES, nn.RMSNorm)) and module.weight is not None:
                module.weight.uniform_(0.5, 1.5)
    return model, torch.randn(network.shape, device=device, dtype=dtype)


def assert_saves_less(name: str, report: Report) -> None:
    rows = [(row.producer, row.consumer, row.module, row.how) for row in report.replaced]
    remaining = [(r.producer, r.consumer, r.module, r.reason) for r in report.remaining]
    missing = set(NETWORKS[name].saving) - {row.module for row in report.replaced}
    assert not missing, f"{missing} save no less: replaced {rows}, remaining {remaining}"
    assert report.saved_bytes_before is not None
    assert report.saved_bytes_after is not None
    assert report.saved_bytes_after < report.saved_bytes_before, rows


class Policy(NamedTuple):
    """A dtype of weights, or autocast's, and by what part of their norm gradients may differ.

    That is above rounding, and far below the error of a wrong gradient.
    """

    tolerance: float
    weights: torch.dtype = FLOAT
    autocast: torch.dtype | None = None


POLICIES = {
    "float32": Policy(1e-4),
    "float64": Policy(1e-9, weights=DOUBLE),
    "bfloat16": Policy(4e-2, weights=BFLOAT),  # a group norm's statistics have 16 bits too
    "autocast_bfloat16": Policy(2e-2, autocast=BFLOAT),
    "autocast_float16": Policy(2e-2, autocast=HALF),
}


@each_network_in_both_formats
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_match_pytorch(
    name: str, policy: str, memory_format: torch.memory_format, device: torch.device
) -> None:
    """Compare two steps of a converted model with the original's, and check the report.

    At first use the engine compares what it recomputes, and would warn and keep what differs.
    """
    tolerance, weights, autocast = POLICIES[policy]
    model, x = network_and_input(name, device, weights)
    if x.dim() == 4:
        model, x = model.to(memory_format=memory_format), x.to(memory_format=memory_format)
    twin = copy.deepcopy(model)
    with no_warnings("inplace_ops"):
        report = inplace_ops.convert(twin)
        for _ in range(2):
            actual, expected = (_step(module, x, autocast) for module in (twin, model))
            if autocast is None and weights.itemsize > 2:
                assert_same_step(actual, expected, tolerance)
            else:
                distance = distance_of(actual, expected)
                assert distance <= tolerance, f"gradients differ by {distance:.3g} of their norm"
    assert_saves_less(name, report)


def _step(model: nn.Module, x: Tensor, autocast: torch.dtype | None) -> Step:
    class UnderAutocast(nn.Module):
        """Runs forward under autocast, so that backward runs outside of it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
                return self.inner(x)

    return step_of(UnderAutocast(), x)


def distance_of(actual: Step, expected: Step) -> float:
    """Return the norm of the difference of all gradients over their norm."""
    total = difference = 0.0
    for name, value in expected.items():
        if value is None or name.startswith(("output", "buffer")):
            continue
        other = actual[name]
        assert other is not None, name
        assert other.isfinite().all(), f"{name} is not finite"
        total += float(value.double().square().sum())
        difference += float((other.double() - value.double()).square().sum())
    assert total > 0
    return (difference / total) ** 0.5


@each_backend
def test_attention_of_recomputed_queries_matches_pytorch(
    backend: SDPBackend, device: torch.device
) -> None:
    """Unpacking restores the strides, on which the attention kernels depend."""
    model, x = network_and_input("attention", device)
    twin = copy.deepcopy(model)
    report = inplace_ops.convert(twin)
    with only(backend), no_warnings("inplace_ops"):
        for _ in range(2):
            actual, expected = (_step(module, x, BFLOAT) for module in (twin, model))
    assert distance_of(actual, expected) <= 2e-2
    rows = [(row.producer, row.consumer) for row in report.replaced]
    assert any(consumer.startswith("ScaledDotProduct") for _, consumer in rows), rows


# Backward on the device's autograd thread, and forward in several threads.


def trained(model: nn.Module, inputs: list[Tensor], backward: Callable[[Tensor], None]) -> Step:
    """Train one step for each input; return parameters and buffers."""
    for x in inputs:
        model.zero_grad()
        y = model(x)
        backward((y * random_like(y).to(y.dtype)).mean())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    return {name: value.clone() for name, value in model.state_dict().items()}


def batches(name: str, device: torch.device, count: int = 3) -> list[Tensor]:
    return [torch.randn(NETWORKS[name].shape, device=device, dtype=DOUBLE) for _ in range(count)]


def in_a_thread(run: Callable[[], Any]) -> Any:
    """Call a function in a new thread; return its result or raise its exception."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            found.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread hangs"
    if errors:
        raise errors[0]
    return found[0]


def test_unpacking_runs_on_the_devices_thread(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward under autocast, which the device's thread inherits from its caller, works too."""
    threads: list[int] = []
    compute = Recomputed.compute

    def recording(value: Recomputed) -> Tensor:
        threads.append(threading.get_ident())
        return compute(value)

    model, x = network_and_input("batch_silu", device)
    inplace_ops.convert(model)
    y = model(x)
    monkeypatch.setattr(Recomputed, "compute", recording)
    with torch.autocast(device.type, BFLOAT):
        y.square().sum().backward()
    assert threads, "nothing was unpacked"
    assert threading.get_ident() not in threads


@each_network
def test_training_steps_match_pytorch(name: str, device: torch.device) -> None:
    """Also with a backward that another thread calls."""
    model, _ = network_and_input(name, device, DOUBLE)
    twins, inputs = [copy.deepcopy(model) for _ in range(2)], batches(name, device)
    expected = trained(model, inputs, Tensor.backward)
    for twin, backward in zip(
        twins, (Tensor.backward, lambda loss: in_a_thread(loss.backward)), strict=True
    ):
        inplace_ops.convert(twin)
        assert_same_step(trained(twin, inputs, backward), expected, 1e-8)


def test_two_threads_on_two_streams_match_pytorch(device: torch.device) -> None:
    names = ("batch_silu", "attention")
    models = [network_and_input(name, device, DOUBLE)[0] for name in names]
    twins, inputs = copy.deepcopy(models), [batches(name, device) for name in names]
    expected = [
        trained(model, xs, lambda loss: loss.backward())
        for model, xs in zip(models, inputs, strict=True)
    ]
    results: dict[int, Step] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(2)
    torch.cuda.synchronize()

    def train(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait(60)
                for _ in range(3):
                    twins[index].load_state_dict(models_before[index])
                    results[index] = trained(twins[index], inputs[index], torch.Tensor.backward)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
            start.abort()

    models_before = [copy.deepcopy(twin.state_dict()) for twin in twins]
    for twin in twins:
        inplace_ops.convert(twin)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    for index in range(2):
        assert_same_step(results[index], expected[index], 1e-8)


# Streams.

LONG = 50_000_000  # GPU cycles, about 30 ms: without a wait, another stream's work runs earlier


@pytest.mark.parametrize("name", ["batch_silu", "group_silu", "attention"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first_use"])
def test_forward_on_a_side_stream_matches_pytorch(
    name: str, warm: bool, device: torch.device
) -> None:
    """Forward runs on a side stream, and backward is called on the default one.

    At first use the comparisons wait for the side stream.
    """
    model, x = network_and_input(name, device, DOUBLE)
    twin = copy.deepcopy(model)
    report = inplace_ops.convert(twin)
    parameters = {module: [*module.parameters()] for module in (model, twin)}
    weight = random_like(model(x))
    expected = torch.autograd.grad((model(x) * weight).sum(), parameters[model])
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    if warm:
        with torch.cuda.stream(side):
            twin(x)
        torch.cuda.synchronize()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        late.copy_(x)  # a kernel that reads it too early reads zeros
        loss = (twin(late) * weight).sum()
    gradients = torch.autograd.grad(loss, parameters[twin])
    del loss
    torch.cuda.synchronize()
    assert report.replaced
    torch.testing.assert_close(gradients, expected, rtol=1e-7, atol=1e-7)


def test_memory_read_by_a_side_stream_is_not_reused_early(device: torch.device) -> None:
    """The allocator reuses a leaf's memory only after the side stream has recomputed from it."""
    model, x = network_and_input("batch_silu", device)
    x = torch.randn(16, 3, 64, 64, device=device)
    inplace_ops.convert(model)
    y = model(x)
    values = recomputed(y)
    assert values, "nothing is recomputed"
    expected = [value.compute() for value in values]
    sizes = {tensor.numel() for value in values for tensor in value.tensors()}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        actual = [value.unpack() for value in values]
    del y, values
    gc.collect()
    # Without record_stream the allocator would now reuse memory that the side stream still reads.
    overwritten = [torch.full((size,), 7.0, device=device) for size in sizes for _ in range(8)]
    torch.cuda.synchronize()
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(mine, theirs), f"value {index} of {len(expected)} was overwritten"
    del overwritten


def test_unpacking_on_another_stream_waits(device: torch.device) -> None:
    """Unpacking waits for the stream of forward, on which its leaves may not be ready."""
    model, x = network_and_input("batch_silu", device)
    inplace_ops.convert(model)
    expected = [value.compute() for value in recomputed(model(x))]
    side, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    model(late)  # load kernels, and let the allocator reserve memory
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    late.copy_(x)
    y = model(late)
    values = recomputed(y)
    with torch.cuda.stream(side):
        actual = [value.unpack() for value in values]
    torch.cuda.synchronize()
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# CUDA graphs.


@pytest.mark.parametrize("autocast", [None, BFLOAT], ids=["float64", "autocast"])
@pytest.mark.parametrize("name", ["batch_silu", "group_silu", "gated_mlp", "attention"])
def test_cuda_graph_of_a_training_step_matches_pytorch(
    name: str, autocast: torch.dtype | None, device: torch.device
) -> None:
    """Capture forward, loss, backward and the optimizer's step. The warm-up is the first use."""
    dtype = DOUBLE if autocast is None else FLOAT
    original, x = network_and_input(name, device, dtype)
    inputs = [torch.randn_like(x) for _ in range(3)]
    model = copy.deepcopy(original)
    report = inplace_ops.convert(model)
    state = copy.deepcopy(original.state_dict())
    static, target = x.clone(), random_like(original(x)).to(dtype)
    original.load_state_dict(state)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        parameters = [*module.parameters()]
        # Without autocast's cache: a graph would not recompute the cached copies.
        with torch.autocast(
            device.type, autocast, enabled=autocast is not None, cache_enabled=False
        ):
            y = module(x)
        loss = F.mse_loss(y.to(dtype), target)
        loss.backward()
        with torch.no_grad():
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-0.05)
        return loss.detach()

    def without_gradients(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad = None

    def warm_up() -> None:
        for _ in range(3):
            without_gradients(model)
            step(model, static)
        without_gradients(model)

    graph, loss = captured(lambda: step(model, static), warm_up)
    with torch.no_grad():
        model.load_state_dict(state)  # the warm-up has trained the model
    assert report.replaced, [(row.producer, row.reason) for row in report.remaining]
    for x in inputs:
        without_gradients(original)
        expected = step(original, x)
        static.copy_(x)
        graph.replay()
        tolerance = 1e-7 if autocast is None else 5e-2
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    moved = difference = 0.0
    for key, value in original.state_dict().items():
        mine = model.state_dict()[key].double()
        if autocast is None:
            torch.testing.assert_close(mine, value.double(), rtol=1e-7, atol=1e-7)
        moved += float((value.double() - state[key].double()).square().sum())
        difference += float((mine - value.double()).square().sum())
    assert moved > 0
    assert difference <= 0.05**2 * moved, f"off by {difference**0.5:.3g} of {moved**0.5:.3g}"


@each_network
def test_graphed_callable_matches_pytorch(name: str, device: torch.device) -> None:
    """`torch.cuda.make_graphed_callables` captures forward and backward apart."""
    original, x = network_and_input(name, device, DOUBLE)
    twin = copy.deepcopy(original)
    report = inplace_ops.convert(twin)
    gc.collect()  # freeing another test's graph during the capture would end it
    graphed = torch.cuda.make_graphed_callables(twin, (x.clone(),))
    assert report.replaced, [(row.producer, row.reason) for row in report.remaining]
    graphed.load_state_dict(original.state_dict())  # the capture has changed the buffers
    for _ in range(3):
        x = torch.randn_like(x)
        steps = []
        for model in (original, graphed):
            model.zero_grad()
            y = model(x)
            (y * random_like(y)).sum().backward()
            steps.append({key: p.grad for key, p in model.named_parameters()} | {"y": y.detach()})
        assert_same_step(steps[1], steps[0], 1e-8)


# Products that run again.


class Widening(NamedTuple):
    """A product that widens, and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


PRODUCTS: dict[str, Widening] = {
    "1 x 1": Widening(lambda: nn.Conv2d(64, 256, 1, bias=False), (8, 64, 28, 28)),
    "3 x 3": Widening(lambda: nn.Conv2d(32, 64, 3, padding=1), (8, 32, 40, 40)),
    "grouped": Widening(lambda: nn.Conv2d(32, 64, 3, padding=1, groups=8), (8, 32, 40, 40)),
    "transposed": Widening(lambda: nn.ConvTranspose2d(32, 16, 2, stride=2), (8, 32, 20, 20)),
    "few pixels": Widening(lambda: nn.Conv2d(512, 2048, 1, bias=False), (2, 512, 7, 7)),
    "tokens": Widening(lambda: nn.Linear(384, 1536), (8, 196, 384)),
    "few tokens": Widening(lambda: nn.Linear(2048, 5504, bias=False), (16, 2048)),
}


class Compute(NamedTuple):
    """The dtype of products, and how they run: see `fast_products`."""

    dtype: torch.dtype
    tf32: bool = False
    benchmark: bool = False


COMPUTES = {
    "float32": Compute(FLOAT),
    "tf32": Compute(FLOAT, tf32=True),
    "tf32_benchmark": Compute(FLOAT, tf32=True, benchmark=True),
    "bfloat16": Compute(BFLOAT),
    "bfloat16_benchmark": Compute(BFLOAT, benchmark=True),
    "float16": Compute(HALF),
}


@pytest.mark.parametrize("compute", COMPUTES)
@in_both_formats({name: product.shape for name, product in PRODUCTS.items()})
def test_product_that_runs_again_has_the_same_bits(
    name: str, memory_format: torch.memory_format, compute: str, device: torch.device
) -> None:
    """cuDNN and cuBLAS return the same bits for the same tensors and flags, in any thread.

    Where cuDNN measures its algorithms, each thread measures for itself, and may take another one.
    The product is then within the tolerance of the comparison at first use.
    """
    (make, shape), (dtype, tf32, benchmark) = PRODUCTS[name], COMPUTES[compute]
    product, x = make(), torch.randn(shape, device=device, dtype=dtype)
    model = nn.Sequential(nn.Tanh(), product, SiLUOfAnotherLibrary()).to(device, dtype)
    if x.dim() == 4:
        model, x = model.to(memory_format=memory_format), x.to(memory_format=memory_format)
    outputs: list[Tensor] = []
    product.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    inplace_ops.convert(model, max_ops=10**6)
    with fast_products(tf32, benchmark):
        for _ in range(3):  # the first is the first use
            values = recomputed(model(x.requires_grad_()))
            found = [v for v in values if v.original is None and v.spec.products]
        assert found, "no product is recomputed"
        again = in_a_thread(found[0].compute).double()
    expected = outputs[-1].double()
    distance = float((again - expected).norm() / expected.norm())
    assert distance <= (found[0].spec.tolerance if benchmark else 0.0)


class SiLUOfAnotherLibrary(nn.Module):
    """A SiLU that `convert` does not replace: it saves the output of the product before it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


# No synchronization with the GPU.


@pytest.mark.parametrize("autocast", [None, BFLOAT], ids=["float32", "autocast"])
@each_network
def test_no_synchronization_after_first_use(
    name: str, autocast: torch.dtype | None, device: torch.device
) -> None:
    """Once the model has run, neither forward nor backward synchronizes."""
    original, x = network_and_input(name, device)
    twin = copy.deepcopy(original)
    inplace_ops.convert(twin)

    def step(model: nn.Module) -> None:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = model(x).float().square().mean()
        loss.backward()

    for model in (original, twin):
        step(model)
        step(model)
        torch.cuda.synchronize()
        what = "PyTorch's own model" if model is original else "the converted model"
        try:
            with no_synchronization():
                step(model)
        except RuntimeError as error:
            if model is original:
                pytest.skip(f"{what} synchronizes: {error}")
            raise AssertionError(f"{what} synchronizes: {error}") from error


# Memory.


def big_stack(device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a model whose activations have 8 MiB each, and its input."""
    return stack(width=32, depth=4).to(device), torch.randn(16, 3, 64, 64, device=device)


def test_report_agrees_with_allocated_memory(device: torch.device) -> None:
    """The report's saved bytes agree with the allocator's."""
    model, x = big_stack(device)
    twin = copy.deepcopy(model)
    report = inplace_ops.convert(twin, x)
    assert report.saved_bytes_before is not None
    assert report.saved_bytes_after is not None
    allocated = []
    for module in (model, twin):
        for _ in range(2):  # workspaces are allocated once
            module(x).sum().backward()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = module(x)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated() - before)
        del y
    expected = report.saved_bytes_before - report.saved_bytes_after
    assert expected > 0.5 * report.saved_bytes_before, report
    reduction = allocated[0] - allocated[1]
    assert abs(reduction - expected) <= 0.1 * expected, (
        f"{allocated[0]} bytes before, {allocated[1]} after: {reduction} less, "
        f"where the report says {expected}"
    )


def test_first_step_has_no_higher_peak(device: torch.device) -> None:
    """The first step, with all comparisons, has no higher peak than the original model's."""
    model, x = big_stack(device)
    twin = copy.deepcopy(model)

    def peak(module: nn.Module) -> int:
        module.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(x).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    for module in (model, twin):  # workspaces are allocated once
        module(x).sum().backward()
    original = peak(model)
    inplace_ops.convert(twin)
    first, second = peak(twin), peak(twin)
    found = f"{original} bytes, converted {first} in the first step and {second} in the second"
    assert first <= original, found
    assert second < 0.8 * original, found
