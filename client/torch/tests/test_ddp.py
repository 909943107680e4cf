"""What DistributedDataParallel promises beyond the numbers."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from training import fingerprint, make, mlp, new_group, process_group, train

import gradsync
from gradsync.torch import DistributedDataParallel


def backward(model: Any, rank: int) -> None:
    model(torch.full((2, 6), float(rank + 1))).sum().backward()


def gradients_of(model: nn.Module) -> str:
    return fingerprint([p.grad for p in model.parameters() if p.grad is not None])


def be_torchs(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp())
        assert isinstance(model, TorchDDP)
        assert list(model.state_dict()) == [f"module.{key}" for key in mlp().state_dict()]
        plain = mlp()
        plain.load_state_dict(model.module.state_dict())
        assert model.join_process_group is dist.distributed_c10d._get_default_group()
        assert model.train(False) is model
        assert TorchDDP._get_active_ddp_module() is None
        # An input that is no tensor, and keyword arguments, reach the module.
        assert model(input=torch.zeros(1, 6)).shape == (1, 6)


def test_it_is_a_distributed_data_parallel_to_everybody(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(be_torchs, meeting(), size=2)


def copy_and_pickle(rank: int, size: int, store: str, views: bool) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp(), gradient_as_bucket_view=views)
        for _ in range(2):
            backward(model, rank)
        before = gradients_of(model)

        # One rank alone may copy: nothing waits for the others.
        if rank == 0:
            backup = copy.deepcopy(model)
            assert all(p.grad is None for p in backup.parameters())
            backup.module(torch.ones(1, 6)).sum().backward()
            assert gradients_of(model) == before
            assert backup._get_ddp_logging_data()["iteration"] == 0

        # A copy that all ranks train meets on its own.
        twin = pickle.loads(pickle.dumps(model))
        assert type(twin) is DistributedDataParallel
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for copied in (twin, torch.load(saved, weights_only=False), copy.deepcopy(model)):
            copied.zero_grad()
            backward(copied, rank)
            digests: list[Any] = [None] * size
            dist.all_gather_object(digests, gradients_of(copied))
            assert len(set(digests)) == 1
            assert copied.gradient_as_bucket_view == views

        group = new_group()
        with pytest.raises(RuntimeError, match="DDP Pickling/Unpickling are only supported"):
            pickle.dumps(DistributedDataParallel(mlp(), process_group=group))


@pytest.mark.parametrize("views", [False, True])
def test_it_can_be_copied_and_pickled(
    ranks: Ranks, meeting: Callable[[], str], views: bool
) -> None:
    ranks.run(copy_and_pickle, meeting(), views, size=2)


class WithBuffers(nn.Module):
    mean: Tensor
    count: Tensor
    transposed: Tensor
    flags: Tensor
    own: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("mean", torch.full((3,), value))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("transposed", torch.full((4, 5), value).t())
        self.register_buffer("flags", torch.tensor([value > 0, False]))
        self.register_buffer("own", torch.full((2,), value))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.mean.sum() * 0

    def states(self) -> list[float]:
        return [
            b.double().max().item() for b in (self.mean, self.count, self.transposed, self.flags)
        ]


def sync_buffers(rank: int, size: int, store: str, backend: str) -> None:
    with process_group(backend, store, rank, size):
        module: Any = WithBuffers(float(rank))
        module._ddp_params_and_buffers_to_ignore = ["own"]
        model = DistributedDataParallel(module)
        assert module.states() == [0, 0, 0, 0]
        assert module.own[0] == rank

        def spoil(to: float) -> None:
            with torch.no_grad():
                module.mean.fill_(to)
                module.count.fill_(int(to))
                module.transposed.fill_(to)

        x = torch.ones(1, 6)
        # In training, in evaluation, and without gradients.
        spoil(rank + 5)
        versions = [b._version for b in module.buffers()]
        model(x).sum().backward()
        assert module.states()[:3] == [5, 5, 5]
        assert [b._version for b in module.buffers()] == versions
        spoil(rank + 6)
        model.eval()
        model(x)
        assert module.states()[:3] == [6, 6, 6]
        # torch's rule: the forward after one under no_grad or no_sync leaves them alone.
        with torch.no_grad():
            model(x)
        spoil(rank + 7)
        model(x)
        assert module.states()[:3] == [rank + 7] * 3
        model(x).sum().backward()
        assert module.states()[:3] == [7, 7, 7]
        # A buffer that was replaced.
        module.mean = torch.full((3,), float(rank + 8))
        model(x).sum().backward()
        assert module.mean[0] == 8
        assert module.own[0] == rank


@pytest.mark.parametrize("backend", ["gradsync", "gloo"])
def test_buffers_are_broadcast_in_forward_as_torch_does(
    ranks: Ranks, meeting: Callable[[], str], backend: str
) -> None:
    ranks.run(sync_buffers, meeting(), backend, size=2)


def choose_what_is_broadcast(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        x = torch.ones(1, 6)
        module: Any = WithBuffers(float(rank))
        model = DistributedDataParallel(module, forward_sync_buffers=False)
        assert module.mean[0] == 0
        module.mean.fill_(rank + 1)
        model(x)
        assert module.mean[0] == rank + 1

        module = WithBuffers(float(rank))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = DistributedDataParallel(module, broadcast_buffers=False)
        assert module.mean[0] == rank
        model(x)
        assert module.mean[0] == rank

        torch.manual_seed(rank)
        module = WithBuffers(float(rank))
        weight = module.layer.weight.clone()
        DistributedDataParallel(module, init_sync=False)
        assert torch.equal(module.layer.weight, weight)

        # Also the parameters that take no part in training.
        frozen = make("frozen", torch.float32, seed=rank)
        DistributedDataParallel(frozen)
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, fingerprint(list(frozen.parameters())))
        assert len(set(digests)) == 1


def test_the_arguments_choose_what_is_broadcast(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(choose_what_is_broadcast, meeting(), size=2)


class RootParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(6, 2)
        self.left = nn.Linear(6, 2)
        self.root = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(x) + self.left(x) * self.root


def leave_parameters_out(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        torch.manual_seed(rank)
        module: Any = RootParameter()
        own = module.left.weight.clone()
        module._ddp_params_and_buffers_to_ignore = ["left.weight", "left.bias", "root"]
        model = DistributedDataParallel(module)
        assert torch.equal(module.left.weight, own)
        assert model._get_ddp_logging_data()["num_parameter_tensors"] == 2
        for _ in range(2):
            model.zero_grad()
            backward(model, rank)
        assert module.left.weight.grad is not None
        assert module.kept.weight.grad is not None
        assert (module.left.weight.grad == (rank + 1) * 2).all()
        assert torch.allclose(module.kept.weight.grad, torch.tensor((1 + size) / 2 * 2))


def test_ignored_parameters_are_left_alone(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(leave_parameters_out, meeting(), size=2)


def look_at_views(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(
            make("channels last", torch.float32, seed=0), gradient_as_bucket_view=True
        )
        parameters: list[Any] = list(model.parameters())

        def pointers() -> list[int]:
            return [p.grad.data_ptr() for p in parameters if p.grad is not None]

        backward(model, rank)
        for parameter in parameters:
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()
        expected = [p.grad.clone() for p in parameters if p.grad is not None]
        # Accumulates over the move that the second forward makes, and the third backward stays
        # there.
        backward(model, rank)
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(parameter.grad, gradient * 2)
        settled = pointers()
        model.zero_grad(set_to_none=False)
        backward(model, rank)
        assert pointers() == settled
        model.zero_grad(set_to_none=True)
        backward(model, rank)
        assert pointers() == settled
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert torch.allclose(parameter.grad, gradient)

        # Kept by the user, the memory outlives the wrapper.
        kept = parameters[0].grad
        copied = kept.clone()
        parameters.clear()
        del model, parameter
        gc.collect()
        assert torch.equal(kept, copied)
        kept.mul_(2)


def test_views_stay_where_they_are(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(look_at_views, meeting(), size=2)


def use_optimisers_on_views(rank: int, size: int, store: str) -> str:
    """Clipping and fused optimisers write to gradients; the results are those without views."""
    with process_group("gradsync", store, rank, size):
        results = []
        for views in (False, True):
            model = DistributedDataParallel(
                make("mlp", torch.float32, seed=0), gradient_as_bucket_view=views
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            for step in range(6):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                backward(model, rank)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            results.append(fingerprint(list(model.parameters())))
        assert results[0] == results[1]
        return results[0]


def test_clipping_and_fused_optimisers_work_on_views(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    assert len(set(ranks.run(use_optimisers_on_views, meeting(), size=2))) == 1


def keep_gradients(rank: int, size: int, store: str, how: str) -> None:
    """Without views a gradient that the user keeps is not touched by a later backward."""
    with process_group("gradsync", store, rank, size):
        # Large enough for its memory to be lent, which is what could go wrong.
        layer = nn.Linear(6, 3000)
        model = DistributedDataParallel(layer)

        def step(value: float) -> Tensor:
            model(torch.full((2, 6), value * (rank + 1))).sum().backward()
            assert layer.weight.grad is not None
            return layer.weight.grad

        def expected(value: float) -> Tensor:
            return torch.tensor(2 * value * (1 + size) / 2)

        kept: list[Any] = []
        for value in range(1, 7):
            model.zero_grad(set_to_none=True)
            gradient = step(float(value))
            assert torch.allclose(gradient, expected(value))
            if how == "tensor":
                kept.append(gradient)
            elif how == "view":
                kept.append(gradient[1:, :3])
            elif how == "array":
                kept.append(gradient.detach().numpy())
            elif how == "once" and value == 3:
                # Gone again when the next but one comes.
                kept.append(gradient)
            elif how == "once":
                kept = []
            del gradient
            for number, old in enumerate(kept):
                value_then = number + 1 if how != "once" else 3
                assert torch.allclose(torch.as_tensor(old), expected(value_then))


@pytest.mark.parametrize("how", ["tensor", "view", "array", "once"])
def test_gradients_are_the_users_own_without_views(
    ranks: Ranks, meeting: Callable[[], str], how: str
) -> None:
    ranks.run(keep_gradients, meeting(), how, size=2)


def accumulate_into_own_memory(rank: int, size: int, store: str) -> None:
    """Gradients that the user has put in place stay in place, whatever backward does."""
    with process_group("gradsync", store, rank, size):
        layer = nn.Linear(6, 3000)
        model = DistributedDataParallel(layer)
        flat = torch.zeros(7 * 3000)
        layer.weight.grad = flat[: 6 * 3000].view(3000, 6)
        layer.bias.grad = flat[6 * 3000 :]
        for number in range(1, 5):
            model(torch.full((2, 6), float(rank + 1))).sum().backward()
            assert torch.allclose(flat[: 6 * 3000], torch.tensor(number * (1.0 + size)))
            assert layer.weight.grad.data_ptr() == flat.data_ptr()

        # Nobody holds the tensor, but its memory is an array's.
        array = np.zeros((3000, 6), dtype=np.float32)
        for number in range(1, 5):
            layer.weight.grad = torch.from_numpy(array)
            backward(model, rank)
            assert np.allclose(array, number * (1.0 + size))

        # Seen by the user between two backward passes: the same tensor goes on.
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            backward(model, rank)
        seen = layer.weight.grad
        backward(model, rank)
        assert layer.weight.grad is seen
        assert torch.allclose(seen, torch.tensor(2.0 * (1 + size)))


def test_gradients_stay_in_the_users_memory_without_views(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(accumulate_into_own_memory, meeting(), size=2)


def lend_gradients(rank: int, size: int, store: str) -> None:
    """In ordinary training nothing is copied out of the buckets, nor is memory left behind."""
    with process_group("gradsync", store, rank, size):
        layer: Any = nn.Linear(6, 3000)
        model = DistributedDataParallel(layer)
        pointers = []
        for _ in range(6):
            model.zero_grad(set_to_none=True)
            backward(model, rank)
            pointers.append(layer.weight.grad.data_ptr())
        assert len(set(pointers[2:])) == 1
        model.zero_grad(set_to_none=False)
        backward(model, rank)
        assert layer.weight.grad.data_ptr() == pointers[-1]
        assert torch.allclose(layer.weight.grad, torch.tensor(1.0 + size))


def is_shared(pointer: int) -> bool:
    """Whether the daemon maps this memory too."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            begin, end = (int(word, 16) for word in line.split(maxsplit=1)[0].split("-"))
            if begin <= pointer < end:
                return True
    return False


