"""What rank processes do in the tests; each function takes the rank and the number of ranks.

    tp_scenarios.py FUNCTION ARGUMENTS RESULT

writes what the function returned or raised to the file RESULT.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import tensorplay as tp
from tensorplay import nn

from gradsync.tensorplay import DistributedDataParallel

STEPS = 5
BATCH = 8
VICTIM = 1


# ---- Models and data ----------------------------------------------------------------------------


class OddSizes(nn.Module):
    """A scalar, sizes that no vector width divides, a layer that is used twice, and gradients that
    share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(tp.tensor(1.5))
        self.odd = nn.Parameter(tp.randn([6, 13]) * 0.3)
        self.flat = nn.Parameter(tp.zeros([13]))
        self.row = nn.Parameter(tp.zeros([1, 13]))
        self.twice = nn.Linear(13, 13)
        self.last = nn.Linear(13, 6)

    def forward(self, x: Any) -> Any:
        shift = self.flat.reshape([1, 13]) + self.row
        hidden = tp.tanh(x @ self.odd) * self.scale + shift
        return self.last(tp.tanh(self.twice(tp.tanh(self.twice(hidden)))))


def mlp() -> Any:
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 6))


def make(seed: int, build: Any = OddSizes) -> Any:
    tp.manual_seed(seed)
    return build()


def batch(step: int) -> tuple[Any, Any]:
    tp.manual_seed(1000 + step)
    return tp.randn([BATCH, 6]), tp.randn([BATCH, 6])


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def sgd(model: Any) -> Any:
    return tp.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def state(module: Any) -> list[Any]:
    return [value.tolist() for _, value in module.named_parameters()]


def gradients(module: Any) -> dict[str, Any]:
    return {
        name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()
    }


def wrap(module: Any, **options: Any) -> Any:
    """As what it is to a type checker, which takes attributes of modules for tensors."""
    return DistributedDataParallel(module, **options)


# ---- Training -----------------------------------------------------------------------------------


def train(
    rank: int,
    size: int,
    options: dict[str, Any],
    *,
    accumulate: int = 1,
    outside: bool = False,
    set_to_none: bool = True,
) -> list[Any]:
    """On this rank's share of each batch, from a state of its own that rank 0's replaces."""
    model = wrap(make(rank), **options)
    optimizer = sgd(model)
    share = BATCH // size // accumulate
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        x, y = batch(step)
        for part in range(accumulate):
            last = part == accumulate - 1
            begin = (rank * accumulate + part) * share
            mine = slice(begin, begin + share)
            with nullcontext() if last and not outside else model.no_sync():
                loss = loss_of(model, x[mine], y[mine]) / accumulate
                if not last:
                    loss.backward()
            if last:
                loss.backward()
        optimizer.step()
    return state(model.module)


def accumulate_only(rank: int, size: int, views: bool) -> dict[str, Any]:
    """By the rank's number, and one."""
    model = wrap(nn.Linear(6, 6), gradient_as_bucket_view=views)
    with model.no_sync():
        for _ in range(2):
            model(tp.full([1, 6], float(rank + 1))).sum().backward()
    return gradients(model.module)


def train_alone() -> list[Any]:
    """On whole batches, without a wrapper."""
    model = make(0)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
    return state(model)


def train_types(rank: int, size: int, dtype: str) -> list[Any]:
    """The gradient of the weight is the rank's number, and one."""
    convert = {"float16": "half", "bfloat16": "bfloat16", "float64": "double"}[dtype]
    layer = getattr(nn.Linear(4, 3, bias=False), convert)()
    model = wrap(layer)
    for _ in range(2):
        model.zero_grad()
        x = tp.full([1, 4], float(rank + 1)).to(getattr(tp, dtype))
        model(x).sum().backward()
    assert layer.weight.grad.dtype == layer.weight.dtype
    gradient: list[Any] = layer.weight.grad.float().tolist()
    return gradient


def lend_a_gradient(rank: int, size: int) -> list[Any]:
    """TensorPlay takes the caller's own gradient for that of the parameter."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(tp.zeros([6]))

        def forward(self, x: Any) -> Any:
            return x + self.shift

    model = wrap(Shift())
    own = tp.full([6], float(rank))
    model(tp.ones([6])).backward(own)
    return [own.tolist(), model.module.shift.grad.tolist()]


def wrap_again(rank: int, size: int) -> dict[str, Any]:
    """A module outlives its first wrapper, and gradients outlive both."""
    module = make(rank, mlp)
    kept = []
    for views in (True, False):
        model = wrap(module, gradient_as_bucket_view=views)
        module.zero_grad()
        model(tp.full([1, 6], float(rank))).sum().backward()
        kept.append(gradients(module))
        del model
        gc.collect()
    assert kept[0] == kept[1]
    assert gradients(module) == kept[1]
    module.zero_grad()
    module(tp.full([1, 6], float(rank))).sum().backward()  # no wrapper: nobody else takes part
    return {"alone": gradients(module), "averaged": kept[0]}


# ---- Unused parameters --------------------------------------------------------------------------


@dataclass
class Nested:
    outputs: dict[str, Any]


class Branches(nn.Module):
    """Which branch is taken, the input's first element says; one is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.never = nn.Linear(6, 6)

    def forward(self, x: Any, branch: int) -> Nested:
        return Nested({"list": [(self.branches[branch](tp.tanh(self.trunk(x))),)]})


