"""``fluxtrain sample`` with a picture: of a run's weights and of published ones, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from tests.trainer import in_process
from tests.trainer.conditions.pairs import CONDITIONS, config, write_pairs
from tests.trainer.tiny_encoders import TOKENS, WIDTH, write_encoders
from tests.trainer.tiny_model import random_flux, save_flux, tiny_model

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.sample.prompts import chosen_prompts

FLAGS = [
    "--data.image_size=32",
    f"--data.text_length={TOKENS}",
    "--logging.mlperf.division=open",
    "--precision.compute=float32",
    "--encoders.precision=float32",
    "--sampling.num_steps=2",
]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return roots with pairs, whose second picture is twice as wide as high, and encoders."""
    root = tmp_path_factory.mktemp("roots")
    write_pairs(root / "data/pairs", 3)
    (root / "models").mkdir()
    return RunPaths(root / "out", root / "data", write_encoders(root / "models"))


def sample(weights: Path, roots: RunPaths, output: Path, *flags: str) -> int:
    folders = ["--output", str(output), "--models", str(roots.models), "--data", str(roots.data)]
    prompt = ["--prompt=as paint", "--processes=1"]
    return main(["sample", str(weights), *prompt, *folders, *FLAGS, *flags])


@pytest.mark.parametrize("condition", CONDITIONS)
def test_an_image_of_published_weights_has_the_shape_of_its_picture(
    condition: str, roots: RunPaths, tmp_path: Path
) -> None:
    model = tiny_model(vec_in_dim=WIDTH, context_in_dim=WIDTH, **CONDITIONS[condition])
    weights = save_flux(random_flux(model), tmp_path)
    control, mask = roots.data / "pairs/control/001.webp", roots.data / "pairs/mask/001.png"
    files = [f"--control={control}"] + [f"--mask={mask}"] * (condition == "fill")
    if condition == "fill":
        assert sample(weights, roots, tmp_path / "without") == EXIT_USAGE
    assert sample(weights, roots, tmp_path / "with", *files) == EXIT_OK
    with Image.open(tmp_path / "with/samples/0000.png") as image:
        assert image.size == (64, 16)
        assert image.text["control"] == str(control)  # type: ignore[attr-defined]
        assert image.text.get("mask") == (str(mask) if condition == "fill" else None)  # type: ignore[attr-defined]


def test_a_control_may_be_small_and_a_mask_is_one(
    roots: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, grey = tmp_path / "small.png", tmp_path / "grey.png"
    Image.new("RGB", (3, 2), "red").save(small)
    Image.new("L", (3, 2), 100).save(grey)
    for condition, mask in (("kontext", None), ("fill", small), ("fill", grey)):
        model = tiny_model(vec_in_dim=WIDTH, context_in_dim=WIDTH, **CONDITIONS[condition])
        weights = save_flux(random_flux(model), tmp_path)
        files = [f"--control={small}"] + ([f"--mask={mask}"] if mask else [])
        code = EXIT_USAGE if mask == grey else EXIT_OK
        assert sample(weights, roots, tmp_path / f"{condition} {mask == grey}", *files) == code
    assert f"{grey}: brightest pixel has 100" in capsys.readouterr().err.replace(
        "its control's ", ""
    )


def test_prompts_of_a_run_may_have_pictures(roots: RunPaths, tmp_path: Path) -> None:
    prompts = [
        "plain",
        "edited --cn pairs/control/000.webp",
        "large --cn pairs/control/000.webp --w 64 --h 32",
    ]
    sampling = {
        "prompts": prompts,
        "num_prompts": 0,
        "num_steps": 2,
        "cfg_scale": 2.0,
        "at_end": True,
    }
    run = config("kontext", sampling=sampling)
    paths = RunPaths(tmp_path / "out", roots.data, roots.models)
    in_process.train(run, paths)
    sizes = []
    for index in range(3):
        with Image.open(tmp_path / f"out/samples/step_0000003/{index:02d}.png") as image:
            sizes.append(image.size)
    assert sizes == [(32, 32), (32, 32), (64, 32)]
    assert sorted(path.name for path in (tmp_path / "out/samples/originals").iterdir()) == [
        "01.png",
        "02.png",
    ]
    assert sample(paths.output, roots, tmp_path / "again") == EXIT_OK


@pytest.mark.parametrize(
    ("condition", "prompt", "message"),
    [
        ("fill", "a house", "needs a picture and its mask"),
        ("fill", "a house --cn pairs/control/000.webp", "needs a picture and its mask"),
        ("fill", "a --cn pairs/control/000.webp --mask pairs/mask/001.png", "another aspect ratio"),
        ("kontext", "a --mask pairs/mask/001.png", "model.condition is kontext, not fill"),
        ("kontext", "a --cn pairs/none.png", "cannot be read"),
        ("kontext", "a --cn pairs/target/000.txt", "no picture in a format"),
        ("kontext", "a --flub 3", "--flub is unknown"),
    ],
)
def test_a_wrong_picture_of_a_prompt_is_named(
    condition: str, prompt: str, message: str, roots: RunPaths
) -> None:
    run = config(
        condition,
        sampling={
            "prompts": [
                "fine --cn pairs/control/000.webp" if condition == "kontext" else prompt,
                prompt,
            ]
        },
    )
    with pytest.raises(Exception, match=message) as error:
        chosen_prompts(run, roots.data)
    assert "spec.run.sampling.prompts[" in str(error.value)
