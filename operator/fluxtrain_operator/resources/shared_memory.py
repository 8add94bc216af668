"""The size of /dev/shm: the batches of the data loaders, and RCCL's or NCCL's buffers.

Only a limit: memory that is not used is not taken.
"""

from __future__ import annotations

import math

from fluxtrain.contract.resource.fluxtraining import Spec
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.loader_size import loader_bytes

_GIB = 1 << 30
_SMALLEST = _GIB
_COLLECTIVES = _GIB // 2
"""For each GPU: 4 MiB for each of 32 channels in both directions to two neighbours, if GPUs exchange data
through shared memory."""


def shared_memory(config: RunConfig, spec: Spec) -> str:
    """Return the size of a pod's /dev/shm as a quantity, rounded up to a GiB."""
    loaded = loader_bytes(config, spec.rank_counts[0]) * max(1, spec.gpus_per_node)
    size = max(_SMALLEST, loaded + _COLLECTIVES * spec.gpus_per_node)
    return f"{math.ceil(size / _GIB)}Gi"
