"""What is skipped is named once, with its reason, and too much of it refuses the run before training."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster.free_ports import free_port
from tests.trainer import in_process, ranks
from tests.trainer.cli.bad_inputs.bad_pictures import tar
from tests.trainer.picture_cache.folders import (
    cache,
    cache_together,
    config,
    file_of,
    noise,
    write_pictures,
)
from tests.trainer.picture_cache.remote.remote_pictures import table
from tests.trainer.tiny_encoders import SIDE

from fluxtrain.cli import main
from fluxtrain.contract.process import RunPaths
from fluxtrain.errors import DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.work import no_usable_images

COUNT = 10


@pytest.fixture
def paths(tmp_path: Path, models: Path) -> RunPaths:
    write_pictures(tmp_path / "data/pictures", COUNT)
    (tmp_path / "out").mkdir()
    return RunPaths(tmp_path / "out", tmp_path / "data", models)


def spoil(paths: RunPaths, *numbers: int, codec: str = "gbk") -> None:
    for number in numbers:
        text = f"{number} 红色的汽车".encode(codec)
        (paths.data / f"pictures/{number:03d}.txt").write_bytes(text)


def begun(paths: RunPaths, **data: Any) -> dict[str, Any]:
    """Begin a run; return its report."""
    run = config(data=data)
    cache(run, paths, World.alone()).open(run, paths.output)
    report: dict[str, Any] = json.loads((paths.output / "pictures.json").read_text())
    return report


def checked(paths: RunPaths, *options: str) -> int:
    sheet = f"--contact-sheet={paths.output.parent / 'sheet.png'}"
    size = f"--image-size={SIDE}"
    return main(["data", "check", "pictures", f"--data={paths.data}", size, sheet, *options])


def test_most_captions_of_another_codec_refuse_the_run_and_the_check(
    paths: RunPaths, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(paths, *range(1, COUNT))
    with pytest.raises(DataError) as caught:
        begun(paths)
    first, *skipped, last = str(caught.value).splitlines()
    reason = "its caption 001.txt is not UTF-8, likely gbk"
    assert first == (
        "9 of 10 pictures cannot be used, more than the share of spec.run.data.max_skipped, 0.1; "
        f"001.jpg: {reason}"
    )
    assert len(skipped) == 9
    assert skipped[-1] == f"9 files are skipped; {paths.output / 'pictures.json'} names all"
    assert last == (
        "mend the files, set spec.run.data.caption_encoding to gbk or raise spec.run.data.max_skipped"
    )
    assert caught.value.exit_code == 2
    report = json.loads((paths.output / "pictures.json").read_text())
    assert (len(report["skipped"]), report["skipped"]["001.jpg"]) == (9, reason)
    capfd.readouterr()
    assert checked(paths) == 1
    printed = capfd.readouterr()
    assert first in printed.err
    assert last in printed.err
    assert "1 picture can be used" in printed.out
    assert checked(paths, "--data.caption_encoding=gbk") == 0
    assert checked(paths, "--data.max_skipped=1") == 0
    assert begun(paths, caption_encoding="gbk")["skipped"] == {}


def test_the_first_ten_are_named_once_and_the_rest_counted(
    paths: RunPaths, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = paths.data / "pictures"
    (folder / "004.jpg").write_bytes(b"no picture")
    for number in range(12):
        (folder / f"x{number:02d}.heic").touch()
    (folder / "@eaDir").mkdir()
    (folder / "captions.csv").write_text("a.png,a cat")
    spoil(paths, 1)
    begun(paths, max_skipped=0.9)
    lines = capfd.readouterr().err.splitlines()
    named = [line for line in lines if line.startswith("skipped ")]
    assert len(named) == len(set(named)) == 10
    assert named[-1] == "skipped x07.heic: .heic is not read; convert it to PNG, JPEG or WebP"
    report = paths.output / "pictures.json"
    assert lines[-3] == f"14 files are skipped; {report} names all"
    assert lines[-2].startswith(
        "captions.csv is not read: a metadata file is metadata.jsonl, .csv or "
    )
    assert lines[-1].startswith("2 thumbnails, hidden files and the like are left out; ")


@pytest.mark.parametrize(
    ("count", "bad", "most", "begins"),
    [
        (3, 1, 0.1, True),
        (10, 1, 0.1, True),
        (10, 2, 0.1, False),
        (10, 2, 0.2, True),
        (10, 1, 0.0, False),
        (10, 0, 0.0, True),
        (2, 2, 1.0, False),
        (1, 0, 0.1, True),
        (1, 1, 1.0, False),
    ],
)
def test_the_share_decides_and_one_file_is_never_too_many(
    paths: RunPaths, count: int, bad: int, most: float, begins: bool
) -> None:
    folder = paths.data / "pictures"
    for number, path in enumerate(sorted(folder.glob("*[!t]"))):
        if number >= count:
            path.unlink()
        elif number < bad:
            path.write_bytes(b"no picture")
    if begins:
        assert len(begun(paths, max_skipped=most)["skipped"]) == bad
        return
    with pytest.raises(DataError, match=r"cannot be used|can be used"):
        begun(paths, max_skipped=most)
    assert (paths.output / "pictures.json").exists()


def test_a_table_and_a_shard_are_refused_too(paths: RunPaths) -> None:
    folder = paths.data / "pictures"
    names = sorted(path.name for path in folder.iterdir() if path.suffix != ".txt")
    members = {name.replace(".", "__"): (folder / name).read_bytes() for name in names}
    for number in (1, 2):
        (folder / names[number]).write_bytes(b"no picture")
        members[f"{number:03d}__txt"] = "红色的汽车".encode("gbk")
    (paths.data / "tables").mkdir()
    (paths.data / "tables/t.parquet").write_bytes(table(folder, names))
    (paths.data / "shards").mkdir()
    (paths.data / "shards/s.tar").write_bytes(tar(**members))
    download = {"folder": "node"}
    for images, name in (("tables", "t/row 1: no picture"), ("shards", "s/001.jpg: its caption")):
        for streams in (False, True):
            paths.output.joinpath("pictures.json").unlink(missing_ok=True)
            with pytest.raises(DataError, match="2 of 10 pictures cannot be used") as caught:
                begun(paths, images=images, download={**download, "stream": streams})
            assert name in str(caught.value)


def test_one_subset_of_another_codec(paths: RunPaths) -> None:
    write_pictures(paths.data / "others", 3)
    spoil(paths, *range(COUNT))
    sets = [{"image_dir": "pictures"}, {"image_dir": "others"}]
    (paths.data / "d.json").write_text(json.dumps({"datasets": [{"subsets": sets}]}))
    with pytest.raises(DataError, match=r"10 of 13 pictures .*pictures/000.png: .*likely gbk"):
        begun(paths, images="d.json")


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_alone_names_them(paths: RunPaths, size: int) -> None:
    spoil(paths, 1)
    (paths.data / "pictures/002.webp").write_bytes(b"no picture")
    run = config(data={"max_skipped": 0.5})
    together = partial(ranks.train_together, port=free_port())
    assert in_process.finish(together, run, paths, size) == [0] * size, ranks.output_of(paths)
    said = ranks.output_of(paths)
    assert said.count("skipped 001.jpg: its caption 001.txt is not UTF-8, likely gbk") == 1
    assert said.count("skipped 002.webp: no picture in a format") == 1
    refused = partial(cache_together, port=free_port())
    paths = RunPaths(paths.output / "2", paths.data, paths.models)
    assert in_process.finish(refused, config(data={"max_skipped": 0.0}), paths, size) == [2] * size


def test_names_that_cannot_be_printed_stay_on_one_line() -> None:
    error = no_usable_images({"a\n:::MLLOG.png": "no\x1bpicture", "\udcff.png": "x"})
    assert (
        str(error).splitlines()[0].endswith("a\\n:::MLLOG.png: no\\x1bpicture".replace(":::", ""))
    )
    assert str(error).isascii()


def test_a_picture_that_is_linked_below_the_data_root_is_trained(paths: RunPaths) -> None:
    folder = paths.data / "pictures"
    write_pictures(paths.data / "more", 2)
    (paths.data / "more/000.png").write_bytes(file_of(noise(SIDE, SIDE), "PNG"))
    (folder / "more").symlink_to("../more")
    (folder / "out").symlink_to("/etc")
    report = begun(paths)
    assert report["used"] == COUNT + 2
    assert list(report["skipped"]) == ["out/"]
