"""The rules of the recompute engine, one by one: each test fails without its rule."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import saved_allocation
from _support.engine_norms import convolution, each_norm, names_of, norms
from _support.twins import (
    HAS_HOOK,
    C,
    Parts,
    Program,
    assert_same_gradients,
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

from inplace_ops import memory as package_memory, saved_bytes
from inplace_ops.conversion.wiring import conversion_of
from inplace_ops.recompute import nodes, norms as norms_of_nodes, run, verify
from inplace_ops.recompute.affine import COPY_LIMIT, NormAffine
from inplace_ops.recompute.after_norm import is_after_norm
from inplace_ops.recompute.calls import Affine, Call, total
from inplace_ops.recompute.packed import Recomputed
from inplace_ops.recompute.settings import Settings
from inplace_ops.recompute.specs import Leaf, Spec
from inplace_ops.recompute.verify import is_verified

pytestmark = pytest.mark.usefixtures("_small_tensors_too", "_fused_rms_norm")


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
    assert norms_of_nodes.parameters_of(node) is None


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


def test_large_parameter_is_not_a_spec_leaf() -> None:
    """FSDP may free the parameter's memory, and a copy of it would cost too much memory."""
    size = COPY_LIMIT // 4 // 64 // C + 1
    model, x = Program(lambda m, z: m.conv(z.repeat(size, 1, 1, 1) * m.large)), images()
    model.large = nn.Parameter(torch.randn(2 * size, C, 8, 8))
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


def multiplied(m: Any, weight: Tensor, y: Tensor) -> Tensor:
    return m.last((y.sigmoid() * weight).sigmoid()) + m.other(y.tanh() * weight)


def added_and_saved(m: Any, weight: Tensor, y: Tensor) -> Tensor:
    """Another operation saves both terms of the sum."""
    saved = (y.sigmoid() * weight).sum() + F.silu(y).sum()
    return m.last(F.silu(weight + y)) + m.other(y) + saved


@pytest.mark.parametrize("compute", [multiplied, added_and_saved])
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
def test_alias_of_a_parameter_is_not_a_spec_leaf(
    alias: Callable[[Tensor], Tensor], compute: Callable[..., Tensor]
) -> None:
    """A fused optimizer writes to a parameter, unseen, between forward and backward."""

    def step(m: Any) -> None:
        version = m.weight._version
        m.weight.grad = torch.ones_like(m.weight)
        torch.optim.SGD([m.weight], lr=1, fused=True).step()
        assert m.weight._version == version

    layers = {name: nn.Linear(64, 64) for name in ("first", "last", "other")}
    weight = nn.Parameter(torch.randn(32, 64))
    model = Parts(lambda m, x: compute(m, alias(m.weight), m.first(x)), **layers, weight=weight)
    names, x = ("last.weight", "other.weight"), torch.randn(32, 64)
    assert_same_gradients(model, converted_twin(model), x, *names, between=step, tolerance=0)


@pytest.mark.usefixtures("without_products")
def test_norm_with_large_parameters_is_not_recomputed() -> None:
    size = COPY_LIMIT // 4 + 4
    model = nn.Sequential(nn.Linear(4, size), nn.LayerNorm(size), nn.Linear(size, 4))
    twin, x = converted_twin(model), torch.randn(64, 4)
    assert replaced(twin(x)) == []
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


def dropouts(m: Any, x: Tensor) -> Tensor:
    """Each dropout mask is as large as the tensor that a spec would replace."""
    for _ in range(4):
        x = x + F.dropout(m.linear(x), 0.1)
    return x


def shared_factor(m: Any, x: Tensor) -> Tensor:
    """Multiply by the same buffer repeatedly; no operation saves the products."""
    y = m.linear(x)
    for _ in range(8):
        y = (y.view(2, 64, 64) * m.factor).view(128, 64) + y
    return y


@pytest.mark.parametrize("compute", [dropouts, shared_factor])
def test_copies_that_no_spec_needs_are_freed(compute: Callable[[Any, Tensor], Tensor]) -> None:
    """Copies of small inputs are freed after forward, so memory does not exceed PyTorch's."""
    model = Parts(compute, linear=nn.Linear(64, 64), factor=nn.Buffer(torch.randn(64, 64)))
    twin, x = converted_twin(model, max_ops=4), torch.randn(128, 64)
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


@pytest.mark.usefixtures("without_products")
def test_write_through_data_is_detected_and_warns_once() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        y, u = F.silu(z), F.silu(m.other(z))
        for t in (y, u):
            t.data.add_(1)
        return m.conv(y) + m.conv(u)

    model, x = Program(compute), images()
    twin = converted_twin(model)
    with pytest.warns(UserWarning, match=r"SiLU, saved by Convolution.*up to 1") as caught:
        names = names_of(twin, x)
    assert len(caught) == 1
    assert "SiLU, saved by Convolution" not in names
    assert_same_steps(model, twin, x)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("norm", [*norms(), "none"])
