"""Every line of the operation table: what it recomputes, and that gradients are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _support.allocations import saved_allocation
from _support.engine_norms import norms
from _support.twins import (
    HAS_HOOK,
    C,
    Parts,
    Program,
    assert_same_gradients,
    assert_same_steps,
    converted_twin,
    images,
    no_warnings,
    recomputed,
    replaced,
)
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction

from inplace_ops import saved_bytes
from inplace_ops.recompute import operations, views
from inplace_ops.recompute.nodes import creation_hook, name_of_type
from inplace_ops.recompute.rewrites import Bits, Shape
from inplace_ops.recompute.run import run_engine
from inplace_ops.recompute.settings import Settings

pytestmark = pytest.mark.usefixtures("_small_tensors_too")


# By node type: an operation on a norm's output, whose result a convolution saves.
OUTPUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "SiluBackward0": lambda m, z: F.silu(z),
    "GeluBackward0": lambda m, z: F.gelu(z, approximate="tanh"),
    "HardswishBackward0": lambda m, z: F.hardswish(z),
    "MishBackward0": lambda m, z: F.mish(z),
    "LeakyReluBackward0": lambda m, z: F.leaky_relu(z, 0.3),
    "HardtanhBackward0": lambda m, z: F.hardtanh(z, -0.4, 0.7),
    "HardsigmoidBackward0": lambda m, z: F.hardsigmoid(z),
    "SoftplusBackward0": lambda m, z: F.softplus(z, 2.0, 1.5),
    "EluBackward0": lambda m, z: F.elu(z, 0.7),
    "CeluBackward0": lambda m, z: F.celu(z, 0.7),
    "GluBackward0": lambda m, z: F.glu(torch.cat([z, z], 1), 1),
    "ReluBackward0": lambda m, z: F.relu(z),
    "LeakyReluBackward1": lambda m, z: F.leaky_relu(z, 0.3, inplace=True),
    "EluBackward1": lambda m, z: F.elu_(z, 0.7),
    "CeluBackward1": lambda m, z: F.celu_(z, 0.7),
    "SigmoidBackward0": lambda m, z: z.sigmoid(),
    "TanhBackward0": lambda m, z: z.tanh(),
    "MulBackward0": lambda m, z: z * m.scale,
    "AddBackward0": lambda m, z: torch.add(z, m.silu(z), alpha=0.4),
    "SubBackward0": lambda m, z: torch.sub(m.silu(z), z, alpha=0.4),
    "CatBackward0": lambda m, z: torch.cat([z, m.silu(z)], -2)[:, :, 4:12],
    "StackBackward0": lambda m, z: torch.stack([z, m.silu(z)], -4)[1],
    "ToCopyBackward0": lambda m, z: z.to(torch.bfloat16),
    "CloneBackward0": lambda m, z: z.clone(),
    "NegBackward0": lambda m, z: -z,
    "SinBackward0": lambda m, z: z.sin(),
    "CosBackward0": lambda m, z: z.cos(),
    "ErfBackward0": lambda m, z: z.erf(),
    "AbsBackward0": lambda m, z: z.abs(),
    "RepeatBackward0": lambda m, z: z.repeat(2, 1, 1, 1)[1:],
    "UpsampleNearest1DBackward0": lambda m, z: F.interpolate(
        z.flatten(2), scale_factor=2
    ).unflatten(2, (16, 8)),
    "UpsampleNearest2DBackward0": lambda m, z: F.interpolate(z, size=(13, 16)),
    "UpsampleNearest3DBackward0": lambda m, z: F.interpolate(z[:, :, None], scale_factor=2)[
        :, :, 1
    ],
    "UpsampleBilinear2DBackward0": lambda m, z: F.interpolate(
        z, scale_factor=2, mode="bilinear", align_corners=True
    ),
    "UpsampleTrilinear3DBackward0": lambda m, z: F.interpolate(
        z[:, :, None], size=(2, 9, 5), mode="trilinear"
    )[:, :, 1],
    "RollBackward0": lambda m, z: z.roll((3, -2), (2, 3)),
    "ConstantPadNdBackward0": lambda m, z: F.pad(z, (0, 0, 0, 0)),
    "NormBackward": lambda m, z: z,
}
IN_PLACE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "silu": lambda m, z: F.silu(z, inplace=True),
    "hardswish": lambda m, z: F.hardswish(z, inplace=True),
    "mish": lambda m, z: F.mish(z, inplace=True),
    "relu6": lambda m, z: F.relu6(z, inplace=True),
    "relu": lambda m, z: F.relu_(z),
    "selu": lambda m, z: F.selu_(z),
    "sigmoid": lambda m, z: z.sigmoid_(),
    "tanh": lambda m, z: z.tanh_(),
    "add": lambda m, z: z.add_(m.act(m.norm(m.other(z.detach().clone())))),
    "subtract": lambda m, z: m.silu(z).sub_(z),
    "multiply": lambda m, z: z.mul_(m.scale),
    "two_in_a_row": lambda m, z: F.relu_(z.add_(m.scale)),
}


# By node type: an operation on values between 0 and 1, whose result a convolution saves. It may
# amplify roundings.
EXACT_OUTPUTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ExpBackward0": lambda m, y: y.exp(),
    "SqrtBackward0": lambda m, y: y.sqrt(),
    "RsqrtBackward0": lambda m, y: y.rsqrt(),
    "ReciprocalBackward0": lambda m, y: y.reciprocal(),
    "DivBackward0": lambda m, y: y / m.scale,
    "PowBackward0": lambda m, y: y.pow(3),
}


def in_a_view(norm: str) -> bool:
    """Whether the norm returns a view, so that CopySlices hides in-place operations on it."""
    return norm == "instance"


def after_norms(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return each operation after a norm and after a view of one, and some after every norm."""
    pairs = [(name, norm) for name in names for norm in ("batch", "instance")]
    some = ("NormBackward", "AddBackward0", "silu")
    return pairs + [(name, norm) for name in some if name in names for norm in ("group", "layer")]


