"""gradsync for TensorPlay.

A trainer that is started once for each rank, with ``RANK`` and ``WORLD_SIZE`` in its environment
(by ``torchrun`` or ``python -m tensorplay.distributed.run``, say), changes one line. Its own::

    from tensorplay.nn.parallel.distributed import DistributedDataParallel

becomes::

    from gradsync.tensorplay import DistributedDataParallel

It needs no process group of TensorPlay's, and works beside one. Ranks of one job find each other by
``GRADSYNC_JOB``, else ``TORCHELASTIC_RUN_ID``, else ``MASTER_ADDR`` and ``MASTER_PORT``. The daemon
is found as follows: the socket that ``GRADSYNC_SOCKET`` names, else the system's at
``/run/gradsync/gradsyncd.sock``, else a private one, which the first rank starts and which ends by
itself. Errors are those of :mod:`gradsync.errors`.

The C library lies beside this package; ``GRADSYNC_LIBRARY`` names another one.
"""

# By relative imports only: type checkers know this folder by another name than it is installed as.
from .distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
