"""Kontext and Fill beside diffusers, and ``fluxtrain sample`` with a picture."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.reference_model import random_model, reference, to_diffusers
from diffusers import (
    FluxControlPipeline,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxTransformer2DModel,
)
from PIL import Image
from tests.trainer import in_process
from tests.trainer.commands import fluxtrain
from tests.trainer.conditions.pairs import CONDITIONS, config, write_pairs
from tests.trainer.numerics.predictions import pipeline_of, relative_error
from tests.trainer.picture_cache.folders import noise
from tests.trainer.tiny_encoders import CHANNELS, TOKENS, WIDTH, write_encoders
from tests.trainer.tiny_model import random_flux, save_flux, tiny_model
from torch import Tensor, nn

from fluxtrain.adapter.opening import model_of
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.precision import EncodersConfig, SamplingConfig
from fluxtrain.data.dataset import Batch
from fluxtrain.encode.codec import condition_of
from fluxtrain.errors import EXIT_OK, EXIT_USAGE, DataError
from fluxtrain.model.flux import Flux, image_ids, pack, text_ids, unpack
from fluxtrain.model.loss import FlowLoss
from fluxtrain.sample.denoise import denoise
from fluxtrain.sample.prompts import chosen_prompts
from fluxtrain.weights import open_weights, write_weights
from fluxtrain.weights.reader import require_complete

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


def sample(
    weights: Path, roots: RunPaths, output: Path, *flags: str
) -> subprocess.CompletedProcess[str]:
    folders = ["--output", str(output), "--models", str(roots.models), "--data", str(roots.data)]
    prompt = ["--prompt=as paint", "--processes=1"]
    return fluxtrain("sample", str(weights), *prompt, *folders, *FLAGS, *flags)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_an_image_of_published_weights_has_the_shape_of_its_picture(
    condition: str, roots: RunPaths, tmp_path: Path
) -> None:
    model = tiny_model(vec_in_dim=WIDTH, context_in_dim=WIDTH, **CONDITIONS[condition])
    weights = save_flux(random_flux(model), tmp_path)
    control, mask = roots.data / "pairs/control/001.webp", roots.data / "pairs/mask/001.png"
    files = [f"--control={control}"] + [f"--mask={mask}"] * (condition == "fill")
    if condition != "kontext":
        assert sample(weights, roots, tmp_path / "without").returncode == EXIT_USAGE
    done = sample(weights, roots, tmp_path / "with", *files)
    assert done.returncode == EXIT_OK, done.stderr
    with Image.open(tmp_path / "with/samples/0000.png") as image:
        assert image.size == (64, 16)
        assert image.text["control"] == str(control)  # type: ignore[attr-defined]
        assert image.text.get("mask") == (str(mask) if condition == "fill" else None)  # type: ignore[attr-defined]


@pytest.mark.proof
def test_a_control_may_be_small_and_a_mask_is_one(roots: RunPaths, tmp_path: Path) -> None:
    small, grey = tmp_path / "small.png", tmp_path / "grey.png"
    Image.new("RGB", (3, 2), "red").save(small)
    Image.new("L", (3, 2), 100).save(grey)
    for condition, mask in (("kontext", None), ("fill", small), ("fill", grey)):
        model = tiny_model(vec_in_dim=WIDTH, context_in_dim=WIDTH, **CONDITIONS[condition])
        weights = save_flux(random_flux(model), tmp_path)
        files = [f"--control={small}"] + ([f"--mask={mask}"] if mask else [])
        done = sample(weights, roots, tmp_path / f"{condition} {mask == grey}", *files)
        assert done.returncode == (EXIT_USAGE if mask == grey else EXIT_OK), done.stderr
    assert f"{grey}: brightest pixel has 100" in done.stderr.replace("its control's ", "")


def test_a_run_of_canny_is_sampled_as_it_was_trained(roots: RunPaths, tmp_path: Path) -> None:
    """Its weights have the shapes of depth's."""
    run = config("depth", model={"condition": "canny"})
    paths = RunPaths(tmp_path / "out", roots.data, roots.models)
    in_process.train(run, paths)
    picture = f"--control={roots.data / 'pairs/control/001.webp'}"
    done = sample(paths.output, roots, tmp_path / "images", picture)
    assert done.returncode == EXIT_OK, done.stderr
    model_of(config("depth", initial_weights=str(paths.output)), roots.models)


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
    done = sample(paths.output, roots, tmp_path / "again")
    assert done.returncode == EXIT_OK, done.stderr