@pytest.mark.parametrize(("operation", "norm"), [*after_norms(OUTPUTS), *after_norms(IN_PLACE)])
def test_output_is_recomputed(operation: str, norm: str) -> None:
    compute, is_in_place = (OUTPUTS | IN_PLACE)[operation], operation in IN_PLACE
    model, x = Program(lambda m, z: m.convolved(compute(m, z)), lambda c: norms(c)[norm]), images()
    twin = converted_twin(model)
    output = twin(x)
    # Without the hook, functional code is seen late, and only saved inputs can be proved.
    # In "two_in_a_row" ReLU saves its output, which has the memory that the convolution reads.
    is_hidden = (is_in_place or operation.endswith("Backward1")) and in_a_view(norm)
    if HAS_HOOK and not is_hidden and operation != "two_in_a_row":
        assert output.grad_fn._raw_saved_input.unpack_hook is not None
    assert_same_steps(model, twin, x)


@pytest.mark.parametrize("operation", EXACT_OUTPUTS)
def test_output_without_bound_is_recomputed_from_exact_values_only(operation: str) -> None:
    compute = EXACT_OUTPUTS[operation]
    exact = Program(lambda m, z: m.convolved(compute(m, m.other(z).sigmoid())))
    inexact = Program(lambda m, z: m.convolved(compute(m, z.sigmoid())))
    for model in (exact, inexact):
        twin, x = converted_twin(model), images()
        output = twin(x)
        is_replaced = output.grad_fn._raw_saved_input.unpack_hook is not None
        if model is exact or creation_hook is not None:  # else the sigmoid's result stays saved
            assert is_replaced == (model is exact)
        assert_same_steps(model, twin, x)
    double = converted_twin(exact.double())
    assert_same_steps(exact, double, images(torch.double))


# Operations without an entry, on an exact value whose input is saved.
WITHOUT_ENTRY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "atan": lambda m, y: y.atan(),
    "logaddexp": lambda m, y: torch.logaddexp(y, y * 2),
    "cumprod": lambda m, y: y.cumprod(1),
    "scatter": lambda m, y: y.scatter_reduce(1, (y > 0).long(), y, "prod"),
    "norm": lambda m, y: torch.linalg.vector_norm(y, dim=1),
    "inverse": lambda m, y: torch.linalg.inv(y + 9 * torch.eye(8, dtype=y.dtype)),
    "fft": lambda m, y: torch.view_as_real(torch.fft.fft2(y).sin()),
    "complex_in_place": lambda m, y: torch.view_as_real(
        torch.complex(y, y).mul_(2.0).div_(1.5 + 0.5j).sin()
    ),
    "sparse": lambda m, y: (y.flatten(1).to_sparse() * 2.0).to_dense(),
    "transposed": lambda m, y: y.transpose(2, 3).atan(),
    "expanded": lambda m, y: y[:, :1].expand(-1, 6, -1, -1).atan(),
}


@pytest.mark.parametrize("operation", WITHOUT_ENTRY)
def test_operation_without_an_entry_reads_exact_values(operation: str) -> None:
    compute = WITHOUT_ENTRY[operation]
    model = Program(lambda m, z: compute(m, m.silu(m.other(z))), dtype=torch.double)
    model.norm = nn.Identity()
    x = images(torch.double)
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, tolerance=0)


