"""What torch builds on process groups runs over the backend "gradsync", and comes to the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import make, process_group

STEPS = 5


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()


def expected_parameters(size: int) -> list[Tensor]:
    """Of the same training in one process: averages of the gradients of all ranks' data."""
    model = make("mlp", torch.float32, 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 6, generator=generator)
            (((model(x) - y) ** 2).mean() / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def expect_trained(model: nn.Module, size: int) -> None:
    for parameter, expected in zip(model.parameters(), expected_parameters(size), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), expected)


def train_torch_ddp(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(make("mlp", torch.float32, 7 if rank == 0 else 8))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(STEPS):
            step_on(model, optimizer, rank, step)
        expect_trained(model, size)


def test_torchs_ddp(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(train_torch_ddp, meeting(), size=2)
    ranks.run(train_torch_ddp, meeting(), size=4)


def train_zero_redundancy(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = DistributedDataParallel(make("mlp", torch.float32, 7))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
        for step in range(STEPS):
            step_on(model, optimizer, rank, step)
        expect_trained(model, size)
        optimizer.consolidate_state_dict(to=1)
        if rank == 1:
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_zero_redundancy_optimizer(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(train_zero_redundancy, meeting(), size=2)


def sharded(size: int) -> nn.Module:
    model = make("mlp", torch.float32, 7)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_fully_sharded(rank: int, size: int, store: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = sharded(size)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(STEPS):
            step_on(model, optimizer, rank, step)
        expect_trained(model, size)


def test_fully_sharded_training(ranks: Ranks, meeting: Callable[[], str]) -> None:
    ranks.run(train_fully_sharded, meeting(), size=2)
    ranks.run(train_fully_sharded, meeting(), size=3)


def save_and_load(rank: int, size: int, store: str, folder: str) -> None:
    with process_group("gradsync", store, rank, size):
        model = sharded(size)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        step_on(model, optimizer, rank, 0)
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        saved = [whole(parameter.detach()).clone() for parameter in model.parameters()]
        step_on(model, optimizer, rank, 1)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        for parameter, expected in zip(model.parameters(), saved, strict=True):
            assert whole(parameter.detach()).equal(expected)
        dist.barrier()


def test_distributed_checkpoints(ranks: Ranks, meeting: Callable[[], str], tmp_path: Path) -> None:
    ranks.run(save_and_load, meeting(), str(tmp_path / "checkpoint"), size=2)
    assert list((tmp_path / "checkpoint").glob("*.distcp"))
