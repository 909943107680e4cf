"""What ``DistributedDataParallel`` does during backward: it takes each gradient as TensorPlay makes
it, hands buckets of them to the daemon, and puts the averages in the gradients' place.

What is peculiar to TensorPlay:

- A hook lasts only as long as somebody holds the parameter's accumulation node.
- It fires once in a backward, however often the parameter is used and checkpointed.
- Gradients are accumulated out of place, so one that is a view of a bucket must become so again in
  each backward.
- Gradients of several parameters, and the caller's own, may share their memory: an average must
  not be written to a gradient, only take its place.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import tensorplay as tp

from gradsync.errors import FailedPreconditionError, UnsupportedError

from ._graph import find_reached
from ._handles import Ddp, Group
from ._library import UnusedPolicy
from ._tensors import copy, describe, map_tensor, to_description


@dataclass
class Parameter:
    """One of the wrapped module's that gets a gradient."""

    name: str
    tensor: Any
    owner: Any  # the module that has it
    attribute: str  # and calls it so

    def __post_init__(self) -> None:
        self.dtype = self.tensor.dtype
        self.shape = tuple(self.tensor.shape)
        self.accumulator = self.tensor._accumulate_grad_node

    def is_converted(self) -> bool:
        """Or was replaced: then its gradient is no longer seen, or no longer fits."""
        now = self.owner._parameters.get(self.attribute)
        return (
            now is not self.tensor
            or now.dtype != self.dtype
            or now._accumulate_grad_node is not self.accumulator
        )


@dataclass
class Options:
    """Of a reducer."""

    gradient_as_bucket_view: bool = False
    find_unused: bool = False
    static_graph: bool = False
    bucket_bytes: int = 0  # 0: the library's
    timeout_ms: int = 0  # 0: the session's

    @property
    def policy(self) -> UnusedPolicy:
        if self.static_graph:
            return UnusedPolicy.STATIC
        return UnusedPolicy.FIND if self.find_unused else UnusedPolicy.ERROR


class _Phase(Enum):
    IDLE = auto()  # gradients are only accumulated
    DEFERRED = auto()  # a forward was not to be synchronised; the first gradient decides
    ARMED = auto()  # the coming backward is synchronised


