"""Traced programs: torch.fx, torch.export, AOTInductor, torch.jit, ONNX."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _support.assertions import assert_gradient, assert_values
from _support.cases import ONE_OF_EACH, ActivationCase, activation_id, one_of_each
from _support.marks import quick, release, slow
from _support.twins import Parts
from torch import Tensor, nn

import inplace_ops

# torch.export issues these warnings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

SOME = [
    row
    for row in ONE_OF_EACH
    if row.name in ("relu-mask", "leaky_relu-0.01-mask", "silu-output-default")
]
some = pytest.mark.parametrize("activation", SOME, ids=activation_id)


class Network(nn.Module):
    """Activations of a view of a layer's output, whose result is not used, and of the input."""

    def __init__(self, activation: ActivationCase, **arguments: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)
        self.first = activation.module(**arguments)
        self.second = activation.module(**arguments)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.first(h[:, 2:])
        h = self.drop(h * 1)
        return h.sum(1, keepdim=True) + self.second(x * 1.5)


def networks(activation: ActivationCase) -> tuple[nn.Module, nn.Module]:
    """Return a network, and the same network with PyTorch's activations."""
    ours, pytorchs = Network(activation), Network(activation)
    pytorchs.load_state_dict(ours.state_dict())
    for name in ("first", "second"):
        setattr(pytorchs, name, Parts(lambda m, x: activation.copied(x)))
    return ours, pytorchs


def assert_same(
    activation: ActivationCase,
    actual: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor], Tensor],
    differentiable: bool = True,
) -> None:
    x = torch.randn(4, 6, requires_grad=differentiable)
    results = []
    for call in (actual, expected):
        torch.manual_seed(0)  # dropout
        y = call(x)
        weight = torch.linspace(-1, 1, y.numel()).view(y.shape)
        (grad,) = torch.autograd.grad(y, x, weight) if differentiable else (y,)
        results.append((y.detach(), grad.detach()))
    torch.testing.assert_close(results[0][0], results[1][0])
    error = activation.derivative_error.get(torch.float32, 0.0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-5 + 40 * error)


@one_of_each
def test_symbolic_trace_of_model_matches_pytorch(activation: ActivationCase) -> None:
    ours, pytorchs = networks(activation)
    traced = torch.fx.symbolic_trace(ours)
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert sum(type(m) is type(ours.first) for m in map(traced.get_submodule, called)) == 2
    assert_same(activation, traced, pytorchs)
    assert_same(activation, torch.fx.symbolic_trace(traced), pytorchs)
    assert_same(activation, copy.deepcopy(traced), pytorchs)


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    ("ours", "pytorchs"),
    [
        (inplace_ops.ReLU, nn.ReLU),
        (inplace_ops.LeakyReLU, nn.LeakyReLU),
        (inplace_ops.SiLU, nn.SiLU),
    ],
)
def test_traced_graph_equals_pytorchs(
    ours: Callable[..., nn.Module], pytorchs: Callable[..., nn.Module], inplace: bool
) -> None:
    """Nodes have PyTorch's names, by which torchvision's feature extractors select them."""
    graphs = []
    for make in (ours, pytorchs):
        module = make(inplace=inplace)
        traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), module, module))
        graphs.append([(node.op, node.name, node.target) for node in traced.graph.nodes])
    assert graphs[0] == graphs[1]


def test_module_called_with_a_proxy_calls_its_function() -> None:
    """A module called with a Proxy, as in graph passes, records its function like torch.nn's."""
    graph = torch.fx.Graph()
    y = inplace_ops.ReLU()(torch.fx.Proxy(graph.placeholder("x")) * 2)
    graph.output(y.node)
    model = torch.fx.GraphModule({}, graph)
    assert model(torch.tensor([-1.0, 3.0])).tolist() == [0.0, 6.0]


