"""The transformer: its parameters by name, and its numbers against diffusers'."""

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flux import Flux
from fluxtrain.model.latents import image_ids, text_ids

GOLDEN = Path(__file__).parent / "golden"
DEV = ModelConfig(guidance_embed=True)
SMALL = ModelConfig(
    in_channels=16,
    vec_in_dim=40,
    context_in_dim=48,
    hidden_size=64,
    num_heads=4,
    depth=2,
    depth_single_blocks=3,
    axes_dim=(4, 6, 6),
)
GUIDED = ModelConfig(
    in_channels=8,
    vec_in_dim=24,
    context_in_dim=32,
    hidden_size=48,
    num_heads=2,
    depth=1,
    depth_single_blocks=1,
    axes_dim=(8, 8, 8),
    guidance_embed=True,
)
TRUE_DOUBLE = ModelConfig(
    in_channels=16, vec_in_dim=16, context_in_dim=16, depth=1, depth_single_blocks=0
)
TRUE_SINGLE = ModelConfig(
    in_channels=16, vec_in_dim=16, context_in_dim=16, depth=0, depth_single_blocks=1
)
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
    """Return a model none of whose parameters is zero, one or of the others' scale."""
    torch.manual_seed(seed)
    with torch.device("meta"):  # spares the true widths a second initialisation
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


def inputs(
    config: ModelConfig, rows: int = 4, columns: int = 6, text: int = 7
) -> dict[str, Tensor]:
    torch.manual_seed(1)
    given = {
        "img": torch.randn(2, rows * columns, config.in_channels),
        "img_ids": image_ids(2 * rows, 2 * columns),
        "txt": torch.randn(2, text, config.context_in_dim),
        "txt_ids": text_ids(text),
        "timesteps": torch.rand(2),
        "y": torch.randn(2, config.vec_in_dim),
    }
    return given | ({"guidance": 4 * torch.rand(2)} if config.guidance_embed else {})


def linears(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield our linear layers and the names of diffusers' that hold their rows."""
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
    """Yield our norms of queries and keys, and the names of diffusers'."""
    for i, (stream, (_, _, (q, k), _, _)) in product(range(config.depth), STREAMS.items()):
        norm, other = f"double_blocks.{i}.{stream}_attn.norm", f"transformer_blocks.{i}.attn"
        yield from ((f"{norm}.query_norm", f"{other}.{q}"), (f"{norm}.key_norm", f"{other}.{k}"))
    for i in range(config.depth_single_blocks):
        norm, other = f"single_blocks.{i}.norm", f"single_transformer_blocks.{i}.attn"
        yield from (
            (f"{norm}.query_norm", f"{other}.norm_q"),
            (f"{norm}.key_norm", f"{other}.norm_k"),
        )


def renamed(ours: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights, or gradients, under diffusers' names: fused rows split, last halves swapped."""
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
    with torch.device("meta"):
        other = FluxTransformer2DModel(
            in_channels=config.in_channels,
            num_layers=config.depth,
            num_single_layers=config.depth_single_blocks,
            attention_head_dim=config.hidden_size // config.num_heads,
            num_attention_heads=config.num_heads,
            joint_attention_dim=config.context_in_dim,
            pooled_projection_dim=config.vec_in_dim,
            guidance_embeds=config.guidance_embed,
            axes_dims_rope=config.axes_dim,
        )
    other.load_state_dict(renamed(model.state_dict(), config), assign=True)
    return other


def run_reference(other: FluxTransformer2DModel, given: dict[str, Tensor]) -> Tensor:
    (prediction,) = other(
        hidden_states=given["img"],
        encoder_hidden_states=given["txt"],
        pooled_projections=given["y"],
        timestep=given["timesteps"],
        img_ids=given["img_ids"],
        txt_ids=given["txt_ids"],
        guidance=given.get("guidance"),
        return_dict=False,
    )
    return prediction


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    norm = theirs.norm().item()
    difference = (ours - theirs).norm().item()
    return difference / norm if norm else difference


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient; zero for what the loss does not depend on."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize(
    ("name", "config", "tensors", "parameters"),
    [
        ("schnell", ModelConfig(), 776, 11_891_178_560),
        ("dev", DEV, 780, 11_901_408_320),
    ],
)
def test_parameters_have_the_names_and_shapes_of_the_published_weights(
    name: str, config: ModelConfig, tensors: int, parameters: int
) -> None:
    with torch.device("meta"):
        state = Flux(config).state_dict()
    assert (len(state), sum(t.numel() for t in state.values())) == (tensors, parameters)
    listing = "".join(f"{key} {'x'.join(map(str, t.shape))}\n" for key, t in sorted(state.items()))
    golden = GOLDEN / f"flux_{name}_parameters.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(listing)
    assert listing == golden.read_text()


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        pytest.param(SMALL, (4, 6, 7), id="small"),
        pytest.param(GUIDED, (6, 4, 5), id="guidance"),
        pytest.param(TRUE_DOUBLE, (2, 3, 3), id="true-width-double-block"),
        pytest.param(TRUE_SINGLE, (2, 3, 3), id="true-width-single-block"),
    ],
)
def test_predictions_and_gradients_equal_those_of_diffusers(
    config: ModelConfig, tokens: tuple[int, int, int]
) -> None:
    model = random_model(config)
    other, given = reference(model, config), inputs(config, *tokens)
    ours, theirs = model(**given), run_reference(other, given)
    assert relative_error(ours, theirs) <= 1e-5

    ours.square().mean().backward()
    theirs.square().mean().backward()
    gradients = renamed({name: gradient(p) for name, p in model.named_parameters()}, config)
    errors = {n: relative_error(gradients[n], gradient(p)) for n, p in other.named_parameters()}
    assert errors.keys() == gradients.keys()
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}


def test_every_token_sees_every_other() -> None:
    model, given = random_model(SMALL).requires_grad_(False), inputs(SMALL)
    before = model(**given)
    for stream in ("img", "txt"):
        changed = given[stream].clone()
        changed[:, -1] += 1
        difference = (model(**given | {stream: changed}) - before).abs().amax(dim=(0, 2))
        assert difference.min() > 1e-4, f"a change of the last {stream} token is not seen by all"


def test_samples_of_a_batch_do_not_see_each_other() -> None:
    model, given = random_model(SMALL).requires_grad_(False), inputs(SMALL)
    ids = {"img_ids", "txt_ids"}
    alone = {name: value if name in ids else value[:1] for name, value in given.items()}
    torch.testing.assert_close(model(**alone), model(**given)[:1], rtol=1e-4, atol=1e-5)


def test_guidance_is_demanded_by_a_model_that_takes_it() -> None:
    given = inputs(GUIDED) | {"guidance": None}
    with pytest.raises(ValueError, match="needs guidance"):
        Flux(GUIDED)(**given)


def test_guidance_is_refused_by_a_model_without_it() -> None:
    with pytest.raises(ValueError, match="takes no guidance"):
        Flux(SMALL)(**inputs(SMALL), guidance=torch.ones(2))


def test_bfloat16_weights_give_a_bfloat16_prediction_near_the_float32_one() -> None:
    model, given = random_model(GUIDED).requires_grad_(False), inputs(GUIDED)
    exact = model(**given)
    rounded = model.to(torch.bfloat16)(**given)
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded.float(), exact) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_compile_into_one_graph(dtype: torch.dtype) -> None:
    model, given = random_model(SMALL).to(dtype).requires_grad_(False), inputs(SMALL)
    eager = model(**given)
    for block in (*model.double_blocks, *model.single_blocks):
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(model(**given), eager)
