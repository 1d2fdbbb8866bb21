"""Checkpoints of blocks, in which the engine runs when a block runs again in backward."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import largest_allocation
from _support.twins import no_warnings, nodes_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import inplace_ops
from inplace_ops.conversion.blocks import paths_of_blocks
from inplace_ops.conversion.report import Report
from inplace_ops.conversion.wiring import Conversion, attach
from inplace_ops.recompute import nodes
from inplace_ops.recompute.checkpoints import (
    Checkpoint,
    RecomputationError,
    _Call,
    kept_by_checkpoint,
    modes_of,
)
from inplace_ops.recompute.settings import Settings

pytestmark = [pytest.mark.usefixtures("source", "_small_tensors_too")]

D = 8


class Attention(nn.Module):
    """Attention of one head, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v))
        return out


class Block(nn.Module):
    """A transformer's block, with dropout and an activation after a norm."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.norm, self.attention, self.act = nn.LayerNorm(D), Attention(), nn.SiLU(inplace=True)
        self.middle = nn.LayerNorm(D)
        self.ff = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(p), nn.Linear(4 * D, D))
        self.scale = nn.Parameter(torch.randn(D))
        self.register_buffer("offset", torch.randn(D))

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x)) * self.scale
        if shift is not None:
            x = x + shift.sin()
        return x + self.ff(self.act(self.middle(x))) + self.offset


class Net(nn.Module):
    """A linear layer, blocks, and a linear layer."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        self.blocks = nn.ModuleList([block() for _ in range(count)])

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, **kwargs)
        out: Tensor = self.last(x)
        return out


def inputs() -> Tensor:
    return torch.randn(2, 5, D, dtype=torch.double)


def checkpoints_of(model: nn.Module, max_ops: int = 64) -> dict[str, Checkpoint]:
    return {
        path: Checkpoint(Settings(max_ops), modes_of(model.get_submodule(path)))
        for path in paths_of_blocks(model)
    }


def pair(model: nn.Module | None = None, max_ops: int = 64) -> tuple[nn.Module, nn.Module]:
    """Return a model in float64, and its copy whose blocks are all checkpointed."""
    model = (Net() if model is None else model).double()
    twin = copy.deepcopy(model)
    attach(twin, Conversion(Settings(max_ops), Report(), checkpoints_of(twin, max_ops)))
    assert inplace_ops.saved_bytes(twin, inputs()) < 0.5 * inplace_ops.saved_bytes(model, inputs())
    return model, twin


def seeded(call: Callable[[], Any], seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return call()


def gradients(model: nn.Module, x: Tensor, **kwargs: Any) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    loss = seeded(lambda: model(x, **kwargs)).square().sum()
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def assert_same_steps(model: nn.Module, twin: nn.Module, **kwargs: Any) -> None:
    for _ in range(2):  # the first step keeps originals: see NOTE [Weights are proved]
        x = inputs()
        assert_equal(gradients(twin, x, **kwargs), gradients(model, x, **kwargs))


@pytest.mark.parametrize("max_ops", [1, 64])
def test_gradients_match_pytorch_with_dropout(max_ops: int) -> None:
    model, twin = pair(max_ops=max_ops)
    with no_warnings():
        assert_same_steps(model, twin)


def test_random_state_after_backward_is_that_after_forward() -> None:
    _, twin = pair()
    torch.manual_seed(3)
    out = twin(inputs())
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_as_keyword_arguments_get_gradients() -> None:
    model, twin = pair()
    x, found = inputs(), []
    for each in (model, twin):
        shift = torch.linspace(0, 1, D, dtype=torch.double, requires_grad=True)
        loss = seeded(lambda each=each, shift=shift: each(x, shift=shift)).square().sum()
        found.append(torch.autograd.grad(loss, [shift, *each.parameters()]))
    assert_equal([*found[1]], [*found[0]])


def test_second_backward_over_a_retained_graph_matches_pytorch() -> None:
    model, twin = pair()
    x, found = inputs(), []
    for each in (model, twin):
        loss = seeded(lambda each=each: each(x)).square().sum()
        parameters = [*each.parameters()]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        found.append([*first, *torch.autograd.grad(loss, parameters)])
    assert_equal(found[1], found[0])


def test_second_derivatives_match_pytorch() -> None:
    model, twin = pair(Net(lambda: Block(0.0)))
    data, found = inputs(), []
    for each in (model, twin):
        x = data.clone().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (first,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), [x, *each.parameters()]))
    assert_equal([*found[1]], [*found[0]])


