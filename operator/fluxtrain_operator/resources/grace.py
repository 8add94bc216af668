"""The time that a training pod has to save a checkpoint after SIGTERM, from the size of its share of one."""

from __future__ import annotations

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain_operator.job import Job

_MIN_SECONDS = 180
"""For the present step, the copy to host memory, the write of a small checkpoint, and the exit."""
_MAX_SECONDS = 3600
_BYTES_PER_SECOND = 250e6
"""A node writes at least as fast: a quarter of what one disk or NFS client of a GPU node does."""
_EXIT_SECONDS = 60
"""Between the end of the trainers' time and that of the pod's."""


def grace_seconds(job: Job) -> int:
    """Return the seconds from SIGTERM to SIGKILL; those of ``spec.podTemplate`` if it sets them."""
    spec = job.spec.pod_template.written.get("spec") or {}
    written = spec.get("terminationGracePeriodSeconds")
    if isinstance(written, int):
        return written
    num_bytes = checkpoint_bytes(job) / job.spec.nodes.min
    return min(_MAX_SECONDS, _MIN_SECONDS + int(num_bytes / _BYTES_PER_SECOND))


def shutdown_seconds(job: Job) -> int:
    """Return the seconds that the launcher gives its trainers; it exits before the pod is killed."""
    grace = grace_seconds(job)
    return max(grace - _EXIT_SECONDS, grace // 2)


def checkpoint_bytes(job: Job) -> int:
    """Return the size of a checkpoint; 0 if the job saves none, or of adapters only."""
    if job.config.task != "train" or job.config.adapter is not None:
        return 0
    num_bytes = job.config.precision.weight_bytes + job.config.optim.state_bytes
    return round(num_bytes * num_block_parameters(job.config.model))


def num_block_parameters(model: ModelConfig) -> int:
    """Return the parameters of all blocks: more than 99 % of a large model's.

    In multiples of hidden_size², a stream of a double block has 6 for the modulation, 4 for the attention
    and two matrices of the MLP; a single block 3 for the modulation, 4 for the attention and its MLP.
    """
    mlp = 2 * model.mlp_ratio
    squares = model.depth * 2 * (10 + mlp) + model.depth_single_blocks * (7 + mlp)
    return round(squares * model.hidden_size**2)
