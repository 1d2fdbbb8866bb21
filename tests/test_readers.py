"""What readers keep of outputs that follow from a norm's input: converted models, held to account.

What is held comes from the allocator's own events, what is computed from PyTorch's own model.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviour import assert_same_behaviour, behaviour, twin
from memory import held_allocation
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops import readers

ACTIVATIONS = (nn.ReLU, nn.SiLU)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
C = 8


def block(activation: Callable[[], nn.Module], norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(C, C, 3, padding=1, bias=False), norm(C), activation())


class Readers(nn.Module):
    """A block, and what reads its output."""

    def __init__(
        self,
        read: Callable[[Readers, Tensor], Any],
        activation: Callable[[], nn.Module] = nn.SiLU,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.block = block(activation, norm)
        self.conv, self.other = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C // 2, C, 1)
        self.linear = nn.Linear(16, 16)
        self.read = read
        self.kept: list[Tensor] = []
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.read(self, self.block(x))


def images(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, C, 16, 16, dtype=dtype)


def chunked(m: Readers, y: Tensor) -> Tensor:
    first, second = y.chunk(2, 1)
    return m.other(first) + m.other(second)


READERS: dict[str, Callable[[Readers, Tensor], Any]] = {
    "convolution": lambda m, y: m.conv(y),
    "linear": lambda m, y: m.linear(y),
    "two": lambda m, y: m.conv(y) + m.linear(y),
    "function": lambda m, y: F.conv2d(y, m.conv.weight),
    "function_deep_inside": lambda m, y: F.conv2d(y, m.conv.weight).sin().exp().mean(1),
    "pooling": lambda m, y: F.max_pool2d(y, 2),
    "chunks": chunked,
    "slice": lambda m, y: m.other(y[:, 2:6]),
    "transposed": lambda m, y: F.conv2d(y.transpose(2, 3), m.conv.weight),
    "one_saves_and_one_only_reads": lambda m, y: m.conv(y).mean() + y.sum(),
    "gate": lambda m, y: m.conv(y * y.mean((2, 3), keepdim=True).sigmoid()),
}
each_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def converted(model: nn.Module, x: Tensor, **options: Any) -> tuple[Any, Any, inplace_ops.Report]:
    """The model converted, what it was, and the report."""
    original = twin(model)
    return model, original, inplace_ops.convert(model, x, **options)


def hooks(model: nn.Module) -> int:
    """Those of the package."""
    found = [h for m in model.modules() for h in m._forward_hooks.values()]
    found += [h for m in model.modules() for h in m._forward_pre_hooks.values()]
    return sum(h.__module__ == readers.__name__ for h in found)


@each_reader
@each_activation
def test_readers_keep_no_output(
    activation: Callable[[], nn.Module], read: Callable[[Readers, Tensor], Any]
) -> None:
    x = images()
    model, original, report = converted(Readers(read, activation), x)
    assert [output.name for output in report.dropped] == ["block.2"]
    held, before = held_allocation(lambda: model(x)), held_allocation(lambda: original(x))
    maps = 8 * 2 * C
    kept_by_pytorch = 2 if activation is nn.SiLU else 1
    assert before - held == kept_by_pytorch * x.nbytes - maps
    assert report.model_bytes_before is not None
    assert report.model_bytes_after is not None
    assert report.model_bytes_before - report.model_bytes_after == pytest.approx(
        before - held, abs=0.02 * x.nbytes
    )
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)
    inplace_ops.revert(model)
    assert hooks(model) == 0


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d,
        lambda c: nn.BatchNorm2d(c, affine=False),
        lambda c: nn.BatchNorm2d(c, track_running_stats=False),
        lambda c: nn.GroupNorm(2, c),
        lambda c: nn.InstanceNorm2d(c, affine=True),
        lambda c: nn.LayerNorm((c, 16, 16)),
    ],
)
@each_activation
def test_norms(
    activation: Callable[[], nn.Module],
    norm: Callable[[int], nn.Module],
    memory_format: torch.memory_format,
) -> None:
    x = images().contiguous(memory_format=memory_format)
    model = Readers(chunked, activation, norm).to(memory_format=memory_format)
    model, original, report = converted(model, x)
    assert len(report.dropped) == 1
    for mode in (True, False):
        model.train(mode)
        original.train(mode)
        actual, expected = behaviour(model, x), behaviour(original, x)
        assert_same_behaviour(actual, expected, rtol=1e-11, atol=1e-11)


class PreNorm(nn.Module):
    """A transformer's MLP, whose norm's output is read by a layer that keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.up(h) * self.gate(h))


