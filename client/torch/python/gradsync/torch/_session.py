"""The sessions of this process: one for each default process group, shared by all over it."""

from __future__ import annotations

import atexit
import os
import uuid
import weakref
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync._daemon import prefer_own_daemon
from gradsync.torch import _C

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend
    from torch.distributed import ProcessGroup, Store


@dataclass
class Job:
    """This process as one rank of a job."""

    session: _C.Session
    _tags: Counter[str] = field(default_factory=Counter)

    def new_tag(self, kind: str, group: ProcessGroup) -> str:
        """A name for a new group of ``group``'s ranks: the same on each of them if all ask for
        their tags in the same order, as for every collective."""
        stem = f"{kind}:{group.group_name}"
        self._tags[stem] += 1
        return f"{stem}:{self._tags[stem] - 1}"


# Not by the backend alone: the default group may be another backend's. An entry goes with its
# group.
_jobs: weakref.WeakKeyDictionary[ProcessGroup, Job] = weakref.WeakKeyDictionary()


# Of a default group that is not known yet.
_unclaimed: list[Job] = []


def open_job(
    group: ProcessGroup | None, store: Store, rank: int, world_size: int, timeout: timedelta
) -> Job:
    """Opens the session of the default process group, whose ranks all do so now. Where that is
    being made by this package's backend, ``group`` may be unknown."""
    prefer_own_daemon()
    job = Job(
        _C.Session(
            job=_agree_on_name(store, world_size, timeout),
            generation=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            world_size=world_size,
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            timeout=timeout,
        )
    )
    if group is None:
        _unclaimed.append(job)
    else:
        _jobs[group] = job
    return job


def _claim_job(group: ProcessGroup) -> Job | None:
    """The job that was opened while ``group`` was being made, if that was not known then."""
    backend = _backend_of(group)
    for job in _unclaimed:
        if isinstance(backend, _C.ProcessGroupGradsync) and backend.session is job.session:
            _unclaimed.remove(job)
            _jobs[group] = job
            return job
    return None


def current_job() -> Job:
    """The job of the default process group. Where that is another backend's, the first call opens
    the session, and all ranks of the default group must make it."""
    group = dist.distributed_c10d._get_default_group()
    job = _jobs.get(group) or _claim_job(group)
    if job is None:
        store = dist.PrefixStore("gradsync", dist.distributed_c10d._get_default_store())
        job = open_job(group, store, dist.get_rank(), dist.get_world_size(), timeout_of(group))
    return job


def timeout_of(group: ProcessGroup) -> timedelta:
    """The timeout of a process group's operations."""
    try:
        backend: Any = _backend_of(group)
        return backend.options._timeout
    except (AttributeError, RuntimeError):  # a backend that does not tell
        return dist.distributed_c10d.default_pg_timeout


def backend_of(group: ProcessGroup) -> str:
    """The name of what carries out a process group's operations, those on the CPU if there are."""
    backend = _backend_of(group)
    return dist.get_backend(group) if backend is None else backend.name()


def _backend_of(group: ProcessGroup) -> Backend | None:
    for kind in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(kind))
        except RuntimeError:  # it has nothing for that
            continue
    return None


def _agree_on_name(store: Store, world_size: int, timeout: timedelta) -> str:
    """A name for the job, the same on every rank, and a new one each time that the ranks meet,
    though the store may be the same."""
    # Nobody comes for the second time before everybody has come for the first. The first to come
    # gives the name: where only some ranks of a foreign group open sessions, rank 0 may never do.
    meeting, place = divmod(store.add("arrivals", 1) - 1, world_size)
    key = f"job/{meeting}"
    if place == 0:
        run = os.environ.get("GRADSYNC_JOB") or os.environ.get("TORCHELASTIC_RUN_ID") or "job"
        store.set(key, f"{run[:96]}-{uuid.uuid4().hex[:12]}")
    store.wait([key], timeout)
    return store.get(key).decode()


@atexit.register
def _close_sessions() -> None:
    """Says goodbye, so that the daemon does not take an orderly end for a crash."""
    for job in [*_jobs.values(), *_unclaimed]:
        job.session.close()