class Reducer:
    """One for each wrapped module."""

    def __init__(self, group: Group, parameters: Sequence[Parameter], options: Options) -> None:
        self.synchronises = True  # whether gradients are to be averaged now
        self._parameters = parameters
        self._accumulators = {p.accumulator: index for index, p in enumerate(parameters)}
        self._options = options
        self._rank = group.session.rank
        self._world_size = group.session.world_size
        self._ddp = Ddp(
            group,
            [to_description(p.name, p.tensor) for p in parameters],
            bucket_bytes=options.bucket_bytes,
            timeout_ms=options.timeout_ms,
            policy=options.policy,
        )
        self._phase = _Phase.IDLE
        self._begun = False  # handing over in this iteration
        self._may_replan = True
        self._iterations = 0
        self._living = self._world_size
        # Those that no path leads to in the coming backward; of a static graph, for good.
        self._unused: set[int] = set()
        self._walked = False
        self._recorded = False  # a static graph
        self._used = [False] * len(parameters)  # by this rank, also while it only accumulated
        self._stored = [False] * len(parameters)
        self._saved: dict[int, Any] = {}
        self._read_plan()
        self._add_hooks()

    # ---- For the thread that runs forward -------------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Before a forward whose backward will be synchronised. Raises if the last one left
        gradients out."""
        for parameter in self._parameters:
            if parameter.is_converted():
                raise FailedPreconditionError(
                    f'parameter "{parameter.name}" was converted or replaced after '
                    "DistributedDataParallel had wrapped the module (by .double(), an assignment "
                    "or the like), so its gradient is no longer seen; convert the module first and "
                    "wrap it then"
                )
        # Already here, so that what the last backward left out is reported before the forward.
        self._begin()

    def replan(self) -> None:
        """Once, in the second synchronised forward, on every rank: orders the buckets as gradients
        were seen to become ready."""
        if not self._may_replan or self._iterations == 0:
            return
        self._may_replan = False
        if self._ddp.replan():
            self._read_plan()

    def prepare_for_backward(self, outputs: Sequence[Any], living: int) -> None:
        """After such a forward. The averages are over `living` ranks: the others only stand in."""
        self._begin()
        self._living = living
        self._find_unused(outputs)
        self._phase = _Phase.ARMED

    def defer(self, outputs: Sequence[Any]) -> None:
        """After a forward that is not to be synchronised, unless its backward will be."""
        if self._phase is _Phase.ARMED:
            return  # by a forward that has not had its backward
        self._find_unused(outputs, more=self._phase is _Phase.DEFERRED)
        self._phase = _Phase.DEFERRED

    def run_empty_iteration(self) -> None:
        """A whole iteration of a rank that has no gradients, beside one of the others."""
        self._begin()
        self._leave_slots()
        for index, view in enumerate(self._views):
            view.zero_()
            self._ddp.ready(index, used=not self._may_be_unused)
        for bucket in range(len(self._buckets)):
            self._ddp.wait(bucket)
        self._ddp.end()
        self._iterations += 1

    # ---- Set-up ---------------------------------------------------------------------------------

    def _read_plan(self) -> None:
        """Finds the slots where they are now. Gradients that lie in their old slots move along: the
        library has copied the contents."""
        old = getattr(self, "_views", None)
        self._slots = [self._ddp.slot(index) for index in range(len(self._parameters))]
        self._views = [
            map_tensor(slot.data, slot.buffer, parameter.shape, parameter.tensor)
            for slot, parameter in zip(self._slots, self._parameters, strict=True)
        ]
        self._buckets = [
            list(bucket.parameters[: bucket.parameter_count]) for bucket in self._ddp.buckets()
        ]
        if old is None or not self._options.gradient_as_bucket_view:
            return
        for index, view in enumerate(old):
            if _is_alias(self._parameters[index].tensor.grad, view):
                self._parameters[index].tensor.grad = self._views[index]

    def _add_hooks(self) -> None:
        # The parameters hold their hooks where no collector of garbage looks.
        weak = weakref.ref(self)
        handles = []
        for index, parameter in enumerate(self._parameters):
            hook = _weakly(weak, index)
            handles.append(parameter.tensor.register_post_accumulate_grad_hook(hook))
        weakref.finalize(self, _remove_all, handles).atexit = False

    @property
    def _may_be_unused(self) -> bool:
        return self._options.policy is not UnusedPolicy.ERROR

    def _begin(self) -> None:
        self._phase = _Phase.IDLE
        self._ddp.begin()
        self._begun = False
        self._stored = [False] * len(self._parameters)
        self._saved.clear()

    def _find_unused(self, outputs: Sequence[Any], more: bool = False) -> None:
        """`more`: outputs of another forward, for the same backward."""
        if self._options.static_graph:
            if not self._recorded:
                self._watch(outputs)
            return
        if not self._options.find_unused:
            return
        reached = find_reached(outputs, self._accumulators)
        found = set(range(len(self._parameters))) - reached
        self._unused = self._unused & found if more else found
        if not self._walked and not self._unused:
            warnings.warn(
                "find_unused_parameters=True was specified in DDP constructor, but did not find "
                "any unused parameters in the forward pass. This flag results in an extra "
                "traversal of the autograd graph every iteration,  which can adversely affect "
                "performance. If your model indeed never has any unused parameters in the forward "
                "pass, consider turning this flag off. Note that this warning may be a false "
                "positive if your model has flow control causing later iterations to have unused "
                "parameters.",
                stacklevel=4,
            )
        self._walked = True
        if len(self._unused) == len(self._parameters):
            # No parameter's hook will fire, but other ranks may wait for this one.
            self._watch(outputs)

    def _watch(self, outputs: Sequence[Any]) -> None:
        weak = weakref.ref(self)

        def begin(_gradient: Any) -> None:
            reducer = weak()
            if reducer is not None and reducer._is_armed():
                reducer._begin_backward()

        for output in outputs:
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(begin)

    # ---- During backward ------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """The gradient of the parameter is there."""
        if not self._recorded:
            self._used[index] = True
        if not self._is_armed():
            if self._options.gradient_as_bucket_view:
                self._store(index)
            return
        self._begin_backward()
        if not self._options.static_graph:
            self._hand_over(index)
        elif self._recorded:
            self._check_static(index)
            self._hand_over(index)

    def _is_armed(self) -> bool:
        if self._phase is _Phase.DEFERRED:
            self._phase = _Phase.IDLE
            if self.synchronises:
                self._begin()
                self._living = self._world_size
                self._phase = _Phase.ARMED
        return self._phase is _Phase.ARMED

    def _begin_backward(self) -> None:
        """With the first gradient: what needs none is handed over."""
        if self._begun:
            return
        self._begun = True
        if self._options.static_graph and not self._recorded:
            _at_end_of_backward(self._finish_first)
            return
        for index in sorted(self._unused):
            self._hand_over(index)

    def _check_static(self, index: int) -> None:
        if index in self._unused:
            raise FailedPreconditionError(
                "Your training graph has changed in this iteration, e.g., one parameter is unused "
                "in first iteration, but then got used in the second iteration. this is not "
                "compatible with static_graph set to True. The parameter is "
                f'"{self._parameters[index].name}", at index {index}, on rank {self._rank}.'
            )

    def _is_used_here(self, index: int) -> bool:
        return not self._may_be_unused or self._used[index]

    def _hand_over(self, index: int) -> None:
        """What the parameter contributes is complete."""
        used = self._is_used_here(index)
        # The second time the library says what is wrong; the slot may be under reduction by then.
        if not self._stored[index]:
            self._stored[index] = True
            if not used and _is_alias(self._parameters[index].tensor.grad, self._views[index]):
                self._saved[index] = self._views[index].clone()
            self._store(index)
        all_ready = self._ddp.ready(index, used)
        if all_ready and (self._recorded or not self._options.static_graph):
            _at_end_of_backward(self._finish)

    def _store(self, index: int) -> None:
        """Puts the gradient into its slot; zeros, if there is none."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.tensor.grad
        if gradient is None:
            view.zero_()
            return
        if _is_alias(gradient, view):
            return
        if gradient.is_sparse:
            raise UnsupportedError(
                f'parameter "{parameter.name}" has a sparse gradient, which gradsync.tensorplay '
                "does not average: make its Embedding without sparse=True"
            )
        if tuple(gradient.shape) != parameter.shape:
            raise FailedPreconditionError(
                f'the gradient of parameter "{parameter.name}" is {describe(gradient)}, but the '
                f"parameter was {describe(view)} when DistributedDataParallel wrapped it"
            )
        copy(view, gradient)
        if self._options.gradient_as_bucket_view and self._is_used_here(index):
            parameter.tensor.grad = view

    def _finish_first(self) -> None:
        """The first backward of a static graph is over: what is used is known."""
        self._unused = {index for index, used in enumerate(self._used) if not used}
        for index in range(len(self._parameters)):
            self._hand_over(index)
        self._recorded = True
        self._finish()

    def _finish(self) -> None:
        self._phase = _Phase.IDLE
        scale = self._world_size / self._living
        for bucket, members in enumerate(self._buckets):
            self._ddp.wait(bucket)
            for index in members:
                if scale != 1:
                    self._views[index].mul_(scale)
                if self._is_used_here(index):
                    self._restore(index)
        for index in range(len(self._parameters)):
            if not self._is_used_here(index):
                self._restore_unused(index)
        self._ddp.end()
        if not self._options.static_graph:
            self._used = [False] * len(self._parameters)
        self._iterations += 1

    def _restore(self, index: int) -> None:
        """Puts the average in the gradient's place."""
        view = self._views[index]
        if not self._options.gradient_as_bucket_view:
            self._parameters[index].tensor.grad = view.clone()
        elif not _is_alias(self._parameters[index].tensor.grad, view):
            self._parameters[index].tensor.grad = view

    def _restore_unused(self, index: int) -> None:
        """This rank has not used the parameter, but others may have."""
        if self._ddp.used_by(index) > 0:
            self._restore(index)
        elif index in self._saved:
            copy(self._views[index], self._saved[index])

    def _leave_slots(self) -> None:
        """Where gradients lie in slots, they stay there, and the slots go elsewhere."""
        if any(
            _is_alias(parameter.tensor.grad, view)
            for parameter, view in zip(self._parameters, self._views, strict=True)
        ):
            self._ddp.renew()
            self._views = []
            self._read_plan()


def _is_alias(gradient: Any, view: Any) -> bool:
    return (
        gradient is not None
        and gradient.data_ptr() == view.data_ptr()
        and gradient.shape == view.shape
        and gradient.dtype == view.dtype
        and gradient.is_contiguous()
    )


def _at_end_of_backward(call: Callable[[], None]) -> None:
    tp.autograd.Variable._execution_engine.queue_callback(call)


def _weakly(weak: weakref.ref[Reducer], index: int) -> Callable[[Any], None]:
    def hook(_parameter: Any) -> None:
        reducer = weak()
        if reducer is not None:
            reducer.on_gradient(index)

    return hook


def _remove_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
