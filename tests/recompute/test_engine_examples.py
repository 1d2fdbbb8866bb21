"""The recompute engine by example: small models, and all that their nodes save after `convert`.

Read this file from the top to learn what the engine replaces, and by what. Each example is a model,
the bytes that autograd saves for its backward in PyTorch and after `convert`, and the list of what
the nodes of the converted model save, in the order of forward: the operation and the field of its
node, and what the field has. That is

- the name of a tensor: `x` is the model's argument, any other name the output of that module;
- the dtype and shape of a tensor without a name;
- a recompute spec, from which backward computes the tensor. `silu(conv)` is SiLU of the output of
  the module `conv`, and `affine(conv)` a norm of it, as a scale and a shift of each channel;
- how the tensor is stored smaller, exactly, for example in "1 bit per element".

Parameters and buffers are left out: they are saved as in PyTorch. Arguments of the model do not
count as saved bytes. An image has 2 samples of 8 channels of 4 x 4 pixels: 1024 bytes in float32.
The list of tokens is a 4 x 8 matrix: 128 bytes.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from _support.saved_texts import bytes_of, saved_by
from _support.twins import HAS_HOOK
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("_small_tensors_too")
needs_hook = pytest.mark.skipif(
    not HAS_HOOK, reason="before torch 2.14 the engine sees code that is not in a module late"
)


def images() -> Tensor:
    return torch.randn(2, 8, 4, 4)


def tokens() -> Tensor:
    return torch.randn(4, 8)


def layers(**named: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(named))


def test_activation_between_convolutions() -> None:
    """SiLU saves its input, so that of the second convolution is recomputed from it."""
    model = layers(conv=nn.Conv2d(8, 8, 1), act=nn.SiLU(), last=nn.Conv2d(8, 8, 1))
    x = images()
    assert saved_by(model, x) == [
        "Convolution.input: x",
        "SiLU.self: conv",
        "Convolution.input: silu(conv)",
    ]
    assert bytes_of(model, x) == (2048, 1024)


def test_write_without_a_gradient() -> None:
    """The write raises the version of SiLU's output above the one that SiLU gave it.

    SiLU of `conv` is not what the last layer has read: nothing is replaced. NOTE [Versions are
    proved].
    """

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.last = nn.Conv2d(8, 8, 1), nn.SiLU(), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.conv(x))
            with torch.no_grad():
                y.add_(1)
            return self.last(y)

    model, x = Written(), images()
    assert saved_by(model, x) == [
        "Convolution.input: x",
        "SiLU.self: conv",
        "Convolution.input: act",
    ]
    assert bytes_of(model, x) == (2048, 2048)


def test_norm_and_activation() -> None:
    """Neither the norm's output nor the activation's is saved: both follow from the norm's input.

    The activation has a node of this package, whose backward reads the norm's input, a scale and a
    shift of each channel, and what the norm's gradient needs. The anchor is one element, expanded,
    which all activations share: NOTE [The anchor].
    """
    model = layers(
        conv=nn.Conv2d(8, 8, 1), norm=nn.BatchNorm2d(8), act=nn.SiLU(), last=nn.Conv2d(8, 8, 1)
    )
    x = images()
    assert saved_by(model, x) == [
        "Convolution.input: x",
        "NativeBatchNorm.input: conv",
        "NativeBatchNorm.result1: float32[8]",  # the mean
        "NativeBatchNorm.result2: float32[8]",  # one over the standard deviation
        "SiLU.x: conv",
        "SiLU.channel_affine: float32[2, 1, 8, 1, 1]",
        "SiLU.anchor: float32[2, 8, 4, 4]",
        "SiLU.mean: float32[8]",
        "SiLU.rstd: float32[8]",
        "Convolution.input: silu(affine(conv))",
    ]
    assert bytes_of(model, x) == (3136, 1156)


@needs_hook
def test_residual_sum() -> None:
    """The sum saves nothing. ReLU saves its output, which the last convolution saves too.

    One kernel computes norm, sum and ReLU: `kernels.py`. Both consumers read one value: NOTE
    [Shared values].
    """

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.conv = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.relu, self.last = nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(self.relu(self.norm(self.conv(y)) + y))

    model, x = Residual(), images()
    assert saved_by(model, x) == [
        "Convolution.input: x",
        "Convolution.input: first",
        "NativeBatchNorm.input: conv",
        "NativeBatchNorm.result1: float32[8]",
        "NativeBatchNorm.result2: float32[8]",
        "ReLU.result: relu(add(affine(conv), first))",
        "Convolution.input: relu(add(affine(conv), first))",
    ]
    assert bytes_of(model, x) == (3136, 2176)


def test_product_that_widens() -> None:
    """`up` makes 4 numbers of each one, so it runs again in backward: NOTE [Narrow points].

    It runs once, for GELU and for the next layer. The spec reads the weight itself, without a copy:
    NOTE [Weights are proved].
    """
    model = layers(up=nn.Linear(8, 32), act=nn.GELU(), down=nn.Linear(32, 8))
    x = tokens()
    assert saved_by(model, x) == [
        "Addmm.mat1: x",
        "GELU.self: addmm(x, up.weight, up.bias)",
        "Addmm.mat1: gelu(addmm(x, up.weight, up.bias))",
    ]
    assert bytes_of(model, x) == (1024, 0)


@needs_hook
def test_concatenation_with_an_upsampling() -> None:
    """The decoder of a U-Net. A copy of `small` is stored, which is a quarter of its upsampling.

    The other part is saved anyway, as the input of the layer `down`: NOTE [Narrow copies].
    """

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.down = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 2, stride=2)
            self.small, self.up = nn.Conv2d(8, 8, 1), nn.Upsample(scale_factor=2)
            self.last = nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            skip = self.first(x)
            return self.last(torch.cat([self.up(self.small(self.down(skip))), skip], 1))

    model, x = Decoder(), images()
    assert saved_by(model, x) == [
        "Convolution.input: x",
        "Convolution.input: first",
        "Convolution.input: down",
        "Convolution.input: cat(upsample_nearest2d(<stored as its input>), first)",
    ]
    assert bytes_of(model, x) == (3328, 1536)


def test_dropout() -> None:
    """On a CPU a dropout multiplies by a tensor of zeros and twos. Tanh saves its own output."""
    model = layers(
        linear=nn.Linear(8, 8), tanh=nn.Tanh(), drop=nn.Dropout(0.5), last=nn.Linear(8, 8)
    )
    x = tokens()
    assert saved_by(model, x) == [
        "Addmm.mat1: x",
        "Tanh.result: tanh",
        "Mul.other: 1 bit per element",
        "Addmm.mat1: mul(tanh, memory_from_bits(<1 bit per element>))",
    ]
    assert bytes_of(model, x) == (384, 132)


def test_max_pooling() -> None:
    """Backward of ReLU reads signs alone, and that of pooling no values: `rewrites.py`.

    `pool` stays saved: to find the maxima again would cost more than it saves.
    """
    model = layers(
        conv=nn.Conv2d(8, 8, 1), relu=nn.ReLU(), pool=nn.MaxPool2d(2), last=nn.Conv2d(8, 8, 1)
    )
    x = images()
    assert saved_by(model, x) == [
        "Convolution.input: x",
        "ReLU.result: 1 bit per element",
        "MaxPool2DWithIndices.result1: stored as int16",  # the places of the maxima
        "MaxPool2DWithIndices.self: only its shape",
        "Convolution.input: pool",
    ]
    assert bytes_of(model, x) == (1792, 416)


def test_cast_under_autocast() -> None:
    """The norm runs in float32, on a cast of a bfloat16 tensor, which has the same values.

    The casts of the input and of the weights are autocast's own, and stay saved.
    """

    class Upcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)
            self.act, self.last = nn.SiLU(), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.first(x)
            z = self.act(self.norm(y.float()))
            with torch.autocast("cpu", torch.bfloat16):
                return self.last(z)

    model, x = Upcast(), images()
    assert saved_by(model, x) == [
        "Convolution.input: bfloat16[2, 8, 4, 4]",
        "Convolution.weight: bfloat16[8, 8, 1, 1]",
        "NativeGroupNorm.input: stored as bfloat16",
        "NativeGroupNorm.result1: float32[2, 2]",
        "NativeGroupNorm.result2: float32[2, 2]",
        "SiLU.x: stored as bfloat16",
        "SiLU.channel_affine: float32[2, 2, 8, 1, 1]",
        "SiLU.anchor: float32[2, 8, 4, 4]",
        "Convolution.input: to(silu(affine(to(<stored as bfloat16>))))",
        "Convolution.weight: bfloat16[8, 8, 1, 1]",
    ]
    assert bytes_of(model, x) == (3360, 1444)
