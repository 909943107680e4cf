"""``DistributedDataParallel`` whose gradients are averaged by the node's gradsync daemon."""

from __future__ import annotations

import hashlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from gradsync.errors import DeadlineExceededError, MismatchError
from gradsync.torch import _C, _mixed_precision
from gradsync.torch._join import DaemonJoin
from gradsync.torch._logger import Logger
from gradsync.torch._optimizer_in_backward import step_hook
from gradsync.torch._session import backend_of, current_job, timeout_of
from gradsync.torch._versions import known_to_torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel.distributed import _MixedPrecision

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchDistributedDataParallel):
    """Data-parallel training as by ``torch.nn.parallel.DistributedDataParallel``, but with
    gradients averaged by the node's daemon through shared memory.

    It is a subclass of torch's class, takes its arguments, and keeps its contract: construction,
    ``forward`` and ``backward`` are points where all ranks meet; the parameters must not be added,
    removed or converted afterwards; the wrapped module is ``module``, and the keys of
    ``state_dict`` begin with ``module.``. It works over a process group of any backend.

    What happens when:

    - *Construction.* Every rank's parameters and buffers are compared by name, type, sizes and
      strides. A difference raises :class:`gradsync.MismatchError` on every rank, which names the
      first one that differs, both values and both ranks. Then rank 0's parameters and buffers are
      broadcast, in chunks of at most 250 MiB. Names in the module's
      ``_ddp_params_and_buffers_to_ignore`` are left out of everything.
    - *Forward.* Rank 0's buffers are broadcast again. In the second synchronised forward the
      buckets are ordered anew, as gradients were seen to become ready.
    - *Backward.* Each gradient is copied into its bucket when autograd has made it, in C++, without
      the interpreter; a full bucket is handed to the daemon while backward goes on. At the end of
      backward every ``.grad`` holds the average over all ranks. Under ``no_sync()`` gradients
      accumulate instead.

    float32 is averaged as such; float16 and bfloat16 are summed and divided in float32 and rounded
    once. All ranks get bitwise the same.

    Args:
        module: on the CPU or on one GPU. At least one of its parameters requires a gradient.
        device_ids, output_device: as torch's, of a module on a GPU: where the inputs are moved to.
        broadcast_buffers: deprecated by torch; ``False`` leaves buffers alone at construction too.
        forward_sync_buffers: whether buffers are broadcast in each forward (``True``).
        init_sync: whether rank 0's parameters and buffers are broadcast at construction (``True``).
        process_group: the ranks that average with each other; by default all.
        device_mesh: instead of ``process_group``; of one dimension.
        bucket_cap_mb: a bucket is closed by the parameter that reaches this size. By default
            25 MiB, and 1 MiB for the first bucket.
        gradient_as_bucket_view: lets ``.grad`` be the bucket's own memory from the first backward
            on. That saves a copy of all gradients in memory; in time it saves the copy out of the
            bucket, and with ``zero_grad(set_to_none=False)`` the one into it too.
        bucket_cap_mb_list: instead of ``bucket_cap_mb``, the sizes of the first bucket, the second
            and so on; the last one holds for all that follow.
        find_unused_parameters: looks, after each forward, for the parameters that no path leads to
            from the outputs, whatever they are nested in. Those contribute zeros. What no rank has
            used keeps its ``.grad``; what any rank has used gets the average on every rank. Buckets
            are filled in the order of registration and stay as they are.
        skip_all_reduce_unused_params: with it, buckets of nothing but unused parameters are not
            averaged; every rank must leave the same ones unused.
        static_graph: the set of parameters that are used, and how often each is, stays the same.
            Found out in the first synchronised backward, which is averaged only at its end. Any
            way of checkpointing works with it. A graph that changes all the same raises.
        delay_all_reduce_named_params, param_to_hook_all_reduce: the named parameters are averaged
            together, apart from the buckets, when the other one's gradient is made.
        mixed_precision: as torch's.
        batched_grad_copy, lazy_bucket_allocation: without effect. Copies are always batched by
            bucket, and the memory of buckets is shared with the daemon for good.

    Communication hooks are torch's own: buckets are given to the hook instead of to the daemon, and
    it is the hook that divides. Sparse gradients, of an ``Embedding`` made with ``sparse=True``,
    are averaged row by row. With ``create_graph=True`` values are
    averaged, but what is differentiated a second time is this rank's own, as with torch.

    On a GPU nothing waits but streams: hooks enqueue copies on the stream that autograd runs them
    on, and the stream that ``backward`` is called on waits for the averages. Only with
    ``find_unused_parameters`` does ``backward`` wait itself, to know what was used anywhere. A
    gradient that another stream still reads must be kept until it has: ``record_stream`` does not
    keep the memory, which is the bucket's. Every rank of the group must be on a GPU.

    Not implemented, so they raise ``NotImplementedError``: modules on several devices.

    Raises, from construction, forward and backward, the classes of :mod:`gradsync.errors`. A
    parameter that got no gradient makes the next forward raise "Expected to have finished reduction
    in the prior iteration before starting a new one.", with the parameter's name. After an error in
    backward the wrapped module cannot be used any more.
    """

    # In the place of torch's own.
    reducer: _Reducer | _Unconnected  # type: ignore[assignment]
    logger: Logger  # type: ignore[assignment]

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        _check_devices(module)
        arguments = {
            "device_ids": device_ids,
            "output_device": output_device,
            "dim": dim,
            "broadcast_buffers": broadcast_buffers,
            "init_sync": False,  # torch's way of it; ours is in _connect
            "process_group": process_group,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "check_reduction": check_reduction,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "device_mesh": device_mesh,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "bucket_cap_mb_list": bucket_cap_mb_list,
            "batched_grad_copy": batched_grad_copy,
            "forward_sync_buffers": forward_sync_buffers,
            "lazy_bucket_allocation": lazy_bucket_allocation,
        }
        super().__init__(module, **known_to_torch(arguments))
        if self._use_python_reducer:
            _not_implemented('torch._dynamo.config.optimize_ddp = "python_reducer"')
        if self._delay_all_reduce_all_params:
            return  # there is nothing for a reducer to do
        if mixed_precision is not None:
            _mixed_precision.set_up(self, mixed_precision)
        self._connect()
        if init_sync:
            with_buffers = self.broadcast_buffers or forward_sync_buffers is not None
            self._broadcast_module(with_buffers)

    # ---- Set-up ---------------------------------------------------------------------------------

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        # torch's does not recognise the ignored names of the root module's own parameters.
        kept = {id(parameter) for parameter in self._module_parameters}
        chosen = [
            (parameter, is_sparse)
            for parameter, is_sparse in zip(parameters, sparse, strict=True)
            if id(parameter) in kept
        ]
        return [parameter for parameter, _ in chosen], [is_sparse for _, is_sparse in chosen]

    def _build_debug_param_to_name_mapping(self, parameters: list[nn.Parameter]) -> dict[int, str]:
        """As torch's, whose names begin with a dot for the root module's own parameters."""
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, parameter in self.module.named_parameters():
            if name in self.parameters_to_ignore or not parameter.requires_grad:
                continue
            if id(parameter) not in indices:
                self._log_and_throw(
                    ValueError,
                    f"Param with name {name} found in module parameters, but not DDP parameters.",
                )
            names[indices[id(parameter)]] = name
        if len(names) != len(indices):
            self._log_and_throw(
                ValueError,
                "Expected param to name mapping to cover all parameters, but got conflicting "
                f"lengths: {len(indices)} vs {len(names)}.",
            )
        return names

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Called by torch's constructor and when a wrapped module is copied or unpickled, which one
        rank may do alone: so nothing that needs the other ranks happens here."""
        names = [param_to_name_mapping[index] for index in range(len(parameters))]
        for index, parameter in enumerate(parameters):
            parameter._idx = index  # type: ignore[attr-defined]  # for mixed precision
        self.reducer = _Unconnected()
        self.logger = Logger()
        self._gradsync_parameters = parameters
        self._gradsync_names = names
        self._gradsync_sparse = expect_sparse_gradient
        self._gradsync_has_hook = False
        self._gradsync_joining = False
        self._passing_sync_batchnorm_handle(self.module)

    def _connect(self) -> None:
        """Meets the other ranks: forms the groups and agrees on the model."""
        job = current_job()
        group = self.process_group
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout_of(group)
        reducer = _Reducer(
            self,
            session=job.session,
            tag=job.new_tag("ddp", group),
            ranks=ranks,
            parameters=self._gradsync_parameters,
            names=self._gradsync_names,
            # Zero asks for the default, whereas a cap of zero means one parameter for each bucket.
            bucket_bytes=max(1, self.bucket_bytes_cap),
            first_bucket_bytes=max(
                1,
                dist._DEFAULT_FIRST_BUCKET_BYTES
                if self.bucket_bytes_cap_default
                else self.bucket_bytes_cap,
            ),
            bucket_bytes_list=[max(1, cap) for cap in self.bucket_bytes_cap_list],
            timeout=timeout,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            skip_unused=self.skip_all_reduce_unused_params,
            sparse=self._gradsync_sparse,
            gradient_type=self.mixed_precision and self.mixed_precision.param_dtype,
            backend=backend_of(group),
        )
        # Apart from the reducer's group, whose operations are numbered by bucket.
        self._gradsync_broadcaster = _C.Broadcaster(
            job.session, job.new_tag("ddp-sync", group), ranks, timeout, backend_of(group)
        )
        self._gradsync_job = job
        self._agree_on_layout(ranks)
        settings = self.reducer.settings
        for setting in settings:
            setting(reducer)
        reducer.settings = settings
        self.reducer = reducer

    def _agree_on_layout(self, ranks: list[int]) -> None:
        """Compares what the reducer's agreement does not cover, and what would otherwise be
        averaged or broadcast into the wrong place: strides, parameters without a gradient,
        buffers."""
        layout = list(self._layout())
        digest = hashlib.sha256("\n".join(layout).encode()).digest()
        if len(set(self._gradsync_broadcaster.all_gather(digest))) == 1:
            return
        everyones = [
            text.decode().split("\n")
            for text in self._gradsync_broadcaster.all_gather("\n".join(layout))
        ]
        first = everyones[0]
        for rank, theirs in zip(ranks, everyones, strict=True):
            for index in range(max(len(first), len(theirs))):
                ours = first[index] if index < len(first) else "nothing more"
                other = theirs[index] if index < len(theirs) else "nothing more"
                if ours != other:
                    raise MismatchError(
                        "DDP expects same model across all ranks, but rank "
                        f"{ranks[0]} has {ours} where rank {rank} has {other}; construct the same "
                        "module on every rank"
                    )

    def _layout(self) -> Iterator[str]:
        yield f"find_unused_parameters={self.find_unused_parameters}"
        yield f"skip_all_reduce_unused_params={self.skip_all_reduce_unused_params}"
        yield f"static_graph={self.static_graph}"
        for name, parameter in self.module.named_parameters():
            if name not in self.parameters_to_ignore:
                kind = "parameter" if parameter.requires_grad else "frozen parameter"
                yield f'{kind} "{name}" ({_describe(parameter)}, strides {parameter.stride()})'
        if self.broadcast_buffers:
            for name, buffer in self.named_module_buffers.items():
                yield f'buffer "{name}" ({_describe(buffer)})'

    def _broadcast_module(self, with_buffers: bool, root: int = 0) -> None:
        states = [
            parameter.detach()
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        if with_buffers:
            states += [buffer.detach() for buffer in self.named_module_buffers.values()]
        self._gradsync_broadcaster.broadcast(states, self.broadcast_bucket_size, root)

    def __getstate__(self) -> dict[str, Any]:
        attributes = super().__getstate__()
        for own in ("_gradsync_job", "_gradsync_broadcaster"):
            attributes.pop(own, None)
        return attributes

    # ---- Training -------------------------------------------------------------------------------

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._delay_all_reduce_all_params:
            return super()._pre_forward(*inputs, **kwargs)
        if isinstance(self.reducer, _Unconnected):  # a copy, or unpickled
            self._connect()
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.logger.sample(self._connected())
        return super()._pre_forward(*inputs, **kwargs)

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.static_graph and synced and not self._connected().recorded_static_graph:
            self._connected().outputs = list(_find_tensors(output))
        return super()._post_forward(output)

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        # In a join rank 0 may have run out of input. As with torch, the last that has not leads.
        root = None if self._gradsync_joining else authoritative_rank
        self._gradsync_broadcaster.broadcast(tensors, buffer_size, root)

    def _connected(self) -> _Reducer:
        assert isinstance(self.reducer, _Reducer)
        return self.reducer

    # While this is false, torch passes the outputs of a static graph through a function that asks
    # for the end of backward, if it knows what they are nested in. The reducer watches them itself.
    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        return True

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, enqueued: bool) -> None:
        pass

    def _delayed_all_reduce_hook(self, gradient: Tensor) -> Tensor:
        """torch's does not wait for the end, which is good only on a GPU's stream."""
        buffer = self._delay_grad_buffer
        assert buffer is not None
        buffer.div_(dist.get_world_size(self.process_group))
        dist.all_reduce(buffer, group=self.process_group)
        return gradient

    # ---- Communication hooks --------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self._check_comm_hook(hook)
        self._take_hook("register_comm_hook or register_builtin_comm_hook")
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self.logger._set_comm_hook_name(name)
        self._comm_hooks.append((hook, state))
        self._set(lambda reducer: reducer._register_comm_hook(state, _checked(hook)))

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self._take_hook("register_builtin_comm_hook or register_comm_hook")
        self.logger._set_comm_hook_name(str(comm_hook_type))
        # The other one is the average, which the daemon makes without any hook.
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS:
            group = self.process_group
            self._set(lambda reducer: reducer._register_half_precision_hook(group))

    def _setup_in_backward_optimizers(self) -> None:
        """As torch's, which needs a GPU's streams."""
        if not any(hasattr(p, "_in_backward_optimizers") for p in self._module_parameters):
            return
        from torch.distributed.optim import apply_optimizer_in_backward  # noqa: PLC0415 - rare, slow

        handles = apply_optimizer_in_backward.param_to_optim_hook_handle_map
        for parameter in self._module_parameters:
            for handle in handles.get(parameter, []):
                handle.remove()
        self.register_comm_hook(None, step_hook(self))
        self.reducer._set_optimizer_in_backward()

    def _take_hook(self, names: str) -> None:
        if self._gradsync_has_hook:
            self._log_and_throw(RuntimeError, f"{names} can only be called once.")
        self._gradsync_has_hook = True

    def _check_comm_hook(self, hook: object) -> None:
        """As torch's, but bfloat16 needs no GPU here."""
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
            return
        signature = inspect.signature(hook)
        bucket = signature.parameters["bucket"].annotation
        # An annotation that is a text, as after `from __future__ import annotations`, may mean
        # anything.
        if bucket not in (inspect.Parameter.empty, dist.GradBucket) and not isinstance(bucket, str):
            self._log_and_throw(
                ValueError, "Communication hook: bucket annotation should be dist.GradBucket."
            )
        returned = signature.return_annotation
        future = torch.futures.Future[Tensor]
        if returned not in (inspect.Signature.empty, future) and not isinstance(returned, str):
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be "
                "torch.futures.Future[torch.Tensor].",
            )

    def _set(self, setting: Callable[[_C.Reducer], None]) -> None:
        """Applies a setting now and to every reducer that takes this one's place."""
        self.reducer.set(setting)

    # ---- Join -----------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """For ranks with different numbers of inputs: a rank that leaves the context has run out,
        says so to the daemon, and waits for the others, whose gradients are averaged without it
        and without any message between the ranks beyond the gradients. At the end every rank gets
        the parameters, and the buffers if they are broadcast, of the one that went on longest (of
        several, the last).

        As with torch, buffers are those of the last rank that still has input. A rank waits as long
        as the others get on; if nothing comes from them for the process group's timeout, all raise.

        With a communication hook, sparse gradients, ``static_graph``, delayed or in-backward
        averaging, with ``throw_on_early_termination`` if no buffers are broadcast, and in torch's
        own ``Join([...])`` of several joinables, torch's way is taken, with two small collectives
        in every forward.

        Args:
            divide_by_initial_world_size: averages are divided by the number of all ranks, else by
                that of the ranks that still have input.
            enable: ``False``: the context does nothing.
            throw_on_early_termination: when a rank runs out and another does not, all raise
                "Detected at least one rank that exhausted inputs. Throwing across all ranks.";
                after it the wrapped module cannot be used any more.
        """
        if not enable or not self._daemon_can_stand_in(throw_on_early_termination):
            context: AbstractContextManager[Any] = super().join(
                divide_by_initial_world_size, enable, throw_on_early_termination
            )
            return context
        if isinstance(self.reducer, _Unconnected):
            self._connect()
        self.logger._set_uneven_input_join()
        if throw_on_early_termination:
            policy = _C.AsidePolicy.FORBID
        elif divide_by_initial_world_size:
            policy = _C.AsidePolicy.AVERAGE_OVER_ALL
        else:
            policy = _C.AsidePolicy.AVERAGE_OVER_PRESENT
        return DaemonJoin(self, policy)

    def _broadcasts_buffers(self) -> bool:
        """In every forward, on every rank alike."""
        return bool(self.broadcast_buffers and self.modules_buffers)

    def _daemon_can_stand_in(self, throws: bool) -> bool:
        """Whether what the ranks do together in an iteration is known to the daemon."""
        # A module that has collectives of its own in forward is to throw before it: torch asks
        # there. With buffers to broadcast the daemon does.
        if throws and not self._broadcasts_buffers():
            return False
        return not (
            self._gradsync_has_hook
            or any(self._gradsync_sparse)
            or self.static_graph
            or self._delay_all_reduce_params
            or hasattr(self, "buffer_hook")
        )

    def _wait_for_longer_ranks(self, policy: _C.AsidePolicy) -> None:
        reducer = self._connected()
        broadcaster = self._gradsync_broadcaster
        meeting: list[_C.Broadcaster | _C.Reducer] = [reducer]
        if self._broadcasts_buffers():
            # Who goes on without this rank finds out by the buffers, which come first in an
            # iteration; whatever else goes wrong with a rank ends the reducer's group.
            place = 0 if policy is _C.AsidePolicy.FORBID else 1
            meeting.insert(place, broadcaster)
        for group in meeting:
            group.stand_aside(policy)
        last = 0
        try:
            for group in meeting:
                longest = group.rejoin()
                last = longest if group is reducer else last
        except RuntimeError as error:
            if policy is _C.AsidePolicy.FORBID and "exhausted inputs" in str(error):
                rank = dist.get_rank(self.process_group)
                raise RuntimeError(f"Rank {rank} exhausted all inputs.") from error
            raise
        self._authoritative_rank = last
        self._broadcast_module(with_buffers=bool(self.broadcast_buffers), root=last)

    def join_hook(self, **kwargs: Any) -> Any:
        if isinstance(self.reducer, _Unconnected):
            self._connect()
        return super().join_hook(**kwargs)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self._connected().run_empty_iteration()

    def _match_unused_params_allreduce(self) -> None:
        """Nothing: it is a part of the iteration."""

    # ---- The rest of torch's class --------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What is known of this module: its settings, the buckets, the last iteration that was
        sampled, and the last error."""
        return self.logger.data(self, self._gradsync_parameters)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                "DDP runtime logging sample rate should be equal or greater than 1",
            )
        self.logger.sample_rate = sample_rate

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        """Nothing: the rows of a sparse gradient are sent along with it."""

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        """From now on these ranks average with each other, all of which must call this. On the
        others nothing changes."""
        self._has_rebuilt_buckets = False
        if dist.get_rank(new_process_group) < 0:
            return
        self.process_group = new_process_group
        settings = self.reducer.settings
        if isinstance(self.reducer, _Reducer):
            self.reducer._remove_autograd_hooks()
        self.reducer = _Unconnected()
        self.reducer.settings = settings
        self._connect()


