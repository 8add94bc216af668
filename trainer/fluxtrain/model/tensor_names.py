"""Names of the transformer's tensors in BFL's layout, which is ours, and in diffusers'.

diffusers has separate tensors for queries, keys, values and a single block's MLP, which BFL concatenates
by rows; and the halves of the final modulation are swapped (BFL: shift, scale).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fluxtrain.contract.run.model import TIMESTEP_DIM, ModelConfig

Shape = tuple[int, ...]

_STREAMS = {
    "img": ("norm1", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
    "txt": (
        "norm1_context",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        ("norm_added_q", "norm_added_k"),
        "to_add_out",
        "ff_context",
    ),
}
_EMBEDDERS = {
    "time_in": "timestep_embedder",
    "vector_in": "text_embedder",
    "guidance_in": "guidance_embedder",
}


@dataclass(frozen=True)
class Entry:
    """One of BFL's tensors: its shape, and diffusers' tensors that hold its rows, in order."""

    name: str
    shape: Shape
    parts: tuple[tuple[str, int], ...]  # diffusers' name, number of rows
    swapped: bool = False  # its two halves are swapped


def entries(model: ModelConfig) -> Iterator[Entry]:
    """Yield every tensor of the transformer ``model``."""
    hidden, mlp = model.hidden_size, int(model.hidden_size * model.mlp_ratio)
    yield from _linear("img_in", hidden, model.in_channels, "x_embedder")
    yield from _linear("txt_in", hidden, model.context_in_dim, "context_embedder")
    inputs = {"time_in": TIMESTEP_DIM, "vector_in": model.vec_in_dim}
    if model.guidance_embed:
        inputs["guidance_in"] = TIMESTEP_DIM
    for name, width in inputs.items():
        other = f"time_text_embed.{_EMBEDDERS[name]}"
        yield from _linear(f"{name}.in_layer", hidden, width, f"{other}.linear_1")
        yield from _linear(f"{name}.out_layer", hidden, hidden, f"{other}.linear_2")
    for i in range(model.depth):
        for stream in _STREAMS:
            yield from _stream(stream, i, hidden, mlp, hidden // model.num_heads)
    for i in range(model.depth_single_blocks):
        yield from _single(i, hidden, mlp, hidden // model.num_heads)
    yield from _linear("final_layer.linear", model.in_channels, hidden, "proj_out")
    last = "final_layer.adaLN_modulation.1"
    for entry in _linear(last, 2 * hidden, hidden, "norm_out.linear"):
        yield Entry(entry.name, entry.shape, entry.parts, swapped=True)


def _stream(stream: str, i: int, hidden: int, mlp: int, head: int) -> Iterator[Entry]:
    mod, qkv, norms, proj, ff = _STREAMS[stream]
    block, other = f"double_blocks.{i}.{stream}", f"transformer_blocks.{i}"
    thirds = tuple((f"{other}.attn.{name}", hidden) for name in qkv)
    yield from _linear(f"{block}_mod.lin", 6 * hidden, hidden, f"{other}.{mod}.linear")
    yield from _fused(f"{block}_attn.qkv", hidden, thirds)
    yield from _norms(f"{block}_attn.norm", head, [f"{other}.attn.{name}" for name in norms])
    yield from _linear(f"{block}_attn.proj", hidden, hidden, f"{other}.attn.{proj}")
    yield from _linear(f"{block}_mlp.0", mlp, hidden, f"{other}.{ff}.net.0.proj")
    yield from _linear(f"{block}_mlp.2", hidden, mlp, f"{other}.{ff}.net.2")


def _single(i: int, hidden: int, mlp: int, head: int) -> Iterator[Entry]:
    block, other = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
    rows = [(f"{other}.attn.{name}", hidden) for name in ("to_q", "to_k", "to_v")]
    yield from _linear(f"{block}.modulation.lin", 3 * hidden, hidden, f"{other}.norm.linear")
    yield from _fused(f"{block}.linear1", hidden, (*rows, (f"{other}.proj_mlp", mlp)))
    yield from _linear(f"{block}.linear2", hidden, hidden + mlp, f"{other}.proj_out")
    yield from _norms(f"{block}.norm", head, [f"{other}.attn.norm_q", f"{other}.attn.norm_k"])


def _linear(name: str, outputs: int, inputs: int, other: str) -> Iterator[Entry]:
    yield from _fused(name, inputs, ((other, outputs),))


def _fused(name: str, inputs: int, parts: tuple[tuple[str, int], ...]) -> Iterator[Entry]:
    rows = sum(count for _, count in parts)
    for kind, shape in (("weight", (rows, inputs)), ("bias", (rows,))):
        named = tuple((f"{other}.{kind}", count) for other, count in parts)
        yield Entry(f"{name}.{kind}", shape, named)


def _norms(name: str, head: int, others: list[str]) -> Iterator[Entry]:
    for which, other in zip(("query_norm", "key_norm"), others, strict=True):
        yield Entry(f"{name}.{which}.scale", (head,), ((f"{other}.weight", head),))
