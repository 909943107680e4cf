"""Measures gradsync beside what else there is, in one run, and says which targets are met.

    bench.py [--quick] [--json FILE]

All contenders take turns, several rounds of them, so that a machine whose speed drifts is the same
for all; what is shown is the median of the rounds, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import contenders
import report

KIB, MIB = 1 << 10, 1 << 20
BUCKET = 25 * MIB

# A mode of training and what it is compared with: the same step, without averaging. zero_grad() by
# default drops the gradients; the views are kept, and filled with zeros, by set_to_none=False.
MODES = {
    "alone": ("alone", True),
    "gloo": ("gloo", True),
    "gradsync": ("gradsync", True),
    "gradsync, views": ("view", True),
    "gradsync, find_unused": ("unused", True),
    "gradsync, in a join": ("join", True),
    "alone, zeroed": ("alone", False),
    "gradsync, views, zeroed": ("view", False),
}


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rank_counts: tuple[int, ...] = (2, 4)
    sizes: tuple[int, ...] = (4, 64, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, BUCKET, 100 * MIB)
    rounds: int = 5
    most_iterations: int = 200
    bytes_per_size: int = 200 * MIB
    layers: int = 8
    steps: int = 4
    starts: int = 5

    def with_iterations(self) -> list[contenders.Size]:
        return [
            (size, max(5, min(self.most_iterations, self.bytes_per_size // size)))
            for size in self.sizes
        ]


QUICK = Plan(
    rank_counts=(2,),
    sizes=(4, KIB, MIB),
    rounds=2,
    most_iterations=20,
    bytes_per_size=10 * MIB,
    layers=1,
    steps=1,
    starts=1,
)


@dataclass
class Series:
    """Seconds of each contender, round by round."""

    rounds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def median(self, name: str) -> float | None:
        return statistics.median(self.rounds[name]) if self.rounds.get(name) else None

    def ratio(self, name: str, base: str) -> float | None:
        if not self.rounds.get(name) or not self.rounds.get(base):
            return None
        pairs = zip(self.rounds[name], self.rounds[base], strict=True)
        return statistics.median(value / other for value, other in pairs)

    def added(self, mode: str) -> list[float]:
        """What a mode's averaging adds to the step, round by round."""
        alone = "alone, zeroed" if mode.endswith("zeroed") else "alone"
        pairs = zip(self.rounds[mode], self.rounds[alone], strict=True)
        return [value - base for value, base in pairs]

    def added_ratio(self, mode: str) -> float:
        """What a mode adds, as a part of what gloo adds."""
        return statistics.median(self.added(mode)) / statistics.median(self.added("gloo"))


AllReduce = dict[int, dict[int, Series]]  # ranks: bytes: times
Steps = dict[int, Series]


@dataclass
class Results:
    all_reduce: AllReduce = field(default_factory=dict)
    steps: Steps = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    start_seconds: float = 0
    idle_bytes: int = 0


def measure(plan: Plan) -> Results:
    results = Results()
    say("daemon: start, idle memory")
    results.start_seconds, results.idle_bytes = contenders.measure_start(plan.starts)
    for ranks in plan.rank_counts:
        with (
            contenders.Daemon() as daemon,
            contenders.TorchWorkers(ranks, plan.layers, environment(daemon)) as workers,
        ):
            results.all_reduce[ranks] = measure_all_reduce(plan, ranks, daemon, workers)
            results.steps[ranks] = measure_steps(plan, ranks, workers)
    with (
        contenders.Daemon() as daemon,
        contenders.TorchWorkers(2, plan.layers, environment(daemon)) as workers,
    ):
        say("shared memory with bucket views")
        results.memory = workers.memory()
    return results


def environment(daemon: contenders.Daemon) -> dict[str, str]:
    return {"GRADSYNC_SOCKET": daemon.socket}


def measure_all_reduce(
    plan: Plan, ranks: int, daemon: contenders.Daemon, workers: contenders.TorchWorkers
) -> dict[int, Series]:
    sizes = plan.with_iterations()
    series = {size: Series() for size in plan.sizes}
    own = environment(daemon)
    for number in range(plan.rounds):
        say(f"all-reduce, {ranks} ranks, round {number + 1} of {plan.rounds}")
        turns = {
            "bare kernel": contenders.program("bare_bench", ranks, sizes, own),
            "gradsync, bucket": contenders.program("bucket_bench", ranks, sizes, own),
            "gloo": workers.all_reduce("gloo", sizes),
            "gradsync, tensor": workers.all_reduce("gradsync", sizes),
        }
        if contenders.has_mpi():
            turns["Open MPI"] = contenders.program("mpi_bench", ranks, sizes, own)
        for name, medians in turns.items():
            for size, seconds in medians.items():
                series[size].rounds[name].append(seconds)
    return series


