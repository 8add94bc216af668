"""Checksums of files by blocks: the same however a file is written, and wrong after any change."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from fluxtrain.runtime.files import ChecksummedFile, FileSums, blocks_of, decode, encode, sums_of


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
@pytest.mark.parametrize("piece", [1, 7, 100, 5000])
def test_blocks_do_not_depend_on_how_bytes_are_added(size: int, piece: int) -> None:
    content, sums = os.urandom(size), FileSums(block_bytes=100)
    for begin in range(0, size, piece):
        sums.add(memoryview(content)[begin : begin + piece])
    blocks = [content[begin : begin + 100] for begin in range(0, size, 100)]
    assert sums == FileSums(size, 100, [zlib.crc32(block) for block in blocks])
    assert sums.matches(content)
    assert not sums.matches(content + b"x")


@pytest.mark.parametrize("size", [0, 1, 3 << 20, (1 << 24) + 5])
def test_a_file_has_the_checksums_of_what_was_written(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    with ChecksummedFile(tmp_path / "file") as file:
        assert file.write(content[: size // 2]) == size // 2
        file.write(bytearray(content[size // 2 :]))
    assert (tmp_path / "file").read_bytes() == content
    assert file.sums == sums_of(content)
    assert decode(encode({"file": file.sums})) == {"file": file.sums}
    blocks = blocks_of({"file": file.sums})
    assert sum(block.size for block in blocks) == size
    assert all(block.is_whole_in(tmp_path) for block in blocks)
    for index in {0, size // 2, size - 1} if size else set():
        changed = bytearray(content)
        changed[index] ^= 1
        (tmp_path / "file").write_bytes(changed)
        assert sum(not block.is_whole_in(tmp_path) for block in blocks) == 1
    (tmp_path / "file").write_bytes(content[:-1])
    assert not blocks or not blocks[-1].is_whole_in(tmp_path)


def test_blocks_of_another_size_are_encoded_as_they_are() -> None:
    """Versions may differ in the size of blocks; rank 0 sends what it decoded to all ranks."""
    sums = FileSums(block_bytes=100)
    sums.add(memoryview(bytes(250)))
    assert decode(encode({"file": sums})) == {"file": sums}


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        "{}",
        "[" * 100_000,
        '{"block_bytes": 1, "files": []}',
        '{"block_bytes": true, "files": {"a": {"size": 1, "crc32": [1]}}}',
        '{"block_bytes": 0, "files": {"a": {"size": 0, "crc32": []}}}',
        '{"block_bytes": 1, "files": {"a": {"size": 2, "crc32": [1]}}}',
        '{"block_bytes": 1, "files": {"a": {"size": -1, "crc32": []}}}',
        '{"block_bytes": 1, "files": {"../a": {"size": 1, "crc32": [1]}}}',
        '{"block_bytes": 1, "files": {"": {"size": 1, "crc32": [1]}}}',
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no checksums"):
        decode(text)