# PyTorch's kernels of these round differently for other strides.
ROUNDING = [F.silu, F.gelu, F.mish, F.softplus, F.elu, F.celu, torch.sigmoid, torch.tanh]
STRIDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "copied": lambda m, y: y.permute(0, 2, 3, 1).contiguous(),
    "cloned": lambda m, y: y[:, :, ::2, 1:].clone(),
    "cast": lambda m, y: y.bfloat16().float()[..., 1::2],
    "copied_twice": lambda m, y: y.transpose(1, 3).contiguous().transpose(2, 3).contiguous(),
}


@pytest.mark.parametrize("strided", STRIDED)
@pytest.mark.parametrize("function", ROUNDING, ids=lambda f: f.__name__)
def test_exact_value_has_the_roundings_of_forward(
    function: Callable[[Tensor], Tensor], strided: str
) -> None:
    """The maximum compares the recomputed value with its result: one rounding gives NaN.

    The first step, in which the engine compares, has zeros.
    """

    def compute(m: Any, z: Tensor) -> Tensor:
        y = STRIDED[strided](m, (m.other(z) * float(m.step > 1)).tanh())
        return function(y).amax(-1)

    model, x = Program(compute), torch.randn(3, 3, 17, 13)
    model.norm = nn.Identity()
    with no_warnings():
        assert_same_steps(model, converted_twin(model), x, steps=4, tolerance=0)


def test_value_of_unknown_strides_is_not_upsampled() -> None:
    """The upsampling does not save the cast, whose memory format its node does not tell.

    The first step, in which the engine compares, has zeros.
    """

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.cast(m.silu(m.other(z) * float(m.step > 1)))
        return F.interpolate(y, scale_factor=3.0, mode="bilinear").amax(-1)

    model, x = Program(compute), torch.randn(2, 3, 32, 32)
    model.norm = nn.Identity()
    channels_last = partial(Tensor.to, dtype=torch.double, memory_format=torch.channels_last)
    model.cast = Parts(lambda m, y: channels_last(y))
    assert_same_steps(model, converted_twin(model), x, steps=3, tolerance=0)


def test_copy_for_another_layout_is_recomputed() -> None:
    """Of a copy, SiLU's result and a convolution's input nothing stays saved."""

    def compute(m: Any, z: Tensor) -> Tensor:
        copy = m.other(z).tanh().permute(0, 3, 1, 2).contiguous()
        return F.conv2d(F.silu(copy), m.weight)

    model, x = Program(compute), images(samples=16)
    model.weight = nn.Parameter(torch.randn(4, 8, 1, 1))
    twin = converted_twin(model)
    with no_warnings():
        output = twin(x)
    consumers = {(spec.producer, spec.consumer) for spec in recomputed(output)}
    assert {("Clone", "SiLU"), ("SiLU", "Convolution")} <= consumers
    assert_same_steps(model, twin, x)


def test_padding_with_unknown_values_stays_saved() -> None:
    model = Program(lambda m, z: m.convolved(F.pad(z, (0, 1), value=3.0)))
    twin, x = converted_twin(model), images()
    output = twin(x)
    assert output.grad_fn._raw_saved_input.unpack_hook is None
    assert_same_steps(model, twin, x)


# By node type: a view of a norm's output of shape (2, C, 8, 8).
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "AliasBackward0": lambda z: torch.ops.aten.alias(z),
    "AsStridedBackward0": lambda z: z.view(1, 2 * C, 8, 8).as_strided(
        (2, C, 4, 16), (C * 64, 64, 16, 1), 0
    ),
    "BackwardHookFunctionBackward": lambda z: BackwardHookFunction.apply(z.detach(), z)[1],
    "ExpandBackward0": lambda z: z.unsqueeze(1).expand(-1, 3, -1, -1, -1)[:, 2],
    "PermuteBackward0": lambda z: z.permute(0, -3, 3, 2),
    "ReshapeAliasBackward0": lambda z: torch.ops.aten._reshape_alias(
        z, (2, C, 4, 16), (C * 64, 64, 16, 1)
    ),
    "SelectBackward0": lambda z: z.unsqueeze(-1).select(-1, -1),
    "SliceBackward0": lambda z: z[:, :, 1:-1:2],
    "SplitBackward0": lambda z: z.split(3, -1)[1],
    "SplitWithSizesBackward0": lambda z: z.split((3, 1, 4), -2)[2],
    "SqueezeBackward0": lambda z: z.unsqueeze(2).squeeze(),
    "SqueezeBackward1": lambda z: z.unsqueeze(-1).squeeze(-1),
    "SqueezeBackward2": lambda z: z.unsqueeze(1).unsqueeze(-1).squeeze((1, -1)),
    "TBackward0": lambda z: z.flatten(1).t().reshape(8, C, 8, 2),
    "TransposeBackward0": lambda z: z.transpose(-1, -2),
    "UnbindBackward0": lambda z: z.unsqueeze(1).unbind(1)[0],
    "UnsafeViewBackward0": lambda z: torch.ops.aten._unsafe_view(z, (2, C, 4, 16)),
    "UnsqueezeBackward0": lambda z: z.unsqueeze(-4)[0],
    "ViewBackward0": lambda z: z.view(2, C, 4, -1),
}


