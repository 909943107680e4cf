"""What gradsync raises.

Every error is a :class:`GradsyncError`, which is a ``RuntimeError``, so code that was written for
another backend goes on catching it. The message names the job, the rank, the bucket or the
parameter, and says what to do. After an error of a collective or of a backward, the process groups
and wrapped modules that it concerns do not work any more: end the process, or destroy the process
group and start again.
"""

from typing import ClassVar


class GradsyncError(RuntimeError):
    """Whatever gradsync reports. ``code`` is the number, ``name`` the name of the cause in
    ``gradsync/gradsync.h``."""

    code: ClassVar[int] = -1
    name: ClassVar[str] = "UNKNOWN"


class InvalidArgumentError(GradsyncError, ValueError):
    """An argument is wrong, whatever the state."""

    code = 1
    name = "INVALID_ARGUMENT"


class MismatchError(GradsyncError):
    """Ranks disagree: on the model, the world size, or the operation. Names the ranks and both
    values."""

    code = 2
    name = "MISMATCH"


class DeadlineExceededError(GradsyncError, TimeoutError):
    """A wait has ended. Names the ranks that were missing."""

    code = 3
    name = "DEADLINE_EXCEEDED"


class RankLostError(GradsyncError):
    """Another rank died or left. Names it."""

    code = 4
    name = "RANK_LOST"


class DaemonLostError(GradsyncError):
    """No daemon was found, or it died, or it closed the session."""

    code = 5
    name = "DAEMON_LOST"


class ProtocolError(GradsyncError):
    """The daemon is of another version."""

    code = 6
    name = "PROTOCOL"


class PermissionDeniedError(GradsyncError, PermissionError):
    """The daemon's socket belongs to somebody else."""

    code = 7
    name = "PERMISSION_DENIED"


class OutOfMemoryError(GradsyncError, MemoryError):
    """There is not enough memory, or a configured limit was reached."""

    code = 8
    name = "OUT_OF_MEMORY"


class AlreadyExistsError(GradsyncError):
    """Another process holds this rank."""

    code = 9
    name = "ALREADY_EXISTS"


class ShuttingDownError(GradsyncError):
    """The daemon is ending in an orderly way."""

    code = 10
    name = "SHUTTING_DOWN"


class UnsupportedError(GradsyncError):
    """Valid, but not offered by this build."""

    code = 11
    name = "UNSUPPORTED"


class FailedPreconditionError(GradsyncError):
    """A call out of order, or in a forked child."""

    code = 12
    name = "FAILED_PRECONDITION"


class InternalError(GradsyncError):
    """A fault of gradsync itself: please report it."""

    code = 13
    name = "INTERNAL"


ERROR_CLASSES: dict[int, type[GradsyncError]] = {
    error.code: error
    for error in (
        InvalidArgumentError,
        MismatchError,
        DeadlineExceededError,
        RankLostError,
        DaemonLostError,
        ProtocolError,
        PermissionDeniedError,
        OutOfMemoryError,
        AlreadyExistsError,
        ShuttingDownError,
        UnsupportedError,
        FailedPreconditionError,
        InternalError,
    )
}
"""The class of each code. The extension raises these."""
