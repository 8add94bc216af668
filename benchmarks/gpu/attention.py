"""torch's implementations of attention, by the names in the reports."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_backend(name: str | None) -> AbstractContextManager[None]:
    """Return a context in which attention uses backend ``name`` only; torch chooses if it is None."""
    return nullcontext() if name is None else sdpa_kernel(BACKENDS[name])
