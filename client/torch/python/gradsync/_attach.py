"""Puts gradsync in the place of what torch has, in a process below ``gradsync-run``.

Two things are replaced, by :func:`attach`, as soon as torch has been imported:

- *The backend.* Wherever a process group would use gloo for the CPU, asked for by name, in
  ``"cpu:gloo,..."`` or by default, it uses gradsync. What it uses for other devices stays.
- *The wrapper.* ``DistributedDataParallel`` makes gradsync's for a module whose parameters are all
  on the CPU, and torch's for any other: see :func:`_takes`.

Both only if all ranks of the default process group are on one node, which they find out as they
make it; otherwise all of them leave everything as it is.

``gradsync.torch`` is imported when one of them is first used: many processes, such as launchers and
workers of data loaders, import torch and use neither.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDistributedDataParallel

# Whether this process's default process group, once it has one, is of ranks of one node that all
# can use gradsync.
_attached: bool | None = None


def attach() -> None:
    """When torch has been imported, and before anyone has used it. A second call does nothing."""
    if not dist.is_available():
        return
    c10d = dist.distributed_c10d
    if getattr(c10d._new_process_group_helper, "_gradsync_run", False):
        return
    # Every way to a process group ends in it, also those of modules that have their own reference
    # to init_process_group or new_group.
    c10d._new_process_group_helper = _in_place_of(c10d._new_process_group_helper)
    TorchDistributedDataParallel.__new__ = _new_wrapper  # type: ignore[assignment,method-assign]
    for module in (torch.nn.parallel, torch.nn.parallel.distributed):
        _replace_name(module)


# ---- The backend ---------------------------------------------------------------------------------


def _in_place_of(make_group: Any) -> Any:
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make_group_of_ours(*arguments: Any, **options: Any) -> Any:
        global _attached  # noqa: PLW0603 - of the process, as the default group is
        call = signature.bind(*arguments, **options)
        asked = str(call.arguments["backend"])
        if not call.arguments["global_ranks_in_group"]:
            _attached = _may_attach(asked) and _meet(
                call.arguments["store"],
                call.arguments["group_rank"],
                call.arguments["group_size"],
                call.arguments["timeout"],
            )
        if _attached:
            call.arguments["backend"] = dist.Backend(backend_for(asked))
        return make_group(*call.args, **call.kwargs)

    make_group_of_ours._gradsync_run = True  # type: ignore[attr-defined]
    return make_group_of_ours


def backend_for(asked: str) -> str:
    """The backend in the place of the one asked for, as ``init_process_group`` takes them."""
    name = asked.lower()
    other = _accelerator()
    if name == "undefined":  # torch would take gloo where there is nothing but the CPU
        return asked if other else "gradsync"
    if name == "gloo":
        if other in dist.Backend.backend_capability["gloo"]:
            return f"cpu:gradsync,{other}:gloo"
        return "gradsync"
    if ":" in name:
        return ",".join("cpu:gradsync" if p == "cpu:gloo" else p for p in name.split(","))
    return asked


def _may_attach(asked: str) -> bool:
    """Whether the ranks of a default group of this backend can meet, and whether there may be a use
    for it: over NCCL, new_group("gloo") is usual."""
    names = {part.rpartition(":")[2] for part in asked.lower().split(",")}
    return names <= {"gloo", "nccl", "gradsync", "undefined"}


def _meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> bool:
    """Whether all ranks can attach: the same answer on every one of them."""
    able = _can_import()
    apart = _launcher_tells_of_several_nodes()
    here = "nowhere" if apart or not able else _node()
    # A store may be used again, by the next default group of the same processes.
    meeting = (store.add("gradsync-run/arrivals", 1) - 1) // size
    keys = f"gradsync-run/{meeting}"
    store.add(f"{keys}/{here}", 1)
    if store.add(f"{keys}/told", 1) == size:
        together = here != "nowhere" and store.add(f"{keys}/{here}", 0) == size
        store.set(f"{keys}/together", str(together))
    store.wait([f"{keys}/together"], timeout)
    answer = store.get(f"{keys}/together") == b"True"
    if rank == 0 and able and not answer:
        _warn(
            "the trainer is left as it is: its ranks are not all on one node, or in one container, "
            "which gradsync does not support yet, or some cannot import gradsync.torch"
        )
    return answer


def _node() -> str:
    """A name for where this process would find its daemon: the same on two ranks if they meet."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    if os.environ.get("GRADSYNC_SOCKET") or Path("/run/gradsync/gradsyncd.sock").exists():
        return f"{machine}/{os.getuid()}"
    # A private daemon's socket lies in a folder that containers of a machine do not share.
    return f"{machine}/{os.getuid()}/{Path('/proc/self/ns/mnt').stat().st_ino}"


