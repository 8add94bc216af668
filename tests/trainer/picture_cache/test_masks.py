"""The masked loss: as kohya's, from a folder of masks or the pictures' opacity, on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.trainer.cli.bad_inputs.bad_pictures import tar
from tests.trainer.fetch.servers import FileServer
from tests.trainer.outputs import losses
from tests.trainer.picture_cache.folders import (
    cache,
    config,
    file_of,
    noise,
    train,
    write_pictures,
)
from tests.trainer.tiny_encoders import SIDE

from fluxtrain.contract.process import RunPaths
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.data.pictures.picture import PictureError, mask_of
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.model import loss
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.stage import check_pictures
from fluxtrain.runtime.draws import Draw

COUNT = 4
MASKS: dict[str, Any] = {"masks": "masks", "cache": "../shared"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, models: Path) -> RunPaths:
    """Return roots with pictures of two shapes, and a mask of another size and kind for each."""
    root = tmp_path_factory.mktemp("roots")
    folder = write_pictures(root / "data/pictures", COUNT)
    (root / "data/masks").mkdir()
    for number, path in enumerate(sorted(folder.glob("*[!t]"))):
        with Image.open(path) as image:
            width, height = image.size
        mask = noise(2 * width, 2 * height, mode="L", seed=number)
        (root / f"data/masks/{path.stem}.png").write_bytes(file_of(mask, "PNG"))
    (root / "out").mkdir()
    return RunPaths(root / "out", root / "data", models)


def opened(paths: RunPaths, **data: Any) -> PictureDataset:
    run = config(data=data)
    return cache(run, paths, World.alone()).open(run, paths.output)[0]


def area(mask: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return kohya's mask of a loss of ``height`` x ``width``."""
    return torch.nn.functional.interpolate(mask[None, None], size=(height, width), mode="area")[
        0, 0
    ]


def test_the_loss_is_weighted_as_kohya_s() -> None:
    rng = torch.Generator().manual_seed(0)
    prediction, target = torch.randn(2, 3, 4, 8, 6, generator=rng)
    pixels = torch.rand(3, 64, 48, generator=rng)
    mask = torch.stack([area(each, 8, 6) for each in pixels])
    expected = ((prediction - target) ** 2 * mask.unsqueeze(1)).mean([1, 2, 3])
    torch.testing.assert_close(loss.sample_losses(prediction, target, mask), expected)
    whole = loss.sample_losses(prediction, target, torch.ones(3, 8, 6))
    assert whole.equal(loss.sample_losses(prediction, target))


@pytest.mark.parametrize("is_flipped", [False, True])
def test_a_mask_is_cropped_and_mirrored_as_its_picture(is_flipped: bool) -> None:
    grey = noise(80, 32, mode="L")
    placement = Placement((48, 32), (80, 32), corner=(20, 0), is_flipped=is_flipped)
    cropped = torch.from_numpy(np.array(grey)[:, 20:68].copy()).float() / 255
    expected = area(cropped.flip(1) if is_flipped else cropped, 4, 6)
    found = mask_of(file_of(grey, "PNG"), "", (80, 32), placement)
    torch.testing.assert_close(found, expected)
    picture = noise(80, 32)
    picture.putalpha(grey)
    torch.testing.assert_close(
        mask_of(file_of(picture, "PNG"), "alpha", (80, 32), placement), expected
    )
    opaque = mask_of(file_of(noise(80, 32), "PNG"), "alpha", (80, 32), placement)
    assert opaque.equal(torch.ones(4, 6))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (file_of(noise(32, 80), "PNG"), "has 32 x 80 pixels, another aspect ratio than 80 x 32"),
        (file_of(Image.new("L", (80, 32)), "PNG"), "is black: nothing of it would be trained"),
        (file_of(Image.new("L", (80, 32), 1), "PNG"), "brightest pixel has 1: a place that counts"),
        (b"", "its mask: the file is empty"),
        (file_of(noise(80, 32), "PNG")[:200], "corrupt or cut off"),
    ],
)
def test_a_mask_that_is_none_is_named(mask: bytes, message: str) -> None:
    with pytest.raises(PictureError, match=message):
        mask_of(mask, "", (80, 32), Placement((48, 32), (80, 32)))


