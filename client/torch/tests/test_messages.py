"""Messages from rank to rank over the backend "gradsync", and what is made of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from training import new_group, process_group

import gradsync

SMALL, LARGE = (3,), (1000, 701)  # in one frame, and in memory of its own


def swap(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for dtype in (torch.float32, torch.int8, torch.bool, torch.complex128, torch.uint16):
            for shape in (SMALL, LARGE, ()):
                other = torch.empty(shape, dtype=dtype)
                # Both send first.
                dist.send(torch.full(shape, rank, dtype=dtype), 1 - rank)
                assert dist.recv(other, 1 - rank) == 1 - rank
                assert other.equal(torch.full(shape, 1 - rank, dtype=dtype))
        columns = torch.zeros(4, 6)
        dist.send(torch.arange(8.0).view(2, 4).t(), 1 - rank)
        dist.recv(columns[:, ::3], 1 - rank)
        assert columns[:, ::3].equal(torch.arange(8.0).view(2, 4).t())
        assert (columns[:, 1::3] == 0).all()


def test_two_ranks_may_both_send_before_they_receive(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(swap, meeting(), size=2)


def use_tags(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        if rank == 0:
            for tag in (1, 2, 3, 2):
                dist.send(torch.tensor([tag * 10.0]), 1, tag=tag)
        else:
            works = {}
            tensors = {key: torch.empty(1) for key in ("3", "2a", "2b", "1")}
            for key in ("2a", "3", "2b", "1"):
                works[key] = dist.irecv(tensors[key], 0, tag=int(key[0]))
            for key in reversed(works):
                work: Any = works[key]
                work.wait()
                assert work.is_completed()
                assert tensors[key].item() == int(key[0]) * 10
            assert works["1"].get_future().wait()[0].item() == 10  # type: ignore[union-attr]


def test_tags_choose_among_messages(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(use_tags, meeting(), size=2)


def receive_from_any(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        group = new_group([2, 0, 1])
        for where in (None, group):
            if rank != 1:
                dist.send(torch.tensor([float(rank)]), 1, group=where)
                continue
            sources = set()
            for _ in range(size - 1):
                tensor = torch.empty(1)
                source = dist.recv(tensor, group=where)
                assert source == tensor.item()
                sources.add(source)
            assert sources == {0, 2}


def test_a_receive_from_any_rank_names_it(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(receive_from_any, meeting(), size=3)


def beside_collectives(rank: int, size: int, store: str) -> None:
    """Each order of messages and collectives is fine, whatever the other rank's."""
    with process_group("gradsync", store, rank, size):
        received, total = torch.zeros(1), torch.ones(1)
        if rank == 0:
            receive: Any = dist.irecv(received, 1)
            dist.all_reduce(total)
            receive.wait()
            assert received.item() == 5
        else:
            work: Any = dist.all_reduce(total, async_op=True)
            work.wait()
            dist.send(torch.tensor([5.0]), 0)
        assert total.item() == size


