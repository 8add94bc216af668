"""The tar writer refuses samples that could not be read back, and leaves whole files only."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer.data.formats.tar_files import image, write_tars

from fluxtrain.data.formats.tar_index import MAX_CAPTION_BYTES
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.images import TarImages
from fluxtrain.errors import DataError


def test_equal_samples_give_equal_tars(tmp_path: Path) -> None:
    first, second = write_tars(tmp_path / "a"), write_tars(tmp_path / "b")
    for path in first.glob("*.tar"):
        assert path.read_bytes() == (second / path.name).read_bytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": "/absolute"}, "leads out of the tar"),
        ({"key": "../up"}, "leads out of the tar"),
        ({"key": "a/../../b"}, "leads out of the tar"),
        ({"key": "line\nbreak"}, "control characters"),
        ({"key": "escape\x1b[2J"}, "control characters"),
        ({"key": "\udc80"}, "not UTF-8"),
        ({"key": ""}, "0 characters"),
        ({"key": "a.b"}, "has a dot"),
        ({"key": "a/"}, "is empty"),
        ({"key": "./a"}, "starts with ./"),
        ({"key": "n" * 97}, "name is too long"),
        ({"key": "taken"}, "given twice"),
        ({"suffix": "gif"}, "png|jpg|jpeg|webp"),
        ({"caption": "x" * (MAX_CAPTION_BYTES + 1)}, "65537 bytes"),
        ({"caption": "\ud800"}, "cannot be written as UTF-8"),
    ],
)
def test_a_sample_that_could_not_be_read_back_is_refused(
    tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    with TarWriter(tmp_path) as writer:
        writer.add("taken", image(), "png", "A")
        with pytest.raises(DataError) as error:
            writer.add(**{"key": "k", "image": image(), "suffix": "png", "caption": "", **changed})
        assert message in str(error.value)
    assert len(TarImages(tmp_path)) == 1


def test_an_image_that_is_too_large_to_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxtrain.data.formats.tar_writer.MAX_MEMBER_BYTES", 8)
    with (
        pytest.raises(DataError, match="an image of 9 bytes, at most 8 are read"),
        TarWriter(tmp_path) as writer,
    ):
        writer.add("k", b"123456789", "png", "")


def test_an_interrupted_writer_leaves_whole_tars_only(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TarWriter(tmp_path, shard_size=2) as writer:
            for i in range(3):
                writer.add(str(i), image(i), "png", "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["shard_000000.tar"]
    assert len(TarImages(tmp_path)) == 2


def test_a_folder_with_tars_is_refused(tmp_path: Path) -> None:
    write_tars(tmp_path)
    with pytest.raises(DataError, match="holds tars already"):
        TarWriter(tmp_path)
