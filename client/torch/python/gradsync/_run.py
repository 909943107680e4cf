"""``gradsync-run``: a trainer's command, with gradsync attached.

Light on purpose: nothing here may import torch, since the command itself does so again.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_NAME = "gradsync-run"

_DESCRIPTION = """\
Runs a trainer's ordinary command with gradsync attached, without a change of the trainer:

  gradsync-run torchrun --nproc-per-node 2 train.py --lr 1
  gradsync-run accelerate launch train.py
  gradsync-run python train.py

In every Python process below, a process group that would use gloo uses gradsync, and torch's
DistributedDataParallel is gradsync's for modules on the CPU. NCCL, and modules on other devices,
stay with torch. Where the ranks are not all on one machine everything stays as it is, and a warning
says so.
"""

_EPILOG = """\
Exit status: 2 for a wrong command line, 126 if COMMAND cannot be executed, 127 if there is no such
COMMAND, and otherwise COMMAND's own. COMMAND takes this process's place, so signals reach it.
"""

# As env, nohup and the shells have it.
_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog=_NAME,
        usage=f"{_NAME} [-h] COMMAND [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the trainer's"
    )
    command: list[str] = parser.parse_args(arguments).command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        parser.error(f"no COMMAND is given, as in: {_NAME} torchrun --nproc-per-node 2 train.py")
    option = option_that_detaches(command)
    if option is not None:
        parser.error(
            f"{command[0]} with {option} does not read PYTHONPATH or sitecustomize, by which "
            f"gradsync is attached: leave {option} out"
        )
    _execute(command, environment(os.environ))


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base``, with what makes each Python process look for ``_site/sitecustomize.py`` first."""
    folder = str(Path(__file__).with_name("_site"))
    # An empty entry would mean the working directory, so an empty variable must not become one.
    others = [entry for entry in [base.get("PYTHONPATH", "")] if entry]
    if others and others[0].split(os.pathsep)[0] == folder:
        return dict(base)
    return dict(base) | {"PYTHONPATH": os.pathsep.join([folder, *others])}


def option_that_detaches(command: Sequence[str]) -> str | None:
    """The option by which Python, if that is the command, is told to ignore the environment (-E,
    -I) or sitecustomize (-S)."""
    if re.fullmatch(r"python[0-9.]*", Path(command[0]).name) is None:
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return None
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in "EIS":
                return f"-{letter}"
            if letter in "cm":  # what follows is the program's
                return None
            if letter in "WX":  # takes the rest of the word, or the next one
                if place == len(word) - 1:
                    next(words, None)
                break
    return None


def _execute(command: list[str], variables: dict[str, str]) -> NoReturn:
    # Python ignores these, and so would the command.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        hint = ""
        if command[0].endswith(".py"):
            hint = f"; to run a script of Python's: {_NAME} python {command[0]}"
        print(f"{_NAME}: {command[0]}: {error.strerror}{hint}", file=sys.stderr)
        sys.exit(_NOT_FOUND if missing else _CANNOT_EXECUTE)
