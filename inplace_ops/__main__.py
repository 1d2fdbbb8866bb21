"""The command line interface, `inplace-ops` or `python -m inplace_ops`.

`info` prints how the package was built, which devices are available, and whether each op works.
`analyze` prints how much activation memory `convert` would save in a model, and why other tensors
stay saved.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import torch

import inplace_ops
from inplace_ops import _ops
from inplace_ops.activations import ACTIVATIONS, Activation, Save
from inplace_ops.conversion.budget import Budget
from inplace_ops.conversion.library import LOADERS_HELP, ModelNotFoundError, load


def _self_check(activation: Activation, save: Save, device: str) -> str:
    """Compare value and gradient with PyTorch's, and return "ok" or a message with the error."""
    function = getattr(inplace_ops, activation.function)
    ours = partial(function, **activation.variant, save=save)
    inputs = torch.randn(1001, device=device, requires_grad=True)
    bits = activation.default_bits(save, inputs.dtype)
    tolerance = activation.derivative_error(save, inputs.dtype, bits) or 1e-5  # torch.testing's
    results = []
    for function in (ours, activation.torch_function):
        output = function(inputs * 1)
        (gradient,) = torch.autograd.grad(output.sum(), inputs)
        results.append((output.detach(), gradient))
    (value, gradient), (expected_value, expected_gradient) = results
    try:
        torch.testing.assert_close(value, expected_value)
        torch.testing.assert_close(gradient, expected_gradient, rtol=2e-6, atol=tolerance)
    except AssertionError as error:
        return "FAILED: " + str(error).replace("\n", " ")
    return "ok"


def info() -> int:
    """Print build and environment, check each op, and return the number of failed checks."""
    if _ops.cuda_version:
        cuda = f"yes, CUDA {_ops.cuda_version}, architectures {_ops.cuda_architectures}"
    else:
        cuda = f"no ({_ops.no_cuda})"
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
        for activation in ACTIVATIONS:
            for save in activation.save_modes:
                result = _self_check(activation, save, device)
                failed += result != "ok"
                label = " ".join([activation.function, *activation.variant.values(), save])
                print(f"{label + ' on ' + device + ':':<30}{result}")
    return failed


def analyze(arguments: argparse.Namespace) -> int:
    """Print the report of `inplace_ops.analyze` for a model of an installed library."""
    model = load(arguments.model, dict(arguments.set)).train(not arguments.eval)
    dtype = torch.long if arguments.tokens else torch.float
    example = (torch.zeros if arguments.tokens else torch.randn)(arguments.input, dtype=dtype)
    report = inplace_ops.analyze(model, example, max_ops=arguments.max_ops, memory=arguments.memory)
    report.model = arguments.model
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    if arguments.plot:
        try:
            report.plot(arguments.plot)
        except (ImportError, OSError, ValueError) as error:  # no matplotlib, folder or such format
            print(f"--plot {arguments.plot}: {error}", file=sys.stderr)
            return 1
        print(f"wrote {arguments.plot}", file=sys.stderr)  # stdout may be JSON
    return 0


def shape(text: str) -> list[int]:
    """Parse a shape such as "2,3,224,224"."""
    return [int(size) for size in text.split(",")]


def setting(text: str) -> tuple[str, Any]:
    """Parse a setting such as "hidden_size=256" into its name and its value."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def amount(text: str) -> int | float | str:
    """Parse an amount of memory such as "8GiB", "0.5" or "1000000"."""
    value: int | float | str = text
    for number in (float, int):
        with suppress(ValueError):
            value = number(text)
    try:
        Budget.of(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def main() -> int:
    """Parse the command line and run the command."""
    parser = argparse.ArgumentParser(prog="inplace-ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="print how the package was built, and check each op")
    analysis = commands.add_parser(
        "analyze", help="print what convert would do with a model, and why"
    )
    analysis.add_argument("model", help=LOADERS_HELP)
    analysis.add_argument(
        "--input", required=True, type=shape, metavar="N,C,H,W", help="the input's shape"
    )
    analysis.add_argument(
        "--set",
        nargs="+",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        help="arguments of the model's function; for transformers, of its configuration",
    )
    analysis.add_argument("--json", action="store_true", help="print the report as JSON")
    analysis.add_argument(
        "--plot", metavar="FILE", help="draw the bytes saved over the forward pass, with matplotlib"
    )
    analysis.add_argument(
        "--tokens", action="store_true", help="the input consists of token ids, all 0"
    )
    analysis.add_argument("--eval", action="store_true", help="put the model in eval mode")
    analysis.add_argument("--max-ops", type=int, help="see inplace_ops.convert")
    analysis.add_argument(
        "--memory",
        type=amount,
        metavar="8GiB",
        help="a budget for the peak: bytes, a text with a unit, or a share of PyTorch's peak",
    )
    arguments = parser.parse_args()
    if arguments.command == "info":
        return min(info(), 1)
    # As with `python -m`, MODULE:FUNCTION may name a file in the current folder.
    sys.path.insert(0, os.getcwd())
    try:
        return analyze(arguments)
    except ModelNotFoundError as error:
        analysis.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
