"""Image data sets in tars: exact round trips, agreement with webdataset, hostile shards without harm."""

from __future__ import annotations

import gzip
import io
import json
import multiprocessing
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_iterator

from fluxtrain.data.images.decode import decode
from fluxtrain.data.tar.dataset import SampleError, TarImages, _Files
from fluxtrain.data.tar.index import MAX_CAPTION_BYTES, MAX_SKIPPED, build_index, open_index
from fluxtrain.data.tar.members import MAX_MEMBER_BYTES, read_members
from fluxtrain.data.tar.writer import TarWriter
from fluxtrain.errors import DataError

PILLOW_FORMATS = {"png": "PNG", "jpg": "JPEG", "jpeg": "JPEG", "webp": "WEBP"}
EMPTY_BLOCKS = bytes(1024)


def encoded(image: Image.Image, suffix: str = "png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, PILLOW_FORMATS[suffix], **options)
    return buffer.getvalue()


def pixels(i: int, height: int = 5, width: int = 7) -> np.ndarray[Any, Any]:
    return np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)


def picture(i: int = 0, suffix: str = "png") -> bytes:
    return encoded(Image.fromarray(pixels(i)), suffix)


def write(folder: Path, count: int = 7, shard_size: int = 3, suffix: str = "png") -> Path:
    with TarWriter(folder, shard_size) as writer:
        for i in range(count):
            writer.add(f"part/key-{i}", picture(i, suffix), suffix, f"Prompt {i} ☃", {"number": i})
    return folder


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    for field, value in fields.items():
        setattr(header, field, value)
    return header, content


def sample(key: str, i: int = 0) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [member(f"{key}.png", picture(i)), member(f"{key}.txt", f"Prompt {i}".encode())]