VIEWS_OF_CONTIGUOUS = ("AsStrided", "ReshapeAlias", "T", "UnsafeView", "View")


@pytest.mark.parametrize(
    ("view", "channels_last"),
    [(view, False) for view in VIEWS]
    + [(view, True) for view in VIEWS if view.removesuffix("Backward0") not in VIEWS_OF_CONTIGUOUS],
)
def test_views_are_replayed(view: str, channels_last: bool) -> None:
    """A replayed view has the strides of the saved tensor, on which kernels may depend."""

    def compute(m: Any, z: Tensor) -> Tensor:
        v = VIEWS[view](F.silu(z))
        seen.append(v.detach())
        return (v * m.scale.mean()).double()

    seen: list[Tensor] = []
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model, x = Program(compute).to(memory_format=layout), images().to(memory_format=layout)
    twin = converted_twin(model)
    product = twin(x).grad_fn.next_functions[0][0]
    assert product._raw_saved_self.unpack_hook is not None
    saved = product._saved_self
    torch.testing.assert_close(saved, seen[0], rtol=1e-5, atol=1e-5, check_stride=True)
    assert_same_steps(model, twin, x)


# By node type: a consumer of a norm's output of shape (2, C, 8, 8).
WEIGHT = torch.randn(16, 16, 16)
CONSUMERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ConvolutionBackward0": lambda m, z: m.conv(z),
    "AddmmBackward0": lambda m, z: m.linear(z),
    "MmBackward0": lambda m, z: z.flatten(1) @ m.weight.view(-1, 8)[: C * 64],
    "BmmBackward0": lambda m, z: z.flatten(0, 1) @ m.weight[:12, :8, :8],
    "GroupedMmBackward0": lambda m, z: F.grouped_mm(
        z.flatten(0, 2), m.weight[:2, :8, :8], offs=torch.tensor([40, 16 * C], dtype=torch.int32)
    ),
    "BaddbmmBackward0": lambda m, z: torch.baddbmm(
        z.new_zeros(12, 8, 8), z.flatten(0, 1), m.weight[:12, :8, :8]
    ),
    "AddbmmBackward0": lambda m, z: torch.addbmm(
        z.new_zeros(8, 8), z.flatten(0, 1), m.weight[:12, :8, :8]
    ),
    "AddmvBackward0": lambda m, z: torch.addmv(
        z.new_zeros(2), z.flatten(1), m.weight.flatten()[: C * 64]
    ),
    "MvBackward0": lambda m, z: z.flatten(1) @ m.weight.flatten()[: C * 64],
    "DotBackward0": lambda m, z: z.flatten() @ m.weight.flatten()[: 2 * C * 64],
    "TrilinearBackward0": lambda m, z: F.bilinear(z, z.detach() * 0.5, m.weight[:, :8, :8]),
    "ScaledDotProductFlashAttentionForCpuBackward0": lambda m, z: F.scaled_dot_product_attention(
        z, z, z
    ),
    "GridSampler2DBackward0": lambda m, z: F.grid_sample(
        z, m.weight[:2, :, :2, None].transpose(2, 3).tanh(), align_corners=False
    ),
    "GridSampler3DBackward0": lambda m, z: F.grid_sample(
        z[:, :, None], m.weight[:2, :8, None, None, :3].tanh(), align_corners=False
    ),
    "AddcmulBackward0": lambda m, z: torch.addcmul(z.new_zeros(()), z, m.weight[0, :8, :8]),
    "DivBackward0": lambda m, z: z / (2 + m.weight[0, :8, :8].cos()),
    "PowBackward0": lambda m, z: z.pow(2),
    "MulBackward0": lambda m, z: z * m.weight[0, :8, :8],
    "PreluKernelBackward0": lambda m, z: F.prelu(z, m.weight[0, 0, :C]),
    "SiluBackward0": lambda m, z: F.silu(z),
    "GeluBackward0": lambda m, z: F.gelu(z),
    "HardswishBackward0": lambda m, z: F.hardswish(z),
    "MishBackward0": lambda m, z: F.mish(z),
    "LeakyReluBackward0": lambda m, z: F.leaky_relu(z),
    "HardtanhBackward0": lambda m, z: F.relu6(z),  # which reports call ReLU6
    "HardsigmoidBackward0": lambda m, z: F.hardsigmoid(z),
    "SoftplusBackward0": lambda m, z: F.softplus(z),
    "EluBackward0": lambda m, z: F.elu(z),
    "CeluBackward0": lambda m, z: F.celu(z),
    "GluBackward0": lambda m, z: F.glu(z, 1),
    "SinBackward0": lambda m, z: z.sin(),
    "CosBackward0": lambda m, z: z.cos(),
    "ErfBackward0": lambda m, z: z.erf(),
    "AbsBackward0": lambda m, z: z.abs(),
}
NOT_TESTED_HERE = {
    "LinearBackward0",  # for nested tensors, and on other devices
    "CudnnGridSamplerBackward0",
    *(name for name in operations.OPERATIONS if "Attention" in name and "ForCpu" not in name),
}


