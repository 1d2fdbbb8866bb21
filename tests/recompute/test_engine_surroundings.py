"""Converted models together with other features of PyTorch: checkpoints, hooks, `torch.func`."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import out_of_memory_error
from _support.twins import (
    C,
    Parts,
    Program,
    assert_same_step,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
    replaced,
    step_of,
)
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import inplace_ops
from inplace_ops.activations import RELU
from inplace_ops.conversion.observation import Observation
from inplace_ops.conversion.wiring import conversion_of
from inplace_ops.recompute.rewrites import Bits
from inplace_ops.recompute.tensors import is_plain

DOUBLE = torch.float64

pytestmark = pytest.mark.usefixtures("_small_tensors_too")


class Counting(nn.Module):
    """Run a module and count its calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.runs = module, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.module(x)


def test_out_of_memory_in_a_recompute_raises_pytorchs_error(device: torch.device) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 1, 1))
    inplace_ops.convert(model.to(device))
    x = torch.randn(1, 1, 2048, 2048, device=device)
    model(x).sum().backward()  # the first use of a spec allocates in forward
    output = model(x).sum()
    with out_of_memory_error(device):
        output.backward()
    model(x).sum().backward()
    mask = Bits(torch.randn(2**24, device=device), RELU)
    with out_of_memory_error(device):
        mask.unpack()
    assert set(mask.unpack().unique().tolist()) == {0.0, 1.0}


def layers(*, inplace: bool = False) -> nn.Sequential:
    """Return a float64 model whose layers count their calls."""
    modules = [
        nn.Conv2d(3, C, 3, padding=1),
        nn.BatchNorm2d(C),
        nn.SiLU(inplace=inplace),
        nn.Conv2d(C, C, 3, padding=1),
        nn.InstanceNorm2d(C, affine=True),  # returns a view
        nn.LeakyReLU(0.1, inplace=inplace),
        nn.Conv2d(C, 4, 1),
    ]
    return nn.Sequential(*map(Counting, modules)).to(DOUBLE)


def runs(model: nn.Module) -> list[int]:
    return [m.runs for m in model.modules() if isinstance(m, Counting)]


# Checkpoints around every slice of a model.

SLICES = [slice(a, b) for a, b in itertools.combinations(range(len(layers()) + 1), 2)]
WHOLE = slice(0, len(layers()))


