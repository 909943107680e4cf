"""What is tested on a GPU can be tested only there, but must not break unseen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "gpu_tests"
_LIST = """
import inspect, sys
sys.path[:0] = sys.argv[1:]
from test_cuda import SCENARIOS
for function in SCENARIOS.values():
    print(len(inspect.signature(function).parameters))
"""


def test_the_gpu_scenarios_can_be_imported() -> None:
    # In a process of its own: there is a module of the same name here.
    listed = subprocess.run(
        [sys.executable, "-c", _LIST, str(FOLDER), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = listed.stdout.split()
    assert arguments
    assert set(arguments) == {"2"}  # rank and size
