"""Communication hooks, in the places where torch calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from training import make, mlp, process_group, train

from gradsync.torch import DistributedDataParallel

Future = torch.futures.Future


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def power_sgd(group: dist.ProcessGroup) -> tuple[object, Callable[..., Any]]:
    state = powerSGD_hook.PowerSGDState(
        group, start_powerSGD_iter=3, matrix_approximation_rank=1, min_compression_rate=0.5
    )
    return state, powerSGD_hook.powerSGD_hook


def post_local(group: dist.ProcessGroup) -> tuple[object, Callable[..., Any]]:
    state = post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=4)
    return state, post_localSGD_hook.post_localSGD_hook


def later(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """What comes back is another tensor, and comes later."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda total: total.value()[0].clone() / dist.get_world_size())


later.__annotations__.clear()  # as text, which they are in this file, torch refuses them


HOOKS: dict[str, Callable[[dist.ProcessGroup], tuple[object, Callable[..., Any]]]] = {
    "allreduce": lambda group: (group, default_hooks.allreduce_hook),
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "fp16 wrapper": lambda group: (
        group,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "powerSGD": power_sgd,
    "post-local SGD": post_local,
    "later": lambda group: (None, later),
}


def compare(  # noqa: PLR0917 - one for each parameter of the test
    rank: int, size: int, store: str, name: str, views: bool, cap: float
) -> None:
    results = []
    for backend, wrapper in (("gloo", TorchDDP), ("gradsync", DistributedDataParallel)):
        with process_group(backend, f"{store}-{backend}", rank, size):
            torch.manual_seed(5)
            model = wrapper(mlp(), gradient_as_bucket_view=views, bucket_cap_mb=cap)
            state, hook = HOOKS[name](dist.distributed_c10d._get_default_group())
            model.register_comm_hook(state, hook)
            results.append(train(model, rank))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [25, 3e-4], ids=["one bucket", "buckets"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_torchs_hooks_train_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], name: str, views: bool, cap: float
) -> None:
    if name == "powerSGD" and cap < 1:
        pytest.skip("it draws random numbers for each bucket, which torch divides differently")
    ranks.run(compare, meeting(), name, views, cap, size=2)