def test_write_larger_than_a_rounding_is_detected(norm: str) -> None:
    """Of SiLU of a tensor that is saved, every write is: its spec has no rounding."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.silu(m.other(z)) if norm == "none" else z
        element = y.data.view(-1)[17:18]
        element.mul_(1 + 1e-7) if norm == "none" else element.add_(1e-4)
        return m.conv(y)

    kinds = norms() | {"none": nn.Identity()}
    with pytest.warns(UserWarning, match="differs"):
        names_of(converted_twin(Program(compute, lambda c: kinds[norm])), images())


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
            y.data.add_(1)
        return m.conv(y)

    model = Program(compute)
    twin = converted_twin(model)
    for samples in (2, 3, 2, 3):
        x = images(samples=samples)
        assert ("SiLU, saved by Convolution" in names_of(twin, x)) == (samples == 2)
        assert_same_steps(model, twin, x, steps=1)


@pytest.mark.usefixtures("without_products")
def test_number_of_spec_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_KEYS", 5)
    twin = converted_twin(Program(lambda m, z: m.conv(F.silu(z))))
    verified = conversion_of(twin).settings.verified
    for samples in range(1, 9):
        assert len(recomputed(twin(images(samples=samples)))) == 2
        assert 0 < len(verified) <= 5


@pytest.mark.usefixtures("without_products")
def test_no_comparison_during_cuda_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison would synchronize, so a spec with a new key is not used."""
    settings = Settings()
    value = Recomputed(Leaf(torch.ones(2)), torch.ones(2), "a", "b")
    on_a_gpu = torch.ones(2).as_subclass(type("OnAGPU", (Tensor,), {"is_cuda": True}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not is_verified(settings, 1, value, on_a_gpu)
    assert settings.verified == {}
    assert is_verified(settings, 1, value, torch.ones(2))
    assert is_verified(settings, 1, value, on_a_gpu)  # its key was verified on the line above


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
    """And activations of such tensors run without the norm before them."""
    plain, fused = (
        converted_twin(Program(convolution, activation=a)) for a in (nn.Identity, nn.SiLU)
    )
    for limit, is_replaced in ((4 * 2 * C * 64, True), (4 * 2 * C * 64 + 1, False)):
        monkeypatch.setattr(Settings, "MIN_BYTES", limit)
        assert bool(replaced(plain(images()))) == is_replaced
        assert any(map(is_after_norm, nodes_of(fused(images())))) == is_replaced


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

    def compute(m: Any, x: Tensor) -> Tensor:
        y = x.unfold(0, 8, 1)
        return m.first(y) + m.second(y.neg())

    model = Parts(compute, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
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


def test_view_of_an_overwritten_contiguous_tensor_is_recomputed() -> None:
    def compute(m: Any, z: Tensor) -> Tensor:
        flat = z.view(2, C, 64)
        m.act(z)
        return flat * m.scale.view(1, C, 1)

    model, x = Program(compute), images()
    model.norm, model.act = nn.Sequential(model.norm, nn.Identity()), nn.SiLU(inplace=True)
    twin = converted_twin(model)
    if HAS_HOOK:
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
    operation: str, dtype: torch.dtype
) -> None:
    """PyTorch computes in the promoted dtype, and casts the result to the overwritten dtype."""

    def compute(m: Any, z: Tensor) -> Tensor:
        other = m.silu(m.other(m.first(m.image)).to(dtype))
        return m.convolved(MIXED[operation](z, other))

    model, x = Program(compute), images()
    model.image = images()
    with no_warnings("inplace_ops"):
        twin = converted_twin(model)
        if HAS_HOOK:
            assert "Convolution" in [value.consumer for value in recomputed(twin(x))]
        assert_same_steps(model, twin, x)


def test_exact_in_place_product_with_another_dtype_is_recomputed() -> None:
    """The dtype of the other operand changes after the first use, and gradients stay exact."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.silu(z.bfloat16())
        y.mul_(m.scale if m.step < 4 else m.scale.bfloat16())
        return m.convolved(y.float())

    model, x = Program(compute), images()
    model.norm = nn.Identity()
    with no_warnings("inplace_ops"):
        twin = converted_twin(model)
        if HAS_HOOK:
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
    assert "SiLU, saved by Convolution" not in names_of(twin, images())


# Shape, dtype, device and strides.


def test_cast_across_devices_is_not_recomputed() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with run.run_engine(nn.Module(), Settings()) as running:
        y = F.silu(x * 1)
        running.walk(y)
        running.note(y)
        same, other = y.to(torch.float64), y.to("meta")
        for z in (same, other):
            running.walk(z)
        assert isinstance(running.replacer.deriver.spec_of(same.grad_fn, 0), Spec)
        assert not isinstance(running.replacer.deriver.spec_of(other.grad_fn, 0), Spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_in_another_memory_format_matches_pytorch(dtype: torch.dtype) -> None:
    """GELU rounds by strides. If no element equals the maximum, `amax` divides by 0."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x) * 1.0
        total = F.silu(y).sum(1)  # saves y
        other = y.to(dtype=torch.float32, memory_format=torch.channels_last)
        return F.gelu(other).amax(1) + total

    model = Parts(compute, conv=nn.Conv2d(3, 16, 3, padding=1)).to(dtype)
    x = torch.randn(2, 3, 9, 9, dtype=dtype)
    twin, state = converted_twin(model), copy.deepcopy(model.state_dict())
    with no_warnings():
        for scale in (0.0, 1.0):  # the comparison at the first use does not detect the rounding
            model.load_state_dict({name: scale * value for name, value in state.items()})
            assert_same_steps(model, twin, x)


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).expand(2, 3, 4, 5),
        torch.randn(2, 3, 4, 9)[..., ::2],
        # Strides of size-1 dimensions set the memory format of a convolution and its gradient.
        torch.randn(4, C, 1, 1).as_strided((4, C, 1, 1), (C, 1, C, C)),
        torch.randn(4, 1, 5, 6).as_strided((4, 1, 5, 6), (30, 1, 6, 1)),
    ],
    ids=["channels_last", "expanded", "strided", "one pixel", "one channel"],
)
def test_recomputed_value_has_the_saved_strides(like: Tensor) -> None:
    """The value has the strides of the saved tensor, and needs no more memory if it is expanded."""
    leaf = Leaf(torch.empty(like.shape).copy_(like))
    value = Recomputed(Call(torch.clone, [leaf]), like, "a", "b").unpack()
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
    model, x = model.to(memory_format=memory_format), images().to(memory_format=memory_format)
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


