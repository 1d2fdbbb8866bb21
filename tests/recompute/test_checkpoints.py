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
from _support.twins import Parts, no_warnings, nodes_of
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

pytestmark = [pytest.mark.usefixtures("_small_tensors_too")]

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


class Odd(Block):
    """A block that runs `run(block, plain, x, shift)`, where `plain` is the forward of `Block`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run, self.relu = run, nn.ReLU()

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.run(self, super().forward, x, shift)


class Net(nn.Module):
    """A linear layer, blocks, and a linear layer.

    `shift(i, x)` is the second argument of block i; without it, that of the model.
    """

    def __init__(
        self,
        block: Callable[[], nn.Module] = Block,
        count: int = 3,
        shift: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        self.blocks, self.shift = nn.ModuleList([block() for _ in range(count)]), shift

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            given = kwargs if self.shift is None else {"shift": self.shift(i, x)}
            x = block(x, **given)
        out: Tensor = self.last(x)
        return out


def inputs() -> Tensor:
    return torch.randn(2, 5, D, dtype=torch.double)


def checkpoints_of(model: nn.Module, max_ops: int = 64) -> dict[str, Checkpoint]:
    return {
        path: Checkpoint(Settings(max_ops), modes_of(model.get_submodule(path)))
        for path in paths_of_blocks(model)
    }


def pair(
    model: nn.Module | None = None, max_ops: int = 64, less: float = 0.5
) -> tuple[nn.Module, nn.Module]:
    """Return a model in float64, and its copy whose blocks are all checkpointed.

    The copy saves less than the given share of the bytes.
    """
    model = (Net() if model is None else model).double()
    twin = copy.deepcopy(model)
    attach(twin, Conversion(Settings(max_ops), Report(), checkpoints_of(twin, max_ops)))
    saved = [inplace_ops.saved_bytes(m, inputs()) for m in (model, twin)]
    assert saved[1] < less * saved[0]
    return model, twin


def seeded(call: Callable[[], Any], seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return call()


def gradients(model: nn.Module, x: Tensor, **kwargs: Any) -> list[Tensor]:
    """Return the gradients of x and of all parameters, from `backward`: checkpoints need it."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    seeded(lambda: model(x, **kwargs)).square().sum().backward()
    return [t.grad for t in (x, *model.parameters()) if t.grad is not None]


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
    torch.manual_seed(3)
    out = twin(inputs())
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def _loss(model: nn.Module, x: Tensor, seed: int = 0, **kwargs: Any) -> Tensor:
    return seeded(lambda: model(x, **kwargs), seed).square().sum()


def _of_a_keyword(model: nn.Module, x: Tensor) -> Any:
    shift = torch.linspace(0, 1, D, dtype=torch.double, requires_grad=True)
    return torch.autograd.grad(_loss(model, x, shift=shift), [shift, *model.parameters()])


def _twice(model: nn.Module, x: Tensor) -> Any:
    loss, parameters = _loss(model, x), [*model.parameters()]
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    return [*first, *torch.autograd.grad(loss, parameters)]


def _of_two_forwards(model: nn.Module, x: Tensor) -> Any:
    losses = [_loss(model, x * seed, seed) for seed in (1, 2)]
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [p.grad for p in model.parameters()]


def _in_another_thread(model: nn.Module, x: Tensor) -> Any:
    model.zero_grad()
    thread = threading.Thread(target=_loss(model, x).backward)
    thread.start()
    thread.join()
    return [p.grad for p in model.parameters()]


def _of_one_block(model: nn.Module, x: Tensor) -> Any:
    block = model.requires_grad_(False).get_submodule("blocks.1").requires_grad_(True)
    return torch.autograd.grad(_loss(model, x), [*block.parameters()])


def _of_parts(model: nn.Module, x: Tensor) -> Any:
    """Each backward asks for the gradient of one parameter alone, and needs some slots alone."""
    names = ("blocks.1.scale", "blocks.0.ff.0.weight", "blocks.2.norm.bias", "first.weight")
    return [torch.autograd.grad(_loss(model, x), model.get_parameter(n))[0] for n in names]


def _evaluated(model: nn.Module, x: Tensor) -> Any:
    loss = _loss(model, x)
    model.eval()
    found = torch.autograd.grad(loss, [*model.parameters()])
    assert not any(module.training for module in model.modules())
    model.train()
    return found


