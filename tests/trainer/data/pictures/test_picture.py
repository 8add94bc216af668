"""Every kind of picture and caption that people have: used, turned, converted, or refused with its reason."""

from __future__ import annotations

import csv
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageCms
from tests.trainer.bombs.pictures import png_that_claims
from tests.trainer.picture_cache.folders import file_of

from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.formats.tar import name_fault as tar_fault
from fluxtrain.data.pictures import picture
from fluxtrain.data.pictures.faults import UNREAD_TABLE
from fluxtrain.data.pictures.folder import SIMILAR, list_pictures
from fluxtrain.data.pictures.picture import (
    PictureError,
    decode,
    decode_alpha,
    fit,
    picture_size,
    placements,
    require_enough_pixels,
)
from fluxtrain.errors import DataError
from fluxtrain.fetch.stores import name_fault as store_fault

RED, BLUE = (200, 30, 40), (20, 40, 210)


def halves(width: int = 64, height: int = 32, mode: str = "RGB") -> Image.Image:
    """Return an image whose left half is red and whose right half is blue."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image.convert(mode)


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(halves(), "JPEG", quality=95, exif=exif.tobytes())


def corners(image: Image.Image) -> tuple[str, str]:
    """Return the colours in the middle of the first and of the last row or column, whichever differ."""
    pixels = np.asarray(image).astype(int)
    first, last = pixels[2, 2], pixels[-3, -3]
    return tuple("red" if p[0] > p[2] else "blue" for p in (first, last))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("PNG", "RGB"), ("PNG", "L"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "1"),
        ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("WEBP", "RGB"), ("WEBP", "RGBA"),
        ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "RGB"), ("TIFF", "CMYK"),
    ],
)  # fmt: skip
def test_a_picture_of_any_kind_is_read_in_rgb(kind: str, mode: str) -> None:
    content = file_of(halves(mode=mode), kind)
    assert picture_size(content) == (64, 32)
    image = decode(content)
    assert (image.mode, image.size) == ("RGB", (64, 32))
    if mode not in ("L", "LA", "1"):
        assert corners(image) == ("red", "blue")
        assert np.abs(np.asarray(image)[16, 8].astype(int) - RED).max() < 40


@pytest.mark.parametrize(
    ("orientation", "size", "seen"),
    [
        (1, (64, 32), ("red", "blue")),
        (3, (64, 32), ("blue", "red")),
        (6, (32, 64), ("red", "blue")),
        (8, (32, 64), ("blue", "red")),
    ],
)
def test_a_picture_is_turned_as_its_camera_says(
    orientation: int, size: tuple[int, int], seen: tuple[str, str]
) -> None:
    content = oriented(orientation)
    assert picture_size(content) == size
    image = decode(content, at_least=size)
    assert (image.size, corners(image)) == (size, seen)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_has_the_size_with_which_it_is_decoded(orientation: int) -> None:
    content = file_of(halves(), "TIFF", tiffinfo={0x0112: orientation})
    assert picture_size(content) == decode(content).size


@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_turned_though_its_other_exif_is_malformed(suffix: str) -> None:
    tags = ((0x0112, 3, 6), (0x0128, 2, 7))  # its unit of resolution is a text
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    content = file_of(halves(mode="RGBA" if suffix == "PNG" else "RGB"), suffix, exif=exif)
    image = decode(content)
    assert (image.size, corners(image)) == ((32, 64), ("red", "blue"))
    assert decode_alpha(content).size == image.size


def test_nothing_is_printed_of_exif_that_is_cut_off(recwarn: pytest.WarningsRecorder) -> None:
    """Pillow warns of it, with a path of its own, and reads the rest."""
    exif = b"Exif\0\0II*\0" + struct.pack("<IHHHII", 8, 9, 0x0112, 3, 1, 6)
    content = file_of(halves(), "JPEG", exif=exif)
    assert picture_size(content) == decode(content).size == (32, 64)
    assert not recwarn.list


@pytest.mark.parametrize("look", [picture_size, decode])
def test_one_large_picture_is_decoded_at_a_time(
    look: Callable[[bytes], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = MagicMock()
    monkeypatch.setattr(picture, "_LARGE_PIXELS", 100)
    monkeypatch.setattr(picture, "_LARGE_ONES", held)
    look(file_of(halves(), "PNG"))
    held.__enter__.assert_called_once()
    held.__exit__.assert_called_once()


@pytest.mark.parametrize(
    "name", ["at 3.45.12\u202fPM", "\u3000春", "\U0001f468\u200d\U0001f469", "a\xa0b"]
)
def test_names_may_have_any_space_and_joined_emoji(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.png").touch()
    (tmp_path / f"{name}.txt").write_text("beside")
    listing = list_pictures(tmp_path)
    assert {each.name: each.caption for each in listing.pictures} == {f"{name}.png": "beside"}
    row = {"file_name": f"{name}.png", "text": "a row"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    listing = list_pictures(tmp_path)
    assert [each.caption for each in listing.pictures] == ["a row"]
    assert (listing.skipped, listing.left_out) == ({}, {})
    assert tar_fault(name) is store_fault(name) is None


@pytest.mark.parametrize("control", ["\n", "\x1b", "\x85", "\u2028", "\u202e", "\u2066", "\udcff"])
def test_names_may_have_no_controls(tmp_path: Path, control: str) -> None:
    name = f"a{control}gnp.png"
    (tmp_path / name).touch()
    listing = list_pictures(tmp_path)
    assert (listing.pictures, [*listing.skipped]) == ([], [ascii(name)])
    assert tar_fault(name)
    assert store_fault(name)


def test_transparent_parts_are_white() -> None:
    image = Image.new("RGBA", (8, 8), (*RED, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 8))
    pixels = np.asarray(decode(file_of(image, "PNG")))
    assert pixels[4, 1].tolist() == [255, 255, 255]
    assert pixels[4, 6].tolist() == list(RED)


def test_sixteen_bits_become_eight() -> None:
    ramp = np.linspace(0, 65535, 64 * 4).reshape(4, 64).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = np.asarray(decode(file_of(Image.fromarray(ramp), kind)))
        assert np.abs(pixels[..., 0].astype(int) - (ramp >> 8)).max() <= 1


def test_a_colour_profile_is_converted_to_srgb() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    same = file_of(halves(), "PNG", icc_profile=lab)
    assert np.abs(np.asarray(decode(same)).astype(int) - np.asarray(halves())).max() <= 1
    nonsense = file_of(halves(), "PNG", icc_profile=b"no profile")
    assert (np.asarray(decode(nonsense)) == np.asarray(halves())).all()


def profile(space: bytes, **tags: bytes) -> bytes:
    """Return a colour profile of ``space`` with ``tags``."""
    table, data, start = struct.pack(">I", len(tags)), b"", 128 + 4 + 12 * len(tags)
    for name, value in tags.items():
        table += name.encode() + struct.pack(">II", start + len(data), len(value))
        data += value
    kind = struct.pack(">I4sI4s4s4s", start + len(data), b"", 0x02400000, b"mntr", space, b"XYZ ")
    return kind.ljust(36, b"\0") + b"acsp".ljust(92, b"\0") + table + data


DARK = b"curv" + bytes(4) + struct.pack(">IHH", 1, 256, 0)  # a gamma of 1
RGB = {
    name: b"XYZ " + bytes(4) + struct.pack(">iii", *values)
    for name, values in {
        "rXYZ": (28578, 14581, 912),
        "gXYZ": (25239, 46981, 6362),
        "bXYZ": (9372, 3972, 46799),
    }.items()
} | dict.fromkeys(("rTRC", "gTRC", "bTRC"), DARK)
PROFILES = {b"GRAY": profile(b"GRAY", kTRC=DARK), b"RGB ": profile(b"RGB ", **RGB)}


@pytest.mark.parametrize(
    ("mode", "space"),
    [("L", b"GRAY"), ("LA", b"GRAY"), ("RGB", b"RGB "), ("RGBA", b"RGB "), ("P", b"RGB ")],
)
def test_a_colour_profile_counts_in_any_mode(mode: str, space: bytes) -> None:
    image = Image.new("RGB", (8, 8), (51, 51, 51)).convert(mode)
    pixels = np.asarray(decode(file_of(image, "PNG", icc_profile=PROFILES[space])))
    assert np.abs(pixels.astype(int) - 124).max() <= 1


def test_of_an_animation_the_first_frame_is_used() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    content = file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert np.asarray(decode(content))[4, 4].tolist() == list(RED)


def test_a_large_jpeg_is_decoded_no_smaller_than_asked() -> None:
    content = file_of(halves(1600, 800), "JPEG")
    assert decode(content, at_least=(190, 95)).size == (200, 100)
    assert decode(content, at_least=(1500, 750)).size == (1600, 800)


def test_a_picture_is_resized_to_cover_and_its_middle_is_kept() -> None:
    config = DataConfig(image_size=16, latent_size=2)
    (placement,) = placements(64, 32, config)
    assert (placement.size, placement.resized) == ((16, 16), (32, 16))
    pixels = fit(halves(), placement)
    assert pixels.shape == (3, 16, 16)
    assert pixels[:, 8, 0].tolist() == list(RED)
    assert pixels[:, 8, 15].tolist() == list(BLUE)


GOOD_PNG, GOOD_JPEG = file_of(halves(200, 200), "PNG"), file_of(halves(200, 200), "JPEG")
BAD_PICTURES = {
    "empty": (b"", "the file is empty"),
    "text": (b"hello", "no picture in a format that is read"),
    "html": (b"<html>404</html>", "no picture in a format that is read"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture in a format that is read"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0heicmif1", "no picture in a format that is read"),
    "half a png": (GOOD_PNG[: len(GOOD_PNG) // 2], "corrupt or cut off ("),
    "half a jpeg": (GOOD_JPEG[: len(GOOD_JPEG) // 2], "corrupt or cut off ("),
    "a header": (GOOD_PNG[:33], "no picture in a format that is read"),
    "bits flipped": (GOOD_PNG[:60] + b"\xff" * 40 + GOOD_PNG[100:], "corrupt or cut off ("),
    "a bomb": (
        png_that_claims(50_000, 50_000),
        "at most 134,217,728 pixels are decoded, and it has more",
    ),
    "too large": (png_that_claims(12_000, 12_000), "12000 x 12000 pixels; at most 134,217,728"),
    "a claim": (png_that_claims(9000, 9000), "corrupt or cut off ("),
    "no pixels": (png_that_claims(0, 10), "no picture in a format that is read"),
}


@pytest.mark.parametrize("name", BAD_PICTURES)
def test_a_picture_that_cannot_be_used_has_a_reason(name: str) -> None:
    content, reason = BAD_PICTURES[name]
    with pytest.raises(PictureError) as caught:
        decode(content)
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)


def test_any_truncation_and_any_flipped_byte_is_answered() -> None:
    chance = np.random.default_rng(0)
    for content in (GOOD_PNG, GOOD_JPEG, file_of(halves(), "WEBP"), file_of(halves(), "TIFF")):
        for _ in range(60):
            changed = bytearray(content)
            changed[chance.integers(len(changed))] ^= 1 << chance.integers(8)
            for damaged in (bytes(changed), content[: chance.integers(len(content))]):
                try:
                    assert decode(damaged).mode == "RGB"
                except PictureError:
                    continue


def test_a_tiny_picture_is_not_enlarged_more_than_eight_times() -> None:
    config = DataConfig(image_size=1024, latent_size=128)
    require_enough_pixels(128, 300, *placements(128, 300, config))
    with pytest.raises(PictureError, match="20 x 300 pixels would be enlarged 51 times; at most 8"):
        require_enough_pixels(20, 300, *placements(20, 300, config))


def test_the_limit_is_that_of_the_pixels_not_of_a_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_PIXELS", 1000)
    assert decode(file_of(halves(1000, 1), "PNG")).size == (1000, 1)
    with pytest.raises(PictureError, match="1001 x 1 pixels; at most 1,000"):
        decode(file_of(halves(1001, 1), "PNG"))
    assert decode(file_of(halves(500, 1), "WEBP")).size == (500, 1)
    with pytest.raises(PictureError, match="501 x 1 pixels; at most 500"):
        decode(file_of(halves(501, 1), "WEBP"))


def write(folder: Path, **files: bytes | str) -> Path:
    """Write ``files``; of their names the last underscore is the dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def captions(folder: Path) -> dict[str, str]:
    return {picture.name: picture.caption for picture in list_pictures(folder).pictures}


