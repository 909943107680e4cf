"""Shows gradsync at work on this machine: two ranks, and the daemon that averages their gradients.

    demo.py [--quick]
    demo.py --show-job NAME    what the daemon says about the job whose name begins with NAME

First a C++ program, one linear unit whose gradients can be checked by hand; then a small language
model in PyTorch under torchrun, which is compared with the same training in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(sys.executable).parent
DAEMON = VENV / "gradsyncd"
EXAMPLES = ROOT / "client" / "examples"
RANKS = 2


def title(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"\n{bold}{text}{plain}\n", flush=True)


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GRADSYNC_DAEMON": str(DAEMON)} | environment,
        check=True,
    )


def show_linear_unit() -> None:
    title(f"1. One linear unit, in C++: {RANKS} ranks")
    run(ROOT / "build" / "client" / "examples" / "linear_unit", "--ranks", str(RANKS))


def show_language_model(quick: bool) -> None:
    script = EXAMPLES / "transformer_lm.py"
    arguments = ["--bucket-cap-mb=1", f"--epochs={1 if quick else 4}"]
    with tempfile.TemporaryDirectory(prefix="gradsync-demo-") as name:
        together, alone = Path(name) / "together.pt", Path(name) / "alone.pt"
        job = f"demo-{os.getpid()}"
        after = shlex.join([sys.executable, __file__, f"--show-job={job}"])

        title(f"2. A language model, in PyTorch: {RANKS} ranks whose gradients gradsync averages")
        launch: list[str | Path] = [
            VENV / "torchrun",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            script,
        ]
        run(*launch, *arguments, f"--save={together}", f"--after={after}", GRADSYNC_JOB=job)

        title("3. The same training in one process, on the whole batch")
        run(sys.executable, script, *arguments, f"--single={RANKS}", f"--save={alone}")
        print(
            f"\n  Greatest difference of any parameter: {greatest_difference(together, alone):.1e}"
        )


def greatest_difference(one: Path, other: Path) -> float:
    left, right = torch.load(one), torch.load(other)
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def show_job(prefix: str) -> None:
    jobs = ask_daemon("jobs")["jobs"]
    name = next(job["name"] for job in jobs if job["name"].startswith(prefix))
    groups = ask_daemon("job", name)["groups"]
    buckets = [bucket for group in groups for bucket in group["buckets"]]

    print("\n  What the daemon measured for each bucket, in the last step:\n")
    print("  bucket       size   reductions   waiting for ranks   reducing      total")
    for bucket in buckets:
        size = f"{int(bucket['bytes']) / (1 << 20):.2f} MiB"
        wait, reduce, total = (
            f"{milliseconds(bucket['last'][part]):.2f} ms" for part in ("wait", "reduce", "total")
        )
        counted = bucket["reductions"]
        print(f"  {bucket['index']:>6}{size:>11}{counted:>13}{wait:>20}{reduce:>11}{total:>11}")
    sys.stdout.flush()


def ask_daemon(*question: str) -> dict[str, Any]:
    command = [str(VENV / "gradsyncctl"), *question, "--json"]
    answer: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    )
    return answer


def milliseconds(duration: str) -> float:
    """Of a protobuf Duration in JSON, "0.001234s"."""
    return 1000 * float(duration.removesuffix("s"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one epoch instead of four")
    parser.add_argument("--show-job", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.show_job:
        show_job(options.show_job)
        return 0
    try:
        show_linear_unit()
        show_language_model(options.quick)
    except subprocess.CalledProcessError as error:
        print(f"\ndemo: '{shlex.join(error.cmd)}' failed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
