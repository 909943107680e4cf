# ruff: noqa: N999
"""The extension: a c10d backend and a reducer in C++. Private to this package."""

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import Backend

def version() -> str: ...

class Session:
    def __init__(
        self,
        *,
        job: str,
        generation: int,
        world_size: int,
        rank: int,
        local_rank: int,
        local_world_size: int,
        timeout: timedelta,
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def job(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def socket(self) -> str: ...

class ProcessGroupGradsync(Backend):
    def __init__(
        self,
        *,
        session: Session,
        group_name: str,
        ranks: Sequence[int],
        rank: int,
        timeout: timedelta,
        owns_session: bool,
    ) -> None: ...
    @property
    def session(self) -> Session: ...

class Broadcaster:
    def __init__(
        self, session: Session, tag: str, ranks: Sequence[int], timeout: timedelta
    ) -> None: ...
    def broadcast(self, tensors: Sequence[Tensor], chunk_bytes: int, root: int) -> None: ...
    def all_gather(self, text: str | bytes) -> list[bytes]: ...

class Reducer:
    def __init__(
        self,
        *,
        session: Session,
        tag: str,
        ranks: Sequence[int],
        parameters: Sequence[Tensor],
        names: Sequence[str],
        bucket_bytes: int,
        first_bucket_bytes: int,
        timeout: timedelta,
        gradient_as_bucket_view: bool,
    ) -> None: ...
    def prepare_for_forward(self) -> None: ...
    def _rebuild_buckets(self) -> bool: ...
    def prepare_for_backward(self, outputs: list[Tensor]) -> None: ...
    def _check_reducer_finalized(self) -> None: ...
    def _remove_autograd_hooks(self) -> None: ...
    @property
    def bucket_bytes(self) -> list[int]: ...
    @property
    def iterations(self) -> int: ...
    @property
    def error(self) -> str: ...