ATTENTIONS = {name for name in operations.OPERATIONS if "Attention" in name}


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_attention_node_saves_its_output(name: str) -> None:
    assert hasattr(getattr(torch._C._functions, name), "_raw_saved_output")
    assert operations.OPERATIONS[name].saved_output == "output"


def attended(m: Any, x: Tensor) -> Tensor:
    """Map (samples, tokens, 16) to (samples, 2, tokens, 8)."""
    heads = m.first(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4).contiguous()
    return F.scaled_dot_product_attention(*heads)


def attention(compute: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Return a model that computes attention, then `compute(self, y)`.

    To concatenate the heads copies the output y.
    """
    layers = {"first": nn.Linear(16, 48), "last": nn.Linear(16, 16)}
    return Parts(lambda m, x: m.last(compute(m, attended(m, x))), **layers)


def concatenated(m: Any, y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def written_to_after_its_copy(m: Any, y: Tensor) -> Tensor:
    z = F.silu(concatenated(m, y))
    with torch.no_grad():
        y.mul_(2)
    return z


def test_copy_of_attention_output_is_recomputed_from_the_saved_output() -> None:
    """The input of the next layer is a copy of the output that attention saves itself."""
    model, x = attention(concatenated), torch.randn(2, 60, 16)
    twin = converted_twin(model)
    names = [value.name for value in recomputed(twin(x))]
    assert any(name.endswith("saved by Addmm") for name in names), names
    before, after = saved_bytes(model, x), saved_bytes(twin, x)
    assert after <= before - x.nbytes
    assert_same_steps(model, twin, x, tolerance=0)


@pytest.mark.parametrize("write", [lambda y: y.mul_(2), lambda y: y.detach().mul_(2)])
def test_modified_attention_output_raises_in_backward(write: Callable[[Tensor], Tensor]) -> None:
    """PyTorch raises in backward, and so does a converted model."""
    model = attention(lambda m, y: concatenated(m, (write(y), y)[1]))
    for each in (model, converted_twin(model)):
        output = each(torch.randn(2, 60, 16))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_attention_output_modified_after_its_copy_matches_pytorch() -> None:
    """If backward does not reach attention, gradients are right and nothing warns."""
    model, x = attention(written_to_after_its_copy), torch.randn(2, 60, 16)
    with no_warnings():
        twin = converted_twin(model)
        for _ in range(2):
            assert_same_gradients(model, twin, x, "last.weight")


class WithWeight(Program):
    def __init__(self, compute: Callable[[Any, Tensor], Any], **options: Any) -> None:
        super().__init__(compute, **options)
        self.weight = nn.Parameter(WEIGHT.clone())


@pytest.mark.parametrize("norm", ["batch", "instance"])
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_consumer_recomputes_a_norms_output(consumer: str, norm: str) -> None:
    model, x = WithWeight(CONSUMERS[consumer], norm=lambda c: norms(c)[norm]), images()
    twin = converted_twin(model)
    names = [value.name for value in recomputed(twin(x))]
    consumer_name = name_of_type(consumer).replace("Hardtanh", "ReLU6")
    assert any(name.endswith(f"saved by {consumer_name}") for name in names)
    assert_same_steps(model, twin, x)


POOLS: dict[str, Callable[[Tensor], Any]] = {
    "IndexAddBackward0": lambda y: y.new_zeros(4, *y.shape[1:]).index_add(
        0, torch.tensor([3, 1]), y
    ),
    "AvgPool2DBackward0": lambda y: F.avg_pool2d(y, 3, 2, 1),
    "AvgPool3DBackward0": lambda y: F.avg_pool3d(y, 2),
    "AdaptiveAvgPool2DBackward0": lambda y: F.adaptive_avg_pool2d(y, 3),
    "AdaptiveAvgPool3DBackward0": lambda y: F.adaptive_avg_pool3d(y, 3),
    "MaxPool2DWithIndicesBackward0": lambda y: F.max_pool2d(y, 3, 2, 1),
    "MaxPool3DWithIndicesBackward0": lambda y: F.max_pool3d(y, 2),
    "AdaptiveMaxPool2DBackward0": lambda y: F.adaptive_max_pool2d(y, 3),
    "AdaptiveMaxPool3DBackward0": lambda y: F.adaptive_max_pool3d(y, 3),
    "ReflectionPad1DBackward0": lambda y: F.pad(y[0], (1, 1), "reflect"),
    "ReflectionPad2DBackward0": lambda y: F.pad(y, (1, 1, 1, 1), "reflect"),
    "ReflectionPad3DBackward0": lambda y: F.pad(y[None], (1, 1, 1, 1, 1, 1), "reflect"),
    "ReplicationPad1DBackward0": lambda y: F.pad(y[0], (1, 1), "replicate"),
    "ReplicationPad2DBackward0": lambda y: F.pad(y, (1, 1, 1, 1), "replicate"),
    "ReplicationPad3DBackward0": lambda y: F.pad(y[None], (1, 1, 1, 1, 1, 1), "replicate"),
}


@pytest.mark.parametrize("channels_last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize("pool", POOLS)
def test_pooling_and_padding_save_only_the_shape(
    pool: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients and their strides do not depend on the values of the placeholder."""
    unpack = Shape.unpack
    monkeypatch.setattr(Shape, "unpack", lambda shape: unpack(shape).fill_(torch.nan))
    if channels_last and pool == "MaxPool3DWithIndicesBackward0":
        pytest.skip("PyTorch's max_pool3d rejects a 4-dimensional channels_last tensor")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model, x = Program(lambda m, z: POOLS[pool](m.other(z))), images()
    model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
    twin = converted_twin(model)
    output = twin(x)
    assert Shape in map(type, replaced(output))
    assert any(value.dtype is torch.int64 for value in recomputed(output)) == ("Max" in pool)
    assert_same_steps(model, twin, x, tolerance=0)
    strides = []
    for m in (model, twin):
        y = m.other(m.first(x))
        with run_engine(nn.Module(), Settings()) if m is twin else torch.enable_grad():
            pooled = POOLS[pool](y)
        (gradient,) = torch.autograd.grad(pooled.sum(), y)
        strides.append(gradient.stride())
    assert strides[0] == strides[1]


def test_every_entry_of_the_tables_has_a_test() -> None:
    """Norms are tested by `norms`, products and activations after a norm in other tests."""
    table = operations.OPERATIONS
    of_norms = {name for name in table if "Norm" in name} | {"RecomputeFunctionBackward"}
    outputs = {name for name, o in table.items() if o.output is not None and not o.is_product}
    assert outputs <= of_norms | set(OUTPUTS) | set(EXACT_OUTPUTS)
    rules = {n: o.output for n, o in table.items() if isinstance(o.output, operations.Output)}
    assert {name for name, rule in rules.items() if rule.bound is None} == set(EXACT_OUTPUTS)
    assert set(views.VIEWS) == set(VIEWS)
    assert {n for n, o in table.items() if o.reads} <= {*CONSUMERS} | NOT_TESTED_HERE | of_norms
    assert {name for name, o in table.items() if o.shape_only} == set(POOLS)


INDEX_USERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda pooled, indices: pooled,
    "the caller": lambda pooled, indices: (pooled, indices),
    "an unpooling": lambda pooled, indices: F.max_unpool2d(pooled, indices, 2),
}