def selective() -> Any:
    """Save the outputs of convolutions and recompute everything else."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is torch.ops.aten.convolution.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


KINDS: dict[str, Callable[[Callable[..., Any], Tensor], Tensor]] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not_reentrant": partial(checkpoint, use_reentrant=False),
    "not_early_stopped": partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": lambda run, x: checkpoint(
        lambda y: checkpoint(run, y, use_reentrant=False), x, use_reentrant=False
    ),
    "nested_reentrant": lambda run, x: checkpoint(
        lambda y: checkpoint(run, y, use_reentrant=True), x, use_reentrant=True
    ),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=selective),
}


def partly_checkpointed(m: Any, x: Tensor) -> Tensor:
    if m.part == WHOLE:
        return KINDS[m.kind](m.layers, x)
    x = KINDS[m.kind](m.layers[m.part], m.layers[: m.part.start](x))
    return m.layers[m.part.stop :](x)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (kind, SLICES if kind == "not_reentrant" else [WHOLE, *SLICES[i % 3 :: 3]])  # some for each
        for i, kind in enumerate(KINDS)
    ],
    ids=KINDS,
)
def test_checkpoints_around_any_slice_match_pytorch(
    kind: str, parts: list[slice], inplace: bool
) -> None:
    """A checkpoint of any slice gives equal gradients, running statistics and numbers of calls.

    So does a checkpoint around a converted model.
    """
    for part in parts:
        # A checkpoint may not overwrite its own input, and nothing a view that a reentrant returns.
        overwrites = part.start in (2, 5) or (part.stop == 5 and "reentrant" in kind)
        if inplace and overwrites:
            continue
        model = Parts(partly_checkpointed, layers=layers(inplace=inplace), part=part, kind=kind)
        twins, x = [converted_twin(model)], images(DOUBLE)
        if part == WHOLE:
            twins.append(copy.deepcopy(model))
            inplace_ops.convert(twins[1].layers, max_ops=20)
        for _ in range(2):
            expected = step_of(model, x)
            for twin in twins:
                assert_same_step(step_of(twin, x), expected, tolerance=1e-11)
                assert runs(twin) == runs(model), part


# Saved-tensor hooks.


@contextmanager
def counting_hooks(seen: list[torch.Size]) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


HOOKS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "counting": lambda: counting_hooks([]),
    "disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    # PyTorch clones saved tensors before a write; specs need unmodified leaves.
    "allow_mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.parametrize(
    ("hooks", "around"),
    [
        *itertools.product(list(HOOKS)[:3], ["all", "norm", "activation", "convolution"]),
        ("allow_mutation", "training"),
    ],
)
def test_saved_tensor_hooks_of_the_user_match_pytorch(hooks: str, around: str) -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        kinds = {"norm": nn.BatchNorm2d, "activation": nn.SiLU, "convolution": nn.Conv2d}
        with HOOKS[hooks]() if around == "all" else nullcontext():
            for layer in m.layers:
                is_hooked = around in kinds and isinstance(layer.module, kinds[around])
                with HOOKS[hooks]() if is_hooked else nullcontext():
                    x = layer(x)
        return x

    model = Parts(compute, layers=layers())
    twin, x = converted_twin(model), images(DOUBLE)
    with HOOKS[hooks]() if around == "training" else nullcontext():
        assert_same_steps(model, twin, x, tolerance=1e-11)


def test_saved_tensor_hooks_of_the_user_see_all_saved_tensors() -> None:
    model, x = layers(), images(DOUBLE)
    seen: list[list[torch.Size]] = [[], []]
    for m, shapes in zip((model, converted_twin(model)), seen, strict=True):
        with counting_hooks(shapes):
            assert replaced(m(x)) == []
    assert seen[0] == seen[1] != []


def test_hooks_on_one_saved_tensor_are_preserved() -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        node: Any = output.grad_fn
        raw = node._raw_saved_input
        if raw.unpack_hook is None:
            raw.register_hooks(lambda tensor: tensor * 1, lambda tensor: tensor)
            registered.append(raw.unpack_hook)

    registered: list[Any] = []
    model = layers()
    for m in (model, twin := converted_twin(model)):
        m[0].module.register_forward_hook(hook, prepend=True)
    assert_same_steps(model, twin, images(DOUBLE), tolerance=1e-11)
    assert len(registered) == 4


# Modes.


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_output_without_gradients_matches_pytorch(training: bool) -> None:
    model = layers().train(training)
    twin, x = converted_twin(model), images(DOUBLE)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)


def test_modes_that_count_or_move_do_not_disable_the_engine() -> None:
    model = layers()
    twin, x = converted_twin(model), images(DOUBLE)
    with FlopCounterMode(display=False), torch.device("cpu"):
        output = twin(x)
        assert len(recomputed(output)) >= 2
        output.sum().backward()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert_same_steps(model, twin, x, tolerance=1e-11)
    with torch.profiler.profile():
        assert_same_steps(model, twin, x, tolerance=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_accumulation_and_retained_graphs_matches_pytorch(dtype: torch.dtype) -> None:
    model = Program(lambda m, z: m.linear(m.silu(m.conv(m.silu(z)))))
    found, x = [], images()
    for m in (model, converted_twin(model)):
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                loss = m(x).float().square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        found.append({name: p.grad for name, p in m.named_parameters()})
    assert_same_step(found[1], found[0], tolerance=1e-3)


# Derivatives.


def network(*, inplace: bool = False) -> Program:
    """Return a model that is smooth everywhere and has fixed statistics."""
    compute = lambda m, z: m.linear(m.conv(m.silu(z) * m.scale).sigmoid())  # noqa: E731
    model = Program(compute, activation=lambda: nn.SiLU(inplace=inplace), dtype=DOUBLE)
    return model.eval()


def energy(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).sin().sum()


def third_derivative(m: nn.Module, x: Tensor) -> list[Tensor]:
    (first,) = torch.autograd.grad(energy(m, x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return gradients_of(second.square().sum(), m)


def gradients_of(loss: Tensor, m: nn.Module) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(m.parameters()), allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def gradient_penalty(m: nn.Module, x: Tensor) -> list[Tensor]:
    (gradient,) = torch.autograd.grad(energy(m, x), x, create_graph=True)
    return gradients_of((gradient.flatten(1).norm(dim=1) - 1).square().sum(), m)


def in_many_directions(m: nn.Module, x: Tensor) -> list[Tensor]:
    output = m(x).flatten()[:4]
    return list(torch.autograd.grad(output, [x], torch.eye(4, dtype=DOUBLE), is_grads_batched=True))


def two_heads(m: nn.Module, x: Tensor) -> list[Tensor]:
    first, second = m(x), m(x * 2)
    (first * 2).sum().backward(retain_graph=True)
    second.sum().backward()
    first.square().sum().backward()
    return [p.grad for p in m.parameters() if p.grad is not None]


def many_times_in_a_hook(m: nn.Module, x: Tensor) -> list[Tensor]:
    """Differentiate repeatedly in a gradient hook, as deep equilibrium models do."""
    output = m(x)
    inner = output.mean((2, 3))

    def solve(gradient: Tensor) -> Tensor:
        for _ in range(3):
            (step,) = torch.autograd.grad(output, x, torch.ones_like(output), retain_graph=True)
            gradient = gradient + step.mean()
        return gradient

    result = inner * 2
    result.register_hook(solve)
    return gradients_of(result.sum(), m)


DERIVATIVES: dict[str, Callable[[nn.Module, Tensor], list[Tensor]]] = {
    "third": third_derivative,
    "gradient_penalty": gradient_penalty,
    "batched": in_many_directions,
    "two_heads": two_heads,
    "in_a_hook": many_times_in_a_hook,
    "through_two_calls": lambda m, x: gradients_of(energy(m, m(x)[:, :3]), m),
    "of_the_input": lambda m, x: list(torch.autograd.grad(energy(m, x), [x])),
    "one_parameter": lambda m, x: list(torch.autograd.grad(energy(m, x), [m.conv.weight])),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_higher_and_partial_derivatives_match_pytorch(derivative: str, inplace: bool) -> None:
    model = network(inplace=inplace)
    twin, x = converted_twin(model), images(DOUBLE)
    assert any(value.spec.tolerance for value in recomputed(twin(x)))  # a product is inside
    found = []
    for m in (model, twin):
        m.zero_grad()
        found.append(DERIVATIVES[derivative](m, x.clone().requires_grad_()))
    assert len(found[0]) == len(found[1]) > 0
    for actual, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_second_derivative_where_the_first_is_zero(inplace: bool) -> None:
    """Hardswish has slope 0 at the float -1.5, and the second derivative must not divide by it."""
    model = nn.Sequential(nn.LayerNorm(4, dtype=DOUBLE), nn.Hardswish(inplace=inplace))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1.5)
    twin, x = converted_twin(model), torch.randn(3, 4, dtype=DOUBLE)
    found = []
    for m in (model, twin):
        (first,) = torch.autograd.grad(m(x).sum(), m[0].bias, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), m[0].bias)[0])
    assert (found[0] == 1.0).all()
    assert torch.equal(found[1], found[0])


def forces(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return an energy and its derivative, which frees the graph except in training."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.last(m.act(m.norm(m.first(x)))).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=m.training)
    return energy, force


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_model_that_differentiates_in_forward_matches_pytorch(training: bool) -> None:
    linears = {"first": nn.Linear(8, 16), "last": nn.Linear(16, 1)}
    model = Parts(forces, **linears, norm=nn.LayerNorm(16), act=nn.SiLU()).double().train(training)
    twin, x = converted_twin(model), torch.randn(5, 8, dtype=DOUBLE)
    if training:
        assert_same_steps(model, twin, x, tolerance=1e-11)
    with torch.no_grad():
        for actual, expected in zip(twin(x), model(x), strict=True):
            torch.testing.assert_close(actual, expected)


# `torch.func`, compilers and exporters.


def functional_loss(parameters: dict[str, Tensor], m: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(m, parameters, (x,)).square().sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda p, m, x: torch.func.grad(functional_loss)(p, m, x),
    "per_sample": lambda p, m, x: torch.func.vmap(
        torch.func.grad(functional_loss), (None, None, 0)
    )(p, m, x[:, None]),
    "vjp": lambda p, m, x: torch.func.vjp(lambda t: m(t), x)[1](torch.ones_like(m(x)))[0],
    "jvp": lambda p, m, x: torch.func.jvp(lambda t: m(t), (x,), (torch.ones_like(x),)),
    "jacrev": lambda p, m, x: torch.func.jacrev(lambda t: m(t).mean((0, 2, 3)))(x),
    "jacfwd": lambda p, m, x: torch.func.jacfwd(lambda t: m(t).mean((0, 2, 3)))(x[:1, :, :2, :]),
    "hessian": lambda p, m, x: torch.func.hessian(lambda t: energy(m, t))(x[:1, :, :1, :]),
    "forward_ad": lambda p, m, x: dual(m, x),
}


def dual(m: nn.Module, x: Tensor) -> Tensor:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functorch_transforms_match_pytorch(transform: str) -> None:
    model = network()
    twin, x = converted_twin(model), images(DOUBLE)
    twin(x)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    actual, expected = (TRANSFORMS[transform](parameters, m, x) for m in (twin, model))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# By name: what transforms a function, and calls it with a batch.
INNER_TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "gradients": lambda f, x: torch.func.vmap(torch.func.grad(lambda row: f(row).sum()))(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
}


@pytest.mark.parametrize("transform", INNER_TRANSFORMS)
def test_transform_of_a_part_of_the_model_matches_pytorch(transform: str) -> None:
    """The engine does nothing inside the transform, and works around it."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = INNER_TRANSFORMS[transform](lambda z: m.narrow(F.silu(m.wide(z))), F.gelu(m.first(x)))
        return m.last(F.silu(y))

    sizes = {"first": (4, 6), "wide": (6, 20), "narrow": (20, 6), "last": (6, 4)}
    model = Parts(compute, **{name: nn.Linear(*size) for name, size in sizes.items()})
    twin, x = converted_twin(model), torch.randn(5, 4)
    with no_warnings():
        assert_same_steps(model, twin, x)
    assert replaced(twin(x))


