"""Training over gradsync is training over torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training import MODELS, fingerprint, make, new_group, process_group, train

from gradsync.torch import DistributedDataParallel

# torch divides each gradient before it sums, gradsync divides the sum. With two ranks that is the
# same: halving is exact. With four it is too, but the orders of summation differ, as do those of
# two runs of torch on different numbers of nodes: a few units in the last place for each step,
# which training carries on. bfloat16 is summed by gradsync in float32 and rounded once, by gloo
# after each addition.
TOLERANCE = {
    (2, torch.float32): 0.0,
    (2, torch.float64): 0.0,
    (2, torch.bfloat16): 2**-6,
    (4, torch.float32): 2e-5,
    (4, torch.float64): 1e-13,
    (4, torch.bfloat16): 2**-5,
}


@dataclass(frozen=True)
class Case:
    model: str
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)  # of the wrapper
    accumulate: int = 1
    set_to_none: bool = True


def compare(rank: int, size: int, store: str, case: Case) -> tuple[float, str]:
    """The greatest difference of any gradient or state in ten steps, and a fingerprint of them."""
    with process_group("gloo", store, rank, size):
        results = []
        for wrapper in (TorchDDP, DistributedDataParallel):
            # Each rank starts from other values: construction must make them rank 0's.
            model = wrapper(make(case.model, case.dtype, seed=rank), **case.options)
            gradients = train(model, rank, accumulate=case.accumulate, set_to_none=case.set_to_none)
            results.append(gradients + list(model.state_dict().values()))
        expected, actual = results
        assert len(expected) == len(actual)
        difference = max(
            ((e.double() - a.double()).abs() / e.double().abs().clamp(min=1)).max().item()
            for e, a in zip(expected, actual, strict=True)
        )
        return difference, fingerprint(actual)


def check(ranks: Ranks, store: str, size: int, case: Case) -> None:
    results = ranks.run(compare, store, case, size=size)
    for difference, _ in results:
        assert difference <= TOLERANCE[size, case.dtype]
    # Buffers are each rank's own between forwards, so only models without any end the same.
    if case.model != "batch norm":
        assert len({digest for _, digest in results}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], name: str, dtype: torch.dtype
) -> None:
    check(ranks, meeting(), 2, Case(name, dtype))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_bucket_views_train_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], name: str, set_to_none: bool
) -> None:
    options = {"gradient_as_bucket_view": True}
    check(ranks, meeting(), 2, Case(name, options=options, set_to_none=set_to_none))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_accumulates_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], views: bool, set_to_none: bool
) -> None:
    options = {"gradient_as_bucket_view": views}
    case = Case("mlp", options=options, accumulate=3, set_to_none=set_to_none)
    check(ranks, meeting(), 2, case)


@pytest.mark.parametrize("cap", [0, 1e-4, 1e-3])
@pytest.mark.parametrize("views", [False, True])
def test_tiny_buckets_train_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], cap: float, views: bool
) -> None:
    options = {"bucket_cap_mb": cap, "gradient_as_bucket_view": views}
    check(ranks, meeting(), 2, Case("mlp", options=options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mlp", "odd sizes"])
def test_four_ranks_train_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], name: str, dtype: torch.dtype
) -> None:
    check(ranks, meeting(), 4, Case(name, dtype))


def train_over(rank: int, size: int, store: str, backend: str, wrapper: type[TorchDDP]) -> str:
    with process_group(backend, store, rank, size):
        model = wrapper(make("mlp", torch.float32, seed=rank))
        return fingerprint(train(model, rank) + list(model.parameters()))


def test_it_does_not_matter_whose_process_group_it_is(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    over_gloo = ranks.run(train_over, meeting(), "gloo", DistributedDataParallel, size=3)
    over_own = ranks.run(train_over, meeting(), "gradsync", DistributedDataParallel, size=3)
    assert len({*over_gloo, *over_own}) == 1


def test_torchs_own_wrapper_works_over_the_backend(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    over_gloo = ranks.run(train_over, meeting(), "gloo", TorchDDP, size=2)
    over_own = ranks.run(train_over, meeting(), "gradsync", TorchDDP, size=2)
    assert len({*over_gloo, *over_own}) == 1


def train_in_halves(rank: int, size: int, store: str) -> str:
    with process_group("gradsync", store, rank, size):
        halves = [new_group([0, 1]), new_group([2, 3])]
        model = DistributedDataParallel(
            make("mlp", torch.float32, seed=rank), process_group=halves[rank // 2]
        )
        return fingerprint(train(model, rank) + list(model.parameters()))


def test_groups_of_ranks_train_apart(ranks: Ranks, meeting: Callable[[], str]) -> None:
    results = ranks.run(train_in_halves, meeting(), size=4)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0] != results[2]