class _Settable:
    """What is set once, and holds for every reducer that a wrapper comes to have."""

    def __init__(self) -> None:
        self.settings: list[Callable[[_C.Reducer], None]] = []

    def set(self, setting: Callable[[_C.Reducer], None]) -> None:
        self.settings.append(setting)

    def _set_static_graph(self) -> None:
        self.set(_C.Reducer._set_static_graph)

    def _set_manual_finalization_required(self, required: bool) -> None:
        self.set(lambda reducer: _C.Reducer._set_manual_finalization_required(reducer, required))

    def _set_optimizer_in_backward(self) -> None:
        self.set(_C.Reducer._set_optimizer_in_backward)

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Nothing: the reducer is told when it is made."""


class _Unconnected(_Settable):
    """The place of the reducer until the ranks meet: of a module under construction, and of a copy
    before its first forward."""


class _Reducer(_Settable, _C.Reducer):
    """With what torch's class asks of its reducer beyond reducing."""

    def __init__(self, wrapper: DistributedDataParallel, **options: Any) -> None:
        _C.Reducer.__init__(self, **options)
        _Settable.__init__(self)
        self._wrapper = weakref.ref(wrapper)
        self.outputs: list[Tensor] = []

    def set(self, setting: Callable[[_C.Reducer], None]) -> None:
        setting(self)
        super().set(setting)

    def _rebuild_buckets(self) -> bool:
        wrapper = self._wrapper()
        assert wrapper is not None
        return self.rebuild_buckets(together=wrapper._join_config.enable)

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """torch's class does not hand over the outputs of a static graph."""
        super().prepare_for_backward(outputs or self.outputs)
        self.outputs = []

    def _run_allreduce_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The sum over the ranks, in the bucket's buffer."""
        wrapper = self._wrapper()
        assert wrapper is not None
        work = dist.all_reduce(bucket.buffer(), group=wrapper.process_group, async_op=True)
        assert work is not None
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda sum_: sum_.value()[0])
        return future

    def _install_post_backward_futures(self, futures: list[torch.futures.Future[Any]]) -> None:
        """Backward ends when these are completed, too."""
        wrapper = self._wrapper()
        assert wrapper is not None
        timeout = timeout_of(wrapper.process_group)
        for future in futures:
            self.call_at_end(partial(_wait_for, future, timeout))

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:
        if not use_static_world_size:
            self.average_over_living(work)

    def _push_all_rebuilt_params(self) -> None:
        """Nothing: the order of buckets is rank 0's, whatever it did."""

    def _get_local_used_map(self) -> Tensor:
        """By parameter, the ranks that used it in the last iteration."""
        return torch.tensor(self.used_by, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        """Whether every iteration so far left the same parameters unused."""
        return self.found_same_unused


def _wait_for(future: torch.futures.Future[Any], timeout: timedelta) -> None:
    completed = threading.Event()
    future.add_done_callback(lambda _: completed.set())
    if not completed.wait(timeout.total_seconds()):
        raise DeadlineExceededError(
            f"a future that backward was to wait for was not completed within {timeout}"
        )
    future.wait()


def _checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    def checked_hook(state: object, bucket: dist.GradBucket) -> Any:
        future = hook(state, bucket)
        # torch takes it for one unseen.
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                "the communication hook must return a torch.futures.Future, but returned a "
                f"{type(future).__name__}"
            )
        return future

    return checked_hook


def _check_devices(module: nn.Module) -> None:
    """What torch does not check: its class takes modules over several devices."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    names: dict[torch.device, str] = {}  # the first on each
    for name, parameter in module.named_parameters():
        if name not in ignored:
            names.setdefault(parameter.device, name)
    places = [f'"{name}" on {device}' for device, name in names.items()]
    offered = all(device.type in {"cpu", "cuda"} for device in names)
    if len(names) > 1 and offered:
        _not_implemented(f"a module on several devices ({', '.join(places)})")
    if len(names) == 1 and not offered:
        _not_implemented(f"parameter {places[0]}: a device but the CPU and CUDA's")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _not_implemented(what: str) -> NoReturn:
    raise NotImplementedError(
        f"gradsync.torch.DistributedDataParallel does not implement {what} yet; "
        "torch.nn.parallel.DistributedDataParallel does, and works over the same process group"
    )
