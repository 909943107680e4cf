"""``DistributedDataParallel`` whose gradients are averaged by the node's gradsync daemon."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from gradsync.errors import MismatchError
from gradsync.torch import _C
from gradsync.torch._session import current_job, timeout_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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
        module: on the CPU. At least one of its parameters requires a gradient.
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
        batched_grad_copy: without effect, as copies are always batched by bucket.

    Not implemented yet, so they raise ``NotImplementedError``: ``find_unused_parameters``,
    ``static_graph``, ``delay_all_reduce_named_params``, ``mixed_precision``,
    ``skip_all_reduce_unused_params``, ``bucket_cap_mb_list``, ``lazy_bucket_allocation``;
    communication hooks, ``join``, manual finalisation of backward; sparse gradients; modules on a
    GPU.

    Raises, from construction, forward and backward, the classes of :mod:`gradsync.errors`. A
    parameter that got no gradient makes the next forward raise "Expected to have finished reduction
    in the prior iteration before starting a new one.", with the parameter's name. After an error in
    backward the wrapped module cannot be used any more.
    """

    reducer: _C.Reducer | None  # type: ignore[assignment]  # in the place of torch's own

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
        mixed_precision: object | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        for name, given in {
            "find_unused_parameters=True": find_unused_parameters,
            "static_graph=True": static_graph,
            "delay_all_reduce_named_params": delay_all_reduce_named_params is not None,
            "param_to_hook_all_reduce": param_to_hook_all_reduce is not None,
            "mixed_precision": mixed_precision is not None,
            "skip_all_reduce_unused_params=True": skip_all_reduce_unused_params,
            "bucket_cap_mb_list": bucket_cap_mb_list is not None,
            "lazy_bucket_allocation=True": lazy_bucket_allocation,
        }.items():
            if given:
                _not_implemented(name)
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            broadcast_buffers=broadcast_buffers,
            init_sync=False,  # torch's way of it; ours is in _connect
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            device_mesh=device_mesh,
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
        )
        if self._use_python_reducer:
            _not_implemented('torch._dynamo.config.optimize_ddp = "python_reducer"')
        self._connect()
        if init_sync:
            with_buffers = self.forward_sync_buffers or forward_sync_buffers is not None
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
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}

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
        for parameter, sparse, name in zip(parameters, expect_sparse_gradient, names, strict=True):
            if sparse:
                _not_implemented(f'the sparse gradient of parameter "{name}"')
            if parameter.device.type != "cpu":
                _not_implemented(f'parameter "{name}" on {parameter.device}: a device but the CPU')
        self.reducer = None
        self._gradsync_logger = _Logger()
        self.logger = self._gradsync_logger  # type: ignore[assignment]
        self._gradsync_parameters = parameters
        self._gradsync_names = names
        self._passing_sync_batchnorm_handle(self.module)

    def _connect(self) -> None:
        """Meets the other ranks: forms the groups and agrees on the model."""
        job = current_job()
        group = self.process_group
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout_of(group)
        reducer = _C.Reducer(
            session=job.session,
            tag=job.new_tag("ddp", group),
            ranks=ranks,
            parameters=self._gradsync_parameters,
            names=self._gradsync_names,
            # Zero asks for the default, whereas a cap of zero means one parameter for each bucket.
            bucket_bytes=max(1, self.bucket_bytes_cap),
            first_bucket_bytes=max(1, self._bucket_config.first_bucket_bytes_cap),
            timeout=timeout,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        # Apart from the reducer's group, whose operations are numbered by bucket.
        self._gradsync_broadcaster = _C.Broadcaster(
            job.session, job.new_tag("ddp-sync", group), ranks, timeout
        )
        self._gradsync_job = job
        self._agree_on_layout(ranks)
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
        for name, parameter in self.module.named_parameters():
            if name not in self.parameters_to_ignore:
                kind = "parameter" if parameter.requires_grad else "frozen parameter"
                yield f'{kind} "{name}" ({_describe(parameter)}, strides {parameter.stride()})'
        if self.forward_sync_buffers:
            for name, buffer in self.named_module_buffers.items():
                yield f'buffer "{name}" ({_describe(buffer)})'

    def _broadcast_module(self, with_buffers: bool) -> None:
        states = [
            parameter.detach()
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        if with_buffers:
            states += [buffer.detach() for buffer in self.named_module_buffers.values()]
        self._gradsync_broadcaster.broadcast(states, self.broadcast_bucket_size, 0)

    def __getstate__(self) -> dict[str, Any]:
        attributes = super().__getstate__()
        for own in ("_gradsync_job", "_gradsync_broadcaster"):
            attributes.pop(own, None)
        return attributes

    # ---- Training -------------------------------------------------------------------------------

    @torch._disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.reducer is None:  # a copy, or unpickled
            self._connect()
        return super()._pre_forward(*inputs, **kwargs)

    @torch._disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        return super()._post_forward(output)

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._gradsync_broadcaster.broadcast(tensors, buffer_size, authoritative_rank)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What is known of this module: its settings, the buckets, iterations that were completed,
        and the last error."""
        parameters = self._gradsync_parameters
        reducer = self.reducer
        error = (reducer.error if reducer else "") or self._gradsync_logger.error
        data: dict[str, Any] = {
            "module_name": type(self.module).__name__,
            "backend_name": "gradsync",
            "rank": dist.get_rank(self.process_group),
            "world_size": dist.get_world_size(self.process_group),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": ", ".join(map(str, reducer.bucket_bytes)) if reducer else "",
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
            "iteration": reducer.iterations if reducer else 0,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "find_unused_parameters": 0,
            "static_graph": 0,
            "has_error": int(bool(error)),
        }
        if error:
            data["error"] = error
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted for torch's sake: nothing is sampled, the daemon measures every bucket."""
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    # ---- Not implemented yet --------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        _not_implemented("register_comm_hook")

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        _not_implemented("_register_builtin_comm_hook")

    def _register_buffer_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        _not_implemented("_register_buffer_comm_hook")

    def _register_fused_optim(self, optim: type, *args: Any, **kwargs: Any) -> None:
        _not_implemented("_register_fused_optim")

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        _not_implemented("join")

    def join_hook(self, **kwargs: Any) -> NoReturn:
        _not_implemented("join")

    def _set_static_graph(self) -> None:
        _not_implemented("static_graph=True")

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        _not_implemented("the sparse gradient of a parameter")

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        _not_implemented("_update_process_group")

    @property
    def require_manual_backward_finalization(self) -> bool:
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            _not_implemented("require_manual_backward_finalization")

    def finalize_backward(self) -> None:
        _not_implemented("finalize_backward")


class _Logger:
    """Stands in for torch's logger, which demands torch's reducer."""

    def __init__(self) -> None:
        self.error = ""

    def set_error_and_log(self, error: str) -> None:
        self.error = error

    def set_runtime_stats_and_log(self) -> None:
        """Nothing: the daemon measures."""


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _not_implemented(what: str) -> NoReturn:
    raise NotImplementedError(
        f"gradsync.torch.DistributedDataParallel does not implement {what} yet; "
        "torch.nn.parallel.DistributedDataParallel does, and works over the same process group"
    )
