"""A plan repeats what the rules have decided, unless something differs."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from _support.plans import only_rules
from _support.twins import (
    HAS_HOOK,
    C,
    Step,
    assert_same_step,
    converted_twin,
    images,
    nodes_of,
    recomputed,
    step_of,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import inplace_ops
from inplace_ops.recompute import decisions, nodes
from inplace_ops.recompute.run import running_engine

pytestmark = [
    pytest.mark.usefixtures("_small_tensors_too", "_affines_of_any_size"),
    pytest.mark.skipif(not HAS_HOOK, reason="needs torch 2.14"),
]


class Blocks(nn.Module):
    """Blocks of equal layers. Before and after each layer of the third, `change` may act."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.change: Callable[[str, Tensor], Tensor | None] | None = None
        self.order = list(range(len(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            for name, layer in self.blocks[i].named_children():
                x = layer(x)
                if i == 2 and self.change is not None:
                    changed = self.change(name, x)
                    x = x if changed is None else changed
        return x


def convolutions(activation: Callable[[], nn.Module] = lambda: nn.SiLU(inplace=True)) -> Blocks:
    first = nn.Sequential(nn.Conv2d(3, C, 1), nn.BatchNorm2d(C), activation())
    others = (
        nn.Sequential(nn.Conv2d(C, C, 1, bias=False), nn.BatchNorm2d(C), activation())
        for _ in range(4)
    )
    return Blocks(first, *others)


def linear_layers() -> Blocks:
    return Blocks(
        *(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
            for _ in "abcd"
        )
    )


class Residual(nn.Module):
    """Two linear layers with GELU after a layer norm, and a shortcut, whose sum has a spec."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU()
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def residual_layers() -> Blocks:
    return Blocks(
        nn.Sequential(nn.Linear(8, 8)),
        *(nn.Sequential(Residual(), nn.LayerNorm(8), nn.GELU()) for _ in range(3)),
    )


MODELS = {
    "SiLU in place": convolutions,
    "ReLU": lambda: convolutions(nn.ReLU),
    "GELU": linear_layers,
    "residual": residual_layers,
}
each_model = pytest.mark.parametrize("model", MODELS)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the decisions that are repeated, and those that are not because something differs."""
    counts: Counter[str] = Counter()

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = original(*args)
            counts["repeated" if result else "differs"] += 1
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions.NodeDecision, "repeat", counting(decisions.NodeDecision.repeat))
        patch.setattr(decisions.MergeDecision, "match", counting(decisions.MergeDecision.match))
        yield counts


def trained(name: str, steps: int = 4) -> tuple[Blocks, Any, Tensor]:
    """Return a model and its converted twin after a few steps, and an input."""
    model: Blocks = MODELS[name]()
    twin, x = converted_twin(model), images()
    for _ in range(steps):
        assert_same_step(step_of(twin, x), step_of(model, x))
    return model, twin, x


def assert_same_outcome(model: Blocks, twin: Any, x: Tensor) -> None:
    """Assert that a step is PyTorch's, and saves what the rules save."""
    twin.load_state_dict(model.state_dict())  # earlier forwards have changed the buffers
    expected, actual = outcome_of(model, x), outcome_of(twin, x)
    if isinstance(expected, str):
        # Where a write came after the tensor was saved, the converted model may not raise.
        assert "inplace operation" in expected
    else:
        assert not isinstance(actual, str), actual
        assert_same_step(actual, expected)
    kinds = []
    for rules in (contextlib.nullcontext(), only_rules()):
        with rules:
            kinds.append(saved_by(twin(x)))
    assert kinds[0] == kinds[1]


def outcome_of(model: nn.Module, x: Tensor) -> Step | str:
    """Return a step, or the text of the error that it raises."""
    try:
        return step_of(model, x)
    except RuntimeError as error:
        return str(error)


def saved_by(output: Tensor) -> list[Any]:
    """Return what the specs of a graph save, and for which operations."""
    return sorted(
        (type(node).__name__, packed.name, packed.spec.cost, tuple(packed.shape))
        for node in nodes_of(output)
        for packed in nodes.packed_values(node)
    )


@each_model
@pytest.mark.plans_alone
def test_later_steps_are_repeated(model: str) -> None:
    _, twin, x = trained(model, 3)
    with counted() as counts:
        output = twin(x.requires_grad_())
    assert counts["differs"] == 0
    assert counts["repeated"] >= 3 * len(twin.blocks)
    assert len(recomputed(output)) >= len(twin.blocks) - 1


def write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1.0)


def other(tensor: Tensor) -> Tensor:
    return tensor * 2


CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "written to": write,
    "written to in view": lambda t: write(t[:1]),
    "visible write": lambda t: t.mul_(2) if t._version else None,
    "another operation": other,
    "a view": lambda t: t.flip(0),
    "a hook": lambda t: t.register_hook(lambda g: 2 * g) and None,
    "retained": lambda t: t.retain_grad(),
    "cast and back": lambda t: t.double().float(),
}