def test_a_norms_output_without_an_activation() -> None:
    x = torch.randn(2, 5, 7, 16, dtype=torch.float64)
    model, original, report = converted(nn.Sequential(nn.Linear(16, 16), PreNorm()).double(), x)
    (output,) = report.dropped
    assert (output.name, output.kind) == ("1.norm", "LayerNorm")
    assert output.readers == ("1.up.addmm", "1.gate.addmm")
    held, before = held_allocation(lambda: model(x)), held_allocation(lambda: original(x))
    maps = 8 * (2 * x[..., 0].numel() + 2 * 16)
    assert before - held == x.nbytes - maps  # which the readers share
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    actual, expected = behaviour(model, transposed), behaviour(original, transposed)
    assert_same_behaviour(actual, expected, rtol=1e-10, atol=1e-10)


def returned(m: Readers, y: Tensor) -> Any:
    return m.conv(y), y


def kept(m: Readers, y: Tensor) -> Any:
    m.kept.append(y)
    return m.conv(y)


def saved_by_a_norm(m: Readers, y: Tensor) -> Any:
    return m.conv(y) + F.layer_norm(y, (16,))


def written_to(m: Readers, y: Tensor) -> Any:
    z = y.mean()  # a sum's gradients, of 10^8, cancel to fewer digits than are compared
    y += 1
    return m.conv(y) + z


def written_to_without_grad(m: Readers, y: Tensor) -> Any:
    with torch.no_grad():
        y += 1
    return m.conv(y)


@pytest.mark.parametrize("read", [returned, kept, saved_by_a_norm, written_to])
@each_activation
def test_what_stays_alive_anyway_is_not_dropped(
    activation: Callable[[], nn.Module], read: Callable[[Readers, Tensor], Any]
) -> None:
    x = images()
    model, original, report = converted(Readers(read, activation), x, verify=read is not written_to)
    assert "block.2" not in [output.name for output in report.dropped]
    assert hooks(model) == len(report.dropped) == 0
    actual = behaviour(model, x)
    if read is not written_to or activation is nn.SiLU:  # PyTorch's ReLU keeps what is written to
        assert_same_behaviour(actual, behaviour(original, x), rtol=1e-10, atol=1e-10)


