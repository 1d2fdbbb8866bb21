"""Build the CPU extension, and the CUDA extension if a toolkit and a CUDA build of torch are found.

The environment variables FORCE_CPU=1, FORCE_CUDA=1 and TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX",
"native") change this: see docs/building.md.
"""

import glob
import os
import re
import shutil
import site
import sys
from subprocess import getoutput

from setuptools import setup

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # torch 2.11; runs on all later versions
# File names in error messages are relative (csrc/...) and do not depend on the build directory.
PATHS = f"-fmacro-prefix-map={os.path.dirname(os.path.abspath(__file__))}/="
CXX_FLAGS = ["-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", PATHS]
NVCC_FLAGS = ["-O2", "-DUSE_CUDA", "--threads=0"]  # -O2 affects host code only
NVCC_FLAGS += ["-Xfatbin", "-compress-all"]  # nvcc does not compress this size by default
# Passed in the environment: torch ignores TORCH_CUDA_ARCH_LIST if the text "arch" occurs in any
# flag, as it may in a path.
NVCC_APPEND_FLAGS = f'{os.environ.get("NVCC_APPEND_FLAGS", "")} -Xcompiler "{PATHS}"'


def cuda_toolkit():
    """Return the toolkit's folder and version as nvcc reports them; None without nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    packages = [p for path in sys.path for p in glob.glob(os.path.join(path, "nvidia/cu*/bin"))]
    usual = glob.glob("/usr/local/cuda-*/bin")
    usual.sort(key=lambda path: [int(n) for n in re.findall(r"\d+", path)], reverse=True)
    search_paths = [*packages, os.environ.get("PATH", ""), "/usr/local/cuda/bin", *usual]
    search_paths = [os.path.join(home, "bin")] if home else search_paths
    nvcc = shutil.which("nvcc", path=os.pathsep.join(search_paths))
    if not nvcc:
        return None
    # nvcc may be a link or a wrapper outside of its toolkit: a dry run prints the real folder.
    dry_run = getoutput(f"'{nvcc}' --dryrun -x cu {os.devnull}")
    version = getoutput(f"'{nvcc}' --version")
    top, release = re.search(r"TOP=(.+)", dry_run), re.search(r"release (\d+\.\d+)", version)
    return (os.path.realpath(top[1].strip()), release[1]) if top and release else None


def why_not_cuda(toolkit, torch_cuda):
    """Return why no CUDA extension is built; None if it is.

    This depends on what is installed, never on whether a GPU is present.
    """
    if os.environ.get("FORCE_CPU") == "1":
        return "FORCE_CPU=1 is set"
    if torch_cuda is None:
        return "this torch is built without CUDA"
    if toolkit is None:
        return "no nvcc was found: pip install 'cuda-toolkit[nvcc,cccl]', or set CUDA_HOME"
    if toolkit[1].split(".")[0] != torch_cuda.split(".")[0]:
        return (
            f"nvcc is CUDA {toolkit[1]}, and torch is built for CUDA {torch_cuda}: use a toolkit"
            f" {torch_cuda.split('.')[0]}.x (from 13 on: pip install 'cuda-toolkit[nvcc,cccl]=="
            f"{torch_cuda}.*') or a torch for CUDA {toolkit[1]}"
        )
    return None


def major_architectures(toolkit):
    """Return the lowest architecture of each major version, for example 80 and not 86.

    Among those that both torch is built for and nvcc supports, or else all that nvcc supports.
    """
    code = getoutput(f"'{toolkit[0]}/bin/nvcc' --list-gpu-code")
    known = {int(number) for number in re.findall(r"sm_(\d+)$", code, re.MULTILINE)}
    built = {int(name[3:]) for name in torch.cuda.get_arch_list() if name[3:].isdecimal()}
    majors = {}
    for architecture in sorted(known & built or known):
        majors.setdefault(architecture // 10, architecture)
    return list(majors.values())


def architecture_flags(architectures):
    """Return nvcc's flags for machine code for each architecture, and PTX for future ones.

    From 8.0 on, all machine code is compiled from one PTX (compute_80): the kernels need no newer
    features, and generating PTX takes half of the compile time.
    """
    names = "\\,".join(f"{architecture}0" for architecture in architectures)
    old = [architecture for architecture in architectures if architecture < 80]
    new = [f"sm_{architecture}" for architecture in architectures if architecture >= 80]
    return [
        f"-DINPLACE_OPS_ARCHITECTURES={names}",
        *(f"-gencode=arch=compute_{number},code=sm_{number}" for number in old),
        f"-gencode=arch=compute_80,code=[{','.join([*new, 'compute_80'])}]",
    ]


def local_architectures():
    """Return this machine's GPU architectures in the format of TORCH_CUDA_ARCH_LIST."""
    local = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    if not local:
        sys.exit(
            "inplace_ops: TORCH_CUDA_ARCH_LIST=native needs a GPU, and torch sees none. Set the"
            ' compute capability instead: TORCH_CUDA_ARCH_LIST="9.0" for an H100 or H200.'
        )
    return ";".join(f"{major}.{minor}" for major, minor in sorted(local))