@pytest.mark.usefixtures("without_products")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # from Dynamo
def test_model_with_a_compiled_part_matches_pytorch() -> None:
    model = nn.Sequential(layers()[:3], layers()[3:])
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    twin[1].compile(backend="aot_eager")
    inplace_ops.convert(twin)
    assert len(recomputed(twin(images(DOUBLE)))) == 0  # the compiled part includes the convolution
    assert_same_steps(model, twin, images(DOUBLE), tolerance=1e-9)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # from group_norm
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_exported_and_traced_models_match_pytorch() -> None:
    model = layers().eval()
    twin, x = converted_twin(model), images(DOUBLE)
    twin(x)
    builders: list[Callable[[nn.Module], Callable[[Tensor], Tensor]]] = [
        lambda m: torch.export.export(m, (x,)).module(),
        lambda m: torch.export.export(m, (x,), strict=False).module(),
        lambda m: torch.jit.trace(m, x),
        torch.fx.symbolic_trace,
    ]
    for build in builders:
        torch.testing.assert_close(build(twin)(x), model(x))
    with pytest.raises(RuntimeError, match=r"inplace_ops\.revert"):
        torch.jit.script(twin)
    with inplace_ops.reverted(twin):
        torch.testing.assert_close(torch.jit.script(nn.Sequential(*twin))(x), model(x))


