"""Tests of the tests: deliberate faults in the wrapper, each of which some test must notice.

A fault is a change of one place in a copy of the installed package. The tests that are to notice it
run against the copy, and must fail; against a copy without a fault they must pass.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2] / "client/torch/tests"


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in distributed.py, becomes `new`; `test` is who shall notice."""

    old: str
    new: str
    test: str


FAULTS = {
    "no_mean": Fault(
        "        self._gradsync_job = job\n",
        "        self._gradsync_job = job\n"
        "        reducer._register_comm_hook(group, lambda _, bucket: dist.all_reduce(\n"
        "            bucket.buffer(), group=group, async_op=True\n"
        "        ).get_future().then(lambda future: future.value()[0]))\n",
        "test_ddp_parity.py::test_two_ranks_train_as_with_torch",
    ),
    "no_buffer_sync": Fault(
        "        self._gradsync_broadcaster.broadcast(tensors, buffer_size, root)\n",
        "        pass\n",
        "test_ddp.py::test_buffers_are_broadcast_in_forward_as_torch_does",
    ),
    "no_broadcast_of_the_model": Fault(
        "        self._gradsync_broadcaster.broadcast(states, self.broadcast_bucket_size, root)",
        "        pass",
        "test_ddp.py::test_the_arguments_choose_what_is_broadcast",
    ),
    "join_is_a_no_op": Fault(
        "        if not enable or not self._daemon_can_stand_in(throw",
        "        enable = False\n        if not enable or not self._daemon_can_stand_in(throw",
        "test_ddp_join.py::test_join_with_buffers",
    ),
    "join_counts_ranks_without_input": Fault(
        "            policy = _C.AsidePolicy.AVERAGE_OVER_PRESENT",
        "            policy = _C.AsidePolicy.AVERAGE_OVER_ALL",
        "test_ddp_join.py::test_uneven_inputs_end_as_with_torch",
    ),
    "views_are_ignored": Fault(
        "            gradient_as_bucket_view=self.gradient_as_bucket_view,\n            find_un",
        "            gradient_as_bucket_view=False,\n            find_un",
        "test_ddp.py::test_views_stay_where_they_are",
    ),
    "unused_parameters_are_ignored": Fault(
        "            find_unused=self.find_unused_parameters,\n",
        "            find_unused=False,\n",
        "test_ddp_unused.py::test_unused_parameters_end_as_with_torch",
    ),
    "no_sync_is_ignored": Fault(
        "    # ---- Training ---",
        "    def no_sync(self) -> Any:\n"
        "        import contextlib\n\n"
        "        return contextlib.nullcontext()\n\n"
        "    # ---- Training ---",
        "test_ddp.py::test_no_sync_launches_nothing",
    ),
    "one_bucket": Fault(
        "            bucket_bytes=max(1, self.bucket_bytes_cap),\n"
        "            first_bucket_bytes=max(\n"
        "                1,\n"
        "                dist._DEFAULT_FIRST_BUCKET_BYTES\n"
        "                if self.bucket_bytes_cap_default\n"
        "                else self.bucket_bytes_cap,\n"
        "            ),\n",
        "            bucket_bytes=1 << 40,\n            first_bucket_bytes=1 << 40,\n",
        "test_ddp.py::test_the_logging_data_is_true",
    ),
    "hooks_are_ignored": Fault(
        "        self._set(lambda reducer: reducer._register_comm_hook(state, _checked(hook)))",
        "        pass",
        "test_ddp_hooks.py::test_torchs_hooks_train_as_with_torch",
    ),
}


def copy_package(folder: Path) -> Path:
    """A copy of the package `gradsync` that the tests would use."""
    spec = importlib.util.find_spec("gradsync.torch")
    assert spec is not None and spec.origin is not None, "run scripts/setup"
    package = Path(spec.origin).parents[1]
    shutil.copytree(package, folder / package.name)
    return folder / package.name / "torch/distributed.py"


def run_test(test: str, packages: Path) -> tuple[int, str]:
    completed = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--timeout=60",
            test,
        ],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": str(packages), "GRADSYNC_DAEMON": daemon_of_the_tests()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return completed.returncode, completed.stdout + completed.stderr


def daemon_of_the_tests() -> str:
    named = os.environ.get("GRADSYNC_DAEMON")
    return named or str(Path(sys.executable).with_name("gradsyncd"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    module = copy_package(tmp_path)
    source = module.read_text()
    assert source.count(fault.old) == 1, f"the place of the fault {name} has changed"
    module.write_text(source.replace(fault.old, fault.new))
    status, output = run_test(fault.test, tmp_path)
    # 1: tests have failed; anything else, that pytest could not run them.
    assert status == 1, f"{fault.test} did not notice the fault {name}:\n{output}"
    assert re.search(r"^FAILED ", output, re.MULTILINE), output


def test_without_a_fault_the_same_tests_pass(tmp_path: Path) -> None:
    copy_package(tmp_path)
    for test in sorted({fault.test for fault in FAULTS.values()}):
        status, output = run_test(test, tmp_path)
        assert status == 0, output