def test_links_within_the_root_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "all", a_png=b"", a_txt="a cat")
    (tmp_path / "set").mkdir()
    for name in ("a.png", "a.txt"):
        (tmp_path / "set" / name).symlink_to(f"../all/{name}")
    (picture,) = list_pictures(tmp_path / "set", root=tmp_path).pictures
    assert picture.caption == "a cat"
    listing = list_pictures(tmp_path / "set")
    assert not listing.pictures
    assert "is a link that leads out of" in listing.skipped["a.png"]


def test_captions_are_the_text_files_beside_the_pictures(tmp_path: Path) -> None:
    write(
        tmp_path,
        a_png=b"",
        a_txt="a cat,\r\n on  a mat\n",
        b_JPG=b"",
        b_caption="a dog",
        c_webp=b"",
    )
    write(tmp_path / "below", d_png=b"", d_txt=b"\xef\xbb\xbfwith a mark", e_png=b"", e_txt=" \n")
    write(tmp_path / ".hidden", f_png=b"")
    write(tmp_path, _DS_Store=b"", notes_txt="n", f_png=b"", f_txt="f".encode("utf-16"))
    assert captions(tmp_path) == {
        "a.png": "a cat, on a mat",
        "b.JPG": "a dog",
        "c.webp": "",
        "f.png": "f",
        "below/d.png": "with a mark",
        "below/e.png": "",
    }
    assert list_pictures(tmp_path).without_caption == ["c.webp", "below/e.png"]