@pytest.mark.parametrize("index_user", INDEX_USERS)
def test_unused_pooling_indices_are_stored_in_fewer_bits(index_user: str) -> None:

    def compute(m: Any, z: Tensor) -> Any:
        return INDEX_USERS[index_user](*F.max_pool2d(m.other(z), 2, return_indices=True))

    model, x = Program(compute), images()
    twin = converted_twin(model)
    output = twin(x)
    (indices,) = [value for value in recomputed(output) if value.dtype is torch.int64]
    (stored,) = indices.tensors()
    assert stored.dtype is (torch.int16 if index_user == "nothing" else torch.int64)
    assert indices.unpack().dtype is torch.int64
    assert saved_bytes(twin, x) <= saved_bytes(model, x)
    assert saved_allocation(lambda: twin(x)) <= saved_allocation(lambda: model(x))
    assert_same_steps(model, twin, x, tolerance=0)


POOLINGS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]] = {
    "2-D, 2^14": (lambda x: F.max_pool2d(x, 2), (128, 128), torch.int16),
    "2-D, above 2^14": (lambda x: F.max_pool2d(x, 2), (128, 130), torch.int32),
    "3-D, 2^14": (lambda x: F.max_pool3d(x, 2), (4, 64, 64), torch.int16),
    "3-D, above 2^14": (lambda x: F.max_pool3d(x, 2), (4, 64, 66), torch.int32),
    "adaptive 2-D, 2^14": (lambda x: F.adaptive_max_pool2d(x, 64), (128, 128), torch.int16),
    "adaptive 3-D, 2^14": (lambda x: F.adaptive_max_pool3d(x, 4), (4, 64, 64), torch.int16),
}


