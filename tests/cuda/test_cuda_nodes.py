"""What the recompute engine assumes of PyTorch's autograd nodes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from _support.gpu import (
    BACKENDS,
    BFLOAT,
    CONTIGUOUS,
    DOUBLE,
    FLOAT,
    HALF,
    each_backend,
    in_both_formats,
    on_a_gpu,
    only,
)
from _support.norm_cases import node_of
from _support.twins import nodes_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import inplace_ops
from inplace_ops.recompute import affine, nodes, norms
from inplace_ops.recompute.calls import Affine
from inplace_ops.recompute.operations import OPERATIONS
from inplace_ops.recompute.packed import Recomputed
from inplace_ops.recompute.specs import Leaf
from inplace_ops.recompute.verify import difference

pytestmark = on_a_gpu

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


# The tensors that a norm's node saves, and the output that the engine recomputes from them.


class Case(NamedTuple):
    """A norm, its input, and the expected autograd node.

    Attributes:
        make: Returns the module.
        shape: The shape of the input.
        dtype: The dtype of the input.
        weights: The dtype of the module's parameters.
        node: The name of the node.
        statistics: The dtype of mean and rstd; 16 bits are too coarse to compute the output from.
        cudnn: Whether cuDNN may be used.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    weights: torch.dtype
    node: str
    statistics: torch.dtype = FLOAT
    cudnn: bool = True

    def module(self, device: torch.device) -> nn.Module:
        """Return the module, with random parameters and running statistics."""
        module = self.make().to(device, self.weights)
        for name, state in module.state_dict().items():
            if state.is_floating_point():
                state.uniform_(0.5 if name in ("weight", "running_var") else -1.5, 1.5)
        return module

    def input(
        self, device: torch.device, memory_format: torch.memory_format = CONTIGUOUS
    ) -> Tensor:
        """Return a random input that an operation has made, as in a model."""
        x = (torch.randn(self.shape, device=device) + 0.4).to(self.dtype)
        if x.dim() == 4:
            x = x.contiguous(memory_format=memory_format)
        return x.requires_grad_() * 1

    def run(
        self,
        device: torch.device,
        memory_format: torch.memory_format = CONTIGUOUS,
        training: bool = True,
    ) -> tuple[nn.Module, Tensor, Tensor]:
        """Run the module; return the module, its input and its output."""
        module, x = self.module(device).train(training), self.input(device, memory_format)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.backends.cudnn, "enabled", self.cudnn)
            return module, x, module(x)


IMAGES = (4, 16, 12, 12)
ROWS = (4, 9, 64)
CUDNN, NATIVE = "CudnnBatchNormBackward0", "NativeBatchNormBackward0"
GROUP, LAYER = "NativeGroupNormBackward0", "NativeLayerNormBackward0"


def batch(
    dtype: torch.dtype,
    weights: torch.dtype,
    node: str,
    statistics: torch.dtype = FLOAT,
    cudnn: bool = True,
    **arguments: Any,
) -> Case:
    return Case(
        lambda: nn.BatchNorm2d(16, eps=1e-3, **arguments),
        *(IMAGES, dtype, weights, node, statistics, cudnn),
    )


def group(dtype: torch.dtype, statistics: torch.dtype, **arguments: Any) -> Case:
    return Case(
        lambda: nn.GroupNorm(4, 16, eps=1e-3, **arguments),
        *(IMAGES, dtype, dtype, GROUP, statistics),
    )


def instance(dtype: torch.dtype, node: str, **arguments: Any) -> Case:
    return Case(
        lambda: nn.InstanceNorm2d(16, eps=1e-3, **arguments),
        *(IMAGES, dtype, FLOAT, node),
    )


def layer(dtype: torch.dtype, statistics: torch.dtype = FLOAT, **arguments: Any) -> Case:
    return Case(
        lambda: nn.LayerNorm(64, eps=1e-3, **arguments),
        *(ROWS, dtype, dtype, LAYER, statistics),
    )


