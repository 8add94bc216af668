"""Initial weights, which depend on the seed and the parameter's name only.

| parameters                                            | distribution                           |
|-------------------------------------------------------|----------------------------------------|
| every bias                                            | zero                                   |
| QK norms' scale                                       | one                                    |
| modulations and the final layer                       | zero: each block starts as the identity |
| time_in, vector_in, guidance_in                       | normal, standard deviation 0.02        |
| img_in, txt_in, qkv, proj, mlp, linear1, linear2      | Xavier uniform on the fused matrix     |
| lora_A of an adapter                                  | uniform up to 1 / sqrt(inputs), as peft's |
| lora_B of an adapter                                  | zero: an adapter starts without effect |
| lokr_w1, lokr_w1_a, lokr_w1_b, lokr_w2_a              | uniform up to 1 / sqrt(columns), as LyCORIS' |
| lokr_w2, lokr_w2_b                                    | zero                                   |
| magnitude, DoRA's change of a row's norm              | zero                                   |
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_ZERO = ("img_mod", "txt_mod", "modulation", "final_layer")
_DOWN = ("lora_A", "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a")
_UP = ("lora_B", "lokr_w2", "lokr_w2_b", "magnitude")
_NORMAL = ("time_in", "vector_in", "guidance_in")


def initial_value(
    name: str, shape: torch.Size, seed: int, device: torch.device | None = None
) -> Tensor:
    """Return the unsharded initial value of parameter ``name``: the same on every rank."""
    parts = name.split(".")
    if parts[-1] == "scale":
        return torch.ones(shape, device=device)
    is_down = parts[-1] in _DOWN
    is_zero = parts[-1] in ("bias", *_UP) or any(part in _ZERO for part in parts)
    if is_zero and not is_down:
        return torch.zeros(shape, device=device)
    generator = torch.Generator(device or "cpu").manual_seed(_key(seed, name))
    value = torch.empty(shape, device=device)
    if is_down:
        bound = 1 / math.sqrt(shape[1])
        return value.uniform_(-bound, bound, generator=generator)
    if parts[0] in _NORMAL:
        return value.normal_(0, 0.02, generator=generator)
    bound = math.sqrt(6 / (shape[0] + shape[1]))
    return value.uniform_(-bound, bound, generator=generator)


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)
