"""Random programs of in-place and view operations behave as with PyTorch's activations.

INPLACE_OPS_FUZZ=N runs N examples instead of 200. A failure is printed as a Case, for `check`.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from _support.assertions import assert_identical, assert_values, unsigned_zeros, wording
from _support.cases import ACTIVATIONS, FLOATS, ActivationCase, leaky_relu
from torch import Tensor

from inplace_ops import _ops

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() and _ops.cuda_version else ("cpu",)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ROWS: dict[str, ActivationCase] = {
    row.name: row
    for row in (
        # Activations whose values and gradients PyTorch computes alike wherever it computes them.
        *(row for row in ACTIVATIONS if row.function in ("relu", "leaky_relu", "relu6", "silu")),
        *(leaky_relu(slope, "mask") for slope in (-300.0, 1e4, math.inf)),
        leaky_relu(1e4, "output"),
    )
}

# Rounding errors of the derivative s (1 + x (1 - s)): 1 - s loses digits where x is large.
FORMULA = {torch.float64: 4e-15}  # 1.2e-6 for dtypes that are computed in float32


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    mode: str
    program: tuple[str, ...]  # names of STEPS and ROWS
    seed: int
    device: str = "cpu"


@dataclass
class State:
    """The tensors of a running program."""

    root: Tensor  # the tensor that x was a view of at first
    x: Tensor  # the tensor that the next step applies to
    outputs: list[Tensor] = field(default_factory=list)  # further outputs of the program


def view_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.view_as(x)


def scalar(x: Tensor, value: float) -> float:
    return value if x.is_floating_point() else 2


# All factors are positive, which `bound` relies on.
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mul": lambda x: x.mul_(scalar(x, 0.75)),
    "add": lambda x: x.add_(scalar(x, 0.5)),
    "exp": lambda x: x.exp(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "flatten": lambda x: x.view(-1) if x.is_contiguous() else x,
    "transpose": lambda x: x.transpose(0, -1) if x.dim() else x,
    "tail": lambda x: x[1:] if x.dim() else x,
    "every_other": lambda x: x[..., ::2] if x.dim() else x,
    "first": lambda x: x[0] if x.dim() and x.size(0) else x,
    "chunk": lambda x: x.chunk(2)[0] if x.dim() else x,
    "unsqueeze": lambda x: x.unsqueeze(1) if 0 < x.dim() < 6 else x,
    "expand": lambda x: x.expand(2, *x.shape) if x.dim() < 6 else x,
    "view_without_grad": view_without_grad,
}
STATE_STEPS: dict[str, Callable[[State], object]] = {
    "add_output": lambda state: state.outputs.append(state.x * 1),
    "mul_root": lambda state: state.root.mul_(scalar(state.root, 0.75)),
    "to_root": lambda state: setattr(state, "x", state.root),
}

# A layout is a function of x's shape and of random numbers. It returns the root's shape, and a
# function from the root to a view of x's shape.
View = Callable[[Tensor], Tensor]


def permuted(shape: tuple[int, ...], choose: random.Random) -> tuple[tuple[int, ...], View]:
    order = choose.sample(range(len(shape)), len(shape))
    return tuple(shape[order.index(d)] for d in range(len(shape))), lambda t: t.permute(order)


def sliced(shape: tuple[int, ...], choose: random.Random) -> tuple[tuple[int, ...], View]:
    around = [(choose.randrange(3), choose.randrange(3)) for _ in shape]
    root = tuple(size + a + b for size, (a, b) in zip(shape, around, strict=True))
    index = tuple(slice(a, a + size) for size, (a, _) in zip(shape, around, strict=True))
    return root, lambda t: t[index]


def stepped(shape: tuple[int, ...], choose: random.Random) -> tuple[tuple[int, ...], View]:
    steps = [choose.randrange(1, 4) for _ in shape]
    root = tuple(size * step for size, step in zip(shape, steps, strict=True))
    return root, lambda t: t[tuple(slice(step - 1, None, step) for step in steps)]


def offset(shape: tuple[int, ...], choose: random.Random) -> tuple[tuple[int, ...], View]:
    first, last = choose.randrange(1, 9), choose.randrange(3)
    size = math.prod(shape)
    return (first + size + last,), lambda t: t[first : first + size].view(shape)


def expanded(shape: tuple[int, ...], choose: random.Random) -> tuple[tuple[int, ...], View]:
    root = tuple(choose.choice((1, size)) for size in shape)
    return root, lambda t: t.expand(shape)


def mixed(shape: tuple[int, ...], choose: random.Random) -> tuple[tuple[int, ...], View]:
    first, permute = permuted(shape, choose)
    second, slice_ = sliced(first, choose)
    third, step = stepped(second, choose)
    return third, lambda t: permute(slice_(step(t)))


LAYOUTS: dict[str, Callable[[tuple[int, ...], random.Random], tuple[tuple[int, ...], View]]] = {
    "contiguous": lambda shape, choose: (shape, lambda t: t),
    "permuted": permuted,
    "sliced": sliced,
    "stepped": stepped,
    "offset": offset,
    "expanded": expanded,
    "mixed": mixed,
}

# By name: the grad mode that the program runs in, and whether the root requires grad.
MODES = {
    "no_requires_grad": (contextlib.nullcontext, False),
    "leaf": (contextlib.nullcontext, True),
    "non_leaf": (contextlib.nullcontext, True),
    "no_grad": (torch.no_grad, True),
    "inference_mode": (torch.inference_mode, True),
    "inference_tensor": (torch.inference_mode, False),
    "inference_tensor_outside": (contextlib.nullcontext, False),
}


def special_values(dtype: torch.dtype) -> list[float]:
    finfo = torch.finfo(dtype)
    tiny = finfo.smallest_normal
    minimum = -1.2784645427610738
    return [
        *(0.0, -0.0, math.nan, math.inf, -math.inf, 20.0, -20.0, 100.0, -100.0),
        *(sign * v for sign in (1, -1) for v in (tiny, tiny / 4, tiny * finfo.eps, finfo.max)),
        *(minimum + k * finfo.eps for k in (-50, -3, -2, -1, 0, 1, 2, 3, 50)),
        *(minimum + d for d in (-0.03, -0.001, 0.001, 0.03)),
    ]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return normal values, mixed with special values for two of three seeds."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        drawn = torch.randint(-9, 9, shape, generator=generator).clamp(info.min, info.max)
        return drawn.to(dtype)
    normal = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    special = torch.tensor(special_values(dtype), dtype=torch.float64)
    chosen = special[torch.randint(len(special), shape, generator=generator)]
    is_special = torch.rand(shape, generator=generator) < (0.3, 0.1, 0)[seed % 3]
    return torch.where(is_special, chosen, normal).to(dtype)


@dataclass
class Outcome:
    """Results of a program, up to the step that raised an error."""

    before: list[Tensor] = field(default_factory=list)  # each activation's input
    after: list[Tensor] = field(default_factory=list)  # each activation's output
    versions: list[int] = field(
        default_factory=list
    )  # x's after each step, and the root's at the end
    error: Exception | None = None
    failed_at: str = ""
    storage: Tensor | None = None
    untouched: Tensor | None = None  # the root's values before the last activation
    gradient: Tensor | None = None
    backward_error: Exception | None = None
    copies: bool = False  # whether the activation is computed out of place and copied


Apply = Callable[[ActivationCase, Tensor, Outcome], Tensor]


def run(
    case: Case, apply: Apply, dtype: torch.dtype | None = None, positive: bool = False
) -> Outcome:
    """Run the program and its backward, with `apply` for the activations.

    `dtype` replaces the case's dtype. `positive` takes absolute values of the incoming gradients.
    """
    root_shape, arrange = LAYOUTS[case.layout](case.shape, random.Random(case.seed))
    context, requires_grad = MODES[case.mode]
    leaf = values(root_shape, case.dtype, case.seed).to(dtype or case.dtype).to(case.device)
    if requires_grad and case.dtype.is_floating_point:
        leaf.requires_grad_()
    if case.mode.startswith("inference_tensor"):
        with torch.inference_mode():
            leaf = leaf.clone()

    outcome = Outcome()
    root = leaf.clone() if case.mode == "non_leaf" else leaf
    state = State(root, root)
    with context():
        try:
            state.x = arrange(root)
            for name in case.program:
                outcome.failed_at = name
                if name in STATE_STEPS:
                    STATE_STEPS[name](state)
                    continue
                if name in STEPS:
                    state.x = STEPS[name](state.x)
                else:
                    outcome.before.append(state.x.detach().clone())
                    outcome.untouched = state.root.detach().clone()
                    state.x = apply(ROWS[name], state.x, outcome)
                outcome.versions.append(-1 if state.x.is_inference() else state.x._version)
            outcome.failed_at = ""
        except RuntimeError as error:
            outcome.error = error
            outcome.versions.append(-1 if state.x.is_inference() else state.x._version)
        outcome.storage = state.root.detach().clone()
        if not state.root.is_inference():
            outcome.versions.append(state.root._version)
    if outcome.error is None and case.mode == "non_leaf":
        differentiate(case, outcome, leaf, [state.root, state.x, *state.outputs], positive)
    return outcome


def differentiate(
    case: Case, outcome: Outcome, leaf: Tensor, results: list[Tensor], positive: bool
) -> None:
    try:
        results = [result for result in results if result.grad_fn is not None]
        if not results:
            return
        incoming = [
            values(result.shape, case.dtype, 3 * (case.seed + i)).to(result)
            for i, result in enumerate(results)
        ]
        if positive:
            incoming = [g.abs() for g in incoming]
        (outcome.gradient,) = torch.autograd.grad(results, leaf, incoming, allow_unused=True)
    except RuntimeError as error:
        outcome.backward_error = error


def ours(activation: ActivationCase, x: Tensor, outcome: Outcome) -> Tensor:
    pointer, strides = x.data_ptr(), x.stride()
    y = activation.call(x)
    assert y is x
    assert (y.data_ptr(), y.stride()) == (pointer, strides)
    outcome.after.append(y.detach().clone())
    return y


def continued_with_our_values(
    reference: Outcome, call: Callable[[ActivationCase, Tensor], Tensor]
) -> Apply:
    """Return a function that applies `call`, and replaces its values by ours.

    PyTorch's values may differ in SiLU's last bit, and on a GPU in the sign of ReLU's zeros.
    """

    def apply(activation: ActivationCase, x: Tensor, outcome: Outcome) -> Tensor:
        y = call(activation, x)
        expected = reference.after[len(outcome.after)]
        assert_values(activation, expected, y.detach().to(expected))
        outcome.after.append(expected)
        if not activation.is_exact or x.is_cuda:
            (y if x.is_inference() else y.data).copy_(expected)
        return y

    return apply


def pytorchs_inplace(activation: ActivationCase, x: Tensor) -> Tensor:
    return activation.torch_inplace(x)


def pytorchs_with_a_copy(activation: ActivationCase, x: Tensor) -> Tensor:
    return x.copy_(activation.reference(x.clone()))


def same_errors(activation: ActivationCase, x: Tensor) -> Tensor:
    """Apply ReLU: autograd's errors depend on whether the output is saved, not on values."""
    return torch.relu_(x) if activation.saves_output else x.copy_(torch.relu(x.clone()))


