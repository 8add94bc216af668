"""The autoencoders, FLUX's and a small one of flat images: images to mean and log variance, and back.

Layers and names of FLUX's are those of BFL's ``ae.safetensors``: four levels, each half as large as the
one before. The small one is a linear code of 8 x 8 patches, corrected by convolutions; its linear half
is computed (principal components), so fitting the rest takes seconds.

Axes: b batch, H W image, h w latent (an eighth of the image), ch latent channels, c channels, y x
pixels.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (the usual name)

from fluxtrain.contract.run.model import CONDITIONS
from fluxtrain.contract.run.precision import EncodersConfig
from fluxtrain.errors import DataError
from fluxtrain.model.blocks import any_attention
from fluxtrain.runtime.devices import lacks_bfloat16
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.safetensors import identify, open_safetensors, read_shapes

WIDTH = 128
"""Channels at full resolution in the published weights."""
LATENT_CHANNELS = 16
_MULTIPLES = (1, 2, 4, 4)  # channels of each level over the width
_BLOCKS = 2  # residual blocks per level; the decoder has one more

Images = Float[Tensor, "b 3 H W"]
Latents = Float[Tensor, "b ch h w"]
Features = Float[Tensor, "b c y x"]


def norm(channels: int) -> nn.GroupNorm:
    """Return a norm over 32 groups of channels."""
    return nn.GroupNorm(32, channels, eps=1e-6)


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution that keeps the size."""
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class ResidualBlock(nn.Module):
    """Norm, SiLU and convolution, twice, added to the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        """Map ``inputs`` channels to ``outputs``, with a 1 x 1 shortcut if they differ."""
        super().__init__()
        self.norm1, self.conv1 = norm(inputs), conv(inputs, outputs)
        self.norm2, self.conv2 = norm(outputs), conv(outputs, outputs)
        self.nin_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Features) -> Features:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        shortcut = x if self.nin_shortcut is None else self.nin_shortcut(x)
        features: Tensor = shortcut + hidden
        return features


class AttentionBlock(nn.Module):
    """Self-attention over all pixels, with one head."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Features) -> Features:
        normed = self.norm(x)
        qkv = (rearrange(f(normed), "b c y x -> b 1 (y x) c") for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*qkv)
        image = rearrange(attended, "b 1 (y x) c -> b c y x", y=x.shape[2])
        features: Tensor = x + self.proj_out(image)
        return features


def named(**layers: nn.Module) -> nn.Sequential:
    """Return ``layers`` one after another, by their names in the published weights."""
    return nn.Sequential(OrderedDict(layers))


def middle(channels: int) -> nn.Sequential:
    """Return the innermost layers of encoder and decoder, at latent size."""
    return named(
        block_1=ResidualBlock(channels, channels),
        attn_1=AttentionBlock(channels),
        block_2=ResidualBlock(channels, channels),
    )


def downsample(channels: int) -> nn.Sequential:
    """Return a strided convolution that halves the size; the border is padded right and below only."""
    return named(pad=nn.ZeroPad2d((0, 1, 0, 1)), conv=nn.Conv2d(channels, channels, 3, stride=2))


def upsample(channels: int) -> nn.Sequential:
    """Return nearest-neighbour upsampling to twice the size, and a convolution."""
    return named(repeat=nn.Upsample(scale_factor=2.0), conv=conv(channels, channels))


def level(
    inputs: int, outputs: int, blocks: int, **resize: Callable[[int], nn.Module]
) -> nn.Sequential:
    """Return residual blocks at one size, the first of which changes the channels, then ``resize``."""
    widths = [inputs] + [outputs] * blocks
    block = nn.Sequential(*map(ResidualBlock, widths[:-1], widths[1:]))
    return named(block=block, **{name: make(outputs) for name, make in resize.items()})


class Encoder(nn.Module):
    """Images to mean and log variance of their latents; level 0 is at full size."""

    def __init__(self, width: int, latent_channels: int) -> None:
        super().__init__()
        widths = [width * multiple for multiple in _MULTIPLES]
        *others, last = pairwise([width, *widths])
        self.conv_in = conv(3, width)
        levels = (level(*channels, _BLOCKS, downsample=downsample) for channels in others)
        self.down = nn.Sequential(*levels, level(*last, _BLOCKS))
        self.mid = middle(widths[-1])
        self.norm_out = norm(widths[-1])
        self.conv_out = conv(widths[-1], 2 * latent_channels)

    def forward(self, images: Images) -> Float[Tensor, "b 2*ch h w"]:
        """Return mean and log variance, concatenated along the channels."""
        x = self.mid(self.down(self.conv_in(images)))
        moments: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return moments


