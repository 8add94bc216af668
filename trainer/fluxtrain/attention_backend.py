"""Which of torch's implementations of attention is used: torch chooses, or the config names one.

Torch's switches are the process's. They are set as long as a run lasts: blocks are traced for the compiler,
and recomputed in backward passes, in threads of torch's own.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Torch's backends by the names of ``spec.run.parallel.attention``."""
_NAMES = {backend: name for name, backend in BACKENDS.items()}


def attention_backend(name: str) -> AbstractContextManager[None]:
    """Return a context in which attention uses the backend ``name`` only, any for ``auto``."""
    return nullcontext() if name == "auto" else sdpa_kernel(BACKENDS[name])


def attention_on(device: torch.device, config: RunConfig) -> str:
    """Return the name of what computes attention on ``device``; on ROCm with its library.

    Raises ConfigError if ``device`` lacks what ``config`` names, or it cannot compute the run's shapes.
    """
    name = config.parallel.attention
    found, reason = _choice(name, device, config)
    if found == SDPBackend.ERROR:
        usable = [each for each in BACKENDS if _choice(each, device, config)[0] == BACKENDS[each]]
        text = f"{_described(device)} cannot compute it so{reason}; use {', '.join(usable)} or auto"
        raise ConfigError("spec.run.parallel.attention", name, text)
    is_rocm = device.type == "cuda" and torch.version.hip is not None
    library = f" ({_rocm_library()})" if is_rocm and found == BACKENDS["flash"] else ""
    return _NAMES.get(found, found.name.lower()) + library


def _choice(name: str, device: torch.device, config: RunConfig) -> tuple[SDPBackend, str]:
    """Return torch's choice for the run's shapes if ``name`` is enabled; ERROR and why if there is none."""
    model, tokens = config.model, config.image_tokens + config.data.text_length
    shape = 1, model.num_heads, tokens, model.hidden_size // model.num_heads
    dtype: torch.dtype = getattr(torch, config.precision.compute)
    queries = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    with attention_backend(name), warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            found = SDPBackend(torch._fused_sdp_choice(queries, queries, queries))
        except RuntimeError:
            found = SDPBackend.ERROR
    return found, "".join(f" ({reason.message})" for reason in reasons[:1])


def _described(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def _rocm_library() -> str:
    """Return the library of flash attention: AOTriton, unless composable kernel (CK) is preferred."""
    preferred = str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2]
    return "CK" if preferred.lower() == "ck" else "AOTriton"
