"""Forward and backward on copies of the parameters in a smaller type.

torch has this for GPUs only, because of the streams that it uses; here all is done on the stream
that forward or backward runs on. What the user sees is the same: between iterations parameters and
gradients have their full type.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.utils import _alloc_storage, _free_storage
from torch.nn.parallel.distributed import (
    _cast_buffers,
    _MixedPrecision,
    _setup_mixed_precision_params,
)

from gradsync.torch._optimizer_in_backward import average, done

if TYPE_CHECKING:
    from gradsync.torch.distributed import DistributedDataParallel


def set_up(wrapper: DistributedDataParallel, precision: _MixedPrecision) -> None:
    """Once, before the reducer exists."""
    wrapper.mixed_precision = precision
    _setup_mixed_precision_params(precision, wrapper.module)
    _cast_buffers(precision, wrapper.module)
    wrapper.module.register_forward_pre_hook(
        partial(_use_copies, weakref.ref(wrapper)), with_kwargs=True
    )
    wrapper.register_comm_hook(None, _average_hook(wrapper))


def _managed(module: nn.Module) -> list[Any]:
    return [p for p in module.parameters() if not getattr(p, "_ddp_ignored", False)]


def _use_copies(
    reference: weakref.ref[DistributedDataParallel], module: nn.Module, *inputs: object
) -> None:
    """Before forward."""
    wrapper = reference()
    assert wrapper is not None
    assert wrapper.mixed_precision is not None
    for parameter in _managed(module):
        _alloc_storage(parameter._mp_param, parameter.size())
        with torch.no_grad():
            parameter._mp_param.copy_(parameter._fp_param)
            if parameter.grad is not None:  # to which autograd will add
                parameter.grad.data = parameter.grad.to(wrapper.mixed_precision.param_dtype)
        parameter.data = parameter._mp_param
        if parameter.requires_grad and torch.is_grad_enabled():
            # Another type has another accumulator, for as long as someone holds it.
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            handle = accumulator.register_hook(
                partial(wrapper._fire_reducer_autograd_hook, parameter._idx)
            )
            parameter._ddp_mp_hook_state = (accumulator, handle)


def _use_full(module: nn.Module) -> None:
    """After backward."""
    for parameter in _managed(module):
        state = parameter.__dict__.pop("_ddp_mp_hook_state", None)
        if state is not None:
            state[1].remove()
        if parameter.data_ptr() != parameter._fp_param.data_ptr():
            parameter.data = parameter._fp_param
            _free_storage(parameter._mp_param)


def _average_hook(
    wrapper: DistributedDataParallel,
) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
    reference = weakref.ref(wrapper)

    def average_and_upcast(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        wrapper = reference()
        assert wrapper is not None
        assert wrapper.mixed_precision is not None
        if bucket.buffer().dtype != wrapper.mixed_precision.reduce_dtype:
            bucket.set_buffer(bucket.buffer().to(wrapper.mixed_precision.reduce_dtype))
        average(wrapper, bucket)
        for parameter in bucket.parameters():
            full: Any = parameter
            full.data = full._fp_param
            _free_storage(full._mp_param)
            if full.grad is not None:
                full.grad.data = full.grad.to(full.dtype)
        if bucket.is_last():
            Variable._execution_engine.queue_callback(partial(_use_full, wrapper.module))
        return done(bucket.buffer())

    return average_and_upcast
