"""Builds the CPU extension, and the CUDA one where a CUDA toolkit and a CUDA-built torch are found.

FORCE_CPU=1 leaves CUDA out, FORCE_CUDA=1 makes its absence an error, TORCH_CUDA_ARCH_LIST names the
architectures ("8.0;9.0+PTX").
"""

import os
import re
import shutil
import subprocess
import sys

from setuptools import setup

FLAGS = [
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the stable ABI of torch 2.11
    "-DPy_LIMITED_API=0x030a0000",
]
CXX_FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]


def cuda_toolkit() -> tuple[str, str] | None:
    """The toolkit's folder and version, as nvcc itself tells them; None without nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if not nvcc or not os.path.exists(nvcc):
        return None
    # nvcc may be a link or a wrapper far from its toolkit: the dry run names the real folder.
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    dry_run = subprocess.run(command, capture_output=True, text=True).stderr
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    top, release = re.search(r"TOP=(.+)", dry_run), re.search(r"release (\d+\.\d+)", version)
    return (os.path.realpath(top[1].strip()), release[1]) if top and release else None


def uses_cuda(toolkit: tuple[str, str] | None, torch_cuda: str | None) -> bool:
    """Whether to build for CUDA; says why not."""
    forced = os.environ.get("FORCE_CUDA", "0") == "1"
    if os.environ.get("FORCE_CPU", "0") == "1":
        reason = "FORCE_CPU=1 is set"
    elif toolkit is None:
        reason = "nvcc was not found (put it on PATH or set CUDA_HOME)"
    elif torch_cuda is None:
        reason = "this torch is built without CUDA"
    elif toolkit[1].split(".")[0] != torch_cuda.split(".")[0]:
        sys.exit(
            f"inplace_ops: nvcc is CUDA {toolkit[1]} and torch is built for CUDA {torch_cuda}. Install"
            f" a toolkit {torch_cuda.split('.')[0]}.x, or a torch for CUDA {toolkit[1]} and pass"
            " --no-build-isolation, or set FORCE_CPU=1 to build without CUDA kernels."
        )
    else:
        return True
    if forced:
        sys.exit(f"inplace_ops: FORCE_CUDA=1 is set, but {reason}.")
    print(f"inplace_ops: building CPU kernels only: {reason}.", flush=True)
    return False


def extensions() -> dict:
    toolkit = cuda_toolkit()
    if toolkit:
        os.environ["CUDA_HOME"] = toolkit[0]  # before torch guesses it
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        sys.exit(f"inplace_ops: building needs torch >= 2.11 (pip install torch): {error}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        sys.exit(f"inplace_ops: building needs torch >= 2.11, found {torch.__version__}.")
    if not shutil.which(os.environ.get("CXX", "c++").split()[0]) and not shutil.which("g++"):
        sys.exit("inplace_ops: no C++ compiler found: install g++ (apt install g++) or set CXX.")
    modules = [
        cpp_extension.CppExtension(
            "inplace_ops._C",
            ["csrc/library.cpp", "csrc/cpu/kernels.cpp"],
            extra_compile_args={"cxx": CXX_FLAGS + FLAGS},
            py_limited_api=True,
        )
    ]
    if uses_cuda(toolkit, torch.version.cuda):
        # Volta's successors that CUDA 13 still knows; PTX serves what comes later.
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "7.5;8.0;8.6;9.0;10.0;12.0+PTX")
        modules.append(
            cpp_extension.CUDAExtension(
                "inplace_ops._C_cuda",
                ["csrc/cuda/kernels.cu"],
                extra_compile_args={"nvcc": ["-O3", "-DUSE_CUDA", *FLAGS]},
                py_limited_api=True,
            )
        )
    return {
        "ext_modules": modules,
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extensions())