# The engine never disturbs the model.


# Unpacking.


class Doubling(torch.overrides.TorchFunctionMode):
    """Double the results of the functions that specs call."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (F.silu, torch.mul, torch.cat) else result


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_spec_runs_without_modes(autocast: bool) -> None:
    """Backward may run under autocast, a function mode, grad mode or another default device."""
    modes = []

    def function(x: Tensor) -> Tensor:
        modes.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return torch.mul(x, torch.full((4,), 3.0))

    x = torch.ones(4)
    value = Recomputed(Call(function, [Leaf(x)]), x, "a", "b")
    with torch.autocast("cpu", torch.bfloat16, autocast), Doubling(), torch.device("meta"):
        result = value.unpack()
    assert modes == [(False, False)]
    assert torch.equal(result, torch.full((4,), 3.0))


class Stream:
    """A fake CUDA stream on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waited_for.append(stream)


def test_tensors_of_another_stream_stay_saved_and_unpack_synchronizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    main, side = Stream(), Stream()
    current = main
    recorded: list[Stream] = []
    monkeypatch.setattr(nodes, "stream_of", lambda node: current)
    monkeypatch.setattr(package_memory, "current_stream", lambda device: current)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: recorded.append(stream))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def compute(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        nonlocal current
        z, relu = m.norm(m.first(x)), m.first(x).relu()
        y = m.silu(z)
        current = side
        pooled, _ = F.max_pool2d(relu, 2, return_indices=True)
        on_side = m.other(y), F.conv2d(z.bfloat16(), m.conv.weight.bfloat16()), m.act(z), pooled
        current = main
        return *on_side, m.conv(y)

    convolutions = {"first": nn.Conv2d(3, C, 3), "conv": nn.Conv2d(C, 4, 3)}
    activations = {"silu": nn.SiLU(), "act": nn.SiLU()}
    layers = {**convolutions, **activations, "norm": nn.BatchNorm2d(C), "other": nn.Conv2d(C, C, 1)}
    model, x = Parts(compute, **layers), images()
    twin = converted_twin(model)
    *on_side, on_main = twin(x)
    assert nodes.packed(on_main.grad_fn, "input") is not None
    assert nodes.packed(on_side[0].grad_fn, "input") is None
    assert type(on_side[2].grad_fn).__name__ == "SiluBackward0"
    if HAS_HOOK:  # the walk sees functional code later, on the main stream
        assert nodes.packed(on_side[1].grad_fn, "input") is None
        relu, _ = nodes.producer(on_side[3].grad_fn, 0)
        assert nodes.Field(relu, "result").is_itself
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


def test_assert_same_step_detects_a_small_error() -> None:

    model, x = Program(convolution), images()
    expected = step_of(model, x)
    actual = step_of(converted_twin(model), x)
    weight = actual["conv.weight"]
    assert weight is not None
    weight.view(-1)[0] += 1e-4 * weight.norm()
    with pytest.raises(AssertionError, match=r"conv\.weight"):
        assert_same_step(actual, expected)
