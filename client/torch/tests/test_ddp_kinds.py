"""Gradients and options of every kind: each ends as with torch over gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision
from training import batch_norm, make, mlp, process_group

from gradsync.torch import DistributedDataParallel

Run = Callable[[Any, int, int], list[Tensor]]


def both(rank: int, size: int, store: str, run: Run) -> None:
    """Calls `run(wrapper, rank, size)` over torch and over gradsync, and compares."""
    results = []
    for backend, wrapper in (("gloo", TorchDDP), ("gradsync", DistributedDataParallel)):
        with process_group(backend, f"{store}-{backend}", rank, size):
            torch.manual_seed(11)
            results.append(run(wrapper, rank, size))
    assert len(results[0]) == len(results[1]) > 0
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.to_dense(), expected.to_dense(), rtol=1e-5, atol=1e-6)


def clones(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


class ComplexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.two = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x.to(torch.complex64) @ self.one).to(torch.complex128) @ self.two).abs() * (
            self.real
        )


def complex_types(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    results = []
    for views in (False, True):
        model = wrapper(ComplexLayer(), gradient_as_bucket_view=views)
        for step in range(3):
            model.zero_grad()
            model(torch.full((2, 6), float(step + rank + 1))).sum().backward()
            results += clones(model)
    return results


def double_backward(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    results = []
    for views in (False, True):
        model = wrapper(mlp(), gradient_as_bucket_view=views)
        for step in range(3):
            model.zero_grad()
            x = torch.full((2, 6), float(step + rank + 1), requires_grad=True)
            loss = model(x).tanh().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
            results += clones(model)
    return results


def loss_scaling(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    model = wrapper(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    results = []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.full((2, 6), float(step + rank))).square().mean()
        if step == 2 and rank == 0:
            loss = loss * float("inf")  # every rank must skip this step
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        results += [p.detach().clone() for p in model.parameters()]
        results.append(torch.tensor(scaler.get_scale()))
    return results


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def tied_weights(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    results = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = wrapper(Tied(), **options)
        assert len(list(model.parameters())) == 1
        for step in range(3):
            model.zero_grad()
            model(torch.tensor([rank, step])).square().sum().backward()
            results += clones(model)
    return results


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.bag = nn.EmbeddingBag(5, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, bag: bool = True) -> Tensor:
        hidden = self.table(tokens)
        if bag:
            hidden = hidden + self.bag(tokens.reshape(-1, 1) % 5)
        return self.head(hidden)


def sparse_gradients(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    results = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5}):
        model = wrapper(Rows(), **options)
        sparse = [model.module.table.weight, model.module.bag.weight]
        dense = torch.optim.SGD(model.module.head.parameters(), lr=0.1)
        rows = torch.optim.SparseAdam(sparse, lr=0.1)
        for step in range(3):
            model.zero_grad()
            tokens = torch.arange(rank + 1) + step  # the ranks have different numbers of rows
            model(tokens).square().sum().backward()
            assert all(p.grad.is_sparse for p in sparse)
            results += [p.grad.coalesce().clone() for p in sparse]
            dense.step()
            rows.step()
            results += [p.detach().clone() for p in model.parameters()]
    return results


def delayed(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    module = mlp()
    names = ["4.weight", "4.bias"]
    model = wrapper(
        module,
        delay_all_reduce_named_params=[(name, module.get_parameter(name)) for name in names],
        param_to_hook_all_reduce=module.get_parameter("2.weight"),
    )
    results = []
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 6), float(step + rank))).sum().backward()
        dist.barrier()  # torch does not wait for the end of it
        results += clones(model)
    with pytest.raises(ValueError, match="need to be set at the same time"):
        wrapper(mlp(), delay_all_reduce_named_params=[])
    return results


def bucket_lists(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    model = wrapper(
        mlp(),
        bucket_cap_mb_list=[1e-4, 2e-4],
        batched_grad_copy=True,
        lazy_bucket_allocation=True,
    )
    results = []
    for step in range(3):
        model.zero_grad()
        model(torch.full((2, 6), float(step + rank))).sum().backward()
        results += clones(model)
    return results


def buffer_hook(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    def average(state: Any, buffers: dict[str, Tensor]) -> list[Any]:
        works = [
            dist.all_reduce(b, async_op=True) for b in buffers.values() if b.is_floating_point()
        ]
        return [work.get_future() for work in works if work is not None]

    model = wrapper(batch_norm())
    model._register_buffer_comm_hook(None, average, _BufferCommHookLocation.POST_FORWARD)
    results = []
    for step in range(3):
        model.zero_grad()
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(step + rank))
        ).sum().backward()
        results += [b.clone() for b in model.module.buffers()]
    return results


def manual_end(wrapper: Any, rank: int, size: int) -> list[Tensor]:
    model = wrapper(mlp())
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        model.finalize_backward()
    model.require_manual_backward_finalization = True
    results = []
    for step in range(4):
        model.zero_grad()
        output = model(torch.full((2, 6), float(step + rank))).sum()
        with pytest.raises(RuntimeError, match="cannot be called after forward"):
            model.require_manual_backward_finalization = False
        with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
            model.finalize_backward()
        output.backward()
        model.finalize_backward()
        with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
            model.finalize_backward()
        results += clones(model)
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward pass"):
        model(torch.ones(1, 6))
    return results


RUNS = [
    complex_types,
    double_backward,
    loss_scaling,
    tied_weights,
    sparse_gradients,
    delayed,
    bucket_lists,
    buffer_hook,
    manual_end,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_it_ends_as_with_torch(ranks: Ranks, meeting: Callable[[], str], run: Run) -> None:
    ranks.run(both, meeting(), run, size=2)


# ---- What torch cannot do on a CPU --------------------------------------------------------------


def differentiate_twice(rank: int, size: int, store: str, views: bool) -> None:
    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(mlp(), gradient_as_bucket_view=views)
        single = copy.deepcopy(model.module)
        for _ in range(3):
            for run, inputs in ((model, [rank]), (single, range(size))):
                run.zero_grad()
                for value in inputs:
                    loss = run(torch.full((2, 6), float(value))).tanh().sum()
                    if run is single:
                        loss = loss / size
                    loss.backward(create_graph=True)
            for p, q in zip(model.module.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(p.grad.detach(), q.grad.detach())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("views", [False, True])
def test_create_graph_averages_the_values(
    ranks: Ranks, meeting: Callable[[], str], views: bool
) -> None:
    ranks.run(differentiate_twice, meeting(), views, size=2)


def use_less_precision(rank: int, size: int, store: str, reduce: torch.dtype) -> None:
    with process_group("gradsync", store, rank, size):
        module = make("mlp", torch.float32, seed=4)
        single = copy.deepcopy(module).bfloat16()
        model: Any = DistributedDataParallel(
            module,
            mixed_precision=_MixedPrecision(torch.bfloat16, reduce, torch.bfloat16),
        )
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(3):
            model.zero_grad()
            output = model(torch.full((2, 6), float(step + rank)))
            assert output.dtype == torch.bfloat16
            output.sum().backward()
            sums = [torch.zeros_like(p) for p in before]
            for r in range(size):
                single.zero_grad()
                single(torch.full((2, 6), float(step + r)).bfloat16()).sum().backward()
                for total, p in zip(sums, single.parameters(), strict=True):
                    total.add_(p.grad.float())  # type: ignore[union-attr]
            for p, kept, total in zip(model.parameters(), before, sums, strict=True):
                assert p.dtype == p.grad.dtype == torch.float32
                assert torch.equal(p, kept)
                torch.testing.assert_close(p.grad, total / size, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float32], ids=str)
def test_mixed_precision(ranks: Ranks, meeting: Callable[[], str], reduce: torch.dtype) -> None:
    ranks.run(use_less_precision, meeting(), reduce, size=2)


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](x)


def use_less_precision_on_some_ways(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(
            Ways(),
            find_unused_parameters=True,
            mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        )
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 6), 2.0), rank).sum().backward()
            for way, layer in enumerate(model.module.ways):
                assert layer.weight.dtype == torch.float32
                if way == 2:  # that nobody takes
                    assert layer.weight.grad is None
                    continue
                assert layer.weight.grad.dtype == torch.float32
                assert torch.equal(layer.weight.grad, torch.full((4, 6), 2.0 / size))
        model(torch.full((1, 6), 4.0), 0).sum().backward()  # added to what is there
        for way, value in ((0, 1 + 4), (1, 1)):
            assert torch.equal(model.module.ways[way].weight.grad, torch.full((4, 6), float(value)))


def test_mixed_precision_with_unused_parameters(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(use_less_precision_on_some_ways, meeting(), size=2)


def step_in_backward(rank: int, size: int, store: str, views: bool) -> None:
    with process_group("gradsync", store, rank, size):
        results = []
        for in_backward in (True, False):
            module: Any = make("mlp", torch.float32, seed=6)
            if in_backward:
                _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
            model: Any = DistributedDataParallel(module, gradient_as_bucket_view=views)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                model(torch.full((2, 6), float(step + rank))).square().mean().backward()
                assert all((p.grad is None) == in_backward for p in model.parameters())
                optimizer.step()
            results.append([p.detach().clone() for p in model.parameters()])
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("views", [False, True])
def test_optimisers_that_step_in_backward(
    ranks: Ranks, meeting: Callable[[], str], views: bool
) -> None:
    ranks.run(step_in_backward, meeting(), views, size=2)


# ---- What torch is not asked for here -----------------------------------------------------------


def rows_on_three(rank: int, size: int, store: str) -> None:
    """Rows that some ranks lack, and a table that a rank, or all, leave unused."""
    with process_group("gradsync", store, rank, size):
        torch.manual_seed(1)
        model = DistributedDataParallel(Rows(), find_unused_parameters=True)
        single = copy.deepcopy(model.module)
        for step in range(3):
            model.zero_grad()
            single.zero_grad()
            users = [[0], [0, 2], []][step]
            model(torch.arange(rank + 1), bag=rank in users).square().sum().backward()
            for r in range(size):
                (single(torch.arange(r + 1), bag=r in users).square().sum() / size).backward()
            for (name, p), q in zip(
                model.module.named_parameters(), single.parameters(), strict=True
            ):
                assert (p.grad is None) == (q.grad is None), name
                if p.grad is not None:
                    torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense())


def test_sparse_gradients_that_some_ranks_lack(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(rows_on_three, meeting(), size=3)


def dense_where_sparse(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        module: Any = nn.Sequential(nn.Embedding(3, 2, sparse=True))
        model = DistributedDataParallel(module)
        module[0].sparse = False
        model(torch.tensor([rank])).sum().backward()


def sparse_where_dense(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        module: Any = nn.Sequential(nn.Embedding(3, 2))
        model = DistributedDataParallel(module)
        module[0].sparse = True
        model(torch.tensor([rank])).sum().backward()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (dense_where_sparse, "Expected variable to have sparse gradient"),
        (sparse_where_dense, '"0.weight" has a sparse gradient'),
    ],
)
def test_a_gradient_of_the_wrong_kind_is_named(
    ranks: Ranks, meeting: Callable[[], str], function: Callable[..., None], message: str
) -> None:
    for outcome in ranks.outcomes(function, meeting(), size=2):
        assert isinstance(outcome.error, RuntimeError)
        assert message in str(outcome.error)


def shrink(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        pair: Any = dist.new_group([0, 1])
        model = DistributedDataParallel(mlp(), static_graph=True)
        x = torch.full((1, 6), float(rank))
        for _ in range(3):
            model(x).sum().backward()
        model._update_process_group(pair)
        if rank == 2:
            return
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
        gradients: list[Any] = [None, None]
        dist.all_gather_object(gradients, [p.grad for p in model.parameters()], group=pair)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
        assert model.module[0].weight.grad is not None


def test_the_ranks_can_become_fewer(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(shrink, meeting(), size=3)


def forward_twice(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            model = DistributedDataParallel(mlp(), **options)  # type: ignore[arg-type]
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(1, 6))
                model(torch.full((1, 6), float(rank))).sum().backward()
                gradients: list[Any] = [None] * size
                dist.all_gather_object(gradients, clones(model))
                torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_forward_needs_no_backward(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(forward_twice, meeting(), size=2)


def mix_devices(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
        with pytest.raises(ValueError, match="same type of devices"):
            DistributedDataParallel(mixed)


def test_a_module_on_mixed_devices_is_refused(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(mix_devices, meeting(), size=2)