CASES: dict[str, Case] = {
    "batch": batch(FLOAT, FLOAT, CUDNN),
    "batch_double": batch(DOUBLE, DOUBLE, CUDNN, DOUBLE),
    "batch_half": batch(HALF, FLOAT, CUDNN),
    "batch_bfloat": batch(BFLOAT, FLOAT, NATIVE),
    "batch_all_bfloat": batch(BFLOAT, BFLOAT, NATIVE),
    "batch_without_cudnn": batch(FLOAT, FLOAT, NATIVE, cudnn=False),
    "batch_half_without_cudnn": batch(HALF, FLOAT, NATIVE, cudnn=False),
    "batch_not_affine": batch(FLOAT, FLOAT, NATIVE, affine=False),
    "batch_no_statistics": batch(FLOAT, FLOAT, CUDNN, track_running_stats=False),
    "batch_1d": Case(lambda: nn.BatchNorm1d(64, eps=1e-3), (32, 64), FLOAT, FLOAT, NATIVE),
    "batch_3d": Case(lambda: nn.BatchNorm3d(8, eps=1e-3), (2, 8, 6, 6, 6), FLOAT, FLOAT, CUDNN),
    "instance": instance(FLOAT, CUDNN, affine=True),
    "instance_half": instance(HALF, CUDNN, affine=True),
    "instance_bfloat": instance(BFLOAT, NATIVE, affine=True),
    "instance_not_affine": instance(FLOAT, NATIVE),
    "group": group(FLOAT, FLOAT),
    "group_double": group(DOUBLE, DOUBLE),
    "group_not_affine": group(FLOAT, FLOAT, affine=False),
    "group_half": group(HALF, HALF),
    "group_bfloat": group(BFLOAT, BFLOAT),
    "layer": layer(FLOAT),
    "layer_double": layer(DOUBLE, DOUBLE),
    "layer_not_affine": layer(FLOAT, elementwise_affine=False),
    "layer_half": layer(HALF),
    "layer_bfloat": layer(BFLOAT),
}
each_case_in_both_formats = in_both_formats({name: case.shape for name, case in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_node_saves_what_the_engine_reads(name: str, device: torch.device) -> None:
    """The engine knows the node, and its saved input and weight are the tensors themselves."""
    case = CASES[name]
    module, x, z = case.run(device)
    node = node_of(z)
    found = type(node).__name__
    assert found in norms.NORMS, f"the engine does not know {found} and recomputes nothing from it"
    assert found == case.node
    for field in ("input", "weight"):
        assert nodes.Field(node, field).is_itself, field
    saved = nodes.saved_tensor(node, "input")
    assert saved is not None
    assert saved.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), (
        f"the node saves a copy of its input: {tuple(saved.shape)}, strides {saved.stride()}, "
        f"of {tuple(x.shape)}, strides {x.stride()}"
    )
    weight = nodes.saved_tensor(node, "weight")
    if isinstance(module, nn.InstanceNorm2d):
        expected = None if module.weight is None else module.weight.repeat(x.size(0))
        assert (weight is None) == (expected is None)
        assert expected is None or torch.equal(weight, expected)
    else:
        assert weight is module.weight, "a saved weight does not unpack as the parameter itself"
    output = z if z._base is None else z._base
    assert nodes.output_shape(node, 0) == output.shape
    assert nodes.output_dtype(node, 0) is output.dtype is case.dtype
    assert nodes.output_device(node, 0) == output.device
    assert norms.can_compute(node) == (case.statistics.itemsize > 2)


def recompute_output(node: Any, z: Tensor, parameters: norms.Parameters) -> tuple[str, str | None]:
    """Recompute a norm's output as the engine does.

    Returns:
        The method, "affine" or "rerun", and the difference from z, or None if it is within the
        rounding that the engine allows.
    """
    x = nodes.saved_tensor(node, "input")
    assert x is not None
    if norms.can_compute(node):
        method = "affine"
        spec: Any = Affine(
            Leaf(x), affine.affine_of(node, parameters, norms.statistics_of(node)), z.dtype
        )
        value = Recomputed(spec, z, "norm", "test")
        return method, difference(value, z)
    facts = affine.NormFacts()
    facts.parameters, facts.eps = parameters, 1e-3
    rerun = facts.rerun(node)
    assert rerun is not None
    with torch.no_grad():
        rerun_z = rerun(x.detach())
    return "rerun", None if torch.equal(rerun_z, z) else f"{(rerun_z - z).abs().max():.3g}"


@each_case_in_both_formats
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_recomputed_output_is_within_a_rounding(
    name: str, training: bool, memory_format: torch.memory_format, device: torch.device
) -> None:
    """The recomputed output is within the engine's bound; bit-exact if statistics have 16 bits."""
    case = CASES[name]
    module, _, z = case.run(device, memory_format, training)
    node, is_instance_norm = node_of(z), isinstance(module, nn.InstanceNorm2d)
    with torch.no_grad():
        parameters = (
            norms.repeated_parameters_of(node)
            if is_instance_norm and module.weight is not None
            else norms.parameters_of_module(node, module)
        )
        assert parameters is not None, [type(edge).__name__ for edge, _ in node.next_functions]
        output = (z if z._base is None else z._base).detach()
        method, found = recompute_output(node, output, parameters)
        assert found is None, f"{method}: differs by {found}"


# RMS norms.


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "not_affine"])
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
def test_rms_norm_output_is_recomputed_from_its_node(
    dtype: torch.dtype, affine: bool, device: torch.device
) -> None:
    """RMSNorm has one node, which saves what its output is recomputed from."""
    module = nn.RMSNorm(64, eps=1e-3, elementwise_affine=affine).to(device, dtype)
    if affine:
        nn.init.uniform_(module.weight, -1.5, 1.5)
    x = torch.randn(4, 9, 64, device=device, dtype=dtype, requires_grad=True) * 1
    z = module(x)
    node = z.grad_fn
    assert type(node).__name__ == "FusedRmsNormBackward0"
    parameters = norms.parameters_of(node)
    assert parameters is not None
    assert parameters.weight is module.weight
    assert parameters.bias is None
    method, found = recompute_output(node, z.detach(), parameters)
    assert found is None, f"{method}: differs by {found}"
    assert node._saved_input.data_ptr() == x.data_ptr()
    rstd = node._saved_result1
    assert (rstd.dtype, tuple(rstd.shape)) == (FLOAT, (4, 9, 1))
    expected = (x.detach().double().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-4, atol=1e-4)
    edges = [type(producer).__name__ for producer, _ in node.next_functions]
    assert edges == ["MulBackward0", "AccumulateGrad" if affine else "NoneType"]


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_linear_after_rms_norm_saves_a_spec(dtype: torch.dtype, device: torch.device) -> None:
    """A linear layer saves a recompute spec instead of the RMS norm's output."""
    model = nn.Sequential(nn.Linear(64, 512), nn.RMSNorm(512), nn.Linear(512, 8))
    model.to(device, dtype)
    report = inplace_ops.convert(model, torch.randn(256, 64, device=device, dtype=dtype))
    assert ("2", "recomputed") in {(row.module, row.how) for row in report.replaced}, str(report)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_autocast_runs_an_rms_norm_as_one_node(dtype: torch.dtype, device: torch.device) -> None:
    """From torch 2.12 on autocast runs RMS norms in float32, as one node; before, as many nodes.

    Before, the input has 16 bits and the weight is float32, and their promoted dtype applies.
    """
    module = nn.RMSNorm(64).to(device)
    linear = nn.Linear(64, 64, device=device)
    with torch.autocast(device.type, dtype):
        z = module(linear(torch.randn(4, 9, 64, device=device)))
    found = [type(node).__name__ for node in nodes_of(z)]
    if TORCH >= (2, 12):
        assert (found[0], z.dtype) == ("FusedRmsNormBackward0", FLOAT), found
        assert z.grad_fn._saved_result1.dtype is FLOAT
    else:
        assert "FusedRmsNormBackward0" not in found, (z.dtype, found)


# Attention.


@each_backend
def test_attention_saves_query_key_and_value_themselves(
    backend: SDPBackend, device: torch.device
) -> None:
    inputs = {
        field: torch.randn(2, 4, 64, 64, device=device, dtype=BFLOAT, requires_grad=True) * 1
        for field in ("query", "key", "value")
    }
    with only(backend):
        node = F.scaled_dot_product_attention(*inputs.values()).grad_fn
    assert type(node).__name__ == BACKENDS[backend]
    assert OPERATIONS[type(node).__name__].reads == tuple(inputs)
    for field, tensor in inputs.items():
        saved = nodes.saved_tensor(node, field)
        assert saved is not None, field
        assert saved.data_ptr() == tensor.data_ptr(), f"{field} is saved as a copy"
