"""The fixtures of the other tests, whose folder the rank processes need, too."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OTHERS = HERE.parent / "tests"
sys.path.insert(0, str(OTHERS))

from ranks import Ranks  # noqa: E402 - found by the line above


def _load_others() -> Any:
    """Their conftest.py, under another name than this one's."""
    spec = importlib.util.spec_from_file_location("cpu_conftest", OTHERS / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_others = _load_others()
daemon = _others.daemon
meeting = _others.meeting

NewRanks = Callable[..., Ranks]


@pytest.fixture(scope="session")
def new_ranks(daemon: Any) -> Iterator[NewRanks]:
    """Makes rank processes with additional variables in their environment."""
    made: list[Ranks] = []

    def new(size: int, **environment: str) -> Ranks:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        usual = {"GRADSYNC_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        made.append(Ranks(size, usual | environment))
        return made[-1]

    yield new
    for ranks in made:
        ranks.close()


@pytest.fixture(scope="session")
def gpu_ranks(new_ranks: NewRanks) -> Ranks:
    """Two processes, for all tests that do nothing to them."""
    return new_ranks(2)
