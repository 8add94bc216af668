"""COCO's archives are verified by name and SHA-1; the set made of them is that of the unpacked files."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from tests.trainer.prepare.faulty_server import serving
from tests.trainer.prepare.raw_sets.raw_cc12m import tars_in
from tests.trainer.prepare.raw_sets.raw_coco import CAPTIONS, write_raw_coco

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from fluxtrain.prepare import coco
from fluxtrain.prepare.coco import ANNOTATIONS, IMAGES

SAMPLES = ("--samples", "16", "--workers", "1")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with both archives, whose SHA-1s are the known ones, and their files, ``unpacked``."""
    folder = tmp_path / "raw"
    write_raw_coco(folder / "unpacked")
    members = {IMAGES: "val2014/*.jpg", ANNOTATIONS: CAPTIONS}
    digests = {}
    for name, pattern in members.items():
        with zipfile.ZipFile(folder / name, "w") as file:
            for path in (folder / "unpacked").glob(pattern):
                file.write(path, path.relative_to(folder / "unpacked"))
            file.writestr("../outside", "x")
        digests[name] = hashlib.sha1((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(coco, "SHA1", digests)
    return folder


def test_the_known_checksums_are_those_of_the_references_script() -> None:
    assert coco.SHA1 == {
        "val2014.zip": "fbedd73593f242db65cce6bcefde193fcedcc5c0",
        "annotations_trainval2014.zip": "8e0b9df54c175f1688400e98d1a97f292e726870",
    }


def test_archives_of_a_folder_or_a_server_make_the_set_of_the_unpacked_files(
    raw: Path, tmp_path: Path
) -> None:
    images, captions = raw / "unpacked/val2014", raw / "unpacked" / CAPTIONS
    served = {name: (raw / name).read_bytes() for name in (IMAGES, ANNOTATIONS)}
    with serving(served) as server:
        for source, name in (
            ([f"--images={images}", f"--captions={captions}"], "one"),
            ([f"--archives={raw}"], "two"),
            ([f"--archives={server.url}"], "three"),
        ):
            output = f"--output={tmp_path / name}"
            assert main(["prepare", "coco", *source, output, *SAMPLES]) == EXIT_OK
    assert (
        tars_in(tmp_path / "one") == tars_in(tmp_path / "two") == tars_in(tmp_path / "three") != {}
    )
    assert len(list((tmp_path / "two.raw/val2014").iterdir())) == 16  # of 30
    assert not (tmp_path / "outside").exists()


@pytest.mark.slow
def test_another_archive_of_the_name_is_refused(raw: Path, tmp_path: Path, capsys: Capture) -> None:
    with zipfile.ZipFile(raw / IMAGES, "a") as file:
        file.writestr("more", "x")
    options = ("--archives", str(raw), "--output", str(tmp_path / "set"), *SAMPLES)
    assert main(["prepare", "coco", *options]) == EXIT_ERROR
    errors = capsys.readouterr().err
    assert "val2014.zip: its SHA1 is" in errors
    assert coco.SHA1[IMAGES] in errors
    assert not (tmp_path / "set").exists()


def test_an_archive_without_an_image_is_refused(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    (raw / IMAGES).write_bytes(empty.getvalue())
    digests = {**coco.SHA1, IMAGES: hashlib.sha1(empty.getvalue()).hexdigest()}
    monkeypatch.setattr(coco, "SHA1", digests)
    options = ("--archives", str(raw), "--output", str(tmp_path / "set"), *SAMPLES)
    assert main(["prepare", "coco", *options]) == EXIT_USAGE
    assert "There is no item named" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [(), ("--images", "a"), ("--archives", "a", "--images", "b", "--captions", "c")]
)
def test_archives_or_unpacked_files_must_be_given(
    options: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    assert main(["prepare", "coco", *options, "--output", str(tmp_path / "set")]) == EXIT_USAGE
    assert "give --archives, or both --images and --captions" in capsys.readouterr().err
