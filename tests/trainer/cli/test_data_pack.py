"""``fluxtrain data pack``: shards of any source, read back as data.images with equal latents and captions."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tests.trainer.cli.bad_pictures import files, named, parquet, png, tar
from tests.trainer.picture_cache.folders import cache, config, write_pictures
from tests.trainer.tiny_encoders import write_encoders

from fluxtrain.cli import main
from fluxtrain.contract.launch import RunPaths
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.distributed import World

COUNT = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    write_pictures(root / "pictures", COUNT)
    (root / "pictures/003.txt").unlink(missing_ok=True)
    subsets = [{"image_dir": "pictures", "num_repeats": 3, "class_tokens": "a toy"}]
    (root / "set.json").write_text(json.dumps({"datasets": [{"subsets": subsets}]}))
    for name in ("shards", "tables"):
        (root / name).mkdir()
    files(s__tar=tar(b__png=png(), a__png=png(80), a__txt=b"a cat"))(root / "shards")
    named("train.parquet", parquet(image=[png(), png(90)], text=["x", None]))(root / "tables")
    return root


def pack(root: Path, source: str, *options: str) -> int:
    return main(["data", "pack", source, str(root / "packed"), "--data", str(root), *options])


def trained(root: Path, models: Path, images: str, repeats: int = 1) -> PictureDataset:
    paths = RunPaths(root.parent / f"out-{Path(images).stem}", root, models)
    run = config(data={"images": images, "repeats": repeats})
    return cache(run, paths, World.alone()).open(run, paths.output)[0]


@pytest.mark.parametrize("source", ["pictures", "set.json", "shards", "tables"])
def test_a_run_on_the_shards_has_the_samples_of_the_source(
    data: Path, models: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    assert pack(data, source, "--shard-size=3") == 0
    repeats = 3 if source == "set.json" else 1
    expected, found = trained(data, models, source), trained(data, models, "packed", repeats)
    assert ("set spec.run.data.repeats" in capsys.readouterr().out) == (repeats > 1)
    assert len(found) == len(expected)
    for entry, other in zip(found.entries, expected.entries, strict=True):
        assert entry.captions == other.captions
        assert [path.name for path in entry.latents] == [path.name for path in other.latents]
        assert entry.latents[0].read_bytes() == other.latents[0].read_bytes()


def test_equal_pictures_give_equal_bytes_and_names(data: Path) -> None:
    assert pack(data, "pictures", "--shard-size=3") == 0
    first = {path.name: path.read_bytes() for path in (data / "packed").iterdir()}
    (data / "packed").rename(data / "before")
    assert pack(data, "pictures", "--shard-size=3") == 0
    assert {path.name: path.read_bytes() for path in (data / "packed").iterdir()} == first
    assert sorted(first) == [f"pictures-00000{number}.tar" for number in range(3)]
    with tarfile.open(data / "packed/pictures-000000.tar") as archive:
        assert archive.getnames()[:2] == ["00000000.png", "00000000.txt"]


def test_an_output_is_made_whole_or_not_at_all(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "packed.partial").mkdir()
    (data / "packed.partial/old.tar").touch()
    assert pack(data, "pictures") == 0
    assert [path.name for path in (data / "packed").iterdir()] == ["pictures-000000.tar"]
    assert pack(data, "pictures") == 74
    assert "packed: exists already; name a folder to make" in capsys.readouterr().err


def test_what_shards_cannot_say_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = {"image_dir": "pictures"}, {"image_dir": "shards", "num_repeats": 2}
    (data / "set.json").write_text(json.dumps({"datasets": [{"subsets": [one, other]}]}))
    assert pack(data, "set.json") == 2
    assert "its folders have different repeats, which shards do not have" in capsys.readouterr().err
    assert pack(data, "pictures", "--data.masks=alpha") == 2
    assert "spec.run.data.masks: masks are not packed" in capsys.readouterr().err
    assert not (data / "packed").exists()
