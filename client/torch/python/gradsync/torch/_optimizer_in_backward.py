"""Optimisers that step as soon as a bucket is averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from gradsync.torch.distributed import DistributedDataParallel


def step_hook(
    wrapper: DistributedDataParallel,
) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
    """A communication hook that averages and then steps, as torch's does on a GPU. The gradients
    are gone afterwards."""
    reference = weakref.ref(wrapper)

    def step_in_backward(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        wrapper = reference()
        assert wrapper is not None
        average(wrapper, bucket)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            optimizers = getattr(parameter, "_in_backward_optimizers", None)
            if optimizers is None:
                continue
            parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None
        return done(bucket.buffer())

    return step_in_backward


def average(wrapper: DistributedDataParallel, bucket: dist.GradBucket) -> None:
    """Over the wrapper's ranks, in the bucket's buffer."""
    dist.all_reduce(bucket.buffer(), group=wrapper.process_group)
    bucket.buffer().div_(dist.get_world_size(wrapper.process_group))


def done(value: Tensor) -> torch.futures.Future[Tensor]:
    """Completed now; of a tensor on a GPU, with what the current stream has been given."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[value.device] if value.is_cuda else None
    )
    future.set_result(value)
    return future
