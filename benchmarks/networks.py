"""The networks that the benchmarks train, and the blocks that they are built from.

bench_models.py trains many more models of other libraries: model_zoo.py lists them.
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import Failures, Row
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from inplace_ops.conversion.library import ModelNotFoundError, load

MakeActivation = Callable[[], nn.Module]
SILU_IN_PLACE = partial(nn.SiLU, inplace=True)
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
VOCABULARY = 1000


class ConvNormAct(nn.Sequential):
    """Convolution, norm and activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        activation: MakeActivation = SILU_IN_PLACE,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            norm(outputs),
            activation(),
        )


def chain(activation: MakeActivation, blocks: int, channels: int, kernel: int = 3) -> nn.Sequential:
    """Return blocks of a convolution, batch norm and activation."""
    each = (ConvNormAct(channels, channels, kernel, activation=activation) for _ in range(blocks))
    return nn.Sequential(*each)


def linear_chain(activation: MakeActivation, blocks: int, features: int) -> nn.Sequential:
    """Return blocks of a linear layer, layer norm and activation."""
    layers = [
        layer
        for _ in range(blocks)
        for layer in (nn.Linear(features, features), nn.LayerNorm(features), activation())
    ]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut (He et al., "Deep Residual Learning", 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: MakeActivation) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            activation(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y = self.residual(x)
        y += self.shortcut(x)
        return self.activation(y)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor that a small network computes from all channels' means."""

    def __init__(self, channels: int, squeezed: int, activation: MakeActivation) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            activation(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, channels, H, W) to the same shape."""
        return x * self.scale(x)


class InvertedResidual(nn.Module):
    """EfficientNet's block: expansion, depthwise convolution, projection (Tan, Le, 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: MakeActivation) -> None:
        super().__init__()
        wide = 4 * inputs
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            activation(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            activation(),
            SqueezeExcitation(wide, inputs // 4, activation),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.has_shortcut = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y = self.residual(x)
        if self.has_shortcut:
            y += x
        return y


def classifier(
    activation: MakeActivation,
    block: Callable[..., nn.Module],
    widths: Sequence[tuple[int, int, int]],
    channels: int = 3,
    last: int | None = None,
) -> nn.Module:
    """Return a network for small images and ten classes.

    Args:
        activation: Makes an activation.
        block: Makes a block from its inputs, outputs, stride and activation.
        widths: Inputs, outputs and stride of each block.
        channels: The images' channels.
        last: The channels of a last 1 x 1 convolution, if there is one.
    """
    layers: list[nn.Module] = [ConvNormAct(channels, widths[0][0], 3, activation=activation)]
    layers += [block(*width, activation) for width in widths]
    outputs = widths[-1][1]
    if last:
        layers.append(ConvNormAct(outputs, last, activation=activation))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last or outputs, 10)]
    return nn.Sequential(*layers, *head)


def resnet18(activation: MakeActivation) -> nn.Module:
    """Return a ResNet-18 for images of 32 x 32, as in section 4.2 of the paper.

    Its first convolution is 3 x 3, and there is no pooling after it.
    """
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    return classifier(activation, ResidualBlock, widths)


class TwoConvolutions(nn.Sequential):
    """Two convolutions, each followed by InstanceNorm and LeakyReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        activation = partial(nn.LeakyReLU, 0.01, inplace=True)
        norm = partial(nn.InstanceNorm2d, affine=True)
        super().__init__(
            ConvNormAct(inputs, outputs, 3, stride, activation, norm),
            ConvNormAct(outputs, outputs, 3, 1, activation, norm),
        )


class TimedResidual(nn.Module):
    """GroupNorm, SiLU and convolution, twice, with a time embedding between, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, embedding: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.act1, self.act2, self.act3 = nn.SiLU(), nn.SiLU(), nn.SiLU()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map (N, inputs, H, W) and (N, embedding) to (N, outputs, H, W)."""
        h = self.conv1(self.act1(self.norm1(x)))
        h = h + self.time(self.act2(time))[:, :, None, None]
        return self.conv2(self.act3(self.norm2(h))) + self.shortcut(x)


class TwoTimedResiduals(nn.Module):
    """Two residual blocks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = TimedResidual(inputs, outputs), TimedResidual(outputs, outputs)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Map (N, inputs, H, W) and (N, embedding) to (N, outputs, H, W)."""
        return self.second(self.first(x, time), time)


class SegmentationUNet(nn.Module):
    """A U-Net like nnU-Net's: InstanceNorm, LeakyReLU; strided down, transposed convolutions up."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        strides = [1] + [2] * (levels - 1)
        self.down = nn.ModuleList(map(TwoConvolutions, [3, *widths], widths, strides))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2, bias=False) for a, b in pairs)
        self.join = nn.ModuleList(TwoConvolutions(2 * b, b, 1) for _, b in pairs)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to the same shape; H and W are multiples of 2^(levels - 1)."""
        skips: list[Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class DiffusionUNet(nn.Module):
    """A U-Net as in diffusion models: residual blocks of GroupNorm and SiLU."""

    def __init__(self, width: int = 32, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.embed = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64))
        self.down = nn.ModuleList(map(TwoTimedResiduals, [width, *widths], widths))
        self.smaller = nn.ModuleList(nn.Conv2d(c, c, 3, 2, padding=1) for c in widths[:-1])
        self.middle = TwoTimedResiduals(widths[-1], widths[-1])
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.larger = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.up = nn.ModuleList(TwoTimedResiduals(2 * b, b) for _, b in pairs)
        self.norm, self.act = nn.GroupNorm(8, width), nn.SiLU()
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to the same shape, at one time; H, W are multiples of 2^(levels - 1)."""
        time = self.embed(x.new_ones(len(x), 16))
        x = self.stem(x)
        skips: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x, time)
            if i < len(self.smaller):
                skips.append(x)
                x = self.smaller[i](x)
        x = self.middle(x, time)
        for larger, block in zip(self.larger, self.up, strict=True):
            x = larger(F.interpolate(x, scale_factor=2.0))
            x = block(torch.cat([x, skips.pop()], 1), time)
        return self.head(self.act(self.norm(x)))


