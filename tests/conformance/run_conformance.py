"""Runs PyTorch's own distributed tests, from the installed wheel, on the CPU. README.md is the
manual. Failures in full, and what the tests print, go to stderr. Exit status 0: some ran and none
failed."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch_suite
from rank_processes import STATUSES, Ranks, Result
from torch_suite import Subject
from verdicts import expected_failures, judge, passing, write_junit

ENVIRONMENT = {  # of the ranks; what depends on the test is added there
    "BACKEND": "gloo",
    "INIT_METHOD": "file://",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("suite", choices=["ddp", "collectives"], help="DDP tests, or all the others of the module")
    add("--backend", default="gloo", metavar="NAME", help="backend of the process groups (gloo)")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="PKG.MOD",
        help="module to import first, e.g. one that registers the backend; repeatable",
    )
    add("--ddp", metavar="PKG.MOD:CLASS", help="class to put in place of DistributedDataParallel")
    add("--world-size", type=int, default=2, metavar="N", help="number of ranks (2)")
    add("--lift", choices=["none", "gpu", "all"], default="all", help="upstream guards to ignore")
    add("--baseline", type=Path, metavar="FILE", help="run only what passed in this --json FILE")
    add("--expected", type=Path, metavar="FILE", help="failures that are expected")
    add("--section", default="", metavar="NAME", help="of that file")
    add("--only", action="append", metavar="REGEX", help="run the tests so named; repeatable")
    add("--skip", action="append", default=[], metavar="REGEX", help="but not these; repeatable")
    add("--timeout", type=int, default=120, metavar="S", help="seconds for one test (120)")
    add("--json", type=Path, metavar="FILE", help="write the results there, to be a baseline")
    add("--junit", type=Path, metavar="FILE", help="write them there as a JUnit file")
    add("--list", action="store_true", help="only print the selected tests")
    return parser.parse_args()


def selected(args: argparse.Namespace, subject: Subject) -> list[str]:
    names = torch_suite.test_names(*torch_suite.load(subject), args.suite)
    if args.baseline:
        in_baseline = passing(args.baseline)
        names = [name for name in names if name in in_baseline]
    if args.only:
        names = [name for name in names if any(re.fullmatch(r, name) for r in args.only)]
    return [name for name in names if not any(re.fullmatch(r, name) for r in args.skip)]


def run(args: argparse.Namespace, subject: Subject, names: list[str]) -> dict[str, Result]:
    expected: dict[str, str] = {}
    if args.expected:
        expected = expected_failures(args.expected, args.section, args.world_size)
    results = {}
    ranks = Ranks(subject, args.world_size, args.timeout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the ranks, too
    try:
        for name in names:
            raw = ranks.run(name)
            result = judge(raw, expected=expected.get(name), may_skip=args.baseline is None)
            results[name] = result
            print(f"{result.status}  {result.seconds:6.2f} s  {name}  {result.reason}", flush=True)
            if raw.detail:
                print(raw.detail, file=sys.stderr, flush=True)
    finally:
        ranks.stop()
    for name in expected.keys() - set(names) if not args.only else ():
        results[name] = Result("fail", "is listed as failing, but no test has this name")
    return results


def write_json(path: Path, args: argparse.Namespace, results: dict[str, Result]) -> None:
    report = {
        "torch": torch.__version__,
        "suite": args.suite,
        "lift": args.lift,
        "backend": args.backend,
        "world_size": args.world_size,
        "tests": {n: f"{r.status}: {r.reason}".removesuffix(": ") for n, r in results.items()},
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    args = arguments()
    os.environ.update(ENVIRONMENT, WORLD_SIZE=str(args.world_size))  # for the ranks, too
    subject = Subject(args.backend, args.imports, args.ddp, args.lift)
    names = selected(args, subject)
    if args.list:
        print("\n".join(names))
        return 0
    begin = time.monotonic()
    results = run(args, subject, names)
    counts = Counter(result.status for result in results.values())
    title = f"{args.section or args.suite}, {args.backend}, {args.world_size} ranks"
    summary = ", ".join(f"{counts[status]} {status}" for status in reversed(STATUSES))
    print(f"{title}: {summary} in {time.monotonic() - begin:.0f} s")
    if args.json:
        write_json(args.json, args, results)
    if args.junit:
        write_junit(args.junit, title, results)
    return 1 if counts["fail"] or not results else 0


if __name__ == "__main__":
    sys.exit(main())
