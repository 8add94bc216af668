"""Environment variables for GPUs: the operator's pods and ``fluxtrain run`` have the same defaults.

Sources: AMD's published MLPerf and Primus configurations for MI300X. Left out of those: what is the default
of ROCm, RCCL or torch today, channel counts that suit only a whole MI300X, and CUDA_DEVICE_MAX_CONNECTIONS=1,
which keeps FSDP2's reduce-scatters from running beside the backward pass.
"""

from __future__ import annotations

_ANY_VENDOR = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # a hung collective leaves a record of what each rank did
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # collectives run before compute that waits for the GPU, too
}
_AMD = {
    "GPU_MAX_HW_QUEUES": "2",  # AMD's value for training; ROCm's default is 4
    "HSA_NO_SCRATCH_RECLAIM": "1",  # a queue keeps its scratch memory for the next step
    "NCCL_CROSS_NIC": "0",  # each GPU uses the NIC of its rail
    "NCCL_PXN_DISABLE": "1",  # no detour over another GPU's NIC
    "TORCH_BLAS_PREFER_HIPBLASLT": "1",
}


def gpu_environment(is_amd: bool) -> dict[str, str]:
    """Return the variables for GPUs of AMD, or of another vendor; a user's values override them."""
    return _ANY_VENDOR | (_AMD if is_amd else {})