class AutoencoderDecoder(nn.Module):
    """Latents to images; levels are numbered as in the encoder and run in reverse."""

    def __init__(self, width: int, latent_channels: int) -> None:
        super().__init__()
        widths = [width * multiple for multiple in _MULTIPLES]
        last, *others = zip([*widths[1:], widths[-1]], widths, strict=True)
        self.conv_in = conv(latent_channels, widths[-1])
        self.mid = middle(widths[-1])
        levels = (level(*channels, _BLOCKS + 1, upsample=upsample) for channels in others)
        self.up = nn.ModuleList([level(*last, _BLOCKS + 1), *levels])
        self.norm_out = norm(width)
        self.conv_out = conv(width, 3)

    def forward(self, latents: Latents) -> Images:
        x = self.mid(self.conv_in(latents))
        for each in reversed(self.up):
            x = each(x)
        images: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return images


class Autoencoder(nn.Module):
    """Encoder and decoder, without the config's latent shift and scale, which the caller applies."""

    def __init__(self, width: int = WIDTH, latent_channels: int = LATENT_CHANNELS) -> None:
        """Make the layers; the defaults are the published ones, and ``width`` is a multiple of 32."""
        super().__init__()
        self.encoder = Encoder(width, latent_channels)
        self.decoder = AutoencoderDecoder(width, latent_channels)

    @any_attention
    def encode(self, images: Images) -> tuple[Latents, Latents]:
        """Return mean and log variance of the latents of ``images`` in [-1, 1], sides multiples of 8.

        They have the dtype of ``images``; the weights' is that of the arithmetic.
        """
        latents = self.encoder(images.to(self.encoder.conv_in.weight.dtype))
        mean, logvar = latents.to(images.dtype).chunk(2, dim=1)
        return mean, logvar

    @any_attention
    def decode(self, latents: Latents) -> Images:
        """Return the images of ``latents``; values may be slightly outside of [-1, 1]."""
        images: Tensor = self.decoder(latents)
        return images


def load_autoencoder(path: Path, width: int | None = None) -> Autoencoder:
    """Return the frozen autoencoder of a safetensors file with BFL's names, in float32.

    ``width`` defaults to the file's. Raises DataError, naming the file and its first wrong tensor, if it is
    missing or another model's.
    """
    with open_safetensors(path, "FLUX's autoencoder") as file:
        shapes = read_shapes(file)
        with torch.device("meta"):
            autoencoder = Autoencoder(width or _width(shapes), _latent_channels(shapes))
        state = autoencoder.state_dict()
        expected = {name: list(tensor.shape) for name, tensor in state.items()}
        _require_equal(path, shapes, expected)
        state = {name: file.get_tensor(name).float() for name in expected}
    autoencoder.load_state_dict(state, assign=True)
    return autoencoder.eval().requires_grad_(False)


def _width(shapes: dict[str, list[int]]) -> int:
    """Return the channels at full size in ``shapes``; the published number if they are malformed."""
    first = shapes.get("encoder.conv_in.weight", [WIDTH])[:1]
    return first[0] if first and first[0] % 32 == 0 and 0 < first[0] <= 1024 else WIDTH


def _latent_channels(shapes: dict[str, list[int]]) -> int:
    """Return the latent channels in ``shapes``; the published number if they are malformed."""
    second = shapes.get("decoder.conv_in.weight", [])[1:2]
    return second[0] if second and 0 < second[0] <= 1024 else LATENT_CHANNELS