def test_what_is_kept_later_stays_right() -> None:
    """Written to, returned or kept after the conversion: never an empty or a wrong tensor."""
    x = images()
    model, original, _ = converted(Readers(READERS["convolution"]), x)
    for read in (returned, kept, saved_by_a_norm, written_to, written_to_without_grad, chunked):
        model.read = original.read = read
        actual, expected = behaviour(model, x), behaviour(original, x)
        assert_same_behaviour(actual, expected, rtol=1e-10, atol=1e-10)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_steps(
    model: nn.Module, original: nn.Module, x: Tensor, tolerance: float = 1e-11
) -> None:
    for actual, expected in zip(step(model, x), step(original, x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for actual, expected in zip(model.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(actual, expected)


FALLBACK = 1e-6  # of what is kept where nothing can be formed again: the documented error


def network() -> nn.Sequential:
    return nn.Sequential(*(block(nn.SiLU, nn.BatchNorm2d) for _ in range(3))).double()


class Counted(nn.BatchNorm2d):
    runs = 0

    def forward(self, input: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(input)


class Checkpointed(nn.Module):
    """Conv, norm, activation, conv: some of them in a checkpoint."""

    def __init__(self, region: slice, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(C, C, 1), Counted(C), nn.SiLU(), nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        )
        self.region, self.reentrant = region, reentrant

    def forward(self, x: Tensor) -> Tensor:
        start, stop, _ = self.region.indices(len(self.layers))
        x = self.layers[:start](x)
        x = checkpoint(self.layers[self.region], x, use_reentrant=self.reentrant)
        return self.layers[stop:](x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "region",
    [slice(0, 2), slice(0, 3), slice(0, 5), slice(1, 4), slice(2, 4), slice(3, 5)],
    ids=str,
)
def test_checkpoints(region: slice, reentrant: bool) -> None:
    """The norm runs as often as PyTorch runs it, and updates its statistics as often."""
    x = images().requires_grad_()
    model, original, _ = converted(Checkpointed(region, reentrant).double(), x)
    before = model.layers[1].runs = original.layers[1].runs = 0
    assert_same_steps(model, original, x)
    assert model.layers[1].runs == original.layers[1].runs > before


def test_other_hooks() -> None:
    x = images()
    model, original, _ = converted(network(), x)
    seen: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    with torch.autograd.graph.save_on_cpu():
        assert_same_steps(model, original, x, FALLBACK)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert_same_steps(model, original, x, FALLBACK)
    assert seen
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert_same_steps(model, original, x)


def test_hooks_on_a_readers_own_saved_tensor() -> None:
    x = images()
    model, original, _ = converted(network(), x)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        raw = output.grad_fn._raw_saved_input  # type: ignore[union-attr]
        raw.register_hooks(lambda tensor: tensor, lambda tensor: tensor)

    reader = model[1][0]
    handle = reader.register_forward_hook(hook, prepend=True)  # then ours leaves it alone
    assert_same_steps(model, original, x)
    handle.remove()
    reader.register_forward_hook(hook)  # there is one already, and PyTorch says so
    with pytest.raises(RuntimeError, match="hooks have already been set"):
        model(x)


def test_backward_twice_and_a_second_derivative() -> None:
    x = images().requires_grad_()
    model, original, _ = converted(network(), x)
    model.eval(), original.eval()
    found = []
    for m in (model, original):
        m.zero_grad()
        loss = m(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        (gradient,) = torch.autograd.grad(m(x).sin().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append([p.grad for p in m.parameters()])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_two_losses_with_separate_backwards() -> None:
    def read(m: Readers, y: Tensor) -> Any:
        return m.conv(y), m.linear(y.detach())

    x = images()
    model, original, _ = converted(Readers(read), x)
    for m in (model, original):
        first, second = m(x)
        first.sum().backward()  # frees what the norm has kept
        second.sin().sum().backward()
    for actual, expected in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("change", ["input", "weight", "bias", "running_mean"])
def test_the_norms_tensors_change_before_backward(change: str) -> None:
    """As PyTorch: it raises, or is right."""
    x = images()
    model, original, _ = converted(network(), x)
    outcomes = []
    for m in (model, original):
        inputs: list[Tensor] = []
        m[0][1].register_forward_hook(lambda _, args, output, inputs=inputs: inputs.extend(args))
        loss = m(x).square().sum()
        with torch.no_grad():
            (inputs[0] if change == "input" else getattr(m[0][1], change)).add_(1)
        try:
            loss.backward()
            outcomes.append([p.grad for p in m.parameters()])
        except RuntimeError as error:
            outcomes.append(str(error).split(":")[0])
    if isinstance(outcomes[1], str):
        assert outcomes[0] == outcomes[1]
    else:
        torch.testing.assert_close(outcomes[0], outcomes[1], rtol=1e-11, atol=1e-11)


def test_an_input_that_changes_before_the_reader_is_said_in_backward() -> None:
    model, _, _ = converted(network(), images())
    (conv, norm, act), (reader, *_), _ = model
    h = conv(images())
    y = act(norm(h))
    with torch.no_grad():
        h.add_(1)
    output = reader(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_input_that_changes_after_the_reader_is_said_by_the_reader() -> None:
    model, _, _ = converted(network(), images())
    (conv, norm, act), (reader, *_), _ = model
    h = conv(images())
    output = reader(act(norm(h)))
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), reader.weight)  # the norm's backward does not run


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_a_reader_leaves_nothing_behind(error: type[BaseException]) -> None:
    x = images()
    model, original, _ = converted(network(), x)

    def interrupt(module: nn.Module, args: Any) -> None:
        raise error

    handle = model[2][0].register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        model(x)
    original[:2](x)  # so far it came
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert_same_steps(model, original, x)


def test_frozen_norms() -> None:
    x = images()
    model, original, _ = converted(network(), x)
    for m in (model, original):
        m[0][1].requires_grad_(False)  # no weight and no bias to be found
        m[1][1].bias.requires_grad_(False)
        m[2][1].weight.requires_grad_(False)
    assert_same_steps(model, original, x, FALLBACK)
    for m in (model, original):
        inplace_ops.revert(m)
    model, original, _ = converted(model, x)
    assert_same_steps(model, original, x, FALLBACK)


def test_norms_replaced_and_fused_after_the_conversion() -> None:
    x = images()
    model, original, _ = converted(network(), x)
    for m in (model, original):
        m[0][1] = nn.Identity()
        m[1][1] = nn.GroupNorm(2, C).double()
        m[2][1] = nn.SyncBatchNorm.convert_sync_batchnorm(m[2][1])
    original[1][1].load_state_dict(model[1][1].state_dict())
    assert_same_steps(model.eval(), original.eval(), x)  # which trains on GPUs alone
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(model[2][0], copy.deepcopy(model[2][1]))
    model[2][0], model[2][1] = fused, nn.Identity()
    torch.testing.assert_close(model(x), original(x))


def test_called_with_a_norms_output_and_with_something_else() -> None:
    """As diffusers' residual block calls one SiLU with hidden states and with a time embedding."""

    def read(m: Readers, y: Tensor) -> Tensor:
        embedding = m.linear(m.block[2](m.linear(y.mean((1, 2)).detach())))
        return m.conv(y) + embedding.mean()

    x = images()
    model, original, report = converted(Readers(read).double(), x)
    (site,) = report.sites
    assert site.save == "recompute"
    assert site.bytes_after > 0
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-6, atol=1e-6)


def test_copies_pickles_and_state_dicts() -> None:
    x = images()
    model, original, _ = converted(network(), x)
    assert list(model.state_dict()) == list(original.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert hooks(other) == hooks(model) == 4
        reference = copy.deepcopy(original)
        assert_same_steps(other, reference, x)
        inplace_ops.revert(other)
        assert hooks(other) == 0
        assert_same_steps(other, reference, x)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert_same_steps(average.module, copy.deepcopy(original), x)


def test_threads() -> None:
    x = images()
    model, original, _ = converted(network(), x)
    model.eval(), original.eval()
    expected = torch.autograd.grad(original(x).square().sum(), list(original.parameters()))
    wrong: list[str] = []

    def train() -> None:
        for _ in range(20):
            loss = model(x).square().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for a, e in zip(gradients, expected, strict=True):
                if not torch.allclose(a, e, rtol=1e-11, atol=1e-11):
                    wrong.append("differs")

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_transforms_of_a_converted_model() -> None:
    x = images()
    model, original, _ = converted(network(), x)
    model.eval(), original.eval()

    def loss(parameters: dict[str, Tensor], m: nn.Module, x: Tensor) -> Tensor:
        return torch.func.functional_call(m, parameters, (x,)).square().sum()

    parameters = {name: p.detach() for name, p in original.named_parameters()}
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, None, 0))
    for transform, inputs in ((torch.func.grad(loss), x), (per_sample, x[:, None])):
        actual, expected = (transform(parameters, m, inputs) for m in (model, original))
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripts_traces_and_graphs() -> None:
    x = images()
    model, original, _ = converted(network(), x)
    model.eval(), original.eval()
    model(x)
    for build in (torch.jit.script, lambda m: torch.jit.trace(m, x), torch.fx.symbolic_trace):
        torch.testing.assert_close(build(model)(x), original(x))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), original(x))


def test_instance_norm_before_a_reader_keeps_views_apart() -> None:
    """Its output is a view: chunks of it are views of a view."""
    x = images()
    norm = lambda c: nn.InstanceNorm2d(c, affine=True)  # noqa: E731
    model, original, report = converted(Readers(chunked, nn.LeakyReLU, norm), x)
    assert len(report.dropped) == 1
    held, before = held_allocation(lambda: model(x)), held_allocation(lambda: original(x))
    assert before - held >= 1.9 * x.nbytes
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)