# Threads.


def test_hooks_of_an_observation_run_in_threads_that_pass_no_kwargs() -> None:
    """`nn.Module` stores a hook first, and then that it takes keyword arguments."""
    model, x = layers().eval(), images(DOUBLE)
    expected = model(x)
    with Observation(model).following_modules():
        for module in model.modules():
            module._forward_pre_hooks_with_kwargs.clear()
        torch.testing.assert_close(model(x), expected)


def test_threads_that_share_a_model_match_pytorch() -> None:
    """Half of the threads train the model, at first by a graph of the main thread, as on a GPU.

    The others run it without gradients.
    """
    model = layers().eval()
    twin, x = converted_twin(model), images(DOUBLE)
    expected = [g.clone() for g in gradients_of(model(x).square().sum(), model)]
    outputs, output, failures = [twin(x) for _ in range(4)], model(x).detach(), []

    def work(trains: bool) -> None:
        try:
            y = outputs.pop()
            for _ in range(10):
                if trains:
                    found = gradients_of(y.square().sum(), twin)
                    y = twin(x)
                    for a, e in zip(found, expected, strict=True):
                        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-11)
                else:
                    with torch.no_grad():
                        torch.testing.assert_close(twin(x), output)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Tensor subclasses and nested tensors.


@pytest.mark.usefixtures("without_products")
def test_subclasses_with_torch_dispatch_stay_saved() -> None:
    layers = nn.Conv2d(3, 6, 3), nn.SiLU(), nn.Conv2d(6, 2, 1)
    twin, x = converted_twin(nn.Sequential(*layers)), images()
    assert len(recomputed(twin(x))) == 1
    twin = twin.to(torch.float64)
    pair = TwoTensor(x.double(), x.double() + 1)
    weights = [p.detach() for p in twin.parameters()]
    pairs = [TwoTensor(w, w.clone()).requires_grad_() for w in weights]
    parameters = dict(zip(dict(twin.named_parameters()), pairs, strict=True))
    output = torch.func.functional_call(twin, parameters, pair)
    assert replaced(output) == []
    assert not conversion_of(twin).settings.warned


