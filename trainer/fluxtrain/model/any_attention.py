"""Attention of the frozen encoders, whatever a run names for its model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.nn.attention import SDPBackend, sdpa_kernel

P = ParamSpec("P")
T = TypeVar("T")

_ALL = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def any_attention(function: Callable[P, T]) -> Callable[P, T]:
    """Let torch choose the attention of ``function``: T5's has a bias, the autoencoder's 512 channels a head.

    What ``spec.run.parallel.attention`` names may compute neither.
    """

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        with sdpa_kernel(_ALL):
            return function(*arguments, **options)

    return call
