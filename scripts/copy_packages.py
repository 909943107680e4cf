"""Copies installed Python packages, and what they need, into a folder for another Python.

    copy_packages.py FOLDER PACKAGE...

Only of packages that are pure Python, so that the other Python may be of another version.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path


def with_requirements(names: list[str]) -> dict[str, metadata.Distribution]:
    """Without those for other systems, and without optional ones."""
    found: dict[str, metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for requirement in found[name].requires or []:
            if ";" not in requirement:
                wanted.append(re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower())
    return found


def copy(package: metadata.Distribution, folder: Path) -> None:
    for file in package.files or []:
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        if file.suffix == ".so":
            raise SystemExit(f"copy_packages: {package.name} is not pure Python")
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(file.locate()), target)


def main() -> None:
    folder, *names = sys.argv[1:]
    for package in with_requirements(names).values():
        copy(package, Path(folder))


if __name__ == "__main__":
    main()
