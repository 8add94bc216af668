"""The transformer: parameters, initial weights, predictions and gradients compared with diffusers'."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.reference_model import random_model, reference, to_diffusers
from tests.trainer.numerics.predictions import inputs, relative_error, run_reference
from tests.trainer.tiny_model import SMALL, initialised, tiny_model
from torch import Tensor

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.contract.run.presets import FLOAT32_EPS
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.model import flux
from fluxtrain.model.blocks import QKNorm, RMSNorm, Rotation
from fluxtrain.model.flux import Flux, image_ids, text_ids
from fluxtrain.model.parameters import initial_value

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden"
DEV = ModelConfig(guidance_embed=True)
GUIDED = tiny_model(vec_in_dim=40, context_in_dim=48, guidance_embed=True)
TRUE_DOUBLE, TRUE_SINGLE = (
    ModelConfig(
        in_channels=16, vec_in_dim=16, context_in_dim=16, depth=n, depth_single_blocks=1 - n
    )
    for n in (1, 0)
)


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient; zero for what the loss does not depend on."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize(
    ("name", "config", "tensors", "parameters"),
    [("schnell", ModelConfig(), 776, 11_891_178_560), ("dev", DEV, 780, 11_901_408_320)],
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
        pytest.param(TRUE_DOUBLE, (2, 3, 3), id="true-width-double", marks=pytest.mark.slow),
        pytest.param(TRUE_SINGLE, (2, 3, 3), id="true-width-single", marks=pytest.mark.slow),
    ],
)
def test_predictions_and_gradients_equal_diffusers(
    config: ModelConfig, tokens: tuple[int, int, int]
) -> None:
    model = random_model(config)
    other, batch = reference(model, config), inputs(config, *tokens)
    ours, theirs = model(**batch), run_reference(other, batch)
    assert relative_error(ours, theirs) <= 1e-5

    ours.square().mean().backward()
    theirs.square().mean().backward()
    gradients = to_diffusers({name: gradient(p) for name, p in model.named_parameters()}, config)
    errors = {n: relative_error(gradients[n], gradient(p)) for n, p in other.named_parameters()}
    assert errors.keys() == gradients.keys()
    assert {name: error for name, error in errors.items() if error > 1e-5} == {}


def test_every_token_attends_to_every_other() -> None:
    model, batch = random_model(SMALL).requires_grad_(False), inputs(SMALL)
    before = model(**batch)
    for stream in ("img", "txt"):
        changed = batch[stream].clone()
        changed[:, -1] += 1
        difference = (model(**batch | {stream: changed}) - before).abs().amax(dim=(0, 2))
        assert difference.min() > 1e-4, f"a change of the last {stream} token does not reach all"


def test_the_rotation_is_computed_again_only_for_other_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = random_model(SMALL).requires_grad_(False), inputs(SMALL)
    calls = list[int]()
    computed = flux.rotation

    def counted(ids: Tensor, *args: Any) -> Rotation:
        calls.append(len(ids))
        return computed(ids, *args)

    monkeypatch.setattr(flux, "rotation", counted)
    first, again = model(**batch), model(**batch)
    assert torch.equal(first, again)
    assert len(calls) == 1
    moved = batch | {"img_ids": batch["img_ids"] + 1}
    assert not torch.equal(model(**moved), first)
    other = inputs(SMALL, rows=2, columns=2)
    assert torch.equal(model(**other), random_model(SMALL).requires_grad_(False)(**other))
    assert torch.equal(model(**batch), first)


def test_samples_of_a_batch_are_independent() -> None:
    model, batch = random_model(SMALL).requires_grad_(False), inputs(SMALL)
    ids = {"img_ids", "txt_ids"}
    alone = {name: value if name in ids else value[:1] for name, value in batch.items()}
    torch.testing.assert_close(model(**alone), model(**batch)[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "guidance", "message"),
    [(GUIDED, None, "needs guidance"), (SMALL, torch.ones(2), "takes no guidance")],
)
def test_guidance_is_given_if_and_only_if_the_model_takes_it(
    config: ModelConfig, guidance: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Flux(config)(**inputs(config) | {"guidance": guidance})


def test_bfloat16_predictions_are_near_float32_ones() -> None:
    model, batch = random_model(GUIDED).requires_grad_(False), inputs(GUIDED)
    exact = model(**batch)
    rounded = model.to(torch.bfloat16)(**batch)
    assert rounded.dtype == torch.bfloat16
    assert relative_error(rounded.float(), exact) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_compile_into_one_graph(dtype: torch.dtype) -> None:
    model, batch = random_model(GUIDED).to(dtype).requires_grad_(False), inputs(GUIDED)
    eager = model(**batch)
    for block in (*model.double_blocks, *model.single_blocks):
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(model(**batch), eager)


@pytest.mark.parametrize("eps", [1e-6, FLOAT32_EPS])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
def test_queries_and_keys_are_normalised_as_torch_does(eps: float, size: float) -> None:
    """The epsilon of MLPerf's reference is what torch takes if none is given."""
    x = size * torch.randn(2, 3, 5, 16)
    theirs = torch.nn.RMSNorm(16, eps=None if eps == FLOAT32_EPS else eps)
    with torch.no_grad():
        queries, keys = QKNorm(16, eps)(x, -x)
        torch.testing.assert_close(queries, theirs(x))
        torch.testing.assert_close(keys, theirs(-x))