def test_partial_backwards_match_pytorch() -> None:
    """Each backward asks for the gradient of one parameter alone, and needs some slots alone."""
    model, twin = pair()
    x = inputs()
    for name in ("blocks.1.scale", "blocks.0.ff.0.weight", "blocks.2.norm.bias", "first.weight"):
        found = [
            torch.autograd.grad(
                seeded(lambda each=each: each(x)).square().sum(), each.get_parameter(name)
            )[0]
            for each in (model, twin)
        ]
        assert_equal(found[1:], found[:1])


def test_frozen_parameters_and_inputs_match_pytorch() -> None:
    model, twin = pair()
    for each in (model, twin):
        each.requires_grad_(False)
        each.get_submodule("blocks.1").requires_grad_(True)
    x, found = inputs(), []
    for each in (model, twin):
        loss = seeded(lambda each=each: each(x)).square().sum()
        found.append(torch.autograd.grad(loss, [*each.get_submodule("blocks.1").parameters()]))
    assert_equal([*found[1]], [*found[0]])


def test_autocast_of_forward_is_on_when_a_block_runs_again() -> None:
    model, twin = pair()
    model.float(), twin.float()
    for _ in range(2):
        x, found = inputs().float(), []
        for each in (model, twin):
            with torch.autocast("cpu", torch.bfloat16):
                loss = seeded(lambda each=each, x=x: each(x)).square().sum()
            found.append(torch.autograd.grad(loss, [*each.parameters()]))
        torch.testing.assert_close([*found[1]], [*found[0]], rtol=0.02, atol=0.02)


def test_training_flags_of_forward_hold_when_a_block_runs_again() -> None:
    model, twin = pair()
    x, found = inputs(), []
    for each in (model, twin):
        loss = seeded(lambda each=each: each(x)).square().sum()
        each.eval()
        found.append(torch.autograd.grad(loss, [*each.parameters()]))
        assert not any(module.training for module in each.modules())
        each.train()
    assert_equal([*found[1]], [*found[0]])


def test_block_in_another_mode_is_not_checkpointed() -> None:
    model, twin = pair()
    model.eval(), twin.eval()
    with no_warnings():
        assert_same_steps(model, twin)
    checkpoint_of_block = vars(twin.get_submodule("blocks.0"))["_inplace_ops"]
    checkpoint_of_block.modes = modes_of(twin.get_submodule("blocks.0"))
    model.train(), twin.train()
    with pytest.warns(UserWarning, match="a Block is not checkpointed"):
        assert_same_steps(model, twin)


# Writes between forward and backward.


def _fused_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@torch.no_grad()
def _written(model: nn.Module) -> None:
    model.get_parameter("blocks.1.ff.0.weight").mul_(2)


@torch.no_grad()
def _written_buffer(model: nn.Module) -> None:
    model.get_buffer("blocks.1.offset").mul_(2)


def _other_data(model: nn.Module) -> None:
    parameter = model.get_parameter("blocks.1.ff.0.weight")
    parameter.data = parameter.data * 2


def _freed(model: nn.Module) -> None:
    model.get_parameter("blocks.1.ff.0.weight").untyped_storage().resize_(0)


@pytest.mark.parametrize("write", [_fused_step, _written, _written_buffer, _other_data, _freed])
def test_changed_parameter_or_buffer_raises(write: Callable[[nn.Module], None]) -> None:
    _, twin = pair()
    loss = twin(inputs()).sum()
    write(twin)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|was freed"):
        loss.backward()


