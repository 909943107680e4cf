"""Real rank processes that run functions of the tests.

Importing torch takes seconds, so the processes stay: each `run` makes every rank call one function,
which must be importable, and gathers what they return or raise. A rank that does not answer by the
deadline is killed, and the test fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 60.0

# Not this file as a script: the classes that are sent must be those of the tests' module `ranks`.
_START = """
import sys
sys.path.insert(0, sys.argv[1])
from multiprocessing.connection import Connection
from ranks import serve
serve(Connection(int(sys.argv[2])))
"""


@dataclass
class Outcome:
    """What one rank made of a call."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0  # from the call to the answer
    lost: bool = False  # the process ended instead


class Ranks:
    """`size` processes. Those that were lost are replaced by the next call."""

    def __init__(self, size: int, environment: dict[str, str]) -> None:
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * size
        self._pipes: list[Connection | None] = [None] * size

    def run(
        self, function: Callable[..., Any], *arguments: Any, size: int, deadline: float = DEADLINE_S
    ) -> list[Any]:
        """Calls `function(rank, size, *arguments)` on `size` ranks; all must return."""
        outcomes = self.outcomes(function, *arguments, size=size, deadline=deadline)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None or outcome.lost:
                others = "; ".join(
                    f"rank {r}: {o.error!r}" for r, o in enumerate(outcomes) if o.error
                )
                raise AssertionError(
                    f"rank {rank} {'was lost' if outcome.lost else 'raised'}; errors: {others}\n"
                    f"{outcome.trace}"
                )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, size: int, deadline: float = DEADLINE_S
    ) -> list[Outcome]:
        """As `run`, but errors and lost ranks are for the caller to judge."""
        for rank in range(size):
            self._ensure(rank)
        for rank in range(size):
            self._pipe(rank).send((function, (rank, size, *arguments)))
        end = time.monotonic() + deadline
        outcomes = [self._receive(rank, end) for rank in range(size)]
        late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        if late:
            for rank in range(size):
                self._discard(rank)
            raise AssertionError(
                f"ranks {late} did not answer within {deadline} s; the others: "
                f"{[o.error or o.value for o in outcomes if o is not None]}"
            )
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        for rank in range(len(self._processes)):
            self._discard(rank)

    def _pipe(self, rank: int) -> Connection:
        pipe = self._pipes[rank]
        assert pipe is not None
        return pipe

    def _ensure(self, rank: int) -> None:
        process = self._processes[rank]
        if process is not None and process.poll() is None:
            return
        self._discard(rank)
        ours, theirs = Pipe()
        self._processes[rank] = subprocess.Popen(
            [sys.executable, "-c", _START, str(Path(__file__).parent), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | self._environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipes[rank] = ours

    def _receive(self, rank: int, end: float) -> Outcome | None:
        pipe = self._pipe(rank)
        try:
            if not pipe.poll(max(0.0, end - time.monotonic())):
                return None
            outcome: Outcome = pipe.recv()
            return outcome
        except (EOFError, ConnectionError):
            self._discard(rank)
            return Outcome(lost=True)

    def _discard(self, rank: int) -> None:
        process, self._processes[rank] = self._processes[rank], None
        if process is not None:
            process.kill()
            process.wait()
        pipe, self._pipes[rank] = self._pipes[rank], None
        if pipe is not None:
            pipe.close()


def serve(pipe: Connection) -> None:
    """The life of a rank process."""
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        begin = time.monotonic()
        try:
            outcome = Outcome(value=function(*arguments))
        except Exception as error:  # whatever it is, it goes to the test
            outcome = Outcome(error=error, trace=traceback.format_exc())
        outcome.seconds = time.monotonic() - begin
        _leave_group()
        pipe.send(outcome)


def _leave_group() -> None:
    """A call that failed has not destroyed its process group."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except Exception:  # of a broken group: the next call starts anew all the same
            traceback.print_exc()
    # torch counts a group that could not be made, and names the next one by the count: the ranks
    # would not find each other.
    dist.distributed_c10d._world.group_count = 0
