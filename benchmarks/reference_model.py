"""diffusers' FLUX transformer with the weights of ours, and random weights that make every term count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux

EMBEDDERS = {
    "time_in": "timestep_embedder",
    "vector_in": "text_embedder",
    "guidance_in": "guidance_embedder",
}
STREAMS = {  # of a double block: ours, then diffusers' names of qkv, norms, proj and MLP
    "img": ("norm1", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
    "txt": (
        "norm1_context",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        ("norm_added_q", "norm_added_k"),
        "to_add_out",
        "ff_context",
    ),
}


def random_model(config: ModelConfig, seed: int = 0) -> Flux:
    """Return a model with random parameters, none of them zero or one."""
    torch.manual_seed(seed)
    with torch.device("meta"):  # saves the default initialisation
        model = Flux(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                bound = (3 / parameter.shape[1]) ** 0.5
                parameter.uniform_(-bound, bound)
            else:
                parameter.uniform_(0.2, 0.8)
    return model


def linears(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield our linear layers and diffusers' layers that hold their rows."""
    yield "img_in", ["x_embedder"]
    yield "txt_in", ["context_embedder"]
    yield "final_layer.linear", ["proj_out"]
    for name, other in list(EMBEDDERS.items())[: 3 if config.guidance_embed else 2]:
        yield f"{name}.in_layer", [f"time_text_embed.{other}.linear_1"]
        yield f"{name}.out_layer", [f"time_text_embed.{other}.linear_2"]
    for i, (stream, (mod, qkv, _, proj, ff)) in product(range(config.depth), STREAMS.items()):
        block, other = f"double_blocks.{i}.{stream}", f"transformer_blocks.{i}"
        yield f"{block}_mod.lin", [f"{other}.{mod}.linear"]
        yield f"{block}_attn.qkv", [f"{other}.attn.{name}" for name in qkv]
        yield f"{block}_attn.proj", [f"{other}.attn.{proj}"]
        yield f"{block}_mlp.0", [f"{other}.{ff}.net.0.proj"]
        yield f"{block}_mlp.2", [f"{other}.{ff}.net.2"]
    for i in range(config.depth_single_blocks):
        block, other = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        qkv_mlp = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        yield f"{block}.modulation.lin", [f"{other}.norm.linear"]
        yield f"{block}.linear1", [f"{other}.{name}" for name in qkv_mlp]
        yield f"{block}.linear2", [f"{other}.proj_out"]


def norms(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield our norms of queries and keys, and diffusers'."""
    for i, (stream, (_, _, (q, k), _, _)) in product(range(config.depth), STREAMS.items()):
        norm, other = f"double_blocks.{i}.{stream}_attn.norm", f"transformer_blocks.{i}.attn"
        yield from ((f"{norm}.query_norm", f"{other}.{q}"), (f"{norm}.key_norm", f"{other}.{k}"))
    for i in range(config.depth_single_blocks):
        norm, other = f"single_blocks.{i}.norm", f"single_transformer_blocks.{i}.attn"
        yield from (
            (f"{norm}.query_norm", f"{other}.norm_q"),
            (f"{norm}.key_norm", f"{other}.norm_k"),
        )


def to_diffusers(ours: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights or gradients under diffusers' names: fused rows split, final halves swapped."""
    width = config.hidden_size
    theirs = {f"{other}.weight": ours[f"{name}.scale"] for name, other in norms(config)}
    for kind in ("weight", "bias"):
        for name, others in linears(config):
            tensor = ours[f"{name}.{kind}"]
            rows = [width] * (len(others) - 1)  # q, k and v; the rest is the last
            parts = tensor.split([*rows, len(tensor) - sum(rows)])
            theirs |= {f"{other}.{kind}": part for other, part in zip(others, parts, strict=True)}
        shift, scale = ours[f"final_layer.adaLN_modulation.1.{kind}"].chunk(2)
        theirs[f"norm_out.linear.{kind}"] = torch.cat([scale, shift])
    return theirs


def reference(model: Flux, config: ModelConfig) -> FluxTransformer2DModel:
    """Return diffusers' model with the weights of ``model``."""
    return reference_of(model.state_dict(), config)


def reference_of(
    weights: dict[str, Tensor],
    config: ModelConfig,
    kind: Callable[..., FluxTransformer2DModel] = FluxTransformer2DModel,
) -> FluxTransformer2DModel:
    """Return diffusers' model, or another ``kind`` with its names and arguments, with our ``weights``."""
    other = without_values(config, kind)
    other.load_state_dict(to_diffusers(weights, config), assign=True)
    return other


def without_values(
    config: ModelConfig, kind: Callable[..., FluxTransformer2DModel] = FluxTransformer2DModel
) -> FluxTransformer2DModel:
    """Return diffusers' model, or another ``kind`` with its arguments, on the meta device."""
    out = {"out_channels": config.out_channels} if config.out_channels != config.in_channels else {}
    with torch.device("meta"):
        return kind(
            in_channels=config.in_channels,
            **out,  # SimpleTuner's model has no such argument
            num_layers=config.depth,
            num_single_layers=config.depth_single_blocks,
            attention_head_dim=config.hidden_size // config.num_heads,
            num_attention_heads=config.num_heads,
            joint_attention_dim=config.context_in_dim,
            pooled_projection_dim=config.vec_in_dim,
            guidance_embeds=config.guidance_embed,
            axes_dims_rope=config.axes_dim,
        )
