"""Memory of the host that a GPU copies to directly, of exactly the size that is asked for.

Torch's own pinned tensors come from an allocator that rounds each one up to a power of two, and keeps it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def pin(memory: Tensor) -> bool:
    """Pin the pages of ``memory``, a tensor of the host; return whether that was possible.

    Copies to memory that is not pinned are slower, and the host waits for them.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
    return int(error) == 0


def unpin(memory: Tensor) -> None:
    """Release what `pin` pinned, before the memory is freed."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(memory.data_ptr())