def _with_swapped_flags(model: nn.Module, x: Tensor) -> Any:
    """As many tensors of the same shapes are saved in another order."""
    first, second = (model.get_parameter(f"blocks.1.{n}.weight") for n in ("norm", "middle"))
    first.requires_grad_(False)
    loss = _loss(model, x)
    for parameter, is_trained in ((first, True), (second, False), (first, False), (second, True)):
        parameter.requires_grad_(is_trained)
    return torch.autograd.grad(loss, [second, model.get_parameter("first.weight")])


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.gelu else result


def _under_a_mode(model: nn.Module, x: Tensor) -> Any:
    with Doubling():
        loss = _loss(model, x)
    return torch.autograd.grad(loss, [*model.parameters()])


def _of_others(model: nn.Module, x: Tensor, kind: Any = Tensor.requires_grad_) -> Any:
    """Call the model with other parameters."""
    other = {n: kind((p * 1.5).detach()) for n, p in model.named_parameters()}
    given = {**other, **{n: b * 2 for n, b in model.named_buffers()}}
    out = seeded(lambda: torch.func.functional_call(model, given, (x,)))
    return torch.autograd.grad(out.square().sum(), [*other.values()])


def _without_grad(model: nn.Module, x: Tensor) -> Any:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            yield seeded(lambda: model(x)).clone()


def _by_a_transform(model: nn.Module, x: Tensor) -> Any:
    def loss(values: dict[str, Tensor]) -> Tensor:
        return seeded(lambda: torch.func.functional_call(model, values, (x,))).square().sum()

    return torch.func.grad(loss)(dict(model.named_parameters())).values()


STEPS: list[Callable[[nn.Module, Tensor], Any]] = [
    *(_of_a_keyword, _twice, _of_two_forwards, _in_another_thread, _of_one_block, _of_parts),
    *(_evaluated, _with_swapped_flags, _under_a_mode, _of_others, _by_a_transform, _without_grad),
    partial(_of_others, kind=nn.Parameter),
]


@pytest.mark.parametrize("step", STEPS)
def test_steps_match_pytorch(step: Callable[[nn.Module, Tensor], Any]) -> None:
    model, twin = pair()
    x = inputs()
    assert_equal([*step(twin, x)], [*step(model, x)])


def test_autocast_of_forward_is_on_when_a_block_runs_again() -> None:
    model, twin = pair()
    model.float(), twin.float()
    for _ in range(2):
        x, found = inputs().float(), []
        for each in (model, twin):
            with torch.autocast("cpu", torch.bfloat16):
                loss = _loss(each, x)
            found.append(torch.autograd.grad(loss, [*each.parameters()]))
        torch.testing.assert_close([*found[1]], [*found[0]], rtol=0.02, atol=0.02)


def test_flags_of_products_in_forward_hold_when_a_block_runs_again() -> None:
    def flagged(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return plain(x)

    seen: list[bool] = []
    _, twin = pair(Net(lambda: Odd(flagged)))
    seen.clear()
    torch.use_deterministic_algorithms(True)
    try:
        loss = twin(inputs()).sum()
    finally:
        torch.use_deterministic_algorithms(False)
    loss.backward()
    assert seen == [True] * 2 * len(twin.blocks)
    assert not torch.are_deterministic_algorithms_enabled()


def test_second_derivatives_match_pytorch() -> None:
    model, twin = pair(Net(lambda: Block(0.0)))
    data, found = inputs(), []
    for each in (model, twin):
        x = data.clone().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (first,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), [x, *each.parameters()]))
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


# Blocks that do what others do not.


