"""The demo's data: names, the split, stages that are kept, and pictures that come back."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from fluxtrain.data.shard_dataset import EncodedDataset
from fluxtrain.prepare import stages
from fluxtrain.prepare.openmoji.build import NUM_SKIN_TONES, NUM_VALIDATION_BASES, _svg_folder
from fluxtrain.prepare.openmoji.cached_build import Advance, build_cached, is_cached, progress
from fluxtrain.prepare.openmoji.catalogue import base, caption, read_catalogue, split


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
def test_a_caption_is_the_name_in_plain_words(key: str, name: str | None) -> None:
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


def test_no_base_stands_on_both_sides_and_the_split_never_moves() -> None:
    emoji = read_catalogue(_svg_folder())
    train, validation = split(emoji, NUM_VALIDATION_BASES, NUM_SKIN_TONES)
    held_out = {one.base for one in validation}
    assert len(held_out) == NUM_VALIDATION_BASES
    assert held_out.isdisjoint(one.base for one in train)
    assert split(reversed(emoji), NUM_VALIDATION_BASES, NUM_SKIN_TONES)[1] == validation
    for name in {one.base for one in train}:
        toned = [one for one in train if one.base == name and one.has_skin_tone]
        assert len(toned) <= NUM_SKIN_TONES


def stage(
    output: Path, settings: dict[str, object], fail: bool = False, force: bool = False
) -> str:
    def make(partial: Path, advance: Advance) -> None:
        partial.write_text("half")
        if fail:
            raise RuntimeError("the power went")
        partial.write_text(f"made with {settings}")
        advance(1)

    said = io.StringIO()
    build_cached("work", output, settings, 1, make, force, stream=said)
    return said.getvalue()


def test_a_stage_is_kept_until_its_settings_change(tmp_path: Path) -> None:
    output = tmp_path / "folder" / "result"
    assert "already" not in stage(output, {"size": 1})
    assert stage(output, {"size": 1}) == "work: already made\n"
    assert "already" not in stage(output, {"size": 2})
    assert "already" not in stage(output, {"size": 2}, force=True)
    assert output.read_text() == "made with {'size': 2}"


def test_a_stage_that_fails_leaves_the_earlier_result(tmp_path: Path) -> None:
    output = tmp_path / "result"
    stage(output, {"size": 1})
    with pytest.raises(RuntimeError):
        stage(output, {"size": 2}, fail=True)
    assert output.read_text() == "made with {'size': 1}"
    assert is_cached(output, {"size": 1})
    assert "already" not in stage(output, {"size": 2})


def test_a_stamp_that_is_no_json_counts_as_not_made(tmp_path: Path) -> None:
    output = tmp_path / "result"
    stage(output, {"size": 1})
    (tmp_path / "result.prepared.json").write_text("{")
    assert not is_cached(output, {"size": 1})


def test_where_there_is_no_terminal_progress_is_a_line_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, stream, heard = (
        iter([0.0, 1.0, 11.0, 11.0, 12.0]),
        io.StringIO(),
        list[tuple[int, int]](),
    )
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with progress("clean", 2000, stream, lambda *said: heard.append(said)) as advance:
        for _ in range(3):
            advance(500)
    assert stream.getvalue() == "clean: 1,000 of 2,000\n"
    assert heard == [(500, 2000), (1000, 2000), (1500, 2000)]


def test_a_small_catalogue_becomes_a_data_set_that_training_opens(tmp_path: Path) -> None:
    from functools import partial

    import torch

    from fluxtrain.contract.run.resolve import resolve
    from fluxtrain.data.tar.dataset import TarImages
    from fluxtrain.encode.patch import PatchAutoencoder, save_patch_autoencoder
    from fluxtrain.prepare.openmoji.build import _draw, _encode, _text_encoder

    emoji = read_catalogue(_svg_folder())[:5]
    config = resolve({"preset": "openmoji"})
    _draw(tmp_path / "images", lambda done: None, {"train": emoji}, size=config.data.image_size)
    assert "CC BY-SA 4.0" in (tmp_path / "images" / "ATTRIBUTION.txt").read_text()
    pictures = TarImages(tmp_path / "images" / "train")
    assert [pictures.caption(index) for index in range(5)] == [one.caption for one in emoji]
    torch.manual_seed(0)
    save_patch_autoencoder(tmp_path / "ae.safetensors", PatchAutoencoder())
    encode = partial(_encode, tmp_path / "images" / "train", tmp_path / "ae.safetensors")
    encode(_text_encoder(config), tmp_path / "train", lambda done: None)
    dataset = EncodedDataset(tmp_path / "train", verify=True)
    assert len(dataset) == 5
    size = config.data.latent_size
    assert dataset.shape.latent == (config.latent_channels, size, size)
    assert dataset.shape.txt == (config.data.text_length, config.model.context_in_dim)
    assert dataset.caption(3) == emoji[3].caption
    assert "CC BY-SA 4.0" in dataset.attribution
