"""What profilers show of the wrapper: what they would of torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from training import process_group

from gradsync.torch import DistributedDataParallel

CPU = [torch.profiler.ProfilerActivity.CPU]
SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"


class Model(nn.Module):
    """Three buckets of one parameter each, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


def events_of(
    model: DistributedDataParallel, depth: int = 3, *, synced: bool = True
) -> dict[str, list[FunctionEvent]]:
    """Those of the process group's kind and of the reducer, in one step."""
    with torch.profiler.profile(activities=CPU, record_shapes=True) as profiler:
        model.require_backward_grad_sync = synced
        model(torch.ones(2, 4), depth).sum().backward()
    found: dict[str, list[FunctionEvent]] = {}
    for event in profiler.events():
        if ":all_reduce" in event.name or ":broadcast" in event.name or event.name == SEARCH:
            found.setdefault(event.name, []).append(event)
    return found


def watch(rank: int, size: int, store: str, backend: str) -> None:
    with process_group(backend, store, rank, size):
        model = DistributedDataParallel(Model(), bucket_cap_mb=0)
        for step in range(4):
            events = events_of(model)
            assert {name: len(of_name) for name, of_name in events.items()} == {
                f"{backend}:all_reduce": 3,
                # The buffer in each forward, and once the order of the buckets.
                f"{backend}:broadcast": 2 if step == 1 else 1,
            }
            for event in events[f"{backend}:all_reduce"]:
                assert event.is_async
                assert str(event.input_shapes) == "[[16]]"
                assert event.time_range.elapsed_us() > 0
        assert f"{backend}:all_reduce" not in events_of(model, synced=False)


@pytest.mark.parametrize("backend", ["gradsync", "gloo"])
def test_a_profiler_sees_buckets_and_broadcasts(
    ranks: Ranks, meeting: Callable[[], str], backend: str
) -> None:
    ranks.run(watch, meeting(), backend, size=2)


def watch_unused(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(
            Model(),
            bucket_cap_mb=0,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
            forward_sync_buffers=False,
        )
        for depth in (3, 1, 2):
            events = events_of(model, depth)
            assert {name: len(of_name) for name, of_name in events.items()} == {
                "gradsync:all_reduce": depth,
                SEARCH: 1,
            }


def test_a_profiler_sees_the_search_and_no_bucket_that_is_skipped(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(watch_unused, meeting(), size=2)


def fail_while_watched(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(Model(), bucket_cap_mb=0)
        events_of(model, 2)  # a bucket is handed over, and never waited for
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            events_of(model)


def test_an_unfinished_iteration_does_not_confuse_a_profiler(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(fail_while_watched, meeting(), size=2)
