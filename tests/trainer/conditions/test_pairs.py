"""Training on pairs of pictures: what is read of them, trained and sampled, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.trainer import in_process
from tests.trainer.conditions.pairs import CONDITIONS as MODELS
from tests.trainer.conditions.pairs import config, write_pairs
from tests.trainer.outputs import losses
from tests.trainer.picture_cache.folders import cache, file_of
from tests.trainer.tiny_encoders import CHANNELS, small_image, write_encoders

from fluxtrain.adapter.opening import model_of
from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.model import CONDITIONS
from fluxtrain.data.order import Placement
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.data.pictures.picture import PictureError, control_of, mask_of
from fluxtrain.data.pictures.subset import find_pictures
from fluxtrain.encode.codec import load_codec
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.pack import require_packable

COUNT = 6
BUCKETS: dict[str, Any] = {"buckets": {"step": 16}}
SAMPLED: dict[str, Any] = {
    "data": {"validation_split": 0.3, **BUCKETS},
    "evaluation": {"every_samples": 4, "batch_size": 5},
    "sampling": {"every_steps": 2, "num_prompts": 2, "num_steps": 2, "cfg_scale": 1.0},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Return roots with pairs."""
    root = tmp_path_factory.mktemp("roots")
    write_pairs(root / "data/pairs", COUNT)
    (root / "models").mkdir()
    return RunPaths(root / "out", root / "data", write_encoders(root / "models"))


@pytest.fixture
def paths(roots: RunPaths, tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "out", roots.data, roots.models)


def opened(paths: RunPaths, condition: str, **data: Any) -> PictureDataset:
    paths.output.mkdir(exist_ok=True)
    run = config(condition, data=data)
    return cache(run, paths, World.alone()).open(run, paths.output)[0]


def image_of(path: Path, size: tuple[int, int], flip: bool = False) -> torch.Tensor:
    """Return the picture ``path``, which has this size already, in [-1, 1]."""
    with Image.open(path) as image:
        pixels = np.array(image.convert("RGB"))
    assert pixels.shape[:2] == size[::-1]
    pixels = pixels[:, ::-1] if flip else pixels
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1


@pytest.mark.parametrize("condition", MODELS)
@pytest.mark.parametrize("variants", [None, {"flip": True}])
def test_latents_have_those_of_the_control_below_them(
    paths: RunPaths, condition: str, variants: dict[str, Any] | None
) -> None:
    dataset = opened(paths, condition, variants=variants, **BUCKETS)
    codec = load_codec(config(condition).encoders, paths.models)
    for index in (0, len(dataset) - 1):
        for flip in (False, True) if variants else (False,):
            mean = load_file(dataset.entries[index].latents[flip])["mean"][None]
            height, width = mean.shape[2:]
            size, name = (8 * width, 8 * height), f"{index:03d}"
            with torch.no_grad():
                target = image_of(paths.data / f"pairs/target/{name}.png", size, flip)
                assert torch.equal(mean[:, :CHANNELS], codec.encode(target)[0])
                if condition != "fill":
                    control = image_of(paths.data / f"pairs/control/{name}.webp", size, flip)
                    assert torch.equal(mean[:, CHANNELS:], codec.encode(control)[0])
                    continue
                hole = (
                    image_of(paths.data / f"pairs/mask/{name}.png", size, flip)[:, :1] > 0
                ).float()
                masked = codec.encode(target * (1 - hole))[0]
            assert torch.equal(mean[:, CHANNELS : 2 * CHANNELS], masked)
            assert 0 < hole.mean() < 1
            places = hole.reshape(1, height, 8, width, 8).permute(0, 2, 4, 1, 3)
            assert torch.equal(mean[:, 2 * CHANNELS :], places.reshape(1, 64, height, width))


def test_holes_are_drawn_where_there_are_no_masks(paths: RunPaths) -> None:
    holes = [
        opened(paths, "fill", controls=None, cache=name).encodings(np.arange(COUNT), None)
        for name in ("first", "second")
    ]
    for row, again in zip(*holes, strict=True):
        hole = row.mean[:, 2 * CHANNELS :]
        assert torch.equal(hole, again.mean[:, 2 * CHANNELS :])
        assert set(hole.unique().tolist()) <= {0.0, 1.0}
        assert 1 / 17 <= hole.mean() <= 1
    assert not torch.equal(holes[0][0].mean[:, -64:], holes[0][3].mean[:, -64:])


@pytest.mark.parametrize("condition", MODELS)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_trains_evaluates_and_samples(paths: RunPaths, condition: str, adapted: bool) -> None:
    changes: dict[str, Any] = dict(SAMPLED)
    if adapted:
        full = config(condition, schedule={"steps": 1})
        base = RunPaths(paths.output / "base", paths.data, paths.models)
        in_process.train(full, base)
        weights = {"initial_weights": str(base.output)}
        changes |= {**weights, "adapter": {"rank": 2}, "optim": {"learning_rate": 1e-3}}
    run = config(condition, **changes)
    in_process.train(run, paths)
    found = losses(paths.output)
    assert list(found) == [1, 2, 3]
    assert np.isfinite([*found.values()]).all()
    folder = paths.output / "samples"
    plain = config(condition).model.model_copy(update={"condition": "none"})
    of_run = config(condition, initial_weights=str(paths.output))
    with pytest.raises(DataError, match=f"trained with model.condition {condition}; it is none"):
        model_of(of_run.model_copy(update={"model": plain}), paths.models)
    with (
        Image.open(folder / "originals/00.png") as shown,
        Image.open(folder / "step_0000002/00.png") as sample,
    ):
        assert shown.size == (2 * sample.width, sample.height)
        assert sample.text["control"] == "originals/00.png"  # type: ignore[attr-defined]


