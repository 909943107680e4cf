"""Which parameters a backward will reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def find_reached(outputs: Iterable[Any], accumulators: Mapping[Any, int]) -> set[int]:
    """The parameters to which a path leads from `outputs`. `accumulators` holds each parameter's
    node: it is what the graph ends in, as long as somebody holds it, whereas a node's `variable` is
    a new object each time."""
    open_ = []
    for output in outputs:
        if output.requires_grad:
            # A parameter that is returned as it is has no function.
            open_.append(output.grad_fn or output._accumulate_grad_node)
    reached: set[int] = set()
    # It also keeps the nodes: one that is gone could share its identity with the next.
    seen = set()
    while open_ and len(reached) < len(accumulators):
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        index = accumulators.get(node)
        if index is not None:
            reached.add(index)
        else:
            open_.extend(following for following, _ in node.next_functions)
    return reached
