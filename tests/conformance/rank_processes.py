"""The rank processes that carry out one upstream test after another."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch_suite
from torch_suite import Subject

START_TIMEOUT_S = 300  # for the ranks to import torch and to load the tests
LAST_RANKS_TIMEOUT_S = 8  # for the other ranks, once one has failed
STATUSES = ("fail", "skip", "pass")  # the first that a rank reports is the test's


@dataclass
class Result:
    """What came of a test, on one rank or on all."""

    status: str
    reason: str = ""
    detail: str = ""  # of a failure, in full
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """Of a rank process."""

    subject: Subject
    rank: int
    world_size: int
    timeout_s: int  # for one test


def serve(place: Place, pipe: Connection) -> None:
    """The life of a rank process: runs the tests named on the pipe until that is closed."""
    os.setsid()  # so that Ranks.stop() also ends what a test has started
    os.dup2(2, 1)
    module, tests = torch_suite.load(place.subject)
    environment = dict(os.environ)
    pipe.send("ready")
    while True:
        try:
            name, directory = pipe.recv()
        except EOFError:
            return
        os.environ.clear()  # of what the last test has set
        os.environ.update(environment, TEMP_DIR=directory)
        pipe.send(run_test(place, module, tests, name, directory))


def run_test(place: Place, module: Any, tests: Any, name: str, directory: str) -> Result:
    """Does what upstream's own runner of a rank does."""
    dist, method = module.dist, getattr(tests, name)
    dist.set_debug_level_from_env()
    module.torch._dynamo.reset()
    module.Barrier.barrier_id = 0
    module.INIT_METHOD = f"file://{directory}/init_dir/shared_init_file"
    if getattr(method, "__unittest_skip__", False):
        return Result("skip", method.__unittest_skip_why__)
    try:
        test = tests(name)
        test.rank, test.file_name = place.rank, f"{directory}/store"
        seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
        dist.init_process_group(
            place.subject.backend,
            init_method=test.init_method,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=min(seconds, max(5, place.timeout_s - 10))),
        )
        test._barrier()
        module.torch.testing._internal.common_utils.set_rng_seed()
        getattr(test, name)()
        test._barrier()
        result = Result("pass")
    except unittest.SkipTest as skip:
        result = Result("skip", str(skip))
    except SystemExit as end:
        skips = {s.exit_code: s.message for s in module.TEST_SKIPS.values()}
        if end.code not in skips:
            return Result("fail", f"exit status {end.code}")
        result = Result("skip", skips[end.code])
    except BaseException as error:
        return Result("fail", f"{type(error).__name__}: {error}", traceback.format_exc())
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


class Ranks:
    """They serve one test after another, each with a fresh process group and directory, until one
    of them fails; then all are started anew."""

    def __init__(self, subject: Subject, world_size: int, timeout_s: int) -> None:
        self._subject, self._world_size, self._timeout_s = subject, world_size, timeout_s
        self._processes: list[mp.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def start(self) -> None:
        spawn = mp.get_context("spawn")
        for rank in range(self._world_size):
            ours, theirs = spawn.Pipe()
            place = Place(self._subject, rank, self._world_size, self._timeout_s)
            process = spawn.Process(target=serve, args=(place, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        if any(answer != "ready" for _, answer in self._answers(START_TIMEOUT_S)):
            sys.exit("the ranks did not start")

    def stop(self) -> None:
        for process in self._processes:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # it has died, or not yet left our group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def run(self, name: str) -> Result:
        begin = time.monotonic()
        if not all(process.is_alive() for process in self._processes):
            self.stop()  # one died after its last answer
        if not self._processes:
            self.start()
        with tempfile.TemporaryDirectory(prefix="conformance") as directory:
            for sub in ("barrier", "test_dir", "init_dir"):  # as upstream's set-up makes them
                (Path(directory) / sub).mkdir()
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # _answers finds that it died
                    pipe.send((name, directory))
            rank, result = min(
                self._answers(self._timeout_s), key=lambda answer: STATUSES.index(answer[1].status)
            )
        if result.status == "fail":
            self.stop()
            result.detail = f"rank {rank}: {result.detail or result.reason}"
        result.reason = short(result.reason)
        result.seconds = time.monotonic() - begin
        return result

    def _answers(self, seconds: float) -> Iterator[tuple[int, Any]]:
        """Each rank and what it sent, in order of arrival: a failure before those it causes."""
        deadline, waiting = time.monotonic() + seconds, list(self._pipes)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(waiting, left)
            for pipe in [p for p in waiting if p in ready] or list(waiting):
                answer: Any
                try:
                    answer = pipe.recv() if ready else Result("fail", "no answer in time")
                except (EOFError, ConnectionError):
                    answer = Result("fail", "rank died")
                if isinstance(answer, Result) and answer.status == "fail":
                    deadline = min(deadline, time.monotonic() + LAST_RANKS_TIMEOUT_S)
                waiting.remove(pipe)
                yield self._pipes.index(pipe), answer


def short(reason: str) -> str:
    """The first line, without the directories of paths, port numbers and log times."""
    line = re.sub(r"(?<![\w:/])/(?:[\w.+-]+/)+", "", reason.partition("\n")[0])
    return re.sub(r"(?<=\]):\d+|\[F\d+ [\d:.]+ ", "", line).strip()[:160]
