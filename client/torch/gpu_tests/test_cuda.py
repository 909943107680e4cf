"""gradsync.torch on a GPU: several ranks on the first CUDA device.

Each scenario is a function that every rank runs; it raises if something is wrong. To be run where
there is a device, by `scripts/gpu-check`: elsewhere everything is skipped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_collectives import COMPLEX, FLOATING, INTEGER, MOVED, OTHER, expectation, sample
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision
from training import process_group

import gradsync
from gradsync.torch import DistributedDataParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
SIZE = 2
STEPS = 6
WIDTH = 96  # gradients that are large enough to be lent, beside biases that are not
VICTIM = 1
# The promise is a second; the GPU may be busy.
PROMPTLY_S = 10.0
Scenario = Callable[[int, int], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def run_scenario(rank: int, size: int, store: str, name: str) -> None:
    torch.cuda.set_device(DEVICE)
    with process_group("gradsync", store, rank, size):
        SCENARIOS[name](rank, size)
        torch.cuda.synchronize()


# ---- Training ----------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Its last layer may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, extra: bool = True) -> Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        return self.extra(hidden) if extra else hidden


def make_mlp(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp().double().to(DEVICE)


def whole_batch(step: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * size, WIDTH, generator=generator, dtype=torch.float64).to(DEVICE)


def loss_of(output: Tensor) -> Tensor:
    return (output**2).mean()


def gradients_of(module: nn.Module) -> list[Tensor]:
    gradients = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad)
    return gradients


def same_everywhere(tensors: list[Tensor]) -> None:
    """Bitwise."""
    ours = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, ours)
    for theirs in everyones:
        assert torch.equal(theirs, ours)


def train_beside(
    rank: int,
    size: int,
    *,
    accumulate: int = 1,
    set_to_none: bool = True,
    prepare: Callable[[Any], None] = lambda _: None,
    rtol: float = 1e-9,
    use_extra: Callable[[int, int], bool] = lambda _step, _rank: True,
    **options: Any,
) -> None:
    """Trains on this rank's part of each batch, and a plain module on all of it."""
    model = DistributedDataParallel(make_mlp(seed=rank), **options)  # rank 0's is what counts
    prepare(model)
    reference = make_mlp(seed=0)
    pairs = list(zip(model.module.parameters(), reference.parameters(), strict=True))
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        ours.zero_grad(set_to_none=set_to_none)
        theirs.zero_grad(set_to_none=set_to_none)
        for part in range(accumulate):
            batch = whole_batch(step * accumulate + part, size)
            mine = batch.chunk(size)[rank]
            with nullcontext() if part == accumulate - 1 else model.no_sync():
                loss_of(model(mine, use_extra(step, rank))).backward()
            for other, x in enumerate(batch.chunk(size)):
                (loss_of(reference(x, use_extra(step, other))) / size).backward()
        for parameter, expected in pairs:
            if expected.grad is None:
                assert parameter.grad is None
                continue
            assert parameter.grad.device == DEVICE
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=rtol, atol=rtol)
        ours.step()
        theirs.step()
    for parameter, expected in pairs:
        torch.testing.assert_close(parameter, expected, rtol=rtol, atol=rtol)
    same_everywhere(list(model.module.parameters()))


@scenario
def ddp_by_default(rank: int, size: int) -> None:
    train_beside(rank, size)
    train_beside(rank, size, bucket_cap_mb=0.01)
    train_beside(rank, size, set_to_none=False)