@one_of_each
def test_symbolic_trace_of_function_matches_reference(activation: ActivationCase) -> None:
    def function(x: Tensor) -> Tensor:
        return activation.call(x * 2) + 1

    traced = torch.fx.symbolic_trace(function)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert getattr(inplace_ops, activation.entry.function) in called
    x = torch.randn(4, 6, requires_grad=True)
    assert_values(activation, traced(x), activation.reference(x * 2) + 1)
    (actual,) = torch.autograd.grad(traced(x).sum(), x)
    (expected,) = torch.autograd.grad(activation.reference(x * 2).sum(), x)
    assert_gradient(activation, actual, expected, 2.0)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


@pytest.mark.parametrize("activation", quick(ONE_OF_EACH, SOME, release), ids=activation_id)
@pytest.mark.parametrize(
    ("training", "strict"), [(True, False), (False, True)], ids=["train", "eval-strict"]
)
def test_exported_program_matches_pytorch(
    activation: ActivationCase, training: bool, strict: bool
) -> None:
    ours, pytorchs = (model.train(training) for model in networks(activation))
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.set_grad_enabled(training):
        program = torch.export.export(
            ours, (torch.randn(8, 6),), dynamic_shapes=({0: batch},), strict=strict
        )
    # The program runs without inplace_ops, and has PyTorch's gradients.
    assert not any("inplace_ops" in str(node.target) for node in program.graph.nodes)
    for exported in (program, saved_and_loaded(program)):
        assert_same(activation, exported.module(), pytorchs)
    if not training:
        module = program.run_decompositions().module()
        assert_same(activation, module, pytorchs, differentiable=False)


@some
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.filterwarnings("ignore:.*jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*jit.*:FutureWarning")
def test_jit_trace_matches_pytorch(activation: ActivationCase, mode: Callable[[], object]) -> None:
    ours, pytorchs = (model.eval() for model in networks(activation))
    with mode():
        traced = torch.jit.trace(ours, torch.randn(4, 6))
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    for module in (traced, torch.jit.load(buffer)):
        assert_same(activation, module, pytorchs)  # traced without a gradient, run with one


@one_of_each
@pytest.mark.filterwarnings("ignore:.*jit.*deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*jit.*:FutureWarning")
def test_jit_script_matches_eager(activation: ActivationCase) -> None:
    for inplace in (True, False):
        ours = Network(activation, inplace=inplace).eval()
        scripted = torch.jit.script(ours)
        assert "inplace_ops::" not in str(scripted.inlined_graph)
        assert_same(activation, scripted, copy.deepcopy(ours), differentiable=not inplace)
        assert type(ours.first) is type(activation.module())  # the model itself is unchanged


@slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")
@pytest.mark.filterwarnings("ignore")  # the compiler issues warnings
def test_aotinductor_matches_eager(tmp_path: Path) -> None:
    ours = nn.Sequential(
        nn.Linear(6, 8), inplace_ops.SiLU(), nn.Linear(8, 8), inplace_ops.LeakyReLU(), nn.ReLU()
    ).eval()
    x = torch.randn(4, 6)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(ours, (x,)), package_path=str(tmp_path / "model.pt2")
    )
    compiled = torch._inductor.aoti_load_package(package)
    torch.testing.assert_close(compiled(x), ours(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "dynamo"),
    [*((row, False) for row in ONE_OF_EACH), *((row, True) for row in SOME)],
    ids=lambda value: value if isinstance(value, bool) else value.name,
)
@pytest.mark.filterwarnings("ignore")  # the exporters issue warnings
def test_onnx_matches_eager(activation: ActivationCase, dynamo: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")

    model = nn.Sequential(nn.Linear(6, 8), activation.module(), nn.Linear(8, 3)).eval()
    x, path = torch.randn(4, 6), str(tmp_path / "model.onnx")
    torch.onnx.export(model, (x,), path, dynamo=dynamo, verbose=False)
    session = runtime.InferenceSession(path)
    (actual,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), model(x).detach(), rtol=1e-4, atol=1e-5)
