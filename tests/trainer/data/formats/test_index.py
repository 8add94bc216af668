"""The index of a tar: unusable members are skipped and named; a sidecar is used only if it is valid."""

from __future__ import annotations

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
    TWO_SAMPLES,
    Member,
    block,
    member,
    open_with,
    pax,
    pixels,
    put,
    raw,
    sample,
    write_tars,
)

from fluxtrain.data.formats.tar import MAX_MEMBER_BYTES
from fluxtrain.data.formats.tar_index import MAX_CAPTION_BYTES, MAX_SKIPPED, open_index
from fluxtrain.data.images import TarImages


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
