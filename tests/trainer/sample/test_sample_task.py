"""Sampling prompts: equal to diffusers' pipeline, the same for any number of ranks, and user errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from tests.trainer.commands import fluxtrain
from tests.trainer.numerics.predictions import pipeline_of
from tests.trainer.tiny_encoders import SIDE, TOKENS, write_encoders
from tests.trainer.tiny_model import random_flux, save_flux, tiny_model

from fluxtrain.cli import main
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import EncodersConfig, SamplingConfig
from fluxtrain.errors import EXIT_OK, EXIT_USAGE
from fluxtrain.model.flux import pack
from fluxtrain.model.loss import FlowLoss
from fluxtrain.sample.denoise import denoise

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("size", "steps"), [((16, 16), 7), ((24, 24), 4), ((12, 20), 5)])
@pytest.mark.parametrize("shift", ["none", "dev"])
@torch.no_grad()
def test_latents_equal_those_of_diffusers_pipeline(
    shift: Any, steps: int, size: tuple[int, int], tmp_path: Path
) -> None:
    model = tiny_model(vec_in_dim=40, context_in_dim=48, guidance_embed=shift == "dev")
    flux = random_flux(model)
    pipeline = pipeline_of(FluxPipeline, flux, tmp_path, shift)
    torch.manual_seed(1)
    noise, txt, vec = torch.randn(2, 4, *size), torch.randn(2, 7, 48), torch.randn(2, 40)
    expected = pipeline(
        prompt_embeds=txt,
        pooled_prompt_embeds=vec,
        latents=pack(noise),
        height=8 * size[0],
        width=8 * size[1],
        num_inference_steps=steps,
        guidance_scale=3.5,
        output_type="latent",
    ).images
    config = RunConfig(
        preset="micro",
        model=model,
        encoders=EncodersConfig(latent_shift=0.0, latent_scale=1.0),
        sampling=SamplingConfig(num_steps=steps, time_shift=shift, cfg_scale=1.0),
    )
    empty = (torch.zeros(2, 7, 48), torch.zeros(2, 40))
    loss = FlowLoss(flux, config, torch.float32)
    actual = pack(denoise(loss, noise, (txt, vec), empty, config.sampling))
    error = (actual - expected).abs().max() / expected.abs().max()
    print(f"{shift}, {steps} steps, {size}: largest relative difference {error:.1e}")
    assert error < 1e-5


FLAGS = [
    f"--data.image_size={SIDE}",
    f"--data.latent_size={SIDE // 8}",
    f"--data.text_length={TOKENS}",
    "--logging.mlperf.division=open",
    "--seed=1234",
    "--precision.compute=float32",
    "--encoders.precision=float32",
]
PROMPTS = ["a red circle", "a blue line", "nobody's\tü"]


def sample(folder: Path, output: str, *flags: str) -> int:
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    folders = ["--output", str(folder / output), "--models", str(folder / "models")]
    weights = str(folder / "weights.safetensors")
    return fluxtrain("sample", weights, *prompts, *folders, *FLAGS, *flags).returncode


def test_images_hold_their_settings_and_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path,
) -> None:
    save_flux(random_flux(tiny_model()), tmp_path)
    write_encoders(tmp_path / "models")
    assert sample(tmp_path, "one", "--processes=1") == EXIT_OK
    first = tmp_path / "one" / "samples" / "0000.png"
    with Image.open(first) as image:
        assert image.size == (SIDE, SIDE)
        assert image.text["prompt"] == PROMPTS[0]
        assert (image.text["seed"], image.text["steps"]) == ("1234", "4")
    with Image.open(tmp_path / "one" / "samples" / "0002.png") as image:
        assert image.text["prompt"] == PROMPTS[2]
    for processes in (2, 5):
        output = f"on {processes}"
        assert sample(tmp_path, output, f"--processes={processes}") == EXIT_OK
        for index in range(3):
            name = f"samples/{index:04d}.png"
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / output / name).read_bytes()
    first.unlink()
    assert sample(tmp_path, "one", "--processes=1") == EXIT_OK, "a missing image is sampled again"
    assert first.exists()
    kept = first.read_bytes()
    assert sample(tmp_path, "one", "--sampling.num_steps=2") == EXIT_OK, (
        "other settings, other images"
    )
    assert first.read_bytes() != kept
    assert (tmp_path / "one/samples_1/0000.png").read_bytes() == kept
    assert sample(tmp_path, "one") == EXIT_OK, "the weights of a run may be newer"
    assert (tmp_path / "one/samples_2/0000.png").exists()
    (tmp_path / "one/config.json").write_text('{"task": "train"}')
    assert sample(tmp_path, "one") == EXIT_USAGE, "a run is not overwritten"


def test_user_errors_are_raised_before_sampling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_flux(random_flux(tiny_model()), tmp_path)
    weights = str(tmp_path / "weights.safetensors")
    output = ["--output", str(tmp_path / "out"), "--models", str(tmp_path)]
    mistakes = [
        ([weights, *output], "--prompt"),
        ([weights, "--prompts", str(tmp_path / "none.txt"), *output], "none.txt: cannot be read"),
        ([str(tmp_path / "none"), "--prompt=x", *output], "missing"),
        (
            ["a.yaml", "--prompt=x", *output],
            "a.yaml: holds no weights; name the output folder of its",
        ),
        *(
            ([weights, "--prompt=x", *output, *options], message)
            for options, message in (
                (FLAGS, "the encoders need it"),
                ([*FLAGS, "--preset=dev-lora"], "the encoders need it"),
                (FLAGS, "`fluxtrain prepare encoders --from hf://black-"),
                (["--steps=4"], "--steps: is another tool's option; give --sam"),
                (["--width", "512"], "give the size in the prompt: 'TEXT --w"),
                (["--lora=a.safetensors"], "option; give --adapter FILE"),
                (["--strength=2"], "--strength: got 2.0; needs --adapter"),
                (["--sampling.num_steps=0"], "sampling.num_steps"),
            )
        ),
    ]
    for arguments, message in mistakes:
        assert main(["sample", *arguments]) == EXIT_USAGE
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "samples").exists()