def branch_of(rank: int, step: int) -> int:
    """In some steps the same on all ranks, in others not."""
    return (rank if step % 2 else step) % 3


def branch_loss(model: Any, rank: int, step: int) -> Any:
    x, y = batch(step)
    output = model(x[rank : rank + 2], branch_of(rank, step)).outputs["list"][0][0]
    return ((output - y[rank : rank + 2]) ** 2).mean()


def train_branches(
    rank: int, size: int, options: dict[str, Any], *, set_to_none: bool = True
) -> list[Any]:
    """All gradients and states, by step."""
    model = wrap(make(rank, Branches), find_unused_parameters=True, **options)
    model.module.never.weight.grad = tp.full([6, 6], 7.0)
    optimizer = tp.optim.SGD(
        [*model.module.trunk.parameters(), *model.module.branches.parameters()],
        lr=0.05,
        momentum=0.9,
    )
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        branch_loss(model, rank, step).backward()
        seen.append(gradients(model.module))
        optimizer.step()
    return [seen, state(model.module)]


def use_in_accumulation(rank: int, size: int, views: bool) -> dict[str, Any]:
    """Rank 1 uses branch 1 under no_sync only. Branch 2 is used by all before, then by nobody."""
    model = wrap(make(0, Branches), find_unused_parameters=True, gradient_as_bucket_view=views)
    x = tp.ones([1, 6])
    model(x, 2).outputs["list"][0][0].sum().backward()
    model.module.branches[2].bias.grad.fill_(float(rank))
    model.module.trunk.zero_grad()
    with model.no_sync():
        model(x, rank).outputs["list"][0][0].sum().backward()
    model(x, 0).outputs["list"][0][0].sum().backward()
    return gradients(model.module)


def use_nothing(rank: int, size: int) -> dict[str, Any]:
    """The second rank's outputs lead to no parameter."""

    class Detour(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Any, around: bool) -> Any:
            return x * 2 if around else self.layer(x)

    model = wrap(make(0, Detour), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        x = tp.ones([1, 6]).requires_grad_(True)
        model(x, rank == 1).sum().backward()
    return gradients(model.module)


def leave_unused(rank: int, size: int, options: dict[str, Any]) -> None:
    model = wrap(make(0, Branches), **options)
    for _ in range(2):
        model(tp.ones([1, 6]), 0).outputs["list"][0][0].sum().backward()


def leave_an_output_out(rank: int, size: int) -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            return self.first(x), self.second(x)

    model = wrap(make(0, TwoOutputs), find_unused_parameters=True)
    for _ in range(2):
        model(tp.ones([1, 6]))[0].sum().backward()


def train_static(rank: int, size: int, accumulate: bool) -> list[Any]:
    """Each rank uses another branch, always the same."""
    model = wrap(make(rank, Branches), static_graph=True)
    seen = []
    for _ in range(4):
        model.zero_grad()
        x = tp.full([1, 6], 1.0 + rank)
        if accumulate:
            with model.no_sync():
                model(x, rank).outputs["list"][0][0].sum().backward()
        model(x, rank).outputs["list"][0][0].sum().backward()
        seen.append(gradients(model.module))
    return seen


def change_static(rank: int, size: int, first: int, then: int) -> None:
    model = wrap(make(0, Branches), static_graph=True)
    for branch in (first, then, then):
        model(tp.ones([1, 6]), branch).outputs["list"][0][0].sum().backward()


# ---- Buffers ------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Puts another tensor in its buffer's place, increased by what it is given."""

    last: Any

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("last", tp.full([3, 2], float(rank)))

    def forward(self, x: Any) -> Any:
        self.before = self.last.tolist()
        self.last = self.last + float(x[0, 0])
        return self.layer(x)


def keep_buffers(rank: int, size: int, synced: bool) -> list[Any]:
    """What the buffer was at construction, and in three forwards, the second under no_sync."""
    model = wrap(Counting(rank), broadcast_buffers=synced)
    seen = [model.module.last.tolist()]
    for step in range(3):
        with model.no_sync() if step == 1 else nullcontext():
            model(tp.full([1, 6], float(rank + 1))).sum().backward()
        seen.append(model.module.before)
    return seen


# ---- Join ---------------------------------------------------------------------------------------


def train_unevenly(
    rank: int, size: int, divide: bool, options: dict[str, Any], first: int = 2
) -> list[Any]:
    """Gradients by step, and the final state."""
    model = wrap(make(rank, mlp), **options)
    optimizer = sgd(model)
    seen = []
    with model.join(divide_by_initial_world_size=divide):
        for step in range(first + 2 * rank):
            optimizer.zero_grad()
            x, y = batch(step)
            loss_of(model, x[rank : rank + 1], y[rank : rank + 1]).backward()
            seen.append(gradients(model.module))
            optimizer.step()
    if seen:  # what it stood in with were not its gradients
        assert gradients(model.module) == seen[-1]
    final = state(model.module)
    # Afterwards all train together again.
    model.zero_grad()
    model(tp.full([1, 6], float(rank))).sum().backward()
    return [seen, final, gradients(model.module)]


def join_with_buffers(rank: int, size: int) -> list[Any]:
    model = wrap(Counting(0))
    with model.join():
        for _ in range(1 + rank):
            model(tp.full([1, 6], float(rank + 1))).sum().backward()
    buffer: list[Any] = model.module.last.tolist()
    return buffer


def throw_early(rank: int, size: int) -> None:
    model = wrap(make(0, mlp))
    with model.join(throw_on_early_termination=True):
        for _ in range(2 + rank):
            model(tp.ones([1, 6])).sum().backward()


def disagree_in_join(rank: int, size: int) -> None:
    model = wrap(make(0, mlp))
    with model.join(), model.no_sync() if rank == 1 else nullcontext():
        model(tp.ones([1, 6])).sum().backward()


def join_without_effect(rank: int, size: int) -> dict[str, Any]:
    model = wrap(make(0, mlp))
    with model.join(enable=False):
        model(tp.full([1, 6], float(rank))).sum().backward()
    return gradients(model.module)


# ---- Faults -------------------------------------------------------------------------------------


def wrap_different(rank: int, size: int, what: str) -> None:
    """The last rank's differs."""
    odd = rank == size - 1
    module: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5 if odd and what == "shape" else 4))
    if odd and what == "dtype":
        module[1].double()
    if odd and what == "frozen":
        module[0].bias.requires_grad_(False)
    if what == "buffer":
        module.register_buffer("extra", tp.zeros([2 if odd else 3]))
    wrap(module, find_unused_parameters=odd and what == "setting")


