"""Says what a safetensors file is that holds no transformer of FLUX, by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable

_KINDS = (
    (
        ("lora_down", "lora_up", "lora_A", "lora_B", "lokr_", "hada_w"),
        "adapters, which spec.run.adapter.initial and added_adapters take",
    ),
    (("input_blocks.", "down_blocks.0.attentions"), "a U-Net of Stable Diffusion"),
    (("joint_blocks.",), "a transformer of Stable Diffusion 3"),
    (
        ("encoder.block.0.", "text_model.", "embeddings.token_embedding."),
        "a text encoder, which spec.run.encoders takes",
    ),
    (("decoder.conv_in.",), "an autoencoder, which spec.run.encoders takes"),
)
"""Parts of names, of which any file of a kind has one."""


def what_it_is(names: Iterable[str]) -> str:
    """Return "; it holds ..." for a known kind of file, "" for others."""
    known = list(names)
    for parts, kind in _KINDS:
        if any(part in name for part in parts for name in known):
            return f"; it holds {kind}"
    return ""