@scenario
def ddp_with_views(rank: int, size: int) -> None:
    train_beside(rank, size, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
    train_beside(rank, size, gradient_as_bucket_view=True, set_to_none=False)


@scenario
def ddp_accumulates(rank: int, size: int) -> None:
    for views in (False, True):
        train_beside(rank, size, accumulate=3, gradient_as_bucket_view=views)


@scenario
def ddp_finds_unused_parameters(rank: int, size: int) -> None:
    for views in (False, True):
        train_beside(
            rank,
            size,
            find_unused_parameters=True,
            gradient_as_bucket_view=views,
            use_extra=lambda step, which: step % 3 != 0 and (step % 3 != 1 or which == 0),
        )


@scenario
def ddp_with_a_static_graph(rank: int, size: int) -> None:
    train_beside(rank, size, static_graph=True)
    train_beside(rank, size, static_graph=True, use_extra=lambda _step, _rank: False)


@scenario
def ddp_with_communication_hooks(rank: int, size: int) -> None:
    def with_hook(hook: Callable[..., Any]) -> Callable[[Any], None]:
        return lambda model: model.register_comm_hook(None, hook)

    train_beside(rank, size, prepare=with_hook(default_hooks.allreduce_hook))
    train_beside(rank, size, prepare=with_hook(default_hooks.fp16_compress_hook), rtol=2e-2)
    train_beside(rank, size, prepare=with_hook(default_hooks.bf16_compress_hook), rtol=1e-1)
    half = dist.BuiltinCommHookType.FP16_COMPRESS
    train_beside(
        rank, size, prepare=lambda model: model._register_builtin_comm_hook(half), rtol=2e-2
    )


@scenario
def ddp_moves_inputs(rank: int, size: int) -> None:
    model = DistributedDataParallel(make_mlp(), device_ids=[0], output_device=0)
    output = model(whole_batch(0, size).cpu())
    assert output.device == DEVICE
    loss_of(output).backward()
    same_everywhere(gradients_of(model))
    assert model._get_ddp_logging_data()["device_ids"] == "0"


@scenario
def ddp_on_a_side_stream(rank: int, size: int) -> None:
    """Construction, forward and backward each on another stream."""
    build, run = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(build):
        model = DistributedDataParallel(make_mlp(), bucket_cap_mb=0.01)
    run.wait_stream(build)
    reference = make_mlp()
    for step in range(STEPS):
        batch = whole_batch(step, size)
        run.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(run):
            model.zero_grad()
            output = model(batch.chunk(size)[rank])
            torch.cuda._sleep(10_000_000)
            loss_of(output).backward()
            gradients = [gradient.clone() for gradient in gradients_of(model)]
        torch.cuda.current_stream().wait_stream(run)
        reference.zero_grad()
        loss_of(reference(batch)).backward()
        for ours, theirs in zip(gradients, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad, rtol=1e-9, atol=1e-9)


def iterate_once(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model(batch)).backward()
    optimizer.step()


@scenario
def steady_iteration_does_not_wait(rank: int, size: int) -> None:
    """The GPU is kept busy for longer than the host may take for an iteration."""
    for views in (False, True):
        model = DistributedDataParallel(
            nn.Sequential(make_mlp(), nn.BatchNorm1d(WIDTH).double().to(DEVICE)),
            gradient_as_bucket_view=views,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        iterate = partial(iterate_once, model, optimizer, whole_batch(0, size))
        for _ in range(3):
            iterate()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(4_000_000_000)  # two seconds or so
            begin = time.monotonic()
            iterate()
            iterate()
            on_host = time.monotonic() - begin
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with_gpu = time.monotonic() - begin
        assert on_host < with_gpu / 2, (on_host, with_gpu)


@scenario
def kept_gradients_stay(rank: int, size: int) -> None:
    """What a user keeps of a gradient does not change with the next iterations."""
    model = DistributedDataParallel(make_mlp())
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model(whole_batch(step, size).chunk(size)[rank])).backward()
        kept += [(gradient, gradient.clone()) for gradient in gradients_of(model)]
    for gradient, copy in kept:
        assert torch.equal(gradient, copy)


@scenario
def batch_norm_buffers_are_rank_0s(rank: int, size: int) -> None:
    module = nn.Sequential(make_mlp(), nn.BatchNorm1d(WIDTH).double().to(DEVICE))
    model = DistributedDataParallel(module)
    for step in range(3):
        loss_of(model(whole_batch(step, size).chunk(size)[rank])).backward()
    norm: Any = module[1]
    assert norm.num_batches_tracked.item() == 3
    model.eval()
    model(whole_batch(0, size))
    same_everywhere(list(module.buffers()))


@scenario
def sync_batch_norm(rank: int, size: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(DEVICE)

    reference = make()
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(make()))
    for step in range(STEPS):
        batch = whole_batch(step, size).float()
        model.zero_grad()
        reference.zero_grad()
        loss_of(model(batch.chunk(size)[rank])).backward()
        loss_of(reference(batch)).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    for buffer, expected in zip(model.module.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-3, atol=1e-5)


@scenario
def mixed_precision(rank: int, size: int) -> None:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = DistributedDataParallel(make_mlp().float(), mixed_precision=precision)
    reference = make_mlp().float()
    for step in range(3):
        batch = whole_batch(step, size).float()
        model.zero_grad()
        reference.zero_grad()
        loss_of(model(batch.chunk(size)[rank])).backward()
        loss_of(reference(batch)).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert ours.dtype == torch.float32
            assert ours.grad is not None
            assert ours.grad.dtype == torch.float32
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.2, atol=2e-3)
        same_everywhere(gradients_of(model))


