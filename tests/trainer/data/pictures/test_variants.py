"""Copies of pictures and captions: kohya's rules, and nothing but the seed and the original decides."""

from __future__ import annotations

import numpy as np
import pytest
from tests.trainer.picture_cache.folders import noise

from fluxtrain.contract.run.data import AS_THEY_ARE, VariantsConfig
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.picture import fit, variant_captions, variant_placements

SHUFFLED = VariantsConfig(captions=50, shuffle_caption=True, keep_tokens=2)
CAPTION = "ohwx, a toy, red,  on a table , small,blue sky"
TAGS = ["ohwx", "a toy", "red", "on a table", "small", "blue sky"]


def test_tags_are_shuffled_after_those_that_are_kept() -> None:
    found = variant_captions(CAPTION, SHUFFLED, seed=1)
    assert len(found) == 50
    assert {tuple(text.split(", ")[:2]) for text in found} == {("ohwx", "a toy")}
    assert all(sorted(text.split(", ")) == sorted(TAGS) for text in found)
    assert len(set(found)) > 15  # of 24 orders
    assert found == variant_captions(CAPTION, SHUFFLED, seed=1)
    assert found != variant_captions(CAPTION, SHUFFLED, seed=2)
    assert found[:20] == variant_captions(CAPTION, SHUFFLED.model_copy(update={"captions": 20}), 1)


def test_tags_are_left_out_with_a_probability_in_their_order() -> None:
    rule = VariantsConfig(captions=256, tag_dropout=0.25, keep_tokens=1, separator=";")
    tags = [f"tag {number}" for number in range(9)]
    found = [text.split(", ") for text in variant_captions(";".join(tags), rule, seed=1)]
    assert all(each == [tag for tag in tags if tag in each] for each in found)
    assert all(each[0] == "tag 0" for each in found)
    kept = np.mean([len(each) - 1 for each in found]) / 8
    assert kept == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    ("caption", "variants"),
    [(CAPTION, AS_THEY_ARE), (CAPTION, VariantsConfig(captions=9)), ("", SHUFFLED)],
)
def test_a_caption_that_is_not_to_be_changed_is_encoded_once(
    caption: str, variants: VariantsConfig
) -> None:
    assert variant_captions(caption, variants, 1) == (caption,)


def test_crops_are_at_drawn_places_and_mirrored_ones_are_mirror_images() -> None:
    wide = Placement((32, 32), (80, 32))
    variants = VariantsConfig(crops=6, flip=True)
    found = variant_placements(wide, variants, 1, "ab" * 32)
    plain, mirrored = found[: len(found) // 2], found[len(found) // 2 :]
    assert len(plain) > 3
    lefts = {each.box[0] for each in plain}
    assert len(lefts) == len(plain)
    assert lefts <= set(range(49))
    assert all(each.box[1:] == (0, each.box[0] + 32, 32) for each in plain)
    assert found == variant_placements(wide, variants, 1, "ab" * 32)
    assert {each.box[0] for each in variant_placements(wide, variants, 2, "ab" * 32)} != lefts
    image = noise(160, 64)
    for one, other in zip(plain, mirrored, strict=True):
        assert fit(image, other).equal(fit(image, one).flip(2))
    whole = image.resize((80, 32), 1)
    left = plain[0].box[0]
    expected = np.asarray(whole.crop((left, 0, left + 32, 32))).transpose(2, 0, 1)
    assert np.array_equal(fit(image, plain[0]).numpy(), expected)


def test_a_picture_without_room_has_one_crop() -> None:
    exact = Placement((32, 32), (32, 32))
    assert len(variant_placements(exact, VariantsConfig(crops=9), 1, "0" * 64)) == 1
    assert variant_placements(exact, AS_THEY_ARE, 1, "0" * 64) == (exact,)
