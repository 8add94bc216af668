"""Tars of images are read as they were written; unreadable samples are named, and none is written."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from tests.trainer.data.formats.tar_files import (
    END_MARK,
    PILLOW_FORMATS,
    image,
    member,
    open_with,
    pixels,
    put,
    raw,
    sample,
    write_tars,
)
from webdataset.tariterators import group_by_keys, tar_file_iterator

from fluxtrain.data.formats.tar_index import MAX_CAPTION_BYTES
from fluxtrain.data.formats.tar_writer import TarWriter
from fluxtrain.data.images import SampleError, TarImages
from fluxtrain.errors import DataError
from fluxtrain.runtime.files import SharedFiles


def test_samples_are_read_exactly_and_in_order(tmp_path: Path) -> None:
    data = TarImages(write_tars(tmp_path))
    names = [path.name for path in sorted(tmp_path.glob("*.tar"))]
    assert names == [f"shard_00000{number}.tar" for number in range(3)]
    assert (len(data), data.skipped, data.num_skipped) == (7, [], 0)
    for i in (6, 0, 3, 2, 5, 1, 4):
        assert (data.key(i), data.caption(i)) == (f"part/key-{i}", f"Prompt {i} ☃")
        assert data.name(i) == f"{tmp_path}/shard_00000{i // 3}.tar key 'part/key-{i}'"
        expected = torch.from_numpy(pixels(i)).permute(2, 0, 1)
        torch.testing.assert_close(data.image(i), expected, rtol=0, atol=0)
    for outside in (7, -1):
        with pytest.raises(IndexError):
            data.key(outside)


@pytest.mark.parametrize("suffix", PILLOW_FORMATS)
def test_every_image_format_is_read_as_pillow_reads_it(tmp_path: Path, suffix: str) -> None:
    data = TarImages(write_tars(tmp_path, count=1, suffix=suffix))
    expected = np.array(Image.open(io.BytesIO(image(0, suffix))).convert("RGB"))
    np.testing.assert_array_equal(data.image(0).permute(1, 2, 0).numpy(), expected)


def test_webdataset_reads_our_tars(tmp_path: Path) -> None:
    write_tars(tmp_path, count=3)
    with (tmp_path / "shard_000000.tar").open("rb") as file:
        members = [{**each, "__url__": "a.tar"} for each in tar_file_iterator(file)]
    samples = list(group_by_keys(members))
    assert [each["__key__"] for each in samples] == [f"part/key-{i}" for i in range(3)]
    assert [each["txt"].decode() for each in samples] == [f"Prompt {i} ☃" for i in range(3)]
    assert [json.loads(each["json"]) for each in samples] == [{"number": i} for i in range(3)]
    assert [each["png"] for each in samples] == [image(i) for i in range(3)]


def test_we_read_the_tars_of_webdataset(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for i in range(3):
            writer.write({"__key__": f"{i:03d}", "png": pixels(i), "txt": f"P {i}", "cls": i})
    data = TarImages(tmp_path)
    samples = [(data.key(i), data.caption(i)) for i in range(3)]
    assert samples == [(f"{i:03d}", f"P {i}") for i in range(3)]
    np.testing.assert_array_equal(data.image(1).permute(1, 2, 0).numpy(), pixels(1))
    assert data.num_skipped == 0


def test_max_pixels_limits_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_with(tmp_path)
    monkeypatch.setattr("fluxtrain.data.images.MAX_PIXELS", 35)
    assert data.image(0).shape == (3, 5, 7)
    monkeypatch.setattr("fluxtrain.data.images.MAX_PIXELS", 34)
    with pytest.raises(SampleError, match="7x5 pixels, at most 34 are decoded"):
        data.image(0)


UNKNOWN = "neither PNG nor JPEG nor WebP"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", UNKNOWN),
        (b"not an image", UNKNOWN),
        (b"GIF89a" + bytes(100), UNKNOWN),
        (b"\x80\x04cos\nsystem\n(S'true'\ntR.", UNKNOWN),
        (image()[:60], "unreadable"),
        (image(0, "jpg")[:300], "unreadable"),
        (image(0, "webp")[:60], ""),
        (image()[:41] + b"\xff" * 20 + image()[61:], "unreadable"),
    ],
)
def test_an_unreadable_image_is_a_sample_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    data = open_with(tmp_path, member("bad.png", content), member("bad.txt", b"B"))
    with pytest.raises(SampleError) as error:
        data.image(0)
    assert str(error.value).startswith(f"{tmp_path}/a.tar key 'bad': ")
    assert message in str(error.value)
    assert data.image(1).shape == (3, 5, 7)


def test_a_caption_that_is_not_utf8_is_a_sample_error(tmp_path: Path) -> None:
    data = open_with(tmp_path, member("a.png", image()), member("a.txt", b"caf\xe9"))
    with pytest.raises(SampleError, match=r"a\.tar key 'a': its caption is not UTF-8"):
        data.caption(0)
    assert data.caption(1) == "Prompt 9"


def test_a_tar_changed_after_opening_is_a_sample_error(tmp_path: Path) -> None:
    cut, removed = (TarImages(write_tars(tmp_path / name, count=2)) for name in ("cut", "removed"))
    os.truncate(tmp_path / "cut/shard_000000.tar", 100)
    with pytest.raises(SampleError, match="key 'part/key-0': cut off"):
        cut.image(0)
    (tmp_path / "removed/shard_000000.tar").unlink()
    with pytest.raises(SampleError, match="key 'part/key-1': No such file"):
        removed.caption(1)


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tars are here"):
        TarImages(tmp_path / "missing")
    put(tmp_path, raw(member("a.png", b"x")) + END_MARK)
    with pytest.raises(DataError, match=r"no images with captions: .*'a': it has no caption"):
        TarImages(tmp_path)


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(DataError, match="not a regular file"):
        TarImages(tmp_path)
    (tmp_path / "a.tar").unlink()
    (tmp_path / "a.tar").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"a\.tar: No such file"):
        TarImages(tmp_path)


def test_members_of_one_key_need_not_be_neighbours(tmp_path: Path) -> None:
    (first, caption), (second, other_caption) = sample("a"), sample("b", 1)
    data = open_with(tmp_path, first, second, other_caption, caption, member("b.json", b"{}"))
    assert [data.key(i) for i in range(len(data))] == ["a", "b", "good"]
    assert data.caption(0) == "Prompt 0"


def test_a_leading_dot_folder_and_upper_case_suffixes_are_accepted(tmp_path: Path) -> None:
    data = open_with(tmp_path, member("./x/a.JPG", image(0, "jpg")), member("./x/a.txt", b"A"))
    assert data.key(0) == "x/a"


@pytest.mark.parametrize("max_open", [1, 100])
def test_threads_read_the_same_samples(tmp_path: Path, max_open: int) -> None:
    data = TarImages(write_tars(tmp_path, count=12, shard_size=2))
    data._files = SharedFiles(data._paths, max_open)
    order = np.random.default_rng(0).integers(0, len(data), 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        captions = list(pool.map(data.caption, order))
    assert captions == [f"Prompt {i} ☃" for i in order]
    assert len(data._files._open) <= max_open + 8


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork beside torch's threads
@pytest.mark.parametrize("copy", [lambda data: data, lambda data: pickle.loads(pickle.dumps(data))])
def test_other_processes_read_the_same_samples(
    tmp_path: Path, copy: Callable[[TarImages], TarImages]
) -> None:
    data = TarImages(write_tars(tmp_path, count=6, shard_size=2))
    expected = [data.caption(i) for i in range(6)]  # opens the tars
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:  # kills no process
        assert list(pool.map(copy(data).caption, range(6))) == expected


def test_open_tars_are_closed_with_the_data_set(tmp_path: Path) -> None:
    data = TarImages(write_tars(tmp_path))
    data.caption(0)
    (file,) = data._files._open.values()
    os.fstat(file)
    del data
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


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
