"""The context of a join in which the daemon stands in for ranks without input."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from gradsync.torch import _C
    from gradsync.torch.distributed import DistributedDataParallel

__all__ = ["DaemonJoin"]


class DaemonJoin:
    """``DistributedDataParallel.join`` returns it. One that is left by an exception does not wait
    for anybody."""

    def __init__(self, wrapper: DistributedDataParallel, policy: _C.AsidePolicy) -> None:
        self._wrapper = wrapper
        self._policy = policy

    def __enter__(self) -> Self:
        self._wrapper._gradsync_joining = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wrapper._gradsync_joining = False
        if kind is None:
            self._wrapper._wait_for_longer_ranks(self._policy)