@pytest.mark.parametrize("is_batched", [True, False], ids=["batched", "one sample"])
@pytest.mark.parametrize("name", POOLINGS)
def test_largest_index_of_a_pooling_fits(name: str, is_batched: bool) -> None:
    """The index of the last element is unpacked right."""
    pool, sizes, dtype = POOLINGS[name]
    model = Parts(lambda m, x: pool(x * m.scale), scale=nn.Parameter(torch.rand(()) + 1.0))
    x = torch.randn(2, 2, *sizes) if is_batched else torch.randn(2, *sizes)
    x.view(*x.shape[: -len(sizes)], -1)[..., -1] = 10.0  # the largest of its window
    twin = converted_twin(model)
    (indices,) = [value for value in recomputed(twin(x)) if value.dtype is torch.int64]
    (stored,) = indices.tensors()
    assert stored.dtype is dtype
    assert indices.unpack().amax() == torch.tensor(sizes).prod() - 1
    assert_same_steps(model, twin, x, tolerance=0)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_": F.relu_,
    "leaky_relu": lambda z: F.leaky_relu(z, 0.2),
    "leaky_relu_": lambda z: F.leaky_relu(z, 0.2, inplace=True),
    "leaky_relu_negative": lambda z: F.leaky_relu(z, -0.2),
}
VALUE_FREE_CONSUMERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sum": lambda m, y: y + m.scale,
    "difference": lambda m, y: m.scale - y,
    "concatenation": lambda m, y: torch.cat([y, y], 1).mean((2, 3)),
    "mean": lambda m, y: y.mean((2, 3)),
    "total": lambda m, y: y.sum(),
    "pool": lambda m, y: F.avg_pool2d(y, 2),
    "view": lambda m, y: y.flatten(1).mean(1),
    "interpolation": lambda m, y: F.interpolate(y, scale_factor=2.0),
}


@pytest.mark.parametrize(
    ("mask", "consumer", "dtype"),
    [(mask, consumer, torch.float32) for mask in MASKS for consumer in VALUE_FREE_CONSUMERS]
    + [(m, "sum", d) for m in MASKS for d in (torch.float64, torch.bfloat16, torch.float16)],
)
def test_activation_before_a_value_free_consumer_saves_one_bit(
    mask: str, consumer: str, dtype: torch.dtype
) -> None:
    """One bit is enough if no consumer reads values, also for NaN, infinities and signed zeros."""

    def compute(m: Any, z: Tensor) -> Tensor:
        special = z.new_tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1.0])
        y = m.other(z)
        with torch.no_grad():
            y.view(-1)[: len(special)] = special
        return VALUE_FREE_CONSUMERS[consumer](m, MASKS[mask](y))

    model, x = Program(compute, dtype=dtype), images(dtype)
    twin = converted_twin(model)
    (value,) = [v for v in replaced(twin(x)) if isinstance(v, Bits)]
    assert value.bits.nbytes == 2 * C * 64 // 8
    assert_same_steps(model, twin, x, tolerance=0)


