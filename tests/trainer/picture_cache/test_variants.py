"""Copies of pictures and captions in the cache: what a training reads of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.outputs import losses
from tests.trainer.picture_cache.folders import cache, config, file_of, train, write_pictures
from tests.trainer.tiny_encoders import SIDE, TOKENS, small_image

from fluxtrain.contract.process import RunPaths
from fluxtrain.data.loader import training_order
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.data.pictures.picture import decode
from fluxtrain.encode.codec import load_codec
from fluxtrain.encode.text import load_text_encoder
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.draws import Draw, training_draw

COUNT = 3
VARIANTS: dict[str, Any] = {
    "flip": True,
    "crops": 2,
    "captions": 4,
    "shuffle_caption": True,
    "keep_tokens": 1,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, models: Path) -> RunPaths:
    root = tmp_path_factory.mktemp("roots")
    folder = write_pictures(root / "data/pictures", COUNT)
    for text in folder.glob("*.txt"):
        text.write_text(f"ohwx, number {text.stem}, red, green, blue")
    (root / "out").mkdir()
    return RunPaths(root / "out", root / "data", models)


def opened(
    paths: RunPaths, **data: Any
) -> tuple[PictureDataset, tuple[torch.Tensor, torch.Tensor]]:
    run = config(data={"variants": VARIANTS, "cache": "../shared", **data})
    found = cache(run, paths, World.alone()).open(run, paths.output)
    return found.train, found.empty_text


def drawn(variant: float, dropped: bool = False) -> Draw:
    shape = (4, SIDE // 8, SIDE // 8)
    return Draw(0.5, dropped, np.zeros(shape, np.float32), np.zeros(shape, np.float32), 0, variant)


def test_a_batch_has_the_variants_that_are_drawn(paths: RunPaths) -> None:
    dataset, empty = opened(paths)
    entry = dataset.entries[1]
    assert (len(entry.latents), len(entry.captions), len(dataset)) == (4, 4, COUNT)
    assert len(dataset.files) == sum(len(e.latents) + len(set(e.texts)) for e in dataset.entries)
    encoder = load_text_encoder(
        config().encoders, TOKENS, paths.models, torch.device("cpu"), torch.float32
    )
    indices = np.full(16, 1)
    batch = dataset.batch(indices, [drawn((k + 0.5) / 16) for k in range(16)], empty)
    assert (batch.faults, batch.indices.tolist()) == ((), [1] * 16)
    for number in range(16):
        latents, text = divmod(number, 4)
        assert batch.mean[number].equal(load_file(entry.latents[latents])["mean"])
        txt, vec = encoder.encode([entry.captions[text]])
        torch.testing.assert_close(batch.txt[number], txt[0])
        torch.testing.assert_close(batch.vec[number], vec[0])
    assert len({tuple(row.flatten().tolist()) for row in batch.mean}) == 4
    dropped = dataset.batch(indices[:2], [drawn(0.1, True), drawn(0.9)], empty)
    assert dropped.txt[0].equal(empty[0])
    assert not dropped.txt[1].equal(empty[0])


def test_latents_of_a_mirrored_picture_are_those_of_its_mirror_image(paths: RunPaths) -> None:
    folder = paths.data / "square"
    folder.mkdir()
    (folder / "a.png").write_bytes(file_of(small_image(0, SIDE), "PNG"))
    dataset, _ = opened(paths, images="square", cache=None)
    plain, mirrored = dataset.entries[0].latents  # no room for other crops
    pixels = torch.from_numpy(np.array(decode((folder / "a.png").read_bytes()))).permute(2, 0, 1)
    codec = load_codec(config().encoders, paths.models)
    for path, image in ((plain, pixels), (mirrored, pixels.flip(2))):
        with torch.no_grad():
            mean, _ = codec.encode(image[None].float() / 127.5 - 1)
        torch.testing.assert_close(load_file(path)["mean"], mean[0])


def test_all_variants_are_trained_and_the_ranks_do_not_matter(
    paths: RunPaths, tmp_path: Path
) -> None:
    run = config(
        data={"variants": VARIANTS, "cache": "../shared", "repeats": 2},
        flow={"prompt_dropout": 0.2},
        schedule={"epochs": 2},
    )
    found = []
    for size in (1, 2, 3):
        output = RunPaths(tmp_path / str(size), paths.data, paths.models)
        train(run, output, size)
        found.append(losses(output.output))
    assert list(found[0]) == [1, 2, 3]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)
    stored = json.loads((tmp_path / "2/training_set.json").read_text())
    assert [len(each["captions"]) for each in stored["samples"]] == [4] * COUNT
    dataset, _ = opened(paths)
    draws = [training_draw(run.drawn_seed, k, 0, (4, 4, 4), run.flow).variant for k in range(400)]
    chosen = dataset.with_variants(np.zeros(400, np.int64), np.array(draws)) // len(dataset)
    assert sorted(set(chosen.tolist())) == list(range(16))
    assert len(training_order(run, dataset).indices(0, np.arange(4))) == 4


def test_runs_with_other_variants_share_a_cache(paths: RunPaths) -> None:
    both, _ = opened(paths)
    plain, _ = opened(paths, variants=None)
    assert [len(entry.latents) for entry in plain.entries] == [1] * COUNT
    again, _ = opened(paths)
    assert again.entries == both.entries
