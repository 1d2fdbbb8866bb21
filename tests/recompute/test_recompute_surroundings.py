"""save="recompute" with unknown norm parameters, and in checkpoints, hooks and transforms."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.assertions import Severed, wording
from _support.cases import ActivationCase
from _support.marks import slow
from _support.norm_cases import (
    NORMS,
    PIECEWISE,
    SMOOTH,
    Call,
    assert_same_gradients,
    both_kinds,
    each_activation,
    exactly,
    gradients,
    is_recomputed,
    loss_of,
    node_of,
    one_of_each_norm,
    recompute,
)
from torch import Tensor, nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import checkpoint

import inplace_ops
from inplace_ops import saved_bytes

pytestmark = pytest.mark.usefixtures("_one_thread")

in_train_and_eval = pytest.mark.parametrize(
    ("training", "activation"), [(True, SMOOTH), (False, PIECEWISE)], ids=["train", "eval"]
)


def norm_and_input(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    norm = NORMS[name]
    return norm.module(torch.float64, device=device), norm.input(torch.float64, device)


class Counting(nn.Module):
    """Run a norm and count its calls."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)


@one_of_each_norm
@both_kinds
def test_missing_gradient_stays_none(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    y = recompute(activation)(module(x))
    assert is_recomputed(y)
    Severed.apply(y).sum().backward()
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())