def test_a_batch_has_the_masks_of_its_samples(paths: RunPaths) -> None:
    dataset = opened(paths, **MASKS, variants={"flip": True})
    shape = (4, SIDE // 8, SIDE // 8)
    zeros = np.zeros(shape, np.float32)
    drawn = [Draw(0.5, False, zeros, zeros, 0, variant) for variant in (0.1, 0.9, 0.1)]
    empty = torch.zeros(dataset.shape.txt), torch.zeros(dataset.shape.vec)
    batch = dataset.batch(np.array([2, 2, -1]), drawn, empty)
    assert batch.mask is not None
    assert batch.mask[0].equal(dataset.loss_mask(2))
    assert batch.mask[1].equal(dataset.loss_mask(2 + len(dataset)))
    assert not batch.mask[0].equal(batch.mask[1])
    assert batch.mask[0].shape == shape[1:]
    dataset.entries[2].masks[1].write_bytes(b"")
    batch = dataset.batch(np.array([2, 2, -1]), drawn, empty)
    assert batch.weights.tolist() == [1, 0, 0]
    assert "not a whole safetensors file" in batch.faults[0]
    dataset.entries[2].masks[1].unlink()
    assert opened(paths, **MASKS, variants={"flip": True}).loss_mask(2 + len(dataset)).sum() > 0
    assert not opened(paths, cache="../shared").has_masks


def test_the_ranks_do_not_matter_and_a_mask_does(paths: RunPaths, tmp_path: Path) -> None:
    found = {}
    for name, size, data in (
        ("one", 1, MASKS),
        ("two", 2, MASKS),
        ("three", 3, MASKS),
        ("unmasked", 1, {"cache": "../shared"}),
    ):
        output = RunPaths(tmp_path / name, paths.data, paths.models)
        train(config(data=data), output, size)
        found[name] = list(losses(output.output).values())
    assert found["two"] == pytest.approx(found["one"], rel=1e-4)
    assert found["three"] == pytest.approx(found["one"], rel=1e-4)
    assert np.divide(found["one"], found["unmasked"]) == pytest.approx(
        0.5, abs=0.1
    )  # noise as mask


def test_pictures_without_a_mask_are_skipped_and_listed(paths: RunPaths, tmp_path: Path) -> None:
    folder = paths.data / "few"
    folder.mkdir()
    for name in ("000", "002"):
        (folder / f"{name}.png").write_bytes((paths.data / f"masks/{name}.png").read_bytes())
    Image.new("L", (10, 10)).save(folder / "002.png")
    run = config(data={"masks": "few", "max_skipped": 1.0})
    (tmp_path / "out").mkdir()
    output = RunPaths(tmp_path / "out", paths.data, paths.models)
    dataset = cache(run, output, World.alone()).open(run, output.output).train
    assert [entry.name for entry in dataset.entries] == ["000.png"]
    skipped = json.loads((tmp_path / "out/pictures.json").read_text())["skipped"]
    assert skipped["001.jpg"] == f"has no mask in {folder}"
    assert "aspect ratio" in skipped["002.webp"]
    with pytest.raises(
        DataError, match="nowhere: missing; it should hold pictures; it should have"
    ):
        opened(paths, masks="nowhere")


def test_regularisation_images_have_a_weight_of_their_own(paths: RunPaths) -> None:
    sets = [{"image_dir": "pictures"}, {"image_dir": "pictures", "is_reg": True}]
    (paths.data / "d.json").write_text(json.dumps({"datasets": [{"subsets": sets}]}))
    data = {"images": "d.json", "prior_loss_weight": 0.25, "cache": "../shared"}
    dataset = opened(paths, **data)
    assert [float(dataset.loss_mask(i).unique()) for i in range(2 * COUNT)] == [1.0] * 4 + [
        0.25
    ] * 4


def test_masks_at_a_url_and_in_shards_are_those_of_the_folder(
    server: FileServer, paths: RunPaths, tmp_path: Path
) -> None:
    for folder, suffix in (("pictures", "[!t]"), ("masks", "")):
        files = {path.name: path.read_bytes() for path in (paths.data / folder).glob(f"*{suffix}")}
        server.files |= {f"bucket/{folder}/{name}": content for name, content in files.items()}
        dotted = {name.replace(".", "__"): content for name, content in sorted(files.items())}
        server.files[f"web/{folder}/a.tar"] = tar(**dotted)
    (tmp_path / "bare").mkdir()
    for name, content in server.files.items():
        if name.startswith("bucket/pictures/"):
            (tmp_path / "bare" / name.rpartition("/")[2]).write_bytes(content)
    web, bucket = f"{server.url}/web", "s3://bucket"
    given = [
        (str(tmp_path / "bare"), "masks", False),
        (str(tmp_path / "bare"), f"{bucket}/masks", False),
        (f"{bucket}/pictures", "masks", True),
        (f"{bucket}/pictures", f"{bucket}/masks", False),
        (f"{bucket}/pictures", f"{bucket}/masks", True),
        (f"{web}/pictures/a.tar", f"{web}/masks/a.tar", False),
        (f"{web}/pictures/a.tar", f"{web}/masks/a.tar", True),
    ]
    found = set()
    for number, (images, masks, streams) in enumerate(given):
        output = RunPaths(tmp_path / str(number) / "out", paths.data, paths.models)
        output.output.mkdir(parents=True)
        download = {"folder": str(tmp_path / f"node{number}"), "stream": streams}
        data = {"images": images, "masks": masks, "download": download, "max_skipped": 0.6}
        run = config(data=data)
        check_pictures(run, output)
        dataset = cache(run, output, World.alone()).open(run, output.output).train
        assert len(dataset) == COUNT
        found.add(tuple(tuple(dataset.loss_mask(i).flatten().tolist()) for i in range(COUNT)))
    assert len(found) == 1
    assert not all(value == 1 for mask in found.pop() for value in mask)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ("s3://bucket/secret", "access is denied"),
        ("s3://bucket/nothing", "there is nothing of this name"),
        ("ftp://bucket/masks", "must be a path, or a URL that begins with"),
        ("s3://key:word@bucket/masks", "must not contain a user name"),
    ],
)
def test_masks_that_cannot_be_fetched_are_refused_before_anything_is(
    server: FileServer, paths: RunPaths, tmp_path: Path, masks: str, message: str
) -> None:
    server.files["bucket/secret/a.png"] = b""
    server.denied.add("bucket")
    if "nothing" in masks:
        server.denied.clear()
    output = RunPaths(tmp_path / "out", paths.data, paths.models)
    download = {"folder": str(tmp_path / "node")}
    with pytest.raises(ConfigError, match=rf"^spec\.run\.data\.masks: got '.*{message}"):
        check_pictures(config(data={"masks": masks, "download": download}), output)
    sets = [{"image_dir": "pictures", "conditioning_data_dir": masks}]
    (paths.data / "m.json").write_text(json.dumps({"datasets": [{"subsets": sets}]}))
    with pytest.raises(ConfigError, match=rf"conditioning_data_dir: got '.*{message}"):
        check_pictures(config(data={"images": "m.json", "download": download}), output)
    with pytest.raises(DataError, match=r"nowhere: missing; .* should have a mask for each"):
        check_pictures(config(data={"images": "s3://bucket/pictures", "masks": "nowhere"}), output)
    assert not server.sent
