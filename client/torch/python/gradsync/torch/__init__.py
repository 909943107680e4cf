"""gradsync for PyTorch.

A trainer that runs under ``torchrun`` changes two lines. Its own::

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)

become::

    import torch.distributed as dist
    from gradsync.torch import DistributedDataParallel

    dist.init_process_group("gradsync")
    model = DistributedDataParallel(model)

Importing this module registers the backend ``"gradsync"`` for tensors on the CPU and on CUDA
devices. The backend and the
class can be had apart: ``DistributedDataParallel`` works over a process group of any backend, and
torch's own works over ``"gradsync"``.

The backend offers every operation of ``torch.distributed``, asynchronous or not, in groups made by
``new_group``; of the reductions all but ``PREMUL_SUM``. For tensors on a GPU it offers those that
models use: ``all_reduce``, ``broadcast``, ``all_gather``, ``reduce_scatter``, their forms for one
tensor and for several, and ``barrier(device_ids=...)``; there waiting for a work makes the current
stream wait, as with NCCL. The others raise ``NotImplementedError`` there. Results are bitwise the
same on every rank and from run to run. Errors are those of :mod:`gradsync.errors`. What may be
useful to know:

- ``send`` returns when the daemon has the message: two ranks may send to each other before either
  receives. Messages keep no order with collectives. A receive that is in vain fails alone.
- Tensors of a list may differ in size in ``all_gather``, ``reduce_scatter`` and ``all_to_all``.
  Every rank must pass split sizes to ``all_to_all_single``, or none.
- ``monitored_barrier`` leaves the group usable when it fails.

The daemon is found as follows: the socket that ``GRADSYNC_SOCKET`` names, else the system's at
``/run/gradsync/gradsyncd.sock``, else a private one, which the first rank starts and which ends by
itself.
"""

from gradsync.torch._backend import register_backend
from gradsync.torch.distributed import DistributedDataParallel

register_backend()

__all__ = ["DistributedDataParallel", "register_backend"]
