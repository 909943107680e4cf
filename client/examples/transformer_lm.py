"""Trains a small language model, byte by byte, on a text that every Debian machine has.

    torchrun --nproc-per-node 2 transformer_lm.py

It is an ordinary data-parallel training script: a DistributedSampler, AdamW, gradient clipping. The
two lines that make gradsync average the gradients are marked with arrows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# ---> 1 of 2. It was: from torch.nn.parallel import DistributedDataParallel
from gradsync.torch import DistributedDataParallel

VOCABULARY = 256  # a token is a byte


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Overlapping windows of a text, each with the same window one byte further on."""

    def __init__(self, text: bytes, length: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._length = length
        self._stride = length // 2

    def __len__(self) -> int:
        return (len(self._bytes) - self._length - 1) // self._stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self._bytes[index * self._stride :][: self._length + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each: batch, head, position, channel
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class LanguageModel(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


class Batches:
    """What one process trains on: its rank's share, or what all ranks together have."""

    def __init__(self, data: Windows, batch: int, ranks: int, mine: list[int]) -> None:
        self._samplers: list[DistributedSampler[tuple[Tensor, Tensor]]] = [
            DistributedSampler(data, ranks, rank, seed=1, drop_last=True) for rank in mine
        ]
        self._loaders = [
            DataLoader(data, batch, sampler=sampler, drop_last=True) for sampler in self._samplers
        ]

    def __len__(self) -> int:
        return len(self._loaders[0])

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for sampler in self._samplers:
            sampler.set_epoch(number)
        for parts in zip(*self._loaders, strict=True):
            inputs, targets = zip(*parts, strict=True)
            yield torch.cat(inputs), torch.cat(targets)


class Progress:
    """A bar on a terminal; elsewhere a line now and then."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._steps = steps
        self._shown = shown
        self._terminal = sys.stdout.isatty()
        self._start = time.monotonic()

    def show(self, step: int, loss: float) -> None:
        every = 1 if self._terminal else max(1, self._steps // 8)
        if not self._shown or (step % every and step != self._steps):
            return
        full = 30 * step // self._steps
        bar = f"[{'=' * full}{' ' * (30 - full)}]"
        pace = 1000 * (time.monotonic() - self._start) / step
        end = "\n" if step == self._steps or not self._terminal else "\r"
        text = f"  {bar} step {step:3}/{self._steps}   loss {loss:.3f}   {pace:4.0f} ms a step "
        print(text, end=end, flush=True)


def train(options: argparse.Namespace, rank: int, ranks: int) -> nn.Module:
    torch.manual_seed(1)
    model: nn.Module = LanguageModel(options.width, options.layers, options.heads, options.length)
    data = Windows(options.text.read_bytes(), options.length)
    if options.single:
        batches = Batches(data, options.batch, ranks, list(range(ranks)))
    else:
        model = wrap(model, options)
        batches = Batches(data, options.batch, ranks, [rank])

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    progress = Progress(options.epochs * len(batches), shown=rank == 0)
    step = 0
    for epoch in range(options.epochs):
        for inputs, targets in batches.epoch(epoch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            progress.show(step, loss.item())

    if options.save and rank == 0:
        torch.save(getattr(model, "module", model).state_dict(), options.save)
    return model


def wrap(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    if options.ddp == "torch":  # to compare with
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=options.bucket_cap_mb)
    return DistributedDataParallel(model, bucket_cap_mb=options.bucket_cap_mb)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, default=Path("/usr/share/common-licenses/GPL-3"))
    add("--width", type=int, default=128, help="channels of the model")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--length", type=int, default=128, help="bytes in a window")
    add("--batch", type=int, default=8, help="windows a rank takes at a time")
    add("--epochs", type=int, default=4)
    add("--lr", type=float, default=2e-3)
    add("--bucket-cap-mb", type=float, default=None)
    add("--backend", choices=("gradsync", "gloo"), default="gradsync")
    add("--ddp", choices=("gradsync", "torch"), default="gradsync")
    add("--single", type=int, metavar="RANKS", help="one process, with the batches of RANKS ranks")
    add("--save", type=Path, help="where rank 0 puts the trained parameters")
    add("--after", metavar="COMMAND", help="rank 0 runs it after training, while all ranks live")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.single:
        train(options, rank=0, ranks=options.single)
        return

    # ---> 2 of 2. It was: dist.init_process_group("gloo")
    dist.init_process_group(options.backend)
    model = train(options, dist.get_rank(), dist.get_world_size())
    if options.after and dist.get_rank() == 0:
        subprocess.run(options.after, shell=True, check=True)
    dist.barrier()
    del model  # until here the daemon could be asked about its buckets
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
