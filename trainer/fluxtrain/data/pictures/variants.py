"""Changed copies of a picture and of its caption: crops, mirror images, shuffled tags.

They are pure functions of the seed and of the bytes, or the caption, that they are made from: the same on any
ranks, after any restart, and whatever the file is called.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from fluxtrain import draws
from fluxtrain.contract.run.variants import VariantsConfig
from fluxtrain.data.buckets import Placement


def variant_placements(
    placement: Placement, variants: VariantsConfig, seed: int, sha256: str
) -> tuple[Placement, ...]:
    """Return the ways in which the picture whose bytes have ``sha256`` is cropped and mirrored, each once."""
    found = [placement]
    if variants.crops > 1:
        rng = draws.generator(seed, draws.CROPS, int(sha256[:15], 16))
        places = rng.random((variants.crops, 2))
        slack = [r - s for r, s in zip(placement.resized, placement.size, strict=True)]
        corners = [
            tuple(int(p * (room + 1)) for p, room in zip(at, slack, strict=True)) for at in places
        ]
        found = [replace(placement, corner=(left, top)) for left, top in dict.fromkeys(corners)]
    if variants.flip:
        found += [replace(each, is_flipped=True) for each in found]
    return tuple(found)


def variant_captions(caption: str, variants: VariantsConfig, seed: int) -> tuple[str, ...]:
    """Return the captions that are trained for ``caption``: as many as ``variants`` asks for, or itself.

    By kohya's rule: the tags after the kept ones are shuffled, then each is left out with a probability.
    """
    changes = variants.shuffle_caption or variants.tag_dropout > 0
    if variants.captions == 1 or not changes or not caption:
        return (caption,)
    digest = hashlib.sha256(caption.encode("utf-8", "surrogatepass")).digest()
    rng = draws.generator(seed, draws.CAPTIONS, int.from_bytes(digest[:7], "big"))
    tags = [tag.strip() for tag in caption.split(variants.separator)]
    kept, others = tags[: variants.keep_tokens], tags[variants.keep_tokens :]
    found = []
    for _ in range(variants.captions):
        order = rng.permutation(len(others)) if variants.shuffle_caption else range(len(others))
        used = rng.random(len(others)) >= variants.tag_dropout
        found.append(", ".join([*kept, *(others[i] for i in order if used[i])]))
    return tuple(found)
