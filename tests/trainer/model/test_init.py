"""Initial weights: the distribution of every parameter, and their dependence on seed and name only."""

import math

import pytest
import torch
from tests.trainer.tiny_model import initialised, tiny_model

from fluxtrain.model.flux import image_ids, text_ids
from fluxtrain.model.parameters import initial_value

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