PERMUTATIONS = ((0, 1, 3, 2), (0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0), (2, 1, 0, 3))


@pytest.mark.parametrize("read", [READERS["slice"], chunked, READERS["convolution"]])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.GroupNorm(2, c), nn.InstanceNorm2d])
@pytest.mark.parametrize("order", PERMUTATIONS)
@pytest.mark.parametrize("is_example", [True, False], ids=["example", "later"])
def test_a_norm_of_a_permuted_tensor(
    is_example: bool,
    order: tuple[int, ...],
    norm: Callable[[int], nn.Module],
    read: Callable[[Readers, Tensor], Any],
    device: torch.device,
) -> None:
    """Its output may lie otherwise than its input; on a GPU a group norm's is contiguous."""

    class Permuted(Readers):
        def forward(self, x: Tensor) -> Any:
            return self.read(self, self.block[1](x * self.block[0].weight[0, 0, 0, 0]))

    x = images().to(device)
    shape = [x.shape[d] for d in order]
    inverse = sorted(range(4), key=order.__getitem__)
    permuted = torch.randn(shape, dtype=x.dtype, device=device).permute(inverse)
    example = permuted if is_example else x
    model, original, report = converted(Permuted(read, norm=norm).to(device), example)
    assert len(report.dropped) == 1
    if device.type == "cpu":
        held, before = (held_allocation(lambda m=m: m(permuted)) for m in (model, original))
        assert before - held >= 0.9 * x.nbytes
    assert_same_behaviour(
        behaviour(model, permuted), behaviour(original, permuted), rtol=1e-10, atol=1e-10
    )


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def halved(x: Tensor) -> Tensor:
    """Neither contiguous nor dense."""
    return torch.cat((x, x), 1).contiguous(memory_format=torch.channels_last)[:, :C]


