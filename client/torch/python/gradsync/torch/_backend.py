"""Registers ``"gradsync"`` as a backend of ``torch.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from gradsync.torch import _C
from gradsync.torch._session import current_job, open_job

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import _DistributedBackendOptions


def register_backend() -> None:
    """Makes ``init_process_group("gradsync")`` and ``new_group(backend="gradsync")`` work."""
    if "GRADSYNC" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "gradsync", _create_process_group, extended_api=True, devices=["cpu", "cuda"]
        )


def _create_process_group(
    options: _DistributedBackendOptions, _backend_options: object
) -> _C.ProcessGroupGradsync:
    is_default = not dist.is_initialized()
    if is_default:
        job = open_job(
            getattr(options, "process_group", None),  # older versions do not tell
            options.store,
            options.group_rank,
            options.group_size,
            options.timeout,
        )
        ranks = list(range(options.group_size))
    else:
        job = current_job()
        ranks = list(options.global_ranks_in_group)
    return _C.ProcessGroupGradsync(
        session=job.session,
        group_name=options.group_id,
        ranks=ranks,
        rank=options.group_rank,
        timeout=options.timeout,
        owns_session=is_default,
    )