def test_messages_keep_no_order_with_collectives(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(beside_collectives, meeting(), size=2)


def batch(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        # Far more than are taken before they are received.
        count = 200
        received = [[torch.empty(1) for _ in range(count)] for _ in range(size)]
        operations = [
            dist.P2POp(dist.isend, torch.tensor([rank * 1000.0 + i]), peer)
            for peer in range(size)
            if peer != rank
            for i in range(count)
        ]
        operations += [
            dist.P2POp(dist.irecv, received[peer][i], peer)
            for peer in range(size)
            if peer != rank
            for i in range(count)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for peer in range(size):
            if peer != rank:
                expected = [peer * 1000.0 + i for i in range(count)]
                assert torch.cat(received[peer]).tolist() == expected


def test_batches_of_any_size(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(batch, meeting(), size=3)


def move_objects(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        gathered: list[Any] | None = [None] * size if rank == 1 else None
        dist.gather_object({"rank": rank, "text": "x" * rank * 3000}, gathered, dst=1)
        if gathered is not None:
            assert [o["rank"] for o in gathered] == list(range(size))
            assert [len(o["text"]) for o in gathered] == [r * 3000 for r in range(size)]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [("for", r) for r in range(size)] if rank == 2 else None, 2)
        assert mine == [("for", rank)]
        objects: list[Any] = ["a", {"b": 1}] if rank == 0 else [None, None]
        if rank == 0:
            dist.send_object_list(objects, 1)
        elif rank == 1:
            assert dist.recv_object_list(objects, 0) == 0
            assert objects == ["a", {"b": 1}]


def test_objects_are_gathered_scattered_and_sent(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(move_objects, meeting(), size=3)


def receive_in_vain(rank: int, size: int, store: str) -> float:
    with process_group("gradsync", store, rank, size):
        group = new_group(timeout=timedelta(seconds=1))
        seconds = 0.0
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(gradsync.DeadlineExceededError, match=r"Timed out waiting.*rank 1"):
                dist.recv(torch.empty(1), 1, group=group)
            seconds = time.monotonic() - begin
        # Only that receive has failed.
        dist.barrier()
        dist.barrier(group=group)
        return seconds


def test_a_receive_in_vain_ends_at_its_deadline_and_names_the_sender(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    assert 0.9 < ranks.run(receive_in_vain, meeting(), size=2)[0] < 5


def leave_a_receive(rank: int, size: int, store: str) -> str:
    with process_group("gradsync", store, rank, size):
        group = new_group()
        work: Any = dist.irecv(torch.empty(1), 1 - rank, group=group)
        dist.destroy_process_group(group)
        with pytest.raises(gradsync.FailedPreconditionError) as error:
            work.wait()
        dist.barrier()  # else one hears that the other has left the job
        return str(error.value)


def test_a_receive_under_way_ends_with_its_group(ranks: Ranks, meeting: Callable[[], str]) -> None:
    for text in ranks.run(leave_a_receive, meeting(), size=2):
        assert "cancelled" in text


def receive_another_size(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        if rank == 0:
            dist.send(torch.empty(3), 1)
        else:
            with pytest.raises(gradsync.MismatchError, match="12 bytes, but 16 were"):
                dist.recv(torch.empty(4), 0)
        dist.barrier()


def test_a_message_of_another_size_is_refused(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(receive_another_size, meeting(), size=2)


def pass_monitored_barriers(rank: int, size: int, store: str, all_ranks: bool) -> list[str]:
    texts = []
    with process_group("gradsync", store, rank, size):
        dist.monitored_barrier(wait_all_ranks=all_ranks)
        absent = [1, 3]
        if rank not in absent:
            with pytest.raises(RuntimeError) as error:
                dist.monitored_barrier(None, timedelta(seconds=0.5), wait_all_ranks=all_ranks)
            texts.append(str(error.value))
        # Those who missed one, and those who gave it up, pass the next; and so does the group.
        dist.barrier()
        for _ in range(2):
            dist.monitored_barrier(None, timedelta(seconds=20), wait_all_ranks=all_ranks)
        dist.all_reduce(torch.ones(1))
    return texts


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_monitored_barrier_names_who_has_not_come(
    ranks: Ranks, meeting: Callable[[], str], all_ranks: bool
) -> None:
    texts = ranks.run(pass_monitored_barriers, meeting(), all_ranks, size=4)
    names = "Ranks 1, 3" if all_ranks else "Rank 1"
    assert f"[Rank 0]: {names} failed to pass monitoredBarrier in 500 ms" in texts[0][0]
    assert re.search("Rank 2 successfully reached monitoredBarrier, but received errors while "
                     "waiting for send/recv from rank 0", texts[2][0])  # fmt: skip
    assert texts[1] == texts[3] == []


def die_instead_of_sending(rank: int, size: int, store: str) -> float:
    with process_group("gradsync", store, rank, size):
        if rank == 1:
            dist.recv(torch.empty(1), 0)
            os.kill(os.getpid(), signal.SIGKILL)
        work: Any = dist.irecv(torch.empty(1), 1)
        dist.send(torch.ones(1), 1)
        begin = time.monotonic()
        with pytest.raises(gradsync.RankLostError, match="rank 1"):
            work.wait()
        return time.monotonic() - begin


def test_who_waits_for_a_message_of_a_killed_rank_is_told_so(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    outcome = ranks.outcomes(die_instead_of_sending, meeting(), size=2)[0]
    assert outcome.error is None, outcome.trace
    assert outcome.value < 2
