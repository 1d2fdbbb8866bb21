"""Measure what products take, in passes over their output, next to what `convert` counts.

`convert` decides whether to recompute a product by the passes that it takes: those of its memory,
and those of its arithmetic by a table of FLOPs per byte (`inplace_ops/recompute/costs.py`). This
benchmark measures products of networks that widen, and a square one, which is bound by arithmetic
alone. Images are in channels_last. Each product writes about `--bytes` bytes.

passes: the time of a product over that of a copy of a tensor of its output's size, within a
repetition. passes_counted: the same by the table. flops_per_byte: the entry of the table that would
count what was measured, where arithmetic takes most of the time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import (
    MIB,
    Clock,
    Failures,
    Row,
    add_options,
    in_turn,
    parser_of,
    quartiles,
    ratio_quartiles,
    time_columns,
    write_results,
)
from torch import Tensor

from inplace_ops.recompute import costs


class Product(NamedTuple):
    """A linear layer, or a convolution of images.

    Attributes:
        inputs: The features or channels of its input.
        outputs: Those of its output.
        size: Height and width of its output; 0 for a linear layer.
        kernel: Height and width of the convolution's kernel.
    """

    inputs: int
    outputs: int
    size: int = 0
    kernel: int = 1

    @property
    def terms(self) -> int:
        """The number of terms in an element of the output."""
        return self.inputs * self.kernel**2

    def tensors(self, size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        """Return a random input and weight, for an output of about `size` bytes."""
        pixels = self.size**2 or 1
        samples = max(1, size // (self.outputs * pixels * dtype.itemsize))
        shape, weight = [samples, self.inputs], [self.outputs, self.inputs]
        if self.size:
            shape += [self.size + self.kernel - 1] * 2
            weight += [self.kernel] * 2
        x, w = (torch.randn(each, device=device).to(dtype) for each in (shape, weight))
        if self.size:
            x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
        return x, w

    def run(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""
        return F.conv2d(x, weight) if self.size else F.linear(x, weight)

    def check(self, x: Tensor, weight: Tensor, output: Tensor, eps: float) -> None:
        """Compare the last sample's output with float64.

        Its elements may be off by one rounding of relative size `eps`, and by those of a sum in at
        least float32, which add up to about the root of their number. Fast algorithms for large
        kernels, such as Winograd's, round more often.
        """
        expected = self.run(x[-1:].double(), weight.double())
        off = float((output[-1:].double() - expected).norm() / expected.norm())
        summed = torch.finfo(torch.promote_types(output.dtype, torch.float32)).eps
        if not off <= eps + (4 if self.kernel > 1 else 1) * math.sqrt(self.terms) * summed:
            raise AssertionError(f"the product is off by {off:.1e} of its norm")


PRODUCTS = {
    "square": Product(4096, 4096),
    "ResNet-50, 64 to 256 channels": Product(64, 256, 56),
    "ResNet-50, 512 to 2048 channels": Product(512, 2048, 7),
    "EfficientNet-B0, 24 to 144 channels": Product(24, 144, 56),
    "EfficientNet-B0, 112 to 672 channels": Product(112, 672, 14),
    "YOLOv8n, 16 to 32 channels, 3 x 3": Product(16, 32, 160, kernel=3),
    "ConvNeXt-T, 96 to 384": Product(96, 384),
    "ConvNeXt-T, 384 to 1536": Product(384, 1536),
    "ViT-S/16, queries, keys and values": Product(384, 1152),
    "Llama, 512 to 1376": Product(512, 1376),
    "Llama, 4096 to 11008": Product(4096, 11008),
}
TF32 = "TF32"
DTYPES = {
    "cuda": ["float32", TF32, "bfloat16", "float16", "float64"],
    "cpu": ["float32", "bfloat16", "float64"],
}
TF32_EPS = 2.0**-10  # of 10 mantissa bits
BYTES = {"cuda": 256 * MIB, "cpu": 16 * MIB}


@contextmanager
def tf32(is_allowed: bool) -> Iterator[None]:
    """Allow TF32 in convolutions and matrix products, or not."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_allowed else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=is_allowed):
            yield
    finally:
        torch.set_float32_matmul_precision(kept)


def measure(product: Product, dtype_name: str, arguments: argparse.Namespace) -> Row:
    """Verify, then return the columns of a product in a dtype."""
    is_tf32 = dtype_name == TF32
    dtype = torch.float32 if is_tf32 else getattr(torch, dtype_name)
    x, weight = product.tensors(arguments.bytes, dtype, arguments.device)
    clock = Clock(arguments.device)
    with tf32(is_tf32):
        output = product.run(x, weight)
        product.check(x, weight, output, TF32_EPS if is_tf32 else torch.finfo(dtype).eps)
        runs = {
            "copy": partial(torch.empty_like(output).copy_, output),
            "product": partial(product.run, x, weight),
        }
        timings = {key: lambda run=run: clock.time(run)[0] for key, run in runs.items()}
        times = in_turn(timings, arguments.repetitions, warm_ups=2)
    flops = 2 * output.numel() * product.terms
    passes = ratio_quartiles(times["product"], times["copy"])
    seconds, of_copy = (quartiles(times[key])[1] / 1e6 for key in ("product", "copy"))
    moved, size = x.nbytes + weight.nbytes + output.nbytes, output.nbytes
    entry = costs.flops_per_byte(arguments.device, dtype, is_tf32)
    of_arithmetic = passes[1] - costs.passes(0, moved, size, entry)
    has_entry = of_arithmetic > passes[1] / 2  # else it is a small difference of large numbers
    return {
        "input": " x ".join(map(str, x.shape)),
        "output_mib": f"{size / MIB:.1f}",
        **time_columns(times["product"], "us"),
        "teraflops": f"{flops / seconds / 1e12:.2f}",
        "copy_gigabytes_per_second": f"{2 * size / of_copy / 1e9:.1f}",
        "passes": f"{passes[1]:.2f}",
        "passes_first_quartile": f"{passes[0]:.2f}",
        "passes_third_quartile": f"{passes[2]:.2f}",
        "passes_counted": f"{costs.passes(flops, moved, size, entry):.2f}",
        "flops_per_byte": f"{flops / size / of_arithmetic:.1f}" if has_entry else "",
    }


def rows(arguments: argparse.Namespace, failures: Failures) -> Iterator[Row]:
    """Yield the rows of all products, by dtype."""
    torch.manual_seed(0)
    for dtype in arguments.dtypes:
        for name, product in PRODUCTS.items():
            with failures.recorded(f"{name}, {dtype}"):
                yield {"product": name, "dtype": dtype} | measure(product, dtype, arguments)


def main() -> None:
    """Verify, measure and write the CSV."""
    parser = parser_of(__doc__)
    add_options(parser, repetitions=15)
    parser.add_argument("--bytes", type=int, help="bytes that each product writes")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES["cuda"])
    arguments = parser.parse_args()
    arguments.bytes = arguments.bytes or BYTES[arguments.device]
    arguments.dtypes = arguments.dtypes or DTYPES[arguments.device]
    write_results("products", rows, arguments)


if __name__ == "__main__":
    main()
