"""``DistributedDataParallel`` whose gradients are averaged by the node's gradsync daemon."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import tensorplay as tp
from tensorplay import nn

from gradsync._daemon import prefer_own_daemon
from gradsync.errors import MismatchError, UnsupportedError

from ._broadcaster import broadcast
from ._handles import Group, Session
from ._join import UnevenInputs
from ._reducer import Options, Parameter, Reducer
from ._tensors import describe, tensors_in

__all__ = ["DistributedDataParallel"]

_MIB = 1024 * 1024


class DistributedDataParallel(nn.Module):
    """Data-parallel training of a TensorPlay module by one process for each rank.

    Construction, ``forward`` and ``backward`` are points where all ranks meet. Parameters must not
    be added, removed or converted afterwards. The wrapped module is ``module``, and the keys of
    ``state_dict`` begin with ``module.``.

    What happens when:

    - *Construction.* The first one in a process opens its session: which rank it is, ``RANK`` and
      ``WORLD_SIZE`` say. Every rank's parameters and buffers are compared by name, type and sizes.
      A difference raises :class:`gradsync.MismatchError` on every rank, which names the first one
      that differs, both values and both ranks. Then rank 0's parameters and buffers are broadcast.
      Names in the module's ``_ddp_params_and_buffers_to_ignore`` are left out of everything.
    - *Forward.* Rank 0's buffers are broadcast again. In the second synchronised forward the
      buckets are ordered anew, as gradients were seen to become ready.
    - *Backward.* Each gradient is copied into its bucket when TensorPlay has made it; a full bucket
      is handed to the daemon while backward goes on. At the end of backward every ``.grad`` is the
      average over all ranks, a tensor of its own. Under :meth:`no_sync` gradients accumulate
      instead.

    float32 is averaged as such; float16 and bfloat16 are summed and divided in float32 and rounded
    once. All ranks get bitwise the same.

    Args:
        module: on the CPU. At least one of its parameters requires a gradient.
        broadcast_buffers: whether rank 0's buffers are broadcast, at construction and in each
            forward (``True``).
        init_sync: whether rank 0's parameters and buffers are broadcast at construction (``True``).
        bucket_cap_mb: a bucket is closed by the parameter that reaches this size. By default
            25 MiB, and 1 MiB for the first bucket.
        find_unused_parameters: looks, after each forward, for the parameters that no path leads to
            from the outputs, whatever they are nested in. Those contribute zeros. What no rank has
            used keeps its ``.grad``; what any rank has used gets the average on every rank.
        gradient_as_bucket_view: lets ``.grad`` be the bucket's own memory. That saves the copy out
            of the bucket, and a copy of all gradients in memory.
        static_graph: the set of parameters that are used stays the same. Found out in the first
            synchronised backward, which is averaged only at its end. A graph that changes all the
            same raises.
        timeout: for every wait; by default ten minutes.

    Errors are those of :mod:`gradsync.errors`, with PyTorch's wording where PyTorch has one. After
    one in a backward the wrapped module cannot be used any more. An instance belongs to one thread,
    and cannot be copied or pickled.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._require_buffer_sync = True
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._uneven: UnevenInputs | None = None
        self._buffer_places = self._find_buffers()
        self._check_module()
        # Zero asks for the default, whereas a cap of zero means one parameter for each bucket.
        cap = 0 if bucket_cap_mb is None else max(1, int(bucket_cap_mb * _MIB))
        options = Options(
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused=find_unused_parameters and not static_graph,
            static_graph=static_graph,
            bucket_bytes=cap,
            timeout_ms=0 if timeout is None else max(1, int(timeout.total_seconds() * 1000)),
        )
        self._connect(options)
        if init_sync:
            self._broadcast_module(root=0)

    # ---- Set-up ---------------------------------------------------------------------------------

    def _check_module(self) -> None:
        if not any(p.requires_grad for _, p in self._named_parameters()):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameters "
                "that require a gradient."
            )
        for name, tensor in [*self._named_parameters(), *self._named_buffers()]:
            if not tensor.is_cpu:
                raise UnsupportedError(
                    f'"{name}" is on {tensor.device}: gradsync.tensorplay works on the CPU only'
                )

    def _connect(self, options: Options) -> None:
        """Meets the other ranks: forms the groups and agrees on the model."""
        session = _current_session()
        # Apart from the reducer's group, whose operations are numbered by bucket.
        self._group = Group(session, _new_tag("sync"), options.timeout_ms)
        self._agree_on_layout(options)
        self._reducer = Reducer(
            Group(session, _new_tag("ddp"), options.timeout_ms),
            self._parameters_with_gradients(),
            options,
        )

    def _parameters_with_gradients(self) -> list[Parameter]:
        modules = dict(self.module.named_modules())
        found = []
        for name, tensor in self._named_parameters():
            if tensor.requires_grad:
                owner, _, attribute = name.rpartition(".")
                found.append(Parameter(name, tensor, modules[owner], attribute))
        return found

    def _named_parameters(self) -> list[tuple[str, Any]]:
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if name not in self._ignored
        ]

    def _named_buffers(self) -> list[tuple[str, Any]]:
        return [(name, owner._buffers[attribute]) for name, owner, attribute in self._buffer_places]

    def _find_buffers(self) -> list[tuple[str, Any, str]]:
        """Not the buffers themselves: a module may put another tensor in a buffer's place."""
        if not self.broadcast_buffers:
            return []
        modules = dict(self.module.named_modules())
        names = [name for name, _ in self.module.named_buffers() if name not in self._ignored]
        places = [name.rpartition(".") for name in names]
        return [
            (name, modules[owner], attribute)
            for name, (owner, _, attribute) in zip(names, places, strict=True)
        ]

    def _agree_on_layout(self, options: Options) -> None:
        """The library compares what is averaged; here the rest, too, and the settings."""
        layout = list(self._layout(options))
        digest = hashlib.sha256("\n".join(layout).encode()).digest()
        if len(set(self._group.all_gather(digest))) == 1:
            return
        everyones = [t.split("\n") for t in self._group.all_gather_texts("\n".join(layout))]
        first = everyones[0]
        for rank, theirs in enumerate(everyones):
            for index in range(max(len(first), len(theirs))):
                ours = first[index] if index < len(first) else "nothing more"
                other = theirs[index] if index < len(theirs) else "nothing more"
                if ours != other:
                    raise MismatchError(
                        f"DDP expects same model across all ranks, but rank 0 has {ours} where "
                        f"rank {rank} has {other}; construct the same module on every rank"
                    )

    def _layout(self, options: Options) -> Iterator[str]:
        yield f"find_unused_parameters={options.find_unused}"
        yield f"static_graph={options.static_graph}"
        for name, parameter in self._named_parameters():
            kind = "parameter" if parameter.requires_grad else "frozen parameter"
            yield f'{kind} "{name}" ({describe(parameter)})'
        for name, buffer in self._named_buffers():
            yield f'buffer "{name}" ({describe(buffer)})'

    def _broadcast_module(self, root: int) -> None:
        states = [*self._named_parameters(), *self._named_buffers()]
        broadcast(self._group, [tensor for _, tensor in states], root)

    # ---- Training -------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        synchronises = bool(tp.is_grad_enabled()) and self._reducer.synchronises
        syncs_buffers = self._require_buffer_sync and bool(self._buffer_places)
        if synchronises:
            self._reducer.prepare_for_forward()
        root, divisor = 0, self._group.session.world_size
        if self._uneven is not None:
            living = self._uneven.go_on(synchronises, syncs_buffers)
            root = max(living)
            if not self._uneven.divide_by_initial_world_size:
                divisor = len(living)
        if synchronises:
            self._reducer.replan()
        if syncs_buffers:
            self._broadcast_buffers(root)
        output = self.module(*inputs, **kwargs)
        if synchronises:
            self._reducer.prepare_for_backward(list(tensors_in(output)), divisor)
        elif tp.is_grad_enabled() and self._uneven is None:
            self._reducer.defer(list(tensors_in(output)))
        # As in PyTorch: buffers that took part in no training need not agree.
        self._require_buffer_sync = synchronises
        return output

    def _broadcast_buffers(self, root: int) -> None:
        broadcast(self._group, [buffer for _, buffer in self._named_buffers()], root)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in it only accumulate gradients, each rank its own. The next one outside
        averages the sums, even if its forward was inside; within :meth:`join`, the forward
        decides."""
        before = self._reducer.synchronises
        self._reducer.synchronises = False
        try:
            yield
        finally:
            self._reducer.synchronises = before

    # ---- Join -----------------------------------------------------------------------------------

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """For ranks with different numbers of inputs: a rank that is through with its own takes
        part in the others' iterations, with zeros, until all are through. Then the model of the
        last rank, the highest if there are several, goes to all. Every rank must enter it. It costs
        a small collective in each forward.

        Args:
            divide_by_initial_world_size: whether averages are over all ranks (``True``), as if
                those without input had it without effect, or over those that have input.
            enable: ``False``, if it is known that inputs are even.
            throw_on_early_termination: instead of going on, every rank raises ``RuntimeError`` when
                the first is through.
        """
        if not enable:
            yield
            return
        self._uneven = UnevenInputs(
            self._group, divide_by_initial_world_size, throw_on_early_termination
        )
        try:
            yield
            self._stand_in(self._uneven)
        finally:
            self._uneven = None

    def _stand_in(self, uneven: UnevenInputs) -> None:
        while others := uneven.wait_for_others():
            if others.synchronise:
                self._reducer.replan()
            if others.sync_buffers:
                self._broadcast_buffers(max(others.living))
            if others.synchronise:
                self._reducer.run_empty_iteration()
            self._require_buffer_sync = others.synchronise
        self._broadcast_module(max(uneven.last_living))


_sessions: list[Session] = []
_tags: Counter[str] = Counter()


def _current_session() -> Session:
    """That of this process, which all wrapped modules share."""
    if not _sessions:
        prefer_own_daemon()
        _sessions.append(Session())
    return _sessions[0]


def _new_tag(kind: str) -> str:
    """A name for a new group: the same on every rank, as all construct in the same order."""
    _tags[kind] += 1
    return f"tensorplay-{kind}:{_tags[kind] - 1}"
