"""The rules of the recompute engine, one by one: each test fails without its rule."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import largest_allocation, saved_allocation
from _support.engine_norms import convolution, each_norm, names_of, norms
from _support.twins import (
    C,
    Program,
    assert_same_step,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    nodes_of,
    recomputed,
    replaced,
    step_of,
)
from torch import Tensor, nn

import inplace_ops
from inplace_ops import memory as package_memory, saved_bytes
from inplace_ops.conversion.wiring import conversion_of
from inplace_ops.recompute import engine, nodes
from inplace_ops.recompute.functions import is_fused
from inplace_ops.recompute.norms import NormAffine, norm_of, parameters_of
from inplace_ops.recompute.specs import Affine, Call, Leaf, Recomputed, Spec, total
from inplace_ops.recompute.versions import COPY_LIMIT

pytestmark = pytest.mark.usefixtures("source", "_small_tensors_too", "_fused_rms_norm")


# Leaves.


@pytest.mark.usefixtures("without_products")
@each_norm
@pytest.mark.parametrize("by", ["data", "storage"])
def test_spec_does_not_read_changed_or_freed_norm_parameters(norm: str, by: str) -> None:
    """Overwrite a norm's parameters between forward and backward, or free them, as FSDP does."""

    def compute(m: Any, z: Tensor) -> Tensor:
        z.register_hook(lambda gradient: restore(m.norm))
        return m.conv(z)

    model = Program(compute, lambda c: norms(c)[norm])
    twin, x = converted_twin(model), images()
    with torch.no_grad():
        for parameter in model.norm.parameters():
            parameter.uniform_(0.5, 1.5)
    twin.load_state_dict(model.state_dict())
    originals = {p: p.detach().clone() for m in (model, twin) for p in m.norm.parameters()}

    def change(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            if by == "data":
                parameter.data.fill_(7.0)
            else:
                parameter.untyped_storage().resize_(0)

    def restore(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.untyped_storage().resize_(originals[parameter].nbytes)
            parameter.data.copy_(originals[parameter])

    for m in (model, twin):
        m.norm.register_forward_hook(change)
    for _ in range(2):
        steps = []
        for m in (model, twin):
            m.zero_grad()
            output = m(x)
            assert len(recomputed(output)) == (m is twin)
            output.square().sum().backward()
            steps.append([p.grad for p in m.parameters()])
        for actual, expected in zip(*steps, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@each_norm
@pytest.mark.parametrize("field", ["weight", "bias"])
def test_norm_parameters_behind_saved_tensor_hooks_are_unknown(norm: str, field: str) -> None:
    """A weight or bias that saved-tensor hooks hide is unknown, which is not the same as absent."""
    module = norms()[norm]
    z = module(torch.randn(2, C, 8, 8, requires_grad=True) * 1)
    node = (z if z._base is None else z._base).grad_fn
    if not hasattr(type(node), f"_saved_{field}"):
        return
    getattr(node, f"_raw_saved_{field}").register_hooks(lambda t: t, lambda t: t)
    found = norm_of(z)
    assert found is not None
    assert parameters_of(found.node) is None


def test_small_factor_changed_before_backward_was_copied() -> None:
    """Write to a layer scale through `.data`, as an optimizer in another thread may do."""

    def compute(m: Any, z: Tensor) -> Tensor:
        output = m.conv(F.silu(z) * m.scale)
        m.scale.data.add_(1)
        return output

    model, x = Program(compute), images()
    twin = converted_twin(model)
    assert "Mul, saved by Convolution" in names_of(twin, x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for m in (model, twin):
        m.load_state_dict(state)
        m(x).square().sum().backward()
    torch.testing.assert_close(model.conv.weight.grad, twin.conv.weight.grad, rtol=1e-5, atol=1e-5)


def test_running_statistics_changed_before_backward_were_copied() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        output = m.conv(F.silu(z))
        with torch.no_grad():
            m.norm.running_mean.add_(1)
            m.norm.running_var.mul_(2)
        return output

    model, x = Program(compute).eval(), images()
    twin = converted_twin(model)
    for m in (model, twin):
        m.norm.weight.requires_grad_(False)  # otherwise PyTorch's backward detects the write
        m.norm.bias.requires_grad_(False)
        m.first.requires_grad_(False)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    gradients = [
        torch.autograd.grad(m(t).square().sum(), m.conv.weight)
        for m, t in zip((model, twin), leaves, strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_large_parameter_is_not_a_spec_leaf() -> None:
    """FSDP may free the parameter's memory, and a copy of it would cost too much memory."""
    size = COPY_LIMIT // 4 // 64 // C + 1

    class Large(Program):
        def __init__(self) -> None:
            super().__init__(lambda m, z: m.conv(z.repeat(size, 1, 1, 1) * m.large))
            self.large = nn.Parameter(torch.randn(2 * size, C, 8, 8))

    model, x = Large(), images()
    twin = converted_twin(model)
    assert "Mul, saved by Convolution" not in names_of(twin, x)
    assert_same_steps(model, twin, x)


class Detached(torch.autograd.Function):
    """Returns its input, which has the input's memory and is not a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize(
    "alias",
    [
        lambda w: w.view(-1).unfold(0, 1, 1)[:, 0].view_as(w),
        lambda w: torch.view_as_real(torch.view_as_complex(w.view(32, 32, 2))).view_as(w),
        Detached.apply,
        lambda w: Detached.apply(Detached.apply(w.t())).t(),
        lambda w: torch.cat([Detached.apply(w), w])[:32],
        lambda w: torch.unsafe_chunk(w, 1)[0],
    ],
    ids=["unfold", "view_as_real", "function", "functions", "copy", "unsafe_chunk"],
)
def test_alias_of_a_parameter_is_not_a_spec_leaf(alias: Callable[[Tensor], Tensor]) -> None:
    """A fused optimizer writes to a parameter between forward and backward."""

    class Aliased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
            self.other, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(32, 64))

        def forward(self, x: Tensor) -> Tensor:
            weight, y = alias(self.weight), self.first(x)
            return self.last((y.sigmoid() * weight).sigmoid()) + self.other(y.tanh() * weight)

    model, x = Aliased(), torch.randn(32, 64)
    twin = converted_twin(model)
    gradients = []
    for m in (model, twin):
        loss = m(x).square().sum()
        version = m.weight._version
        m.weight.grad = torch.ones_like(m.weight)
        torch.optim.SGD([m.weight], lr=1, fused=True).step()
        assert m.weight._version == version
        gradients.append(torch.autograd.grad(loss, [m.last.weight, m.other.weight]))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class SumAndDifference(torch.autograd.Function):
    """Returns the sum and the difference of two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return first + second, first - second


@pytest.mark.parametrize("length", [4, 60])
def test_search_for_aliases_visits_each_function_once(length: int) -> None:
    """There are 2 ** length paths. A Function may also read a leaf without a storage."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, sparse: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient * 2, None

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x, y = self.linear(x), Reads.apply(x, sparse)
            for _ in range(length):
                x, y = SumAndDifference.apply(x / 2, y)
                x, y = SumAndDifference.apply(x, y)
            return (x * torch.sigmoid(y)).tanh()

    sparse = torch.eye(4).to_sparse().requires_grad_()
    model, x = Network(), torch.randn(32, 64)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, tolerance=0)


@pytest.mark.usefixtures("without_products")
def test_norm_with_large_parameters_is_not_recomputed() -> None:
    size = COPY_LIMIT // 4 + 4
    model = nn.Sequential(nn.Linear(4, size), nn.LayerNorm(size), nn.Linear(size, 4))
    twin, x = converted_twin(model), torch.randn(64, 4)
    assert replaced(twin(x)) == []
    assert_same_steps(model, twin, x)


def test_copies_as_large_as_the_saved_tensor_are_not_made() -> None:
    """A group norm of 1 x 1 images has as many scales and shifts as outputs."""

    def compute(m: Any, z: Tensor) -> Tensor:
        return m.other(m.norm(z.mean((2, 3), keepdim=True)))

    model = Program(compute, lambda c: nn.GroupNorm(2, c))
    twin, x = converted_twin(model), images()
    names = names_of(twin, x)
    assert names.count("NativeGroupNorm, saved by Convolution") == 0
    assert inplace_ops.saved_bytes(twin, x) <= inplace_ops.saved_bytes(model, x)
    assert_same_steps(model, twin, x)


def test_write_to_spec_leaf_raises_in_backward() -> None:
    """Backward raises PyTorch's error, even if the node that saves the leaf does not run."""
    leaves: list[Tensor] = []

    def compute(m: Any, z: Tensor) -> Tensor:
        h = m.other(z)
        leaves.append(h)
        return m.conv(F.silu(h))

    twin, x = converted_twin(Program(compute)), images()
    assert "SiLU, saved by Convolution" in names_of(twin, x)
    output = twin(x)
    with torch.no_grad():
        leaves[-1].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*recomputed"):
        torch.autograd.grad(output.sum(), twin.conv.weight)


@pytest.mark.usefixtures("without_products")
def test_small_tensor_of_a_much_larger_leaf_stays_saved() -> None:
    """A spec of a small slice would keep the norm's whole input alive after the norm's backward."""

    def compute(m: Any, z: Tensor) -> Any:
        return m.linear(z[:1, :1]).sum(), z.sum()

    model = Program(compute)
    twin, x = converted_twin(model), images()
    assert "NativeBatchNorm, saved by Addmm" not in names_of(twin, x)
    model.compute = twin.compute = lambda m, z: (m.linear(z[:1, :3]).sum(), z.sum())
    assert names_of(twin, x) == ["NativeBatchNorm, saved by Addmm"]


def test_two_losses_with_separate_backwards_match_pytorch() -> None:
    """Two losses of one forward run backward one after the other."""
    model = Program(lambda m, z: (m.conv(F.silu(z)), m.linear(z.detach() * 2)))
    twin, x = converted_twin(model), images()
    for m in (model, twin):
        m.load_state_dict(model.state_dict())
        first, second = m(x)
        second.square().sum().backward()
        del second
        first.square().sum().backward()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


# Metadata outlives backward.


def test_node_metadata_keeps_nothing_large_after_backward() -> None:
    """The loss keeps the nodes alive, and they must not keep specs or leaves alive."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16))
    twin, x = converted_twin(layers), torch.randn(2048, 16)

    def losses(m: nn.Module) -> list[Tensor]:
        m.zero_grad()
        results = [m(x).sum() for _ in range(3)]
        for loss in results:
            loss.backward()
        m.zero_grad()
        return results

    losses(twin), losses(layers)
    assert saved_allocation(lambda: losses(twin)) <= saved_allocation(lambda: losses(layers))


class Dropouts(nn.Module):
    """Each dropout mask is as large as the tensor that a spec would replace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(layer(x), 0.1)
        return x


class SharedFactor(nn.Module):
    """Multiply by the same buffer repeatedly; no operation saves the products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("factor", torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for _ in range(8):
            y = (y.view(2, 64, 64) * self.factor).view(128, 64) + y
        return y


@pytest.mark.parametrize("make", [Dropouts, SharedFactor])
def test_copies_that_no_spec_needs_are_freed(make: Callable[[], nn.Module]) -> None:
    """Copies of small inputs are freed after forward, so memory does not exceed PyTorch's."""
    model, x = make(), torch.randn(128, 64)
    twin = converted_twin(model, max_ops=4)
    assert_same_steps(model, twin, x)
    assert saved_allocation(lambda: twin(x)) <= saved_allocation(lambda: model(x))
    assert saved_bytes(twin, x) <= saved_bytes(model, x)


def test_graph_has_no_reference_cycles() -> None:
    """Reference counts alone free a graph after backward, without backward, and after an error."""

    def compute(m: Any, z: Tensor) -> Tensor:
        alive.append(weakref.ref(z))
        output = m.conv(F.silu(m.relu(z) + z))
        if m.fails:
            raise LookupError
        return output

    alive: list[weakref.ref[Tensor]] = []
    twin, x = converted_twin(Program(compute)), images()
    twin.relu = nn.ReLU()
    gc.collect()
    gc.disable()
    try:
        for fails in (False, False, True, False):
            twin.fails = fails
            try:
                output = twin(x)
            except LookupError:
                continue
            if len(alive) != 2:
                output.sum().backward()
            del output
        assert [reference() for reference in alive] == [None] * 4
    finally:
        gc.enable()


# A saved tensor that was replaced is not read.


def test_forward_recomputes_only_at_the_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.silu(F.relu(z) * m.scale)
        return m.conv(torch.cat([y, m.silu(y)], 1)[:, 3 : 3 + C])

    count = 0
    compute_spec = Recomputed.compute

    def counted(value: Recomputed) -> Tensor:
        nonlocal count
        count += 1
        return compute_spec(value)

    monkeypatch.setattr(Recomputed, "compute", counted)
    twin, x = converted_twin(Program(compute)), images()
    twin(x)
    first, count = count, 0
    output = twin(x)
    assert first >= len(recomputed(output)) >= 3
    assert count == 0
    output.sum().backward()
    assert count == len(recomputed(twin(x)))


# First use.


def write_through_data(t: Tensor) -> None:
    t.data.add_(1)


@pytest.mark.usefixtures("without_products")
def test_write_through_data_is_detected_and_warns_once() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.silu(z)
        write_through_data(y)
        u = F.silu(m.other(z))
        write_through_data(u)
        return m.conv(y) + m.conv(u)

    model, x = Program(compute), images()
    twin = converted_twin(model)
    with pytest.warns(UserWarning, match=r"SiLU, saved by Convolution.*up to 1") as caught:
        names = names_of(twin, x)
    assert len(caught) == 1
    assert "SiLU, saved by Convolution" not in names
    assert_same_steps(model, twin, x)


def test_tiny_write_is_detected_by_an_exact_spec() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.silu(m.other(z))
        y.data.view(-1)[17:18].mul_(1 + 1e-7)
        return m.conv(y)

    with pytest.warns(UserWarning, match="differs"):
        names_of(converted_twin(Program(compute)), images())


@pytest.mark.usefixtures("without_products")
@each_norm
def test_write_larger_than_a_rounding_is_detected(norm: str) -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        z.data.view(-1)[17:18].add_(1e-4)
        return m.conv(z)

    with pytest.warns(UserWarning, match="differs"):
        names_of(converted_twin(Program(compute, lambda c: norms(c)[norm])), images())


@pytest.mark.usefixtures("without_products")
@each_norm
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_rounding_errors_are_tolerated(norm: str, mean: float) -> None:
    """A rounding counts as equal at the first use, even if the mean and the shift cancel."""
    with no_warnings():
        for _ in range(5):
            model = Program(convolution, lambda c: norms(c)[norm])
            nn.init.constant_(model.first.bias, mean)
            twin = converted_twin(model)
            assert len(recomputed(twin(images()))) == 1


@pytest.mark.filterwarnings("ignore:inplace_ops:UserWarning")
def test_new_shape_is_compared_at_its_first_use() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.silu(z)
        if len(z) == 3:
            write_through_data(y)
        return m.conv(y)

    model = Program(compute)
    twin = converted_twin(model)
    for samples in (2, 3, 2, 3):
        x = images(samples=samples)
        assert ("SiLU, saved by Convolution" in names_of(twin, x)) == (samples == 2)
        assert_same_steps(model, twin, x, steps=1)


@pytest.mark.usefixtures("without_products")
def test_number_of_spec_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_MAX_SPEC_KEYS", 5)
    twin = converted_twin(Program(lambda m, z: m.conv(F.silu(z))))
    verified = conversion_of(twin).settings.verified
    for samples in range(1, 9):
        assert len(recomputed(twin(images(samples=samples)))) == 2
        assert 0 < len(verified) <= 5


@pytest.mark.usefixtures("without_products")
def test_no_comparison_during_cuda_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison would synchronize, so a spec with a new key is not used."""
    settings = engine.Settings()
    value = Recomputed(Leaf(torch.ones(2)), torch.ones(2), "a", "b")
    running = engine.Engine(nn.Module(), settings, None)
    on_a_gpu = torch.ones(2).as_subclass(type("OnAGPU", (Tensor,), {"is_cuda": True}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not running.is_verified(value, on_a_gpu)
    assert settings.verified == {}
    assert running.is_verified(value, torch.ones(2))
    assert running.is_verified(value, on_a_gpu)  # its key was verified on the line above


# Cost.


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("max_ops", [1, 2, 3, 4, 5])
def test_max_ops_limits_the_cost_of_specs(max_ops: int) -> None:
    """A norm, an activation and a product cost one operation each, and a view none."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.silu(z)  # saves a tensor of cost 1
        p = y.view(2, C, 4, 16) * m.scale  # saves a tensor of cost 2
        q = F.silu(p)  # saves a tensor of cost 3
        return m.conv(q) + (q * m.scale).mean()  # both save one of cost 4

    model, x = Program(compute), images()
    twin = converted_twin(model, max_ops)
    costs = sorted(value.spec.cost for value in recomputed(twin(x)))
    assert costs == [cost for cost in (1, 2, 3, 4, 4) if cost <= max_ops] or max_ops < 4
    assert max(costs) <= max_ops
    assert_same_steps(model, twin, x)


@pytest.mark.usefixtures("without_products")
def test_tensors_below_min_bytes_stay_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = converted_twin(Program(convolution))
    monkeypatch.setattr(engine, "MIN_BYTES", 4 * 2 * C * 64)
    assert len(recomputed(twin(images()))) == 1
    monkeypatch.setattr(engine, "MIN_BYTES", 4 * 2 * C * 64 + 1)
    assert replaced(twin(images())) == []


def test_activations_of_tensors_below_min_bytes_are_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin = converted_twin(Program(convolution, activation=nn.SiLU))
    monkeypatch.setattr(engine, "MIN_BYTES", 4 * 2 * C * 64)
    assert any(map(is_fused, nodes_of(twin(images()))))
    monkeypatch.setattr(engine, "MIN_BYTES", 4 * 2 * C * 64 + 1)
    assert not any(map(is_fused, nodes_of(twin(images()))))


def test_magnitude_bounds_a_norm_of_cancelled_terms() -> None:
    """Rounding errors stay as large when terms cancel, and the second norm enlarges them."""

    def scaled(spec: Spec, scale: float) -> Affine:
        affine = torch.tensor([scale, 0.0]).view(2, 1, 1, 1, 1).expand(2, 1, C, 1, 1).contiguous()
        return Affine(spec, NormAffine(affine, None), torch.float32)

    first = scaled(Leaf(torch.randn(2, C, 8, 8)), 1.0)
    others = Leaf(first.value() * -(1 - 2.0**-8))
    second = scaled(Call(torch.add, (first, others), bound=total), 2.0**8)
    assert second.value().abs().max() < 2 * first.magnitude()
    assert second.magnitude() > 2**8 * first.magnitude()


# Views, in-place operations and activations.


def test_gelu_ignores_an_inplace_attribute() -> None:
    model, x = Program(lambda m, z: m.conv(m.gelu(z))), images()
    model.gelu = nn.GELU()
    model.gelu.inplace = True
    assert_same_steps(model, converted_twin(model), x)


def test_as_strided_of_changed_strides_matches_pytorch() -> None:
    """Change the input's strides after the first use; the saved tensor's stay the same."""

    def compute(m: Any, z: Tensor) -> Tensor:
        return m.conv(z.as_strided(z.shape, (C * 64, 64, 8, 1), 0))

    model = Program(compute)
    model.first = nn.Identity()
    twin, x = converted_twin(model), torch.randn(2, C, 8, 8)
    assert_same_steps(model, twin, x)
    assert_same_steps(model, twin, x.contiguous(memory_format=torch.channels_last))


def test_view_of_an_autograd_leaf_by_an_unknown_operation_matches_pytorch() -> None:
    """Here `unfold` transposes a leaf: the leaf has the elements of the view in another order."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = x.unfold(0, 8, 1)
            return self.first(y) + self.second(y.neg())

    model = Views()
    twin = converted_twin(model)
    with no_warnings():
        # A leaf of zeros equals its transpose at the first use of the spec.
        for x in (torch.zeros(8, 8), torch.randn(8, 8)):
            assert_same_step(step_of(twin, x), step_of(model, x), tolerance=0)


def test_transposed_view_of_an_overwritten_tensor_matches_pytorch() -> None:
    """PyTorch regenerates the view by `as_strided`, which does not determine the element order.

    The comparison at the first use does not detect a wrong order, as all values are 0 then.
    """

    def compute(m: Any, z: Tensor) -> Tensor:
        rows = z.permute(0, 2, 3, 1)
        F.relu_(z)
        return rows * m.scale.flatten()

    model, x = Program(compute), images(samples=1).contiguous(memory_format=torch.channels_last)
    nn.init.zeros_(model.norm.weight)
    twin = converted_twin(model)
    assert_same_steps(model, twin, x)
    nn.init.normal_(model.norm.weight)
    assert_same_steps(model, twin, x)


def test_view_of_an_overwritten_contiguous_tensor_is_recomputed(source: str) -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        flat = z.view(2, C, 64)
        m.act(z)
        return flat * m.scale.view(1, C, 1)

    model, x = Program(compute), images()
    model.norm, model.act = nn.Sequential(model.norm, nn.Identity()), nn.SiLU(inplace=True)
    twin = converted_twin(model)
    if source == "hook":
        assert [value.consumer for value in recomputed(twin(x))].count("Mul") == 1
    assert_same_steps(model, twin, x)


# In-place operations on a norm's output z and a recomputed operand of another dtype.
MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda z, other: z.mul_(other),
    "sum": lambda z, other: z.add_(other),
    "difference": lambda z, other: z.sub_(other, alpha=2),
    "sum_with_a_norm": lambda z, other: other.add_(z),
    "relu_of_a_sum": lambda z, other: F.relu(z.add_(other)),
}


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
@pytest.mark.parametrize("operation", MIXED)
def test_in_place_operations_with_another_dtype_match_pytorch(
    operation: str, dtype: torch.dtype, source: str
) -> None:
    """PyTorch computes in the promoted dtype, and casts the result to the overwritten dtype."""

    def compute(m: Any, z: Tensor) -> Tensor:
        other = m.silu(m.other(m.first(m.image)).to(dtype))
        return m.convolved(MIXED[operation](z, other))

    model, x = Program(compute), images()
    model.image = images()
    with no_warnings("inplace_ops"):
        twin = converted_twin(model)
        if source == "hook":
            assert "Convolution" in [value.consumer for value in recomputed(twin(x))]
        assert_same_steps(model, twin, x)


def test_exact_in_place_product_with_another_dtype_is_recomputed(source: str) -> None:
    """The dtype of the other operand changes after the first use, and gradients stay exact."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.silu(z.bfloat16())
        y.mul_(m.scale if m.step < 4 else m.scale.bfloat16())
        return m.convolved(y.float())

    model, x = Program(compute), images()
    model.norm = nn.Identity()
    with no_warnings("inplace_ops"):
        twin = converted_twin(model)
        if source == "hook":
            assert "Convolution" in [value.consumer for value in recomputed(twin(x))]
        twin.step = model.step
        assert_same_steps(model, twin, x, steps=6, tolerance=0)


@pytest.mark.usefixtures("without_products")
def test_activation_of_a_parameter_matches_pytorch() -> None:
    """The activation saves the parameter itself, not a clone, and no operation produced it."""
    model = Program(lambda m, z: m.conv(m.silu(z) * F.silu(m.scale)))
    twin, x = converted_twin(model), images()
    with no_warnings():
        assert len(recomputed(twin(x))) == 2
    assert_same_steps(model, twin, x)


# Freed storage.


@pytest.mark.usefixtures("without_products")
def test_freed_leaf_raises_in_backward() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        output = m.conv(F.silu(z))
        z_input[0].untyped_storage().resize_(0)
        return output

    z_input: list[Tensor] = []
    twin = converted_twin(Program(compute))
    twin.norm.register_forward_pre_hook(lambda _, args: z_input.insert(0, args[0]))
    output = twin(images())
    with pytest.raises(RuntimeError, match=r"was freed between forward.*inplace_ops\.revert"):
        output.sum().backward()


def test_freed_tensor_is_not_a_spec_leaf() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        h = m.other(z)
        y = F.silu(h)
        h.untyped_storage().resize_(0)
        return m.conv(y)

    twin = converted_twin(Program(compute))
    output = twin(images())
    assert "SiLU, saved by Convolution" not in [value.name for value in recomputed(output)]
    with torch.no_grad():
        twin.eval()


# Shape, dtype, device and strides.


def test_cast_across_devices_is_not_recomputed() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with engine.run_engine(nn.Module(), engine.Settings()) as running:
        y = F.silu(x * 1)
        running.walk(y)
        running.note(y)
        same, other = y.to(torch.float64), y.to("meta")
        for z in (same, other):
            running.walk(z)
        assert running._output_spec(same.grad_fn, 0) is not None
        assert running._output_spec(other.grad_fn, 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_in_another_memory_format_matches_pytorch(dtype: torch.dtype) -> None:
    """GELU rounds by strides. If no element equals the maximum, `amax` divides by 0."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x) * 1.0
            total = F.silu(y).sum(1)  # saves y
            other = y.to(dtype=torch.float32, memory_format=torch.channels_last)
            return F.gelu(other).amax(1) + total

    model, x = Network().to(dtype), torch.randn(2, 3, 9, 9, dtype=dtype)
    twin, state = converted_twin(model), copy.deepcopy(model.state_dict())
    with no_warnings():
        for scale in (0.0, 1.0):  # the comparison at the first use does not detect the rounding
            model.load_state_dict({name: scale * value for name, value in state.items()})
            assert_same_steps(model, twin, x)


def test_only_a_lossless_cast_is_stored_in_its_source_dtype() -> None:
    for dtype, is_stored in ((torch.float64, True), (torch.bfloat16, False)):
        model = Program(lambda m, z, dtype=dtype: m.convolved(m.other(z).to(dtype)))
        twin, x = converted_twin(model), images()
        assert any("ToCopy" in name for name in names_of(twin, x)) == is_stored
        assert inplace_ops.saved_bytes(twin, x) < inplace_ops.saved_bytes(model, x)


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).expand(2, 3, 4, 5),
        torch.randn(2, 3, 4, 9)[..., ::2],
    ],
    ids=["channels_last", "expanded", "strided"],
)
def test_recomputed_value_has_the_saved_strides(like: Tensor) -> None:
    """The value has the strides of the saved tensor, and needs no more memory if it is expanded."""
    value = Recomputed(Call(torch.clone, [Leaf(like.contiguous())]), like, "a", "b").unpack()
    assert value.stride() == like.stride()
    assert torch.equal(value, like)
    used = 1 + sum(s * (n - 1) for n, s in zip(like.shape, like.stride(), strict=True))
    assert value.untyped_storage().nbytes() == 4 * used


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@each_norm
def test_memory_formats_and_gradient_strides_match_pytorch(
    norm: str, memory_format: torch.memory_format
) -> None:
    model = Program(lambda m, z: m.conv(m.silu(z)), lambda c: norms(c)[norm])
    model, x = (
        model.to(memory_format=memory_format),
        images().contiguous(memory_format=memory_format),
    )
    twin = converted_twin(model)
    assert_same_steps(model, twin, x)
    strides = []
    for m in (model, twin):
        seen: list[tuple[int, ...]] = []

        def visit(_: Any, inputs: Any, outputs: Any, seen: list[Any] = seen) -> None:
            seen.append(tuple(g.stride() for g in (*inputs, *outputs) if g is not None))

        handles = [module.register_full_backward_hook(visit) for module in (m.first, m.conv)]
        m(x.clone().requires_grad_()).square().sum().backward()
        strides.append(seen)
        for handle in handles:
            handle.remove()
    assert strides[0] == strides[1]


@pytest.mark.parametrize("shape", [(4, C, 1, 1), (4, 1, 5, 6)], ids=str)
def test_strides_of_size_one_dimensions_are_restored(shape: tuple[int, ...]) -> None:
    """Strides of size-1 dimensions set the memory format of a convolution and its gradient."""
    channels = shape[1]
    model = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, C, 1))
    inputs: list[Tensor] = []
    model[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    inplace_ops.convert(model)
    node: Any = model(torch.empty(shape, memory_format=torch.channels_last).normal_()).grad_fn
    assert node._raw_saved_input.unpack_hook is not None
    torch.testing.assert_close(node._saved_input, inputs[-1], check_stride=True)


# The engine never disturbs the model.


def test_engine_error_leaves_tensors_saved_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("of the engine")

    model, x = Program(lambda m, z: m.conv(m.silu(z)) + m.linear(z).mean()), images()
    twin = converted_twin(model)
    monkeypatch.setattr(engine.Engine, "_replace_saved_tensors", fail)
    with pytest.warns(UserWarning, match="LookupError: of the engine"):
        assert replaced(twin(x)) == []
    assert_same_steps(model, twin, x)  # does not warn again


def test_engine_warning_raised_as_an_error_does_not_reach_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise LookupError

    model, x = Program(lambda m, z: m.conv(m.silu(z))), images()
    twin = converted_twin(model)
    monkeypatch.setattr(engine.Engine, "_replace_saved_tensors", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_steps(model, twin, x)


# Unpacking.


class Doubling(torch.overrides.TorchFunctionMode):
    """Double the results of the functions that specs call."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (F.silu, torch.mul, torch.cat) else result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes_during_backward_do_not_affect_specs(dtype: torch.dtype) -> None:
    """Autocast, a function mode and a default device in backward do not affect recomputation."""
    model = Program(lambda m, z: m.conv(F.softplus(F.silu(z) * m.scale)), dtype=dtype)
    twin, x = converted_twin(model), images(dtype)
    losses = [m(x).square().sum() for m in (model, twin)]
    losses[0].backward()
    with torch.autocast("cpu", torch.bfloat16), Doubling(), torch.device("meta"):
        losses[1].backward()
    for actual, expected in zip(twin.parameters(), model.parameters(), strict=True):
        if expected.grad is not None:
            tolerance = 1e-4 if dtype == torch.float32 else 0
            torch.testing.assert_close(actual.grad, expected.grad, rtol=tolerance, atol=tolerance)


def test_spec_runs_without_modes() -> None:
    """A spec runs without modes: CUDA's autocast casts for more table lines than the CPU's."""
    modes = []

    def function(x: Tensor) -> Tensor:
        modes.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return torch.mul(x, 3)

    x = torch.ones(4)
    value = Recomputed(Call(function, [Leaf(x)]), x, "a", "b")
    with torch.autocast("cpu", torch.bfloat16), Doubling():
        result = value.unpack()
    assert modes == [(False, False)]
    assert torch.equal(result, torch.full((4,), 3.0))


def test_function_modes_see_only_the_calls_of_the_model() -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls.append(function.__name__)
            return function(*args, **(kwargs or {}))

    model, x = Program(lambda m, z: m.conv(F.silu(z * m.scale))), images()
    twin = converted_twin(model)
    twin(x)  # the first call fills in the report
    calls, watched = [], {"clone", "detach", "silu", "mul", "sub", "abs", "to", "conv2d"}
    for m in (model, twin):
        with Counting() as mode:
            m(x)
        calls.append([call for call in mode.calls if call in watched])
    assert calls[0] == calls[1]


class Stream:
    """A fake CUDA stream on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream)


def test_tensors_of_another_stream_stay_saved_and_unpack_synchronizes(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that another stream reads stays saved; unpacking waits for the stream of forward."""
    main, side = Stream(), Stream()
    current = main
    recorded: list[Stream] = []
    monkeypatch.setattr(nodes, "stream_of", lambda node: current)
    monkeypatch.setattr(package_memory, "current_stream", lambda device: current)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: recorded.append(stream))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class Branches(Program):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            nonlocal current
            first = self.first(x)
            z, relu = self.norm(first), self.first(x).relu()
            y = self.silu(z)
            current = side
            pooled, _ = F.max_pool2d(relu, 2, return_indices=True)
            on_side = self.other(y), self.convolved(z.bfloat16()), self.act(z), pooled
            current = main
            return *on_side, self.conv(y)

    model, x = Branches(lambda *_: None, activation=nn.SiLU), images()
    twin = converted_twin(model)
    *on_side, on_main = twin(x)
    assert nodes.packed(on_main.grad_fn, "input") is not None
    assert nodes.packed(on_side[0].grad_fn, "input") is None
    assert type(on_side[2].grad_fn).__name__ == "SiluBackward0"
    if source == "hook":  # the walk sees functional code later, on the main stream
        assert nodes.packed(on_side[1].grad_fn, "input") is None
        relu, _ = nodes.producer(on_side[3].grad_fn, 0)
        assert not nodes.has_hooks(relu, "result")
    assert main.waited_for == side.waited_for == []
    outputs = list(zip((*on_side, on_main), model(x), strict=True))
    current = side
    for actual, expected in outputs:
        torch.testing.assert_close(
            torch.autograd.grad(actual.square().sum(), twin.first.weight, retain_graph=True),
            torch.autograd.grad(expected.square().sum(), model.first.weight, retain_graph=True),
        )
    assert set(side.waited_for) == {main}
    assert set(recorded) == {side}


def test_recomputed_value_requires_no_grad() -> None:
    twin, x = converted_twin(Program(lambda m, z: m.conv(F.silu(z)))), images()
    node = twin(x).grad_fn
    with torch.enable_grad():
        value = node._raw_saved_input.data.unpack()
    assert not value.requires_grad


# Versions and notes that the generated tests of test_engine_writes.py do not reach.


def test_in_place_addition_and_hidden_write_match_pytorch() -> None:
    """An addition and a hidden write both raise the version; only the addition makes a node."""

    def adds(m: Any, z: Tensor) -> Tensor:
        return m.conv(m.relu_(z.add_(m.scale)))

    def writes(m: Any, z: Tensor) -> Tensor:
        with torch.no_grad():
            z.add_(m.scale)
        return m.conv(m.relu_(z + m.scale))

    for compute in (adds, writes):
        model, x = Program(compute), images()
        model.relu_ = nn.ReLU(inplace=True)
        twin = converted_twin(model)
        assert_same_steps(model, twin, x)


def test_write_before_an_in_place_addition_matches_pytorch(source: str) -> None:
    """From the third step on, write to a tensor that an in-place addition then overwrites."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.silu(z)
        if m.step >= 3:
            with torch.no_grad():
                y.mul_(2)
        return m.conv(y.add_(m.silu(m.other(z))))

    model, x = Program(compute), images()
    twin = converted_twin(model)
    if source == "hook":  # the walk sees the addition after its inputs are freed
        assert "Add, saved by Convolution" in names_of(twin, x)
    twin.step = 0
    for _ in range(3):
        assert_same_steps(model, twin, x)


def test_in_place_activation_of_one_of_several_views_raises() -> None:
    """PyTorch rejects the activation even if the view covers all of the norm's output."""
    compared: list[Tensor] = []

    def compute(m: Any, z: Tensor) -> Tensor:
        compared[:] = z, z.detach().clone()
        return m.conv(m.act_(z.split(1)[0]))

    model = Program(compute).eval()
    model.act_ = nn.ReLU(inplace=True)
    for m in (model, converted_twin(model)):
        with pytest.raises(RuntimeError, match="output of a function that returns multiple views"):
            m(images(samples=1))
        assert torch.equal(*compared)


def test_nodes_of_other_graphs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine neither reads nor marks the nodes of an argument that another network computed."""
    frozen, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.SiLU()), images()
    model = Program(lambda m, z: m.conv(z))
    twin = converted_twin(model)
    foreign = frozen(x)
    node: Any = foreign.grad_fn
    output = twin(foreign)
    assert output.grad_fn._raw_saved_input.unpack_hook is not None
    while node is not None:
        assert not any(str(key).startswith("inplace_ops") for key in node.metadata)
        node = node.next_functions[0][0] if node.next_functions else None
    first = next(
        n
        for n in nodes_of(output)
        if n.name() == "ConvolutionBackward0" and n is not output.grad_fn
    )
    assert first._raw_saved_input.unpack_hook is None


def test_first_step_has_a_smaller_peak() -> None:
    """The comparison at the first use allocates for one tensor at a time."""
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(4096, 64)
    twin = converted_twin(model)
    peaks = []
    for m in (model, twin):
        with largest_allocation() as peak:
            m(x).square().mean().backward()
        m.zero_grad()
        peaks += peak
    assert peaks[1] < peaks[0]


def test_assert_same_step_detects_a_small_error() -> None:
    """`assert_same_step` detects one element of a gradient that is wrong by 1e-4 of the norm."""
    model, x = Program(convolution), images()
    expected = step_of(model, x)
    actual = step_of(converted_twin(model), x)
    weight = actual["conv.weight"]
    assert weight is not None
    weight.view(-1)[0] += 1e-4 * weight.norm()
    with pytest.raises(AssertionError, match=r"conv\.weight"):
        assert_same_step(actual, expected)