@one_of_each_norm
@both_kinds
def test_norm_in_a_checkpoint_runs_twice(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    """Backward reruns a checkpointed norm for its own gradient, not for the activation's."""
    module, x = norm_and_input(name, device)
    counting = Counting(module)

    def run(call: Call) -> tuple[list[Tensor], Counting, bool]:
        norm = copy.deepcopy(counting)
        y = call(checkpoint(norm, x, use_reentrant=False))
        found = torch.autograd.grad(loss_of(y), (x, *norm.parameters()))
        return [*found, *norm.buffers()], norm, is_recomputed(y)

    actual, norm, recomputed = run(recompute(activation))
    expected, other, _ = run(exactly(activation))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert norm.calls == other.calls == 2
    assert not recomputed


@one_of_each_norm
@both_kinds
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_norm_and_activation_in_a_checkpoint_match_pytorch(
    name: str, activation: ActivationCase, use_reentrant: bool, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    results = []
    for call in (recompute(activation), exactly(activation)):
        norm = Counting(copy.deepcopy(module))
        y = checkpoint(lambda x, c=call, n=norm: c(n(x)), x, use_reentrant=use_reentrant)
        x.grad = None
        loss_of(y).backward()
        assert norm.calls == 2
        results.append([x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@both_kinds
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_that_overwrites_a_checkpoint_input_raises(
    activation: ActivationCase, use_reentrant: bool, device: torch.device
) -> None:
    """An activation that overwrites the input of a checkpoint raises PyTorch's error."""
    errors = []
    for call in (recompute(activation), torch.relu_):
        module, x = norm_and_input("batch_2d", device)
        with pytest.raises(RuntimeError) as error:
            checkpoint(call, module(x), use_reentrant=use_reentrant).sum().backward()
        errors.append(wording(error.value)[:60])
    assert errors[0] == errors[1]


HOOKS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": save_on_cpu,
    "copies": lambda: saved_tensors_hooks(Tensor.clone, lambda t: t),
    "numpy": lambda: saved_tensors_hooks(
        lambda t: (t.device, t.detach().cpu().numpy().copy()),
        lambda pair: torch.tensor(pair[1], device=pair[0]),
    ),
}


@one_of_each_norm
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("around", ["norm", "activation", "both"])
def test_saved_tensors_hooks_match_pytorch(
    name: str, hooks: str, around: str, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    counting = Counting(module)
    found, recomputed = [], []
    for call in (recompute(SMOOTH), SMOOTH.reference):
        norm = copy.deepcopy(counting)
        with HOOKS[hooks]() if around != "activation" else nullcontext():
            z = norm(x)
        with HOOKS[hooks]() if around != "norm" else nullcontext():
            y = call(z)
        recomputed.append(is_recomputed(y))
        found.append(torch.autograd.grad(loss_of(y), (x, *norm.parameters())))
        assert norm.calls == 1
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert recomputed == [around == "activation", False]


@one_of_each_norm
@both_kinds
def test_allow_mutation_on_saved_tensors_matches_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    def then_doubled(call: Call) -> Call:
        return lambda z: call(z).mul_(2)

    module, x = norm_and_input(name, device)
    with allow_mutation_on_saved_tensors():
        assert_same_gradients(
            then_doubled(recompute(activation)), then_doubled(activation.reference), module, x
        )


FROZEN: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "bias": lambda norm, x: norm.bias.requires_grad_(False),
    "weight": lambda norm, x: norm.weight.requires_grad_(False),
    "both": lambda norm, x: norm.requires_grad_(False),
    "input": lambda norm, x: x.requires_grad_(False),
    "input_and_bias": lambda norm, x: (
        norm.bias.requires_grad_(False),
        x.requires_grad_(False),
    ),
    "without_bias": lambda norm, x: setattr(norm, "bias", None),
}


@one_of_each_norm
@in_train_and_eval
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters_match_pytorch(
    name: str, activation: ActivationCase, frozen: str, training: bool, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    FROZEN[frozen](module.train(training), x)
    assert_same_gradients(recompute(activation), activation.reference, module, x)


@one_of_each_norm
@both_kinds
def test_parameters_freed_until_backward_match_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    """FSDP frees parameters after a norm's forward, so the activation cannot read them."""
    norm, x = norm_and_input(name, device)
    expected = gradients(activation.reference, copy.deepcopy(norm), x)
    values = {parameter: parameter.detach().clone() for parameter in norm.parameters()}
    z = norm(x)
    for parameter in values:
        parameter.untyped_storage().resize_(0)
    y = activation.module(save="recompute")(z)
    assert not (values and is_recomputed(y))
    for parameter, value in values.items():
        parameter.untyped_storage().resize_(value.nbytes)
        parameter.data.copy_(value)
    actual = torch.autograd.grad(loss_of(y), (x, *values))
    error = max(activation.derivative_error.get(torch.float64, 0.0), 1e-7)
    torch.testing.assert_close(actual, expected, rtol=error, atol=error)


# Norms as functions of the input, weight and bias.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "batch_eval": lambda x, w, b: F.batch_norm(
        x, torch.linspace(-1, 1, 6).to(x), torch.linspace(0.5, 2, 6).to(x), w, b
    ),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "layer": lambda x, w, b: F.layer_norm(x, (6,), w, b),
}
GIVEN: dict[str, Callable[[Tensor], Tensor | None]] = {
    "parameter": lambda leaf: leaf,
    "frozen": lambda leaf: leaf.detach(),
    "computed": lambda leaf: leaf * 1.5,
    "repeated": lambda leaf: leaf[:3].repeat(2),
    "none": lambda leaf: None,
}
NOT_KNOWN = pytest.mark.xfail(
    strict=True, reason="without a weight, the graph does not show whether there is a frozen bias"
)


@pytest.mark.parametrize(
    ("function", "weight", "bias"),
    [
        pytest.param(
            function,
            weight,
            bias,
            marks=NOT_KNOWN if (weight, bias) == ("none", "frozen") and function != "layer" else (),
        )
        for function in FUNCTIONS
        for weight in GIVEN
        for bias in GIVEN
    ],
)
def test_functional_norms_with_any_parameters_match_pytorch(
    function: str, weight: str, bias: str, device: torch.device
) -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

    x, w, b = leaf(5, 6, 6), leaf(6), leaf(6)

    def found(call: Call) -> tuple[Tensor | None, ...] | str:
        z = FUNCTIONS[function](x, GIVEN[weight](w), GIVEN[bias](b))
        loss = loss_of(call(z))
        try:
            return torch.autograd.grad(loss, (x, w, b), allow_unused=True)
        except RuntimeError as error:  # PyTorch's error for a group norm without a weight
            return str(error)

    assert_same_outcome(found(recompute(SMOOTH)), found(SMOOTH.reference))


@pytest.mark.parametrize(
    ("shape", "repeats"), [((3, 1), (1, 2)), ((1, 3), (2, 1)), ((3,), (2,)), ((), (6,))]
)
def test_repeated_bias_matches_pytorch(
    shape: tuple[int, ...], repeats: tuple[int, ...], device: torch.device
) -> None:
    """An instance norm repeats its bias, a vector; any other repetition matches PyTorch too."""
    if device.type == "cuda" and len(shape) == 2:
        pytest.skip("on a GPU PyTorch's norm without a weight accepts only a vector")
    x = torch.randn(5, 6, 6, dtype=torch.float64, device=device, requires_grad=True)
    leaf = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

    def gradients_of(call: Call) -> tuple[Tensor, ...]:
        z = F.batch_norm(x, None, None, None, leaf.repeat(repeats), training=True)
        return torch.autograd.grad(loss_of(call(z)), x)  # PyTorch fails on a matrix leaf

    module = SMOOTH.module(save="recompute")
    torch.testing.assert_close(
        gradients_of(module), gradients_of(SMOOTH.reference), rtol=1e-7, atol=1e-7
    )


def assert_same_outcome(actual: Any, expected: Any) -> None:
    """Assert equal gradients or equal error messages."""
    if isinstance(actual, str) or isinstance(expected, str):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


CHANGED: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "input": lambda norm, x: x,
    "weight": lambda norm, x: norm.weight,
    "bias": lambda norm, x: norm.bias,
    "running_mean": lambda norm, x: norm.running_mean,
    "running_var": lambda norm, x: norm.running_var,
}
CHANGES = [
    (name, changed, when)
    for name in ("batch_2d", "group", "instance_statistics", "layer")
    for changed in CHANGED
    for when in ("before", "after")
    if not changed.startswith("running") or name in ("batch_2d", "instance_statistics")
]
NOT_SEEN = pytest.mark.xfail(
    strict=True, reason="the bias is read when the activation runs, and has no version to compare"
)


@pytest.mark.parametrize(
    ("name", "changed", "when"),
    [
        pytest.param(
            *case, marks=NOT_SEEN if case[1:] == ("bias", "before") and case[0] != "layer" else ()
        )
        for case in CHANGES
    ],
)
@in_train_and_eval
def test_tensor_changed_before_backward_matches_pytorch(
    name: str,
    changed: str,
    when: str,
    training: bool,
    activation: ActivationCase,
    device: torch.device,
) -> None:
    """A tensor changed before or after the activation gives PyTorch's error or gradients."""
    original, leaf = norm_and_input(name, device)

    def found(call: Call) -> tuple[Tensor, ...] | str:
        norm, x = copy.deepcopy(original).train(training), leaf.detach().clone().requires_grad_()

        def change(at: str) -> None:
            if at == when:
                with torch.no_grad():
                    CHANGED[changed](norm, x).add_(1)

        z = norm(x)
        change("before")
        y = call(z)
        change("after")
        try:
            return torch.autograd.grad(loss_of(y), (x, *norm.parameters()))
        except RuntimeError as error:
            return str(error).partition(" operation:")[0]

    expected = found(activation.reference)
    assert not isinstance(expected, str) or expected.endswith("been modified by an inplace")
    assert_same_outcome(found(recompute(activation)), expected)


@one_of_each_norm
@both_kinds
def test_freed_graph_of_the_norm_raises_in_backward(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    z = module(x)
    z.sum().backward()
    y = recompute(activation)(z)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@one_of_each_norm
@both_kinds
def test_repeated_backward_matches_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    """Run backward with a retained graph, accumulated gradients, two losses and a detached read."""

    def run(call: Call, norm: nn.Module, x: Tensor) -> list[Tensor | None]:
        x.grad = None
        y = call(norm(x))
        seen = y.detach()
        y.sum().backward(retain_graph=True)
        (y * seen.sigmoid()).sum().backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss_of(y), x)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.sum().backward()
        call(norm(x)).sum().backward()  # once more, with a new graph
        return [first, x.grad, *(p.grad for p in norm.parameters()), seen]

    module, x = norm_and_input(name, device)
    other = copy.deepcopy(module)
    torch.testing.assert_close(
        run(recompute(activation), module, x),
        run(exactly(activation), other, x),
        rtol=1e-9,
        atol=1e-9,
    )


@both_kinds
def test_second_backward_frees_the_norms_input(
    activation: ActivationCase, device: torch.device
) -> None:
    norm, x = norm_and_input("layer", device)
    inner = x * 1
    alive = weakref.ref(inner)
    y = recompute(activation)(norm(inner))
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    loss = gradient.square().sum()
    del inner, y, gradient
    loss.backward()
    assert alive() is None


@one_of_each_norm
@both_kinds
def test_batched_gradients_match_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    y = recompute(activation)(module(x))
    incoming = torch.randn(3, *y.shape, dtype=y.dtype, device=device)
    inputs = (x, *module.parameters())
    batched = torch.autograd.grad(y, inputs, incoming, is_grads_batched=True, retain_graph=True)
    expected = activation.reference(copy.deepcopy(module)(x))
    rows = [torch.autograd.grad(y, inputs, g, retain_graph=True) for g in incoming]
    for i, g in enumerate(incoming):
        torch.testing.assert_close(batched[0][i], torch.autograd.grad(expected, x, g, True)[0])
    for together, *each in zip(batched, *rows, strict=True):
        torch.testing.assert_close(together, torch.stack(each))


LAYER = partial(F.layer_norm, normalized_shape=(6,))
TRANSFORMS: dict[str, Callable[[Call, Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: loss_of(f(x)))(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap_grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: loss_of(f(x))))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: loss_of(f(x)))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@both_kinds
def test_functorch_transforms_match_pytorch(
    transform: str, activation: ActivationCase, device: torch.device
) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, device=device)
    actual, expected = (
        TRANSFORMS[transform](lambda x, call=call: call(LAYER(x * 1.5)), x)
        for call in (recompute(activation), activation.reference)
    )
    torch.testing.assert_close(actual, expected)


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "activation", "is_module"),
    [
        ("batch_2d", SMOOTH, True),
        ("group", PIECEWISE, True),
        ("instance_1d", SMOOTH, False),
        ("layer", PIECEWISE, False),
    ],
    ids=["batch-module", "group-module", "instance-function", "layer-function"],
)
def test_compiled_functions_match_pytorch(
    name: str, activation: ActivationCase, is_module: bool, device: torch.device
) -> None:
    norm, x = norm_and_input(name, device)
    other = copy.deepcopy(norm)
    call = activation.module(save="recompute") if is_module else recompute(activation)
    compiled = torch.compile(lambda x: call(norm(x)) * 2, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(loss_of(compiled(x)), (x, *norm.parameters()))
    expected = gradients(lambda z: activation.reference(z) * 2, other, x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@slow
@pytest.mark.filterwarnings("ignore")  # from Inductor's imports
@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_by_inductor_matches_pytorch(
    device: torch.device, inductor_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("Inductor needs g++ on the CPU")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    module, x = norm_and_input("batch_2d", device)
    other = copy.deepcopy(module)
    compiled = torch.compile(
        nn.Sequential(module, inplace_ops.SiLU(save="recompute")), fullgraph=True
    )
    actual = torch.autograd.grad(loss_of(compiled(x)), (x, *module.parameters()))
    expected = gradients(F.silu, other, x)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-7)


def modules(activation: ActivationCase) -> dict[str, nn.Module]:
    module = activation.module(save="recompute")
    pickled = pickle.loads(pickle.dumps(module))
    return {"new": module, "deepcopy": copy.deepcopy(module), "pickle": pickled}


@one_of_each_norm
@each_activation
def test_modules_match_pytorch(name: str, activation: ActivationCase, device: torch.device) -> None:
    for kind, module in modules(activation).items():
        norm, x = norm_and_input(name, device)
        assert is_recomputed(module(norm(x))), kind
        assert_same_gradients(module, exactly(activation), norm, x)
        assert repr(module) == repr(activation.module(save="recompute"))
        assert "save='recompute'" in repr(module)


@each_activation
def test_modules_without_a_norm_use_the_default_save_mode(
    activation: ActivationCase, device: torch.device
) -> None:
    """Without a norm before it, a module uses its default save mode."""
    first = nn.Conv2d(3, 4, 3, device=device, dtype=torch.float64)
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64, device=device, requires_grad=True)
    sizes = [
        saved_bytes(nn.Sequential(first, activation.module(**arguments)), x)
        for arguments in ({}, {"save": "recompute"})
    ]
    assert sizes[0] == sizes[1]
    for kind, module in modules(activation).items():
        y, default = module(first(x)), activation.module()(first(x))
        assert node_of(y).name() == node_of(default).name(), kind
        error = max(activation.derivative_error.get(torch.float64, 0.0), 1e-7)
        found = [gradients(call, first, x) for call in (module, exactly(activation))]
        torch.testing.assert_close(*found, rtol=error, atol=error)


@each_activation
def test_modules_reject_what_pytorch_rejects(
    activation: ActivationCase, device: torch.device
) -> None:
    module, (norm, x) = activation.module(save="recompute"), norm_and_input("batch_2d", device)
    before = x.detach().clone()
    for rejected in (x, x[1:], norm(x).split(2)[1]):
        with pytest.raises(RuntimeError) as expected:
            torch.relu_(rejected)
        with pytest.raises(RuntimeError) as actual:
            module(rejected)
        assert wording(expected.value) in wording(actual.value)
    assert torch.equal(x, before)


def test_chain_of_norms_and_activations_matches_pytorch(device: torch.device) -> None:
    def chain(activation: Callable[[ActivationCase], nn.Module]) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            activation(SMOOTH),
            nn.GroupNorm(2, 6),
            activation(PIECEWISE),
            nn.Conv2d(6, 4, 3),
            nn.InstanceNorm2d(4, affine=True),
            activation(SMOOTH),
            nn.LayerNorm(5),
            activation(SMOOTH),
        ).to(device, torch.float64)

    seed = torch.initial_seed()
    ours = chain(lambda row: row.module(save="recompute"))
    reference = chain(lambda row: row.entry.torch_module())
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64, device=device, requires_grad=True)
    assert_same_gradients(ours, reference, nn.Identity(), x)
    actual, expected = (gradients(lambda z: z, model, x) for model in (ours, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "stepped": lambda x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda x: x[:1].expand(x.shape),
    "permuted": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("name", ["batch_1d", "batch_2d", "group", "instance_2d", "layer"])
@both_kinds
def test_inputs_of_any_strides_match_pytorch(
    name: str, strides: str, activation: ActivationCase, device: torch.device
) -> None:
    """The norm's output has other strides than its input."""
    module, x = norm_and_input(name, device)
    assert is_recomputed(recompute(activation)(module(STRIDES[strides](x))))
    for call in (recompute(activation), activation.module(save="recompute")):
        arranged = nn.Sequential(Arranged(STRIDES[strides]), module)
        assert_same_gradients(call, activation.reference, arranged, x)


class Arranged(nn.Module):
    def __init__(self, arrange: Call) -> None:
        super().__init__()
        self.arrange = arrange

    def forward(self, x: Tensor) -> Tensor:
        return self.arrange(x)


@pytest.mark.parametrize("name", ["layer", "group_of_all"])
@both_kinds
def test_empty_input_matches_pytorch(
    name: str, activation: ActivationCase, device: torch.device
) -> None:
    module, x = norm_and_input(name, device)
    assert_same_gradients(recompute(activation), activation.reference, module, empty_like(x))


def empty_like(x: Tensor) -> Tensor:
    return x.detach()[:0].clone().requires_grad_()


@both_kinds
def test_threads_match_pytorch(activation: ActivationCase, device: torch.device) -> None:
    """Each thread runs its own norm and a shared one in eval mode, whose statistics are fixed."""
    shared, _ = norm_and_input("batch_2d", device)
    shared.eval()
    inputs = [norm_and_input("batch_2d", device) for _ in range(4)]
    expected = [
        (gradients(exactly(activation), copy.deepcopy(norm), x),
         gradients(exactly(activation), shared, x))
        for norm, x in inputs
    ]  # fmt: skip
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        norm, x = inputs[i]
        for _ in range(5):
            results[i] = tuple(gradients(recompute(activation), n, x) for n in (norm, shared))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, wanted in enumerate(expected):
        torch.testing.assert_close(results[i], wanted, rtol=1e-9, atol=1e-9)
