"""Parameters that get no gradient: in some iterations, on some ranks, or never."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint
from training import process_group

import gradsync
from gradsync.torch import DistributedDataParallel

Gradients = list[Tensor | None]


@dataclass
class Nested:
    """Outputs may come in anything."""

    parts: dict[str, Any]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.always = nn.Linear(6, 6)
        self.even = nn.Linear(6, 6)  # in every other iteration
        self.one_rank = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x: Tensor, step: int, here: bool) -> Nested:
        hidden = torch.tanh(self.always(x))
        if step % 2 == 0:
            hidden = self.even(hidden)
        outputs = [hidden]
        if here:
            outputs.append(self.one_rank(hidden))
        return Nested({"list": outputs, "text": "none", "pair": (1, None)})


def gradients_of(model: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train_branches(
    model: Any, rank: int, size: int, *, accumulate: bool, set_to_none: bool
) -> list[Gradients]:
    results = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        model.zero_grad(set_to_none=set_to_none)
        here = rank == step % size
        if accumulate:  # what is used only here counts, too
            with model.no_sync():
                outputs = model(torch.randn(3, 6, generator=generator), step + 1, here)
                sum(o.sum() for o in outputs.parts["list"]).backward()
            here = False
        outputs = model(torch.randn(3, 6, generator=generator), step, here)
        sum((o**2).mean() for o in outputs.parts["list"]).backward()
        results.append(gradients_of(model))
    return results


def same(expected: Gradients, actual: Gradients) -> None:
    assert [e is None for e in expected] == [a is None for a in actual]
    for e, a in zip(expected, actual, strict=True):
        if e is not None:
            torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7)


def compare_branches(  # noqa: PLR0917 - one for each parameter of the test
    rank: int, size: int, store: str, views: bool, accumulate: bool, set_to_none: bool
) -> None:
    with process_group("gloo", store, rank, size):
        runs = [
            train_branches(
                wrapper(
                    Branches(),
                    find_unused_parameters=True,
                    gradient_as_bucket_view=views,
                    bucket_cap_mb=1e-4,
                ),
                rank,
                size,
                accumulate=accumulate,
                set_to_none=set_to_none,
            )
            for wrapper in (TorchDDP, DistributedDataParallel)
        ]
        for expected, actual in zip(*runs, strict=True):
            same(expected, actual)
        # Nobody has used these.
        assert all(g is None or not g.any() for g in runs[1][-1][-2:])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_unused_parameters_end_as_with_torch(  # noqa: PLR0917
    ranks: Ranks,
    meeting: Callable[[], str],
    size: int,
    views: bool,
    accumulate: bool,
    set_to_none: bool,
) -> None:
    ranks.run(compare_branches, meeting(), views, accumulate, set_to_none, size=size)


def keep_stale(rank: int, size: int, store: str, views: bool) -> None:
    """Three equal numbers divided and added need not give the number: unused means untouched."""
    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(
            Branches(), find_unused_parameters=True, gradient_as_bucket_view=views
        )
        for step in (0, 0, 1):
            outputs = model(torch.full((3, 6), 0.1 + rank), step, False)
            before = gradients_of(model)
            outputs.parts["list"][0].sum().backward()
        assert before[2] is not None
        assert torch.equal(model.module.even.weight.grad, before[2])
        assert model.reducer._get_local_used_map().tolist() == [size, size, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_that_nobody_used_is_left_as_it_is(
    ranks: Ranks, meeting: Callable[[], str], views: bool
) -> None:
    ranks.run(keep_stale, meeting(), views, size=3)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def lose_an_output(rank: int, size: int, store: str) -> None:
    """An output that takes no part in the loss is not used, though the walk reaches it."""
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(TwoOutputs(), find_unused_parameters=True)
        x = torch.full((2, 6), float(rank + 1))
        for _ in range(3):
            model.zero_grad()
            model(x)[0].sum().backward()
            assert model.module.second.weight.grad is None
            assert model.module.first.weight.grad[0, 0] == 2 * sum(range(1, size + 1)) / size
        # And if one rank uses it, every rank gets its part.
        model(x)[rank != 0].sum().backward()
        assert model.module.second.weight.grad[0, 0] == 2 * sum(range(2, size + 1)) / size


def test_an_output_without_a_part_in_the_loss_is_unused(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(lose_an_output, meeting(), size=2)


class Detour(nn.Module):
    """A rank that takes it uses no parameter at all, but its output requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, around: bool) -> Tensor:
        return x * 2 if around else self.layer(x)


