"""Checksums of files: the size of each, and a CRC-32 for each block, so that ranks can share the reading."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 24
_PIECE_BYTES = 1 << 20
"""Bytes that are read or written at once: they stay in the processor's cache for the checksum."""


@dataclass
class FileSums:
    """The size of a file and the CRC-32 of each of its blocks; bytes are added one after the other."""

    size: int = 0
    block_bytes: int = BLOCK_BYTES
    crc32: list[int] = field(default_factory=list)

    def add(self, content: memoryview) -> None:
        """Add the next bytes of the file."""
        while content:
            room = self.block_bytes - self.size % self.block_bytes
            if room == self.block_bytes:
                self.crc32.append(0)
            part = content[:room]
            self.crc32[-1] = zlib.crc32(part, self.crc32[-1])
            self.size += len(part)
            content = content[room:]

    def matches(self, content: bytes) -> bool:
        """Return whether ``content`` is the whole file."""
        other = FileSums(block_bytes=self.block_bytes)
        other.add(memoryview(content))
        return self == other


@dataclass(frozen=True)
class Block:
    """A part of a file, and its CRC-32."""

    file: str
    offset: int
    size: int
    crc32: int

    def is_whole_in(self, folder: Path) -> bool:
        """Return whether the file in ``folder`` holds these bytes; raises OSError if it cannot be read."""
        crc32, rest, buffer = 0, self.size, memoryview(bytearray(min(self.size, _PIECE_BYTES)))
        with (folder / self.file).open("rb", buffering=0) as file:
            file.seek(self.offset)
            while rest and (count := file.readinto(buffer[:rest])):
                crc32, rest = zlib.crc32(buffer[:count], crc32), rest - count
        return not rest and crc32 == self.crc32


class ChecksummedFile(io.FileIO):
    """A new file whose checksums are computed while it is written."""

    def __init__(self, path: Path) -> None:
        """Create ``path``."""
        super().__init__(path, "w")
        self.sums = FileSums()

    def write(self, content: Any) -> int:
        """Write all bytes of ``content``; return their number."""
        view = memoryview(content).cast("B")
        for begin in range(0, len(view), _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            self.sums.add(piece)
            while piece:
                piece = piece[super().write(piece) :]
        return len(view)


def sums_of(content: bytes) -> FileSums:
    """Return the checksums of a file that holds ``content``."""
    sums = FileSums()
    sums.add(memoryview(content))
    return sums


def blocks_of(files: Mapping[str, FileSums]) -> list[Block]:
    """Return the blocks of all ``files``, in the order of their names."""
    return [
        Block(name, offset, min(sums.block_bytes, sums.size - offset), crc32)
        for name, sums in sorted(files.items())
        for offset, crc32 in zip(range(0, sums.size, sums.block_bytes), sums.crc32, strict=True)
    ]


def encode(files: Mapping[str, FileSums]) -> str:
    """Return the checksums of ``files``, by name, as JSON; all have blocks of one size."""
    (block_bytes,) = {sums.block_bytes for sums in files.values()} or {BLOCK_BYTES}
    entries = {name: {"size": sums.size, "crc32": sums.crc32} for name, sums in files.items()}
    return json.dumps({"block_bytes": block_bytes, "files": entries})


def decode(text: str) -> dict[str, FileSums]:
    """Return the checksums of `encode`; raise ValueError if ``text`` is something else."""
    try:
        values = json.loads(text)
        block_bytes = _natural(values["block_bytes"])
        return {
            _plain_name(name): _file_sums(entry, block_bytes)
            for name, entry in values["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no checksums ({error!r})") from None


def _file_sums(entry: Any, block_bytes: int) -> FileSums:
    size, crc32 = _natural(entry["size"]), [_natural(value) for value in entry["crc32"]]
    if block_bytes < 1 or len(crc32) != -(-size // block_bytes):
        raise ValueError(f"{len(crc32)} blocks of {block_bytes} bytes for {size} bytes")
    return FileSums(size, block_bytes, crc32)


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]} is not a size or a checksum")
    return value


def _plain_name(name: str) -> str:
    if not name or Path(name).name != name:
        raise ValueError(f"{name[:40]!r} is not the name of a file")
    return name
