"""Run by Python at the start of every process below ``gradsync-run``, before the trainer's code.

Its folder, which holds nothing else, is the first one of ``PYTHONPATH``. A process that never
imports torch pays for this file alone, so it imports little that Python has not imported by then.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Watch:
    """A finder that finds torch as the others do, and acts when its import is complete."""

    _asks = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another one like it, of another installation, asks this one in turn.
        if name != "torch" or self._asks:
            return None
        self._asks = True
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = (
                    find(name, path, target) if finder is not self and find else None
                )
                if spec is not None:
                    _call_after_import(spec)
                    return spec
        finally:
            self._asks = False
        return None


def _call_after_import(spec: ModuleSpec) -> None:
    # On the loader itself, not around it: others look at its type.
    loader = spec.loader
    if loader is None:  # a folder without __init__.py, which is not torch
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _attach()

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _attach() -> None:
    try:
        from gradsync._attach import attach  # noqa: PLC0415 - not before torch

        attach()
    except Exception as error:
        print(
            f"gradsync-run: warning: programs of {sys.executable} are left as they are: {error}; "
            "gradsync has to be installed where torch is",
            file=sys.stderr,
            flush=True,
        )


def _run_shadowed() -> None:
    """Runs the ``sitecustomize`` that Python would have run in the place of this one."""
    here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is slow to import
    if here not in sys.path:
        return
    # Only behind this one: before it there may be another one like it, which has called it.
    spec = PathFinder.find_spec(__name__, sys.path[sys.path.index(here) + 1 :])
    if spec is None or spec.loader is None:
        return
    module = type(sys)(__name__)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Watch())
_run_shadowed()
