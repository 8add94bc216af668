"""The members and the index of a tar: as tarfile reads them; unusable ones are skipped and named."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.data.formats.tar_files import (
    END_MARK,
    TAR_FORMATS,
    TWO_SAMPLES,
    Member,
    block,
    image,
    member,
    open_with,
    padded,
    pax,
    pixels,
    put,
    raw,
    sample,
    write_tars,
)

from fluxtrain.data.formats.tar import MAX_MEMBER_BYTES, read_members
from fluxtrain.data.formats.tar_index import MAX_CAPTION_BYTES, MAX_SKIPPED, build_index, open_index
from fluxtrain.data.images import TarImages
from fluxtrain.errors import DataError


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
def test_an_unusable_member_is_skipped_and_named(tmp_path: Path, bad: Member, message: str) -> None:
    data = open_with(tmp_path, bad)
    assert message in data.skipped[0]
    assert data.skipped[0].startswith(f"{tmp_path}/a.tar: ")
    assert data.skipped[0].isprintable()
    assert (data.num_skipped, data.key(len(data) - 1)) == (1, "good")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.index.json"]


def test_of_duplicate_keys_the_first_is_used(tmp_path: Path) -> None:
    data = open_with(tmp_path, *sample("a", 1), *sample("a", 2))
    assert (len(data), data.caption(0), data.num_skipped) == (2, "Prompt 1", 2)
    np.testing.assert_array_equal(data.image(0).permute(1, 2, 0).numpy(), pixels(1))


def test_folders_and_other_files_are_ignored(tmp_path: Path) -> None:
    others = (("README", b"r"), ("a.cls", b"1"), (".hidden.png", b"p"), ("._a.txt", b"p"))
    data = open_with(tmp_path, member("x", type=tarfile.DIRTYPE), *(member(*o) for o in others))
    assert (len(data), data.num_skipped) == (1, 0)


def test_a_link_with_a_size_hides_no_member(tmp_path: Path) -> None:
    put(tmp_path, block("a.png", 5000, tarfile.LNKTYPE) + raw(*sample("good")) + END_MARK)
    assert TarImages(tmp_path).key(0) == "good"


def test_sparse_files_are_skipped(tmp_path: Path) -> None:
    old = bytearray(block("old.png", 512, tarfile.GNUTYPE_SPARSE))
    old[482] = 1  # the map continues in a block of its own
    old[148:156] = b"%06o\0 " % (sum(old[:148]) + sum(old[156:]) + 8 * 32)
    new = pax(b"22 GNU.sparse.major=1\n", b"22 GNU.sparse.minor=0\n") + block("new.png", 512)
    put(tmp_path, bytes(old) + bytes(1024) + new + bytes(512) + raw(*sample("g")) + END_MARK)
    data = TarImages(tmp_path)
    assert (len(data), data.key(0)) == (1, "g")
    expected = [f"{tmp_path}/a.tar: member '{n}.png': it is a sparse file" for n in ("old", "new")]
    assert data.skipped == expected


def test_a_member_over_the_limit_is_skipped(tmp_path: Path) -> None:
    with (tmp_path / "a.tar").open("wb") as file:  # a sparse file on disk
        file.write(block("big.png", MAX_MEMBER_BYTES + 1))
        file.seek(512 + MAX_MEMBER_BYTES + 512)
        file.write(raw(*sample("good")) + END_MARK)
    data = TarImages(tmp_path)
    assert (len(data), data.key(0)) == (1, "good")
    assert "it claims 268435457 bytes, at most 268435456 are read" in data.skipped[0]


@pytest.mark.parametrize("size", [1 << 40, (1 << 62) + 1])
def test_nothing_is_read_after_a_member_of_absurd_size(tmp_path: Path, size: int) -> None:
    put(tmp_path, raw(*sample("a")) + block("big.png", size) + raw(*sample("b")) + END_MARK)
    data = TarImages(tmp_path)
    assert (len(data), data.num_skipped) == (1, 1)
    assert f"claims {size} bytes" in data.skipped[0]
    assert "nothing after it can be read" in data.skipped[0]


def test_the_first_messages_are_stored_and_all_members_counted(tmp_path: Path) -> None:
    data = open_with(tmp_path, *(member(f"{i}.txt", b"x") for i in range(150)))
    assert (len(data.skipped), data.num_skipped) == (MAX_SKIPPED, 150)
    again = TarImages(tmp_path)
    assert (again.skipped, again.num_skipped) == (data.skipped, 150)


def test_the_index_is_read_from_its_sidecar(tmp_path: Path) -> None:
    path = write_tars(tmp_path, count=2) / "shard_000000.tar"
    TarImages(tmp_path)
    sidecar = tmp_path / "shard_000000.tar.index.json"
    stored = json.loads(sidecar.read_text())
    assert (stored["size"], stored["mtime_ns"]) == (path.stat().st_size, path.stat().st_mtime_ns)
    stored["keys"][0] = "from the sidecar"
    sidecar.write_text(json.dumps(stored))
    assert TarImages(tmp_path).key(0) == "from the sidecar"


def test_a_changed_tar_is_indexed_again(tmp_path: Path) -> None:
    path = put(tmp_path, raw(*sample("old")) + END_MARK)
    assert open_index(path).keys == ["old"]
    before = path.stat()
    for keys in (["new"], ["new", "more"]):  # another time, then another size
        path.write_bytes(raw(*(each for key in keys for each in sample(key))) + END_MARK)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        assert open_index(path).keys == keys


Edit = Callable[[str], str]


def edit(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edited(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return edited


def replace(**fields: Any) -> Edit:
    return edit(lambda content: content.update(fields))


def first(field: str, value: object) -> Edit:
    return edit(lambda content: content[field].__setitem__(0, value))


SPANS: list[object] = [  # offset and size of image, caption and metadata
    [0, 1, 2, 3],
    "012345",
    [0, 1, 2, "x" * 1000, 0, 0],
    [0, 1, 2, True, 0, 0],
    [0, 1.5, 2, 3, 0, 0],
    [-1, 1, 0, 1, 0, 0],
    [0, -1, 0, 1, 0, 0],
    [0, 1 << 20, 0, 1, 0, 0],
    [1 << 30, 1, 0, 1, 0, 0],
    [(1 << 63) - 1, 1, 0, 1, 0, 0],
    [1 << 70, 1, 0, 1, 0, 0],
    [0, 1, 0, MAX_CAPTION_BYTES + 1, 0, 0],
]


@pytest.mark.parametrize(
    "edited",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "9" * 5000,
        replace(format=999),
        *(edit(lambda content, f=field: content.pop(f)) for field in ("keys", "spans", "skipped")),
        edit(lambda content: content["keys"].pop()),
        replace(keys="ab"),
        *(first("keys", key) for key in (7, "../../x", "\x1b[2J")),
        replace(spans={}),
        *(first("spans", span) for span in SPANS),
        replace(num_skipped="1"),
        replace(num_skipped=-1),
        replace(skipped=["x"] * 200, num_skipped=200),
        replace(skipped=["\x1b[2J"], num_skipped=1),
        replace(skipped=["x" * 10_000], num_skipped=1),
    ],
)
def test_a_malformed_sidecar_is_rebuilt(tmp_path: Path, edited: Edit) -> None:
    put(tmp_path, raw(*sample("a"), member("z.txt", bytes(60_000))) + END_MARK * 100)
    data, sidecar = TarImages(tmp_path), tmp_path / "a.tar.index.json"
    valid = sidecar.read_text()
    sidecar.write_text(edited(valid))
    again = TarImages(tmp_path)
    assert (again.key(0), again.caption(0), again.skipped) == ("a", "Prompt 0", data.skipped)
    assert sidecar.read_text() == valid


def test_a_sidecar_that_is_not_a_file_is_ignored(tmp_path: Path) -> None:
    put(tmp_path, TWO_SAMPLES + END_MARK)
    sidecar, target = tmp_path / "a.tar.index.json", tmp_path / "target"
    os.mkfifo(sidecar)
    assert len(TarImages(tmp_path)) == 2
    sidecar.unlink()
    sidecar.symlink_to(target)
    assert len(TarImages(tmp_path)) == 2
    assert not target.exists()


def test_if_no_sidecar_can_be_written_the_index_stays_in_memory(tmp_path: Path) -> None:
    # A folder in its place, because root ignores permissions.
    put(tmp_path, TWO_SAMPLES + END_MARK)
    (tmp_path / "a.tar.index.json" / "x").mkdir(parents=True)
    assert len(TarImages(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.index.json"]


@pytest.mark.parametrize("form", TAR_FORMATS)
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