def permuted(x: Tensor) -> Tensor:
    return x.transpose(0, 2).contiguous().transpose(0, 2)


IMAGES = (4, C, 16, 16)
MEASURED: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Module]]] = {
    "batch_norm": (IMAGES, nn.BatchNorm2d),
    "batch_norm_1d": ((4, C, 64), nn.BatchNorm1d),
    "batch_norm_3d": ((4, C, 2, 4, 16), nn.BatchNorm3d),
    "group_norm": (IMAGES, lambda c: nn.GroupNorm(2, c)),
    "instance_norm": (IMAGES, nn.InstanceNorm2d),
    "layer_norm": ((4, C, 32, 8), nn.LayerNorm),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "channels_last": channels_last,
    "permuted": permuted,
    "halved": halved,
}


@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("shape", "norm"), MEASURED.values(), ids=MEASURED)
@pytest.mark.parametrize("is_moved", [False, True], ids=["as_it_is", "channels_moved"])
def test_a_view_of_a_norms_output_is_measured(
    is_moved: bool,
    shape: tuple[int, ...],
    norm: Callable[[int], nn.Module],
    lay: Callable[[Tensor], Tensor],
    device: torch.device,
) -> None:
    """`saved_bytes` tells what is held in PyTorch's memory formats; gradients in it are right.

    The hooks by which it measures do not tell what tensor a view is of.
    """
    if lay is halved and len(shape) != 4:
        lay = permuted

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = norm(C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(lay(x))
            return self.linear((y.movedim(1, -1) if is_moved else y).reshape(-1, C))

    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    model, original, report = converted(Tokens().double().to(device), x)
    gradients: list[Any] = []

    def differentiated(m: nn.Module) -> Tensor:
        y = m(x)
        gradients.append(torch.autograd.grad(y.square().sum(), [x, *m.parameters()]))
        return y

    for m in (original, model):
        inplace_ops.saved_bytes(differentiated, m)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-10)
    is_measured = lay(x).is_contiguous() or (lay is channels_last and len(shape) > 3)
    if device.type == "cpu" and is_measured:
        held, before = (held_allocation(lambda m=m: m(x)) for m in (model, original))
        assert report.model_bytes_before is not None
        assert report.model_bytes_after is not None
        assert report.model_bytes_before - report.model_bytes_after == before - held
        assert len(report.dropped) == (before > held)


LAID_ANEW: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(2, 3),
    "not_dense": lambda t: torch.cat((t, t), 3)[..., ::2],
}


@pytest.mark.parametrize("lay", LAID_ANEW.values(), ids=LAID_ANEW)
@pytest.mark.parametrize("activation", [nn.Identity, *ACTIVATIONS])
def test_an_output_laid_anew(
    activation: Callable[[], nn.Module], lay: Callable[[Tensor], Tensor]
) -> None:
    """Through `.data`, which no version tells: only that it lies otherwise."""

    def read(m: Readers, y: Tensor) -> Tensor:
        if not m.training:
            y.data = lay(y.data)
        return m.conv(y)

    x = images()
    model, original, report = converted(Readers(read, activation), x)
    assert len(report.dropped) == 1
    model.eval(), original.eval()
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)


def test_what_else_a_norm_returns() -> None:
    """A group norm's means have its node too, and of groups of one element its size."""
    x = torch.randn(4, C, dtype=torch.float64, requires_grad=True)
    linear = nn.Linear(C, C, dtype=torch.float64)
    linear.register_forward_pre_hook(readers.note_first_node)
    linear.register_forward_hook(readers.drop_outputs)
    node = linear(torch.native_group_norm(x, None, None, 4, C, 1, C, 1e-5)[1]).grad_fn
    torch.testing.assert_close(node._saved_mat1, x.detach())


class Forces(nn.Module):
    """Its forward differentiates, and frees the graph unless it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.weight = nn.Parameter(torch.randn(1, 16))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy = F.linear(self.norm(self.first(x)), self.weight).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return energy, force


def test_nodes_that_are_freed_or_changed_when_the_hook_looks() -> None:
    x = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    model, original, report = converted(Forces(), x)
    assert len(report.dropped) == 1
    for mode in (True, False):
        model.train(mode), original.train(mode)
        torch.testing.assert_close(model(x), original(x), rtol=1e-10, atol=1e-10)

    def modifies(m: Readers, y: Tensor) -> Tensor:
        z = m.linear(y)
        if not m.training:
            z.sigmoid().clamp_(0.1, 0.2)
            return F.conv2d(y, m.conv.weight).sigmoid().clamp_(0.1, 0.2)
        return F.conv2d(y, m.conv.weight)

    model, original, _ = converted(Readers(modifies), images())
    model.eval(), original.eval()
    x = images()
    torch.testing.assert_close(model(x), original(x), rtol=1e-10, atol=1e-10)


class Keyword(Readers):
    """Calls what reads with keywords alone: a module that calls a function."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(C, C, 1, 1))

        def forward(self, y: Tensor) -> Tensor:
            return F.conv2d(y, self.weight)

    def __init__(self) -> None:
        super().__init__(lambda m, y: m.inner(y=y))
        self.inner = self.Inner().double()


