"""Builds the CPU extension, and the CUDA one where a toolkit and a CUDA-built torch are found.

FORCE_CPU=1, FORCE_CUDA=1 and TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX") are honoured: see the README.
"""

import os
import re
import shutil
import subprocess
import sys

from setuptools import setup

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # of torch 2.11; runs on all later ones
CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]


def cuda_toolkit():
    """The toolkit's folder and version, as nvcc itself names them; None without nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(os.path.join(home, "bin", "nvcc") if home else "nvcc")
    if not nvcc:
        return None
    # nvcc may be a link or a wrapper far from its toolkit: the dry run names the real folder.
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    dry_run = subprocess.run(command, capture_output=True, text=True).stderr
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    top, release = re.search(r"TOP=(.+)", dry_run), re.search(r"release (\d+\.\d+)", version)
    return (os.path.realpath(top[1].strip()), release[1]) if top and release else None


def default_architectures(toolkit):
    """Those of the common GPUs that this nvcc knows, and PTX for later ones."""
    nvcc = [os.path.join(toolkit[0], "bin", "nvcc"), "--list-gpu-arch"]
    known = subprocess.run(nvcc, capture_output=True, text=True).stdout.split()
    wanted = ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"]
    return ";".join(a for a in wanted if f"compute_{a.replace('.', '')}" in known) + "+PTX"


def builds_for_cuda(toolkit, torch_cuda):
    """Decided by what is installed, never by whether a GPU is present. Says why not."""
    if os.environ.get("FORCE_CPU") == "1":
        reason = "FORCE_CPU=1 is set"
    elif torch_cuda is None:
        reason = "this torch is built without CUDA"
    elif toolkit is None:
        reason = "nvcc was not found: put it on PATH or set CUDA_HOME"
    elif toolkit[1].split(".")[0] != torch_cuda.split(".")[0]:
        sys.exit(
            f"inplace_ops: nvcc is CUDA {toolkit[1]}, torch is built for CUDA {torch_cuda}. Install"
            f" a toolkit {torch_cuda.split('.')[0]}.x, or install a torch for CUDA {toolkit[1]} and"
            " build with --no-build-isolation, or set FORCE_CPU=1 to build without CUDA kernels."
        )
    else:
        return True
    if os.environ.get("FORCE_CUDA") == "1":
        sys.exit(f"inplace_ops: FORCE_CUDA=1 is set, but {reason}.")
    print(f"inplace_ops: building the CPU kernels only: {reason}.", flush=True)
    return False


toolkit = cuda_toolkit()
if toolkit:
    os.environ["CUDA_HOME"] = toolkit[0]  # torch would guess it from where nvcc is found
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(f"inplace_ops: building needs torch >= 2.11 (pip install torch): {error}")
if torch.__version__ < (2, 11):
    sys.exit(f"inplace_ops: building needs torch >= 2.11, found {torch.__version__}.")
if not shutil.which(os.environ.get("CXX", "g++").split()[0]):
    sys.exit("inplace_ops: no C++ compiler: install g++ (Debian: apt install g++) or set CXX.")

flags = {"cxx": [*CXX_FLAGS, STABLE_ABI], "nvcc": ["-O3", "-DUSE_CUDA", STABLE_ABI]}
options = {"extra_compile_args": flags, "py_limited_api": True}
modules = [CppExtension("inplace_ops._C", ["csrc/library.cpp", "csrc/cpu/kernels.cpp"], **options)]
if builds_for_cuda(toolkit, torch.version.cuda):
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_architectures(toolkit))
    modules.append(CUDAExtension("inplace_ops._C_cuda", ["csrc/cuda/kernels.cu"], **options))
setup(
    ext_modules=modules,
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