def test_a_suffix_earlier_in_a_path_loses_no_caption(tmp_path: Path) -> None:
    names = ("photo.png", "photo.png.crop.png", "photo.jpg.webp")
    texts = {Path(name).with_suffix(".txt").name: f"of {name}" for name in names}
    folder = tmp_path / "train.png"
    folder.mkdir()
    for name, content in {**dict.fromkeys(names, ""), **texts}.items():
        (folder / name).write_text(content)
    assert captions(tmp_path) == {f"train.png/{name}": f"of {name}" for name in names}


def test_a_picture_with_the_suffix_of_another_kind_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path, a_png=file_of(halves(), "JPEG"), b_jpg=file_of(halves(), "WEBP"))
    assert sorted(captions(folder)) == ["a.png", "b.jpg"]
    for name in captions(folder):
        assert corners(decode((folder / name).read_bytes())) == ("red", "blue")


ROWS = [
    {"file_name": "a.png", "text": "an a"},
    {"file_name": "./below/b.jpg", "text": "two\nlines"},
    {"file_name": "c.png", "text": ""},
]


def test_captions_of_similar_names_are_read_and_listed(tmp_path: Path) -> None:
    composed, taken_apart = "caf\u00e9", "cafe\u0301"
    png = file_of(halves(), "PNG")
    pictures = {f"{taken_apart}.png": png, "Case.PNG": png, "Twice.png": png, "twice.jpg": png}
    texts = {f"{composed}.txt": "a", "case.Txt": "b", "TWICE.txt": "c", "case.json": "{"}
    folder = write(tmp_path, **pictures, **texts)
    found = captions(folder)
    assert found == {f"{taken_apart}.png": "a", "Case.PNG": "b", "Twice.png": "", "twice.jpg": ""}
    left_out = list_pictures(folder).left_out
    assert left_out == {
        f"{composed}.txt": f"{SIMILAR} {taken_apart}, whose caption it is",
        "case.Txt": f"{SIMILAR} Case, whose caption it is",
        "TWICE.txt": "is the caption of no picture here",
        "case.json": UNREAD_TABLE,
    }


