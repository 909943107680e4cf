"""What a wrapped module sends besides gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._handles import Group
from ._tensors import copy_in, copy_out, size_of

_CHUNK_BYTES = 32 * 1024 * 1024


def broadcast(group: Group, tensors: Sequence[Any], root: int) -> None:
    """The root's values, on every rank. In chunks of several tensors each: a small one costs as
    much time as its data is worth."""
    chunk: list[Any] = []
    chunk_bytes = 0
    for tensor in tensors:
        if chunk and chunk_bytes + size_of(tensor) > _CHUNK_BYTES:
            _broadcast_chunk(group, chunk, chunk_bytes, root)
            chunk, chunk_bytes = [], 0
        chunk.append(tensor)
        chunk_bytes += size_of(tensor)
    _broadcast_chunk(group, chunk, chunk_bytes, root)


def _broadcast_chunk(group: Group, tensors: Sequence[Any], size: int, root: int) -> None:
    if size == 0:
        return
    memory = bytearray(size)
    is_root = group.session.rank == root
    with memoryview(memory) as whole:
        if is_root:
            _copy_each(tensors, whole, copy_out)
    group.broadcast(memory, root)
    with memoryview(memory) as whole:
        if not is_root:
            _copy_each(tensors, whole, copy_in)


def _copy_each(tensors: Sequence[Any], memory: memoryview, copy: Any) -> None:
    begin = 0
    for tensor in tensors:
        end = begin + size_of(tensor)
        if end > begin:
            copy(tensor, memory[begin:end])
        begin = end