def test_readers_called_with_keywords_alone() -> None:
    x = images()
    model, original, report = converted(Keyword(), x)
    assert [output.name for output in report.dropped] == ["block.2"]
    held, before = held_allocation(lambda: model(x)), held_allocation(lambda: original(x))
    assert before - held >= 1.9 * x.nbytes
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)


class Cell(nn.Module):
    """Its state is an attribute: the graph goes on behind its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.state = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(F.linear(self.norm(self.state), self.linear.weight) + x)
        return self.state


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell().double()

    def forward(self, x: Tensor) -> Tensor:
        self.cell.state = torch.zeros_like(x[0])
        for part in x:
            y = self.cell(part)
        return y


def test_only_nodes_of_the_call_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    def counted(node_type: type) -> tuple[str, ...]:
        nonlocal looked_at
        looked_at += 1
        return saved_by(node_type)

    saved_by = readers._saved_by
    monkeypatch.setattr(readers, "_saved_by", counted)
    x = torch.randn(40, 4, 16, dtype=torch.float64)
    model, original, report = converted(Recurrent(), x)
    assert len(report.dropped) == 40
    numbers = []
    for length in (20, 40):
        looked_at = 0
        model(x[:length])
        numbers.append(looked_at)
    assert 0 < numbers[1] <= 2.1 * numbers[0]
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)


# What reads a norm's output of shape (4, C, 16, 16), by the operation that saves it.
OPERATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "addbmm": lambda m, y: torch.addbmm(y.new_zeros(16, 16), y[:, 0], m.weight[:4]),
    "addmm": lambda m, y: m.linear(y),
    "addmv": lambda m, y: torch.addmv(y.new_zeros(4), y.flatten(1), m.weight.flatten()[:2048]),
    "baddbmm": lambda m, y: torch.baddbmm(y.new_zeros(4, 16, 16), y[:, 0], m.weight[:4]),
    "bmm": lambda m, y: y[:, 0] @ m.weight[:4],
    "dot": lambda m, y: y[:2].flatten() @ m.weight.flatten(),
    "mm": lambda m, y: y.flatten(1) @ m.weight.view(2048, 2),
    "mv": lambda m, y: y.flatten(1) @ m.weight.flatten()[:2048],
    "trilinear": lambda m, y: F.bilinear(y, y.detach() * 0.5, m.weight),
    "convolution": lambda m, y: m.conv(y),
    "grid_sampler_2d": lambda m, y: F.grid_sample(
        y, m.weight[:4, :, None, :2].tanh(), align_corners=False
    ),
    "attention": lambda m, y: F.scaled_dot_product_attention(y, y, y),
    "addcmul": lambda m, y: torch.addcmul(y.new_zeros(()), y, m.weight[:C]),
    "div": lambda m, y: y / (2 + m.weight[:C].cos()),
    "mul": lambda m, y: y * m.weight[:C],
    "elu": lambda m, y: F.elu(y),
    "gelu": lambda m, y: F.gelu(y),
    "glu": lambda m, y: F.glu(y, 1),
    "hardsigmoid": lambda m, y: F.hardsigmoid(y),
    "hardswish": lambda m, y: F.hardswish(y),
    "hardtanh": lambda m, y: F.hardtanh(y),
    "leaky_relu": lambda m, y: F.leaky_relu(y),
    "mish": lambda m, y: F.mish(y),
    "prelu": lambda m, y: F.prelu(y, m.weight[0, 0, :C]),
    "silu": lambda m, y: F.silu(y),
    "softplus": lambda m, y: F.softplus(y),
    "adaptive_avg_pool2d": lambda m, y: F.adaptive_avg_pool2d(y, 5),
    "adaptive_avg_pool3d": lambda m, y: F.adaptive_avg_pool3d(y, 5),
    "avg_pool2d": lambda m, y: F.avg_pool2d(y, 2),
    "avg_pool3d": lambda m, y: F.avg_pool3d(y, 2),
    "adaptive_max_pool2d": lambda m, y: F.adaptive_max_pool2d(y, 5),
    "adaptive_max_pool3d": lambda m, y: F.adaptive_max_pool3d(y, 5),
    "max_pool2d": lambda m, y: F.max_pool2d(y, 2),
    "max_pool3d": lambda m, y: F.max_pool3d(y, 2),
    "reflection_pad1d": lambda m, y: F.pad(y[0], (1, 1), "reflect"),
    "reflection_pad2d": lambda m, y: F.pad(y, (1, 1, 1, 1), "reflect"),
    "replication_pad2d": lambda m, y: F.pad(y, (1, 1, 1, 1), "replicate"),
    "replication_pad3d": lambda m, y: F.pad(y, (1, 1, 1, 1, 1, 1), "replicate"),
}


class Operations(Readers):
    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        norm = lambda c: nn.InstanceNorm2d(c, affine=True)  # noqa: E731
        super().__init__(read, nn.Identity, norm)
        nn.init.normal_(self.block[1].bias)
        self.weight = nn.Parameter(torch.randn(16, 16, 16, dtype=torch.float64))


@pytest.mark.parametrize("read", OPERATIONS.values(), ids=OPERATIONS)
def test_operations_that_read_what_is_formed_again(read: Callable[[Any, Tensor], Tensor]) -> None:
    x = images()
    model, original, report = converted(Operations(read), x)
    assert [output.name for output in report.dropped] == ["block.1"]
    assert held_allocation(lambda: model(x)) < held_allocation(lambda: original(x))
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)


INDEX = torch.arange(C) % 3
# Gradients that compare what was saved with the result: another last bit makes another gradient.
COMPARE: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda y: y.amax((2, 3)),
    "amin": lambda y: y.amin((2, 3)),
    "max": lambda y: y.max(),
    "min": lambda y: y.min(),
    "vector_norm": lambda y: torch.linalg.vector_norm(y, torch.inf, dim=1),
    "norm": lambda y: y.norm(torch.inf),
    "dist": lambda y: torch.dist(y, torch.zeros_like(y), torch.inf),
    "cdist": lambda y: torch.cdist(y.flatten(2), torch.zeros_like(y).flatten(2), torch.inf),
    "pdist": lambda y: F.pdist(y.flatten(1), torch.inf),
    "scatter_reduce": lambda y: y.new_zeros(4, 3, 16, 16).scatter_reduce(
        1, INDEX[None, :, None, None].expand(y.shape), y, "amax", include_self=False
    ),
    "index_reduce": lambda y: y.new_zeros(4, 3, 16, 16).index_reduce(
        1, INDEX, y, "amax", include_self=False
    ),
    "segment_reduce": lambda y: torch.segment_reduce(
        y.flatten(1), "max", lengths=torch.tensor([1, 3])
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("compare", COMPARE.values(), ids=COMPARE)
def test_readers_whose_gradients_compare_keep_what_they_read(
    compare: Callable[[Tensor], Tensor],
) -> None:
    x = images()
    norm = lambda c: nn.InstanceNorm2d(c, affine=True)  # noqa: E731
    model = Readers(lambda m, y: compare(y) + m.conv(y).mean(), norm=norm)
    nn.init.normal_(model.block[1].bias)
    model, original, report = converted(model, x)
    assert report.dropped == []
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)


class Subclass(Tensor):
    """As libraries have for images with metadata."""


@pytest.mark.parametrize("bits", [None, 1])
def test_under_modes_and_with_subclasses(bits: int | None) -> None:
    """A residual block, whose last activation is called after a norm and after an addition."""

    class Residual(Readers):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(self.block(x))
            return self.other(self.block[2](y + x)[:, :4])

    x = images()
    model, original, report = converted(Residual(lambda m, y: y), x, bits=bits)
    assert report.sites[0].save == "recompute"
    with torch.device("cpu"):
        held, before = held_allocation(lambda: model(x)), held_allocation(lambda: original(x))
        actual = behaviour(model, x)
        again = inplace_ops.convert(twin(original), x, bits=bits)
    assert before - held >= 1.9 * x.nbytes
    assert_same_behaviour(actual, behaviour(original, x), rtol=1e-5, atol=1e-5)
    assert again == report
    subclass = x.as_subclass(Subclass)
    assert_same_behaviour(
        behaviour(model, subclass), behaviour(original, subclass), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d, lambda c: nn.GroupNorm(8, c), lambda c: nn.InstanceNorm2d(c, affine=True)],
    ids=["batch", "group", "instance"],
)
def test_norms_with_biases_as_trained_ones_have(
    norm: Callable[[int], nn.Module], is_training: bool
) -> None:
    """Of features that are 0 in half of the places, where the mean and the bias may cancel."""
    for _ in range(3):
        model = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), norm(64), nn.Conv2d(64, 8, 1)
        )
        nn.init.uniform_(model[2].weight, 0.1, 1.5)
        nn.init.normal_(model[2].bias)
        for _ in range(10):
            model(torch.randn(4, 3, 16, 16))
        x = torch.randn(4, 3, 16, 16)
        report = inplace_ops.convert(model.train(is_training), x)
        assert [output.name for output in report.dropped] == ["2"]


@pytest.mark.parametrize("factor", [1 + 1e-13, torch.nan])
def test_what_is_formed_again_is_verified(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = readers._Recipe.output
    monkeypatch.setattr(readers._Recipe, "output", lambda recipe: right(recipe) * factor)
    model = network()
    with pytest.raises(inplace_ops.VerificationError, match="another input than it reads"):
        inplace_ops.convert(model, images())
    assert hooks(model) == 0
    assert isinstance(model[0][2], nn.SiLU)
    assert not isinstance(model[0][2], inplace_ops.SiLU)


def test_modules_that_the_model_does_not_hold() -> None:
    """A frozen critic in a list: nobody would find its hooks to take them away."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.critic = nn.LayerNorm(16), [nn.Linear(16, 16)]

        def forward(self, x: Tensor) -> Tensor:
            return self.critic[0](self.norm(x))

    x = torch.randn(64, 16)
    model = Hidden()
    for call in (inplace_ops.analyze, inplace_ops.convert):
        assert call(model, x).dropped == []
        (linear,) = model.critic
        assert not linear._forward_hooks
        assert not linear._forward_pre_hooks