def test_rows_of_similar_names_are_read_and_listed(tmp_path: Path) -> None:
    rows = [{"file_name": "CAF\u00c9.png", "text": "a"}, {"file_name": "b.png", "text": "c"}]
    png = file_of(halves(), "PNG")
    folder = write(tmp_path, **{"cafe\u0301.png": png, "b.png": png, "metadata.jsonl": jsonl(rows)})
    assert captions(folder) == {"cafe\u0301.png": "a", "b.png": "c"}
    left_out = list_pictures(folder).left_out
    assert left_out == {"CAF\u00c9.png": f"{SIMILAR} cafe\u0301.png, whose caption it has"}


def test_rows_may_begin_with_the_name_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cats/cats").mkdir(parents=True)
    png = file_of(halves(), "PNG")
    pictures = {"a.png": png, "b.png": png, "cats/c.png": png}
    names = ("a.png", "cats/b.png", "cats/c.png", "cats/a.png")
    rows = jsonl([{"file_name": name, "text": name} for name in names])
    folder = write(tmp_path / "cats", **pictures, **{"metadata.jsonl": rows})
    taken = {"a.png": "a.png", "b.png": "cats/b.png", "cats/c.png": "cats/c.png"}
    assert captions(folder) == taken
    assert list(list_pictures(folder).skipped) == ["cats/a.png"]


