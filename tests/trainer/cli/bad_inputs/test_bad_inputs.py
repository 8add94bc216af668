"""Bad data sets, data set configs and files of models: one line before the run begins, and no traceback.

The tables are `bad_pictures` and `bad_runs`; fields of jobs are in tests/contract/test_bad_files.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tests.contract.bad_specs import GOOD, changed
from tests.trainer.cli.bad_inputs.bad_pictures import (
    CONFIGS,
    PICTURES,
    SIDE,
    TABLES,
    BadInput,
    both,
    files,
    many_folders,
    masks,
    named,
    parquet,
    png,
    subset,
    tar,
)
from tests.trainer.cli.bad_inputs.bad_runs import RUNS, BadRun
from tests.trainer.picture_cache.folders import RUN, file_of, noise, write_pictures

from fluxtrain.cli import main
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from fluxtrain.launch import torchrun

ALL: list[BadInput] = [*PICTURES, *TABLES, *CONFIGS]


def name_of(row: BadInput | BadRun | Accepted) -> str:
    return row[0]


def checked(root: Path, make: Callable[[Path], object], data: Any) -> int:
    """Return the exit code of a check of what ``make`` writes."""
    (root / "set").mkdir(parents=True)
    make(root / "set")
    fields = [f"--data.{key}={json.dumps(value)}" for key, value in data.items() if key != "images"]
    roots = ["--data", str(root), "--contact-sheet", str(root / "sheet.png")]
    images = str(data.get("images", "set"))
    return main(["data", "check", images, "--image-size", str(SIDE), "--all", *roots, *fields])


@pytest.mark.slow
@pytest.mark.parametrize("row", ALL, ids=name_of)
def test_bad_data_are_answered_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: BadInput
) -> None:
    assert checked(tmp_path, row.make, row.data) == row.code
    printed = capsys.readouterr()
    assert printed.err.startswith("fluxtrain: error: ")
    assert row.line in printed.err
    rest = printed.err.splitlines()[1:]  # several pictures: each with its reason, the next step
    assert all(re.match(r"skipped |\d+ files? (is|are) skipped$|mend ", line) for line in rest)
    assert not printed.out
    assert not (tmp_path / "sheet.png").exists()


@pytest.mark.parametrize("row", RUNS, ids=name_of)
def test_bad_files_of_models_are_answered_before_a_process_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    row: BadRun,
) -> None:
    monkeypatch.setattr(torchrun, "launch", lambda *_: pytest.fail("the run began"))
    (tmp_path / "models").mkdir()
    write_pictures(tmp_path / "data/pictures", 1)
    row.make(tmp_path / "models")
    run = merge(merge(RUN, {"data": {"validation": "none"}}), row.run)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(changed(GOOD, "spec.run", run)))
    roots = [f"--{root}={tmp_path / root}" for root in ("data", "models", "output")]
    assert main(["run", str(tmp_path / "job.yaml"), *roots]) == EXIT_USAGE
    head_line, error = capsys.readouterr().err.splitlines()
    assert head_line.startswith("data ")
    assert error.startswith("fluxtrain: error: ")
    assert row.line.replace("/ROOT", str(tmp_path)) in error
    assert not (tmp_path / "output").exists()


def test_there_are_many_rows_with_different_names() -> None:
    names = [row.name for row in ALL] + [row.name for row in RUNS]
    assert len(set(names)) == len(names) >= 120


# What looks bad and is used: (name, how it is made, a line of the report, fields of data)
Accepted = tuple[str, Callable[[Path], object], str, dict[str, Any]]


def picture(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    return file_of(noise(SIDE, SIDE, mode), kind, **options)


def animation(kind: str) -> bytes:
    frames: Sequence[Image.Image] = [noise(SIDE, SIDE, seed=number) for number in range(3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


def sixteen_bits() -> bytes:
    return file_of(Image.new("I;16", (SIDE, SIDE), 40_000), "PNG")


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return file_of(noise(2 * SIDE, SIDE), "JPEG", exif=exif)


def unreadable_text(folder: Path) -> None:
    (folder / "a.png").write_bytes(png())
    (folder / "below").mkdir()
    (folder / "below/loop").symlink_to(folder)


ROW = '{"file_name": "a.png", "text": "a cat"}'
USED = "1 picture can be used"
ACCEPTED: list[Accepted] = [
    ("CMYK", files(a__jpg=picture("JPEG", "CMYK")), USED, {}),
    ("one picture", files(a__png=png()), "to encode: 1 latent and 1 caption, the empty one too; ", {}),
    ("16 bits", files(a__png=sixteen_bits()), USED, {}),
    ("an animated GIF", files(a__gif=animation("GIF")), USED, {}),
    ("an animated WebP", files(a__webp=animation("WEBP")), USED, {}),
    ("alpha", files(a__png=picture("PNG", "RGBA")), USED, {}),
    ("AVIF", files(a__avif=picture("AVIF")), USED, {}),
    ("a palette", files(a__png=file_of(noise(SIDE, SIDE).quantize(16), "PNG")), USED, {}),
    ("turned by EXIF", files(a__jpg=turned()), "64 x 128 to 64 x 128 pixels", {}),
    ("a PNG named .jpg", files(a__jpg=png()), USED, {}),
    ("a name with spaces", named("a cat, 1.png", png()), USED, {}),
    ("a name in Japanese", named("猫.png", png()), USED, {}),
    ("a suffix in capitals", named("a.PNG", png()), USED, {}),
    ("a loop of folders", unreadable_text, USED, {}),
    ("a thousand folders", both(many_folders, named("0500/a.png", png())), USED, {}),
    ("two pictures of one stem", files(a__png=png(), a__jpg=picture("JPEG")), "2 pictures can be", {}),
    ("a caption in UTF-16", files(a__png=png(), a__txt="a cat".encode("utf-16")), USED, {}),
    ("a caption with a BOM", files(a__png=png(), a__txt=b"\xef\xbb\xbfa cat"), USED, {}),
    ("an empty caption", files(a__png=png(), a__txt=""), "1 picture without a caption", {}),
    ("a csv with a BOM",
     files(a__png=png(), metadata__csv=b"\xef\xbb\xbffile_name,text\na.png,a cat\n"), USED, {}),
    ("a caption of a missing picture",
     files(a__png=png(), metadata__jsonl=f"{ROW.replace('a.png', 'b.png')}\n{ROW}"),
     "  b.png: row 1 of the metadata file names it, but it is missing", {}),
    ("one of two cut off", files(a__png=png(), b__png=png()[:900]), "  b.png: corrupt or cut off", {}),
    ("a table without captions", files(train__parquet=parquet(image=[png()])), "without a caption", {}),
    ("a shard with a link out", files(s__tar=tar(a__png=png(), **{"/b__png": png()})), USED, {}),
    ("a mask of half the size", masks(png(SIDE // 2, SIDE // 2)), "1 have masks", {"masks": "masks"}),
    ("a config", subset(num_repeats=4, class_tokens="a toy"), "set/: 4 samples in an epoch",
     {"images": "set.json"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", ACCEPTED, ids=name_of)
def test_unusual_data_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Accepted
) -> None:
    _, make, line, data = row
    assert checked(tmp_path, make, data) == EXIT_OK
    printed = capsys.readouterr()
    assert line in printed.out
    assert not printed.err


def test_a_folder_that_cannot_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def refused(path: Any) -> Any:
        if path != str(tmp_path / "set") and path != tmp_path / "set":
            return scandir(path)
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    assert checked(tmp_path, files(a__png=png()), {}) == EXIT_ERROR
    assert "set: cannot be read (Permission denied)" in capsys.readouterr().err


def test_the_word_none_is_no_data_set() -> None:
    values = merge(RUN, {"data": {"validation": "none"}})
    assert resolve(values).data.validation is None
    raw = {"preset": "mlperf-schnell-raw", "task": "preprocess", "preprocess": {"train": "none"}}
    assert resolve(raw).preprocess.train is None
    raw["preprocess"] = {"validation": "none"}
    assert resolve(raw).preprocess.validation is None
