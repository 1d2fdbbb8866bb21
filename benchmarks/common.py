"""What all benchmarks share: options, measurements, result files, and comparisons of seeds.

A benchmark yields rows. `write_results` prints each of them and writes it to the result file as
soon as it is measured, with where and when; report.py makes tables of the files. `Failures` lets
the other cases run if one fails.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import gc
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no progress messages of the profiler
# A time limit sends SIGTERM. Raised as an exception, it lets a benchmark end its processes.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))

MIB = 2**20
# Activations in place, in a network where its author has them. All ratios are to this variant.
IN_PLACE, OUT_OF_PLACE = "torch in place", "torch out of place"
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Key = TypeVar("Key")
Measured = TypeVar("Measured")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's docstring as it is."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


def add_options(parser: argparse.ArgumentParser, repetitions: int, threads: int = 2) -> None:
    """Add the options of all benchmarks that measure time or memory."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--out", type=Path, help="default: results/NAME_DEVICE.csv")


def write_results(
    name: str,
    rows_of: Callable[[argparse.Namespace, Failures], Iterable[Row]],
    arguments: argparse.Namespace,
) -> None:
    """Measure, print and write the rows, and exit with 1 if a case failed."""
    torch.set_num_threads(arguments.threads)
    failures = Failures()
    path = arguments.out or RESULTS / f"{name}_{arguments.device}.csv"
    write_csv(path, rows_of(arguments, failures), arguments.device)
    failures.exit()


@functools.cache
def machine(device: str) -> dict[str, str]:
    """Return the columns that say where and when a figure was measured."""
    if device == "cuda":
        name, driver, cuda = torch.cuda.get_device_name(), _driver(), torch.version.cuda
    else:
        name, driver, cuda = f"{_cpu_name()}, {torch.get_num_threads()} threads", None, None
    return {
        "device": name,
        "driver": driver or "none",
        "cuda": cuda or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.machine()} ({capability})"


def _commit() -> str:
    """Return the checked-out commit, with a + if sources differ from it.

    INPLACE_OPS_COMMIT overrides it, for sources that were copied without their history.
    """
    if "INPLACE_OPS_COMMIT" in os.environ:
        return os.environ["INPLACE_OPS_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always"]
    command += ["--exclude=*", "--dirty=+"]
    found = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return found.stdout.strip() if found and found.returncode == 0 else "unknown"


def _driver() -> str:
    if not shutil.which("nvidia-smi"):
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def memory_of(fn: Callable[[], Any], device: str) -> tuple[int, int]:
    """Return the peak of the bytes that `fn()` allocates, and the bytes of what it returns.

    The latter are all bytes still allocated when `fn` has returned. On CUDA the caching allocator's
    statistics count both, on the CPU the allocator's events.
    """
    gc.collect()  # garbage that is freed during the call would be subtracted
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = fn()
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            result = fn()
        events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
        allocated = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            allocated += event.nbytes()
            peak = max(peak, allocated)
    del result
    return peak, allocated


def largest_batch(run: Callable[[int], Any], first: int, limit: int) -> int:
    """Return the largest batch, to a 32nd, for which `run` allocates at most `limit` bytes."""
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        low, high = 0, first
        while _fits(run, high):
            low, high = high, 2 * high
        while high - low > max(1, high // 32):
            middle = (low + high) // 2
            low, high = (middle, high) if _fits(run, middle) else (low, middle)
        return low
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _fits(run: Callable[[int], Any], batch: int) -> bool:
    try:
        run(batch)
        fits = True
    except RuntimeError as error:
        # Where no workspace fits into memory, cuDNN finds no engine.
        if "out of memory" not in str(error) and "unable to find an engine" not in str(error):
            raise
        fits = False
    torch.cuda.empty_cache()
    return fits


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that operations read and write.

    An operation reads each of its inputs and writes each of its outputs. An in-place operation
    reads and writes the tensor that it modifies; `copy_`, `fill_` and `zero_` only write it. Views
    and operations that only allocate count nothing. An expanded tensor counts as much as its
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [t for t in tree_leaves(values) if isinstance(t, Tensor)]
            for values in ((args, kwargs), result)
        )
        written = _written(func, args)
        known = {t.untyped_storage().data_ptr() for t in inputs}
        new = [t for t in outputs if t.untyped_storage().data_ptr() not in known]
        name = func.overloadpacket.__name__
        if not (new or written) or name.startswith(("empty", "new_empty", "resize_")):
            return result
        if name.startswith("new_") or name.endswith("_like"):  # reads its input's shape alone
            inputs = []
        elif name in ("copy_", "fill_", "zero_"):
            inputs = [t for t in inputs if all(t is not w for w in written)]
        self.count += sum(map(_own_bytes, [*inputs, *new, *written]))
        return result


def _written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    pairs = zip(func._schema.arguments, args, strict=False)
    written = [v for a, v in pairs if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(written) if isinstance(t, Tensor)]


def _own_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, where an expanded dimension counts once."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(size if stride or not size else 1 for size, stride in dims)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Stop cuDNN from rounding the inputs of float32 convolutions to TF32.

    TF32 has 10 bits of mantissa. With it, a difference in the last bit before a convolution is a
    thousand times as large after it. Steps are timed with TF32, PyTorch's default.
    """
    cudnn = torch.backends.cudnn
    kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    with cudnn.flags(**kept, allow_tf32=False):
        yield


ROUNDING = 1e-7  # relative, of weights in float32


def round_weights(model: nn.Module) -> None:
    """Multiply all weights by 1 + ROUNDING times normal noise."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + ROUNDING * torch.randn_like(parameter))


