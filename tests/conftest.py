from __future__ import annotations

import gc
import importlib
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _support.compatibility import Recorder
from _support.engine_norms import fused_rms_norm
from _support.plans import compared_plans
from _support.processes import Processes
from _support.twins import EACH_SOURCE, nodes_from

from inplace_ops import _ops
from inplace_ops.recompute import activation_modules, nodes, replace
from inplace_ops.recompute.settings import Settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compatibility", action="store_true", help="write the outcomes to compatibility.csv"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A time limit stops pytest with SIGTERM. Handle SIGTERM like Ctrl-C, so that pytest still
    # reports the failures.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # By default cuDNN's convolutions use TF32, which rounds operands to 10 mantissa bits.
    torch.backends.cudnn.allow_tf32 = False
    # With pytest-xdist only the controller process receives the outcomes of all workers.
    if config.getoption("--compatibility") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.fixture(scope="module", autouse=True)
def _earlier_objects_frozen() -> None:
    # Some tests call gc.collect(). Frozen objects are not scanned: scanning what pytest, imports
    # and compilers have allocated takes longer at each collection than many of these tests.
    gc.collect()
    gc.freeze()


def needs_gpu(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("device") == "cuda"


# The slowest files come first, so that with several workers none of them starts last.
SLOWEST_FIRST = """
    smooth_activations compile compiled_kernels host_kernels device_numerics
    compiled_memory direct_calls models values ops engine_surroundings distributed
    engine_distributed tracing opinfo engine_models engine_writes analyze_command
"""
RANKS = {f"test_{name}.py": rank for rank, name in enumerate(SLOWEST_FIRST.split())}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need a GPU where there is none, and sort the slowest files first."""
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if needs_gpu(item)])
        items[:] = [item for item in items if not needs_gpu(item)]
    items.sort(key=lambda item: RANKS.get(item.path.name, len(RANKS)))


def pytest_make_parametrize_id(val: object) -> str | None:
    if isinstance(val, (torch.dtype, torch.layout, torch.memory_format)):
        return str(val).removeprefix("torch.")
    return None


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and _ops.cuda_version is None:
        pytest.skip("inplace_ops was built without CUDA kernels")
    return torch.device(request.param)


@pytest.fixture(params=EACH_SOURCE)
def source(request: pytest.FixtureRequest) -> Iterator[str]:
    """The source of the recompute engine's nodes: PyTorch's node creation hook or module hooks."""
    with nodes_from(request.param):
        yield request.param


@pytest.fixture(scope="module")
def _one_thread() -> Iterator[None]:
    # PyTorch's norms and convolutions use several threads even for a few elements, and wait long
    # for a thread whose core is busy with another process.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _small_tensors_too(monkeypatch: pytest.MonkeyPatch, _one_thread: None) -> None:
    """Let the recompute engine replace small tensors too."""
    monkeypatch.setattr(Settings, "MIN_BYTES", 1)


@pytest.fixture
def _affines_of_any_size(monkeypatch: pytest.MonkeyPatch, _small_tensors_too: None) -> None:
    """Let activations run with the norm before them, however small their tensors are."""
    monkeypatch.setattr(activation_modules, "_AFFINE_FACTOR", 0)


@pytest.fixture(autouse=True)
def _compared_plans(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what plans repeat with the rules in all tests, unless marked `plans_alone`."""
    if nodes.creation_hook is None or request.node.get_closest_marker("plans_alone"):
        yield
        return
    with compared_plans() as differences:
        yield
    assert not differences, differences


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no product be recomputed: the test counts what other rules replace."""
    monkeypatch.setattr(replace, "facts_of", lambda *args: None)


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Inductor's compiled code, which is empty when the tests start."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def _deterministic_cudnn() -> Iterator[None]:
    """Let two runs of a model have equal gradients, and do not round products to TF32's 10 bits."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture
def _fused_rms_norm() -> Iterator[None]:
    """Run an RMS norm as one node, as PyTorch does on a GPU."""
    with fused_rms_norm():
        yield


@pytest.fixture(scope="module", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Two processes, on the CPU or with one GPU each."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    pair = Processes(2, "nccl" if request.param == "cuda" else "gloo")
    yield pair
    pair.stop()


@pytest.fixture(scope="session", autouse=True)
def _forward_mode_loaded() -> None:
    # At the first use of forward-mode AD PyTorch compiles decompositions, and issues a warning.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed PyTorch with a new value in every run; INPLACE_OPS_SEED repeats a run."""
    value = int(os.environ.get("INPLACE_OPS_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"INPLACE_OPS_SEED={value}")  # pytest shows this line if the test fails
    torch.manual_seed(value)
    return value
