"""Owners of libgradsync's handles. Each frees its handle when it goes, or at the interpreter's end:
the later made, the sooner. Functions raise :mod:`gradsync.errors`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char, c_int, cast, create_string_buffer, sizeof
from typing import Any

from . import _library
from ._library import LIBRARY, DType, Error, UnusedPolicy, check


class Session:
    """This process as one rank of a job: which one, the environment says."""

    def __init__(self) -> None:
        options = _library.SessionOptions(struct_size=sizeof(_library.SessionOptions))
        handle = POINTER(_library.SessionHandle)()
        error = Error()
        code = LIBRARY.gradsync_session_open(byref(options), byref(handle), byref(error))
        check(code, error)
        self.handle = handle
        weakref.finalize(self, LIBRARY.gradsync_session_close, handle)

    @property
    def rank(self) -> int:
        return int(LIBRARY.gradsync_session_rank(self.handle))

    @property
    def world_size(self) -> int:
        return int(LIBRARY.gradsync_session_world_size(self.handle))


class Group:
    """All ranks of the job, under a tag, with one stream of operations."""

    def __init__(self, session: Session, tag: str, timeout_ms: int) -> None:
        handle = POINTER(_library.GroupHandle)()
        error = Error()
        code = LIBRARY.gradsync_group_create(
            session.handle, tag.encode(), None, 0, timeout_ms, byref(handle), byref(error)
        )
        check(code, error)
        self.handle = handle
        self.session = session
        self._timeout_ms = timeout_ms
        weakref.finalize(self, _free, LIBRARY.gradsync_group_destroy, handle, session)

    def broadcast(self, memory: bytearray, root: int) -> None:
        """The root's bytes, on every rank."""
        data = (c_char * len(memory)).from_buffer(memory)
        error = Error()
        code = LIBRARY.gradsync_broadcast(
            *(self.handle, data, len(memory), DType.UINT8, root, self._timeout_ms, byref(error))
        )
        check(code, error)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, as many on each."""
        size, length = self.session.world_size, len(data)
        output = create_string_buffer(size * length)
        error = Error()
        code = LIBRARY.gradsync_all_gather(
            *(self.handle, data, output, length, DType.UINT8, self._timeout_ms, byref(error))
        )
        check(code, error)
        return [output.raw[rank * length : (rank + 1) * length] for rank in range(size)]

    def all_gather_texts(self, text: str) -> list[str]:
        """Every rank's text, of whatever length."""
        data = text.encode()
        lengths = [int.from_bytes(n) for n in self.all_gather(len(data).to_bytes(8))]
        everyones = self.all_gather(data.ljust(max(lengths)))
        return [one[:n].decode() for one, n in zip(everyones, lengths, strict=True)]


class Ddp:
    """The core of a DDP wrapper. The calls on one must not overlap."""

    def __init__(
        self,
        group: Group,
        parameters: Sequence[_library.Parameter],
        *,
        bucket_bytes: int,
        timeout_ms: int,
        policy: UnusedPolicy,
    ) -> None:
        options = _library.DdpOptions(
            struct_size=sizeof(_library.DdpOptions),
            bucket_bytes=bucket_bytes,
            timeout_ms=timeout_ms,
        )
        array = (_library.Parameter * len(parameters))(*parameters)
        handle = POINTER(_library.DdpHandle)()
        # One for all calls: it is large, and the calls are many.
        self._error = Error()
        self._error_at = byref(self._error)
        self._flag = c_int()
        self._flag_at = byref(self._flag)
        code = LIBRARY.gradsync_ddp_create(
            *(group.handle, array, len(array), byref(options), byref(handle), self._error_at)
        )
        check(code, self._error)
        self._handle = handle
        weakref.finalize(self, _free, LIBRARY.gradsync_ddp_destroy, handle, group)
        if policy != UnusedPolicy.ERROR:
            self._call(LIBRARY.gradsync_ddp_set_unused_policy, policy)

    def slot(self, parameter: int) -> _library.Slot:
        slot = _library.Slot()
        self._call(LIBRARY.gradsync_ddp_slot, parameter, byref(slot))
        return slot

    def buckets(self) -> list[_library.Bucket]:
        """Valid until a replan or a renewal."""
        buckets = []
        for index in range(LIBRARY.gradsync_ddp_bucket_count(self._handle)):
            bucket = _library.Bucket()
            self._call(LIBRARY.gradsync_ddp_bucket, index, byref(bucket))
            buckets.append(bucket)
        return buckets

    def begin(self) -> None:
        self._call(LIBRARY.gradsync_ddp_begin)

    def ready(self, parameter: int, used: bool) -> bool:
        """Whether it was the iteration's last."""
        function = LIBRARY.gradsync_ddp_ready if used else LIBRARY.gradsync_ddp_ready_unused
        self._call(function, parameter, self._flag_at)
        return self._flag.value != 0

    def used_by(self, parameter: int) -> int:
        return int(LIBRARY.gradsync_ddp_used_by(self._handle, parameter))

    def wait(self, bucket: int) -> None:
        self._call(LIBRARY.gradsync_ddp_wait, bucket)

    def end(self) -> None:
        self._call(LIBRARY.gradsync_ddp_end)

    def replan(self) -> bool:
        """Whether slots moved."""
        self._call(LIBRARY.gradsync_ddp_replan, self._flag_at)
        return self._flag.value != 0

    def renew(self) -> None:
        self._call(LIBRARY.gradsync_ddp_renew)

    def _call(self, function: Any, *arguments: Any) -> None:
        code = function(self._handle, *arguments, self._error_at)
        if code != 0:
            check(code, self._error)


def map_memory(address: int, size: int, buffer: Any) -> Any:
    """Shared memory of `size` bytes, more than none, as an object with Python's buffer protocol:
    the memory stays as long as anything uses the object."""
    LIBRARY.gradsync_buffer_retain(buffer)
    memory = (c_char * size).from_address(address)
    own = cast(buffer, POINTER(_library.BufferHandle))
    # Not at the interpreter's end: tensors may live even then.
    weakref.finalize(memory, LIBRARY.gradsync_buffer_release, own).atexit = False
    return memory


def _free(free: Any, handle: Any, _outlives: object) -> None:
    """As a finalizer it keeps alive what must be freed later."""
    free(handle)