if sys.prefix != sys.base_prefix:
    # Also if the virtual environment is not activated: another ninja would compile all again.
    scripts = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
toolkit = cuda_toolkit()
if toolkit:
    os.environ["CUDA_HOME"] = toolkit[0]  # torch would guess it from nvcc's path
    os.environ["NVCC_APPEND_FLAGS"] = NVCC_APPEND_FLAGS
# An isolated build hides the environment's packages, also the torch that the kernels are for.
sys.path += [*site.getsitepackages(), site.getusersitepackages()]
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(
        f"inplace_ops: building needs torch >= 2.11 ({error}): first pip install torch"
        " 'setuptools>=77' ninja numpy, then build with --no-build-isolation."
    )
if torch.__version__ < (2, 11):
    sys.exit(f"inplace_ops: building needs torch >= 2.11, found {torch.__version__}.")
if not shutil.which((os.environ.get("CXX") or "g++").split()[0]):
    sys.exit("inplace_ops: no C++ compiler: install g++ (Debian: apt install g++) or set CXX.")

flags = {"cxx": [*CXX_FLAGS, STABLE_ABI], "nvcc": [*NVCC_FLAGS, STABLE_ABI]}
options = {"extra_compile_args": flags, "py_limited_api": True}
sources = ["csrc/library.cpp", *sorted(glob.glob("csrc/cpu/*.cpp"))]
modules = [CppExtension("inplace_ops._C", sources, **options)]
no_cuda = why_not_cuda(toolkit, torch.version.cuda)
if no_cuda and os.environ.get("FORCE_CUDA") == "1":
    sys.exit(f"inplace_ops: FORCE_CUDA=1 is set, but {no_cuda}.")
if not no_cuda:
    if os.environ.get("TORCH_CUDA_ARCH_LIST") == "native":
        os.environ["TORCH_CUDA_ARCH_LIST"] = local_architectures()
    if "TORCH_CUDA_ARCH_LIST" not in os.environ:
        flags["nvcc"] += architecture_flags(major_architectures(toolkit))
    modules.append(CUDAExtension("inplace_ops._C_cuda", ["csrc/cuda/kernels.cu"], **options))
    modules[-1].libraries.remove("cudart")  # -lcudart does not find it in NVIDIA's packages
    modules[-1].extra_objects = sorted(glob.glob(f"{toolkit[0]}/lib*/libcudart.so*"))[:1]


class IncrementalBuild(BuildExtension):
    """Compile only what has changed, also in an editable install, and print what is compiled."""

    def finalize_options(self) -> None:
        """Use a permanent build folder; an editable install would use a temporary one."""
        super().finalize_options()
        self.build_temp = os.path.join("build", "temp")

    def run(self) -> None:
        """Also put the extensions next to the sources, as an editable install does.

        Python that runs in the project's folder imports the package from there, whatever is
        installed. Extensions of an earlier build, with other kernels, are removed.
        """
        for library in glob.glob(f"{self.build_lib}/inplace_ops/*.so"):
            os.remove(library)
        super().run()
        for library in glob.glob("inplace_ops/*.so"):
            os.remove(library)
        self.copy_extensions_to_source()
        kernels = f"CPU kernels only: {no_cuda}" if no_cuda else "CPU and CUDA kernels"
        print(f"inplace_ops: built {kernels}.", flush=True)

    def build_extension(self, extension) -> None:
        """Print progress, which `pip install -v` shows."""
        number = self.extensions.index(extension) + 1
        print(
            f"inplace_ops: compiling {extension.name}, {number} of {len(self.extensions)}",
            flush=True,
        )
        super().build_extension(extension)


wheel = {"bdist_wheel": {"py_limited_api": "cp310"}}
setup(ext_modules=modules, cmdclass={"build_ext": IncrementalBuild}, options=wheel)