def test_changed_argument_raises() -> None:
    _, twin = pair()
    shift = torch.randn(D, dtype=torch.double)
    loss = twin(inputs(), shift=shift).sum()
    shift.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Written(Block):
    """A block that writes to what an operation has saved: PyTorch raises in backward."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = super().forward(x).sigmoid()
        y += 1
        return y * x.tanh()


def test_write_to_a_saved_tensor_raises_as_in_pytorch() -> None:
    model, twin = pair(Net(Written))
    for each in (model, twin):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each(inputs()).sum().backward()


class Unsteady(Block):
    """A block that does something else at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        self.calls += 1
        return super().forward(x).sin() if self.calls % 2 else super().forward(x.sin())


def test_block_that_runs_differently_raises() -> None:
    _, twin = pair(Net(Unsteady))
    with pytest.raises(RecomputationError, match=r"saved a torch\.float64 tensor"):
        twin(inputs()).sum().backward()


def test_block_knows_its_arguments_apart_when_it_runs_again() -> None:
    """And one that it gets twice is the same tensor again."""

    class Comparing(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x * 2 if shift is x else x.sin())

    class Twice(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.first(x)
            for i, block in enumerate(self.blocks):
                x = block(x, shift=x if i % 2 else x.detach())
            out: Tensor = self.last(x)
            return out

    assert_same_steps(*pair(Twice(Comparing)))


def test_argument_without_a_gradient_has_none_when_a_block_runs_again() -> None:
    """Else the product would save its other factor too."""

    class Masked(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x if shift is None else x.sin() * shift)

    model, twin = pair(Net(Masked))
    assert_same_steps(model, twin, shift=torch.randn(D, dtype=torch.double))


def test_inference_tensor_among_the_arguments_matches_pytorch() -> None:
    """It has no version that could be compared, so the block is not checkpointed."""
    model, twin = pair()
    with torch.inference_mode():
        shift = torch.randn(D, dtype=torch.double)
    assert_same_steps(model, twin, shift=shift)


def test_block_that_saves_less_when_it_runs_again_raises() -> None:
    class Shrinking(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return x if is_backward else super().forward(x)

    is_backward: list[bool] = []
    _, twin = pair(Net(Shrinking))
    loss = twin(inputs()).sum()
    is_backward.append(True)
    with pytest.raises(RecomputationError, match="saved fewer tensors when it ran again"):
        loss.backward()


@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
def test_functional_call_with_other_tensors_matches_pytorch(kind: type) -> None:
    model, twin = pair()
    x, found = inputs(), []
    for each in (model, twin):
        other = {n: (p * 1.5).detach().requires_grad_() for n, p in each.named_parameters()}
        if kind is nn.Parameter:
            other = {n: nn.Parameter(p.detach()) for n, p in other.items()}
        given = {**other, **{n: b * 2 for n, b in each.named_buffers()}}
        out = seeded(lambda each=each, g=given: torch.func.functional_call(each, g, (x,)))
        found.append(torch.autograd.grad(out.square().sum(), [*other.values()]))
    assert_equal([*found[1]], [*found[0]])


# State that changes between forward and backward.


class Scheduled(Block):
    """A block that reads attributes, a dict and a list, and stashes what it resets."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.depth = 1.0, 0
        self.context: dict[str, Any] = {"shift": 0.0}
        self.factors = [1.0]
        self.stash: Tensor | None = None

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        self.depth += 1
        self.stash = x.sin()
        x = x * self.power * self.factors[0] + self.context["shift"]
        y = super().forward(x, shift) * self.stash * self.depth
        self.depth -= 1
        self.stash = None
        return y


def _other_attributes(block: nn.Module) -> None:
    block.power = 3.0


def _other_context(block: nn.Module) -> None:
    block.context["shift"] = torch.ones(D, dtype=torch.double)  # type: ignore[index]


def _other_list(block: nn.Module) -> None:
    block.factors[0] = 5.0  # type: ignore[index]


def _other_dropout(block: nn.Module) -> None:
    block.get_submodule("ff.2").p = 0.7


def _other_eps(block: nn.Module) -> None:
    block.get_submodule("norm").eps = 0.5


def _other_mode(block: nn.Module) -> None:
    block.eval()


def _other_parameter(block: nn.Module) -> None:
    block.scale = nn.Parameter(torch.ones(D, dtype=torch.double))


def _other_module(block: nn.Module) -> None:
    block.act = nn.Tanh()


def _frozen(block: nn.Module) -> None:
    block.requires_grad_(False)


def _frozen_in_part(block: nn.Module) -> None:
    block.get_parameter("ff.0.weight").requires_grad_(False)


def _hook(block: nn.Module) -> None:
    block.get_submodule("norm").register_forward_hook(lambda module, args, output: output * 2)


CHANGES = [
    *(_other_attributes, _other_context, _other_list, _other_dropout, _other_eps, _other_mode),
    *(_other_parameter, _other_module, _frozen, _frozen_in_part, _hook),
]


@pytest.mark.parametrize("change", CHANGES)
def test_block_runs_again_in_the_state_that_it_had_in_forward(
    change: Callable[[nn.Module], None],
) -> None:
    """What changes after forward stays changed, and what the block resets is reset."""
    model, twin = pair(Net(Scheduled))
    x, found = inputs(), []
    for each in (model, twin):
        block = each.get_submodule("blocks.1")
        parameters = [*each.parameters()]
        loss = seeded(lambda each=each: each(x)).square().sum()
        change(block)
        parameters = [p for p in parameters if p.requires_grad]
        before = [{**vars(module)} for module in block.modules()]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        found.append([*first, *torch.autograd.grad(loss, parameters)])
        for module, attributes in zip(block.modules(), before, strict=True):
            assert vars(module) == attributes
        assert all(p.requires_grad for p in parameters)
        if change is _frozen:
            assert not any(p.requires_grad for p in block.parameters())
    assert_equal(found[1], found[0])


def test_flags_of_products_in_forward_hold_when_a_block_runs_again() -> None:
    class Flagged(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(x, shift)

    seen: list[bool] = []
    _, twin = pair(Net(Flagged))
    seen.clear()
    torch.use_deterministic_algorithms(True)
    try:
        loss = twin(inputs()).sum()
    finally:
        torch.use_deterministic_algorithms(False)
    loss.backward()
    assert len(seen) == 2 * len(twin.blocks)
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()


def test_backward_after_one_that_raised_compares_weights_again() -> None:
    """The first one has left tensors in slots, which belong to the old weights."""
    _, twin = pair()
    output = twin(inputs())
    weight = twin.get_parameter("blocks.1.ff.0.weight")

    def interrupt(gradient: Tensor) -> Tensor:
        raise KeyboardInterrupt

    hook = weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward(retain_graph=True)
    hook.remove()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output.sum(), twin.get_parameter("blocks.1.norm.weight"))


class Catching(Block):
    """A block that catches the exception with which its second run ends, and goes on."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = x
        for factor in (x, x.detach()):
            try:
                y = super().forward(y, shift) * factor
            except BaseException:
                y = y * 2
        return y


def test_block_that_catches_the_end_of_its_second_run_matches_pytorch() -> None:
    model, twin = pair(Net(Catching))
    assert_same_steps(model, twin)


def test_tensors_that_no_node_has_asked_for_are_freed_after_backward() -> None:
    _, twin = pair()
    output = twin(inputs())
    handles = [each for node in nodes_of(output) for each in nodes.saved_handles(node)]
    calls = {call for handle in handles if (call := kept_by_checkpoint(handle)) is not None}
    assert len(calls) == len(twin.blocks)
    last = [*twin.blocks[2].parameters()][-1]
    for inputs_of_loss in ([last], [*twin.parameters()]):
        torch.autograd.grad(output.sum(), inputs_of_loss, retain_graph=True)
        slots = [slot for call in calls for each in call._slots if (slot := each()) is not None]
        assert slots
        assert all(slot.value is None for slot in slots)


def test_swapped_flags_match_pytorch() -> None:
    """As many tensors of the same shapes are saved in another order."""
    model, twin = pair()
    x, found = inputs(), []
    for each in (model, twin):
        first, second = (each.get_parameter(f"blocks.1.{n}.weight") for n in ("norm", "middle"))
        first.requires_grad_(False)
        loss = seeded(lambda each=each: each(x)).square().sum()
        first.requires_grad_(True)
        second.requires_grad_(False)
        first.requires_grad_(False)
        second.requires_grad_(True)
        found.append(torch.autograd.grad(loss, [second, each.get_parameter("first.weight")]))
    assert_equal([*found[1]], [*found[0]])


@pytest.mark.parametrize("view", [False, True])
def test_fused_step_of_a_parameter_among_the_arguments_raises(view: bool) -> None:
    _, twin = pair()
    shift = nn.Parameter(torch.randn(2 * D, dtype=torch.double)[:D])
    optimizer = torch.optim.SGD([shift], 0.1, fused=True)
    shift.grad = torch.ones_like(shift)
    loss = twin(inputs(), shift=shift[:] if view else shift).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_same_tensor_as_two_arguments_stays_the_same_tensor() -> None:
    class Asking(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x) if x is shift else super().forward(x).sin()

    class Doubled(Net):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x, shift=x)
            out: Tensor = self.last(x)
            return out

    assert_same_steps(*pair(Doubled(Asking)))


def test_block_under_a_function_mode_matches_pytorch() -> None:
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is F.gelu else result

    model, twin = pair()
    x, found = inputs(), []
    for each in (model, twin):
        with Doubling():
            loss = seeded(lambda each=each: each(x)).square().sum()
        found.append(torch.autograd.grad(loss, [*each.parameters()]))
    assert_equal([*found[1]], [*found[0]])


def test_gradient_inside_the_forward_of_a_block_matches_pytorch() -> None:
    class Differentiating(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return y + gradient.detach()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model = Net(Differentiating).double()
        twin = copy.deepcopy(model)
        attach(twin, Conversion(Settings(64), Report(), checkpoints=checkpoints_of(twin)))
        assert_same_steps(model, twin)


def test_blocks_that_catch_exceptions_match_pytorch() -> None:
    class Catching(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x

    assert_same_steps(*pair(Net(Catching)))


def test_function_that_reads_its_saved_tensors_twice_runs_the_block_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its weights may have been written to between the two reads, by an optimizer in backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(x, scale)
            return x * scale

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, scale = ctx.saved_tensors
            again, _ = ctx.saved_tensors
            assert torch.equal(x, again)
            return grad * scale, (grad * again).sum((0, 1))

    class Custom(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            out: Tensor = Product.apply(super().forward(x).sin(), self.scale)
            return out

    model, twin = pair(Net(Custom))
    runs, run_again = [], _Call._run_again

    def counted(*args: Any) -> None:
        runs.append(args)
        run_again(*args)

    monkeypatch.setattr(_Call, "_run_again", counted)
    x = inputs()
    assert_equal(gradients(twin, x), gradients(model, x))
    assert len(runs) == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_inside_a_block_match_pytorch() -> None:
    class Nesting(Block):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            nested = torch.nested.as_nested_tensor([*x], layout=torch.strided)
            return super().forward(torch.nested.to_padded_tensor(nested * 2, 0.0))

    assert_same_steps(*pair(Net(Nesting)))


def test_torch_func_matches_pytorch() -> None:
    model, twin = pair(Net(lambda: Block(0.0)))
    x, found = inputs(), []
    for each in (model, twin):
        parameters = dict(each.named_parameters())

        def loss(values: dict[str, Tensor], each: nn.Module = each) -> Tensor:
            out: Tensor = torch.func.functional_call(each, values, (x,))
            return out.square().sum()

        found.append([*torch.func.grad(loss)(parameters).values()])
    assert_equal(found[1], found[0])


# What surrounds a checkpoint.


class Checkpointed(Block):
    """A block that has checkpoints of PyTorch inside."""

    reentrant = False

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return y * y.sigmoid()


class Reentrant(Checkpointed):
    reentrant = True


def _losses(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    seeded(lambda: model(x)).square().sum().backward()
    return [t.grad for t in (x, *model.parameters()) if t.grad is not None]


@pytest.mark.parametrize("block", [Checkpointed, Reentrant])
def test_checkpoints_inside_match_pytorch(block: type[Block]) -> None:
    model = Net(block).double()
    twin = copy.deepcopy(model)
    attach(twin, Conversion(Settings(64), Report(), checkpoints_of(twin)))
    for _ in range(2):
        x = inputs()
        assert_equal(_losses(twin, x), _losses(model, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_match_pytorch(reentrant: bool) -> None:
    model, twin = pair()
    for _ in range(2):
        data, found = inputs(), []
        for each in (model, twin):
            x = data.clone().requires_grad_()
            each.zero_grad()
            out = seeded(lambda e=each, x=x: checkpoint(e, x, use_reentrant=reentrant))
            out.square().sum().backward()
            found.append([t.grad for t in (x, *each.parameters())])
        assert_equal(found[1], found[0])


class Shared(Net):
    """A net that calls its first block once more."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(self.blocks[0](x.sin()))
        return out


class Nested(nn.Module):
    """A block that takes and returns nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, (y,) = state["x"], state["rest"]
        return {"x": self.inner(x) * y.sigmoid(), "rest": (self.inner(y),)}


class OfContainers(Net):
    """A net whose blocks take and return nested containers."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        state: Any = {"x": self.first(x), "rest": (x.sin(),)}
        for block in self.blocks:
            state = block(state)
        out: Tensor = self.last(state["x"] + state["rest"][0])
        return out


@pytest.mark.parametrize("model", [Shared, partial(OfContainers, Nested)])
def test_calls_of_blocks_match_pytorch(model: Callable[[], nn.Module]) -> None:
    assert_same_steps(*pair(model()))


def test_two_forwards_before_two_backwards_match_pytorch() -> None:
    model, twin = pair()
    x, found = inputs(), []
    for each in (model, twin):
        losses = [seeded(lambda e=each, i=i: e(x * i), i).square().sum() for i in (1, 2)]
        each.zero_grad()
        for loss in losses:
            loss.backward()
        found.append([p.grad for p in each.parameters()])
    assert_equal(found[1], found[0])


def test_backward_in_another_thread_matches_pytorch() -> None:
    model, twin = pair()
    x = inputs()
    for each in (model, twin):
        loss = seeded(lambda each=each: each(x)).square().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_equal([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


def test_backward_inside_another_forward_matches_pytorch() -> None:
    """An engine then runs already, and none runs in the block."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out = seeded(lambda: self.inner(x)).square().sum()
            (gradient,) = torch.autograd.grad(out, x, create_graph=False)
            return gradient

    model, twin = pair()
    outer = Outer(twin)
    attach(outer, Conversion(Settings(64), Report(), {}))
    for path, each in checkpoints_of(twin).items():
        vars(twin.get_submodule(path))["_inplace_ops"] = each
    x = inputs().requires_grad_()
    torch.testing.assert_close(outer(x), Outer(model)(x), rtol=1e-10, atol=1e-12)


def test_no_grad_and_inference_mode_match_pytorch() -> None:
    model, twin = pair()
    x = inputs()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected, actual = (seeded(lambda each=each: each(x)) for each in (model, twin))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_checkpointed_and_run_their_own_parameters(
    copies: Callable[[nn.Module], nn.Module],
) -> None:
    model, twin = pair()
    copied = copies(twin)
    with torch.no_grad():
        for each in (model, copied):
            for parameter in each.parameters():
                parameter.mul_(1.5)
    assert inplace_ops.saved_bytes(copied, inputs()) == inplace_ops.saved_bytes(twin, inputs())
    assert_same_steps(model, copied)


def test_revert_and_reverted_undo_checkpoints() -> None:
    model, twin = pair()
    x = inputs()
    checkpointed = inplace_ops.saved_bytes(twin, x)
    with inplace_ops.reverted(twin):
        assert inplace_ops.saved_bytes(twin, x) == inplace_ops.saved_bytes(model, x)
        assert [*map(type, twin.modules())] == [*map(type, model.modules())]
    assert inplace_ops.saved_bytes(twin, x) == checkpointed
    inplace_ops.revert(twin)
    assert [*map(type, twin.modules())] == [*map(type, model.modules())]
    assert (
        vars(twin.get_submodule("blocks.0")).keys() == vars(model.get_submodule("blocks.0")).keys()
    )
    assert inplace_ops.saved_bytes(twin, x) == inplace_ops.saved_bytes(model, x)


# Memory.


def test_saved_bytes_are_the_arguments_and_random_states() -> None:
    _, twin = pair(max_ops=1)
    x = inputs()
    last = twin.get_submodule("last")
    saved = inplace_ops.saved_bytes(twin, x)
    blocks = 3 * (x.nbytes + torch.get_rng_state().nbytes)  # arguments and random states
    assert saved == blocks + last.in_features * x.nbytes // D


def test_graph_frees_its_memory() -> None:
    """What a call keeps dies with the graph, also if the block has run again."""

    def calls() -> list[Any]:
        return [each for each in gc.get_objects() if type(each) is _Call]

    _, twin = pair()
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            first = twin.get_submodule("first")(inputs())
            x = weakref.ref(first)
            out = twin.get_submodule("blocks.0")(first).sum()
            del first
            assert x() is None  # the argument is detached
            if backward:
                out.backward(retain_graph=True)
            assert calls()
            del out
            assert not calls()
    finally:
        gc.enable()


def test_peak_is_not_above_that_of_products_as_that_of_pytorchs_checkpoints() -> None:
    """PyTorch's checkpoint keeps all that a block saves when it runs again."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(
                nn.Sequential(nn.Linear(D, 32 * D), nn.GELU(), nn.Linear(32 * D, D))
                for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([branch(x) for branch in self.branches]).sum(0)

    class OfPyTorch(Wide):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return out

    x, peaks = torch.randn(64, 64, D), {}
    for name, block in (("own", Wide), ("products", Wide), ("pytorch", OfPyTorch)):
        model = Net(block, 4)
        if name != "pytorch":
            checkpoints = checkpoints_of(model) if name == "own" else {}
            attach(model, Conversion(Settings(64), Report(), checkpoints))
        for _ in range(2):
            with largest_allocation() as peak:
                model(x).sum().backward()
        (peaks[name],) = peak
    assert peaks["own"] < 1.05 * peaks["products"], peaks
    assert peaks["own"] < 0.5 * peaks["pytorch"], peaks


def test_last_product_of_a_block_does_not_run_again() -> None:
    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x)
            return out

    model = Net(Linears).double()
    attach(model, Conversion(Settings(1), Report(), checkpoints_of(model, 1)))
    loss = model(inputs()).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    forward = 2 * 10 * D * D
    of_backward = 2 * forward * 6 + 2 * 2 * 10 * D * 2 + forward  # no gradient of the input
    assert counter.get_total_flops() == of_backward + 3 * forward


# Which blocks there are.


def test_blocks_are_the_innermost_containers_of_three_modules_of_a_class() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)),
        nn.Sequential(*[nn.Sequential(Block(), Block(), Block()) for _ in range(3)]),
        nn.ModuleList([Block(), Block()]),
        nn.ModuleList([nn.Linear(1, 1), Block(), Attention(), Block(), Block()]),
    )
    expected = [f"1.{i}.{j}" for i in range(3) for j in range(3)] + ["3.1", "3.3", "3.4"]
    assert paths_of_blocks(model) == expected