def lose_a_rank(rank: int, size: int, note: str) -> None:
    """In the third backward the victim notes the time and kills itself."""
    model = wrap(make(0, mlp), bucket_cap_mb=0)

    def kill(_gradient: Any) -> None:
        Path(note).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(5):
        output = model(tp.ones([2, 6]))
        if step == 2 and rank == VICTIM:
            output.register_hook(kill)
        output.sum().backward()
    raise AssertionError("training went on")


def stay_away(rank: int, size: int) -> None:
    model = wrap(make(0, mlp), timeout=timedelta(seconds=1))
    if rank == VICTIM:
        time.sleep(4)
        return
    model(tp.ones([2, 6])).sum().backward()


def go_backward_twice(rank: int, size: int) -> None:
    model = wrap(make(0, mlp), bucket_cap_mb=0)
    output = model(tp.ones([2, 6]))
    first = model.module[4].weight.sum() * 0
    (output.sum() + first).backward(retain_graph=True)
    model(tp.ones([2, 6]))
    # Two backwards after one forward: the parts of the model are reached in both.
    model.module[4](tp.ones([2, 5])).sum().backward()
    model.module[4](tp.ones([2, 5])).sum().backward()


def convert(rank: int, size: int, how: str) -> None:
    model = wrap(make(0, mlp))
    if how == "type":
        model.double()
    else:
        model.module[2].weight = nn.Parameter(tp.zeros([5, 17]))
    model(tp.ones([2, 6]).to(tp.float64 if how == "type" else tp.float32))


def raise_in_backward(rank: int, size: int) -> list[Any]:
    """TensorPlay goes on with backward, and raises at its end."""
    model = wrap(make(0, mlp), timeout=timedelta(seconds=5))

    def fail(_parameter: Any) -> None:
        raise ArithmeticError("enough")

    hook = model.module[4].weight.register_post_accumulate_grad_hook(fail)
    seen: list[Any] = []
    for _ in range(2):
        model.zero_grad()
        try:
            model(tp.full([1, 6], float(rank))).sum().backward()
        except ArithmeticError as error:
            seen.append(str(error))
        hook.remove()
        seen.append(gradients(model.module))
    return seen


def wrap_unfit(rank: int, size: int, what: str) -> None:
    module = make(0, mlp)
    if what == "frozen":
        module.requires_grad_(False)
    else:
        module[0].weight = nn.Parameter(tp.ones([17, 6]).to(tp.float16).to(tp.int32), False)
        module[0].odd = nn.Parameter(tp.ones([2], dtype=tp.complex32))
    wrap(module)


def modules_loaded(rank: int, size: int) -> list[str]:
    wrap(make(0, mlp))
    return sorted(name for name in sys.modules if name.partition(".")[0] == "torch")


# ---- The process --------------------------------------------------------------------------------


def main(name: str, arguments: str, result: str) -> None:
    outcome: dict[str, Any] = {}
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        outcome["value"] = globals()[name](rank, size, **json.loads(arguments))
    except Exception as error:  # whatever it is, it goes to the test
        outcome |= {"error": type(error).__name__, "message": str(error)}
    outcome["at"] = time.monotonic()
    Path(result).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])
