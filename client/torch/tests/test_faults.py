"""A rank or the daemon is gone: every rank hears of it within a second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from conftest import Daemon
from ranks import Ranks
from training import mlp, process_group

import gradsync
from gradsync.torch import DistributedDataParallel

# The promise is a second; the machine that runs the tests may be busy.
PROMPTLY_S = 5.0
VICTIM = 1


@contextmanager
def daemon_at(socket: str) -> Iterator[None]:
    """For the time being, the ranks' daemon is that one."""
    usual = os.environ["GRADSYNC_SOCKET"]
    os.environ["GRADSYNC_SOCKET"] = socket
    try:
        yield
    finally:
        os.environ["GRADSYNC_SOCKET"] = usual


def train_until_error(rank: int, size: int, store: str, views: bool, daemon: int | None) -> None:
    """In the third backward the victim kills the daemon, or itself."""
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp(), gradient_as_bucket_view=views, bucket_cap_mb=0)
        parameter = model.module[2].weight

        def kill(gradient: torch.Tensor) -> None:
            os.kill(os.getpid() if daemon is None else daemon, signal.SIGKILL)

        for step in range(5):
            if step == 2:
                dist.barrier()
                if rank == VICTIM:
                    parameter.register_hook(kill)
                begin = time.monotonic()
            try:
                model(torch.ones(2, 6)).sum().backward()
            except gradsync.GradsyncError as error:
                assert model._get_ddp_logging_data()["has_error"] == 1
                assert time.monotonic() - begin < PROMPTLY_S
                # Nothing hangs afterwards either.
                with pytest.raises(gradsync.GradsyncError):
                    model(torch.ones(2, 6)).sum().backward()
                raise error
        raise AssertionError("training went on")


@pytest.mark.parametrize("views", [False, True])
def test_a_killed_rank_is_named_to_the_others(
    ranks: Ranks, meeting: Callable[[], str], views: bool
) -> None:
    outcomes = ranks.outcomes(train_until_error, meeting(), views, None, size=3)
    assert outcomes[VICTIM].lost
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, gradsync.RankLostError), outcomes[rank].trace
        assert "rank 1" in str(outcomes[rank].error)


def train_with_daemon(rank: int, size: int, store: str, socket: str, daemon: int) -> None:
    with daemon_at(socket):
        train_until_error(rank, size, store, False, daemon)


def test_a_killed_daemon_is_reported_by_every_rank(
    ranks: Ranks, meeting: Callable[[], str], own_daemon: Daemon
) -> None:
    outcomes = ranks.outcomes(
        train_with_daemon, meeting(), own_daemon.socket, own_daemon.pid, size=3
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, gradsync.DaemonLostError), outcome.trace


def lose_a_rank_in_a_collective(rank: int, size: int, store: str, asynchronous: bool) -> None:
    with process_group("gradsync", store, rank, size):
        dist.barrier()
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            works = [dist.all_reduce(torch.ones(5), async_op=asynchronous) for _ in range(3)]
            for work in works:
                if work is not None:
                    work.wait()
        finally:
            assert time.monotonic() - begin < PROMPTLY_S


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_killed_before_a_collective_is_named(
    ranks: Ranks, meeting: Callable[[], str], asynchronous: bool
) -> None:
    outcomes = ranks.outcomes(lose_a_rank_in_a_collective, meeting(), asynchronous, size=3)
    assert outcomes[VICTIM].lost
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, gradsync.RankLostError), outcomes[rank].trace
        assert "rank 1" in str(outcomes[rank].error)


def come_alone(rank: int, size: int, store: str) -> None:
    if rank == 1:
        return
    with process_group("gradsync", store, rank, size, timeout_s=2):
        pass


def test_a_rank_that_never_comes_is_named(ranks: Ranks, meeting: Callable[[], str]) -> None:
    outcome = ranks.outcomes(come_alone, meeting(), size=2)[0]
    assert isinstance(outcome.error, gradsync.DeadlineExceededError), outcome.trace
    assert "rank 1" in str(outcome.error)


def find_no_daemon(rank: int, size: int, store: str, socket: str) -> None:
    with daemon_at(socket), process_group("gradsync", store, rank, size):
        pass


def test_no_daemon_at_the_named_socket(
    ranks: Ranks, meeting: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    socket = str(tmp_path_factory.mktemp("nobody") / "there.sock")
    outcome = ranks.outcomes(find_no_daemon, meeting(), socket, size=1)[0]
    assert isinstance(outcome.error, gradsync.DaemonLostError)
    assert socket in str(outcome.error)
