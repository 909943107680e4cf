"""What the bench compares, each as something that can be asked for a measurement at any time."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "build" / "tests" / "bench"
DAEMON = Path(sys.executable).with_name("gradsyncd")

Size = tuple[int, int]  # bytes, iterations
Medians = dict[int, float]  # bytes: seconds


class BenchError(Exception):
    """A contender did not do its part; the text says which and why."""


class Daemon:
    """A gradsyncd of the bench's own, at a socket that its trainers find in the environment."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-bench-")
        self.socket = str(Path(self._folder.name) / "gradsyncd.sock")
        self._log = Path(self._folder.name) / "log"
        start = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [DAEMON, f"--socket={self.socket}"], stdin=subprocess.DEVNULL, stderr=log
            )
        self._wait_until_it_accepts(start + 10)
        self.start_seconds = time.perf_counter() - start

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def private_bytes(self) -> int:
        """Memory that the daemon shares with nobody."""
        rollup = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        lines = [line.split() for line in rollup.splitlines() if line.startswith("Private_")]
        return sum(1024 * int(line[1]) for line in lines)

    def _wait_until_it_accepts(self, deadline: float) -> None:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                if probe.connect_ex(self.socket) == 0:
                    return
            if self._process.poll() is not None or time.perf_counter() > deadline:
                self._process.kill()
                raise BenchError(f"gradsyncd does not start:\n{self._log.read_text()}")
            time.sleep(0.0005)


def measure_start(times: int) -> tuple[float, int]:
    """A fresh daemon: the median seconds until it accepts, and its private bytes when idle."""
    seconds, private = [], []
    for _ in range(times):
        with Daemon() as daemon:
            seconds.append(daemon.start_seconds)
            time.sleep(0.2)  # what it does after the start is done by then
            private.append(daemon.private_bytes())
    return statistics.median(seconds), max(private)


def program(name: str, ranks: int, sizes: list[Size], environment: dict[str, str]) -> Medians:
    """Runs one of the C++ programs of this folder (measurement.h)."""
    arguments = [str(ranks), *(f"{size}:{iterations}" for size, iterations in sizes)]
    launcher: list[str] = []
    if name == "mpi_bench":
        launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
    result = subprocess.run(
        [*launcher, str(PROGRAMS / name), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=600,
        check=False,
    )
    if result.returncode != 0:
        raise BenchError(f"{name} failed:\n{result.stdout}{result.stderr}")
    rows = [line.split() for line in result.stdout.splitlines()]
    return {int(size): float(seconds) for size, seconds in rows}


def has_mpi() -> bool:
    return (PROGRAMS / "mpi_bench").exists() and shutil.which("mpirun") is not None


class TorchWorkers:
    """The ranks of torch_worker.py."""

    def __init__(self, ranks: int, layers: int, environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        shared = os.environ | environment
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("torch_worker.py"), str(layers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> TorchWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._ask("close")
        for process in self._processes:
            if error is not None:
                process.kill()
            process.communicate()

    def all_reduce(self, backend: str, sizes: list[Size]) -> Medians:
        medians = self._ask("all_reduce", backend=backend, sizes=sizes)[0]
        return {size: seconds for (size, _), seconds in zip(sizes, medians, strict=True)}

    def step(self, mode: str, set_to_none: bool, count: int) -> float:
        """The median seconds from when all ranks begin a step until the last one has done it."""
        by_rank = self._ask("steps", mode=mode, set_to_none=set_to_none, count=count)
        return statistics.median(map(max, zip(*by_rank, strict=True)))

    def memory(self) -> dict[str, int]:
        by_rank: list[dict[str, int]] = self._ask("memory")
        return max(by_rank, key=lambda answer: answer["shared"])

    def _ask(self, do: str, **arguments: Any) -> list[Any]:
        command = json.dumps({"do": do, **arguments})
        for process in self._processes:
            assert process.stdin is not None
            print(command, file=process.stdin, flush=True)
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise BenchError(f"a torch worker ended during '{do}'; its output is above")
            answers.append(json.loads(line))
        return answers