def _require_equal(
    path: Path, shapes: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    for name, shape in expected.items():
        if name not in shapes:
            text = f"not FLUX's autoencoder; tensor {name} is missing"
            raise DataError(f"{path}: {text}{identify(shapes)}")
        if shapes[name] != shape:
            raise DataError(f"{path}: tensor {name} has shape {shapes[name]}, expected {shape}")
    if extra := sorted(shapes.keys() - expected.keys()):
        raise DataError(f"{path}: not FLUX's autoencoder; tensor {extra[0]!r:.80} is unknown")


PATCH = 8
"""Side in pixels of the patch that one latent position encodes."""


class Residual(nn.Module):
    """Two 3 x 3 convolutions added to the input; their sum is zero at initialization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = conv(width, width), conv(width, width)
        zero_init(self.narrow)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        corrected: Tensor = x + self.narrow(F.silu(self.widen(F.silu(x))))
        return corrected


class PatchAutoencoder(nn.Module):
    """Images in [-1, 1] to latents of mean 0 and variance 1, and back.

    Either way is a sum: a linear map of each patch, and a convolutional correction from its neighbours.
    """

    latent_mean: Tensor
    latent_std: Tensor
    logvar: Tensor

    def __init__(self, channels: int = 16, fine: int = 48, coarse: int = 128) -> None:
        """Make ``channels`` latent channels; ``fine`` and ``coarse`` are the decoder's widths."""
        super().__init__()
        half, patch_pixels = PATCH // 2, 3 * PATCH**2
        self.analysis = nn.Sequential(
            nn.PixelUnshuffle(PATCH), nn.Conv2d(patch_pixels, channels, 1)
        )
        self.synthesis = nn.Sequential(nn.Conv2d(channels, patch_pixels, 1), nn.PixelShuffle(PATCH))
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(half),
            conv(3 * half**2, 32),
            nn.SiLU(),
            nn.PixelUnshuffle(2),
            nn.Conv2d(128, 64, 1),
            Residual(64),
            nn.SiLU(),
            nn.Conv2d(64, channels, 1),
        )
        self.decoder = nn.Sequential(
            conv(channels, coarse),
            Residual(coarse),
            Residual(coarse),
            nn.SiLU(),
            nn.Conv2d(coarse, 4 * fine, 1),
            nn.PixelShuffle(2),
            Residual(fine),
            nn.SiLU(),
            conv(fine, 3 * half**2),
            nn.PixelShuffle(half),
        )
        self.register_buffer("latent_mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("latent_std", torch.ones(1, channels, 1, 1))
        self.register_buffer("logvar", torch.tensor(-20.0))

    def encode(self, images: Images) -> tuple[Latents, Latents]:
        """Return mean and log variance of the latents of ``images``; the variance is the same for all.

        They have the dtype of ``images``; the weights' is that of the arithmetic.
        """
        wide = images.to(self.latent_mean.dtype)
        latents = self.analysis(wide) + self.encoder(wide)
        mean = ((latents - self.latent_mean) / self.latent_std).to(images.dtype)
        return mean, self.logvar.to(mean.dtype).expand_as(mean)

    def decode(self, latents: Latents) -> Images:
        """Return the images of ``latents``; values may be slightly outside of [-1, 1]."""
        raw = latents * self.latent_std + self.latent_mean
        images: Tensor = self.synthesis(raw) + self.decoder(raw)
        return images


def zero_init(layer: nn.Conv2d) -> None:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def save_patch_autoencoder(path: Path, autoencoder: PatchAutoencoder) -> None:
    """Write the weights to ``path`` as safetensors, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        # save_file makes it readable by its user only, and a pod may run as another user.
        partial.write_bytes(save({k: v.contiguous() for k, v in autoencoder.state_dict().items()}))


def load_patch_autoencoder(path: Path) -> PatchAutoencoder:
    """Return the frozen autoencoder in ``path``; DataError if it is missing or another model's."""
    autoencoder = PatchAutoencoder()
    try:
        autoencoder.load_state_dict(load(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(
            f"{path}: missing; `fluxtrain prepare openmoji` makes the patch autoencoder"
        ) from None
    except Exception as error:  # safetensors and torch raise many types
        raise DataError(f"{path}: does not hold a patch autoencoder ({error})") from None
    return autoencoder.eval().requires_grad_(False)


def scaled(pixels: UInt8[Tensor, "3 H W"], device: torch.device, dtype: torch.dtype) -> Images:
    """Return ``pixels`` as the one image that `encode` takes, in [-1, 1]."""
    return (pixels[None].to(device).float() / 127.5 - 1).to(dtype)


def condition_of(codec: Codec, image: Images, control: Images, kind: str) -> Latents:
    """Return the latents of a model's condition of ``kind``: of the ``control``, or of ``image`` with a hole.

    They are means of the autoencoder's distribution. A hole is where ``control`` is above grey:
    the image is grey there, and latents have its 8 x 8 pixels as channels below their own.
    """
    if not CONDITIONS[kind].has_hole:
        return codec.encode(control)[0]
    hole = (control[:, :1] > 0).to(image.dtype)
    mean, _ = codec.encode(image * (1 - hole))
    return torch.cat([mean, F.pixel_unshuffle(hole, PATCH)], dim=1)


Codec = Autoencoder | PatchAutoencoder
Decoder = Callable[[Float[Tensor, "b ch h w"]], Float[Tensor, "b 3 H W"]]


def load_codec(encoders: EncodersConfig, models_root: Path) -> Codec:
    """Return the frozen autoencoder in ``encoders.autoencoder``; DataError if the file is not one."""
    path = models_root / encoders.autoencoder
    if encoders.autoencoder_kind == "patch":
        return load_patch_autoencoder(path)
    return load_autoencoder(path)


def load_encoder(encoders: EncodersConfig, models_root: Path, device: torch.device) -> Codec:
    """Return `load_codec` on ``device``, computing in its precision; in float32 on a CPU without bfloat16."""
    name = "float32" if lacks_bfloat16(device) else encoders.precision
    return load_codec(encoders, models_root).to(device, getattr(torch, name))


def load_decoder(encoders: EncodersConfig, models_root: Path, device: torch.device) -> Decoder:
    """Return the decoder of ``encoders.autoencoder``; DataError if the file is not an autoencoder's.

    If ``device`` has too little memory for an image, the CPU decodes it and all after it.
    """
    codec = load_codec(encoders, models_root).to(device)

    def decode(latents: Latents) -> Images:
        nonlocal device
        with suppress(torch.OutOfMemoryError):
            return codec.decode(latents.to(device))
        print(f"{device} has too little memory to decode images; the CPU does", file=sys.stderr)
        device = torch.device("cpu")
        return codec.to(device).decode(latents.to(device))

    return decode
