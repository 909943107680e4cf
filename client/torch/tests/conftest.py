from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import Ranks


class Daemon:
    """A gradsyncd of the tests' own."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "gradsyncd.sock")
        log = folder / "gradsyncd.log"
        ready, theirs = os.pipe()
        self._process = subprocess.Popen(
            [find_daemon(), f"--socket={self.socket}", f"--ready-fd={theirs}", f"--log-file={log}"],
            pass_fds=[theirs],
            env={k: v for k, v in os.environ.items() if not k.startswith("GRADSYNC_")},
        )
        os.close(theirs)
        with os.fdopen(ready) as pipe:
            assert pipe.read() == "\n", log.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def find_daemon() -> str:
    named = os.environ.get("GRADSYNC_DAEMON")
    beside = Path(sys.executable).with_name("gradsyncd")
    found = named or (str(beside) if beside.exists() else shutil.which("gradsyncd"))
    assert found, (
        "gradsyncd is not installed: run scripts/setup, or set GRADSYNC_DAEMON to its path"
    )
    return found


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """The daemon of all tests but those that kill it."""
    daemon = Daemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.close()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.close()


@pytest.fixture(scope="session")
def ranks(daemon: Daemon) -> Iterator[Ranks]:
    """Four rank processes, shared by all tests."""
    ranks = Ranks(4, {"GRADSYNC_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"})
    yield ranks
    ranks.close()


@pytest.fixture
def meeting(tmp_path: Path) -> Callable[[], str]:
    """A new path each time, for a store at which the ranks of one call meet."""
    count = 0

    def new() -> str:
        nonlocal count
        count += 1
        return str(tmp_path / f"store-{count}")

    return new