def lend_during_backward(rank: int, size: int, store: str) -> None:
    """The memory that autograd took for a gradient is free again while backward goes on."""
    with process_group("gradsync", store, rank, size):
        first, last = nn.Linear(6, 3000), nn.Linear(3000, 6)
        model = DistributedDataParallel(nn.Sequential(first, last))
        during: list[int] = []
        after: list[int] = []

        def look(_: Tensor) -> None:
            assert last.weight.grad is not None
            during.append(last.weight.grad.data_ptr())

        first.weight.register_post_accumulate_grad_hook(look)
        for _ in range(6):
            model.zero_grad(set_to_none=True)
            backward(model, rank)
            assert last.weight.grad is not None
            after.append(last.weight.grad.data_ptr())
        assert during[2:] == after[2:]
        assert all(is_shared(pointer) for pointer in during[2:])


def test_gradients_are_lent_while_backward_goes_on(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(lend_during_backward, meeting(), size=2)


def test_gradients_are_lent_where_nobody_notices(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(lend_gradients, meeting(), size=2)


def do_not_sync(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(nn.Linear(6, 2))
        with model.no_sync():
            backward(model, rank)
        assert torch.allclose(model.module.weight.grad, torch.tensor(2.0 * (rank + 1)))
        # Only one rank does it; no operation is launched.
        if rank == 0:
            with model.no_sync():
                backward(model, rank)
        # What was accumulated is averaged with the next one.
        backward(model, rank)
        total = sum(2.0 * (r + 1) * (3 if r == 0 else 2) for r in range(size))
        assert torch.allclose(model.module.weight.grad, torch.tensor(total / size))
        # Without gradients nothing is launched either.
        with torch.no_grad():
            model(torch.ones(1, 6))
        assert model._connected().iterations == 1


def test_no_sync_launches_nothing(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(do_not_sync, meeting(), size=2)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: Tensor, head: str = "both") -> Tensor:
        hidden = self.body(x)
        outputs = [
            getattr(self, name)(hidden) for name in ("left", "right") if head in (name, "both")
        ]
        return torch.stack(outputs).sum(0)


def leave_a_head_out(rank: int, size: int, store: str, steps_before: int, cap: float) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(TwoHeads(), bucket_cap_mb=cap)
        x = torch.ones(1, 6)
        for _ in range(steps_before):
            model(x).sum().backward()
        model(x, head="left").sum().backward()
        model(x)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("cap", [0, 25])
def test_an_unused_parameter_is_named_by_the_next_forward(
    ranks: Ranks, meeting: Callable[[], str], steps_before: int, cap: float
) -> None:
    outcomes = ranks.outcomes(leave_a_head_out, meeting(), steps_before, cap, size=2)
    for rank, outcome in enumerate(outcomes):
        assert "in _pre_forward" in outcome.trace
        error = outcome.error
        assert isinstance(error, RuntimeError)
        assert (
            "Expected to have finished reduction in the prior iteration before starting a new one."
            in str(error)
        )
        assert f"did not receive grad for rank {rank}: right.weight, right.bias" in str(error)
        assert "left" not in str(error)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def fail_before_any_gradient(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp())
        x = torch.ones(2, 6)
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="on purpose"):
                Fails.apply(model(x)).sum().backward()
            model(x).sum().backward()
        # And forwards without a backward.
        model(x)
        model(x)
        model(x).sum().backward()


def test_a_backward_that_raised_at_once_can_be_repeated(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(fail_before_any_gradient, meeting(), size=2)


def use_a_parameter_twice(rank: int, size: int, store: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(Twice())
        model(torch.ones(2, 6)).sum().backward()


def test_a_parameter_that_is_ready_twice_is_named(ranks: Ranks, meeting: Callable[[], str]) -> None:
    for outcome in ranks.outcomes(use_a_parameter_twice, meeting(), size=2):
        assert isinstance(outcome.error, RuntimeError)
        assert "layer." in str(outcome.error)
        assert "ready" in str(outcome.error)


def checkpoint_whole_model(rank: int, size: int, store: str, reentrant: bool) -> str:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(make("mlp", torch.float32, seed=0))
        inner = model.module
        forward = inner.forward
        inner.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((2, 6), float(rank), requires_grad=True)).sum().backward()
        return gradients_of(model)


def test_checkpointed_activations(ranks: Ranks, meeting: Callable[[], str]) -> None:
    digests = {
        digest
        for reentrant in (False, True)
        for digest in ranks.run(checkpoint_whole_model, meeting(), reentrant, size=2)
    }
    assert len(digests) == 1


def convert_after_wrapping(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp())
        model.double()
        with pytest.raises(gradsync.FailedPreconditionError, match=r'"0\.weight" was converted'):
            model(torch.ones(2, 6, dtype=torch.float64))


def test_conversion_after_wrapping_is_noticed(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(convert_after_wrapping, meeting(), size=2)


def different_models(rank: int, size: int, store: str, what: str) -> None:
    with process_group("gradsync", store, rank, size):
        module: Any = nn.Sequential(nn.Linear(6, 4), nn.Conv2d(3, 4, 2))
        if rank == 1:
            if what == "sizes":
                module[0] = nn.Linear(6, 5)
            elif what == "type":
                module[0].double()
            elif what == "number":
                module.append(nn.Linear(2, 2))
            elif what == "frozen":
                module[1].weight.requires_grad_(False)
            elif what == "strides":
                module[1].to(memory_format=torch.channels_last)
            elif what == "buffer":
                module.register_buffer("extra", torch.zeros(3))
        elif what == "buffer":
            module.register_buffer("extra", torch.zeros(4))
        DistributedDataParallel(module)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("sizes", ["0.weight", "[4, 6]", "[5, 6]"]),
        ("type", ["0.weight", "float32", "float64"]),
        ("number", ["2."]),
        ("frozen", ["1.weight"]),
        ("strides", ["1.weight", "(12, 4, 2, 1)", "(12, 1, 6, 3)"]),
        ("buffer", ["extra", "[4]", "[3]"]),
    ],
)
def test_models_that_differ_are_refused_everywhere(
    ranks: Ranks, meeting: Callable[[], str], what: str, named: list[str]
) -> None:
    for outcome in ranks.outcomes(different_models, meeting(), what, size=3):
        assert isinstance(outcome.error, gradsync.MismatchError), outcome.trace
        for text in [*named, "rank 0", "rank 1"]:
            assert text in str(outcome.error)


def ask_for_the_impossible(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        with pytest.raises(NotImplementedError, match=r'"0\.weight" on meta'):
            DistributedDataParallel(nn.Sequential(nn.Linear(3, 3, device="meta")))
        # torch's own checks come first, in torch's words.
        with pytest.raises(RuntimeError, match="doesn't have any parameter that requires"):
            DistributedDataParallel(nn.Flatten())
        with pytest.raises(ValueError, match="device_ids"):
            DistributedDataParallel(mlp(), device_ids=[0])
        with pytest.raises(RuntimeError, match="uninitialized parameters"):
            DistributedDataParallel(nn.LazyLinear(3))


def test_what_cannot_be_wrapped_is_refused(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(ask_for_the_impossible, meeting(), size=2)


def report(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp(), bucket_cap_mb=1e-4)
        data = model._get_ddp_logging_data()
        assert data["iteration"] == 0
        assert data["has_error"] == 0
        for _ in range(3):
            backward(model, rank)
        model._check_reducer_finalized()
        data = model._get_ddp_logging_data()
        assert data["iteration"] == 2  # the last one is taken down by the next forward
        assert data["has_rebuilt_buckets"] == 1
        assert data["world_size"] == size
        assert data["module_name"] == "Sequential"
        sizes = [int(part) for part in data["bucket_sizes"].split(",")]
        assert len(sizes) > 1
        assert sum(sizes) == data["total_parameter_size_bytes"]


def test_the_logging_data_is_true(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(report, meeting(), size=2)


def come_and_go(rank: int, size: int, store: str) -> None:
    """Wrappers share the session; each takes its hooks and its memory away with it."""
    with process_group("gradsync", store, rank, size):
        module = mlp()
        for _ in range(5):
            model = DistributedDataParallel(module)
            for _ in range(2):
                module.zero_grad()
                backward(model, rank)
            gone = weakref.ref(model)
            del model
            gc.collect()
            assert gone() is None
        own = module(torch.ones(1, 6)).sum()
        module.zero_grad()
        own.backward()

        first, second = DistributedDataParallel(mlp()), DistributedDataParallel(mlp())
        backward(first, rank)
        backward(second, rank)
        (first(torch.ones(1, 6)) + second(torch.ones(1, 6))).sum().backward()
        assert first._get_ddp_logging_data()["iteration"] == 1


def test_wrappers_come_and_go(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(come_and_go, meeting(), size=2)


def load_data(rank: int, size: int, store: str) -> str:
    """By forked processes, which inherit everything and must disturb nothing."""
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(
            make("mlp", torch.float32, seed=0), gradient_as_bucket_view=True
        )
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        data = TensorDataset(torch.arange(24.0).reshape(4, 6) * (rank + 1))
        for _ in range(2):
            loader = DataLoader(data, num_workers=2, multiprocessing_context="fork")
            for (x,) in loader:
                model.zero_grad(set_to_none=False)
                model(x).sum().backward()
        return gradients_of(model)


def test_data_loaders_may_fork(ranks: Ranks, meeting: Callable[[], str]) -> None:
    assert len(set(ranks.run(load_data, meeting(), size=2))) == 1


def use_in_a_forked_child(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(mlp())
        backward(model, rank)
        child = os.fork()
        if child == 0:
            status = 0
            for call in (
                lambda: dist.all_reduce(torch.ones(1)),
                lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
                lambda: backward(model, rank),
            ):
                try:
                    call()
                    status = 1
                except gradsync.FailedPreconditionError:
                    pass
            del model
            gc.collect()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        dist.barrier()
        backward(model, rank)


def test_a_forked_child_gets_an_error_and_disturbs_nothing(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(use_in_a_forked_child, meeting(), size=2)


def compile_module(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        reference = DistributedDataParallel(make("mlp", torch.float32, seed=0))
        backward(reference, rank)
        compiled: Any = torch.compile(make("mlp", torch.float32, seed=0), backend="aot_eager")
        inside: Any = DistributedDataParallel(compiled)
        outside: Any = torch.compile(
            DistributedDataParallel(make("mlp", torch.float32, seed=0)), backend="aot_eager"
        )
        for model in (inside, outside):
            for _ in range(3):
                model.zero_grad()
                backward(model, rank)
            for expected, parameter in zip(reference.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, expected.grad)


def test_compiled_modules(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(compile_module, meeting(), size=2, deadline=120)


def use_a_mesh(rank: int, size: int, store: str) -> str:
    with process_group("gradsync", store, rank, size):
        mesh = dist.init_device_mesh("cpu", (size,))
        model = DistributedDataParallel(make("mlp", torch.float32, seed=rank), device_mesh=mesh)
        return fingerprint(train(model, rank, steps=2))


def test_a_device_mesh_names_the_ranks(ranks: Ranks, meeting: Callable[[], str]) -> None:
    assert len(set(ranks.run(use_a_mesh, meeting(), size=2))) == 1
