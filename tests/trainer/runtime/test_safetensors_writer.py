"""Files that we write are safetensors files: the library reads the same bits, and nothing is copied."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fluxtrain.errors import DataError
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
