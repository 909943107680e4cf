"""The backend "gradsync" of torch.distributed."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor
from training import new_group, process_group

import gradsync
import gradsync.torch

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGER = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
OTHER = [torch.bool]
# What is only moved may be of any type.
MOVED = [*FLOATING, *INTEGER, *COMPLEX, *OTHER, torch.uint16, torch.uint64, torch.float8_e4m3fn]


def sample(dtype: torch.dtype, rank: int, shape: Iterable[int] = (257,)) -> Tensor:
    """Small values that differ by rank and place, exact in every type, as are their sums and
    products over four ranks."""
    size = math.prod(shape)
    values = (torch.arange(size) * 7 + rank * 3) % 4
    if dtype == torch.bool:
        return (values > 1).reshape(*shape)
    if dtype.is_complex:
        values = torch.complex(values.double(), ((values + rank) % 3).double())
    return values.to(dtype).reshape(*shape)


def expectation(op: dist.ReduceOp.RedOpType, dtype: torch.dtype, size: int) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([sample(dtype, rank).to(wide) for rank in range(size)])
    if op == dist.ReduceOp.SUM:
        result = stacked.sum(0)
    elif op == dist.ReduceOp.AVG:
        result = stacked.mean(0)
    elif op == dist.ReduceOp.PRODUCT:
        result = stacked.prod(0)
    elif op == dist.ReduceOp.MIN:
        result = stacked.min(0).values
    else:
        result = stacked.max(0).values
    return result != 0 if dtype == torch.bool else result.to(dtype)


def native_all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """Without torch's detour of complex types by way of real ones."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    dist.distributed_c10d._get_default_group().allreduce([tensor], options).wait()


def all_reduce_all_types(
    rank: int, size: int, store: str, op: dist.ReduceOp.RedOpType, dtypes: list[torch.dtype]
) -> None:
    with process_group("gradsync", store, rank, size):
        assert dist.get_backend() == "gradsync"
        for dtype in dtypes:
            tensor = sample(dtype, rank)
            native_all_reduce(tensor, op)
            torch.testing.assert_close(
                tensor, expectation(op, dtype, size), rtol=0, atol=0, msg=f"{op} of {dtype}"
            )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("op", "dtypes"),
    [
        (dist.ReduceOp.SUM, [*FLOATING, *INTEGER, *COMPLEX, *OTHER]),
        (dist.ReduceOp.AVG, [*FLOATING, *COMPLEX]),
        (dist.ReduceOp.PRODUCT, [*FLOATING, *INTEGER, *COMPLEX, *OTHER]),
        (dist.ReduceOp.MIN, [*FLOATING, *INTEGER, *OTHER]),
        (dist.ReduceOp.MAX, [*FLOATING, *INTEGER, *OTHER]),
    ],
    ids=["sum", "average", "product", "minimum", "maximum"],
)
def test_all_reduce_gives_the_exact_result(
    ranks: Ranks,
    meeting: Callable[[], str],
    op: dist.ReduceOp.RedOpType,
    dtypes: list[torch.dtype],
    size: int,
) -> None:
    ranks.run(all_reduce_all_types, meeting(), op, dtypes, size=size)