@pytest.mark.parametrize("condition", MODELS)
def test_several_ranks_train_as_one(paths: RunPaths, condition: str) -> None:
    alone = RunPaths(paths.output / "alone", paths.data, paths.models)
    run = config(condition, data=BUCKETS, parallel={"micro_batch_size": 1})
    in_process.train(run, alone)
    in_process.train(run, paths, size=2)
    assert losses(paths.output) == pytest.approx(losses(alone.output), rel=1e-5)


def test_pairs_that_are_not_whole_are_named(paths: RunPaths, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data/pairs", COUNT)
    (data / "control/001.webp").unlink()
    (data / "control/002.webp").write_bytes(b"")
    other = RunPaths(paths.output, tmp_path / "data", paths.models)
    opened(other, "kontext", max_skipped=0.5)
    report = json.loads((paths.output / "pictures.json").read_text())
    assert report["used"] == COUNT - 2
    assert report["skipped"] == {
        "001.png": f"has no control in {data / 'control'}",
        "002.png": "its control: the file is empty",
    }


def test_controls_of_another_shape(paths: RunPaths, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data/pairs", 2)
    for name in ("control/000.webp", "mask/000.png"):
        with Image.open(data / name) as image:
            image.resize((64, 40)).save(data / name)
    other = RunPaths(paths.output, tmp_path / "data", paths.models)
    assert len(opened(other, "kontext")) == 2
    again = RunPaths(tmp_path / "again", tmp_path / "data", paths.models)
    assert len(opened(again, "fill", max_skipped=0.5)) == 1
    report = json.loads((again.output / "pictures.json").read_text())
    assert "another aspect ratio" in report["skipped"]["000.png"]


def test_the_names_of_controls_and_pictures_may_differ_in_case(
    paths: RunPaths, tmp_path: Path
) -> None:
    data = write_pairs(tmp_path / "data/pairs", 3)
    (data / "control/000.webp").rename(data / "control/Cafe\u0301.webp")
    (data / "target/000.png").rename(data / "target/caf\u00e9.png")
    (data / "control/other.png").write_bytes(b"")
    Image.new("RGB", (9, 9)).save(data / "control/001.jpg")
    other = RunPaths(paths.output, tmp_path / "data", paths.models)
    pictures, skipped, left_out = find_pictures(config("kontext"), other.data)
    controls = {picture.file.name: picture.control_path for picture in pictures}
    assert controls["caf\u00e9.png"] == data / "control/Cafe\u0301.webp"
    assert (len(controls), skipped) == (3, {})
    unused = {
        str(data / "control" / name): "is the control of no picture"
        for name in ("001.webp", "other.png")
    }
    assert left_out.items() >= unused.items()


def drawn(mode: str, inside: Any, outside: Any) -> bytes:
    """Return a mask of 32 x 16 pixels whose left half has the colour ``inside``."""
    image = Image.new(mode, (32, 16), outside)
    image.paste(inside, (0, 0, 16, 16))
    return file_of(image, "PNG")


def of_a_palette(kind: str) -> bytes:
    """Return a white left half beside a transparent right one, with a palette."""
    image = Image.new("P", (32, 16), 1)
    image.putpalette([255, 255, 255, 0, 200, 0])
    image.paste(0, (0, 0, 16, 16))
    return file_of(image, kind, transparency=1)


AT = Placement((32, 16), (32, 16))
HALF = torch.zeros(16, 32, dtype=torch.uint8)
HALF[:, :16] = 255


@pytest.mark.parametrize(
    "content",
    [
        drawn("L", 255, 0),
        drawn("RGBA", (255, 255, 255, 255), (0, 0, 0, 0)),
        drawn("RGBA", (255, 255, 255, 255), (255, 255, 255, 0)),
        drawn("LA", (255, 255), (255, 0)),
        of_a_palette("PNG"),
        of_a_palette("GIF"),
    ],
    ids=["grey", "on transparent black", "on transparent white", "grey with opacity", "PNG", "GIF"],
)
def test_what_is_transparent_in_a_mask_is_black(content: bytes) -> None:
    assert control_of(content, (32, 16), AT, CONDITIONS["fill"])[0].equal(HALF)
    assert mask_of(content, "", (32, 16), AT).equal(HALF[::8, ::8] / 255)


@pytest.mark.parametrize(
    ("condition", "content", "message"),
    [
        ("fill", drawn("L", 1, 0), "brightest pixel has 1: nothing of it would be filled; 255 is"),
        ("fill", drawn("RGBA", (90, 120, 200, 255), (150, 90, 60, 0)), "nothing of it"),
        (
            "fill",
            file_of(small_image(1), "PNG"),
            "is no mask: .* % of it is neither black nor white",
        ),
        (
            "depth",
            file_of(Image.new("RGB", (32, 32)), "PNG"),
            "32 x 32 pixels, another aspect ratio",
        ),
        ("kontext", file_of(Image.new("RGB", (2, 1)), "PNG"), "its control: 2 x 1 pixels would be"),
        ("depth", file_of(Image.new("RGB", (2, 1)), "PNG"), "its control: 2 x 1 pixels would be"),
        ("kontext", file_of(Image.new("RGB", (640, 8)), "PNG"), "of which 2 % would be kept"),
    ],
    ids=["dark", "transparent photograph", "photograph", "square", "tiny", "tiny map", "panorama"],
)
def test_a_control_that_is_none_is_named(condition: str, content: bytes, message: str) -> None:
    with Image.open(io.BytesIO(content)) as image:
        size = image.size if condition == "fill" else (32, 16)
    with pytest.raises(PictureError, match=message):
        control_of(content, size, Placement((32, 16), (32, 16)), CONDITIONS[condition])


@pytest.mark.parametrize(
    ("condition", "changes", "message"),
    [
        ("kontext", {"data": {"controls": None}}, "must not be kontext without data.controls"),
        ("kontext", {"model": {"condition": "none"}}, "data.controls: .*must be null unless"),
        ("kontext", {"data": {"images": None, "controls": None}}, "unless data.images is set"),
        ("kontext", {"data": {"controls": "https://host/pairs"}}, "must be a folder"),
        ("kontext", {"data": {"download": {"stream": True}}}, "if download.stream is set"),
        ("fill", {"data": {"validation": "coco"}}, "encoded samples have no conditions"),
        ("fill", {"model": {"in_channels": 64}}, "such as 384"),
        ("depth", {"model": {"in_channels": 12}}, "such as 128, if condition is depth"),
        ("depth", {"data": {"controls": None}}, "must not be depth without data.controls"),
        (
            "fill",
            {"task": "preprocess", "data": {"images": None, "controls": None, "source": "images"}},
            "must be none unless task is train, sample or benchmark",
        ),
    ],
)
def test_what_has_no_condition_is_refused(
    condition: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(condition, **changes)


def test_a_pair_is_encoded_again_if_its_control_changes(paths: RunPaths, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data/pairs", 3)
    other = RunPaths(paths.output, tmp_path / "data", paths.models)
    before = [entry.latents for entry in opened(other, "kontext").entries]
    (paths.output / "training_set.json").unlink()
    again = cache(config("kontext"), other, World.alone())
    assert not again.missing_pictures
    (data / "control/001.webp").write_bytes((data / "control/000.webp").read_bytes())
    after = [entry.latents for entry in opened(other, "kontext").entries]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_a_run_goes_on_without_the_controls_that_it_has_encoded(
    paths: RunPaths, tmp_path: Path
) -> None:
    data = write_pairs(tmp_path / "data/pairs", 4)
    other = RunPaths(paths.output, tmp_path / "data", paths.models)
    whole = RunPaths(paths.output / "whole", tmp_path / "data", paths.models)
    checkpoint = {"every_steps": 1, "asynchronous": False}
    in_process.train(config("kontext", checkpoint=checkpoint), whole)
    in_process.train(config("kontext", checkpoint=checkpoint), other, crash=2)
    (data / "control/002.webp").unlink()
    in_process.train(config("kontext", checkpoint=checkpoint), other)
    assert losses(other.output) == pytest.approx(losses(whole.output), rel=1e-5)


def test_pairs_are_not_packed(paths: RunPaths) -> None:
    pictures = find_pictures(config("kontext"), paths.data).pictures
    with pytest.raises(ConfigError, match="controls are not packed"):
        require_packable(pictures, "pairs")


def test_pictures_of_several_folders_have_controls_of_their_own(
    paths: RunPaths, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write_pairs(tmp_path / f"data/{name}", 2)
        (tmp_path / f"data/{name}/control").rename(tmp_path / f"data/moved-{name}")
    subsets = [{"image_dir": f"{name}/target"} for name in ("a", "b")]
    file = tmp_path / "data/pairs.json"
    file.write_text(json.dumps({"datasets": [{"subsets": subsets}]}))
    run = config("kontext", data={"images": "pairs.json", "controls": "controls"})
    labels = [
        picture.label
        for picture in find_pictures(
            config("fill", data={"images": "pairs.json", "controls": None}), tmp_path / "data"
        ).pictures
    ]
    folders = list(dict.fromkeys(label.rpartition("/")[0] for label in labels))
    assert len(folders) == 2
    for folder, name in zip(folders, ("a", "b"), strict=True):
        place = tmp_path / "data/controls" / folder
        place.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"data/moved-{name}").rename(place)
    found = find_pictures(run, tmp_path / "data")
    assert not found.skipped
    assert len({picture.control_path for picture in found.pictures}) == 4