class OnlyAten(Tensor):
    """A wrapper subclass that supports only operations of the `aten` namespace."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> OnlyAten:
        wrapper = Tensor._make_wrapper_subclass(cls, plain.shape, strides=plain.stride())
        wrapper.plain = plain.detach()
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace == "aten"
        args, kwargs = tree_map_only(OnlyAten, lambda t: t.plain, (args, kwargs or {}))
        return tree_map_only(Tensor, OnlyAten, func(*args, **kwargs))


@pytest.mark.parametrize("affine", [True, False])
def test_norm_statistics_in_a_subclass_are_not_read(affine: bool) -> None:
    """No operation of this package runs on a norm's statistics in a tensor subclass."""
    model = nn.Sequential(nn.BatchNorm2d(8, affine=affine), nn.SiLU(), nn.Conv2d(8, 4, 1))
    twin = converted_twin(model)
    twin(OnlyAten(torch.randn(2, 8, 16, 16)).requires_grad_()).sum().backward()
    assert not conversion_of(twin).settings.warned


def test_class_assigned_to_one_tensor_does_not_affect_others() -> None:
    """Assigning a class with `__torch_dispatch__` to a tensor does not change its dispatch keys."""
    assigned = nn.Parameter(torch.randn(4))
    assigned.__class__ = type("Assigned", (nn.Parameter,), {"__torch_dispatch__": None})
    assert not is_plain(assigned)
    assert is_plain(nn.Parameter(torch.randn(4)))
    assert is_plain(torch.randn(4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_match_pytorch() -> None:
    def loss(m: nn.Module, layout: torch.layout) -> list[Tensor]:
        nested = torch.nested.nested_tensor(parts, layout=layout)
        return gradients_of(m(nested).to_padded_tensor(0.0).sum(), m)

    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    model = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
    twin = converted_twin(model)
    torch.testing.assert_close(loss(twin, torch.strided), loss(model, torch.strided))
    torch.testing.assert_close(loss(twin, torch.jagged), loss(model, torch.jagged))


def test_user_functions_receive_the_saved_values() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return y * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            seen.append(y)
            return gradient * 2

    seen: list[Tensor] = []
    model = Program(lambda m, z: Double.apply(F.silu(z)))
    assert_same_steps(model, converted_twin(model), images(), steps=1)
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)
