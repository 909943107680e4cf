"""What differs between the versions of torch that this package works with."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

_PARAMETERS = inspect.signature(TorchDistributedDataParallel.__init__).parameters


def known_to_torch(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the constructor's arguments that this torch has. The ones that older versions lack
    are without effect, or have another name there."""
    known = {name: value for name, value in arguments.items() if name in _PARAMETERS}
    if "forward_sync_buffers" not in _PARAMETERS:
        given = (arguments["forward_sync_buffers"], arguments["broadcast_buffers"], True)
        known["broadcast_buffers"] = next(value for value in given if value is not None)
    return known
