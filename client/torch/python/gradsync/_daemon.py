"""Which daemon is started where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prefer_own_daemon() -> None:
    """Where a daemon has to be started, it is the one that was installed with this package: the
    environment's ``bin`` need not be in PATH."""
    daemon = Path(sys.executable).with_name("gradsyncd")
    if daemon.exists():
        os.environ.setdefault("GRADSYNC_DAEMON", str(daemon))