def all_reduce_in_any_layout(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        # What is not part of the tensor must stay as it is.
        whole = sample(torch.float32, rank, (6, 8))
        before = whole.clone()
        part = whole[1:5, ::2]
        dist.all_reduce(part)
        expected = torch.stack([sample(torch.float32, r, (6, 8)) for r in range(size)]).sum(0)
        assert torch.equal(part, expected[1:5, ::2])
        assert torch.equal(whole[:, 1::2], before[:, 1::2])

        # Ranks may hold the same tensor in different orders of memory.
        image = sample(torch.float64, rank, (2, 3, 4, 5))
        if rank == 0:
            image = image.contiguous(memory_format=torch.channels_last)
        dist.all_reduce(image)
        images = torch.stack([sample(torch.float64, r, (2, 3, 4, 5)) for r in range(size)])
        assert torch.equal(image, images.sum(0))

        scalar = torch.tensor(float(rank + 1))
        dist.all_reduce(scalar)
        assert scalar.item() == size * (size + 1) / 2

        dist.all_reduce(torch.empty(0))

        # Larger than what passes through staging memory in one piece.
        large = torch.full((3_000_001,), float(rank))
        dist.all_reduce(large, op=dist.ReduceOp.MAX)
        assert (large == size - 1).all()

        parameter = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(parameter)
        assert parameter.tolist() == [size] * 3


def test_all_reduce_takes_tensors_of_any_layout(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(all_reduce_in_any_layout, meeting(), size=3)


def move_all_types(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for dtype in MOVED:
            source = sample(torch.int64, 1, (5, 3)).to(dtype)
            tensor = source.clone() if rank == 1 else torch.zeros_like(source)
            dist.broadcast(tensor, src=1)
            assert tensor.view(torch.uint8).equal(source.view(torch.uint8)), dtype

            mine = sample(torch.int64, rank, (5, 3)).to(dtype)
            gathered = torch.empty((size * 5, 3), dtype=dtype)
            dist.all_gather_single(gathered, mine)
            everyones = [sample(torch.int64, r, (5, 3)).to(dtype) for r in range(size)]
            expected = torch.cat([t.view(torch.uint8) for t in everyones])
            assert gathered.view(torch.uint8).equal(expected), dtype

            outputs = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(outputs, mine)
            for output, theirs in zip(outputs, everyones, strict=True):
                assert output.view(torch.uint8).equal(theirs.view(torch.uint8)), dtype


def test_broadcast_and_all_gather_move_every_type(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(move_all_types, meeting(), size=3)


def gather_in_any_layout(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        mine = sample(torch.float32, rank, (4, 6)).t()
        outputs = [torch.empty(4, 6).t() for _ in range(size)]
        dist.all_gather(outputs, mine)
        for r, output in enumerate(outputs):
            assert torch.equal(output, sample(torch.float32, r, (4, 6)).t())

        wide = torch.zeros(size * 6, 8)
        dist.all_gather_single(wide[:, ::2], mine)
        assert torch.equal(
            wide[:, ::2], torch.cat([sample(torch.float32, r, (4, 6)).t() for r in range(size)])
        )
        assert (wide[:, 1::2] == 0).all()

        column = torch.zeros(6, 4).t()
        dist.broadcast(column if rank else mine.t().clone().t().t(), src=0)


def test_gathering_takes_tensors_of_any_layout(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(gather_in_any_layout, meeting(), size=3)


def move_objects(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, {"rank": rank, "text": "x" * rank * 100})
        assert [o["rank"] for o in everyones] == list(range(size))
        assert [len(o["text"]) for o in everyones] == [r * 100 for r in range(size)]

        objects: list[Any] = [["root's", 7], {"a": 1.5}] if rank == 1 else [None, None]
        dist.broadcast_object_list(objects, src=1)
        assert objects == [["root's", 7], {"a": 1.5}]
        dist.barrier()


def test_objects_are_gathered_and_broadcast(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(move_objects, meeting(), size=3)


def coalesce(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        tensors = [torch.full((n,), float(rank)) for n in (1, 5, 1000)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        for tensor in tensors:
            assert (tensor == sum(range(size))).all()

        outputs = [torch.empty(size * n) for n in (2, 3)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for output in outputs:
                dist.all_gather_single(output, torch.full((len(output) // size,), float(rank)))
        manager.wait()
        for output in outputs:
            n = len(output) // size
            assert output.tolist() == [float(r) for r in range(size) for _ in range(n)]


def test_coalesced_operations(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(coalesce, meeting(), size=2)


def overlap(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        # Waited for in the opposite order; a synchronous one comes in its turn.
        tensors = [torch.full((n * 1000 + 1,), float(rank + n)) for n in range(12)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = torch.tensor(float(rank))
        dist.all_reduce(last)
        assert last.item() == sum(range(size))
        for n, (tensor, work) in reversed(list(enumerate(zip(tensors, works, strict=True)))):
            work.wait(timedelta(seconds=20))
            assert work.is_completed()
            assert work.is_success()
            assert (tensor == sum(r + n for r in range(size))).all()

        # Futures: of a work that is under way, and of one that is done.
        tensor = torch.full((3,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert doubled.wait().tolist() == [2.0 * sum(range(size))] * 3
        assert work.get_future().wait()[0].data_ptr() == tensor.data_ptr()
        assert dist.barrier(async_op=True).get_future().wait() == []

        # A tensor that nobody else keeps, in an operation that needs a copy of it.
        work = dist.all_reduce(torch.ones(10, 10)[:, ::3], async_op=True)
        work.wait()


def test_asynchronous_operations_keep_their_order(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(overlap, meeting(), size=3)


def work_in_subgroups(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        groups = {
            members: new_group(list(members))
            for members in [(0, 2), (1, 3), (0, 1, 2, 3), (3,), (0, 3)]
        }
        for members, group in groups.items():
            if rank not in members:
                continue
            assert dist.get_backend(group) == "gradsync"
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)
            dist.broadcast(tensor.fill_(rank), src=members[-1], group=group)
            assert tensor.item() == members[-1]
        dist.barrier()
        if rank in (0, 2):
            dist.destroy_process_group(groups[0, 2])
        again = new_group([0, 2])
        if rank in (0, 2):
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=again)
            assert tensor.item() == 2


def test_groups_of_some_ranks(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(work_in_subgroups, meeting(), size=4)


def beside_gloo_without_rank_0(rank: int, size: int, store: str) -> None:
    with process_group("gloo", store, rank, size):
        group = new_group([1, 2], backend="gradsync")
        if rank in (1, 2):
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 3


def test_a_group_without_rank_0_beside_another_backends_default_group(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(beside_gloo_without_rank_0, meeting(), size=3)


def beside_gloo(rank: int, size: int, store: str) -> None:
    with process_group("gloo", store, rank, size):
        group = new_group(backend="gradsync")
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
        assert tensor.item() == sum(range(size)) / size


def test_a_group_beside_another_backends_default_group(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(beside_gloo, meeting(), size=2)


def begin_and_end_again(rank: int, size: int, store: str) -> list[str]:
    """With the same store each time, as under torchrun."""
    # One object for all three: a file store that the last rank lets go of removes its file, and
    # the other rank may already be meeting there again.
    lasting = dist.FileStore(store, size)
    jobs = []
    for _ in range(3):
        with process_group("gradsync", lasting, rank, size):
            backend: Any = dist.distributed_c10d._get_default_group()._get_backend(
                torch.device("cpu")
            )
            jobs.append(backend.session.job)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, async_op=True)
            dist.all_reduce(tensor)
    return jobs


def test_a_process_group_can_be_made_again(ranks: Ranks, meeting: Callable[[], str]) -> None:
    results = ranks.run(begin_and_end_again, meeting(), size=2)
    assert results[0] == results[1]
    assert len(set(results[0])) == 3


def two_threads(rank: int, size: int, store: str) -> None:
    """Each thread has a group; Python must go on in one while the other waits."""
    with process_group("gradsync", store, rank, size):
        groups = [new_group() for _ in range(2)]
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                for _ in range(30):
                    tensor = torch.tensor([1.0 + index])
                    dist.all_reduce(tensor, group=groups[index])
                    assert tensor.item() == (1 + index) * size
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        # Opposite orders: only if neither blocks the interpreter do both come to an end.
        for thread in threads if rank == 0 else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_waiting_does_not_hold_up_other_threads(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(two_threads, meeting(), size=2)


def ask_for_what_there_is_not(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        with pytest.raises(NotImplementedError, match="only SUM, AVG, MIN, MAX, PRODUCT, BAND"):
            dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))
        dist.barrier()  # the group is undisturbed


def test_a_reduction_that_there_is_not_is_named(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(ask_for_what_there_is_not, meeting(), size=2)


def reduce_bits(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for dtype in [*INTEGER, torch.bool]:
            everyones = [((torch.arange(67) * (r + 3)) % 23).to(dtype) for r in range(size)]
            for op, combine in (
                (dist.ReduceOp.BAND, torch.bitwise_and),
                (dist.ReduceOp.BOR, torch.bitwise_or),
                (dist.ReduceOp.BXOR, torch.bitwise_xor),
            ):
                tensor = everyones[rank].clone()
                dist.all_reduce(tensor, op=op)
                assert tensor.equal(functools.reduce(combine, everyones)), (dtype, op)


def test_bitwise_reductions(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(reduce_bits, meeting(), size=3)


def reduce_to_a_root(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for dtype in [*FLOATING, *INTEGER, *OTHER]:
            before = sample(dtype, rank)
            tensor = before.clone()
            dist.reduce(tensor, dst=2)
            expected = expectation(dist.ReduceOp.SUM, dtype, size) if rank == 2 else before
            assert tensor.equal(expected), dtype
        large = torch.full((2_000_003, 2), float(rank))
        dist.reduce(large[:, 0], dst=0, op=dist.ReduceOp.MAX)
        assert (large[:, 0] == (size - 1 if rank == 0 else rank)).all()
        assert (large[:, 1] == rank).all()


def test_reduce_changes_only_the_roots_tensor(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(reduce_to_a_root, meeting(), size=3)


def gather_and_scatter(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for dtype in MOVED:
            everyones = [sample(torch.int64, r, (5, 3)).to(dtype) for r in range(size)]
            outputs = [torch.empty_like(t) for t in everyones] if rank == 1 else None
            dist.gather(everyones[rank], outputs, dst=1)
            for output, theirs in zip(outputs or (), everyones, strict=bool(outputs)):
                assert output.view(torch.uint8).equal(theirs.view(torch.uint8)), dtype
            mine = torch.empty_like(everyones[0])
            dist.scatter(mine, everyones if rank == 2 else None, src=2)
            assert mine.view(torch.uint8).equal(everyones[rank].view(torch.uint8)), dtype
        large = [torch.full((700_001,), float(r)) for r in range(size)]
        piece = torch.empty(700_001)
        dist.scatter(piece, large if rank == 0 else None, src=0)
        assert (piece == rank).all()


def test_gather_and_scatter_move_every_type(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(gather_and_scatter, meeting(), size=3)


def reduce_and_scatter(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for dtype in [*FLOATING, *INTEGER]:
            whole = sample(dtype, rank, (size * 6, 7))
            total = torch.stack([sample(dtype, r, (size * 6, 7)).double() for r in range(size)])
            expected = total.sum(0).to(dtype)[rank * 6 : rank * 6 + 6]
            output = torch.empty((6, 7), dtype=dtype)
            dist.reduce_scatter_single(output, whole)
            assert output.equal(expected), dtype
            output.zero_()
            dist.reduce_scatter(output, list(whole.chunk(size)))
            assert output.equal(expected), dtype
            own = whole[rank * 6 : rank * 6 + 6]  # into the input itself, as sharded training does
            dist.reduce_scatter_single(own, whole)
            assert own.equal(expected), dtype
        output = torch.empty(rank + 1)
        inputs = [torch.full((r + 1,), float(rank)) for r in range(size)]
        dist.reduce_scatter(output, inputs)
        assert (output == sum(range(size))).all()
        assert all((t == rank).all() for r, t in enumerate(inputs) if r != rank)
        average = torch.empty(1_000_003)
        dist.reduce_scatter_single(
            average, torch.full((size * 1_000_003,), float(rank)), op=dist.ReduceOp.AVG
        )
        assert (average == (size - 1) / 2).all()


def test_reduce_scatter(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(reduce_and_scatter, meeting(), size=3)


def gather_unequal(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        outputs = [torch.empty(r + 1, 2) for r in range(size)]
        dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
        for r, output in enumerate(outputs):
            assert (output == r).all()


def test_all_gather_of_unequal_tensors(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(gather_unequal, meeting(), size=3)


def swap(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        for dtype in MOVED:
            blocks = [[sample(torch.int64, 5 * f + t, (3,)).to(dtype) for t in range(size)]
                      for f in range(size)]  # fmt: skip
            output = torch.empty(size * 3, dtype=dtype)
            dist.all_to_all_single(output, torch.cat(blocks[rank]))
            expected = torch.cat([blocks[f][rank].view(torch.uint8) for f in range(size)])
            assert output.view(torch.uint8).equal(expected), dtype
            outputs = [torch.empty(3, dtype=dtype) for _ in range(size)]
            dist.all_to_all(outputs, blocks[rank])
            assert torch.cat(outputs).view(torch.uint8).equal(expected), dtype
        # Unequal: rank f has f + t + 1 rows for rank t, but none for the last.
        rows = [[0 if t == size - 1 else f + t + 1 for t in range(size)] for f in range(size)]
        for width in (1, 70_001):  # in a message's frame, and beside it
            mine = torch.full((sum(rows[rank]), width), float(rank))
            theirs = torch.empty(sum(rows[f][rank] for f in range(size)), width)
            dist.all_to_all_single(theirs, mine, [rows[f][rank] for f in range(size)], rows[rank])
            expected = torch.cat(
                [torch.full((rows[f][rank], width), float(f)) for f in range(size)]
            )
            assert theirs.equal(expected)


def test_all_to_all(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(swap, meeting(), size=3)


def swap_what_does_not_fit(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        splits = [[1, 2], [2, 1]][rank]
        with pytest.raises(gradsync.MismatchError, match=r"rank 0 .* sends .* bytes to rank 0"):
            dist.all_to_all_single(torch.empty(3), torch.empty(3), splits[::-1], splits)
        dist.barrier()


def test_splits_that_do_not_fit_are_named_on_every_rank(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(swap_what_does_not_fit, meeting(), size=2)


def sum_sparse(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        # Ranks differ in how many elements they have; one has none, one the same element twice.
        places = [[0, 3, 3], [], [1, 3]][rank]
        indices = torch.tensor([places, [0] * len(places)], dtype=torch.int64)
        tensor = torch.sparse_coo_tensor(indices, torch.ones(len(places), 2), (5, 4, 2))
        dist.all_reduce(tensor)
        expected = torch.zeros(5, 4, 2)
        expected[[0, 1, 3], 0] = torch.tensor([[1.0], [1.0], [3.0]]).expand(3, 2)
        assert tensor.to_dense().equal(expected)
        with pytest.raises(ValueError, match="can only sum"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def test_sparse_tensors_are_summed(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(sum_sparse, meeting(), size=3)


def coalesce_reduce_scatter(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        outputs = [torch.empty(n) for n in (1, 5, 1000)]
        with dist._coalescing_manager():
            for output in outputs:
                whole = torch.full((size * len(output),), float(rank))
                dist.reduce_scatter_single(output, whole)
        for output in outputs:
            assert (output == sum(range(size))).all()


def test_coalesced_reduce_scatter(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(coalesce_reduce_scatter, meeting(), size=2)


def pass_wrong_arguments(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        with pytest.raises(ValueError, match="needs a tensor of 6 elements"):
            dist.all_gather_single(torch.empty(5), torch.empty(3))
        with pytest.raises(ValueError, match="one tensor for each of the 2 ranks"):
            dist.all_gather([torch.empty(3)], torch.empty(3))
        with pytest.raises(ValueError, match="they must be the same"):
            dist.all_gather([torch.empty(4), torch.empty(4)], torch.empty(3))
        group = dist.distributed_c10d._get_default_group()
        backend: Any = group._get_backend(torch.device("cpu"))
        with pytest.raises(ValueError, match="takes dense tensors"):
            backend.broadcast([torch.eye(3).to_sparse()], dist.BroadcastOptions())
        with pytest.raises(ValueError, match="needs a tensor of 6 elements"):
            dist.reduce_scatter_single(torch.empty(3), torch.empty(5))
        with pytest.raises(TypeError, match="must be of one type"):
            dist.reduce_scatter_single(torch.empty(3), torch.empty(6, dtype=torch.int32))
        with pytest.raises(ValueError, match="one tensor for each of the 2 ranks"):
            dist.all_to_all([torch.empty(1)], [torch.empty(1)])
        with pytest.raises(ValueError, match="does not divide equally across group size"):
            dist.all_to_all_single(torch.empty(3), torch.empty(3))
        with pytest.raises(ValueError, match="Split sizes doesn't match total dim 0 size"):
            dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 2], [1, 1])
        with pytest.raises(ValueError, match="Number of tensor splits not equal to group size"):
            dist.all_to_all_single(torch.empty(3), torch.empty(3), [1, 2], [3])
        with pytest.raises(TypeError, match="does not take tensors of type"):
            dist.all_reduce(torch.ones(3, dtype=torch.uint16))
        dist.barrier()


def test_wrong_arguments_are_refused_before_anything_is_sent(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(pass_wrong_arguments, meeting(), size=2)


def average_integers(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG)


def test_integers_have_no_average(ranks: Ranks, meeting: Callable[[], str]) -> None:
    for outcome in ranks.outcomes(average_integers, meeting(), size=2):
        assert isinstance(outcome.error, gradsync.InvalidArgumentError)
        assert isinstance(outcome.error, ValueError)
        assert "int32" in str(outcome.error)


def disagree(rank: int, size: int, store: str, what: str) -> None:
    with process_group("gradsync", store, rank, size):
        if what == "count":
            dist.all_reduce(torch.ones(3 + rank))
        elif what == "type":
            dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.float64][rank]))
        elif what == "root":
            dist.broadcast(torch.ones(3), src=rank)
        elif rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.barrier()


@pytest.mark.parametrize("what", ["count", "type", "root", "operation"])
def test_ranks_that_disagree_all_hear_of_it(
    ranks: Ranks, meeting: Callable[[], str], what: str
) -> None:
    for outcome in ranks.outcomes(disagree, meeting(), what, size=2):
        assert isinstance(outcome.error, gradsync.MismatchError)
        assert outcome.error.code == 2
        assert "rank 0" in str(outcome.error)
        assert "rank 1" in str(outcome.error)


def stay_away(rank: int, size: int, store: str, asynchronous: bool) -> None:
    with process_group("gradsync", store, rank, size):
        group = new_group(timeout=timedelta(seconds=1))
        if rank != 1:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=asynchronous)
            if work is not None:
                work.wait()
        else:
            dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=3))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_stays_away_is_named_at_the_deadline(
    ranks: Ranks, meeting: Callable[[], str], asynchronous: bool
) -> None:
    outcomes = ranks.outcomes(stay_away, meeting(), asynchronous, size=3)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, gradsync.DeadlineExceededError)
        assert isinstance(error, TimeoutError)
        assert "rank 1" in str(error)


def abort_while_waiting(rank: int, size: int, store: str) -> float:
    """The other rank stays, but takes no part."""
    with process_group("gradsync", store, rank, size):
        shared = dist.FileStore(f"{store}-aborted", size)
        if rank == 1:
            shared.wait(["aborted"], timedelta(seconds=20))
            return 0.0
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        begin = time.monotonic()
        dist.distributed_c10d._abort_process_group()
        for work in works:
            with pytest.raises(gradsync.GradsyncError):
                work.wait()
        seconds = time.monotonic() - begin
        shared.set("aborted", "")
        return seconds


def test_abort_ends_what_is_under_way(ranks: Ranks, meeting: Callable[[], str]) -> None:
    outcome = ranks.outcomes(abort_while_waiting, meeting(), size=2)[0]
    assert outcome.error is None, outcome.trace
    assert outcome.value < 10


def test_every_error_is_a_runtime_error() -> None:
    for code, error in gradsync.errors.ERROR_CLASSES.items():
        assert issubclass(error, RuntimeError)
        assert error.code == code


def test_registering_twice_does_nothing() -> None:
    gradsync.torch.register_backend()
    assert [*itertools.chain(dist.Backend.backend_list)].count("gradsync") == 1


def wait_in_a_callback(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        later = torch.ones(1)
        follow_up: list[Any] = []

        def nested(future: torch.futures.Future[Any]) -> Tensor:
            # For an operation that is asked for here, and for one that was queued before.
            inner = future.value()[0].clone()
            dist.all_reduce(inner, async_op=True).get_future().wait()
            follow_up[0].get_future().wait()
            return inner + later

        first = torch.ones(1)
        work: Any = dist.all_reduce(first, async_op=True)
        follow_up.append(dist.all_reduce(later, async_op=True))
        assert work.get_future().then(nested).wait().item() == size * size + size

        message: Any = dist.irecv(first, 1 - rank)

        def receive_more(_: torch.futures.Future[Any]) -> float:
            dist.recv(first, 1 - rank)
            return first.item()

        answer = message.get_future().then(receive_more)
        for value in (3.0, 4.0):
            dist.send(torch.tensor([value]), 1 - rank)
        assert answer.wait() == 4


def test_callbacks_may_wait_for_further_operations(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(wait_in_a_callback, meeting(), size=2)
