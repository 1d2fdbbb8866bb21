from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import platform
import signal
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compatibility import Recorder
from processes import Processes
from sanitizers import COMPILER, FLAGS, SANITIZE
from twins import SOURCES, nodes_from

from inplace_ops import _ops
from inplace_ops.recompute import engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compatibility", action="store_true", help="write the outcomes to compatibility.csv"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A time limit ends pytest with SIGTERM: as by Ctrl-C, so that it names what has failed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # By default PyTorch rounds what a GPU's convolutions multiply to 10 bits.
    torch.backends.cudnn.allow_tf32 = False
    # With pytest-xdist the process that hands out the tests sees all outcomes.
    if config.getoption("--compatibility") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_frozen() -> None:
    # What a test collects is its own garbage: looking through what pytest, imports and compilers
    # have made each time takes longer than many of them.
    gc.collect()
    gc.freeze()


def is_of_a_gpu(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("device") == "cuda"


# Where processes share the files, what takes long is not to be left for the end.
SLOWEST_FIRST = """
    engine_writes smooth_activations compile compiled_memory host_kernels device_numerics
    direct_calls models values ops engine_surroundings analyze_command distributed
    engine_distributed tracing opinfo engine_models
"""
RANKS = {f"test_{name}.py": rank for rank, name in enumerate(SLOWEST_FIRST.split())}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU there are no tests of one alone, rather than a hundred that are skipped."""
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if is_of_a_gpu(item)])
        items[:] = [item for item in items if not is_of_a_gpu(item)]
    items.sort(key=lambda item: RANKS.get(item.path.name, len(RANKS)))


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and _ops.cuda_version is None:
        pytest.skip("inplace_ops was built without CUDA kernels")
    return torch.device(request.param)


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the recompute engine takes its nodes from."""
    with nodes_from(request.param):
        yield request.param


@pytest.fixture(scope="module")
def _one_thread() -> Iterator[None]:
    # PyTorch's norms and convolutions use several for a few elements too, and wait long for what is
    # busy elsewhere.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _small_tensors_too(monkeypatch: pytest.MonkeyPatch, _one_thread: None) -> None:
    """The recompute engine replaces small tensors too."""
    monkeypatch.setattr(engine, "MIN_BYTES", 1)


@pytest.fixture(scope="module", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Two processes: on the CPU, or with a GPU each."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    pair = Processes(2, "nccl" if request.param == "cuda" else "gloo")
    yield pair
    pair.stop()


@pytest.fixture(scope="session", autouse=True)
def _forward_mode_loaded() -> None:
    # PyTorch compiles decompositions at the first use of forward mode, with a warning of its own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Fresh random inputs in every run; INPLACE_OPS_SEED repeats one."""
    value = int(os.environ.get("INPLACE_OPS_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"INPLACE_OPS_SEED={value}")  # pytest shows it where the test fails
    torch.manual_seed(value)
    return value


def build(source: str, folder: Path, *flags: str, name: str = "") -> ModuleType:
    """Compile a pybind11 module of this folder and import it, by default by its file's name."""
    import pybind11  # none of the tests of a GPU needs it

    path = Path(__file__).with_name(source)
    name = name or path.stem
    library = folder / f"{name}.so"
    flags = (*flags, f"-DMODULE_NAME={name}")
    command = [COMPILER, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}", str(path)]
    if SANITIZE in os.environ:
        command += ["-g1", *FLAGS]
    subprocess.run([*command, "-o", str(library)], check=True)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return build("host_kernels.cpp", tmp_path_factory.mktemp("host_kernels"))


@pytest.fixture(scope="session")
def device_numerics(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModuleType]:
    """By "contracted", with sums of products rounded once, as nvcc mostly does, or "separate"."""

    @functools.cache
    def built(sums: str) -> ModuleType:
        flags = ["-O2", "-pthread", "-ffp-contract=off"]
        if sums == "contracted":
            flags = ["-O2", "-pthread", "-ffp-contract=fast"]
            if platform.machine() == "x86_64":
                if "fma" not in Path("/proc/cpuinfo").read_text().split():
                    pytest.skip("the processor has no fused multiply-add")
                flags.append("-mfma")
        name = f"device_numerics_{sums}"
        return build("device_numerics.cpp", tmp_path_factory.mktemp(name), *flags, name=name)

    return built


@pytest.fixture(scope="session")
def host_numerics(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    flags = ["-O2", "-pthread", "-DHOST_NUMERICS"]
    folder = tmp_path_factory.mktemp("host_numerics")
    return build("device_numerics.cpp", folder, *flags, name="host_numerics")
