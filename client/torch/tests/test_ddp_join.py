"""Ranks that run out of input at different times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training import batch_norm, mlp, process_group

from gradsync.torch import DistributedDataParallel


def train_unevenly(
    model: Any, rank: int, *, divide: bool, accumulate: bool
) -> tuple[list[Tensor], list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    gradients = []
    with model.join(divide_by_initial_world_size=divide):
        for step in range(3 + 3 * rank):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=generator)
            if accumulate and step % 2 == 0:
                with model.no_sync():
                    model(x).sum().backward()
                continue
            model(x).square().mean().backward()
            gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    return gradients, [value.detach().clone() for value in model.state_dict().values()]


def compare(  # noqa: PLR0917 - one for each parameter of the test
    rank: int,
    size: int,
    store: str,
    build: Callable[[], nn.Module],
    options: dict[str, Any],
    divide: bool,
    accumulate: bool,
) -> None:
    results = []
    for backend, wrapper in (("gloo", TorchDDP), ("gradsync", DistributedDataParallel)):
        with process_group(backend, f"{store}-{backend}", rank, size):
            torch.manual_seed(2)
            model = wrapper(build(), **options)
            results.append(train_unevenly(model, rank, divide=divide, accumulate=accumulate))
            assert model._get_ddp_logging_data()["join_uneven_inputs"]
            if wrapper is DistributedDataParallel:  # all end with the last one's state
                everyones: list[Any] = [None] * size
                dist.all_gather_object(everyones, [p.detach() for p in model.parameters()])
                for values in everyones[1:]:
                    torch.testing.assert_close(values, everyones[0], rtol=0, atol=0)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 3e-4},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3])
def test_uneven_inputs_end_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], size: int, options: dict[str, Any], divide: bool
) -> None:
    ranks.run(compare, meeting(), mlp, options, divide, False, size=size)


def test_join_with_accumulation(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(compare, meeting(), mlp, {}, True, True, size=2)


@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": False}], ids=str)
def test_join_with_buffers(
    ranks: Ranks, meeting: Callable[[], str], options: dict[str, Any]
) -> None:
    ranks.run(compare, meeting(), batch_norm, options, True, False, size=2)


def use_no_collective(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size), pytest.MonkeyPatch.context() as patch:
        model = DistributedDataParallel(batch_norm())

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a collective in a join")

        for name in ("all_reduce", "broadcast", "all_gather", "_broadcast_coalesced"):
            patch.setattr(dist, name, refuse)
        with model.join():
            for _ in range(2 + rank):
                model(torch.ones(4, 6)).sum().backward()


def test_join_adds_no_collective(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(use_no_collective, meeting(), size=2)


def run_out_in_the_first_iteration(rank: int, size: int, store: str) -> None:
    """Buckets are planned anew in the second iteration, which rank 0 does not have."""
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp(), bucket_cap_mb=3e-4)
        with model.join():
            for _ in range(1 + 3 * rank):
                model.zero_grad()
                model(torch.ones(1, 6)).sum().backward()
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 6), float(rank))).sum().backward()
        gradients: list[Any] = [None] * size
        dist.all_gather_object(gradients, [p.grad for p in model.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_a_rank_may_run_out_before_buckets_are_planned_anew(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(run_out_in_the_first_iteration, meeting(), size=2)


def start_late(rank: int, size: int, store: str) -> None:
    """A rank without any input, and a second round after the first."""
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp())
        for divide in (True, False):
            with model.join(divide_by_initial_world_size=divide):
                for _ in range(4 * rank):
                    model.zero_grad()
                    model(torch.ones(1, 6)).sum().backward()
        model.zero_grad()
        model(torch.full((1, 6), float(rank))).sum().backward()
        gradients: list[Any] = [None] * size
        dist.all_gather_object(gradients, [p.grad for p in model.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_a_rank_without_input_and_training_afterwards(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(start_late, meeting(), size=2)


def throw(rank: int, size: int, store: str, build: Callable[[], nn.Module]) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        model = DistributedDataParallel(build())
        message = "exhausted all inputs" if rank == 0 else "Detected at least one rank"
        steps = 0
        with (
            pytest.raises(RuntimeError, match=message),
            model.join(throw_on_early_termination=True),
        ):
            for _ in range(3 + rank):
                model(torch.ones(4, 6)).sum().backward()
                steps += 1
        assert steps == 3


@pytest.mark.parametrize("build", [mlp, batch_norm])
def test_an_early_end_is_thrown_on_every_rank(
    ranks: Ranks, meeting: Callable[[], str], build: Callable[[], nn.Module]
) -> None:
    ranks.run(throw, meeting(), build, size=2)


def leave(rank: int, size: int, store: str) -> None:
    """A rank that raises inside leaves no ranks hanging."""
    with process_group("gradsync", store, rank, size, timeout_s=5):
        model = DistributedDataParallel(mlp())
        with model.join():
            for step in range(4):
                if rank == 0 and step == 2:
                    raise ArithmeticError("enough")
                model(torch.ones(1, 6)).sum().backward()


def test_a_rank_that_leaves_join_early_is_reported(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    outcomes = ranks.outcomes(leave, meeting(), size=2)
    assert isinstance(outcomes[0].error, ArithmeticError)
    assert isinstance(outcomes[1].error, RuntimeError)
    assert outcomes[1].seconds < 15


def join_together(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer]):
            for _ in range(2 + rank):
                optimizer.zero_grad()
                model(torch.full((1, 6), float(rank + 1))).sum().backward()
                optimizer.step()
        states: list[Any] = [None] * size
        dist.all_gather_object(states, [p.detach() for p in model.parameters()])
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_several_join_together(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(join_together, meeting(), size=2)


def do_not_join(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp())
        with model.join(enable=False):
            for _ in range(2):
                model(torch.ones(1, 6)).sum().backward()


def test_join_can_be_switched_off(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(do_not_join, meeting(), size=2)