@pytest.mark.filterwarnings("ignore:inplace_ops:UserWarning")
@pytest.mark.parametrize("layer", ["0", "1", "2"])
@pytest.mark.parametrize("change", CHANGES)
@each_model
def test_change_after_a_layer_is_seen(model: str, change: str, layer: str) -> None:
    original, twin, x = trained(model)

    def act(name: str, tensor: Tensor) -> Tensor | None:
        return CHANGES[change](tensor) if name == layer else None

    for m in (original, twin):
        m.change = act
    for _ in range(2):
        assert_same_outcome(original, twin, x)
    for m in (original, twin):
        m.change = None
    assert_same_outcome(original, twin, x)


def set_order(m: Blocks, order: list[int]) -> None:
    m.order = order


def freeze(m: Blocks, name: str, value: bool) -> None:
    getattr(m.blocks[2][1], name).requires_grad_(value)


def set_norm(m: Blocks, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(m.blocks[2][1], name, value)


def hooked(m: Blocks) -> None:
    if getattr(m.blocks[2][2], "inplace", False):  # PyTorch does not allow it after such a hook
        m.blocks[2][2].inplace = False
    m.blocks[2][1].register_full_backward_hook(lambda module, before, after: (2 * before[0],))


def of_other_type(m: Blocks) -> None:
    m.blocks[2][2] = nn.Tanh()


MODEL_CHANGES: dict[str, Callable[[Blocks], object]] = {
    "skipped": lambda m: set_order(m, [0, 1, 3]),
    "repeated": lambda m: set_order(m, [0, 1, 1, 2, 3]),
    "swapped": lambda m: set_order(m, [0, 2, 1, 3]),
    "eval": lambda m: m.eval(),
    "eval of a norm": lambda m: m.blocks[2][1].eval(),
    "frozen weight": lambda m: freeze(m, "weight", False),
    "frozen bias": lambda m: freeze(m, "bias", False),
    "frozen product": lambda m: m.blocks[2][0].requires_grad_(False),
    "other eps": lambda m: set_norm(m, eps=0.1),
    "no bias": lambda m: set_norm(m, bias=None),
    "other activation": of_other_type,
    "backward hook": hooked,
    "data replaced": lambda m: setattr(
        m.blocks[2][1].weight, "data", m.blocks[2][1].weight.detach().flip(0)
    ),
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "float64": lambda m: m.double(),
}


@pytest.mark.filterwarnings("ignore:inplace_ops:UserWarning")
@pytest.mark.parametrize("change", MODEL_CHANGES)
@each_model
def test_change_of_the_model_is_seen(model: str, change: str) -> None:
    original, twin, x = trained(model)
    for m in (original, twin):
        MODEL_CHANGES[change](m)
    if change == "float64":
        x = x.double()
    for _ in range(3):
        assert_same_outcome(original, twin, x)


@each_model
def test_thawed_again(model: str) -> None:
    original, twin, x = trained(model)
    for value in (False, True):
        for m in (original, twin):
            freeze(m, "bias", value)
            freeze(m, "weight", value)
        for _ in range(2):
            assert_same_outcome(original, twin, x)


@each_model
def test_other_inputs(model: str) -> None:
    original, twin, x = trained(model)
    wider = torch.randn(2, 3, 8, 8) if model in ("GELU", "residual") else torch.randn(3, 3, 6, 10)
    for each in (wider, x[:1], x.to(memory_format=torch.channels_last), x):
        for _ in range(2):
            assert_same_outcome(original, twin, each)


class Doubled(TorchFunctionMode):
    """Doubles what activations return."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (F.silu, F.relu, F.gelu) else result


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "function mode": Doubled,
    "dispatch mode": Seen,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "inference": torch.no_grad,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@each_model
def test_what_sees_the_operations(model: str, surroundings: str) -> None:
    original, twin, x = trained(model)
    tolerance = 2e-2 if surroundings == "autocast" else 1e-5
    for _ in range(2):
        steps = []
        twin.load_state_dict(original.state_dict())
        for m in (twin, original):
            with SURROUNDINGS[surroundings]():
                steps.append(step_of(m, x))
        assert_same_step(*steps, tolerance)
        assert_same_outcome(original, twin, x)


@each_model
def test_hooks_of_other_code_are_not_called_in_forward(model: str) -> None:
    """Inside a checkpoint an unpack hook would run the whole region again."""
    original, twin, x = trained(model)
    packed: list[Tensor] = []
    unpacked_in_forward: list[bool] = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked_in_forward.append(is_forward)
        return tensor

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    outputs = []
    for m in (twin, original):
        is_forward = True
        m.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = m(x)
        is_forward = False
        output.square().sum().backward()
        outputs.append({name: p.grad for name, p in m.named_parameters()})
    assert packed
    assert True not in unpacked_in_forward
    assert_same_step(*outputs)


@pytest.mark.parametrize("model", ["SiLU in place", "ReLU", "GELU"])
def test_hooks_on_the_input_of_a_norm_are_not_called_in_forward(model: str) -> None:
    """They are put there after the plan has seen the norm, before it sees the activation."""
    original, twin, x = trained(model)
    unpacked: list[Tensor] = []

    def unpack(saved: Tensor) -> Tensor:
        unpacked.append(saved)
        return saved.clone()

    def hook(module: nn.Module, args: Any, z: Tensor) -> None:
        handle: Any = z.grad_fn._raw_saved_input  # type: ignore[union-attr]
        if handle.unpack_hook is None:  # else the engine has been there
            handle.register_hooks(torch.clone, unpack)

    for each in (original, twin):
        for module in each.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
                module.register_forward_hook(hook)
    for _ in range(3):
        output = twin(x)
        assert unpacked == []
        output.sum().backward()
        assert unpacked
        unpacked.clear()
        original(x).sum().backward()
        unpacked.clear()
    assert_same_step(step_of(twin, x), step_of(original, x))


@pytest.mark.plans_alone
@pytest.mark.parametrize("field", ["input", "weight"])
@pytest.mark.parametrize("model", ["SiLU in place", "ReLU", "GELU"])
def test_hooks_on_one_tensor_of_a_norm_are_not_called_in_forward(model: str, field: str) -> None:
    """They are put there before the plan sees the norm, by another node creation hook."""
    original, twin, x = trained(model)
    unpacked: list[Tensor] = []

    def unpack(saved: Tensor) -> Tensor:
        unpacked.append(saved)
        return saved

    def created(node: Any) -> None:
        if "NormBackward" in type(node).__name__:
            getattr(node, f"_raw_saved_{field}").register_hooks(lambda saved: saved, unpack)

    for _ in range(2):
        with nodes.creation_hook(created):
            output = twin(x)
        assert unpacked == []
        output.sum().backward()
        assert unpacked
        unpacked.clear()
    assert_same_outcome(original, twin, x)


@each_model
def test_saved_bytes_in_between(model: str) -> None:
    original, twin, x = trained(model)
    first = inplace_ops.saved_bytes(twin, x)
    assert_same_outcome(original, twin, x)
    with only_rules():
        assert inplace_ops.saved_bytes(twin, x) == first


@each_model
@pytest.mark.plans_alone
def test_error_in_a_plan_leaves_tensors_saved(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, twin, x = trained(model)
    parts = [
        (decisions.NodeDecision, "match"),
        (decisions.Replaced, "act"),
        (decisions.FilledNorm, "fill"),
        (decisions.MergeDecision, "match"),
    ]
    for owner, name in parts:

        def failing(*args: Any) -> Any:
            raise LookupError("of the test")

        inplace_ops.revert(twin)
        inplace_ops.convert(twin, max_ops=20)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            with pytest.warns(UserWarning, match="LookupError"):
                steps = [(step_of(twin, x), step_of(original, x)) for _ in range(4)]
        for actual, expected in steps:
            assert_same_step(actual, expected)
        assert running_engine() is None
    assert_same_outcome(original, twin, x)


class Stop(Exception):
    """Ends a forward."""


@each_model
def test_exception_in_the_middle(model: str) -> None:
    original, twin, x = trained(model)

    def stop(name: str, tensor: Tensor) -> None:
        raise Stop

    twin.change = stop
    for _ in range(2):
        with pytest.raises(Stop):
            twin(x)
    twin.change = None
    assert_same_outcome(original, twin, x)


@each_model
def test_freed_parameters(model: str) -> None:
    """FSDP2 frees the memory of parameters when a forward has returned."""
    original, twin, x = trained(model)
    norms = [m for m in twin.modules() if isinstance(m, (nn.BatchNorm2d, nn.LayerNorm))]
    kept = [(p, p.detach().clone()) for norm in norms for p in norm.parameters()]

    def free(norm: nn.Module, args: Any, output: Any) -> None:
        norm.bias.untyped_storage().resize_(0)

    handles = [norm.register_forward_hook(free) for norm in norms]
    for _ in range(3):
        assert_same_step(
            {k: v for k, v in step_of(twin, x).items() if "bias" not in k or "buffer" in k},
            {k: v for k, v in step_of(original, x).items() if "bias" not in k or "buffer" in k},
        )
        for parameter, values in kept:
            parameter.untyped_storage().resize_(values.nbytes)
            with torch.no_grad():
                parameter.copy_(values)
    for handle in handles:
        handle.remove()
    assert_same_outcome(original, twin, x)


@each_model
def test_two_forwards_and_two_backwards(model: str) -> None:
    original, twin, x = trained(model)
    found = []
    for m in (twin, original):
        m.zero_grad()
        outputs = [m(x).square().mean(), m(x.flip(0)).square().mean()]
        (outputs[0] + outputs[1]).backward(retain_graph=True)
        outputs[0].backward()
        found.append({name: p.grad for name, p in m.named_parameters()})
    assert_same_step(*found)


@each_model
def test_second_derivatives(model: str) -> None:
    original, twin, x = trained(model)
    found = []
    for m in (twin, original):
        m.zero_grad()
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(m(leaf).square().sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        found.append({name: p.grad for name, p in m.named_parameters()})
    assert_same_step(*found, tolerance=1e-4)


@each_model
@pytest.mark.plans_alone
def test_threads_share_a_plan(model: str) -> None:
    """Each thread has its own gradients."""
    original, twin, x = trained(model)
    original.eval(), twin.eval()
    parameters = dict(twin.named_parameters())
    expected = [
        torch.autograd.grad(original(x + i).square().sum(), list(original.parameters()))
        for i in range(4)
    ]
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        for _ in range(5):
            found[i] = torch.autograd.grad(twin(x + i).square().sum(), list(parameters.values()))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gradients in enumerate(expected):
        pairs = [dict(enumerate(each)) for each in (found[i], gradients)]
        assert_same_step(*({str(k): v for k, v in each.items()} for each in pairs))


@pytest.mark.parametrize(
    "view",
    [
        (lambda t: t.transpose(2, 3), lambda t: t.transpose(2, 3).transpose(2, 3)),
        (lambda t: t[:, :4], lambda t: t[:, 2:6]),
        (lambda t: t.unbind(0)[0], lambda t: t.unbind(0)[1]),
        (lambda t: t.split(4, 1)[0], lambda t: t.split(4, 1)[1]),
    ],
    ids=["transposed", "slice", "unbind", "split"],
)
def test_other_view_of_the_same_shape(view: tuple[Any, Any]) -> None:
    """Offset and strides tell a view of the same shape from another."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
            self.act, self.linear = nn.SiLU(), nn.Linear(8, 8)
            self.view = view[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.view(self.act(self.norm(self.conv(x)))))

    model = Viewing()
    twin, x = converted_twin(model), images()
    for which in (0, 0, 0, 0, 1, 1, 1, 0, 1):
        for m in (model, twin):
            m.view = view[which]
        assert_same_step(step_of(twin, x), step_of(model, x))


class Alternating(nn.Module):
    """Two norms with other affines, in turn."""

    def __init__(self, *norms: nn.Module, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(3, 16, 1), nn.ModuleList(norms)
        self.act, self.last = activation or nn.Identity(), nn.Conv2d(16, 2, 1)
        self.which = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.norms[self.which](self.conv(x))))


