"""Tensors, as memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import tensorplay as tp

from . import _library
from ._handles import map_memory
from ._library import DType

DTYPES: dict[Any, DType] = {
    tp.float32: DType.FLOAT32,
    tp.float64: DType.FLOAT64,
    tp.float16: DType.FLOAT16,
    tp.bfloat16: DType.BFLOAT16,
    tp.complex64: DType.COMPLEX64,
    tp.complex128: DType.COMPLEX128,
}
"""The types that gradients can have."""


def size_of(tensor: Any) -> int:
    """In bytes, laid out row-major."""
    return int(tensor.numel()) * int(tensor.element_size())


def map_tensor(address: int, buffer: Any, shape: tuple[int, ...], like: Any) -> Any:
    """Row-major shared memory as a tensor of the type of `like`."""
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return tp.zeros(shape, dtype=like.dtype)
    memory = map_memory(address, count * like.element_size(), buffer)
    flat = tp.frombuffer(memory, dtype=like.dtype, count=count)  # type: ignore[attr-defined]
    return flat.reshape(shape)


def copy(target: Any, source: Any) -> None:
    """Of one shape. By bytes where that is possible: no array library needs to know the type."""
    if (
        source.dtype == target.dtype
        and source.is_contiguous()
        and target.is_contiguous()
        and source.numel() > 0
    ):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size_of(target))
        return
    with tp.no_grad():
        target.copy_(source)


def copy_out(tensor: Any, memory: memoryview) -> None:
    """To `memory`, row-major."""
    contiguous = tensor.detach().contiguous()
    memory[:] = ctypes.string_at(contiguous.data_ptr(), len(memory))


def copy_in(tensor: Any, memory: memoryview) -> None:
    """From `memory`, row-major."""
    with tp.no_grad():
        target = tensor.detach() if tensor.is_contiguous() else tp.empty_like(tensor).contiguous()
        ctypes.memmove(target.data_ptr(), bytes(memory), len(memory))
        if not tensor.is_contiguous():
            tensor.copy_(target)


def describe(tensor: Any) -> str:
    """For messages, as "float32 [3, 2]"."""
    return f"{str(tensor.dtype).removeprefix('tensorplay.')} {list(tensor.shape)}"


def to_description(name: str, tensor: Any) -> _library.Parameter:
    """What the ranks are to agree on. Raises TypeError for a type that cannot be averaged."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(
            f'gradsync: the gradient of parameter "{name}" cannot be averaged: it is '
            f"{describe(tensor)}"
        )
    shape = [int(extent) for extent in tensor.shape]
    folded = shape[: _library.MAX_DIMS]
    for extent in shape[_library.MAX_DIMS :]:
        folded[-1] *= extent
    description = _library.Parameter(
        name=name.encode(), dtype=dtype, ndim=min(len(shape), _library.MAX_DIMS)
    )
    description.shape[: len(folded)] = folded
    return description


def tensors_in(outputs: Any) -> Iterator[Any]:
    """The tensors of what a forward returned, whatever they are nested in."""
    if isinstance(outputs, tp.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (list, tuple, set, frozenset)):
        for value in outputs:
            yield from tensors_in(value)
    elif is_dataclass(outputs) and not isinstance(outputs, type):
        for field in fields(outputs):
            yield from tensors_in(getattr(outputs, field.name))
