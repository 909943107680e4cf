"""What the tests of several files train, and how."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync.torch  # noqa: F401 - registers the backend

STEPS = 10


@contextmanager
def process_group(
    backend: str, store: str | dist.Store, rank: int, size: int, timeout_s: float = 30
) -> Iterator[None]:
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size) if isinstance(store, str) else store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    yield
    if dist.is_initialized():  # not aborted
        dist.destroy_process_group()


class OddSizes(nn.Module):
    """A scalar, one element, sizes that no vector width divides, more dimensions than a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(torch.randn(6, 13))
        self.cube = nn.Parameter(torch.randn(3, 1, 13))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.odd) * self.scale + self.one
        return (hidden.unsqueeze(1) * self.cube[:, 0]).sum(1)[:, :6]


class Shared(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
    model[0].weight.requires_grad_(False)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 6))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


class Convolution(nn.Module):
    """In channels-last memory: its gradients are dense, but not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 3, 2, 1).expand(-1, -1, -1, 3)
        return self.conv(image).flatten(1)[:, :6]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "odd sizes": OddSizes,
    "shared": Shared,
    "frozen": frozen,
    "batch norm": batch_norm,
    "channels last": Convolution,
}


def new_group(*arguments: Any, **options: Any) -> dist.ProcessGroup:
    """For a rank that is not in it, torch returns something that is no group."""
    group: Any = dist.new_group(*arguments, **options)
    return group


def train(
    model: Any,
    rank: int,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    set_to_none: bool = True,
) -> list[Tensor]:
    """Trains on data that differs by rank; returns all gradients, in order of steps."""
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(accumulate):
            last = part == accumulate - 1
            context: AbstractContextManager[object] = nullcontext() if last else model.no_sync()
            with context:
                x = torch.randn(4, 6, generator=generator).to(dtype)
                y = torch.randn(4, 6, generator=generator).to(dtype)
                ((model(x) - y) ** 2).mean().backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return gradients


def make(name: str, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def fingerprint(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
