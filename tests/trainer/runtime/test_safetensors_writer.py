"""Files that we write: the library reads the same bits, and checksums find any change."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fluxtrain.errors import DataError
from fluxtrain.runtime.files import ChecksummedFile, FileSums, blocks_of, decode, encode, sums_of
from fluxtrain.runtime.safetensors import content_of, header, read_header, write

METADATA = {"format": "pt", "note": 'quotes " and umlauts äöü'}


def every_type() -> dict[str, Tensor]:
    bits = torch.randint(0, 256, (6, 64), dtype=torch.uint8)
    types = [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.float16]
    types += [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int16, torch.int32]
    return {
        **{f"of.{dtype}": bits.view(dtype) for dtype in types},
        "a number": torch.tensor(3.5),
        "no rows": torch.empty(0, 7),
        "flags": torch.tensor([True, False]),
        "transposed": torch.randn(5, 3).T,
    }


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    with path.open("wb") as file:
        write(file, tensors, METADATA)
    return path


def test_the_library_reads_the_same_bits(tmp_path: Path) -> None:
    tensors = every_type()
    path = written(tmp_path / "ours.safetensors", tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == METADATA
    read = safetensors.torch.load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
        same = read[name].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().view(-1).view(torch.uint8)), name


def test_the_data_begin_at_a_cache_line_and_each_tensor_at_a_multiple_of_its_type(
    tmp_path: Path,
) -> None:
    tensors = {f"{'n' * count}": torch.randn(3) for count in range(1, 40)}
    tensors = {"odd": torch.zeros(3, dtype=torch.uint8), **tensors}
    spans = read_header_of_any_type(written(tmp_path / "file.safetensors", tensors))
    assert min(begin for begin, _ in spans.values()) % 64 == 0
    assert all(begin % size == 0 for begin, size in spans.values())


def read_header_of_any_type(path: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte of each tensor in the file, and the bytes of a number."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    sizes = {"U8": 1, "F32": 4}
    return {
        name: (8 + length + entry["data_offsets"][0], sizes[entry["dtype"]])
        for name, entry in json.loads(content[8 : 8 + length]).items()
        if name != "__metadata__"
    }


def test_our_own_reader_finds_every_tensor(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16()}
    spans = read_header(written(tmp_path / "file.safetensors", tensors))
    assert {name: span.shape for name, span in spans.items()} == {"a": (2, 3), "b": (4,)}


class Addresses:
    """A file that notes where the bytes that it is given are."""

    def __init__(self) -> None:
        self.found = list[int]()

    def write(self, content: Any) -> int:
        self.found.append(torch.frombuffer(content, dtype=torch.uint8).data_ptr())
        return len(content)


def test_one_element_may_have_any_stride() -> None:
    strided = torch.arange(64.0)[5::32][:1]
    assert bytes(content_of(strided)) == strided.clone().numpy().tobytes()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_tensors_are_written_from_where_they_are() -> None:
    tensors = {"weights": torch.randn(1000), "moments": torch.randn(50, 20)}
    file = Addresses()
    write(file, tensors, {})
    assert file.found[1:] == [tensor.data_ptr() for tensor in tensors.values()]


def test_a_type_that_the_format_lacks_is_refused_with_the_tensors_name() -> None:
    with pytest.raises(DataError, match=r"phases is of type torch.complex64"):
        header({"phases": (torch.complex64, (2,))}, {})


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
    sums = sums_of(bytes(250), 100)
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