def _launcher_tells_of_several_nodes() -> bool:
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return local is not None and world is not None and local != world


@functools.cache
def _can_import() -> bool:
    try:
        import gradsync.torch  # noqa: F401, PLC0415 - not in every process
    except ImportError as error:
        _warn(f"the trainer is left as it is: gradsync.torch cannot be imported ({error})")
        return False
    return True


@functools.cache
def _accelerator() -> str | None:
    """The type of the devices that this process has besides the CPU."""
    # Not is_available(), which may make CUDA unusable in processes that are forked later.
    if torch.accelerator.device_count() == 0:
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


# ---- The wrapper ---------------------------------------------------------------------------------


def _takes(module: nn.Module) -> bool:
    """Whether the wrapper of ``module`` is gradsync's: the one place where that is decided."""
    if not _attached or not all(p.device.type == "cpu" for p in module.parameters()):
        return False
    # Asked of torch.compile by the script; ours has no such mode.
    return torch._dynamo.utils.get_optimize_ddp_mode() != "python_reducer"


def _new_wrapper(
    cls: type[TorchDistributedDataParallel],
    module: nn.Module | None = None,
    *arguments: object,
    **options: object,
) -> TorchDistributedDataParallel:
    """``__new__`` of torch's class, for whoever has that itself. Python then calls ``__init__`` of
    what this returns, so it need do no more."""
    if cls is TorchDistributedDataParallel and module is not None and _takes(module):
        from gradsync.torch import DistributedDataParallel  # noqa: PLC0415 - not in every process

        return object.__new__(_class_by_name() if _has_name() else DistributedDataParallel)
    return object.__new__(cls)


@functools.cache
def _class_by_name() -> type[TorchDistributedDataParallel]:
    """gradsync's class under torch's name: scripts compare types, derive from it, and pickle whole
    modules, which can then be loaded without gradsync."""

    from gradsync.torch import DistributedDataParallel as Ours  # noqa: PLC0415 - as above

    class DistributedDataParallel(Ours):
        __doc__ = Ours.__doc__
        __module__ = TorchDistributedDataParallel.__module__
        __qualname__ = "DistributedDataParallel"

        def __new__(  # type: ignore[misc]
            cls, module: nn.Module | None = None, *arguments: Any, **options: Any
        ) -> TorchDistributedDataParallel:
            if cls is DistributedDataParallel and module is not None and not _takes(module):
                return TorchDistributedDataParallel(module, *arguments, **options)
            return object.__new__(cls)

        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            """To scripts this is torch's class, so torch's own instances are of it."""
            if cls is DistributedDataParallel:
                # Not issubclass(), which asks the subclasses of torch's class: this one.
                return TorchDistributedDataParallel in other.__mro__
            return NotImplemented

    return DistributedDataParallel


def _has_name() -> bool:
    """Whether torch's name for the class stands for ours. Not where a module may be on a GPU: its
    wrapper has to be of torch's class in every respect, and modules on the CPU come to ours by
    :func:`_new_wrapper`. Nor where torch's will be needed."""
    if _accelerator() is not None:
        return False
    if _attached is None:
        return not _launcher_tells_of_several_nodes() and _can_import()
    return _attached


def _replace_name(module: ModuleType) -> None:
    """Lets the module's attribute be :func:`_class_by_name`, found out when it is asked for. The
    variable of the module, which is what torch's own code there uses, stays torch's class."""

    def get(self: ModuleType) -> type[TorchDistributedDataParallel]:
        # gradsync.torch itself derives from torch's class, and may be imported by the script.
        ours = sys.modules.get("gradsync.torch")
        if ours is not None and not hasattr(ours, "DistributedDataParallel"):
            return TorchDistributedDataParallel
        return _class_by_name() if _has_name() else TorchDistributedDataParallel

    def put(self: ModuleType, value: object) -> None:
        """Someone else replaces it, and has the last word."""
        self.__class__ = original
        self.DistributedDataParallel = value  # type: ignore[attr-defined]

    original = type(module)
    module.__class__ = type(
        original.__name__, (original,), {"DistributedDataParallel": property(get, put)}
    )


def _warn(text: str) -> None:
    print(f"gradsync-run: warning: {text}", file=sys.stderr, flush=True)
