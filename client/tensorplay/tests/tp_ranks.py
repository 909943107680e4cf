"""Real rank processes, each of which runs one scenario: a function of tp_scenarios.

A pytest plugin: tests take the fixture `ranks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0


@dataclass
class Outcome:
    """What one rank made of its scenario."""

    value: Any = None
    error: str = ""  # the class of what it raised
    message: str = ""
    at: float = 0.0  # when it ended, by the machine's monotonic clock
    status: int | None = 0  # of the process; negative: the signal that killed it


class Ranks:
    """Starts them. They share a daemon that the first of them starts, as a user's would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADSYNC_")}
        for kept in ("GRADSYNC_DAEMON", "GRADSYNC_LIBRARY"):
            if kept in os.environ:
                self._environment[kept] = os.environ[kept]
        self._environment |= {
            "XDG_RUNTIME_DIR": str(folder),
            "GRADSYNC_IDLE_EXIT": "5s",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, scenario: Callable[..., Any], size: int, **arguments: Any) -> list[Any]:
        """`scenario(rank, size, **arguments)` on `size` ranks, all of which must return. What goes
        in and out must be fit for JSON."""
        outcomes = self.outcomes(scenario, size, **arguments)
        for rank, outcome in enumerate(outcomes):
            assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.message}"
            assert outcome.status == 0, f"rank {rank} ended with {outcome.status}"
        return [outcome.value for outcome in outcomes]

    def outcomes(self, scenario: Callable[..., Any], size: int, **arguments: Any) -> list[Outcome]:
        """As `run`, but errors and lost ranks are for the caller to judge."""
        run = uuid.uuid4().hex
        results = [self._folder / f"{run}-{rank}" for rank in range(size)]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, Path(__file__).with_name("tp_scenarios.py")),
                    *(scenario.__name__, json.dumps(arguments), results[rank]),
                ],
                env=self._environment
                | {"GRADSYNC_JOB": run, "RANK": str(rank), "WORLD_SIZE": str(size)},
                stdin=subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        end = time.monotonic() + DEADLINE_S
        try:
            statuses = [process.wait(max(0.1, end - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_read(path, status) for path, status in zip(results, statuses, strict=True)]


def _read(path: Path, status: int) -> Outcome:
    if not path.exists():
        return Outcome(status=status)
    outcome = Outcome(**json.loads(path.read_text()))
    outcome.status = status
    return outcome


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("run"))
