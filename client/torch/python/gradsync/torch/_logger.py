"""What ``DistributedDataParallel._get_ddp_logging_data`` tells, under torch's names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.torch import _C

if TYPE_CHECKING:
    from gradsync.torch.distributed import DistributedDataParallel

# Of every iteration at first, and then of every so-manieth.
_ALL_UNTIL = 10
_DEFAULT_SAMPLE_RATE = 100

# As C++ calls them, and so torch's reducer.
_TYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_GLOO_ENVIRONMENT = {
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


class Logger:
    """Stands in the place of torch's logger, which demands torch's reducer."""

    def __init__(self) -> None:
        self.error = ""
        self.sample_rate = _DEFAULT_SAMPLE_RATE
        self._told: dict[str, str | int] = {}
        self._sampled: dict[str, str | int] = {"iteration": 0}
        self._sums = dict.fromkeys(_AVERAGED, 0)
        self._samples = 0

    # ---- Called by torch's DistributedDataParallel ----------------------------------------------

    def set_error_and_log(self, error: str) -> None:
        self.error = error

    def set_runtime_stats_and_log(self) -> None:
        """Before a forward; what there is to be told of the last one is in :meth:`sample`."""

    def _set_static_graph(self) -> None:
        self._told["static_graph"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._told["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._told["join_uneven_inputs"] = 1

    # ---- Called by ours -------------------------------------------------------------------------

    def sample(self, reducer: _C.Reducer) -> None:
        """Takes down the last iteration, if it is one of those."""
        iteration = reducer.iterations
        if iteration == 0 or (iteration >= _ALL_UNTIL and iteration % self.sample_rate != 0):
            return
        if iteration == self._sampled["iteration"]:
            return
        times = reducer.times
        spans = {
            "forward_compute_time": times["backward_begin"] - times["forward_begin"],
            "backward_compute_time": times["last_gradient"] - times["backward_begin"],
            "backward_comm_time": times["end"] - times["first_bucket"],
            "backward_compute_comm_overlap_time": times["last_gradient"] - times["first_bucket"],
        }
        self._samples += 1
        for name, span in spans.items():
            self._sums[name] += span
            self._sampled[f"avg_{name}"] = self._sums[name] // self._samples
        order = ", ".join(map(str, reducer.ready_order))
        self._sampled |= spans | {
            "iteration": iteration,
            "forward_compute_time_start": times["forward_begin"],
            "backward_compute_time_start": times["backward_begin"],
            "backward_comm_time_start": times["first_bucket"],
            "backward_compute_time_end": times["last_gradient"],
            "backward_comm_time_end": times["end"],
            "prev_iteration_grad_ready_order_indices": order,
        }

    def data(
        self, wrapper: DistributedDataParallel, parameters: Sequence[nn.Parameter]
    ) -> dict[str, str | int]:
        data = _of_wrapper(wrapper, parameters) | _of_environment(wrapper)
        reducer = wrapper.reducer
        error = self.error
        if isinstance(reducer, _C.Reducer):
            data |= _of_reducer(reducer, parameters, wrapper._has_rebuilt_buckets)
            data["can_set_static_graph"] = int(
                wrapper.static_graph or (reducer.iterations > 0 and reducer.found_same_unused)
            )
            error = reducer.error or error
        data |= self._sampled | self._told
        data["has_error"] = int(bool(error))
        if error:
            data["error"] = error
        return data


def _of_wrapper(
    wrapper: DistributedDataParallel, parameters: Sequence[nn.Parameter]
) -> dict[str, str | int]:
    group = wrapper.process_group
    return {
        "module_name": type(wrapper.module).__name__,
        "backend_name": dist.get_backend(group),
        "rank": dist.get_rank(group),
        "world_size": dist.get_world_size(group),
        "device_ids": ", ".join(map(str, wrapper.device_ids or [])),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "dtypes": ", ".join(sorted({_TYPE_NAMES[p.dtype] for p in parameters})),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "broadcast_buffers": int(wrapper.broadcast_buffers),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "static_graph": int(wrapper.static_graph),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in wrapper.module.modules())),
    }


def _of_reducer(
    reducer: _C.Reducer, parameters: Sequence[nn.Parameter], has_rebuilt: bool
) -> dict[str, str | int]:
    sizes = ", ".join(map(str, reducer.bucket_bytes))
    data: dict[str, str | int] = {
        "bucket_sizes": sizes,
        "num_buckets_reduced": reducer.reduced_buckets,
        "has_rebuilt_buckets": int(has_rebuilt),
        "unused_parameter_size": sum(
            parameter.nbytes
            for parameter, ranks in zip(parameters, reducer.used_by, strict=True)
            if ranks == 0 and reducer.iterations > 0
        ),
    }
    if has_rebuilt:
        data["rebuilt_bucket_sizes"] = sizes
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, bucket)) for bucket in reducer.bucket_parameters
        )
    return data


def _of_environment(wrapper: DistributedDataParallel) -> dict[str, str | int]:
    names = dict(_ENVIRONMENT)
    data: dict[str, str | int] = {}
    if dist.get_backend(wrapper.process_group) == "gloo":
        names |= _GLOO_ENVIRONMENT
        backend: Any = wrapper.process_group._get_backend(torch.device("cpu"))
        data["gloo_num_threads"] = backend.options._threads
    return data | {name: os.environ.get(variable, "N/A") for name, variable in names.items()}
