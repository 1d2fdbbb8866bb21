"""`python -m inplace_ops info`: what was built, what is there, and whether each op works."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import inplace_ops
from inplace_ops import _ops

_CHECKS: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    ("relu_", inplace_ops.relu_, F.relu),
    ("leaky_relu_", inplace_ops.leaky_relu_, F.leaky_relu),
    ("silu_", inplace_ops.silu_, F.silu),
    ("silu_ derivative", lambda x: inplace_ops.silu_(x, save="derivative"), F.silu),
]


def _self_check(
    activation: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], device: str
) -> str:
    """Compare value and gradient with PyTorch's; "ok" or what is wrong."""
    inputs = torch.randn(1001, device=device, requires_grad=True)
    results = []
    for function in (activation, reference):
        output = function(inputs * 1)
        (gradient,) = torch.autograd.grad(output.sum(), inputs)
        results.append((output.detach(), gradient))
    (value, gradient), (expected_value, expected_gradient) = results
    try:
        torch.testing.assert_close(value, expected_value)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=2e-5)
    except AssertionError as error:
        return "FAILED: " + str(error).replace("\n", " ")
    return "ok"


def info() -> int:
    """Print the report; return the number of failed self-checks."""
    if _ops.cuda_version:
        cuda = f"yes, CUDA {_ops.cuda_version}, architectures {_ops.cuda_architectures}"
    else:
        cuda = "no" + (f" ({_ops.cuda_error})" if _ops.cuda_error else "")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "inplace_ops": inplace_ops.__version__,
        "built with torch": _ops.built_with_torch,
        "CUDA kernels": cuda,
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'no'})",
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CUDA devices": ", ".join(devices) or "none",
    }
    for key, value in lines.items():
        print(f"{key + ':':<18}{value}")

    runs_on_cuda = _ops.cuda_version is not None and torch.cuda.is_available()
    failed = 0
    for device in ["cpu", "cuda"] if runs_on_cuda else ["cpu"]:
        for name, activation, reference in _CHECKS:
            result = _self_check(activation, reference, device)
            failed += result != "ok"
            print(f"{name + ' on ' + device + ':':<26}{result}")
    return failed


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="python -m inplace_ops", description=__doc__)
    parser.add_argument("command", choices=["info"])
    parser.parse_args()
    return min(info(), 1)


if __name__ == "__main__":
    sys.exit(main())
