"""Builds the CPU extension, and the CUDA one where a toolkit and a CUDA-built torch are found.

FORCE_CPU=1, FORCE_CUDA=1 and TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX") are honoured: see the README.
"""

import glob
import os
import re
import shutil
import sys
from subprocess import getoutput

from setuptools import setup

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # of torch 2.11; runs on all later ones
# Errors name csrc/..., wherever it was built.
PATHS = f"-fmacro-prefix-map={os.path.dirname(os.path.abspath(__file__))}/="
CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", PATHS]
NVCC_FLAGS = ["-O3", "-DUSE_CUDA", "--threads=0"]
NVCC_FLAGS += ["-Xfatbin", "-compress-all"]  # nvcc alone does not at this size
# Not among the flags: torch ignores TORCH_CUDA_ARCH_LIST where one of them has an "arch", as a path
# may.
NVCC_APPEND_FLAGS = f'{os.environ.get("NVCC_APPEND_FLAGS", "")} -Xcompiler "{PATHS}"'


def cuda_toolkit():
    """The toolkit's folder and version, as nvcc itself names them; None without nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    packages = [p for path in sys.path for p in glob.glob(os.path.join(path, "nvidia/cu*/bin"))]
    usual = glob.glob("/usr/local/cuda-*/bin")
    usual.sort(key=lambda path: [int(n) for n in re.findall(r"\d+", path)], reverse=True)
    places = [*packages, os.environ.get("PATH", ""), "/usr/local/cuda/bin", *usual]
    places = [os.path.join(home, "bin")] if home else places
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if not nvcc:
        return None
    # nvcc may be a link or a wrapper far from its toolkit: the dry run names the real folder.
    dry_run = getoutput(f"'{nvcc}' --dryrun -x cu {os.devnull}")
    version = getoutput(f"'{nvcc}' --version")
    top, release = re.search(r"TOP=(.+)", dry_run), re.search(r"release (\d+\.\d+)", version)
    return (os.path.realpath(top[1].strip()), release[1]) if top and release else None


def builds_for_cuda(toolkit, torch_cuda):
    """Decided by what is installed, never by whether a GPU is present. Says why not."""
    if os.environ.get("FORCE_CPU") == "1":
        reason = "FORCE_CPU=1 is set"
    elif torch_cuda is None:
        reason = "this torch is built without CUDA"
    elif toolkit is None:
        reason = "no nvcc was found: pip install 'cuda-toolkit[nvcc,cccl]', or set CUDA_HOME"
    elif toolkit[1].split(".")[0] != torch_cuda.split(".")[0]:
        sys.exit(
            f"inplace_ops: nvcc is CUDA {toolkit[1]}, torch is built for CUDA {torch_cuda}. Use a"
            f" toolkit {torch_cuda.split('.')[0]}.x (from 13 on: pip install 'cuda-toolkit"
            f"[nvcc,cccl]=={torch_cuda}.*') or a torch for CUDA {toolkit[1]}, and build with"
            " --no-build-isolation; FORCE_CPU=1 builds without CUDA kernels."
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
    os.environ["NVCC_APPEND_FLAGS"] = NVCC_APPEND_FLAGS
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(f"inplace_ops: building needs torch >= 2.11 (pip install torch): {error}")
if torch.__version__ < (2, 11):
    sys.exit(f"inplace_ops: building needs torch >= 2.11, found {torch.__version__}.")
if not shutil.which((os.environ.get("CXX") or "g++").split()[0]):
    sys.exit("inplace_ops: no C++ compiler: install g++ (Debian: apt install g++) or set CXX.")

flags = {"cxx": [*CXX_FLAGS, STABLE_ABI], "nvcc": [*NVCC_FLAGS, STABLE_ABI]}
flags["nvcc"] += [] if "TORCH_CUDA_ARCH_LIST" in os.environ else ["-arch=all-major"]
options = {"extra_compile_args": flags, "py_limited_api": True}
sources = [
    "csrc/library.cpp",
    *(f"csrc/cpu/{name}.cpp" for name in ("forward", "backward", "recompute")),
]
modules = [CppExtension("inplace_ops._C", sources, **options)]
if builds_for_cuda(toolkit, torch.version.cuda):
    modules.append(CUDAExtension("inplace_ops._C_cuda", ["csrc/cuda/kernels.cu"], **options))
    modules[-1].libraries.remove("cudart")  # which -lcudart does not find in NVIDIA's packages
    modules[-1].extra_objects = sorted(glob.glob(f"{toolkit[0]}/lib*/libcudart.so*"))[:1]


class IncrementalBuild(BuildExtension):
    """Compiles only what has changed, in an editable install too."""

    def finalize_options(self) -> None:
        """Takes a folder that stays; an editable install's is a temporary one."""
        super().finalize_options()
        self.build_temp = os.path.join("build", "temp")


wheel = {"bdist_wheel": {"py_limited_api": "cp310"}}
setup(ext_modules=modules, cmdclass={"build_ext": IncrementalBuild}, options=wheel)
