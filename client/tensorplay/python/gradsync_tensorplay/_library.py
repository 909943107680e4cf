"""The C interface of libgradsync, as far as it is used here: a mirror of ``gradsync/gradsync.h``,
which says what everything means. A test compares the two.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from pathlib import Path
from typing import Any

from gradsync.errors import ERROR_CLASSES, GradsyncError

MAX_DIMS = 8


class DType(IntEnum):
    """gradsync_dtype"""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT8 = 4
    UINT8 = 5
    INT16 = 6
    INT32 = 7
    INT64 = 8
    BOOL = 9
    COMPLEX64 = 10
    COMPLEX128 = 11


class UnusedPolicy(IntEnum):
    """gradsync_unused_policy"""

    ERROR = 0
    FIND = 1
    STATIC = 2


class Error(Structure):
    """gradsync_error"""

    _fields_ = [("code", c_int), ("message", c_char * 2048)]


class SessionOptions(Structure):
    """gradsync_session_options"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("socket", c_char_p),
        ("job", c_char_p),
        ("generation", c_uint32),
        ("world_size", c_uint32),
        ("rank", c_uint32),
        ("local_rank", c_uint32),
        ("local_world_size", c_uint32),
        ("timeout_ms", c_uint32),
    ]


class Parameter(Structure):
    """gradsync_parameter"""

    _fields_ = [
        ("name", c_char_p),
        ("dtype", c_int),
        ("ndim", c_uint32),
        ("shape", c_int64 * MAX_DIMS),
        ("device", c_uint32),
    ]


class DdpOptions(Structure):
    """gradsync_ddp_options"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("bucket_bytes", c_uint64),
        ("first_bucket_bytes", c_uint64),
        ("timeout_ms", c_uint32),
        ("fixed_plan", c_uint32),
        ("bucket_bytes_list", POINTER(c_uint64)),
        ("bucket_bytes_count", c_uint32),
        ("fill_from_front", c_uint32),
    ]


class SessionHandle(Structure):
    """gradsync_session, opaque"""


class GroupHandle(Structure):
    """gradsync_group, opaque"""


class BufferHandle(Structure):
    """gradsync_buffer, opaque"""


class DdpHandle(Structure):
    """gradsync_ddp, opaque"""


class Slot(Structure):
    """gradsync_slot"""

    _fields_ = [
        ("data", c_void_p),
        ("count", c_uint64),
        ("bucket", c_uint32),
        ("buffer", POINTER(BufferHandle)),
    ]


class Bucket(Structure):
    """gradsync_bucket"""

    _fields_ = [
        ("data", c_void_p),
        ("count", c_uint64),
        ("dtype", c_int),
        ("parameters", POINTER(c_uint32)),
        ("parameter_count", c_uint32),
    ]


_error = POINTER(Error)
_session = POINTER(SessionHandle)
_group = POINTER(GroupHandle)
_buffer = POINTER(BufferHandle)
_ddp = POINTER(DdpHandle)

# By name: what a function returns, then what it takes. An enumeration is an int.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "gradsync_session_open": (c_int, POINTER(SessionOptions), POINTER(_session), _error),
    "gradsync_session_close": (None, _session),
    "gradsync_session_rank": (c_uint32, _session),
    "gradsync_session_world_size": (c_uint32, _session),
    "gradsync_buffer_retain": (None, _buffer),
    "gradsync_buffer_release": (None, _buffer),
    "gradsync_group_create": (
        *(c_int, _session, c_char_p, POINTER(c_uint32), c_uint32, c_uint32),
        *(POINTER(_group), _error),
    ),
    "gradsync_group_destroy": (None, _group),
    "gradsync_broadcast": (
        *(c_int, _group, c_void_p, c_uint64, c_int, c_uint32, c_uint32, _error),
    ),
    "gradsync_all_gather": (
        *(c_int, _group, c_void_p, c_void_p, c_uint64, c_int, c_uint32, _error),
    ),
    "gradsync_ddp_create": (
        *(c_int, _group, POINTER(Parameter), c_uint32, POINTER(DdpOptions)),
        *(POINTER(_ddp), _error),
    ),
    "gradsync_ddp_destroy": (None, _ddp),
    "gradsync_ddp_slot": (c_int, _ddp, c_uint32, POINTER(Slot), _error),
    "gradsync_ddp_bucket_count": (c_uint32, _ddp),
    "gradsync_ddp_bucket": (c_int, _ddp, c_uint32, POINTER(Bucket), _error),
    "gradsync_ddp_begin": (c_int, _ddp, _error),
    "gradsync_ddp_ready": (c_int, _ddp, c_uint32, POINTER(c_int), _error),
    "gradsync_ddp_set_unused_policy": (c_int, _ddp, c_int, _error),
    "gradsync_ddp_ready_unused": (c_int, _ddp, c_uint32, POINTER(c_int), _error),
    "gradsync_ddp_used_by": (c_uint32, _ddp, c_uint32),
    "gradsync_ddp_wait": (c_int, _ddp, c_uint32, _error),
    "gradsync_ddp_end": (c_int, _ddp, _error),
    "gradsync_ddp_replan": (c_int, _ddp, POINTER(c_int), _error),
    "gradsync_ddp_renew": (c_int, _ddp, _error),
}

_NAME = "libgradsync.so.0"


def _load() -> ctypes.CDLL:
    beside = Path(__file__).parent.parent / "lib" / _NAME
    path = os.environ.get("GRADSYNC_LIBRARY") or (str(beside) if beside.exists() else _NAME)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"cannot load {_NAME}: {error}; it belongs at {beside}, or set GRADSYNC_LIBRARY to its "
            "path"
        ) from error
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


LIBRARY = _load()


def check(code: int, error: Error) -> None:
    """Raises what a call has reported."""
    if code != 0:
        raise ERROR_CLASSES.get(code, GradsyncError)(error.message.decode(errors="replace"))
