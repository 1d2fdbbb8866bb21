"""The modules, and the bytes that models with them save for backward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from _support.assertions import assert_gradient, assert_identical, assert_values, random_values
from _support.cases import (
    ONE_OF_EACH_FORWARD,
    ActivationCase,
    activation_id,
    all_activations,
    call_id,
    one_of_each,
)
from torch import Tensor, nn

import inplace_ops
from inplace_ops import activations as table, saved_bytes

# By name: our module, and PyTorch's with the same arguments.
PAIRS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    entry.name: (getattr(inplace_ops, entry.name), entry.torch_module)
    for entry in table.ACTIVATIONS
    if entry.torch_inplace is not None
}
PAIRS["LeakyReLU-0.3"] = (partial(inplace_ops.LeakyReLU, 0.3), partial(nn.LeakyReLU, 0.3))
pairs = pytest.mark.parametrize(("ours", "pytorchs"), PAIRS.values(), ids=PAIRS)


@pairs
def test_repr_and_state_match_parent_class(
    ours: Callable[..., nn.Module], pytorchs: Callable[..., nn.Module]
) -> None:
    for inplace in (True, False):
        mine, parent = ours(inplace=inplace), pytorchs(inplace=inplace)
        assert isinstance(mine, type(parent))
        assert repr(mine) == repr(parent)
        assert mine.state_dict() == parent.state_dict() == {}
        assert not list(mine.parameters())
    assert ours().inplace


def test_gelu_repr_matches_parent_class_and_adds_inplace() -> None:
    for approximate in ("none", "tanh"):
        mine, parent = inplace_ops.GELU(approximate, inplace=False), nn.GELU(approximate)
        assert isinstance(mine, nn.GELU)
        assert repr(mine) == repr(parent)
        assert mine.state_dict() == {}
    assert repr(inplace_ops.GELU("tanh")) == "GELU(approximate='tanh', inplace=True)"
    with pytest.raises(ValueError, match='GELU: approximate must be "none" or "tanh"'):
        inplace_ops.GELU("erf")


def test_repr_names_non_default_arguments() -> None:
    assert repr(inplace_ops.ReLU(save="output")) == "ReLU(inplace=True, save='output')"
    assert (
        repr(inplace_ops.LeakyReLU(0.5, save="output"))
        == "LeakyReLU(negative_slope=0.5, inplace=True, save='output')"
    )
    assert (
        repr(inplace_ops.SiLU(save="derivative", bits=16))
        == "SiLU(inplace=True, save='derivative', bits=16)"
    )


@all_activations
def test_modules_and_their_copies_match_reference(
    activation: ActivationCase, device: torch.device
) -> None:
    originals = {"new": activation.module()}
    originals["deepcopy"] = copy.deepcopy(originals["new"])
    originals["pickle"] = pickle.loads(pickle.dumps(originals["new"]))
    for name, module in originals.items():
        leaf = random_values((3, 50), torch.float32, device).requires_grad_()
        x = leaf.clone()
        y = module(x)
        assert y is x, name
        expected = activation.reference(leaf)
        assert_values(activation, y, expected)
        incoming = 2 * torch.rand_like(leaf) - 1
        (actual,) = torch.autograd.grad(y, leaf, incoming)
        (wanted,) = torch.autograd.grad(expected, leaf, incoming)
        assert_gradient(activation, actual, wanted, 1.0, name)
        assert repr(module) == repr(originals["new"])
        assert type(module) is type(originals["new"])


@pytest.mark.parametrize("activation", ONE_OF_EACH_FORWARD, ids=activation_id)
def test_out_of_place_equals_pytorch(activation: ActivationCase, device: torch.device) -> None:
    module = activation.module(inplace=False)
    leaf = random_values((3, 50), torch.float32, device).requires_grad_()
    before = leaf.detach().clone()
    y = module(leaf)
    expected = activation.reference(leaf)
    assert_identical(y, expected)
    assert_identical(leaf, before)
    (actual,) = torch.autograd.grad(y.square().sum(), leaf)
    (wanted,) = torch.autograd.grad(expected.square().sum(), leaf)
    assert_identical(actual, wanted)


WRONG_ARGUMENTS: list[tuple[type[nn.Module], dict[str, object]]] = [
    (inplace_ops.ReLU, {"save": "derivative"}),
    (inplace_ops.LeakyReLU, {"save": "bits"}),
    (inplace_ops.LeakyReLU, {"negative_slope": -1.0, "save": "output"}),
    (inplace_ops.SiLU, {"save": "mask"}),
    (inplace_ops.SiLU, {"bits": 9}),
    (inplace_ops.GELU, {"save": "mask"}),
    (inplace_ops.ReLU6, {"save": "derivative"}),
    (inplace_ops.Mish, {"bits": 5}),
    (inplace_ops.SiLU, {"bits": 0}),
    (inplace_ops.SiLU, {"save": "derivative", "bits": 4}),
]


@pytest.mark.parametrize(
    ("module", "arguments"), WRONG_ARGUMENTS, ids=[call_id(*wrong) for wrong in WRONG_ARGUMENTS]
)
def test_wrong_arguments_raise_value_error(
    module: type[nn.Module], arguments: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=r"save must|bits must|negative_slope >= 0"):
        module(**arguments)


@one_of_each
def test_recompute_raises_and_names_convert(activation: ActivationCase) -> None:
    """save="recompute" was a save mode once, and a module may have been pickled then."""
    name = activation.entry.function
    removed = (
        rf'^{name}: save="recompute" was removed: inplace_ops\.convert\(model\) recomputes torch'
    )
    with pytest.raises(TypeError, match=removed):
        activation.module(save="recompute")
    module = activation.module()
    module.save = "recompute"
    for x in (torch.ones(3), torch.ones(3, requires_grad=True) * 1):
        for run in (module, partial(activation.call, save="recompute")):
            with pytest.raises(TypeError, match=removed):
                run(x)
        assert torch.equal(x, torch.ones(3))
        assert x._version == 0


@all_activations
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_saved_bytes_of_an_activation(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    leaf = torch.randn(3, 1000, dtype=dtype, device=device, requires_grad=True)
    output = leaf.numel() * leaf.element_size() if activation.saves_output else 0
    packed = activation.packed_bits[dtype] * leaf.numel() // 8
    for call in (activation.call, activation.module()):
        # mean() saves nothing, so the output is saved only if the activation itself saves it.
        assert saved_bytes(lambda x, call=call: call(x.clone()).mean(), leaf) == output + packed


@one_of_each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_saved_bytes_between_convolutions(
    activation: ActivationCase, dtype: torch.dtype, device: torch.device
) -> None:
    first = nn.Conv2d(3, 8, 3, padding=1).to(device, dtype)
    second = nn.Conv2d(8, 3, 3, padding=1).to(device, dtype)
    x = torch.randn(2, 3, 8, 8, dtype=dtype, device=device)
    elements = 2 * 8 * 8 * 8

    def between(middle: Callable[[Tensor], Tensor]) -> int:
        return saved_bytes(lambda x: second(middle(first(x))), x)

    without = between(lambda h: h)
    assert without == elements * dtype.itemsize  # the second convolution's input
    extra = activation.packed_bits[dtype] * elements // 8
    assert between(activation.call) == without + extra
    # For comparison PyTorch's in-place forms: ReLU adds nothing, SiLU adds a clone of the input.
    clone = elements * dtype.itemsize if not activation.entry.torch_saves_output else 0
    if activation.entry.allows_output(*activation.scalars):
        assert between(activation.torch_inplace) == without + clone


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(100))
        self.register_buffer("scale", torch.ones(100))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


def test_saved_bytes_excludes_parameters_buffers_and_inputs() -> None:
    x = torch.randn(100, requires_grad=True)
    other = torch.randn(100, requires_grad=True)
    linear = nn.Linear(100, 10)
    assert saved_bytes(linear, x) == 0
    assert saved_bytes(lambda value: linear(value), x) == 0  # parameters of any module
    assert saved_bytes(torch.mul, x, other) == 0
    assert saved_bytes(torch.mul, x, other=other) == 0
    assert saved_bytes(lambda pair: pair[0]["a"] * pair[1], ({"a": x}, other)) == 0
    assert saved_bytes(Scale(), x) == 0
    assert saved_bytes(torch.exp, x) == 400
    assert saved_bytes(torch.exp, torch.randn(100)) == 0


def test_saved_bytes_counts_whole_storages_once() -> None:
    x = torch.randn(10, requires_grad=True)
    wide = torch.randn(1000)
    assert saved_bytes(lambda v: v * wide[:10], x) == 4000
    assert saved_bytes(lambda v: v * wide[:10] + v * wide[10:20] + v * wide[:10], x) == 4000
    assert saved_bytes(lambda v: v.exp().sin().detach(), x) == 0
    # exp saves its output and sin its input, the same tensor; cos saves another one.
    assert saved_bytes(lambda v: v.exp().sin().cos(), x) == 80


def test_saved_bytes_with_sparse_tensor_and_lazy_module() -> None:
    lazy = nn.LazyLinear(3)
    x = torch.zeros(1000).index_fill(0, torch.arange(10), 1.0).to_sparse().requires_grad_()
    indices_and_values = 10 * 8 + 10 * 4
    assert saved_bytes(lambda t: (t * 1).relu(), x) == indices_and_values
    assert lazy.has_uninitialized_params()


def test_module_called_like_a_function_raises() -> None:
    for name in ("ReLU", "ReLU6", "SiLU", "Hardswish", "Mish"):
        function = getattr(table, name.upper()).function
        with pytest.raises(TypeError, match=rf"a module.*inplace_ops\.{function}\(x\)"):
            getattr(inplace_ops, name)(torch.ones(2))