ALTERNATING: dict[str, Callable[[], tuple[nn.Module, nn.Module, tuple[int, ...]]]] = {
    "rows and channels": lambda: (nn.LayerNorm(8), nn.LayerNorm((16, 1, 1)), (2, 3, 1, 1)),
    "rows and planes": lambda: (nn.LayerNorm(8), nn.LayerNorm((8, 8)), (2, 3, 8, 8)),
    "rows and all": lambda: (nn.LayerNorm(8), nn.LayerNorm((16, 8, 8)), (2, 3, 8, 8)),
    "other rows": lambda: (nn.LayerNorm(8), nn.LayerNorm(16), (2, 3, 8, 16)),
    "batch norms": lambda: (nn.BatchNorm2d(16), nn.BatchNorm2d(16), (3, 3, 4, 6)),
}


@pytest.mark.plans_alone
@pytest.mark.parametrize("activation", [nn.Identity, nn.GELU])
@pytest.mark.parametrize("norms", ALTERNATING)
def test_norms_of_other_shapes_in_turn(norms: str, activation: type[nn.Module]) -> None:
    """The shape of an affine follows from the norm at hand, not from the one before."""
    first, second, shape = ALTERNATING[norms]()
    for norm in (first, second):
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
    model = Alternating(first, second, activation=activation())
    twin, inputs = converted_twin(model), (images(), torch.randn(shape))
    for which in (0, 0, 0, 1, 0, 1, 1, 0, 1, 0):
        twin.load_state_dict(model.state_dict())
        for m in (model, twin):
            m.which = which
        assert_same_step(step_of(twin, inputs[which]), step_of(model, inputs[which]))
        of_plan = saved_by(twin(inputs[which]))
        with only_rules():
            assert saved_by(twin(inputs[which])) == of_plan