class Clock:
    """Times single calls, in microseconds: by CUDA events, or by the host's clock on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            self.evicting = torch.zeros(1024 * MIB // 4, device=device)  # larger than any L2

    def time(self, fn: Callable[[], Any]) -> tuple[float, Any]:
        """Call `fn` once; return its time and its result."""
        if self.device != "cuda":
            start = time.perf_counter()
            result = fn()
            return (time.perf_counter() - start) * 1e6, result
        # Evict the L2 cache, which has the restored input. A read does it: after a write, the timed
        # call would pay for the write-back. The host runs ahead during the eviction, so that the
        # launch is not timed.
        self.evicting.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3, result


def recorded(
    calls: Sequence[Callable[[], Any]], device: str, before: Callable[[], Any] = lambda: None
) -> Callable[[], list[Any]]:
    """Return a function that makes all the calls and returns their results.

    On CUDA the function replays a graph of the calls, so that the device is timed without the
    host's launches. Each call's result has its own memory, which the next replay overwrites. One
    call runs before the capture, because loading kernels cannot be captured. `before` runs between
    that call and the capture.
    """
    if device != "cuda":
        return lambda: [call() for call in calls]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        before()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for call in calls]

    def replay() -> list[Any]:
        graph.replay()
        return results

    return replay


def in_turn(
    measures: Mapping[Key, Callable[[], Measured]],
    repetitions: int,
    warm_ups: int = 0,
    is_shuffled: bool = True,
) -> dict[Key, list[Measured]]:
    """Return what each function measures in each repetition; repetitions call all of them in turn.

    A busy machine then slows all of them alike. In random order none always follows the same one.
    """
    found: dict[Key, list[Measured]] = {key: [] for key in measures}
    order = random.Random(0)
    for repetition in range(warm_ups + repetitions):
        for key in order.sample(list(measures), len(measures)) if is_shuffled else measures:
            measured = measures[key]()
            if repetition >= warm_ups:
                found[key].append(measured)
    return found


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, median, third


def ratio_quartiles(times: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of each time over the other time of the same repetition."""
    return quartiles([time / other for time, other in zip(times, others, strict=True)])


def time_columns(times: Sequence[float], unit: str, decimals: int = 2) -> dict[str, str]:
    """Return a row's columns of times."""
    first, median, third = (f"{time:.{decimals}f}" for time in quartiles(times))
    return {
        f"median_{unit}": median,
        f"first_quartile_{unit}": first,
        f"third_quartile_{unit}": third,
    }


def ratio_columns(times: Sequence[float], torch_in_place: Sequence[float]) -> dict[str, str]:
    """Return a row's columns of the ratios to PyTorch in place, by repetition."""
    first, ratio, third = (f"{r:.3f}" for r in ratio_quartiles(times, torch_in_place))
    return {
        "ratio_to_torch_in_place": ratio,
        "ratio_first_quartile": first,
        "ratio_third_quartile": third,
    }


def write_csv(path: Path, rows: Iterable[Row], device: str) -> list[Row]:
    """Print and write each row as soon as it is measured, as a time limit may end the process.

    The first row's keys and those of `machine` are the header: other rows may lack some of them,
    and have no others. Without rows there is no file.
    """
    written: list[Row] = []
    for row in rows:
        shown = (f"{key}: {value}" for key, value in row.items() if value != "")
        print(*shown, sep=", ", flush=True)
        if "commit" not in row:  # rows of other processes have these columns
            row = row | machine(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if written else "w", newline="") as file:
            writer = csv.DictWriter(file, list(written[0] if written else row), lineterminator="\n")
            if not written:
                writer.writeheader()
            writer.writerow(row)
        written.append(row)
    if written:
        print(f"\nwritten to {path}")
    return written


class Failures:
    """Records cases that fail, mostly by wrong values, and lets the other cases run."""

    def __init__(self) -> None:
        self.cases: list[str] = []

    @contextmanager
    def recorded(self, case: str) -> Iterator[None]:
        """Run a case; if it raises, print the error and record the case."""
        try:
            yield
        except Exception as error:  # also errors of a library that only one case needs
            why = " ".join(str(error).split())
            print(f"FAILED, not timed: {case}: {type(error).__name__}: {why}", flush=True)
            self.cases.append(case)
            traceback.clear_frames(error.__traceback__)  # they keep the case's tensors alive

    def exit(self) -> None:
        """Exit with status 1 and the names of the failed cases, if there are any."""
        if self.cases:
            sys.exit(f"{len(self.cases)} not timed: {'; '.join(self.cases)}")


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the rows that `write_csv` wrote."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def values(rows: Sequence[Row], column: str) -> list[str]:
    """Return the values of a column, each once, in order."""
    return list(dict.fromkeys(row[column] for row in rows))


def by_seed(rows: Sequence[Row], column: str, **case: str) -> list[float]:
    """Return a column of the trainings of a case, ordered by seed."""
    chosen = [row for row in rows if case.items() <= row.items()]
    return [float(row[column]) for row in sorted(chosen, key=lambda row: int(row["seed"]))]