@pytest.mark.parametrize("shape", [(4, C, 1, 1), (4, 1, 5, 6)], ids=str)
def test_strides_of_dimensions_of_one(shape: tuple[int, ...]) -> None:
    """They tell a convolution the memory format, that of the gradient too."""
    channels = shape[1]
    activation, convolution = inplace_ops.ReLU(save="recompute"), nn.Conv2d(channels, C, 1)
    model = nn.Sequential(nn.GroupNorm(1, channels), activation, convolution)
    read: list[Tensor] = []
    convolution.register_forward_pre_hook(lambda _, args: read.append(args[0].detach()))
    convolution.register_forward_pre_hook(readers.note_first_node)
    convolution.register_forward_hook(readers.drop_outputs)
    node = model(torch.empty(shape, memory_format=torch.channels_last).normal_()).grad_fn
    assert node._raw_saved_input.unpack_hook is not None
    torch.testing.assert_close(node._saved_input, read[0], check_stride=True)


def test_layer_norms_of_one_dimension() -> None:
    layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(16, dtype=torch.float64)
    model, original, _ = converted(layers.double(), x)
    assert_same_behaviour(behaviour(model, x), behaviour(original, x), rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left() -> None:
    def loss(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        nested = torch.nested.nested_tensor(parts)
        model(nested).to_padded_tensor(0.0).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    x = torch.randn(50, 16)
    layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    model, original, report = converted(layers, x)
    assert len(report.dropped) == 1
    torch.testing.assert_close(loss(model), loss(original))
    assert inplace_ops.analyze(model, torch.nested.nested_tensor(parts)).dropped == []


def test_nothing_is_kept_for_ever() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def read(m: Readers, y: Tensor) -> Tensor:
        constant = torch.ones(4)
        alive.append(weakref.ref(constant))

        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, z: Tensor) -> Tensor:
                return z * constant[0]

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * constant[0]

        return Scale.apply(F.conv2d(y, m.conv.weight))

    x = images()
    model, _, report = converted(Readers(read), x)
    assert len(report.dropped) == 1
    alive.clear()
    for _ in range(3):
        model(x).sum().backward()
    gc.collect()
    assert [reference for reference in alive if reference() is not None] == []


def test_losses_that_are_kept_keep_no_maps() -> None:
    x = torch.randn(1024, 16, dtype=torch.float64)
    layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).double()
    model, original, report = converted(layers, x)
    assert len(report.dropped) == 1

    def losses(m: nn.Module) -> list[Tensor]:
        m.zero_grad()
        kept = [m(x).sum() for _ in range(3)]
        for loss in kept:
            loss.backward()
        m.zero_grad()
        return kept

    assert held_allocation(lambda: losses(model)) == held_allocation(lambda: losses(original))