class Multiply(torch.autograd.Function):
    """A function whose value and derivative are arguments."""

    @staticmethod
    def forward(x: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad):
        (derivative,) = ctx.saved_tensors
        return grad * derivative, None, None


def derivative_error(activation: ActivationCase, dtype: torch.dtype) -> float:
    """Return the documented error of the derivative, with rounding errors of its formula."""
    if activation.is_exact:
        return 0.0
    bits = activation.packed_bits[dtype]
    entry = activation.entry
    if activation.saves_output:
        error = entry.output_errors[dtype][bits]
    else:
        error = entry.derivative_error("derivative", dtype, bits)
    return error + FORMULA.get(dtype, 1.2e-6)


def bound(case: Case, reference: Outcome, error: bool) -> Tensor:
    """Return the sum over all paths of the products of the factors' absolute values.

    With `error` each activation's factor includes the error of its derivative. All other steps have
    positive derivatives, so a backward with the absolute values of the activations' derivatives and
    of the incoming gradients computes the bound.
    """

    def apply(activation: ActivationCase, x: Tensor, outcome: Outcome) -> Tensor:
        index = len(outcome.after)
        before = reference.before[index].double().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(activation.reference(before).sum(), before)
        size = slope.abs() + error * derivative_error(activation, case.dtype)
        outcome.after.append(reference.after[index])
        return x.copy_(Multiply.apply(x.clone(), reference.after[index].double(), size))

    gradient = run(case, apply, torch.float64, positive=True).gradient
    assert gradient is not None
    return gradient