@pytest.mark.plans_alone
def test_profiled_step_in_between() -> None:
    original, twin, x = trained("residual")
    for _ in range(2):
        with torch.autograd.profiler.profile():
            step = step_of(twin, x)
        assert_same_step(step, step_of(original, x))
        assert_same_outcome(original, twin, x)


def test_checkpoint_runs_a_forward_twice() -> None:
    """A norm whose input needs no gradient saves it all the same."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    twin, x = converted_twin(model), images()
    for m in (model, twin):
        for _ in range(3):
            m(x).sum().backward()
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False).sum().backward()
    assert int(twin[0].num_batches_tracked) == int(model[0].num_batches_tracked)
    torch.testing.assert_close(twin[0].running_mean, model[0].running_mean)


@pytest.mark.plans_alone
def test_casts_of_parameters_are_not_counted() -> None:
    """Where autocast casts a bias before the input, both nodes have the type of a decision."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.addmm(layer.bias, F.softplus(x.float()).flatten(0, -2), layer.weight)
            return x

    ordinals = []
    twin, x = converted_twin(Products()), images()
    for rules in (only_rules, contextlib.nullcontext):
        for _ in range(4):
            with rules(), torch.autocast("cpu", torch.bfloat16):
                output = twin(x)
        ordinals.append({packed.turn for packed in recomputed(output)})
    assert len(ordinals[0]) > 2
    first, second = (sorted(turn - min(turns) for turn in turns) for turns in ordinals)
    assert first == second
