"""``fluxtrain data pack``: shards of any source, read back as data.images with equal latents and captions."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tests.trainer.cli.bad_inputs.bad_pictures import files, named, parquet, png, tar
from tests.trainer.picture_cache.folders import cache, config, write_pictures
from tests.trainer.tiny_encoders import write_encoders

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.data.pictures.dataset import PictureDataset
from fluxtrain.parallel.distributed import World

pytestmark = pytest.mark.slow

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


def test_pictures_that_cannot_be_used_are_left_out_and_named(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "pictures/004.jpg").write_bytes(b"no picture")
    (data / "pictures/zzz.png").write_bytes((data / "pictures/000.png").read_bytes()[:60])
    assert pack(data, "pictures", "--shard-size=3") == 0
    printed = capsys.readouterr()
    assert f"{COUNT - 1} pictures in 2 shards" in printed.out
    assert "left out 004.jpg: no picture in a format" in printed.err
    assert "left out zzz.png: corrupt or cut off" in printed.err
    keys = list[str]()
    for path in sorted((data / "packed").iterdir()):
        with tarfile.open(path) as archive:
            keys += [name.partition(".")[0] for name in archive.getnames()]
    assert list(dict.fromkeys(keys)) == [f"{number:08d}" for number in range(COUNT - 1)]


def test_without_a_picture_that_can_be_used_nothing_is_written(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (data / "pictures").iterdir():
        if path.suffix != ".txt":
            path.write_bytes(b"no picture")
    assert pack(data, "pictures") == 2
    assert "none of the 7 pictures can be used" in capsys.readouterr().err
    assert not list(data.glob("packed*"))


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ({"resolution": 64}, "64 x 64"),
        ({"resolution": [96, 96], "enable_bucket": True, "bucket_reso_steps": 32}, "64 x 128"),
        (
            {
                "resolution": 64,
                "enable_bucket": True,
                "bucket_reso_steps": 16,
                "max_bucket_reso": 80,
            },
            "48 x 80",
        ),
    ],
)
def test_a_config_is_packed_and_checked_at_its_own_sizes(
    data: Path, capsys: pytest.CaptureFixture[str], sizes: dict[str, object], shown: str
) -> None:
    subsets = [{"image_dir": "pictures"}]
    content = {"general": {"batch_size": 4}, "datasets": [{**sizes, "subsets": subsets}]}
    (data / "set.json").write_text(json.dumps(content))
    assert pack(data, "set.json") == 0
    sheet = f"--contact-sheet={data / 'sheet.png'}"
    assert main(["data", "check", "set.json", "--data", str(data), sheet]) == 0
    assert shown in capsys.readouterr().out.replace("×", "x")


def test_what_shards_cannot_say_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = {"image_dir": "pictures"}, {"image_dir": "shards", "num_repeats": 2}
    (data / "set.json").write_text(json.dumps({"datasets": [{"subsets": [one, other]}]}))
    assert pack(data, "set.json") == 2
    assert "its folders have different repeats, which shards do not have" in capsys.readouterr().err
    assert pack(data, "pictures", "--data.masks=alpha") == 2
    assert "spec.run.data.masks: masks are not packed" in capsys.readouterr().err
    assert not (data / "packed").exists()