def rotated(x: Tensor) -> Tensor:
    """Apply rotary embeddings to queries or keys of shape (N, heads, tokens, width)."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, 10000.0**-steps)
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        return self.output(x.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """SiLU of one projection times another projection, projected back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        return self.down(self.act(self.gate(x)) * self.up(x))


class WrittenOutGELU(nn.Module):
    """GELU's tanh approximation between two projections, as an expression, not as a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        x = self.up(x)
        x = 0.5 * x * (1.0 + torch.tanh((2.0 / math.pi) ** 0.5 * (x + 0.044715 * x.pow(3))))
        return self.down(x)


class DecoderLayer(nn.Module):
    """Attention and a module with products, each after a norm and with a shortcut."""

    def __init__(
        self, width: int, heads: int, mlp: nn.Module, norm: type[nn.Module] = nn.RMSNorm
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention, self.mlp = Attention(width, heads), mlp

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TransformerBlock(nn.Module):
    """Self-attention and two linear layers with GELU, each after a layer norm and with a shortcut.

    One linear layer computes queries, keys and values, as in ViT.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        projections = self.projections(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        y = F.scaled_dot_product_attention(*projections.permute(2, 0, 3, 1, 4))
        x = x + self.output(y.transpose(1, 2).flatten(-2))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class LlamaBlocks(nn.Sequential):
    """Decoder layers like Llama's, without embedding and head."""

    def __init__(
        self, width: int = 512, hidden: int = 1376, heads: int = 8, layers: int = 4
    ) -> None:
        super().__init__(
            *(DecoderLayer(width, heads, SwiGLU(width, hidden)) for _ in range(layers))
        )


class GPTBlocks(nn.Sequential):
    """Decoder layers like those of small GPTs, without embedding and head."""

    def __init__(self, width: int = 512, heads: int = 8, layers: int = 2) -> None:
        super().__init__(
            *(
                DecoderLayer(width, heads, WrittenOutGELU(width), nn.LayerNorm)
                for _ in range(layers)
            )
        )


class LanguageModel(nn.Module):
    """A Llama-like language model that returns its loss, for which it reads a large vocabulary.

    Attributes:
        chunks: Options of `F.linear_cross_entropy`, which computes head and loss in chunks; None
            for logits of all tokens at once.
    """

    def __init__(self, vocabulary: int = 32000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers, self.norm = LlamaBlocks(width), nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.chunks: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of each next token; `tokens` is (N, length)."""
        features = self.norm(self.layers(self.embedding(tokens[:, :-1]))).flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        if self.chunks is None:
            return F.cross_entropy(self.head(features), targets)
        return F.linear_cross_entropy(features, self.head.weight, targets, options=self.chunks)


class ResidualDenseBlock(nn.Module):
    """Five convolutions that each read the outputs of all before (Wang et al., "ESRGAN", 2018)."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        outputs = [growth] * 4 + [width]
        self.convs = nn.ModuleList(
            nn.Conv2d(width + i * growth, n, 3, padding=1) for i, n in enumerate(outputs)
        )
        self.act = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, width, H, W) to the same shape."""
        parts = [x]
        for conv in self.convs[:-1]:
            parts.append(self.act(conv(torch.cat(parts, 1) if len(parts) > 1 else x)))
        return x + 0.2 * self.convs[-1](torch.cat(parts, 1))


class DenseBlocks(nn.Sequential):
    """The body of ESRGAN's generator: residual dense blocks after a convolution."""

    def __init__(self, width: int = 64, growth: int = 32, blocks: int = 6) -> None:
        dense = (ResidualDenseBlock(width, growth) for _ in range(blocks))
        super().__init__(nn.Conv2d(3, width, 3, padding=1), *dense)


class Called(nn.Module):
    """Calls a model with the arguments that a function makes from the input."""

    def __init__(self, model: nn.Module, arguments: Callable[[Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, x: Tensor) -> Any:
        """Return what the model returns."""
        return self.model(**self.arguments(x))


def dit() -> nn.Module:
    """Return a diffusion transformer (adaLN-Zero), for 4 channels of 32 x 32."""
    size = {"num_attention_heads": 6, "attention_head_dim": 64, "num_layers": 4, "sample_size": 32}
    model = load("diffusers:DiTTransformer2DModel", {**size, "in_channels": 4})

    def arguments(x: Tensor) -> dict[str, Any]:
        steps = torch.arange(len(x), device=x.device)
        return {"hidden_states": x, "timestep": steps, "class_labels": steps, "return_dict": False}

    return Called(model, arguments)


def conditional_unet() -> nn.Module:
    """Return diffusers' U-Net with cross-attention, for 4 channels of 32 x 32."""
    down, up = ["CrossAttnDownBlock2D"] * 2, ["CrossAttnUpBlock2D"] * 2
    blocks = {
        "down_block_types": (*down, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *up),
        "block_out_channels": (64, 128, 256),
        "layers_per_block": 2,
    }
    attention = {"cross_attention_dim": 128, "attention_head_dim": 8, "norm_num_groups": 16}
    model = load("diffusers:UNet2DConditionModel", {**blocks, **attention, "sample_size": 32})

    def arguments(x: Tensor) -> dict[str, Any]:
        steps, states = torch.arange(len(x), device=x.device), x.new_ones(len(x), 16, 128)
        own = {"sample": x, "timestep": steps, "encoder_hidden_states": states}
        return {**own, "return_dict": False}

    return Called(model, arguments)


def lora() -> nn.Module:
    """Return a Llama whose weights are frozen, with low-rank updates in all linear layers."""
    model = load("transformers:LlamaForCausalLM", LLAMA)
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ModelNotFoundError(f"peft: {error}") from error
    config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def qwen2() -> nn.Module:
    """Return a Qwen2 that reads sequences of different lengths: attention repeats shared keys."""

    def arguments(x: Tensor) -> dict[str, Any]:
        starts = torch.arange(len(x), device=x.device)[:, None]
        mask = torch.arange(x.shape[1], device=x.device) >= starts
        return {"input_ids": x, "attention_mask": mask.long(), "use_cache": False}

    return Called(load("transformers:Qwen2ForCausalLM", LLAMA), arguments)


def t5() -> nn.Module:
    """Return a T5 with GEGLU, whose encoder and decoder read the same tokens."""
    size = {"d_model": 512, "d_kv": 64, "d_ff": 1792, "num_layers": 2, "num_heads": 8}
    more = {"vocab_size": VOCABULARY, "feed_forward_proj": "gated-gelu"}
    model = load("transformers:T5ForConditionalGeneration", {**size, **more})
    return Called(model, lambda x: {"input_ids": x, "decoder_input_ids": x, "use_cache": False})


@dataclass(frozen=True)
class Network:
    """A network, and the shapes of its input; a shape of two dimensions is a batch of tokens.

    Attributes:
        build: Makes the network, with random weights.
        small: The input shape for counting bytes, which follow from shapes alone.
        cpu: The input shape for timing steps on a CPU; None if the network is only counted.
        cuda: The input shape for timing steps on a GPU; None if the network is not timed there.
        blocks: Class names of the modules that "checkpoint of each block" checkpoints.
    """

    build: Callable[[], nn.Module]
    small: tuple[int, ...]
    cpu: tuple[int, ...] | None = None
    cuda: tuple[int, ...] | None = None
    blocks: tuple[str, ...] = ()

    def input(self, shape: tuple[int, ...], device: str) -> Tensor:
        """Return a random input."""
        if len(shape) == 2:
            return torch.randint(VOCABULARY, shape, device=device)
        return torch.randn(shape, device=device)


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50, with the last norm's weight in each block at 0.25.

    With torchvision's initial weights, 1 there, the gradients are noise: those in bfloat16 are
    unrelated to those in float64.
    """
    network = load("torchvision:resnet50")
    for name, module in network.named_modules():
        if name.endswith(".bn3"):
            nn.init.constant_(module.weight, 0.25)
    return network


LLAMA: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
# The emulation of 16 bits has no grouped matrix products: each expert has its own.
MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
MIXTRAL |= {"experts_implementation": "eager"}
GEMMA = {**LLAMA, "head_dim": 64, "attn_implementation": "eager"}  # it caps attention scores
BERT = {**LLAMA, "intermediate_size": 2048}
del BERT["num_key_value_heads"]
GPT2 = {"n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": VOCABULARY}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}


def _images(small: int, cpu: int | None = None, cuda: int | None = None) -> dict[str, Any]:
    """Return the shapes of square images, from their sides."""
    sides = {"small": (2, small), "cpu": (4, cpu), "cuda": (32, cuda)}
    return {name: (batch, 3, side, side) for name, (batch, side) in sides.items() if side}


TOKENS: dict[str, Any] = {"small": (4, 256)}
TIMED_TOKENS = {**TOKENS, "cpu": (8, 256), "blocks": ("LlamaDecoderLayer",)}
NETWORKS = {
    "EfficientNet-B0": Network(
        partial(load, "timm:efficientnet_b0"),
        **_images(128, 224, 224),
        blocks=("DepthwiseSeparableConv", "InvertedResidual"),
    ),
    "MobileNetV2": Network(partial(load, "torchvision:mobilenet_v2"), **_images(128)),
    "ResNet-50": Network(resnet50, **_images(128, 224, 224), blocks=("Bottleneck",)),
    "YOLOv8n": Network(
        partial(load, "ultralytics:yolov8n.yaml"),
        **_images(160, 448, 640),
        blocks=("Conv", "C2f", "SPPF"),
    ),
    "DenseNet-121": Network(
        partial(load, "torchvision:densenet121"),
        **_images(128, 224),
        blocks=("_DenseBlock", "_Transition"),
    ),
    "ESRGAN blocks": Network(DenseBlocks, small=(1, 3, 64, 64)),
    "diffusion U-Net": Network(DiffusionUNet, **_images(64, 112, 128), blocks=("TimedResidual",)),
    "nnU-Net-like": Network(SegmentationUNet, **_images(96, 112, 256), blocks=("TwoConvolutions",)),
    "ViT-S/16": Network(
        partial(load, "timm:vit_small_patch16_224"), **_images(224, 224, 224), blocks=("Block",)
    ),
    "ConvNeXt-T": Network(
        partial(load, "timm:convnext_tiny"), **_images(128, 224, 224), blocks=("ConvNeXtBlock",)
    ),
    "ConvNeXt-V2": Network(partial(load, "timm:convnextv2_atto"), **_images(128)),
    "Swin-T": Network(partial(load, "timm:swin_tiny_patch4_window7_224"), **_images(224)),
    "SqueezeNet 1.1": Network(partial(load, "torchvision:squeezenet1_1"), **_images(128)),
    "Llama, 2 layers": Network(
        partial(load, "transformers:LlamaForCausalLM", LLAMA), **TIMED_TOKENS
    ),
    "Llama, LoRA": Network(lora, **TIMED_TOKENS),
    "Qwen2, padded batch": Network(qwen2, **TOKENS),
    "Gemma 2, 2 layers": Network(partial(load, "transformers:Gemma2ForCausalLM", GEMMA), **TOKENS),
    "Mixtral, 2 layers": Network(
        partial(load, "transformers:MixtralForCausalLM", MIXTRAL), **TOKENS
    ),
    "T5, 2 layers": Network(t5, **TOKENS),
    "GPT-2, 2 layers": Network(partial(load, "transformers:GPT2LMHeadModel", GPT2), **TOKENS),
    "GPT blocks": Network(GPTBlocks, small=(2, 64, 512)),
    "BERT, 2 layers": Network(partial(load, "transformers:BertForMaskedLM", BERT), **TOKENS),
    "DiT, 4 layers": Network(dit, small=(4, 4, 32, 32)),
    "conditional U-Net": Network(
        conditional_unet,
        small=(2, 4, 32, 32),
        cpu=(4, 4, 32, 32),
        blocks=("ResnetBlock2D", "BasicTransformerBlock"),
    ),
    "Llama blocks": Network(
        LlamaBlocks,
        small=(2, 64, 512),
        cpu=(4, 256, 512),
        cuda=(32, 512, 512),
        blocks=("DecoderLayer",),
    ),
}


def rows_of_networks(
    measure: Callable[[str, str, argparse.Namespace, Failures], list[Row]],
    arguments: argparse.Namespace,
    failures: Failures,
) -> Iterator[Row]:
    """Yield the rows of each network in each policy; skip networks whose library is missing."""
    for name in arguments.networks:
        for policy in arguments.policies:
            rows: list[Row] = []
            with failures.recorded(f"{name}, {policy}"):
                try:
                    rows = measure(name, policy, arguments, failures)
                except ModelNotFoundError as error:
                    print(f"{name}: skipped: {error}", flush=True)
            yield from rows


def differentiable(outputs: Any) -> list[Tensor]:
    """Return the tensors among a model's outputs that require grad."""
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]


def backward(outputs: Any) -> None:
    """Run backward from the mean square of each output, computed in float32 or wider."""
    wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in differentiable(outputs)]
    torch.autograd.backward([t.square().mean() for t in wide])