def test_every_norm_of_queries_and_keys_has_the_epsilon_of_the_config() -> None:
    config = resolve({"preset": "micro", "model": {"qk_norm_eps": 1e-4}}).model
    norms = [part for part in Flux(config).modules() if isinstance(part, RMSNorm)]
    assert [norm.eps for norm in norms] == [1e-4] * 6


CONFIG = tiny_model(
    vec_in_dim=96,
    context_in_dim=80,
    hidden_size=128,
    num_heads=4,
    depth=2,
    depth_single_blocks=2,
    guidance_embed=True,
)
XAVIER = {"img_in", "txt_in", "qkv", "proj", "0", "2", "linear1", "linear2"}
QKV = "double_blocks.0.img_attn.qkv.weight"


def rule(name: str) -> str:
    """Return the distribution of ``name`` in the table of model/parameters.py."""
    *path, kind = name.split(".")
    if kind == "scale":
        return "one"
    if kind == "bias" or path[0] == "final_layer" or path[-1] == "lin":
        return "zero"
    if path[0] in ("time_in", "vector_in", "guidance_in"):
        return "normal"
    assert path[-1] in XAVIER
    return "xavier"


def test_every_parameter_has_the_documented_distribution() -> None:
    seen = set()
    for name, parameter in initialised(CONFIG).named_parameters():
        row = rule(name)
        seen.add(row)
        spread = parameter.std().item()
        if row in ("one", "zero"):
            assert (parameter == (row == "one")).all(), name
        elif row == "normal":
            assert spread == pytest.approx(0.02, rel=0.03), name
            assert parameter.abs().max() > 0.06, f"{name}: too short tails for a normal"
        else:
            bound = math.sqrt(6 / sum(parameter.shape))
            assert 0.99 * bound < parameter.abs().max() <= bound, name
            assert spread == pytest.approx(bound / math.sqrt(3), rel=0.03), name
    assert seen == {"one", "zero", "normal", "xavier"}


@pytest.mark.parametrize(
    ("name", "shape", "bound"),
    [
        ("img_in.weight", (3072, 64), 0.04374),
        ("txt_in.weight", (3072, 4096), 0.02893),
        (QKV, (9216, 3072), 0.02210),
        ("double_blocks.18.txt_attn.proj.weight", (3072, 3072), 0.03125),
        ("double_blocks.18.txt_mlp.2.weight", (3072, 12288), 0.01976),
        ("single_blocks.37.linear1.weight", (21504, 3072), 0.01562),
        ("single_blocks.37.linear2.weight", (3072, 15360), 0.01804),
    ],
)
def test_bounds_at_true_width_are_those_of_the_fused_matrices(
    name: str, shape: tuple[int, int], bound: float
) -> None:
    assert initial_value(name, torch.Size(shape), 0).abs().max() == pytest.approx(bound, abs=1e-5)


def test_the_first_prediction_is_exactly_zero() -> None:
    prediction = initialised(CONFIG)(
        img=torch.randn(2, 6, CONFIG.in_channels),
        img_ids=image_ids(4, 6),
        txt=torch.randn(2, 5, CONFIG.context_in_dim),
        txt_ids=text_ids(5),
        timesteps=torch.rand(2),
        y=torch.randn(2, CONFIG.vec_in_dim),
        guidance=torch.rand(2),
    )
    assert not prediction.any()


def test_a_value_depends_on_seed_name_and_shape_only() -> None:
    shape = torch.Size((24, 8))
    value = initial_value(QKV, shape, 5)
    torch.manual_seed(99)
    torch.rand(7)
    initial_value("img_in.weight", shape, 5)
    assert torch.equal(initial_value(QKV, shape, 5), value)


def test_the_global_generator_is_not_used() -> None:
    before = torch.get_rng_state()
    initial_value(QKV, torch.Size((24, 8)), 5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "seed"), [(QKV.replace("0", "1"), 5), (QKV, 6)])
def test_another_name_or_seed_gives_an_independent_value(name: str, seed: int) -> None:
    shape = torch.Size((64, 64))
    pair = torch.stack([initial_value(QKV, shape, 5), initial_value(name, shape, seed)])
    assert abs(torch.corrcoef(pair.flatten(1))[0, 1]) < 0.1


def test_a_model_has_the_initial_values() -> None:
    for name, parameter in initialised(CONFIG, seed=3).named_parameters():
        assert torch.equal(parameter, initial_value(name, parameter.shape, 3)), name
