"""The members of a tar equal those of tarfile; damaged tars raise DataError naming the file."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.data.formats.tar_files import (
    END_MARK,
    TWO_SAMPLES,
    block,
    image,
    member,
    padded,
    pax,
    pixels,
    put,
    raw,
    write_tars,
)

from fluxtrain.data.formats.tar import read_members
from fluxtrain.data.formats.tar_index import build_index
from fluxtrain.data.images import TarImages
from fluxtrain.errors import DataError


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_members_are_those_of_tarfile(tmp_path: Path, form: int) -> None:
    path = tmp_path / "a.tar"
    long = "" if form == tarfile.USTAR_FORMAT else "long ☃ " * 40
    with tarfile.open(path, "w", format=form, pax_headers={"comment": "global"}) as tar:
        for i in range(4):
            content = bytes(i * 300)
            tar.addfile(member(f"x/{long}{i}.png", content, mtime=0.5 * i)[0], io.BytesIO(content))
    with tarfile.open(path, "r:") as tar:
        expected = [(each.name, each.offset_data, each.size) for each in tar]
    assert [(each.name, each.offset, each.size) for each in read_members(path)] == expected


CUT = "cut off before its end mark"
MALFORMED = "a pax header is malformed"
DAMAGED = {
    "empty": (b"", "it is empty"),
    "gzip": (gzip.compress(TWO_SAMPLES), "compressed with gzip"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
    "noise": (b"x" * 2000, "its header at byte 0: invalid header"),
    "short noise": (b"x" * 100, CUT),
    "no end mark": (TWO_SAMPLES, CUT),
    "last block cut": (TWO_SAMPLES[:-512], "member 'b.txt' ends at byte 4096 of 3584: cut off"),
    "header cut": (TWO_SAMPLES[:1500], "cut off"),
    "content cut": (TWO_SAMPLES[:700], "member 'a.png' ends at byte 1024 of 700: cut off"),
    "noise later": (TWO_SAMPLES + b"junk" * 128 + END_MARK, "its header at byte 4096: "),
    "negative size": (block("a.png", -5) + END_MARK, "a negative size"),
    "huge pax": (
        block("x", 1 << 30, tarfile.XHDTYPE),
        "an extension header claims 1073741824 byte",
    ),
    "huge name": (block("x", 1 << 30, tarfile.GNUTYPE_LONGNAME), "an extension header claims"),
    "pax cut": (block("x", 5000, tarfile.XHDTYPE), "cut off in an extension header"),
    "pax negative": (pax(b"19 size=-999999999\n") + END_MARK, "gives the size '-999999999'"),
    "pax float": (pax(b"12 size=1e9\n") + END_MARK, "gives the size '1e9'"),
    "pax digits": (pax(b"5012 size=" + b"9" * 5001 + b"\n") + END_MARK, "gives the size '9999"),
    "length too large": (pax(b"99999999 path=x\n") + END_MARK, MALFORMED),
    "length 0": (pax(b"0 path=x\n") + END_MARK, MALFORMED),
    "second without length": (pax(b"10 path=x\n", b"no length\n") + END_MARK, MALFORMED),
    "second of length 0": (pax(b"10 path=x\n", b"0 path=x\n") + END_MARK, MALFORMED),
    "second of length 2": (pax(b"10 path=x\n", b"2 path=x\n") + END_MARK, MALFORMED),
    "only digits": (pax(b"1" * 5000) + END_MARK, MALFORMED),
    "no length": (pax(b"no length\n") + END_MARK, MALFORMED),
    "length too small": (pax(b"9 path=xyz\n") + END_MARK, MALFORMED),
    "only extensions": (block("x", 0, tarfile.GNUTYPE_LONGNAME) * 5000, CUT),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_tar_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = put(tmp_path, content)
    with pytest.raises(DataError) as error:
        TarImages(tmp_path)
    assert str(error.value).startswith(f"{path}: not a whole tar (")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_tar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_tars(tmp_path, count=2) / "shard_000000.tar"
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        end_mark = tar.getmembers()[-1].offset_data + 512
    for length in range(0, end_mark + 512, 100):
        path.write_bytes(content[:length])
        with pytest.raises(DataError):
            build_index(path)
    path.write_bytes(content[: end_mark + 512])
    assert len(build_index(path).keys) == 2


def damage_header(content: bytes, rng: np.random.Generator) -> bytes:
    """Return ``content`` with three random bytes in one header, and a valid checksum."""
    damaged = bytearray(content)
    start = 1024 * int(rng.integers(0, 5))  # five headers, each with one block of content
    for place in rng.integers(0, 180, 3).tolist():
        damaged[start + place] = int(rng.integers(0, 256))
    damaged[start + 148 : start + 156] = b" " * 8
    damaged[start + 148 : start + 156] = b"%06o\0 " % sum(damaged[start : start + 512])
    return bytes(damaged)


def test_a_damaged_header_raises_nothing_but_data_error(tmp_path: Path) -> None:
    rng, outcomes = np.random.default_rng(0), set[str]()
    content = pax(b"10 path=x\n") + TWO_SAMPLES + END_MARK
    for _ in range(400):
        path = put(tmp_path, damage_header(content, rng))
        try:
            index = build_index(path)
        except DataError as error:
            outcomes.add(str(error))
            continue
        outcomes.update(index.skipped.messages, index.keys)
        ends = index.spans[:, ::2] + index.spans[:, 1::2]
        assert (index.spans >= 0).all()
        assert (ends <= len(content)).all()
    assert "b" in outcomes
    assert len(outcomes) > 10
    assert all(outcome.isprintable() for outcome in outcomes)


def test_a_size_in_a_pax_header_applies(tmp_path: Path) -> None:
    png = image()
    record = b"12 size=%d\n" % len(png)
    assert len(record) == 12
    entry = pax(record) + block("a.png", 0) + padded(png)
    put(tmp_path, entry + raw(member("a.txt", b"A")) + END_MARK)
    np.testing.assert_array_equal(TarImages(tmp_path).image(0).permute(1, 2, 0), pixels(0))


def test_a_global_pax_header_applies_to_no_member(tmp_path: Path) -> None:
    header = pax(b"17 path=../../up\n", b"15 size=999999\n", kind=tarfile.XGLTYPE)
    put(tmp_path, header + TWO_SAMPLES + END_MARK)
    data = TarImages(tmp_path)
    assert ([data.key(0), data.key(1)], data.num_skipped) == (["a", "b"], 0)


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path, TWO_SAMPLES + END_MARK)
    assert len(build_index(path, max_members=5).keys) == 2
    with pytest.raises(DataError, match="more than 3 members"):
        build_index(path, max_members=3)