@scenario
def autocast_with_a_scaler(rank: int, size: int) -> None:
    model = DistributedDataParallel(make_mlp().float())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model(whole_batch(step, size).float().chunk(size)[rank]).float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    same_everywhere(list(model.parameters()))


@scenario
def sparse_gradients(rank: int, size: int) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)).double().to(DEVICE)
    )
    model(torch.tensor([rank, 5], device=DEVICE)).sum().backward()
    gradient = model.module[0].weight.grad.to_dense()
    same_everywhere([gradient])
    assert sorted(set(gradient.nonzero()[:, 0].tolist())) == sorted({*range(size), 5})


@scenario
def join_with_uneven_inputs(rank: int, size: int) -> None:
    model = DistributedDataParallel(make_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model(whole_batch(step, size).chunk(size)[rank])).backward()
            optimizer.step()
    same_everywhere(list(model.parameters()))


@scenario
def a_module_on_two_devices_is_refused(rank: int, size: int) -> None:
    split = nn.Sequential(nn.Linear(2, 2).to(DEVICE), nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="several devices"):
        DistributedDataParallel(split)
    with pytest.raises(ValueError, match="device_ids"):
        DistributedDataParallel(make_mlp(), device_ids=[0, 1])


# ---- Collectives -------------------------------------------------------------------------------


def on_gpu(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (257,)) -> Tensor:
    return sample(dtype, rank, shape).to(DEVICE)


@scenario
def all_reduce_of_every_type(rank: int, size: int) -> None:
    ops = {
        dist.ReduceOp.SUM: [*FLOATING, *INTEGER, *COMPLEX, *OTHER],
        dist.ReduceOp.AVG: [*FLOATING, *COMPLEX],
        dist.ReduceOp.PRODUCT: [*FLOATING, *INTEGER, *COMPLEX, *OTHER],
        dist.ReduceOp.MIN: [*FLOATING, *INTEGER, *OTHER],
        dist.ReduceOp.MAX: [*FLOATING, *INTEGER, *OTHER],
    }
    group = dist.distributed_c10d._get_default_group()
    for op, dtypes in ops.items():
        for dtype in dtypes:
            tensor = on_gpu(dtype, rank)
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group.allreduce([tensor], options).wait()
            expected = expectation(op, dtype, size)
            assert torch.equal(tensor.cpu(), expected), (op, dtype)


@scenario
def moves_of_every_type(rank: int, size: int) -> None:
    for dtype in MOVED:
        tensor = on_gpu(dtype, rank)
        dist.broadcast(tensor, src=1)
        assert bits(tensor).equal(bits(on_gpu(dtype, 1))), dtype
        gathered = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(gathered, on_gpu(dtype, rank))
        for other in range(size):
            assert bits(gathered[other]).equal(bits(on_gpu(dtype, other))), dtype
        flat = torch.empty((size, 257), dtype=dtype, device=DEVICE)
        dist.all_gather_into_tensor(flat, on_gpu(dtype, rank))
        assert bits(flat).equal(torch.cat([bits(one) for one in gathered])), dtype


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


@scenario
def reduce_scatter_of_many_types(rank: int, size: int) -> None:
    for dtype in [*FLOATING, *INTEGER]:
        inputs = [on_gpu(dtype, rank + other) for other in range(size)]
        expected = sum(on_gpu(dtype, other + rank).double() for other in range(size))
        output = torch.empty_like(inputs[0])
        dist.reduce_scatter(output, inputs)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=0)
        output = torch.empty_like(inputs[0])
        dist.reduce_scatter_tensor(output, torch.cat(inputs))
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=0)