def assert_gradients(case: Case, actual: Outcome, expected: Outcome) -> None:
    if expected.gradient is None or actual.gradient is None:
        assert actual.gradient is None
        assert expected.gradient is None
        return
    # With a copy PyTorch sums the gradients of several paths in another order.
    is_exact = all(ROWS[name].is_exact for name in case.program if name in ROWS)
    if is_exact and not expected.copies:
        assert_identical(
            unsigned_zeros(actual.gradient), unsigned_zeros(expected.gradient), "gradient"
        )
        return
    size, size_with_errors = bound(case, actual, False), bound(case, actual, True)
    finfo = torch.finfo(case.dtype)
    slopes = [getattr(ROWS[n].reference, "keywords", {}) for n in case.program if n in ROWS]
    slope = math.prod(max(1.0, abs(s.get("negative_slope", 0.0))) for s in slopes)
    rounding = finfo.eps * size_with_errors + min(finfo.tiny, 1e-7) * slope  # the last: underflow
    limit = 1.01 * (size_with_errors - size) + (len(case.program) + 2) * rounding
    ours_, theirs = actual.gradient.double(), expected.gradient.double()
    # Near overflow the last bit decides whether a factor overflows. An infinite gradient times a
    # derivative that rounds to 0 is NaN, and times one that does not quite round to 0 is infinite.
    comparable = ~(size_with_errors >= finfo.max / 1e4)
    assert torch.equal(ours_.isfinite() & comparable, theirs.isfinite() & comparable)
    excess = torch.where(comparable, (ours_ - theirs).abs() - limit, 0.0).nan_to_num(0.0)
    worst = excess.argmax() if excess.numel() else 0
    assert not (excess > 0).any(), (
        f"{ours_.flatten()[worst]} instead of {theirs.flatten()[worst]}, "
        f"limit {limit.flatten()[worst]}"
    )