def use_bf16(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(mlp())
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        model(torch.full((1, 6), float(rank))).sum().backward()
        for parameter in model.parameters():
            assert torch.equal(parameter.grad, parameter.grad.bfloat16().float())


def test_bfloat16_compression_needs_no_gpu(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(use_bf16, meeting(), size=2)


def look_into_buckets(rank: int, size: int, store: str) -> None:
    seen: list[tuple[int, bool]] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> Future[Tensor]:
        gradients, parameters = bucket.gradients(), bucket.parameters()
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert sum(g.numel() for g in gradients) == bucket.buffer().numel()
        assert all(
            p.grad is not None and torch.equal(g, p.grad)
            for g, p in zip(gradients, parameters, strict=True)
        )
        assert {id(p) for p in parameters} <= known
        seen.append((bucket.index(), bucket.is_last()))
        state.append(len(parameters))
        bucket.set_buffer(torch.full_like(bucket.buffer(), 3.0))
        return done(bucket.buffer())

    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(mlp(), bucket_cap_mb=3e-4)
        known = {id(p) for p in model.parameters()}
        state: list[int] = []
        model.register_comm_hook(state, hook)
        for _ in range(3):
            seen.clear()
            state.clear()
            model.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            assert [index for index, _ in seen] == list(range(len(seen)))
            assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]
            assert sum(state) == len(known)
            assert len(seen) > 1
            assert all((p.grad == 3).all() for p in model.parameters())
        assert "look_into_buckets" in model._get_ddp_logging_data()["comm_hook"]


def test_a_hook_gets_torchs_bucket_in_index_order(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(look_into_buckets, meeting(), size=2)


def raising(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    raise ArithmeticError("the hook raised")


def failing_later(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    future: Future[Any] = Future()
    future.set_exception(ArithmeticError("it failed later"))
    return future


def use_a_bad_hook(rank: int, size: int, store: str, hook: Callable[..., Any]) -> None:
    with process_group("gradsync", store, rank, size, timeout_s=10):
        model: Any = DistributedDataParallel(mlp())
        model.register_comm_hook(None, hook)
        model(torch.ones(2, 6)).sum().backward()


def returning_nothing(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return None


def returning_a_tensor(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    return bucket.buffer()


def of_another_shape(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    return done(bucket.buffer()[:-1])


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (raising, "the hook raised"),
        (failing_later, "it failed later"),
        (returning_nothing, "must return a torch.futures.Future, but returned a NoneType"),
        (returning_a_tensor, "must return a torch.futures.Future, but returned a Tensor"),
        (of_another_shape, "same shape as the bucket's buffer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_hook_raises_in_backward(
    ranks: Ranks, meeting: Callable[[], str], hook: Callable[..., Any], message: str
) -> None:
    for outcome in ranks.outcomes(use_a_bad_hook, meeting(), hook, size=2):
        assert message in str(outcome.error)


def register_wrongly(rank: int, size: int, store: str) -> None:
    def annotated(state: object, bucket: int) -> Future[Tensor]:
        raise AssertionError

    def returning(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError

    annotated.__annotations__["bucket"] = int
    returning.__annotations__["return"] = int
    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(mlp())
        with pytest.raises(TypeError, match="must be callable"):
            model.register_comm_hook(None, {})
        with pytest.raises(ValueError, match="bucket annotation should be"):
            model.register_comm_hook(None, annotated)
        with pytest.raises(ValueError, match="return annotation should be"):
            model.register_comm_hook(None, returning)
        model.register_comm_hook(None, later)
        with pytest.raises(RuntimeError, match="can only be called once"):
            model.register_comm_hook(None, later)
        with pytest.raises(RuntimeError, match="can only be called once"):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

        trained = DistributedDataParallel(mlp())
        trained(torch.ones(1, 6)).sum().backward()
        with pytest.raises(RuntimeError, match="should be registered before calling backward"):
            trained.register_comm_hook(None, later)


def test_a_hook_is_registered_once_and_before_training(
    ranks: Ranks, meeting: Callable[[], str]
) -> None:
    ranks.run(register_wrongly, meeting(), size=2)


def use_builtin(rank: int, size: int, store: str, kind: str) -> None:
    kinds = {"ALLREDUCE": dist.BuiltinCommHookType.ALLREDUCE}
    kinds["FP16_COMPRESS"] = dist.BuiltinCommHookType.FP16_COMPRESS
    results = []
    for backend, wrapper in (("gloo", TorchDDP), ("gradsync", DistributedDataParallel)):
        with process_group(backend, f"{store}-{backend}", rank, size):
            torch.manual_seed(5)
            model = wrapper(mlp())
            model._register_builtin_comm_hook(kinds[kind])
            assert model._get_ddp_logging_data()["comm_hook"] == str(kinds[kind])
            results.append(train(model, rank))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_built_in_hooks_train_as_with_torch(
    ranks: Ranks, meeting: Callable[[], str], kind: str
) -> None:
    ranks.run(use_builtin, meeting(), kind, size=2)


def hook_with_unused(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model: Any = DistributedDataParallel(
            nn.ModuleDict({"used": nn.Linear(6, 6), "unused": nn.Linear(6, 6)}),
            find_unused_parameters=True,
        )
        model.module.forward = model.module["used"].forward
        model.register_comm_hook(None, later)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 6), float(rank))).sum().backward()
            assert model.module["used"].weight.grad[0, 0] == 0.5
            assert model.module["unused"].weight.grad is None


def test_a_hook_and_unused_parameters(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(hook_with_unused, meeting(), size=2)


def fuse(rank: int, size: int, store: str) -> None:
    results = []
    for backend, wrapper in (("gloo", TorchDDP), ("gradsync", DistributedDataParallel)):
        with process_group(backend, f"{store}-{backend}", rank, size):
            model = wrapper(make("mlp", torch.float32, seed=1))
            model._register_fused_optim(torch.optim.SGD, lr=0.1)
            for step in range(4):
                model.zero_grad()
                model(torch.full((2, 6), float(rank + step))).sum().backward()
            results.append([p.detach().clone() for p in model.parameters()])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_fused_optimiser_steps_as_with_torch(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(fuse, meeting(), size=2)
