"""Runs clang-tidy over the project's own C++ files, as many at a time as there are cores.

A file is checked again only when it, a header that it includes, its compile command or .clang-tidy
has changed: what was found clean is remembered by content, for every working tree of this user.

    tidy.py BUILD      BUILD: a build tree with compile_commands.json, built by Ninja
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLEAN = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsync" / "tidy"
KEPT_S = 30 * 24 * 3600


class Sources:
    """The project's translation units, and what the outcome of checking each one depends on."""

    def __init__(self, build: Path) -> None:
        self._build = build
        self._digests: dict[Path, bytes] = {}
        self._dependencies = dict(self._read_dependencies())
        version = subprocess.run(
            ["clang-tidy", "--version"], capture_output=True, text=True, check=True
        ).stdout
        self._common = version.encode() + (ROOT / ".clang-tidy").read_bytes()

    def units(self) -> Iterator[tuple[Path, str]]:
        """Each source file of the project with the key of its outcome."""
        entries = json.loads((self._build / "compile_commands.json").read_text())
        seen = set()
        for entry in entries:
            source = Path(entry["file"])
            if source in seen or not self._is_ours(source):
                continue
            seen.add(source)
            yield source, self._key(source, entry)

    def _is_ours(self, path: Path) -> bool:
        return path.is_relative_to(ROOT) and not path.is_relative_to(self._build)

    def _key(self, source: Path, entry: dict[str, str]) -> str:
        digest = hashlib.sha256(self._common)
        command = entry["command"]
        digest.update(command.replace(str(ROOT), "").encode())
        output = shlex.split(command)[shlex.split(command).index("-o") + 1]
        for path in [source, *self._dependencies.get(output, [])]:
            digest.update(self._digest(path))
        return digest.hexdigest()

    def _digest(self, path: Path) -> bytes:
        if path not in self._digests:
            # A package's header stands for itself: it changes with the package only.
            stat = path.stat()
            content = path.read_bytes() if self._is_ours(path) else b"%d" % stat.st_size
            name = str(path).removeprefix(str(ROOT)).encode()
            self._digests[path] = hashlib.sha256(name + content).digest()
        return self._digests[path]

    def _read_dependencies(self) -> Iterator[tuple[str, list[Path]]]:
        """Ninja's record: `OUTPUT: #deps N, ...`, then one indented path a line."""
        log = subprocess.run(
            ["ninja", "-C", str(self._build), "-t", "deps"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for block in log.split("\n\n"):
            head, *paths = block.splitlines() or [""]
            files = [Path(os.path.normpath(self._build / path.strip())) for path in paths]
            yield head.split(":")[0], [path for path in files if path.exists()]


def check(build: Path, source: Path) -> str:
    """What clang-tidy has to say about `source`; nothing when it is clean."""
    result = subprocess.run(
        ["clang-tidy", "--quiet", "-p", str(build), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if result.returncode == 0 else result.stdout + result.stderr


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    build = Path(sys.argv[1]).resolve()
    CLEAN.mkdir(parents=True, exist_ok=True)
    units = list(Sources(build).units())
    pending = [(source, key) for source, key in units if not (CLEAN / key).exists()]
    faults = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = pool.map(lambda unit: check(build, unit[0]), pending)
        for (source, key), complaint in zip(pending, complaints, strict=True):
            if complaint:
                faults += 1
                print(f"{source.relative_to(ROOT)}:\n{complaint}", flush=True)
            else:
                (CLEAN / key).touch()
    for path in CLEAN.iterdir():
        if path.stat().st_mtime < time.time() - KEPT_S:
            path.unlink()
    print(f"{len(units)} files, {len(pending)} of them checked now, {faults} with faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
