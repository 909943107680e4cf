"""gradsync: gradient synchronisation as a service.

A daemon of the node, ``gradsyncd``, averages the gradients of data-parallel trainers where they lie
in shared memory. This package holds what a trainer needs:

- :mod:`gradsync.torch` for PyTorch: ``DistributedDataParallel`` and the ``"gradsync"`` backend of
  ``torch.distributed``;
- :mod:`gradsync.errors`: what can go wrong, as exceptions.
"""

from gradsync.errors import (
    AlreadyExistsError,
    DaemonLostError,
    DeadlineExceededError,
    FailedPreconditionError,
    GradsyncError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    OutOfMemoryError,
    PermissionDeniedError,
    ProtocolError,
    RankLostError,
    ShuttingDownError,
    UnsupportedError,
)

__all__ = [
    "AlreadyExistsError",
    "DaemonLostError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "GradsyncError",
    "InternalError",
    "InvalidArgumentError",
    "MismatchError",
    "OutOfMemoryError",
    "PermissionDeniedError",
    "ProtocolError",
    "RankLostError",
    "ShuttingDownError",
    "UnsupportedError",
]
