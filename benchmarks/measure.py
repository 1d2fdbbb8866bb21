"""Shared by the benchmarks: machine description, memory and time measurements, CSV files."""

from __future__ import annotations

import csv
import datetime
import functools
import gc
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no progress messages of the profiler
# A time limit sends SIGTERM. Raised as an exception, it lets a benchmark write the rows it has.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))

MIB = 2**20
RESULTS = Path(__file__).parent / "results"


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


def times_in_turn(
    steps: Mapping[str, Callable[[], Any]],
    repetitions: int,
    clock: Clock,
    after: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[float]]:
    """Return milliseconds of the steps, timed in turn; `after` follows each step, untimed."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)  # no step always follows the same one
    for _ in range(repetitions):
        for name in order.sample(list(steps), len(steps)):
            times[name].append(clock.time(steps[name])[0] / 1e3)
            after(name)
    return times


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, median, third


def ratio_quartiles(times: list[float], others: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of each time over the other time of the same repetition."""
    return quartiles([time / other for time, other in zip(times, others, strict=True)])


def time_columns(times: list[float], torch_in_place: list[float]) -> dict[str, str]:
    """Return a row's columns of milliseconds, and of their ratios to PyTorch in place."""
    first, median, third = quartiles(times)
    first_ratio, ratio, third_ratio = ratio_quartiles(times, torch_in_place)
    return {
        "median_ms": f"{median:.2f}",
        "first_quartile_ms": f"{first:.2f}",
        "third_quartile_ms": f"{third:.2f}",
        "ratio_to_torch_in_place": f"{ratio:.3f}",
        "ratio_first_quartile": f"{first_ratio:.3f}",
        "ratio_third_quartile": f"{third_ratio:.3f}",
    }


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with the first row's keys as header; write no file if there are no rows."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def written_to(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield a list for rows, and write it at the end, also after an exception."""
    rows: list[dict[str, Any]] = []
    try:
        yield rows
    finally:
        write_csv(path, rows)
        if rows:
            print(f"\nwritten to {path}")


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


def table(rows: list[list[str]]) -> str:
    """Return rows of text in aligned columns, the first row as header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