def block(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a header that claims ``size`` bytes, whatever follows it."""
    header, _ = member(name, type=kind)
    header.size = size
    return header.tobuf(tarfile.GNU_FORMAT)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(*records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    content = b"".join(records)
    return block("pax", len(content), kind) + padded(content)


def raw(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return ``members`` as a tar without its end mark."""
    return b"".join(header.tobuf(form) + padded(content) for header, content in members)


def put(folder: Path, content: bytes, name: str = "a.tar") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    return path


def dataset(folder: Path, *members: tuple[tarfile.TarInfo, bytes], **options: Any) -> TarImages:
    """Return the data set of one tar: ``members`` and then a good sample of key ``good``."""
    put(folder, raw(*members, *sample("good", 9)) + EMPTY_BLOCKS)
    return TarImages(folder, **options)


# Round trips


def test_samples_come_back_exactly_and_in_order(tmp_path: Path) -> None:
    data = TarImages(write(tmp_path))
    assert [path.name for path in sorted(tmp_path.glob("*.tar"))] == [
        f"shard_00000{number}.tar" for number in range(3)
    ]
    assert len(data) == 7
    assert data.skipped == []
    assert data.num_skipped == 0
    for i in (6, 0, 3, 2, 5, 1, 4):
        assert data.key(i) == f"part/key-{i}"
        assert data.caption(i) == f"Prompt {i} ☃"
        assert data.name(i) == f"{tmp_path}/shard_00000{i // 3}.tar key 'part/key-{i}'"
        torch.testing.assert_close(
            data.image(i), torch.from_numpy(pixels(i)).permute(2, 0, 1), rtol=0, atol=0
        )


def test_an_index_outside_the_data_set_is_refused(tmp_path: Path) -> None:
    data = TarImages(write(tmp_path))
    for index in (7, -1):
        with pytest.raises(IndexError):
            data.key(index)


@pytest.mark.parametrize("suffix", PILLOW_FORMATS)
def test_every_image_format_is_read_as_pillow_reads_it(tmp_path: Path, suffix: str) -> None:
    data = TarImages(write(tmp_path, count=1, suffix=suffix))
    expected = np.array(Image.open(io.BytesIO(picture(0, suffix))).convert("RGB"))
    np.testing.assert_array_equal(data.image(0).permute(1, 2, 0).numpy(), expected)


def test_equal_samples_give_equal_tars(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    for path in first.glob("*.tar"):
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_webdataset_reads_what_we_write(tmp_path: Path) -> None:
    write(tmp_path, count=3)
    with (tmp_path / "shard_000000.tar").open("rb") as file:
        members = [{**each, "__url__": "a.tar"} for each in tar_file_iterator(file)]
    found = list(group_by_keys(members))
    assert [each["__key__"] for each in found] == [f"part/key-{i}" for i in range(3)]
    assert [each["txt"].decode() for each in found] == [f"Prompt {i} ☃" for i in range(3)]
    assert [json.loads(each["json"]) for each in found] == [{"number": i} for i in range(3)]
    assert [each["png"] for each in found] == [picture(i) for i in range(3)]


def test_we_read_what_webdataset_writes(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for i in range(3):
            writer.write({"__key__": f"{i:03d}", "png": pixels(i), "txt": f"P {i}", "cls": i})
    data = TarImages(tmp_path)
    assert [(data.key(i), data.caption(i)) for i in range(3)] == [
        (f"{i:03d}", f"P {i}") for i in range(3)
    ]
    np.testing.assert_array_equal(data.image(1).permute(1, 2, 0).numpy(), pixels(1))
    assert data.num_skipped == 0


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_members_are_those_that_tarfile_finds(tmp_path: Path, form: int) -> None:
    path = tmp_path / "a.tar"
    long = "" if form == tarfile.USTAR_FORMAT else "long ☃ " * 40
    with tarfile.open(path, "w", format=form, pax_headers={"comment": "global"}) as tar:
        for i in range(4):
            content = bytes(i * 300)
            tar.addfile(member(f"x/{long}{i}.png", content, mtime=0.5 * i)[0], io.BytesIO(content))
    with tarfile.open(path, "r:") as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar]
    assert [(each.name, each.offset, each.size) for each in read_members(path)] == expected


def test_members_of_one_key_need_not_be_neighbours(tmp_path: Path) -> None:
    (image, caption), (other_image, other_caption) = sample("a"), sample("b", 1)
    data = dataset(tmp_path, image, other_image, other_caption, caption, member("b.json", b"{}"))
    assert [data.key(i) for i in range(len(data))] == ["a", "b", "good"]
    assert data.caption(0) == "Prompt 0"


def test_a_leading_dot_folder_and_capital_suffixes_are_understood(tmp_path: Path) -> None:
    data = dataset(tmp_path, member("./x/a.JPG", picture(0, "jpg")), member("./x/a.txt", b"A"))
    assert data.key(0) == "x/a"


# The writer


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
        writer.add("taken", picture(), "png", "A")
        with pytest.raises(DataError) as error:
            writer.add(
                **{"key": "k", "image": picture(), "suffix": "png", "caption": "", **changed}
            )
        assert message in str(error.value)
    assert len(TarImages(tmp_path)) == 1


def test_a_failed_preparation_leaves_whole_tars_only(tmp_path: Path) -> None:
    def stop_midway() -> None:
        with TarWriter(tmp_path, shard_size=2, extra_files={"LICENSE.txt": "x"}) as writer:
            for i in range(3):
                writer.add(str(i), picture(i), "png", "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_midway()
    assert [path.name for path in tmp_path.iterdir()] == ["shard_000000.tar"]
    assert len(TarImages(tmp_path)) == 2


def test_a_folder_with_tars_is_not_written_to(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(DataError, match="tars are here already"):
        TarWriter(tmp_path)


def test_extra_files_lie_beside_the_tars(tmp_path: Path) -> None:
    with TarWriter(tmp_path, extra_files={"ATTRIBUTION.txt": "By ☃"}) as writer:
        writer.add("a", picture(), "png", "")
    assert (tmp_path / "ATTRIBUTION.txt").read_text(encoding="utf-8") == "By ☃"
    assert len(TarImages(tmp_path)) == 1


# Images


def test_transparent_parts_become_white() -> None:
    rgba = np.zeros((1, 3, 4), dtype=np.uint8)
    rgba[0, :, 3] = (0, 255, 51)
    for suffix in ("png", "webp"):
        options = {"lossless": True, "exact": True} if suffix == "webp" else {}
        image = decode(encoded(Image.fromarray(rgba), suffix, **options))
        assert image[:, 0].tolist() == [[255, 0, 204]] * 3


def test_a_palette_with_transparency_is_laid_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    assert decode(encoded(image, transparency=bytes([0, 255])))[:, 0].tolist() == [
        [255, 40],
        [255, 50],
        [255, 60],
    ]


def test_sixteen_bits_of_grey_keep_their_upper_eight() -> None:
    grey = Image.fromarray(np.array([[0, 300, 0x8000, 65535]], dtype=np.uint16))
    assert decode(encoded(grey))[:, 0].tolist() == [[0, 1, 128, 255]] * 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    image = decode(encoded(Image.new(mode, (4, 2)), suffix))
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 2, 4))


def bomb(width: int, height: int) -> bytes:
    """Return a PNG that claims ``width`` x ``height`` pixels in under a kilobyte."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    "side",
    [9_000, 10_000, 20_000, 2**31 - 1],  # over our limit; where Pillow warns; where it refuses
)
def test_a_decompression_bomb_is_not_decoded(tmp_path: Path, side: int) -> None:
    data = dataset(tmp_path, member("bomb.png", bomb(side, side)), member("bomb.txt", b"B"))
    with pytest.raises(SampleError, match=r"a\.tar key 'bomb': its image is unreadable"):
        data.image(0)
    assert data.image(1).shape == (3, 5, 7)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_that_pillow_only_warns_of_is_not_decoded() -> None:
    with pytest.raises(ValueError, match="10000x10000 pixels, at most 89478485"):
        decode(bomb(10_000, 10_000), max_pixels=1 << 40)


def test_max_pixels_bounds_the_images(tmp_path: Path) -> None:
    assert dataset(tmp_path, max_pixels=35).image(0).shape == (3, 5, 7)
    with pytest.raises(SampleError, match="7x5 pixels, at most 34 are decoded"):
        TarImages(tmp_path, max_pixels=34).image(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither PNG nor JPEG nor WebP"),
        (b"not an image", "neither PNG nor JPEG nor WebP"),
        (b"GIF89a" + bytes(100), "neither PNG nor JPEG nor WebP"),
        (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "neither PNG nor JPEG nor WebP"),
        (picture()[:60], "unreadable"),
        (picture(0, "jpg")[:300], "unreadable"),
        (picture(0, "webp")[:60], ""),
        (picture()[:41] + b"\xff" * 20 + picture()[61:], "unreadable"),
    ],
)
def test_an_unreadable_image_is_a_sample_error(
    tmp_path: Path, content: bytes, message: str
) -> None:
    data = dataset(tmp_path, member("bad.png", content), member("bad.txt", b"B"))
    with pytest.raises(SampleError) as error:
        data.image(0)
    assert str(error.value).startswith(f"{tmp_path}/a.tar key 'bad': ")
    assert message in str(error.value)
    assert data.image(1).shape == (3, 5, 7)


def test_no_damage_to_an_image_ends_in_anything_but_a_value_error() -> None:
    rng, outcomes = np.random.default_rng(0), set[str]()
    for suffix in PILLOW_FORMATS:
        whole = np.frombuffer(picture(0, suffix), dtype=np.uint8)
        for _ in range(100):
            damaged = whole.copy()
            places = rng.integers(0, len(whole), 4)
            damaged[places] = rng.integers(0, 256, 4)
            try:
                outcomes.add(str(decode(damaged.tobytes()).dtype))
            except ValueError as error:
                outcomes.add(str(error))
    assert "torch.uint8" in outcomes
    assert len(outcomes) > 5
    assert all(outcome.isprintable() for outcome in outcomes)


# Members to pass over


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (member("../../x.png", b"p"), "member '../../x.png': its name leads out of the tar"),
        (member("a/../../x.png", b"p"), "its name leads out of the tar"),
        (member("/etc/x.png", b"p"), "member '/etc/x.png': its name leads out of the tar"),
        (member("a\x1b[31m.png", b"p"), r"member 'a\x1b[31m.png': its name has control"),
        (member("a\udcff.png", b"p"), "not UTF-8"),
        (member("n" * 1030 + ".png", b"p"), "its name has 1034 characters"),
        (member("a.png", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "it is a symbolic link"),
        (member("a.png", type=tarfile.LNKTYPE, linkname="good.png"), "it is a hard link"),
        (member("a.png", type=tarfile.CHRTYPE), "it is a device"),
        (member("a.png", type=tarfile.BLKTYPE), "it is a device"),
        (member("a.png", type=tarfile.FIFOTYPE), "it is a named pipe"),
        (member("a.png", b"p", type=b"Z"), "it is of an unknown kind"),
        (member("a.txt", bytes(MAX_CAPTION_BYTES + 1)), "a caption of 65537 bytes"),
        (member("a.png", b"p"), "sample 'a': it has no caption"),
        (member("a.txt", b"p"), "sample 'a': it has no image"),
        (member("good.jpg", b"p"), "member 'good.png': the key has an image already"),
    ],
)
def test_a_member_of_no_use_is_named_and_the_rest_is_read(
    tmp_path: Path, bad: tuple[tarfile.TarInfo, bytes], message: str
) -> None:
    data = dataset(tmp_path, bad)
    assert message in data.skipped[0]
    assert data.skipped[0].startswith(f"{tmp_path}/a.tar: ")
    assert data.skipped[0].isprintable()
    assert (data.num_skipped, data.key(len(data) - 1)) == (1, "good")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.index.json"]


def test_of_duplicate_keys_the_first_is_kept(tmp_path: Path) -> None:
    data = dataset(tmp_path, *sample("a", 1), *sample("a", 2))
    assert (len(data), data.caption(0), data.num_skipped) == (2, "Prompt 1", 2)
    np.testing.assert_array_equal(data.image(0).permute(1, 2, 0).numpy(), pixels(1))


def test_folders_and_other_kinds_of_files_are_no_samples(tmp_path: Path) -> None:
    others = [
        member("x", type=tarfile.DIRTYPE),
        member("README", b"r"),
        member("a.cls", b"1"),
        member(".hidden.png", b"p"),
        member("._a.txt", b"p"),
    ]
    data = dataset(tmp_path, *others)
    assert (len(data), data.num_skipped) == (1, 0)


def test_a_link_with_a_size_hides_nothing(tmp_path: Path) -> None:
    content = block("a.png", 5000, tarfile.LNKTYPE) + raw(*sample("good")) + EMPTY_BLOCKS
    put(tmp_path, content)
    assert TarImages(tmp_path).key(0) == "good"


def test_sparse_files_are_passed_over(tmp_path: Path) -> None:
    old = bytearray(block("old.png", 512, tarfile.GNUTYPE_SPARSE))
    old[482] = 1  # the map goes on in a block of its own
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + sum(old[156:]) + 8 * 32)
    new = pax(b"22 GNU.sparse.major=1\n", b"22 GNU.sparse.minor=0\n") + block("new.png", 512)
    put(
        tmp_path,
        bytes(old) + bytes(512) + bytes(512) + new + bytes(512) + raw(*sample("g")) + EMPTY_BLOCKS,
    )
    data = TarImages(tmp_path)
    assert (len(data), data.key(0)) == (1, "g")
    assert [text.partition(": ")[2] for text in data.skipped] == [
        "member 'old.png': it is a sparse file",
        "member 'new.png': it is a sparse file",
    ]


def test_a_member_over_the_limit_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with path.open("wb") as file:  # a hole on disk: the bytes are claimed and never read
        file.write(block("big.png", MAX_MEMBER_BYTES + 1))
        file.seek(512 + MAX_MEMBER_BYTES + 512)
        file.write(raw(*sample("good")) + EMPTY_BLOCKS)
    data = TarImages(tmp_path)
    assert (len(data), data.key(0)) == (1, "good")
    assert "it claims 268435457 bytes, at most 268435456 are read" in data.skipped[0]


@pytest.mark.parametrize("size", [1 << 40, (1 << 62) + 1])
def test_after_a_member_of_absurd_size_nothing_is_found(tmp_path: Path, size: int) -> None:
    put(tmp_path, raw(*sample("a")) + block("big.png", size) + raw(*sample("b")) + EMPTY_BLOCKS)
    data = TarImages(tmp_path)
    assert (len(data), data.num_skipped) == (1, 1)
    assert f"claims {size} bytes" in data.skipped[0]
    assert "nothing after it can be found" in data.skipped[0]


def test_of_many_skipped_members_the_first_texts_are_kept_and_all_counted(tmp_path: Path) -> None:
    data = dataset(tmp_path, *(member(f"{i}.txt", b"x") for i in range(150)))
    assert (len(data.skipped), data.num_skipped) == (MAX_SKIPPED, 150)
    again = TarImages(tmp_path)
    assert (again.skipped, again.num_skipped) == (data.skipped, 150)


def test_a_caption_that_is_not_utf8_is_a_sample_error(tmp_path: Path) -> None:
    data = dataset(tmp_path, member("a.png", picture()), member("a.txt", b"caf\xe9"))
    with pytest.raises(SampleError, match=r"a\.tar key 'a': its caption is not UTF-8"):
        data.caption(0)
    assert data.caption(1) == "Prompt 9"


# Tars to refuse


GOOD = raw(*sample("a"), *sample("b", 1))
LONG_NAMES = block("x", 0, tarfile.GNUTYPE_LONGNAME)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (gzip.compress(GOOD), "compressed with gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
        (b"x" * 2000, "its header at byte 0: invalid header"),
        (b"x" * 100, "cut off before its end mark"),
        (GOOD, "cut off before its end mark"),
        (GOOD[:-512], "member 'b.txt' ends at byte 4096 of 3584: cut off"),
        (GOOD[:1500], "cut off"),
        (GOOD[:700], "member 'a.png' ends at byte 1024 of 700: cut off"),
        (GOOD + b"junk" * 128 + EMPTY_BLOCKS, "its header at byte 4096: "),
        (block("a.png", -5) + EMPTY_BLOCKS, "a negative size"),
        (block("x", 1 << 30, tarfile.XHDTYPE), "an extension header claims 1073741824 bytes"),
        (block("x", 1 << 30, tarfile.GNUTYPE_LONGNAME), "an extension header claims"),
        (block("x", 5000, tarfile.XHDTYPE), "cut off in an extension header"),
        (pax(b"19 size=-999999999\n") + EMPTY_BLOCKS, "gives the size '-999999999'"),
        (pax(b"12 size=1e9\n") + EMPTY_BLOCKS, "gives the size '1e9'"),
        (pax(b"5012 size=" + b"9" * 5001 + b"\n") + EMPTY_BLOCKS, "gives the size '9999"),
        (pax(b"99999999 path=x\n") + EMPTY_BLOCKS, "a pax header is malformed"),
        (pax(b"0 path=x\n") + EMPTY_BLOCKS, "a pax header is malformed"),
        (pax(b"10 path=x\n", b"no length\n") + EMPTY_BLOCKS, "a pax header is malformed"),
        (pax(b"10 path=x\n", b"0 path=x\n") + EMPTY_BLOCKS, "a pax header is malformed"),
        (pax(b"10 path=x\n", b"2 path=x\n") + EMPTY_BLOCKS, "a pax header is malformed"),
        (pax(b"1" * 5000) + EMPTY_BLOCKS, "a pax header is malformed"),
        (pax(b"no length\n") + EMPTY_BLOCKS, "a pax header is malformed"),
        (pax(b"9 path=xyz\n") + EMPTY_BLOCKS, "a pax header is malformed"),
        (LONG_NAMES * 5000, "cut off before its end mark"),
    ],
)
def test_a_tar_that_is_not_whole_is_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = put(tmp_path, content)
    with pytest.raises(DataError) as error:
        TarImages(tmp_path)
    assert str(error.value).startswith(f"{path}: not a whole tar (")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_tar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, count=2) / "shard_000000.tar"
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    end_mark = last.offset_data + 512
    for length in range(0, end_mark + 512, 100):
        path.write_bytes(content[:length])
        with pytest.raises(DataError):
            build_index(path)
    path.write_bytes(content[: end_mark + 512])
    assert len(build_index(path).keys) == 2


def damaged_header(content: bytes, rng: np.random.Generator) -> bytes:
    """Return ``content`` with three bytes of one header replaced and its checksum made to fit."""
    damaged = bytearray(content)
    start = 1024 * int(rng.integers(0, 5))  # of the five headers, each with a block of content
    for place in rng.integers(0, 180, 3).tolist():
        damaged[start + place] = int(rng.integers(0, 256))
    damaged[start + 148 : start + 156] = b" " * 8
    total = sum(damaged[start : start + 512])
    damaged[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(damaged)


def test_no_damage_to_a_header_ends_in_anything_but_a_data_error(tmp_path: Path) -> None:
    rng, outcomes = np.random.default_rng(0), set[str]()
    content = pax(b"10 path=x\n") + GOOD + EMPTY_BLOCKS
    for _ in range(400):
        path = put(tmp_path, damaged_header(content, rng))
        try:
            index = build_index(path)
        except DataError as error:
            outcomes.add(str(error))
            continue
        outcomes.update(index.skipped.texts, index.keys)
        ends = index.spans[:, ::2] + index.spans[:, 1::2]
        assert (index.spans >= 0).all()
        assert (ends <= len(content)).all()
    assert "b" in outcomes
    assert len(outcomes) > 10
    assert all(outcome.isprintable() for outcome in outcomes)


def test_a_size_in_a_pax_header_counts(tmp_path: Path) -> None:
    png = picture()
    entry = pax(b"12 size=%d\n" % len(png)) + block("a.png", 0) + padded(png)
    assert len(b"12 size=%d\n" % len(png)) == 12
    put(tmp_path, entry + raw(member("a.txt", b"A")) + EMPTY_BLOCKS)
    np.testing.assert_array_equal(TarImages(tmp_path).image(0).permute(1, 2, 0), pixels(0))


def test_a_global_pax_header_speaks_of_no_member(tmp_path: Path) -> None:
    lie = pax(b"17 path=../../up\n", b"15 size=999999\n", kind=tarfile.XGLTYPE)
    put(tmp_path, lie + GOOD + EMPTY_BLOCKS)
    data = TarImages(tmp_path)
    assert ([data.key(0), data.key(1)], data.num_skipped) == (["a", "b"], 0)


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path, GOOD + EMPTY_BLOCKS)
    assert len(build_index(path, max_members=5).keys) == 2
    with pytest.raises(DataError, match="more than 3 members"):
        build_index(path, max_members=3)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(DataError, match="not a regular file"):
        TarImages(tmp_path)
    (tmp_path / "a.tar").unlink()
    (tmp_path / "a.tar").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"a\.tar: No such file"):
        TarImages(tmp_path)


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tars are here"):
        TarImages(tmp_path / "missing")
    put(tmp_path, raw(member("a.png", b"x")) + EMPTY_BLOCKS)
    with pytest.raises(DataError, match=r"no images with captions: .*'a': it has no caption"):
        TarImages(tmp_path)


# The sidecar


def test_the_index_is_read_from_its_sidecar(tmp_path: Path) -> None:
    path = write(tmp_path, count=2) / "shard_000000.tar"
    TarImages(tmp_path)
    sidecar = tmp_path / "shard_000000.tar.index.json"
    stored = json.loads(sidecar.read_text())
    assert (stored["size"], stored["mtime_ns"]) == (path.stat().st_size, path.stat().st_mtime_ns)
    stored["keys"][0] = "from the sidecar"
    sidecar.write_text(json.dumps(stored))
    assert TarImages(tmp_path).key(0) == "from the sidecar"


def test_a_changed_tar_is_indexed_anew(tmp_path: Path) -> None:
    path = put(tmp_path, raw(*sample("old")) + EMPTY_BLOCKS)
    assert open_index(path).keys == ["old"]
    before = path.stat()
    path.write_bytes(raw(*sample("new")) + EMPTY_BLOCKS)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert open_index(path).keys == ["new"]
    path.write_bytes(raw(*sample("new"), *sample("more")) + EMPTY_BLOCKS)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert open_index(path).keys == ["new", "more"]


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def spoiled(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return spoiled


def span(row: object) -> Callable[[str], str]:
    return spoil(lambda content: content["spans"].__setitem__(0, row))


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "9" * 5000,
        spoil(lambda content: content.update(format=999)),
        spoil(lambda content: content.pop("keys")),
        spoil(lambda content: content["keys"].pop()),
        spoil(lambda content: content.update(keys="ab")),
        spoil(lambda content: content["keys"].__setitem__(0, 7)),
        spoil(lambda content: content["keys"].__setitem__(0, "../../x")),
        spoil(lambda content: content["keys"].__setitem__(0, "\x1b[2J")),
        spoil(lambda content: content.pop("spans")),
        spoil(lambda content: content.update(spans={})),
        span([0, 1, 2]),
        span("0123"),
        span([0, 1, 2, "x" * 1000]),
        span([0, 1, 2, True]),
        span([0, 1.5, 2, 3]),
        span([-1, 1, 0, 1]),
        span([0, -1, 0, 1]),
        span([0, 1 << 20, 0, 1]),
        span([1 << 30, 1, 0, 1]),
        span([(1 << 63) - 1, 1, 0, 1]),
        span([1 << 70, 1, 0, 1]),
        span([0, 1, 0, MAX_CAPTION_BYTES + 1]),
        spoil(lambda content: content.pop("skipped")),
        spoil(lambda content: content.update(num_skipped="1")),
        spoil(lambda content: content.update(num_skipped=-1)),
        spoil(lambda content: content.update(skipped=["x"] * 200, num_skipped=200)),
        spoil(lambda content: content.update(skipped=["\x1b[2J"], num_skipped=1)),
        spoil(lambda content: content.update(skipped=["x" * 10_000], num_skipped=1)),
    ],
)
def test_a_hostile_sidecar_is_rebuilt(tmp_path: Path, spoiled: Callable[[str], str]) -> None:
    put(tmp_path, raw(*sample("a"), member("z.txt", bytes(60_000))) + EMPTY_BLOCKS * 100)
    data, sidecar = TarImages(tmp_path), tmp_path / "a.tar.index.json"
    honest = sidecar.read_text()
    sidecar.write_text(spoiled(honest))
    again = TarImages(tmp_path)
    assert (again.key(0), again.caption(0), again.skipped) == ("a", "Prompt 0", data.skipped)
    assert sidecar.read_text() == honest


def test_a_sidecar_that_is_no_file_does_no_harm(tmp_path: Path) -> None:
    put(tmp_path, GOOD + EMPTY_BLOCKS)
    sidecar = tmp_path / "a.tar.index.json"
    os.mkfifo(sidecar)
    assert len(TarImages(tmp_path)) == 2
    sidecar.unlink()
    victim = tmp_path / "victim"
    sidecar.symlink_to(victim)
    assert len(TarImages(tmp_path)) == 2
    assert not victim.exists()


def test_without_room_for_a_sidecar_the_index_stays_in_memory(tmp_path: Path) -> None:
    # A folder in its place, for permissions do not hold for root.
    put(tmp_path, GOOD + EMPTY_BLOCKS)
    (tmp_path / "a.tar.index.json" / "x").mkdir(parents=True)
    assert len(TarImages(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.index.json"]


# Reading


def test_a_tar_cut_after_it_was_opened_is_a_sample_error(tmp_path: Path) -> None:
    data = TarImages(write(tmp_path, count=2))
    os.truncate(tmp_path / "shard_000000.tar", 100)
    with pytest.raises(SampleError, match="key 'part/key-0': cut off"):
        data.image(0)


def test_a_tar_removed_after_it_was_opened_is_a_sample_error(tmp_path: Path) -> None:
    data = TarImages(write(tmp_path, count=2))
    (tmp_path / "shard_000000.tar").unlink()
    with pytest.raises(SampleError, match="key 'part/key-1': No such file"):
        data.caption(1)


@pytest.mark.parametrize("most", [1, 100])
def test_threads_read_what_one_reads(tmp_path: Path, most: int) -> None:
    data = TarImages(write(tmp_path, count=12, shard_size=2))
    data._files = _Files(data._paths, most)
    order = np.random.default_rng(0).integers(0, len(data), 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        captions = list(pool.map(data.caption, order))
    assert captions == [f"Prompt {i} ☃" for i in order]
    assert len(data._files._open) <= most + 8


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork beside torch's threads
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_what_one_reads(tmp_path: Path, method: str) -> None:
    data = TarImages(write(tmp_path, count=6, shard_size=2))
    expected = [data.caption(i) for i in range(6)]  # the tars are open from here on
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(data.caption, range(6)) == expected


def test_open_tars_are_closed_with_the_data_set(tmp_path: Path) -> None:
    data = TarImages(write(tmp_path))
    data.caption(0)
    (file,) = data._files._open.values()
    os.fstat(file)
    del data
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