@scenario
def large_all_reduce(rank: int, size: int) -> None:
    """Larger than any staging memory."""
    tensor = torch.full((48 << 20,), float(rank + 1), device=DEVICE)
    dist.all_reduce(tensor)
    assert bool((tensor == sum(range(1, size + 1))).all())


@scenario
def any_layout(rank: int, size: int) -> None:
    for asynchronous in (False, True):
        whole = on_gpu(torch.float32, rank, (6, 8))
        before = whole.clone()
        part = whole[1:5, ::2]
        work = dist.all_reduce(part, async_op=asynchronous)
        if work is not None:
            work.wait()
        everyones = [on_gpu(torch.float32, other, (6, 8)) for other in range(size)]
        expected = torch.stack(everyones).sum(0)
        assert torch.equal(part, expected[1:5, ::2])
        assert torch.equal(whole[:, 1::2], before[:, 1::2])
    empty = torch.empty(0, device=DEVICE)
    dist.all_reduce(empty)


@scenario
def both_kinds_of_memory_in_one_group(rank: int, size: int) -> None:
    """Neither waits for the other's order."""
    on_cpu, there = torch.ones(3), torch.ones(3, device=DEVICE)
    works = []
    for _ in range(20):
        works += [dist.all_reduce(on_cpu, async_op=True), dist.all_reduce(there, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    assert on_cpu.tolist() == there.tolist() == [float(size**20)] * 3


@scenario
def works_have_the_meaning_of_streams(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(1, device=DEVICE))
    torch.cuda.synchronize()
    dist.barrier()
    tensor = torch.ones(1 << 20, device=DEVICE)
    torch.cuda._sleep(1_000_000_000)
    begin = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert not work.is_completed()
    future = work.get_future().then(lambda done: done.value()[0] * 3)
    work.wait()  # the stream
    doubled = tensor * 2
    assert time.monotonic() - begin < 0.2
    assert work.wait(timedelta(seconds=30))  # the host, too
    assert work.is_completed()
    assert work.is_success()
    assert torch.equal(doubled, torch.full_like(doubled, 2 * size))
    assert torch.equal(future.wait(), torch.full_like(doubled, 3 * size))
    dist.barrier(device_ids=[0])


@scenario
def overlapping_works_on_side_streams(rank: int, size: int) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    for round_ in range(20):
        results = []
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                tensor = torch.full((100_000,), float(rank + index + round_), device=DEVICE)
                work = dist.all_reduce(tensor, async_op=True)
                assert work is not None
                results.append((index, stream, tensor, work))
        for index, stream, tensor, work in reversed(results):
            with torch.cuda.stream(stream):
                work.wait()
                expected = sum(float(other + index + round_) for other in range(size))
                assert bool((tensor == expected).all())


@scenario
def memory_freed_early_is_not_given_away(rank: int, size: int) -> None:
    """Allocate, begin, free, allocate again: the second must not be written into."""
    for round_ in range(50):
        torch.cuda._sleep(2_000_000)
        tensor = torch.full((1 << 18,), float(rank), device=DEVICE)
        dist.all_reduce(tensor, async_op=True)  # of which nobody ever asks again
        flat = torch.full((1 << 18,), float(round_), device=DEVICE)[::2]
        dist.all_reduce(flat, async_op=True)
        del tensor, flat
        again = [torch.full((1 << 18,), -1.0, device=DEVICE) for _ in range(3)]
        torch.cuda.synchronize()
        for one in again:
            assert bool((one == -1.0).all()), round_


@scenario
def what_is_not_offered_is_refused(rank: int, size: int) -> None:
    tensor = torch.ones(4, device=DEVICE)
    several = [torch.ones(4, device=DEVICE) for _ in range(size)]
    calls: list[Callable[[], object]] = [
        lambda: dist.reduce(tensor, dst=0),
        lambda: dist.gather(tensor, several if rank == 0 else None, dst=0),
        lambda: dist.scatter(tensor, several if rank == 0 else None, src=0),
        lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor),
        lambda: dist.send(tensor, dst=1 - rank),
        lambda: dist.recv(tensor, src=1 - rank),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32, device=DEVICE), dist.ReduceOp.BOR),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="not offered"):
            call()
    dist.all_reduce(tensor)  # the group is as good as before
    assert tensor.tolist() == [float(size)] * 4