def measure_steps(plan: Plan, ranks: int, workers: contenders.TorchWorkers) -> Series:
    series = Series()
    for mode, _ in MODES.values():  # makes the models, outside of what is measured
        workers.step(mode, set_to_none=True, count=1)
    for number in range(plan.rounds):
        say(f"training step, {ranks} ranks, round {number + 1} of {plan.rounds}")
        for name, (mode, set_to_none) in MODES.items():
            series.rounds[name].append(workers.step(mode, set_to_none, plan.steps))
    return series


def judge(results: Results) -> Iterator[report.Target]:
    """Each target, and what was measured for it."""
    at_most, at_least = report.at_most, report.at_least
    for ranks, gloo, mpi in ((2, 6, 2), (4, 10, 3)):
        series = results.all_reduce[ranks][BUCKET]
        what = f"bucket reduce, 25 MiB, {ranks} ranks"
        yield at_most(
            what, "of the bare kernel", series.ratio("gradsync, bucket", "bare kernel"), 2
        )
        yield at_least(what, "gloo", series.ratio("gloo", "gradsync, bucket"), gloo)
        yield at_least(what, "Open MPI", series.ratio("Open MPI", "gradsync, bucket"), mpi)
    small = [results.all_reduce[2][size] for size in (4, 64, KIB)]
    for name in ("gradsync, bucket", "gradsync, tensor"):
        what = f"4 B to 1 KiB, 2 ranks ({name.split(', ')[1]})"
        slowest = max(1e6 * (series.median(name) or 0) for series in small)
        yield at_most(what, "us", slowest, 60)
        yield at_least(what, "gloo", min(series.ratio("gloo", name) or 0 for series in small), 8)
    tensor = results.all_reduce[2][BUCKET].ratio("gloo", "gradsync, tensor")
    yield at_least("dist.all_reduce of a tensor, 25 MiB, 2 ranks", "gloo", tensor, 3)
    steps = results.steps[2]
    for mode, limit in (
        ("gradsync", 0.3),
        ("gradsync, views", 0.2),
        ("gradsync, views, zeroed", 0.2),
    ):
        what = f"added to a step, 2 ranks ({mode})"
        yield at_most(what, "of gloo's", steps.added_ratio(mode), limit)
    for mode in ("gradsync, find_unused", "gradsync, in a join"):
        yield at_most(
            f"a step, 2 ranks ({mode})", "of one without", steps.ratio(mode, "gradsync"), 1.03
        )
    shared = results.memory["shared"] / MIB
    limit = 1.05 * results.memory["gradients"] / MIB + 2
    yield at_most("shared memory per rank, views", "MiB", shared, limit)
    yield at_most("daemon: private memory, idle", "MiB", results.idle_bytes / MIB, 64)
    yield at_most("daemon: start to accepting", "ms", 1000 * results.start_seconds, 200)


def show(results: Results, targets: list[report.Target]) -> None:
    for ranks, by_size in results.all_reduce.items():
        names = list(next(iter(by_size.values())).rounds)
        rows = [
            [report.size(size), *(report.seconds(series.median(name)) for name in names)]
            for size, series in by_size.items()
        ]
        print(f"\nAll-reduce (average of float32), {ranks} ranks\n")
        report.table(["size", *names], rows)
    for ranks, steps in results.steps.items():
        rows = []
        for mode in MODES:
            row = [mode, report.seconds(steps.median(mode))]
            if not mode.startswith("alone"):
                row.append(report.seconds(statistics.median(steps.added(mode))))
                row.append(f"{steps.added_ratio(mode):.2f}")
            rows.append(row)
        print(f"\nTraining step, {ranks} ranks\n")
        report.table(["", "step", "added by averaging", "of gloo's"], rows)
    if targets:
        print("\nTargets\n")
        rows = [
            [target.what, target.measured(), target.wanted(), "yes" if target.met() else "NO"]
            for target in targets
        ]
        report.table(["what", "measured", "wanted", "met"], rows)
    print(f"\nMeasured on {report.sentence(machine())}.")


def machine() -> dict[str, Any]:
    cpu = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "linux": ".".join(platform.release().split(".")[:2]),
        "torch": version("torch"),
        "gradsync": version("gradsync"),
    }


def as_json(results: Results, targets: list[report.Target]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "all_reduce_seconds": {
            ranks: {size: series.rounds for size, series in by_size.items()}
            for ranks, by_size in results.all_reduce.items()
        },
        "step_seconds": {ranks: series.rounds for ranks, series in results.steps.items()},
        "view_mode_bytes": results.memory,
        "daemon": {
            "start_seconds": results.start_seconds,
            "idle_private_bytes": results.idle_bytes,
        },
        "targets": [target.as_json() for target in targets],
    }


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a little of each; nothing is judged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the numbers, round by round")
    options = parser.parse_args()
    try:
        results = measure(QUICK if options.quick else Plan())
    except contenders.BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    targets = [] if options.quick else list(judge(results))
    show(results, targets)
    if options.json:
        options.json.write_text(json.dumps(as_json(results, targets), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