@pytest.mark.parametrize(
    ("condition", "prompt", "message"),
    [
        ("fill", "a house", "needs a picture and its mask"),
        ("fill", "a house --cn pairs/control/000.webp", "needs a picture and its mask"),
        ("fill", "a --cn pairs/control/000.webp --mask pairs/mask/001.png", "another aspect ratio"),
        ("depth", "a house", "needs a picture, such as --cn photo.png: model.condition is depth"),
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


SHIFT, SCALE, TEXT = 0.3, 0.7, 7
SIZES = [(16, 16), (12, 20), (6, 2), (10, 14)]
PIPELINES = {
    "kontext": FluxKontextPipeline,
    "fill": FluxFillPipeline,
    "depth": FluxControlPipeline,
}


class Codec(nn.Module):
    """An autoencoder of one matrix for each patch, for both sides."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.patch = nn.Conv2d(3, CHANNELS, 8, stride=8)
        self.config = SimpleNamespace(
            block_out_channels=[1] * 4,
            latent_channels=CHANNELS,
            shift_factor=SHIFT,
            scaling_factor=SCALE,
        )

    def encode(self, images: Tensor) -> Any:
        """Return (mean, log variance), which is also what diffusers expects."""
        mean = self.patch(images)

        class Both(tuple[Tensor, Tensor]):
            latent_dist = SimpleNamespace(sample=lambda generator: mean, mode=lambda: mean)

        return Both((mean, torch.zeros_like(mean)))


def run_of(condition: str, guided: bool = True, steps: int = 50) -> RunConfig:
    model = tiny_model(
        vec_in_dim=40, context_in_dim=48, guidance_embed=guided, **CONDITIONS[condition]
    )
    return RunConfig(
        preset="micro",
        task="sample",
        model=model,
        encoders=EncodersConfig(latent_shift=SHIFT, latent_scale=SCALE),
        sampling=SamplingConfig(num_steps=steps, time_shift="dev", cfg_scale=1.0),
    )


def pictures(size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """Return a picture and a mask for latents of ``size``."""
    height, width = (8 * side for side in size)
    mask = np.zeros((height, width), np.uint8)
    mask[height // 3 : height - 3, 5 : width // 2 + 2] = 255
    return noise(width, height), Image.fromarray(mask)


def tensor_of(image: Image.Image) -> Tensor:
    """Return ``image`` as the codec takes it."""
    pixels = torch.from_numpy(np.array(image.convert("RGB")))
    return pixels.permute(2, 0, 1)[None].float() / 127.5 - 1


def condition_for(kind: str, size: tuple[int, int]) -> Tensor:
    picture, mask = map(tensor_of, pictures(size))
    with torch.no_grad():
        return condition_of(Codec(), picture, mask if kind == "fill" else picture, kind)  # type: ignore[arg-type]


def reference_prediction(
    other: FluxTransformer2DModel, noisy: Tensor, condition: Tensor, text: Any, kind: str
) -> Tensor:
    """Return diffusers' prediction, whose inputs are put together as its pipelines do."""
    height, width = noisy.shape[2:]
    latents, hole = condition[:, :CHANNELS], condition[:, CHANNELS:]
    scaled = pack((latents - SHIFT) * SCALE)
    ids, img = image_ids(height, width), pack(noisy)
    if kind == "kontext":
        further = ids.clone()
        further[:, 0] = 1
        ids, img = torch.cat([ids, further]), torch.cat([img, scaled], 1)
    else:
        img = torch.cat([img, scaled, pack(hole)], 2)
    txt, vec, times, guidance = text
    (prediction,) = other(
        hidden_states=img,
        encoder_hidden_states=txt,
        pooled_projections=vec,
        timestep=times,
        img_ids=ids,
        txt_ids=text_ids(TEXT),
        guidance=guidance,
        return_dict=False,
    )
    return unpack(prediction[:, : height * width // 4], height, width)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("kind", CONDITIONS)
def test_the_loss_and_its_gradients_equal_diffusers(
    kind: str, guided: bool, size: tuple[int, int]
) -> None:
    run = run_of(kind, guided)
    flux = random_model(run.model)
    other, flow = reference(flux, run.model), FlowLoss(flux, run, torch.float32)
    torch.manual_seed(1)
    condition = condition_for(kind, size).repeat(2, 1, 1, 1)
    mean, eps = torch.randn(2, CHANNELS, *size), torch.randn(2, CHANNELS, *size)
    txt, vec, times = torch.randn(2, TEXT, 48), torch.randn(2, 40), torch.rand(2)
    guidance = torch.full((2,), run.training_guidance) if guided else None
    zeros, ones = torch.zeros(2), torch.ones(2)
    stored = torch.cat([mean, condition], 1)
    batch = Batch(
        mean=stored,
        logvar=torch.full_like(stored, 9.0),
        txt=txt,
        vec=vec,
        latent_noise=torch.zeros_like(mean),
        noise=eps,
        timesteps=times,
        weights=ones,
        keys=zeros.long(),
        dropped=zeros.bool(),
        indices=zeros.long(),
    )
    ours = flow(batch)
    clean, t = (mean - SHIFT) * SCALE, times[:, None, None, None]
    text = txt, vec, times, guidance
    noisy = (1 - t) * clean + t * eps
    predicted = reference_prediction(other, noisy, condition, text, kind)
    theirs = (predicted - (eps - clean)).square().mean(dim=(1, 2, 3))
    assert relative_error(ours, theirs) <= 1e-5
    ours.mean().backward()
    theirs.mean().backward()
    own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in flux.named_parameters()}
    gradients = to_diffusers(own, run.model)
    for name, parameter in other.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert relative_error(gradients[name], expected) <= 1e-5, name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", CONDITIONS)
@torch.no_grad()
def test_fifty_steps_equal_those_of_diffusers_pipelines(
    kind: str, size: tuple[int, int], tmp_path: Path
) -> None:
    run = run_of(kind)
    flux = random_flux(run.model)
    pipeline = pipeline_of(PIPELINES[kind], flux, tmp_path, "dev", Codec())
    torch.manual_seed(1)
    start, txt, vec = torch.randn(1, CHANNELS, *size), torch.randn(1, TEXT, 48), torch.randn(1, 40)
    height, width = (8 * side for side in size)
    picture, mask = pictures(size)
    given: dict[str, dict[str, Any]] = {
        "kontext": {"image": picture, "max_area": height * width, "_auto_resize": False},
        "fill": {"image": picture, "mask_image": mask},
        "depth": {"control_image": picture},
    }
    expected = pipeline(
        prompt_embeds=txt,
        pooled_prompt_embeds=vec,
        latents=pack(start),
        height=height,
        width=width,
        num_inference_steps=50,
        guidance_scale=3.5,
        output_type="latent",
        **given[kind],
    ).images
    empty, flow = (torch.zeros_like(txt), torch.zeros_like(vec)), FlowLoss(flux, run, torch.float32)
    condition = condition_for(kind, size)
    found = denoise(flow, start, (txt, vec), empty, run.sampling, condition=condition)
    actual = pack((found - SHIFT) * SCALE)
    error = (actual - expected).abs().max() / expected.abs().max()
    print(f"{kind}, {size}: largest relative difference {error:.1e}")
    assert error < 1e-5


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize(("kind", "names"), [("fill", "fill"), ("depth", "depth or canny")])
def test_weights_are_known_by_their_shapes(
    kind: str, names: str, layout: Any, tmp_path: Path
) -> None:
    run = run_of(kind)
    flux = random_flux(run.model)
    path = tmp_path / (f"{kind}.safetensors" if layout == "bfl" else "transformer")
    write_weights(open_weights(save_flux(flux, tmp_path)), path, layout, torch.float32)
    opened = open_weights(path)
    assert opened.model == run.model
    found = dict(opened.read(list(opened.shapes)))
    assert all(torch.equal(found[name], value) for name, value in flux.state_dict().items())
    assert Flux(run.model).img_in.weight.shape == (64, run.model.in_channels)
    step = f"set model.condition to {names} and model.in_channels to {run.model.in_channels}"
    with pytest.raises(DataError, match=step):
        require_complete(opened, run_of("kontext").model)
