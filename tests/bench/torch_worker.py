"""One rank of the bench inside PyTorch: does what bench.py tells it to, a JSON line at a time.

Both backends and every wrapped model live in the same processes, so that what is compared can be
measured in turn. Between commands a worker waits for its standard input and uses no core.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import gradsync.torch

VOCABULARY = 2048
WARM_UP = 3


class LanguageModel(nn.Module):
    """A transformer of 27 million parameters with eight layers."""

    def __init__(self, layers: int, width: int = 512) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=8, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.token(tokens)))


class Trainer:
    """A model, wrapped or not, and its optimiser."""

    def __init__(self, mode: str, layers: int, gloo: dist.ProcessGroup) -> None:
        torch.manual_seed(1)
        model: nn.Module = LanguageModel(layers)
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
        if mode == "gloo":
            model = nn.parallel.DistributedDataParallel(model, process_group=gloo)
        elif mode == "gradsync":
            model = gradsync.torch.DistributedDataParallel(model)
        elif mode == "view":
            model = gradsync.torch.DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif mode == "unused":
            model = gradsync.torch.DistributedDataParallel(model, find_unused_parameters=True)
        elif mode == "join":
            model = gradsync.torch.DistributedDataParallel(model)
            self.context = model.join
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._tokens = torch.randint(VOCABULARY, (1, 33))

    def step(self, set_to_none: bool) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)
        logits = self._model(self._tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten()).backward()
        self._optimizer.step()


class Worker:
    def __init__(self, layers: int) -> None:
        dist.init_process_group("gradsync", timeout=timedelta(minutes=5))
        self._layers = layers
        gloo = dist.new_group(backend="gloo", timeout=timedelta(minutes=5))
        assert isinstance(gloo, dist.ProcessGroup)
        self._gloo = gloo
        self._trainers: dict[str, Trainer] = {}

    def all_reduce(self, backend: str, sizes: list[tuple[int, int]]) -> list[float]:
        """The median seconds of an all_reduce for each (bytes, iterations). gloo cannot average, so
        it sums; the division is left out in its favour."""
        group = self._gloo if backend == "gloo" else None
        op = dist.ReduceOp.SUM if backend == "gloo" else dist.ReduceOp.AVG
        medians = []
        for size, iterations in sizes:
            tensor = torch.zeros(size // 4)
            samples = []
            for _ in range(WARM_UP + iterations):
                start = time.perf_counter()
                dist.all_reduce(tensor, op=op, group=group)
                samples.append(time.perf_counter() - start)
            medians.append(statistics.median(samples[WARM_UP:]))
        return medians

    def steps(self, mode: str, set_to_none: bool, count: int) -> list[float]:
        """The seconds of each step; all ranks begin each of them together."""
        trainer = self._trainer(mode)
        samples = []
        with trainer.context():
            for _ in range(count + 1):
                dist.barrier()
                start = time.perf_counter()
                trainer.step(set_to_none)
                samples.append(time.perf_counter() - start)
        return samples[1:]

    def memory(self) -> dict[str, int]:
        """Bytes of gradients, and of all that is shared with the daemon, after steps on views."""
        trainer = self._trainer("view")
        for _ in range(2):
            trainer.step(set_to_none=False)
        return {"gradients": trainer.gradient_bytes, "shared": shared_bytes()}

    def close(self) -> None:
        self._trainers.clear()
        dist.barrier()
        dist.destroy_process_group()

    def _trainer(self, mode: str) -> Trainer:
        if mode not in self._trainers:
            self._trainers[mode] = Trainer(mode, self._layers, self._gloo)
            # The first iterations plan buckets, and plan them anew.
            for _ in range(WARM_UP):
                self._trainers[mode].step(set_to_none=True)
        return self._trainers[mode]


def shared_bytes() -> int:
    """Mapped segments of this process: they are all memfds."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            begin, end = line.split(maxsplit=1)[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def main() -> None:
    torch.set_num_threads(1)
    worker = Worker(layers=int(sys.argv[1]))
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