def _apart(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    """Tell the arguments apart: one that the block gets twice is the same tensor again."""
    return plain(x * 2 if shift is x else x.sin())


def _masked(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    """If the mask had a gradient, the product would save its other factor too."""
    return plain(x.sin() * (1 if shift is None else shift))


def _catching_the_end(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    """Catch the exception with which the second run ends, and go on."""
    y = x
    for factor in (x, x.detach()):
        try:
            y = plain(y, shift) * factor
        except BaseException:
            y = y * 2
    return y


def _catching(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    try:
        return plain(x)
    except Exception:
        return x


def _differentiating(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        y = plain(x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + gradient.detach()


def _nesting(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    nested = torch.nested.as_nested_tensor([*x], layout=torch.strided)
    return plain(torch.nested.to_padded_tensor(nested * 2, 0.0))


def _checkpointed(block: Any, plain: Any, x: Tensor, shift: Any, reentrant: bool = False) -> Tensor:
    y: Tensor = checkpoint(plain, x, use_reentrant=reentrant)
    return y * y.sigmoid()


def _inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.randn(D, dtype=torch.double)


def _nested(m: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Take and return nested containers."""
    x, (y,) = state["x"], state["rest"]
    return {"x": m.inner(x) * y.sigmoid(), "rest": (m.inner(y),)}


def _of_containers(m: Any, x: Tensor) -> Tensor:
    state = {"x": m.net.first(x), "rest": (x.sin(),)}
    for block in m.net.blocks:
        state = block(state)
    return m.net.last(state["x"] + state["rest"][0])


MASK, UNVERSIONED = torch.randn(D, dtype=torch.double), _inference_tensor()
# By name: a net, and less than which share of the bytes it saves with checkpoints.
NETS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "the same argument twice": (lambda: Net(lambda: Odd(_apart), shift=lambda i, x: x), 0.5),
    "an argument and its alias": (
        lambda: Net(lambda: Odd(_apart), shift=lambda i, x: x if i % 2 else x.detach()),
        0.5,
    ),
    "an argument without a gradient": (
        lambda: Net(lambda: Odd(_masked), shift=lambda i, x: MASK),
        0.5,
    ),
    # It has no version that could be compared, so the block is not checkpointed.
    "an inference tensor": (lambda: Net(shift=lambda i, x: UNVERSIONED), 1.0),
    "catching the end": (lambda: Net(lambda: Odd(_catching_the_end)), 0.5),
    "catching exceptions": (lambda: Net(lambda: Odd(_catching)), 0.5),
    "differentiating": (lambda: Net(lambda: Odd(_differentiating)), torch.inf),
    "nested tensors": (lambda: Net(lambda: Odd(_nesting)), 0.5),
    "checkpoint inside": (lambda: Net(lambda: Odd(_checkpointed)), torch.inf),
    "reentrant checkpoint inside": (
        lambda: Net(lambda: Odd(partial(_checkpointed, reentrant=True))),
        torch.inf,
    ),
    "a block that is called twice": (
        lambda: Parts(lambda m, x: m.net(m.net.blocks[0](x.sin())), net=Net()),
        0.5,
    ),
    "containers": (
        lambda: Parts(_of_containers, net=Net(lambda: Parts(_nested, inner=Block()))),
        0.5,
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NETS)
def test_blocks_match_pytorch(name: str) -> None:
    make, less = NETS[name]
    assert_same_steps(*pair(make(), less=less))


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (lambda plain, x: plain(x).sin(), r"saved a torch\.float64 tensor"),
        (lambda plain, x: x, "saved fewer tensors when it ran again"),
    ],
    ids=["other", "fewer"],
)
def test_block_that_runs_differently_raises(second: Callable[..., Tensor], error: str) -> None:
    def run(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
        return second(plain, x) if is_backward else plain(x.sin())

    is_backward: list[bool] = []
    _, twin = pair(Net(lambda: Odd(run)))
    loss = twin(inputs()).sum()
    is_backward.append(True)
    with pytest.raises(RecomputationError, match=error):
        loss.backward()


# Writes between forward and backward.


def _fused_step(*parameters: Tensor) -> None:
    optimizer = torch.optim.SGD(parameters, 0.1, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


WEIGHT = "blocks.1.ff.0.weight"
# By name: what changes, of the twin and its second argument, a parameter.
WRITES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "a fused step": lambda twin, shift: _fused_step(*twin.parameters()),
    "a weight": lambda twin, shift: nn.init.ones_(twin.get_parameter(WEIGHT)),
    "a buffer": lambda twin, shift: twin.get_buffer("blocks.1.offset").mul_(2),
    "other data": lambda twin, shift: setattr(
        twin.get_parameter(WEIGHT), "data", twin.get_parameter(WEIGHT).detach() * 2
    ),
    "freed": lambda twin, shift: twin.get_parameter(WEIGHT).untyped_storage().resize_(0),
    "an argument": lambda twin, shift: nn.init.ones_(shift),
    "a fused step of an argument": lambda twin, shift: _fused_step(shift),
}


@pytest.mark.parametrize(
    ("write", "is_view"),
    [(write, False) for write in WRITES] + [(write, True) for write in [*WRITES][-2:]],
)
def test_write_between_forward_and_backward_raises(write: str, is_view: bool) -> None:
    """Of parameters, buffers and arguments, of which one may be a view of a parameter."""
    _, twin = pair()
    shift = nn.Parameter(torch.randn(2 * D, dtype=torch.double)[:D])
    loss = twin(inputs(), shift=shift[:] if is_view else shift).sum()
    WRITES[write](twin, shift)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|was freed"):
        loss.backward()


def _overwritten_relu(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    """The engine has not reduced ReLU's output to bits either, when the block ran again."""
    y = block.relu(block.attention.out(x))
    y += 1
    return block.attention.out(y).sin()


def _overwritten_sigmoid(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
    y = plain(x).sigmoid()
    y += 1
    return y * x.tanh()


@pytest.mark.parametrize("written", [_overwritten_sigmoid, _overwritten_relu])
def test_write_to_a_saved_tensor_raises_as_in_pytorch(written: Callable[..., Tensor]) -> None:
    for each in pair(Net(lambda: Odd(written)), less=torch.inf):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each(inputs()).sum().backward()


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


# By name: what changes of the second block, after forward.
CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda block: setattr(block, "power", 3.0),
    "dict": lambda block: block.context.update(shift=torch.ones(D, dtype=torch.double)),
    "list": lambda block: block.factors.insert(0, 5.0),
    "dropout": lambda block: setattr(block.ff[2], "p", 0.7),
    "eps": lambda block: setattr(block.norm, "eps", 0.5),
    "mode": lambda block: block.eval(),
    "parameter": lambda block: setattr(
        block, "scale", nn.Parameter(torch.ones(D, dtype=torch.double))
    ),
    "module": lambda block: setattr(block, "act", nn.Tanh()),
    "frozen": lambda block: block.requires_grad_(False),
    "frozen in part": lambda block: block.ff[0].weight.requires_grad_(False),
    "hook": lambda block: block.norm.register_forward_hook(lambda m, args, output: output * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_block_runs_again_in_the_state_that_it_had_in_forward(change: str) -> None:
    """What changes after forward stays changed, and what the block resets is reset."""
    model, twin = pair(Net(Scheduled))
    x, found = inputs(), []
    for each in (model, twin):
        block = each.get_submodule("blocks.1")
        parameters = [*each.parameters()]
        loss = _loss(each, x)
        CHANGES[change](block)
        parameters = [p for p in parameters if p.requires_grad]
        before = [{**vars(module)} for module in block.modules()]
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        found.append([*first, *torch.autograd.grad(loss, parameters)])
        for module, attributes in zip(block.modules(), before, strict=True):
            assert vars(module) == attributes
        assert all(p.requires_grad for p in parameters)
        assert change != "frozen" or not any(p.requires_grad for p in block.parameters())
    assert_equal(found[1], found[0])


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

    def custom(block: Any, plain: Any, x: Tensor, shift: Any) -> Tensor:
        return Product.apply(plain(x).sin(), block.scale)

    model, twin = pair(Net(lambda: Odd(custom)))
    runs, run_again = [], _Call._run_again

    def counted(*args: Any) -> None:
        runs.append(args)
        run_again(*args)

    monkeypatch.setattr(_Call, "_run_again", counted)
    x = inputs()
    assert_equal(gradients(twin, x), gradients(model, x))
    assert len(runs) == 3


# What surrounds a checkpoint.


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


def test_backward_inside_another_forward_matches_pytorch() -> None:
    """An engine then runs already, and none runs in the block."""

    def outer_of(inner: nn.Module) -> nn.Module:
        return Parts(lambda m, x: torch.autograd.grad(_loss(m.inner, x), x)[0], inner=inner)

    model, twin = pair()
    outer = outer_of(twin)
    attach(outer, Conversion(Settings(64), Report(), {}))
    for path, each in checkpoints_of(twin).items():
        vars(twin.get_submodule(path))["_inplace_ops"] = each
    x = inputs().requires_grad_()
    torch.testing.assert_close(outer(x), outer_of(model)(x), rtol=1e-10, atol=1e-12)


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

    def wide() -> nn.Module:
        branches = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 32 * D), nn.GELU(), nn.Linear(32 * D, D)) for _ in range(4)
        )
        return Parts(lambda m, x: torch.stack([b(x) for b in m.branches]).sum(0), branches=branches)

    def of_pytorch() -> nn.Module:
        return Parts(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=wide())

    x, peaks = torch.randn(64, 64, D), {}
    for name in ("own", "products", "pytorch"):
        model = Net(of_pytorch if name == "pytorch" else wide, 4)
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
    def linears() -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D, bias=False))

    model = Net(linears).double()
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