def check(case: Case) -> None:
    """Run the case with our activations and with PyTorch's, and compare all observable results."""
    actual = run(case, ours)
    expected = run(case, continued_with_our_values(actual, pytorchs_inplace))
    copying = run(case, continued_with_our_values(actual, pytorchs_with_a_copy))

    assert actual.failed_at == expected.failed_at, (actual.error, expected.error)
    assert actual.versions == expected.versions
    if expected.error is None:
        assert_identical(actual.storage, expected.storage, "values")
    else:
        assert actual.error is not None
        if actual.failed_at in ROWS:  # PyTorch modifies inference tensors before it raises
            assert_identical(actual.storage, actual.untouched, "modified although rejected:")
        named_first = ["inference"]  # of two reasons, ours names this one first
        if not case.dtype.is_floating_point:
            named_first.append("unsupported dtype")
        if "not implemented for" in str(expected.error):
            assert any(reason in str(actual.error) for reason in named_first)
        elif not any(reason in str(actual.error) for reason in named_first):
            assert type(actual.error) is type(expected.error)
            # The rest of PyTorch's message depends on whether a view's base was modified before.
            assert wording(expected.error)[:20] in wording(actual.error)
        return
    called = [ROWS[name] for name in case.program if name in ROWS]
    if any(
        row.nan_gradient is not None and x.isnan().any()
        for row, x in zip(called, actual.before, strict=True)
    ):
        return  # PyTorch's gradient at NaN is not always the same

    errors = run(case, lambda activation, x, _: same_errors(activation, x))
    assert (actual.backward_error is None) == (errors.backward_error is None), (
        actual.backward_error,
        errors.backward_error,
    )
    if actual.backward_error is not None:
        # By an in-place operation; for a view by chunk the message says that its base was modified.
        assert "modified" in str(errors.backward_error)
        assert "modified" in str(actual.backward_error)
        return
    # PyTorch's in-place op raises in backward for some programs that are right with ours.
    copying.copies = True
    assert_gradients(case, actual, copying if expected.backward_error else expected)


sizes = st.sampled_from((2, 3, 4, 5, 7, 1, 0))
shapes = st.integers(0, 5).flatmap(lambda rank: st.tuples(*[sizes] * rank)) | st.tuples(
    st.sampled_from((9, 33, 65, 513))
)
# After these steps PyTorch rejects the activation, or no gradient flows: draw them less often.
ENDINGS = ("exp", "detach", "chunk", "expand", "view_without_grad")
steps = st.sampled_from(
    (*[name for name in (*STEPS, *STATE_STEPS) if name not in ENDINGS] * 3, *ENDINGS)
)
# Draw a group first, so that ReLU's two rows are as frequent as SiLU's many.
names = st.one_of(
    [
        st.sampled_from([name for name in ROWS if name.startswith(group)])
        for group in ("relu", "leaky_relu", "silu-output", "silu-derivative")
    ]
)
layouts = [layout for layout in LAYOUTS if layout != "expanded"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(FLOATS * 5 + INTEGERS))
    modes = [mode for mode in MODES if dtype.is_floating_point or "leaf" not in mode]
    before = draw(st.lists(steps, max_size=3))
    after = draw(st.lists(steps | steps | names, max_size=4))
    relu = st.sampled_from(("relu-mask", "relu-output"))
    program = (*before, draw(names if dtype.is_floating_point else names | relu), *after)
    mode = draw(st.sampled_from(modes + ["non_leaf"] * 15 * dtype.is_floating_point))
    # PyTorch lets a detached inference tensor be modified anywhere; our activations reject it.
    hypothesis.assume(mode != "inference_tensor_outside" or "detach" not in program)
    return Case(
        dtype=dtype,
        shape=draw(shapes),
        layout=draw(st.sampled_from((*layouts, *layouts, "expanded"))),
        mode=mode,
        program=program,
        seed=draw(st.integers(0, 2**31)),
        device=draw(st.sampled_from(DEVICES)),
    )


LONG = "INPLACE_OPS_FUZZ"


@hypothesis.settings(
    max_examples=int(os.environ.get(LONG, 200)),
    deadline=None,
    derandomize=LONG not in os.environ,  # a short run is reproducible
    database=None,
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
    ],
)
@hypothesis.given(cases())
def test_random_programs_match_pytorch(case: Case) -> None:
    check(case)