def use_nothing(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        model = DistributedDataParallel(Detour(), find_unused_parameters=True)
        for step in range(3):
            model.zero_grad()
            x = torch.ones(2, 6, requires_grad=True)
            model(x, around=rank == step % 2).sum().backward()
            assert model.module.layer.weight.grad[0, 0] == 2 / size
        model(x, around=True)  # and no backward


def test_a_rank_that_uses_nothing_holds_up_nobody(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(use_nothing, meeting(), size=2)


def skip_buckets(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(
            Branches(),
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
            bucket_cap_mb=1e-5,
        )
        buckets = model._get_ddp_logging_data()["num_buckets_reduced"]
        for step in (0, 1, 2, 3):
            model.zero_grad()
            outputs = model(torch.full((2, 6), float(rank + 1)), step, False).parts["list"]
            outputs[0].sum().backward()
            reduced = model._get_ddp_logging_data()["num_buckets_reduced"]
            assert reduced == buckets - 4 - 2 * (step % 2)
            assert model.module.never.weight.grad is None
            assert (model.module.even.weight.grad is None) == (step % 2 == 1)
        digests: list[Any] = [None] * size
        torch.distributed.all_gather_object(digests, gradients_of(model))
        for digest in digests[1:]:
            same(digests[0], digest)


def test_buckets_of_unused_parameters_can_be_skipped(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(skip_buckets, meeting(), size=2)


def disagree(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        DistributedDataParallel(Branches(), find_unused_parameters=rank == 0)


def test_ranks_must_agree_on_what_is_looked_for(ranks: Ranks, meeting: Callable[[], str]) -> None:
    for outcome in ranks.outcomes(disagree, meeting(), size=2):
        assert isinstance(outcome.error, gradsync.MismatchError)
        assert "find_unused_parameters=True" in str(outcome.error)


class OnePath(nn.Module):
    """Whichever layer is not named gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("left", "right")})

    def forward(self, x: Tensor, path: str) -> Tensor:
        return self.layers[path](x)


def give_up_one_by_one(rank: int, size: int, store: str) -> None:
    """Each rank begins when the last one has given up. All of them hand something over."""
    path, lacking = [("left", "right"), ("right", "left")][rank % 2]
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(OnePath(), bucket_cap_mb=0)
        for turn in range(size):
            if turn == rank:
                model(torch.ones(2, 6), path).sum().backward()
                with pytest.raises(RuntimeError, match=rf"for rank {rank}: layers\.{lacking}") as e:
                    model(torch.ones(2, 6), path)
                assert model._get_ddp_logging_data()["error"] in str(e.value)
            torch.distributed.barrier()


def test_every_rank_that_leaves_parameters_out_names_its_own(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(give_up_one_by_one, meeting(), size=3)


def give_up_alone(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(OnePath(), bucket_cap_mb=0)
        x = torch.ones(2, 6)
        if rank == 1:
            model(x, "left").sum().backward()
            with pytest.raises(RuntimeError, match=r"for rank 1: layers\.right"):
                model(x, "left")
        torch.distributed.barrier()
        if rank == 0:
            loss = (model(x, "left") + model.module(x, "right")).sum()
            with pytest.raises(RuntimeError, match=r"for rank 1: layers\.right"):
                loss.backward()


def test_a_rank_that_leaves_nothing_out_is_told_by_its_backward(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(give_up_alone, meeting(), size=2)


def buckets_under_find(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 40), nn.Linear(40, 2))
        caps: dict[str, Any] = {"bucket_cap_mb": 2e-3, "find_unused_parameters": True}
        ours, torchs = DistributedDataParallel(layers, **caps), TorchDDP(layers, **caps)
        sizes = [m._get_ddp_logging_data()["bucket_sizes"] for m in (ours, torchs)]
        assert sizes[0] == sizes[1]
        assert len(sizes[0].split()) > 2


def test_buckets_are_torchs_where_unused_parameters_are_looked_for(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(buckets_under_find, meeting(), size=2)


def forget_outside(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        model = DistributedDataParallel(TwoOutputs(), find_unused_parameters=True)
        model._set_ddp_sink_clone(False)
        # The second output is hidden from the wrapper, so its parameters count as unused.
        kept: list[Tensor] = []

        def hide(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            kept.append(output)
            return output.detach()

        model.module.second.register_forward_hook(hide)
        first, _ = model(torch.ones(2, 6))
        (first.sum() + kept[0].sum()).backward()


def test_a_parameter_used_behind_the_wrappers_back_is_named(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    outcomes = ranks.outcomes(forget_outside, meeting(), size=2)
    assert any(
        "Expected to mark a variable ready only once" in str(outcome.error) for outcome in outcomes
    )


# ---- static_graph -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """One layer in several checkpoints, one in none, one unused."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(6, 6)
        self.plain = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.plain(x)
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=self.reentrant)
        return {"out": x}


def compare_static(  # noqa: PLR0917 - one for each parameter of the test
    rank: int, size: int, store: str, reentrant: bool, views: bool, accumulate: bool
) -> None:
    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(
            Checkpointed(reentrant),
            static_graph=True,
            gradient_as_bucket_view=views,
            bucket_cap_mb=1e-4,
        )
        plain = Checkpointed(reentrant)
        for step in range(5):
            model.zero_grad(set_to_none=step != 2)
            plain.zero_grad()
            if accumulate:
                with model.no_sync():
                    model(torch.full((2, 6), float(step + rank)))["out"].sum().backward()
            model(torch.full((2, 6), float(rank + 1)))["out"].sum().backward()
            for r in range(size):
                if accumulate:
                    (plain(torch.full((2, 6), float(step + r)))["out"].sum() / size).backward()
                (plain(torch.full((2, 6), float(r + 1)))["out"].sum() / size).backward()
            same(gradients_of(plain)[:4], gradients_of(model)[:4])
            unused = model.module.unused.weight.grad
            assert unused is None or not unused.any()
        assert model._get_ddp_logging_data()["has_rebuilt_buckets"] == 1


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "no_sync first"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_static_graph_takes_any_checkpointing(
    ranks: Ranks, meeting: Callable[[], str], reentrant: bool, views: bool, accumulate: bool
) -> None:
    ranks.run(compare_static, meeting(), reentrant, views, accumulate, size=2)


def use_on_one_rank(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(Branches(), static_graph=True)
        for _ in range(4):
            model.zero_grad()
            outputs = model(torch.ones(2, 6), 0, rank == 0).parts["list"]
            outputs[-1].sum().backward()
            everyones: list[Any] = [None] * size
            torch.distributed.all_gather_object(everyones, gradients_of(model))
            same(everyones[0], everyones[1])
            assert everyones[0][4] is not None
            assert everyones[0][6] is None


def test_a_static_graph_may_differ_by_rank(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(use_on_one_rank, meeting(), size=2)


def change(rank: int, size: int, store: str, first: int, then: int) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        model = DistributedDataParallel(Branches(), static_graph=True)
        for step in (first, first, then, then):
            model(torch.ones(2, 6), step, False).parts["list"][0].sum().backward()


@pytest.mark.parametrize(("first", "then"), [(1, 0), (0, 1)], ids=["more used", "less used"])
def test_a_graph_that_is_not_static_raises(
    ranks: Ranks, meeting: Callable[[], str], first: int, then: int
) -> None:
    outcomes = ranks.outcomes(change, meeting(), first, then, size=2)
    assert all(isinstance(outcome.error, RuntimeError) for outcome in outcomes)
    told = " ".join(str(outcome.error) for outcome in outcomes)
    assert "our training graph has changed in this iteration" in told
    assert "even.weight" in told or "even.bias" in told


def set_it_late(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(nn.Linear(6, 6))
        model._set_static_graph()
        with pytest.warns(UserWarning, match="no need to set it again"):
            model._set_static_graph()
        for _ in range(3):
            model(torch.ones(1, 6)).sum().backward()
        model = DistributedDataParallel(nn.Linear(6, 6))
        model(torch.ones(1, 6)).sum().backward()
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            model._set_static_graph()


def test_a_static_graph_is_set_before_training(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(set_it_late, meeting(), size=2)
