"""The cache of a folder of pictures: equal for any ranks and kills, and made anew only for what changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster.free_ports import free_port
from tests.trainer import in_process, ranks
from tests.trainer.picture_cache.folders import (
    cache,
    cache_together,
    config,
    file_of,
    noise,
    write_pictures,
)
from tests.trainer.picture_cache.remote.remote_pictures import encodings
from tests.trainer.tiny_encoders import SIDE, TOKENS, caption

from fluxtrain.contract.process import RunPaths
from fluxtrain.data.dataset import Encodings
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.encode.codec import load_codec
from fluxtrain.encode.text import load_text_encoder
from fluxtrain.parallel.distributed import World

COUNT = 13


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("data") / "pictures", COUNT)


@pytest.fixture
def paths(tmp_path: Path, pictures: Path, models: Path) -> RunPaths:
    """Return roots with a copy of the pictures, with their modification times."""
    shutil.copytree(pictures, tmp_path / "data/pictures")
    return RunPaths(tmp_path / "out", tmp_path / "data", models)


def opened(paths: RunPaths, **changes: object) -> PictureDataset:
    run = config(**changes)
    paths.output.mkdir(parents=True, exist_ok=True)
    return cache(run, paths, World.alone()).open(run, paths.output)[0]


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, pictures: Path, models: Path
) -> dict[str, bytes]:
    """Return the files that one rank writes."""
    output = tmp_path_factory.mktemp("expected")
    paths = RunPaths(output, pictures.parent, models)
    assert in_process.finish(cache, config(), paths) == [0]
    return encodings(paths.output)


def test_encodings_equal_those_of_the_encoders(paths: RunPaths) -> None:
    dataset, run = opened(paths, data={"verify_checksums": True}), config()
    assert (len(dataset), dataset.key(0), dataset.caption(5)) == (COUNT, "000.png", caption(5))
    from PIL import Image

    device = torch.device("cpu")
    codec = load_codec(run.encoders, paths.models)
    text = load_text_encoder(run.encoders, TOKENS, paths.models, device, torch.float32)
    out = Encodings.empty(1, dataset.shape)
    for index in (0, 1, 5):
        with Image.open(paths.data / "pictures" / dataset.key(index)) as image:
            size = SIDE, round(image.height * SIDE / image.width)
            top = (size[1] - SIDE) // 2
            resized = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
            square = np.array(resized.crop((0, top, SIDE, top + SIDE)))
        pixels = torch.from_numpy(square).permute(2, 0, 1)[None] / 127.5 - 1
        mean, logvar = codec.encode(pixels)
        assert dataset.read(np.array([index]), out, np.array([False])) == [None]
        txt, vec = text.encode([caption(index)])
        for stored, made in (
            (out.mean, mean),
            (out.logvar, logvar),
            (out.txt, txt),
            (out.vec, vec),
        ):
            torch.testing.assert_close(stored, made, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_ranks_writes_the_same_files(
    paths: RunPaths, expected: dict[str, bytes], size: int
) -> None:
    together = partial(cache_together, port=free_port())
    assert ranks.finish(together, config(), paths, size) == [0] * size, ranks.output_of(paths)
    assert encodings(paths.output) == expected


def test_killed_at_several_moments_it_writes_the_same_files(
    paths: RunPaths, expected: dict[str, bytes]
) -> None:
    chance, kills = random.Random(0), 0
    for moment in range(1, len(expected), 4):
        (process,) = ranks.start(cache, config(), paths)
        while process.is_alive() and len(encodings(paths.output)) < moment:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.004))
        kills += process.is_alive()
        process.kill()
        process.join()
        left = encodings(paths.output)
        assert all(expected[name] == content for name, content in left.items())
    assert kills >= 3
    assert in_process.finish(cache, config(), paths) == [0]
    assert encodings(paths.output) == expected


def test_a_stopped_run_keeps_what_is_encoded(paths: RunPaths, expected: dict[str, bytes]) -> None:
    together = partial(cache_together, port=free_port())
    (process,) = ranks.start(together, config(), paths)
    while not encodings(paths.output):
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75
    assert "what is encoded is kept" in ranks.output_of(paths)
    left = encodings(paths.output)
    assert 0 < len(left) < len(expected)
    assert all(expected[name] == content for name, content in left.items())


def modified(paths: RunPaths) -> dict[str, int]:
    """Return the modification times of the encodings."""
    folder = paths.output / "cache"
    return {name: (folder / name).stat().st_mtime_ns for name in encodings(paths.output)}


def test_a_second_start_encodes_nothing_and_needs_no_encoder(paths: RunPaths) -> None:
    opened(paths)
    before = modified(paths)
    work = cache(config(), paths, World.alone())
    assert (work.missing_pictures, work.missing_texts) == ([], [])
    assert modified(paths) == before


def test_only_changed_pictures_and_captions_are_encoded_anew(paths: RunPaths) -> None:
    opened(paths)
    before, folder = modified(paths), paths.data / "pictures"
    (folder / "003.png").write_bytes(file_of(noise(SIDE, SIDE, seed=9), "PNG"))
    (folder / "004.txt").write_text("another caption")
    os.utime(folder / "006.png", ns=(0, 0))  # touched only
    (folder / "012.png").unlink()
    work = cache(config(), paths, World.alone())
    assert [picture.file.name for picture in work.missing_pictures] == ["003.png", "006.png"]
    assert work.missing_texts == ["another caption"]
    after = modified(paths)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 2


def test_a_cache_can_be_shared_and_other_settings_do_not_mix(paths: RunPaths) -> None:
    shared = {"cache": "shared"}
    opened(paths, data=shared)
    other = RunPaths(paths.output / "2", paths.data, paths.models)
    work = cache(config(data=shared), other, World.alone())
    assert (work.missing_pictures, work.missing_texts) == ([], [])
    work = cache(config(data=shared, encoders={"precision": "bfloat16"}), other, World.alone())
    assert (len(work.missing_pictures), len(work.missing_texts)) == (
        COUNT,
        len({*map(caption, range(COUNT))}) + 1,
    )


def test_damaged_encodings_are_named_when_they_are_read(paths: RunPaths) -> None:
    dataset = opened(paths, data={"verify_checksums": True})
    path = dataset.entries[2].latents[0]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    dataset.entries[3].latents[0].write_bytes(b"")
    out = Encodings.empty(3, dataset.shape)
    faults = dataset.read(np.array([1, 2, 3]), out, np.zeros(3, dtype=bool))
    assert faults[0] is None
    assert faults[1] == f"{path} (key '002.webp'): CRC-32 differs"
    assert "not a whole safetensors file" in (faults[2] or "")


def test_repeats_prefix_and_class_tokens_make_the_samples(paths: RunPaths) -> None:
    (paths.data / "pictures/001.txt").unlink()
    words = {"repeats": 3, "caption_prefix": "ohwx,", "class_tokens": "a shape"}
    dataset = opened(paths, data=words)
    assert len(dataset) == 3 * COUNT
    assert [dataset.key(index) for index in (0, 2, 3)] == ["000.png", "000.png", "001.jpg"]
    assert dataset.caption(0) == f"ohwx, {caption(0)}"
    assert dataset.caption(3) == "ohwx, a shape"
    report = json.loads((paths.output / "pictures.json").read_text())
    assert report == {
        "used": 13,
        "samples": 39,
        "without_caption": ["001.jpg"],
        "held_out": [],
        "skipped": {},
        "left_out": {},
    }


def test_with_buckets_each_picture_has_the_size_of_its_bucket(paths: RunPaths) -> None:
    folder = paths.data / "pictures"
    (folder / "wide.png").write_bytes(file_of(noise(96, 32), "PNG"))
    (folder / "tall.png").write_bytes(file_of(noise(32, 96, seed=1), "PNG"))
    dataset = opened(paths, data={"buckets": {"step": 16}, "repeats": 2})
    sizes = {dataset.key(i): tuple(size) for i, size in enumerate(dataset.latent_sizes.tolist())}
    assert (sizes["wide.png"], sizes["tall.png"]) == ((2, 6), (6, 2))
    assert (len(dataset), len(dataset.latent_sizes)) == (2 * (COUNT + 2), 2 * (COUNT + 2))
    index = [dataset.key(i) for i in range(len(dataset))].index("wide.png")
    out = Encodings.empty(1, dataset.shape.at((2, 6)))
    assert dataset.read(np.array([index]), out, np.array([False])) == [None]
    assert out.mean.shape[2:] == (2, 6)


def test_a_full_disk_is_named_by_the_file_of_the_cache(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fluxtrain.data.pictures.dataset.sync", full)
    run = config(data={"cache": "../shared"})
    with pytest.raises(OSError, match="No space left") as caught:
        cache(run, paths, World.alone())
    named = Path(caught.value.filename)
    assert named.parent.parent.resolve() == paths.data.parent / "shared"
    assert named.suffix == ".safetensors"
    assert not list(named.parent.iterdir()), "no part is left behind"
