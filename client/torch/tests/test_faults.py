"""A rank or the daemon is gone: every rank hears of it within a second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

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


@pytest.fixture
def mortals(own_daemon: Daemon) -> Iterator[Ranks]:
    """Rank processes with a daemon of their own, which may be killed."""
    ranks = Ranks(3, {"GRADSYNC_SOCKET": own_daemon.socket, "OMP_NUM_THREADS": "1"})
    yield ranks
    ranks.close()


def train_until_error(rank: int, size: int, store: str, daemon: int | None, views: bool) -> None:
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
    mortals: Ranks, meeting: Callable[[], str], views: bool
) -> None:
    outcomes = mortals.outcomes(train_until_error, meeting(), None, views, size=3)
    assert outcomes[1].lost
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, gradsync.RankLostError), outcomes[rank].trace
        assert "rank 1" in str(outcomes[rank].error)


def test_a_killed_daemon_is_reported_by_every_rank(
    mortals: Ranks, meeting: Callable[[], str], own_daemon: Daemon
) -> None:
    outcomes = mortals.outcomes(train_until_error, meeting(), own_daemon.pid, False, size=3)
    for outcome in outcomes:
        assert isinstance(outcome.error, gradsync.DaemonLostError), outcome.trace


def lose_a_rank_in_a_collective(rank: int, size: int, store: str, asynchronous: bool) -> None:
    with process_group("gradsync", store, rank, size):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        works = [dist.all_reduce(torch.ones(5), async_op=asynchronous) for _ in range(3)]
        for work in works:
            if work is not None:
                work.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_killed_before_a_collective_is_named(
    mortals: Ranks, meeting: Callable[[], str], asynchronous: bool
) -> None:
    outcomes = mortals.outcomes(lose_a_rank_in_a_collective, meeting(), asynchronous, size=3)
    assert outcomes[1].lost
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, gradsync.RankLostError), outcomes[rank].trace
        assert "rank 1" in str(outcomes[rank].error)
        assert outcomes[rank].seconds < PROMPTLY_S


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
    os.environ["GRADSYNC_SOCKET"] = socket
    with process_group("gradsync", store, rank, size):
        pass


def test_no_daemon_at_the_named_socket(
    mortals: Ranks, meeting: Callable[[], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    socket = str(tmp_path_factory.mktemp("nobody") / "there.sock")
    for outcome in mortals.outcomes(find_no_daemon, meeting(), socket, size=2):
        assert isinstance(outcome.error, gradsync.DaemonLostError)
        assert socket in str(outcome.error)
