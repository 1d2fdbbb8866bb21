"""Worker processes that share a process group and run functions of the tests."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SECONDS = 120  # a function that runs longer counts as hanging
GRACE = 10  # seconds for the other processes to finish once one has failed


class Processes:
    """A pool of `world_size` processes, started at the first run and again after a failure."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a module-level function in every process.

        Raises:
            AssertionError: The function failed or did not return in some processes. The message has
                their tracebacks.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments, torch.initial_seed()))
        running = dict(enumerate(self._connections))
        failures: dict[int, str] = {}
        deadline = time.monotonic() + SECONDS
        while running and wait(running.values(), max(0, deadline - time.monotonic())):
            for rank in [rank for rank, connection in running.items() if connection.poll()]:
                try:
                    failure = running.pop(rank).recv()
                except EOFError:
                    self._processes[rank].join(GRACE)
                    failure = f"the process ended with code {self._processes[rank].exitcode}"
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE)
        failures |= dict.fromkeys(running, "did not return")
        if failures:
            self.stop()  # the processes may be out of sync
            raise AssertionError(
                "\n".join(f"rank {rank}: {failure}" for rank, failure in sorted(failures.items()))
            )

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        # The server imports these once, and all processes of all pools are forks of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, self.backend, store, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)


def _serve(rank: int, world_size: int, backend: str, store: str, connection: Connection) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    while True:
        function, arguments, seed = connection.recv()
        torch.manual_seed(seed)
        try:
            function(*arguments)
        except BaseException:
            connection.send(traceback.format_exc())
        else:
            connection.send(None)


def device() -> torch.device:
    """Return the device of this process."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


@functools.cache  # with two equal meshes torch.compile fails, with PyTorch's ops too
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh(device().type, shape or (dist.get_world_size(),))
