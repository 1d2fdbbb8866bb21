"""What it costs to recompute a tensor, in passes over memory.

One pass reads and writes the tensor's bytes once, as an elementwise operation does. `max_ops`
limits the passes that one tensor takes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# The FLOPs that a device computes in a pass over one byte, while it reads one and writes one, by
# device type and dtype. "tf32" is of float32 products that run in TF32. An unlisted device counts
# as a CPU. `benchmarks/bench_products.py` measures such numbers.
#
# - CUDA: assumed. While an H200's copies move 4.3 TB/s, its large products reach 790 TFLOP/s in 16
#   bits: 367 FLOPs in a pass over one byte. Smaller products reach less: the entry is 0.3 of it,
#   and half of that with TF32. Without TF32 it is half, and in float64 a third, of the 67 TFLOP/s
#   of NVIDIA's data sheet.
# - CPU: an order of magnitude. One with AVX-512 has about 12 in float32, 6 in float64, and 30 in
#   bfloat16, which is far slower without such instructions.
FLOPS_PER_BYTE: dict[str, Mapping[torch.dtype | str, float]] = {
    "cuda": {
        torch.bfloat16: 110.0,
        torch.float16: 110.0,
        "tf32": 55.0,
        torch.float32: 15.0,
        torch.float64: 10.0,
    },
    "cpu": dict.fromkeys((torch.bfloat16, torch.float16, torch.float32, torch.float64), 10.0),
}


def passes(flops: int, moved_bytes: int, output_bytes: int, flops_per_byte: float) -> float:
    """Return the passes over its output that a product takes: its memory's and its arithmetic's.

    Args:
        flops: Its floating point operations; a multiplication with an addition counts two.
        moved_bytes: The bytes that it reads and writes.
        output_bytes: The size of its output.
        flops_per_byte: An entry of `FLOPS_PER_BYTE`.
    """
    return moved_bytes / (2 * output_bytes) + flops / (output_bytes * flops_per_byte)


def flops_per_byte(device_type: str, dtype: torch.dtype, in_tf32: bool) -> float:
    """Return the device's entry of `FLOPS_PER_BYTE`."""
    table = FLOPS_PER_BYTE.get(device_type, FLOPS_PER_BYTE["cpu"])
    key: torch.dtype | str = "tf32" if in_tf32 and dtype is torch.float32 else dtype
    return table.get(key, table[torch.float32])
