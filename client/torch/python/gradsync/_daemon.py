"""Which daemon is started where there is none."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def prefer_own_daemon() -> None:
    """Where a daemon has to be started, it is the one that was installed with this package: the
    environment's ``bin`` need not be in PATH. It takes the NCCL that came with the framework."""
    daemon = Path(sys.executable).with_name("gradsyncd")
    if daemon.exists():
        os.environ.setdefault("GRADSYNC_DAEMON", str(daemon))
    nccl = _installed_nccl()
    if nccl is not None:
        os.environ.setdefault("GRADSYNC_NCCL", str(nccl))


def _installed_nccl() -> Path | None:
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or ():
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            return library
    return None
