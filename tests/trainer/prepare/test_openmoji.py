"""The demo's data: captions, the split, and the encoded data set."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from tests.paths import ROOT

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.images import TarImages
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.encode.codec import PatchAutoencoder, save_patch_autoencoder
from fluxtrain.prepare.openmoji import (
    NUM_SKIN_TONES,
    NUM_VALIDATION_BASES,
    _draw,
    _encode,
    _parts,
    _svg_folder,
    _text_encoder,
    base,
    caption,
    choose,
    draw_night,
    read_catalogue,
    split,
    with_white_outlines,
)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("1F600", "grinning face"),
        ("2764", "red heart"),
        ("1F1EB-1F1F7", "flag: france"),
        ("1F3F4-E0067-E0062-E0073-E0063-E0074-E007F", "flag: scotland"),
        ("1F44B-1F3FD", "waving hand medium skin tone"),
        ("E000", None),
    ],
)
def test_a_caption_is_the_name_in_lower_case(key: str, name: str | None) -> None:
    assert caption(key) == name


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("1F44B-1F3FD", "1F44B"),
        ("1F468-1F3FF-200D-1F9B0", "1F9D1"),
        ("1F487-1F3FD-200D-2642-FE0F", "1F487"),
        ("1F469-200D-1F3A8", "1F9D1-200D-1F3A8"),
        ("2640", "2640"),
        ("2764-FE0F", "2764"),
        ("1F1EB-1F1F7", "1F1EB-1F1F7"),
    ],
)
def test_a_base_has_no_skin_tone_hair_gender_or_style(key: str, expected: str) -> None:
    assert base(key) == expected


def test_a_base_is_on_one_side_and_the_split_is_deterministic() -> None:
    emoji = read_catalogue(_svg_folder())
    train, validation = split(emoji, NUM_VALIDATION_BASES, NUM_SKIN_TONES)
    held_out = {item.base for item in validation}
    assert len(held_out) == NUM_VALIDATION_BASES
    assert held_out.isdisjoint(item.base for item in train)
    assert split(reversed(emoji), NUM_VALIDATION_BASES, NUM_SKIN_TONES)[1] == validation
    for name in {item.base for item in train}:
        toned = [item for item in train if item.base == name and item.has_skin_tone]
        assert len(toned) <= NUM_SKIN_TONES


def test_outlines_are_white_and_nothing_else_changes() -> None:
    svg = (_svg_folder() / "1F600.svg").read_text()
    (before, lines), (after, white) = (
        text.split('id="line"') for text in (svg, with_white_outlines(svg))
    )
    assert set(re.findall(r'(?:fill|stroke)="([^"]*)"', white)) == {"none", "#ffffff"}
    assert len(re.findall(r"<(?:path|circle)", white)) == len(
        re.findall(r"<(?:path|circle)", lines)
    )
    colours = re.compile(r'fill="([^"]*)"')
    assert colours.findall(before) == colours.findall(after)


def test_pictures_at_night_are_a_folder_of_pictures_and_captions(tmp_path: Path) -> None:
    emoji = read_catalogue(_svg_folder())
    chosen = choose(emoji)
    assert chosen == choose(list(reversed(emoji)))
    assert not [item for item in chosen if item.has_skin_tone or item.caption.startswith("flag:")]
    draw_night(tmp_path / "night", lambda count: None, chosen[:3], _svg_folder(), size=64)
    for item in chosen[:3]:
        path = tmp_path / "night" / f"{item.key}.png"
        with Image.open(path) as image:
            assert image.size == (64, 64)
            assert image.convert("RGB").getpixel((0, 0)) == (16, 36, 63)
        assert path.with_suffix(".txt").read_text() == f"{item.caption}\n"


def test_the_prompts_of_the_lora_are_none_of_its_captions() -> None:
    run = yaml.safe_load((ROOT / "examples/openmoji-lora.yaml").read_text())["spec"]["run"]
    train = _parts()["train"]
    prompts, captions = set(run["sampling"]["prompts"]), {item.caption for item in choose(train)}
    assert prompts <= {item.caption for item in train}
    assert not prompts & captions


@pytest.mark.slow
def test_a_small_catalogue_becomes_an_encoded_data_set(tmp_path: Path) -> None:
    emoji = read_catalogue(_svg_folder())[:5]
    config = resolve({"preset": "openmoji"})
    _draw(tmp_path / "images", lambda count: None, {"train": emoji}, size=config.data.image_size)
    assert "CC BY-SA 4.0" in (tmp_path / "images" / "ATTRIBUTION.md").read_text()
    images = TarImages(tmp_path / "images" / "train")
    assert [images.caption(index) for index in range(5)] == [item.caption for item in emoji]
    torch.manual_seed(0)
    save_patch_autoencoder(tmp_path / "ae.safetensors", PatchAutoencoder())
    encode = partial(_encode, tmp_path / "images" / "train", tmp_path / "ae.safetensors")
    encode(_text_encoder(config), tmp_path / "train", lambda count: None)
    dataset = ShardDataset(tmp_path / "train", verify=True)
    assert len(dataset) == 5
    size = config.data.latent_size
    assert dataset.shape.latent == (config.latent_channels, size, size)
    assert dataset.shape.txt == (config.data.text_length, config.model.context_in_dim)
    assert dataset.caption(3) == emoji[3].caption
    assert "CC BY-SA 4.0" in dataset.attribution
