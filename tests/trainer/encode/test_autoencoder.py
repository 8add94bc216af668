"""The autoencoder compared with diffusers', and the demo's of patches."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import save, save_file
from tests.trainer.numerics.predictions import relative_error
from torch import Tensor

from fluxtrain.contract.run.precision import EncodersConfig
from fluxtrain.encode import codec
from fluxtrain.encode.codec import (
    Autoencoder,
    PatchAutoencoder,
    load_autoencoder,
    load_encoder,
    load_patch_autoencoder,
    save_patch_autoencoder,
)
from fluxtrain.errors import DataError
from fluxtrain.prepare.fit_autoencoder import (
    FitSettings,
    fit_patch_autoencoder,
    init_from_principal_components,
    standardize_latents,
    to_images,
)

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden" / "autoencoder_parameters.txt"
WIDTH = 32
RENAMED = [  # ours, then diffusers'; the first match counts
    ("mid.block_1", "mid_block.resnets.0"),
    ("mid.block_2", "mid_block.resnets.1"),
    ("mid.attn_1.norm", "mid_block.attentions.0.group_norm"),
    ("mid.attn_1.q", "mid_block.attentions.0.to_q"),
    ("mid.attn_1.k", "mid_block.attentions.0.to_k"),
    ("mid.attn_1.v", "mid_block.attentions.0.to_v"),
    ("mid.attn_1.proj_out", "mid_block.attentions.0.to_out.0"),
    ("norm_out", "conv_norm_out"),
    *((f"down.{i}.block", f"down_blocks.{i}.resnets") for i in range(4)),
    *((f"down.{i}.downsample", f"down_blocks.{i}.downsamplers.0") for i in range(4)),
    *((f"up.{i}.block", f"up_blocks.{3 - i}.resnets") for i in range(4)),
    *((f"up.{i}.upsample", f"up_blocks.{3 - i}.upsamplers.0") for i in range(4)),
    ("nin_shortcut", "conv_shortcut"),
]


def random_autoencoder() -> Autoencoder:
    torch.manual_seed(0)
    autoencoder = Autoencoder(width=WIDTH).eval().requires_grad_(False)
    for parameter in autoencoder.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.2, 0.8)
    return autoencoder


def saved(path: Path, **changes: Tensor | None) -> Path:
    """Write a narrow autoencoder with tensors replaced, added or, if None, removed; ``__`` is a dot."""
    state: dict[str, Tensor | None] = dict(random_autoencoder().state_dict())
    state.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    return path


def diffusers_name(name: str) -> str:
    for ours, theirs in RENAMED:
        name = name.replace(ours, theirs, 1)
    return name


def reference(autoencoder: Autoencoder) -> AutoencoderKL:
    """Return diffusers' model with the same weights, in float64 so that its rounding is negligible."""
    model = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[WIDTH, 2 * WIDTH, 4 * WIDTH, 4 * WIDTH],
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    state = {diffusers_name(name): tensor for name, tensor in autoencoder.state_dict().items()}
    linear = {  # its attention has linear projections
        name: tensor.flatten(1) if ".attentions." in name and tensor.dim() == 4 else tensor
        for name, tensor in state.items()
    }
    model.load_state_dict(linear)
    return model.double().eval().requires_grad_(False)


def test_parameters_have_the_names_and_shapes_of_the_published_weights() -> None:
    with torch.device("meta"):
        state = Autoencoder().state_dict()
    assert (len(state), sum(t.numel() for t in state.values())) == (244, 83_819_683)
    listing = "".join(f"{key} {'x'.join(map(str, t.shape))}\n" for key, t in sorted(state.items()))
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(listing)
    assert listing == GOLDEN.read_text()


def test_moments_and_images_equal_those_of_diffusers() -> None:
    autoencoder = random_autoencoder()
    theirs = reference(autoencoder)
    images, latents = 2 * torch.rand(2, 3, 48, 64) - 1, torch.randn(2, 16, 6, 8)
    mean, logvar = autoencoder.encode(images)
    assert mean.shape == logvar.shape == (2, 16, 6, 8)
    moments = torch.cat([mean, logvar], dim=1)
    assert relative_error(moments, theirs.encoder(images.double())) <= 1e-5
    decoded = autoencoder.decode(latents)
    assert decoded.shape == (2, 3, 48, 64)
    assert relative_error(decoded, theirs.decode(latents.double()).sample) <= 1e-5