def test_json_beside_a_picture_has_its_caption(tmp_path: Path) -> None:
    png = file_of(halves(), "PNG")
    sidecars = {
        "a.json": '{"prompt": "second", "text": "first"}', "b.json": '{"tags": []}', "c.json": "[1]",
        "d.json": "{", "e.json": '{"caption": 3}', "f.json": b'\xff{"text": "x"}',
        "g.json": '{"text": "json"}', "g.txt": "text",
    }  # fmt: skip
    folder = write(tmp_path, **{f"{name}.png": png for name in "abcdefg"}, **sidecars)
    listing = list_pictures(folder)
    assert captions(folder) == {"a.png": "first", "b.png": "", "c.png": "", "g.png": "text"}
    assert listing.skipped["d.png"].startswith("its caption in d.json cannot be read (")
    assert listing.skipped["e.png"] == "its caption in e.json is 3, not a text"
    assert listing.skipped["f.png"].startswith("its caption f.json is not UTF-8")


def jsonl(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_metadata(folder: Path, kind: str) -> None:
    if kind == "jsonl":
        (folder / "metadata.jsonl").write_text(jsonl(ROWS))
    elif kind == "csv":
        with (folder / "metadata.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["file_name", "text"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), folder / "metadata.parquet")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_captions_are_those_of_a_metadata_file(tmp_path: Path, kind: str) -> None:
    write(tmp_path, a_png=b"", c_png=b"", c_txt="of the text file", d_png=b"")
    write(tmp_path / "below", b_jpg=b"")
    write_metadata(tmp_path, kind)
    expected = {
        "a.png": "an a",
        "c.png": "of the text file",
        "d.png": "",
        "below/b.jpg": "two lines",
    }
    assert captions(tmp_path) == expected


Change = Callable[[Path], object]


def metadata(text: str, kind: str = "jsonl") -> Change:
    return lambda folder: (folder / f"metadata.{kind}").write_text(text)


BAD_FOLDERS: dict[str, tuple[Change, str]] = {
    "two metadata files": (
        lambda folder: write(folder, metadata_csv="", metadata_jsonl=""),
        "has metadata.jsonl and metadata.csv; keep one of them",
    ),
    "not JSON": (metadata("{"), "metadata.jsonl: line 1 is not JSON ("),
    "a list": (metadata("[]"), "metadata.jsonl: line 1 is not a JSON object"),
    "no rows": (metadata("\n"), "metadata.jsonl: has no rows"),
    "no file name": (metadata('{"text": "a"}'), "metadata.jsonl: row 1 has no file_name"),
    "no caption": (metadata('{"file_name": "a.png"}'), "row 1 has none of the columns text, caption, prompt"),
    "a number": (metadata('{"file_name": "a.png", "text": 3}'), "row 1: text is 3, not a text"),
    "twice": (metadata(jsonl([ROWS[0], ROWS[0]])), "metadata.jsonl: row 2: 'a.png' comes twice"),
    "outside": (metadata('{"file_name": "../a.png", "text": ""}'), "row 1: '../a.png' is outside"),
    "absolute": (metadata('{"file_name": "/a.png", "text": ""}'), "row 1: '/a.png' is outside of the folder"),
    "a quote": (metadata('file_name,text\na.png,"x', "csv"), "metadata.csv: is not CSV ("),
    "other columns": (metadata("image,label\na.png,3\n", "csv"), "metadata.csv: row 1 has no file_name"),
    "no parquet": (metadata("PAR1", "parquet"), "metadata.parquet: is not Parquet ("),
    "latin-1": (lambda folder: write(folder, metadata_csv=b"file_name,text\na.png,\xe9\n"), "not UTF-8"),
    "no pictures": (lambda folder: (folder / "a.png").unlink(), "holds no pictures (.png, .jpg,"),
    "no folder": (lambda folder: shutil.rmtree(folder), "missing; it should hold"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    change, message = BAD_FOLDERS[name]
    folder = write(tmp_path / "set", a_png=b"")
    change(folder)
    with pytest.raises(DataError) as caught:
        list_pictures(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


SKIPPED: dict[str, tuple[Change, str, str]] = {
    "heic": (lambda f: write(f, b_heic=b""), "b.heic", ".heic is not read; convert it"),
    "portable map": (lambda f: write(f, b_ppm=b""), "b.ppm", ".ppm is not read; convert it"),
    "film": (lambda f: write(f, b_mp4=b""), "b.mp4", ".mp4 is not read; convert it"),
    "caption in latin-1": (
        lambda f: write(f, a_txt=b"caf\xe9"),
        "a.png",
        "its caption a.txt is not UTF-8, likely windows-1252",
    ),
    "a broken link to a caption": (
        lambda f: (f / "a.txt").symlink_to("nothing"),
        "a.png",
        "its caption a.txt cannot be read (No such file",
    ),
    "a broken link": (lambda f: (f / "m").symlink_to("no"), "m", "is a link to nothing"),
    "a linked folder": (lambda f: (f / "up").symlink_to("/"), "up/", "is a link that leads out"),
    "binary caption": (lambda f: write(f, a_txt=b"a\0b"), "a.png", "its caption a.txt is not text"),
    "long caption": (lambda f: write(f, a_txt="x" * 70_000), "a.png", "a.txt has more than 65536 bytes"),
    "named but missing": (metadata('{"file_name": "gone.png", "text": ""}'), "gone.png", "row 1 of the"),
    "a link to no picture": (lambda f: (f / "l.png").symlink_to("nothing"), "l.png", "No such file"),
    "a loop": (lambda f: (f / "l.png").symlink_to("l.png"), "l.png", "Too many levels of symbolic links"),
    "a pipe": (lambda f: os.mkfifo(f / "p.png"), "p.png", "is not a regular file"),
    "a control character": (lambda f: (f / "a\nb.png").touch(), r"'a\nb.png'", "cannot be printed"),
    "not UTF-8": (lambda f: (f / os.fsdecode(b"\xff.png")).touch(), r"'\udcff.png'", "cannot be printed"),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPED)
def test_a_file_that_cannot_be_used_is_skipped_with_its_reason(tmp_path: Path, name: str) -> None:
    change, file, reason = SKIPPED[name]
    change(write(tmp_path, a_png=b"", z_png=b""))
    listing = list_pictures(tmp_path)
    assert reason in listing.skipped[file]
    assert "z.png" in {picture.name for picture in listing.pictures}


def test_a_linked_folder_below_the_root_is_read_and_every_picture_counts_once(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "set", a_png=b"", a_txt="an a")
    write(tmp_path / "more", b_png=b"", b_txt="a b")
    write(folder / "z", c_png=b"")
    for name, target in {
        "more": "../more",
        "again": "../more",
        "circle": ".",
        "up": "..",
        "first": "z",
        "deep": "more",
        "z/back": "..",
    }.items():
        (folder / name).symlink_to(target)
    for name, target in {"0.png": "a.png", "b.png": "../more/b.png", "c.png": "z/c.png"}.items():
        (folder / name).symlink_to(target)
    listing = list_pictures(folder, root=tmp_path)
    assert {each.name: each.caption for each in listing.pictures} == {
        "a.png": "an a",
        "again/b.png": "a b",
        "z/c.png": "",
    }
    assert listing.skipped == {}
    assert listing.left_out["0.png"] == "is the file a.png, which is read"
    assert listing.left_out["more/"] == "is the folder again, which is read"
    assert listing.left_out.keys() >= {
        "b.png",
        "c.png",
        "circle/",
        "deep/",
        "first/",
        "z/back/",
        "up/set/",
    }
    outside = list_pictures(folder)
    assert outside.skipped["more/"].startswith("is a link that leads out of")


HIDDEN = (
    *(
        "@eaDir/a.png/SYNOFILE_THUMB_M.png",
        ".AppleDouble/a.png",
        "lost+found/a.png",
        "#recycle/a.png",
    ),
    *(
        "__MACOSX/._a.png",
        ".thumbnails/a.png",
        "$RECYCLE.BIN/a.png",
        "@Recycle/a.png",
        "b/@EADIR/c.png",
    ),
    *("._a.png", ".a.png", "Thumbs.db", "desktop.ini", ".DS_Store", "b/SYNOPHOTO_THUMB_XL.jpg"),
)


def test_files_of_systems_are_left_out_and_listed_and_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, a_png=b"")
    for name in HIDDEN:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listing = list_pictures(tmp_path)
    assert ([picture.name for picture in listing.pictures], listing.skipped) == (["a.png"], {})
    for name in HIDDEN:
        assert any(name == each or name.startswith(each) for each in listing.left_out)
    assert listing.left_out["._a.png"] == "is hidden"
    assert listing.left_out["@eaDir/"] == "belongs to a NAS or an operating system"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(("a.png.txt", "caption"), ("b.txt", "caption"), ("a.Txt", "caption")),
        *(("train/e.caption", "caption"), ("train/metadata.jsonl", "metadata file")),
        pytest.param("e\u0301.txt", "caption", id="decomposed"),
    ],
)
def test_texts_that_no_picture_has_are_listed_and_do_not_count(
    name: str, reason: str, tmp_path: Path
) -> None:
    used = ("a.txt", "A b [1].CAPTION", "metadata.jsonl", "notes.md")
    rows = json.dumps({"file_name": "a.png", "text": "a cat"})
    for each in ("a.png", "A b [1].jpg", "\u00e9.png", *used, name):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text(rows)
    listing = list_pictures(tmp_path)
    assert (len(listing.pictures), listing.skipped, list(listing.left_out)) == (3, {}, [name])
    assert reason in listing.left_out[name]
