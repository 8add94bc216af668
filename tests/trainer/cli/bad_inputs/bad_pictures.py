"""Bad pictures, captions, masks and data set configs as people have them, with the line that answers each."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tests.trainer.picture_cache.folders import file_of, noise

from fluxtrain.errors import EXIT_ERROR, EXIT_USAGE

SIDE = 64


class BadInput(NamedTuple):
    """An input that is made in the folder ``set`` of a data root, and the line that answers it."""

    name: str
    make: Callable[[Path], object]
    line: str
    data: Mapping[str, Any] = MappingProxyType({})
    """Fields of ``spec.run.data``; ``images`` is ``set`` without it."""
    code: int = EXIT_ERROR


def files(**contents: bytes | str) -> Callable[[Path], object]:
    """Return a function that writes files; ``__`` in a name is a dot."""

    def make(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / name.replace("__", ".")
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def png(width: int = SIDE, height: int = SIDE, mode: str = "RGB") -> bytes:
    return file_of(noise(width, height, mode), "PNG")


def both(*makes: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        for each in makes:
            each(folder)

    return make


def link(name: str, target: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).symlink_to(target)


def named(name: str, content: bytes) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return make


def without_folder(folder: Path) -> None:
    folder.rmdir()


def a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("no folder")


def link_loop(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "below/again").symlink_to(folder)
    (folder / "loop.png").symlink_to(folder / "loop.png")


def huge_picture(folder: Path) -> None:
    Image.new("1", (20000, 10000)).save(folder / "a.png")


def many_folders(folder: Path) -> None:
    for number in range(1000):
        (folder / f"{number:04d}").mkdir()


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "a.png")


def parquet(**columns: list[Any]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def tar(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def metadata(suffix: str, content: str | bytes) -> Callable[[Path], object]:
    return files(a__png=png(), **{f"metadata__{suffix}": content})


def subset(general: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], object]:
    """Return a function that writes a picture, and a data set config with one subset of it."""
    value = {
        "general": general or {},
        "datasets": [{"subsets": [{"image_dir": "set", **options}]}],
    }
    return both(files(a__png=png()), named("../set.json", json.dumps(value).encode()))


def toml(text: str) -> Callable[[Path], object]:
    return both(files(a__png=png()), named("../set.toml", text.encode()))


def masks(content: bytes, name: str = "a.png") -> Callable[[Path], object]:
    return both(files(a__png=png()), named(f"../masks/{name}", content))


CONFIG, TOML = {"images": "set.json"}, {"images": "set.toml"}
MASKS = {"masks": "masks"}
NONE = "none of the 1 pictures can be used; "
PICTURES: list[BadInput] = [
    BadInput("an empty folder", files(), "set: holds no pictures (.png, .jpg"),
    BadInput("no folder", without_folder, "set: missing; it should hold pictures"),
    BadInput("a file in place of the folder", a_file, "set: is not a folder; it should hold pictures"),
    BadInput("a zip in place of the folder", both(without_folder, named("../set.zip", b"PK")),
             "set.zip: is an archive; unpack it, and name its folder", {"images": "set.zip"}),
    BadInput("a picture in place of the folder", named("a.png", png()),
             "set/a.png: is one picture; name its folder", {"images": "set/a.png"}),
    BadInput("an empty AVIF in place of the folder", named("a.avif", b""),
             "set/a.avif: is an empty file, not a folder; it should hold", {"images": "set/a.avif"}),
    BadInput("a home folder that no shell expanded", files(),
             "~/pics: missing; write the whole path: only a shell expands ~", {"images": "~/pics"}),
    BadInput("captions only", files(a__txt="a cat"), "set: holds no pictures (.png, .jpg"),
    BadInput("a thousand empty folders", many_folders, "set: holds no pictures (.png, .jpg"),
    BadInput("hidden pictures only", files(__a__png=png()), "set: holds no pictures (.png, .jpg"),
    BadInput("a loop of links", link_loop, NONE + "loop.png: Too many levels of symbolic links"),
    BadInput("a pipe", pipe, NONE + "a.png: is not a regular file"),
    BadInput("a folder named as a picture", named("a.png/b.txt", b"x"), "set: holds no pictures"),
    BadInput("a name with a line break", named("a\nb.png", png()), NONE + r"'a\nb.png': its name has"),
    BadInput("0 bytes", files(a__png=b""), NONE + "a.png: the file is empty"),
    BadInput("text in a .png", files(a__png="a cat"), NONE + "a.png: no picture in a format that is read"),
    BadInput("a PNG cut off", files(a__png=png()[:900]), NONE + "a.png: corrupt or cut off"),
    BadInput("a JPEG cut off", files(a__jpg=file_of(noise(SIDE, SIDE), "JPEG")[:900]),
             NONE + "a.jpg: corrupt or cut off"),
    BadInput("a WebP cut off", files(a__webp=file_of(noise(SIDE, SIDE), "WEBP")[:900]),
             NONE + "a.webp: corrupt or cut off"),
    BadInput("HTML saved as .jpg", files(a__jpg="<html>not found</html>"), NONE + "a.jpg: no picture in"),
    BadInput("HEIC", files(a__heic=b"x"),
             NONE + "a.heic: .heic is not read; convert it to PNG, JPEG or WebP"),
    BadInput("RAW of a camera", files(a__CR2=b"x"), NONE + "a.CR2: .cr2 is not read; convert it"),
    BadInput("a film", files(a__mp4=b"x"), NONE + "a.mp4: .mp4 is not read; convert it"),
    BadInput("SVG", files(a__svg="<svg/>"), NONE + "a.svg: .svg is not read; convert it"),
    BadInput("1 x 1 pixel", files(a__png=png(1, 1)),
             NONE + "a.png: 1 x 1 pixels would be enlarged 64 times; at most 8 times is allowed"),
    BadInput("20000 x 3 pixels", files(a__png=png(20000, 3)),
             NONE + "a.png: 20000 x 3 pixels would be enlarged 21 times; at most 8"),
    BadInput("too small for a bucket", files(a__png=png(20, 20)),
             NONE + "a.png: 20 x 20 pixels: a side is shorter than 32 and images are not enlarged",
             {"buckets": {"step": 32, "upscale": False}}),
    BadInput("200 megapixels", huge_picture,
             NONE + "a.png: at most 134,217,728 pixels are decoded, and it has more"),
    BadInput("a link out of the data", link("a.png", "/etc/passwd"),
             NONE + "a.png: is a link that leads out of "),
    BadInput("a caption out of the data", both(files(a__png=png()), link("a.txt", "/etc/passwd")),
             NONE + "a.png: a.txt is a link that leads out of "),
    BadInput("a table out of the data", both(files(a__png=png()), link("metadata.csv", "/etc/passwd")),
             "metadata.csv: is a link that leads out of "),
    BadInput("several, all bad", files(a__png=b"", b__png=b""),
             "none of the 2 pictures can be used; a.png: the file is empty"),
    BadInput("a caption in Latin 1", files(a__png=png(), a__txt="Käse".encode("latin-1")),
             NONE + "a.png: its caption a.txt is not UTF-8"),
    BadInput("a picture as caption", files(a__png=png(), a__txt=png()),
             NONE + "a.png: its caption a.txt is not"),
    BadInput("zero bytes as caption", files(a__png=png(), a__txt=b"a\0b"),
             NONE + "a.png: its caption a.txt is not text"),
    BadInput("a caption of 100 kB", files(a__png=png(), a__txt="a " * 50_000),
             NONE + "a.png: its caption a.txt has more than 65536 bytes"),
]  # fmt: skip
TABLES: list[BadInput] = [
    BadInput("jsonl with a wrong key", metadata("jsonl", '{"file": "a.png", "text": "x"}'),
             "metadata.jsonl: row 1 has no file_name; it has file, text"),
    BadInput("jsonl without a caption", metadata("jsonl", '{"file_name": "a.png", "label": 3}'),
             "metadata.jsonl: row 1 has none of the columns text, caption, prompt"),
    BadInput("jsonl with a number as caption", metadata("jsonl", '{"file_name": "a.png", "text": 3}'),
             "metadata.jsonl: row 1: text is 3, not a text"),
    BadInput("jsonl that is no JSON", metadata("jsonl", '{"file_name": "a.png"\n'),
             "metadata.jsonl: line 1 is not JSON (Expecting ',' delimiter"),
    BadInput("jsonl with a list", metadata("jsonl", "[1, 2]\n"),
             "metadata.jsonl: line 1 is not a JSON object"),
    BadInput("jsonl with a file twice", metadata("jsonl", '{"file_name": "a.png", "text": "x"}\n' * 2),
             "metadata.jsonl: row 2: 'a.png' comes twice"),
    BadInput("jsonl that leads out", metadata("jsonl", '{"file_name": "../a.png", "text": "x"}'),
             "metadata.jsonl: row 1: '../a.png' is outside of the folder"),
    BadInput("jsonl with half a character", metadata("jsonl", '{"file_name": "\\ud800.png", "text": "x"}'),
             "metadata.jsonl: row 1: '\\ud800.png' has characters that cannot be printed"),
    BadInput("jsonl in UTF-16", metadata("jsonl", '{"file_name": "a.png"}'.encode("utf-16")),
             "metadata.jsonl: row 1 has none of the columns text, caption, prompt"),
    BadInput("an empty jsonl", metadata("jsonl", ""), "metadata.jsonl: has no rows"),
    BadInput("jsonl and csv", both(metadata("jsonl", "{}"), files(metadata__csv="a")),
             "set: has metadata.jsonl and metadata.csv; keep one of them"),
    BadInput("only captions of missing pictures",
             files(metadata__jsonl='{"file_name": "b.png", "text": "x"}'),
             NONE + "b.png: row 1 of the metadata file names it, but it is missing"),
    BadInput("csv without a head", metadata("csv", "a.png,a cat\n"), "metadata.csv: has no rows"),
    BadInput("csv with semicolons", metadata("csv", "file_name;text\na.png;a cat\n"),
             "metadata.csv: row 1 has no file_name; it has file_name;text"),
    BadInput("csv with a comma in a caption", metadata("csv", "file_name,text\na.png,a cat, sitting\n"),
             "metadata.csv: line 2 has more fields than the header; a caption with commas is in double"),
    BadInput("csv without a caption", metadata("csv", "file_name,text\n\na.png\n"),
             "metadata.csv: line 3 has fewer fields than the header"),
    BadInput("csv with an open quote", metadata("csv", 'file_name,text\na.png,"a cat\n'),
             "metadata.csv: is not CSV (unexpected end of data)"),
    BadInput("parquet without a caption", metadata("parquet", parquet(file_name=["a.png"], n=[1])),
             "metadata.parquet: row 1 has none of the columns text, caption, prompt"),
    BadInput("parquet with numbers", metadata("parquet", parquet(file_name=["a.png"], text=[1])),
             "metadata.parquet: column 'text' is int64, not a text"),
    BadInput("parquet that is none", metadata("parquet", b"PAR1xxxx"), "metadata.parquet: is not Parquet"),
    BadInput("Parquet files without pictures", files(train__parquet=parquet(text=["x"])),
             "table.image_column: got null; no such column holds bytes; there are text (string)"),
    BadInput("Parquet files with another caption",
             files(train__parquet=parquet(image=[png()], label=[1])),
             "table.caption_column: got 'text'; there is no such column; there are image (binary)",
             {"table": {"caption_column": "text"}}),
    BadInput("Parquet files of another split", files(train__parquet=parquet(image=[png()])),
             "spec.run.data.table.split: got 'tset'; no file is of it; there are train",
             {"table": {"split": "tset"}}),
    BadInput("Parquet files of broken pictures", files(train__parquet=parquet(image=[b"x"])),
             "train/: holds no pictures; row 0: no picture in a format that is read"),
    BadInput("shards without pictures", files(s__tar=tar(a__txt=b"x")), "s/: holds no pictures"),
    BadInput("a shard that is cut off", files(s__tar=tar(a__png=png())[:2000]),
             "s.tar: not a whole tar (member 'a.png' ends at byte"),
    BadInput("a shard that is gzip", files(s__tar=b"\x1f\x8b" + b"x" * 2000),
             "s.tar: not a whole tar (it is compressed with gzip"),
    BadInput("an empty shard", files(s__tar=b""), "s.tar: not a whole tar (it is empty)"),
    BadInput("a shard that is missing", files(**{"s-0__tar": tar(a__png=png())}), "s-1.tar is missing",
             {"images": "set/s-{0..1}.tar"}),
    BadInput("a range that never ends", files(**{"s-0__tar": tar(a__png=png())}),
             "it stands for more than 100,000 files",
             {"images": "set/s-{0..99999999}.tar"}),
]  # fmt: skip
CONFIGS: list[BadInput] = [
    BadInput("TOML that is none", toml("[[datasets]\n"), "set.toml: is not TOML (", TOML),
    BadInput("TOML of one table", toml("[datasets]\nx = 1\n"),
             "set.toml: datasets: got {'x': 1}; must be a list of at least one table", TOML),
    BadInput("an empty config", toml(""),
             "set.toml: datasets: got null; must be a list of at least one", TOML),
    BadInput("no subsets", toml("[[datasets]]\nresolution = 64\n"),
             "set.toml: datasets[0].subsets: got null; must be a list of at least one table", TOML),
    BadInput("a config that is missing", files(), "set.toml: cannot be read (No such file", TOML),
    BadInput("JSON that is none", named("../set.json", b"{"), "set.json: is not JSON (", CONFIG),
    BadInput("a subset without a folder", subset(image_dir=""),
             "datasets[0].subsets[0].image_dir: got ''; must name a folder of pictures", CONFIG),
    BadInput("a folder that is missing", subset(image_dir="sett"),
             "sett: missing; it should hold pictures", CONFIG),
    BadInput("negative repeats", subset(num_repeats=-1),
             "num_repeats: got -1; must be from 1 to 100000", CONFIG),
    BadInput("repeats 0", subset(num_repeats=0), "num_repeats: got 0; must be from 1 to 100000", CONFIG),
    BadInput("repeats as text", subset(num_repeats="10"),
             "num_repeats: got '10'; must be a whole number", CONFIG),
    BadInput("repeats that are true", subset(num_repeats=True), "got true; must be a whole number", CONFIG),
    BadInput("class tokens as a list", subset(class_tokens=["a"]),
             "class_tokens: got ['a']; must be a text", CONFIG),
    BadInput("an unknown option", subset(num_repeat=3),
             "subsets[0].num_repeat: got 3; no option that is read here; did you mean num_repeats?",
             CONFIG),
    BadInput("an unknown section", toml("[generall]\n"),
             "set.toml: generall: got {}; no option that is read here; did you mean general?", TOML),
    BadInput("another resolution", subset(resolution=512),
             "resolution: got 512; must be 64, the spec.run.data.image_size of the run", CONFIG),
    BadInput("buckets only in the config", subset(enable_bucket=True),
             "enable_bucket: got true; set spec.run.data.buckets to {step: 64, min_side: 256,", CONFIG),
    BadInput("captions with another suffix", subset(caption_extension=".cap"),
             "caption_extension: got '.cap'; must be one of .txt, .caption", CONFIG),
    BadInput("changed colours", subset(color_aug=True),
             "color_aug: got true; pictures are encoded once", CONFIG),
    BadInput("dropout of captions", subset(caption_dropout_rate=0.1),
             "caption_dropout_rate: got 0.1; set it to 0 and use spec.run.flow.prompt_dropout", CONFIG),
    BadInput("shuffled captions without a number", subset(shuffle_caption=True),
             "got true; copies are encoded before training: set spec.run.data.variants.captions to how",
             CONFIG),
    BadInput("regularisation alone", subset(is_reg=True),
             "got 'is_reg in all subsets'; one must be trained", CONFIG),
    BadInput("a URL with a password", subset(image_dir="https://me:pw@host/a.tar"),
             "image_dir: got 'https://***@host/a.tar'; must not contain a user name", CONFIG),
    BadInput("a mask that is missing", masks(png(), "b.png"), NONE + "a.png: has no mask in", MASKS),
    BadInput("a black mask", masks(file_of(Image.new("L", (SIDE, SIDE)), "PNG")),
             NONE + "a.png: its mask is black: nothing of it would be trained", MASKS),
    BadInput("a mask of another shape", masks(png(SIDE, 2 * SIDE)),
             NONE + "a.png: its mask has 64 x 128 pixels, another aspect ratio than 64 x 64", MASKS),
    BadInput("a mask that is no picture", masks(b"x"),
             NONE + "a.png: its mask: no picture in a format", MASKS),
    BadInput("a mask cut off", masks(png()[:900]), NONE + "a.png: its mask: corrupt or cut off", MASKS),
    BadInput("no folder of masks", files(a__png=png()), "masks: missing; it should hold ", MASKS),
    BadInput("transparent pictures with alpha", files(a__png=file_of(Image.new("RGBA", (SIDE, SIDE)), "PNG")),
             NONE + "a.png: its mask is black", {"masks": "alpha"}),
    BadInput("an unknown store", files(),
             "images: got 'ftp://host/set'; must be a path, or a URL that begins",
             {"images": "ftp://host/set"}, EXIT_USAGE),
    BadInput("a server that does not answer", files(),
             "images: http://127.0.0.1:9/a.tar: [Errno 111] Connection refused; tried 1 times",
             {"images": "http://127.0.0.1:9/a.tar", "download": {"attempts": 1}}),
]  # fmt: skip