def test_a_saved_autoencoder_loads_frozen(tmp_path: Path) -> None:
    loaded = load_autoencoder(saved(tmp_path / "ae.safetensors"), width=WIDTH)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    latents = torch.randn(1, 16, 2, 2)
    assert torch.equal(loaded.decode(latents), random_autoencoder().decode(latents))


@pytest.mark.parametrize(("lacks", "tolerance"), [(True, 3e-3), (False, 3e-2)])
def test_a_cpu_without_bfloat16_encodes_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: bool, tolerance: float
) -> None:
    """There a convolution in bfloat16 takes a hundred times as long; encodings are rounded to it."""
    monkeypatch.setattr(codec, "lacks_bfloat16", lambda device: lacks)
    saved(tmp_path / "ae.safetensors")
    encoders = EncodersConfig(autoencoder="ae.safetensors")
    loaded = load_encoder(encoders, tmp_path, torch.device("cpu"))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32 if lacks else torch.bfloat16}
    images = (2 * torch.rand(1, 3, 16, 16) - 1).bfloat16()
    moments = torch.cat(loaded.encode(images), dim=1)
    assert moments.dtype == torch.bfloat16
    theirs = reference(random_autoencoder()).encoder(images.double())
    assert relative_error(moments, theirs) <= tolerance


@pytest.mark.parametrize("lacks", [True, False])
def test_the_patch_autoencoder_gives_both_moments_in_the_type_of_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    monkeypatch.setattr(codec, "lacks_bfloat16", lambda device: lacks)
    save_patch_autoencoder(tmp_path / "patch.safetensors", PatchAutoencoder())
    encoders = EncodersConfig(autoencoder="patch.safetensors", autoencoder_kind="patch")
    loaded = load_encoder(encoders, tmp_path, torch.device("cpu"))
    moments = loaded.encode(torch.zeros(1, 3, 16, 16, dtype=torch.bfloat16))
    assert [each.dtype for each in moments] == [torch.bfloat16] * 2


def test_half_precision_weights_load_as_float32(tmp_path: Path) -> None:
    halves = {name: t.bfloat16() for name, t in random_autoencoder().state_dict().items()}
    save_file(halves, tmp_path / "ae.safetensors")
    loaded = load_autoencoder(tmp_path / "ae.safetensors", width=WIDTH)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder__conv_in__bias": None}, "tensor decoder.conv_in.bias is missing"),
        (
            {"decoder__conv_in__bias": torch.zeros(7)},
            r"decoder.conv_in.bias has shape \[7\], expected \[128\]",
        ),
        ({"quant_conv__weight": torch.zeros(2)}, "tensor 'quant_conv.weight' is unknown"),
    ],
    ids=["missing", "shape", "unknown"],
)
def test_the_error_names_the_first_wrong_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    path = saved(tmp_path / "ae.safetensors", **changes)
    with pytest.raises(DataError, match=rf"ae\.safetensors: .*{message}"):
        load_autoencoder(path, width=WIDTH)


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04K\x01.", b"\xff" * 64, "truncated"])
def test_anything_but_a_whole_safetensors_file_is_an_error(
    tmp_path: Path, content: bytes | str | None
) -> None:
    path = tmp_path / "ae.safetensors"
    if content is not None:
        whole = saved(path).read_bytes() if content == "truncated" else b""
        path.write_bytes(content if isinstance(content, bytes) else whole[:-1])
    message = "missing" if content is None else "not a whole safetensors file"
    with pytest.raises(DataError, match=rf"ae\.safetensors: {message}"):
        load_autoencoder(path, width=WIDTH)


FEW_STEPS = FitSettings(steps=12, decoder_steps=0, batch_size=8)


def discs(count: int = 24, side: int = 64) -> torch.Tensor:
    """Return different images of a coloured disc with a black outline on white."""
    rng = torch.Generator().manual_seed(1)
    axis = torch.arange(side, dtype=torch.float32)
    images = torch.full((count, 3, side, side), 255, dtype=torch.uint8)
    for image in images:
        x, y, radius = (torch.rand(3, generator=rng) * 20 + torch.tensor([22, 22, 8])).tolist()
        distance = ((axis[:, None] - y) ** 2 + (axis - x) ** 2).sqrt()
        colour = torch.randint(0, 256, (3,), generator=rng, dtype=torch.uint8)
        image[:, distance < radius] = colour[:, None]
        image[:, (distance - radius).abs() < 1.5] = 0
    return images


