"""Decoder layers like Llama's: RMSNorm, attention with rotary embeddings, and SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each after a norm and with a shortcut."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads), SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LlamaBlocks(nn.Sequential):
    """The decoder layers of a model, without its embedding and head."""

    def __init__(
        self, width: int = 512, hidden: int = 1376, heads: int = 8, layers: int = 4
    ) -> None:
        super().__init__(*(DecoderLayer(width, hidden, heads) for _ in range(layers)))