def test_output_that_is_saved_anyway_is_not_packed() -> None:
    """A convolution saves the activation's output before the sum, so packing would gain nothing."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.relu(m.other(z))
        return m.conv(y).mean() + (y + m.scale).mean()

    model, x = Program(compute), images()
    twin = converted_twin(model)
    assert not any(isinstance(value, Bits) for value in replaced(twin(x)))
    assert_same_steps(model, twin, x, tolerance=0)


@pytest.mark.skipif(not HAS_HOOK, reason="without the hook, nodes are seen too late to be proved")
def test_saved_output_is_a_spec_leaf() -> None:
    """The saved output of a ReLU with an unknown input is the leaf of later specs."""

    def compute(m: Any, z: Tensor) -> Tensor:
        y = F.relu(m.other(z))
        a = m.other(y)
        return m.conv(torch.cat([y, m.silu(a)], 1)[:, 2 : 2 + C])

    model, x = Program(compute), images()
    twin = converted_twin(model)
    assert "Cat, saved by Convolution" in [value.name for value in recomputed(twin(x))]
    assert_same_steps(model, twin, x, tolerance=0)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
    ],
    ids=str,
)
def test_widening_cast_is_stored_in_its_source_dtype(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """All operations that save the cast tensor or a view of it share one narrow copy."""
    narrow, wide = dtypes

    def compute(m: Any, z: Tensor) -> Tensor:
        y = m.other(z).to(narrow).to(wide)
        mean = (y * y.pow(2).mean((2, 3), keepdim=True)).mean()
        return mean + (y.transpose(2, 3) * m.scale.to(wide)).mean()

    model, x = Program(compute), images()
    twin = converted_twin(model)
    casts = [value for value in recomputed(twin(x)) if value.name.startswith("ToCopy")]
    specs = [value.spec for value in casts if value.shape.numel() == 2 * C * 64]  # not the scale
    stored = [leaf.tensor for spec in specs for leaf in spec.leaves()]
    assert [tensor.dtype for tensor in stored] == [narrow] * 3
    assert len({tensor.untyped_storage().data_ptr() for tensor in stored}) == 1
    assert_same_steps(model, twin, x, tolerance=0)


def _stored_in_the_model(m: Any, h: Tensor) -> Tensor:
    m.stored = h.detach()
    return h * m.scale


SAVERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "after": lambda m, h: h * torch.rsqrt(h.var(1, keepdim=True) + 1e-6),
    "before": lambda m, h: h.cos() * h,
    "of a view": lambda m, h: h.transpose(2, 3).cos() * h.transpose(2, 3),
    "of an alias": _stored_in_the_model,
    "expanded": lambda m, h: h[:, :, None].expand(-1, -1, 8, -1, -1) * m.scale[..., None],
    "overlapping": lambda m, h: (
        (h[:, 1:] * m.scale[:, 1:]).sum()
        + (h[:, :-1] * 2 * m.scale[:, 1:]).sum()
        + h[:, 2:] * m.scale[:, 2:]
    ),
}


@pytest.mark.parametrize("saver", SAVERS)
def test_cast_that_something_else_saves_needs_no_extra_memory(saver: str) -> None:
    """A narrower copy would add memory if the tensor itself stays alive."""

    def compute(m: Any, z: Tensor) -> Tensor:
        return SAVERS[saver](m, m.other(z).float()).sum()

    model, x = Program(compute, dtype=torch.bfloat16), images(torch.bfloat16)
    twin = converted_twin(model)
    assert_same_steps(model, twin, x, tolerance=0)
    assert saved_bytes(twin, x) <= saved_bytes(model, x)
    for m in (model, twin):
        m.stored = None
    assert saved_allocation(lambda: twin(x)) <= saved_allocation(lambda: model(x))


COMPARED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "clamp": (lambda y: y.clamp(-0.1, 0.5), "Clamp"),
    "clamp to tensors": (lambda y: y.clamp(torch.zeros(8), torch.ones(8)), "Clamp"),
    "clamp_min": (lambda y: y.clamp_min(0.1), "ClampMin"),
    "clamp_max": (lambda y: y.clamp_max(0.1), "ClampMax"),
    "amax": (lambda y: y.amax((2, 3)), "Amax"),
    "amin": (lambda y: y.amin((2, 3)), "Amin"),
    "vector norm": (lambda y: torch.linalg.vector_norm(y, dim=1), "LinalgVectorNorm"),
    "largest": (lambda y: torch.linalg.vector_norm(y, torch.inf, dim=1), "LinalgVectorNorm"),
    "squared error": (lambda y: F.mse_loss(y, torch.ones_like(y)), "MseLoss"),
    "squared error of a target": (lambda y: F.mse_loss(torch.ones_like(y), y), "MseLoss"),
    "Huber": (lambda y: F.huber_loss(y, torch.ones_like(y)), "HuberLoss"),
    "smooth L1": (lambda y: F.smooth_l1_loss(y, torch.ones_like(y)), "SmoothL1Loss"),
    "logits": (
        lambda y: F.binary_cross_entropy_with_logits(y, torch.ones_like(y)),
        "BinaryCrossEntropyWithLogits",
    ),
}


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", COMPARED)
def test_input_that_backward_compares_is_recomputed_if_that_is_exact(
    name: str, is_exact: bool
) -> None:
    """A rounded maximum would equal no element, and pass no gradient on."""
    function, consumer = COMPARED[name]

    def compute(m: Any, z: Tensor) -> Tensor:
        return function(F.silu(m.other(z) if is_exact else z)).sum() + m.conv(z).mean()

    model, x = Program(compute), images()
    twin = converted_twin(model)
    found = [value for value in recomputed(twin(x)) if value.consumer == consumer]
    assert bool(found) == is_exact
    assert_same_steps(model, twin, x, tolerance=1e-5)