@pytest.fixture(scope="module")
def fitted() -> PatchAutoencoder:
    return fit_patch_autoencoder(discs(), FEW_STEPS)


def psnr(autoencoder: PatchAutoencoder, pixels: torch.Tensor) -> float:
    """Return the peak signal-to-noise ratio of a round trip, in dB."""
    images = to_images(pixels)
    with torch.no_grad():
        back = autoencoder.decode(autoencoder.encode(images)[0]).clamp(-1, 1)
    return float(10 * torch.log10(4 / (back - images).square().mean()))


def test_latents_have_an_eighth_of_the_image_size() -> None:
    images = torch.rand(2, 3, 64, 48) * 2 - 1
    mean, logvar = PatchAutoencoder(channels=16).encode(images)
    assert mean.shape == logvar.shape == (2, 16, 8, 6)
    assert PatchAutoencoder(channels=16).decode(mean).shape == images.shape


def test_initialization_is_the_best_linear_code_of_the_patches() -> None:
    pixels = discs()
    autoencoder = PatchAutoencoder(channels=16)
    init_from_principal_components(autoencoder, pixels)
    patches = torch.nn.functional.unfold(to_images(pixels), 8, stride=8)
    patches = patches.transpose(1, 2).flatten(0, 1)
    centred = patches - patches.mean(0)
    residual = torch.linalg.svdvals(centred)[16:].square().sum() / centred.numel()
    images = to_images(pixels)
    with torch.no_grad():
        error = (autoencoder.decode(autoencoder.encode(images)[0]) - images).square().mean()
    torch.testing.assert_close(error, residual, rtol=1e-3, atol=1e-6)


@pytest.mark.proof
def test_fitting_is_better_than_the_linear_code() -> None:
    pixels = discs()
    linear = PatchAutoencoder()
    init_from_principal_components(linear, pixels)
    assert (
        psnr(fit_patch_autoencoder(pixels, FitSettings(steps=100, batch_size=8)), pixels)
        > psnr(linear, pixels) + 0.3
    )


def test_latents_have_mean_zero_and_variance_one(fitted: PatchAutoencoder) -> None:
    mean, _ = fitted.encode(to_images(discs()))
    torch.testing.assert_close(mean.mean((0, 2, 3)), torch.zeros(16), rtol=0, atol=1e-4)
    assert mean.std().item() == pytest.approx(1, abs=1e-3)


def test_standardizing_latents_does_not_change_images() -> None:
    pixels = discs()
    autoencoder = PatchAutoencoder()
    init_from_principal_components(autoencoder, pixels)
    before = psnr(autoencoder, pixels)
    standardize_latents(autoencoder, pixels)
    assert psnr(autoencoder, pixels) == pytest.approx(before, abs=1e-3)


def test_fitting_is_deterministic(fitted: PatchAutoencoder) -> None:
    again = fit_patch_autoencoder(discs(), FEW_STEPS).state_dict()
    for name, tensor in fitted.state_dict().items():
        torch.testing.assert_close(tensor, again[name], msg=name)


def test_a_saved_autoencoder_is_loaded(tmp_path: Path, fitted: PatchAutoencoder) -> None:
    path = tmp_path / "models" / "autoencoder.safetensors"
    save_patch_autoencoder(path, fitted)
    latents = torch.randn(2, 16, 8, 8)
    loaded = load_patch_autoencoder(path)
    torch.testing.assert_close(loaded.decode(latents), fitted.decode(latents))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_error_for_a_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fluxtrain prepare openmoji"):
        load_patch_autoencoder(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x80\x04}q\x00.", save({"weight": torch.zeros(3)})]
)
def test_anything_but_a_patch_autoencoder_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "autoencoder.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match="does not hold a patch autoencoder"):
        load_patch_autoencoder(path)


def test_fitting_the_decoder_alone_keeps_encodings_and_evens_noisy_latents() -> None:
    pixels = discs()
    images = to_images(pixels)
    before = fit_patch_autoencoder(pixels, FEW_STEPS)
    after = fit_patch_autoencoder(pixels, replace(FEW_STEPS, decoder_steps=12))
    latents, same = (each.encode(images)[0] for each in (before, after))
    assert torch.equal(latents, same)
    noise = 0.5 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    errors = [
        (each.decode(latents + noise) - images).square().mean().item() for each in (before, after)
    ]
    assert errors[1] < errors[0]