@scenario
def graph_capture_is_refused(rank: int, size: int) -> None:
    tensor = torch.ones(8, device=DEVICE)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    for asynchronous in (False, True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            tensor.add_(1)
            with pytest.raises(RuntimeError, match="graph"):
                dist.all_reduce(tensor, async_op=asynchronous)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()


@scenario
def torchs_own_ddp_works_over_the_backend(rank: int, size: int) -> None:
    model = nn.parallel.DistributedDataParallel(make_mlp(), device_ids=[0])
    reference = make_mlp()
    for step in range(3):
        batch = whole_batch(step, size)
        model.zero_grad()
        reference.zero_grad()
        loss_of(model(batch.chunk(size)[rank])).backward()
        loss_of(reference(batch)).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


# ---- The tests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_on_one_gpu(gpu_ranks: Ranks, meeting: Callable[[], str], name: str) -> None:
    gpu_ranks.run(run_scenario, meeting(), name, size=SIZE)


def test_with_four_ranks(new_ranks: Callable[..., Ranks], meeting: Callable[[], str]) -> None:
    ranks = new_ranks(4)
    for name in ("ddp_by_default", "ddp_with_views", "reduce_scatter_of_many_types"):
        ranks.run(run_scenario, meeting(), name, size=4)
    ranks.close()


def test_with_expandable_segments(
    new_ranks: Callable[..., Ranks], meeting: Callable[[], str]
) -> None:
    """Memory of the trainer's that cannot be shared as other memory is."""
    ranks = new_ranks(SIZE, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    for name in ("ddp_by_default", "large_all_reduce", "any_layout"):
        ranks.run(run_scenario, meeting(), name, size=SIZE)
    ranks.close()


@contextmanager
def promptly() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < PROMPTLY_S


def lose_a_rank(rank: int, size: int, store: str, in_backward: bool) -> None:
    torch.cuda.set_device(DEVICE)
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(make_mlp())
        tensor = torch.ones(1 << 20, device=DEVICE)
        for step in range(1000):
            if step == 3:
                torch.cuda.synchronize()
                dist.barrier()
                if rank == VICTIM:
                    os.kill(os.getpid(), signal.SIGKILL)
                begin = time.monotonic()
            if in_backward:
                loss_of(model(whole_batch(step, size))).backward()
            else:
                dist.all_reduce(tensor)
            torch.cuda.synchronize()  # lets go, whatever became of the others
            assert step < 3 or time.monotonic() - begin < PROMPTLY_S


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_killed_rank_is_told_to_the_other(
    new_ranks: Callable[..., Ranks], meeting: Callable[[], str], in_backward: bool
) -> None:
    ranks = new_ranks(SIZE)
    outcomes = ranks.outcomes(lose_a_rank, meeting(), in_backward, size=SIZE)
    assert outcomes[VICTIM].lost
    assert isinstance(outcomes[0].error, gradsync.RankLostError), outcomes[0].trace
    assert "rank 1" in str(outcomes[0].error)
    ranks.close()


def work_of_a_lost_rank(rank: int, size: int, store: str) -> None:
    torch.cuda.set_device(DEVICE)
    with process_group("gradsync", store, rank, size):
        dist.all_reduce(torch.ones(4, device=DEVICE))
        torch.cuda.synchronize()
        dist.barrier()
        if rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        with promptly():
            work = dist.all_reduce(torch.ones(4, device=DEVICE), async_op=True)
            assert work is not None
            while not work.is_completed():
                time.sleep(0.01)
            assert not work.is_success()
            work.wait()


def test_a_work_tells_that_a_rank_is_lost(
    new_ranks: Callable[..., Ranks], meeting: Callable[[], str]
) -> None:
    ranks = new_ranks(SIZE)
    outcome = ranks.outcomes(work_of_a_lost_rank, meeting(), size=SIZE)[0]
    assert isinstance(outcome.error, gradsync.RankLostError), outcome.trace
    ranks.close()
