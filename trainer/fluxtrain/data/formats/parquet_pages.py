"""Looks at the pages of a parquet file before it is read: how large they become, and whether they repeat.

Arrow reserves for a page what its header claims, and a few bytes may stand for any number of rows: of a
dictionary's entry, or of a value that shares its beginning with the one before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.data.formats.tar import open_regular

MAX_ROWS = 10_000_000
"""Of a file; a row may need no bytes."""
MAX_EXPANSION = 64
"""A page may become as many times its size, and _FREE_BYTES more."""
CONTAINER_LIMIT = 1 << 20
"""Entries of a list in Arrow's own reading of the metadata."""
_FREE_BYTES = 1 << 20
_MAX_FOOTER_BYTES = 1 << 24
_HEADER_BYTES = 1 << 16
_MAGIC = b"PAR1"
_DICTIONARY_PAGE, _DELTA_BYTE_ARRAY = 2, 7
# Numbers of fields in parquet.thrift.
_ROWS, _GROUPS = 3, 4
_CHUNKS, _GROUP_ROWS = 1, 3
_CHUNK_METADATA, _PATH, _CHUNK_BYTES, _DATA_OFFSET, _DICTIONARY_OFFSET = 3, 3, 7, 9, 11
_PAGE_TYPE, _UNCOMPRESSED, _COMPRESSED = 1, 2, 3
_ENCODINGS = ((5, 2), (8, 4))  # of data pages of both versions: their header, and its encoding


def check_pages(path: Path, columns: Collection[str | tuple[str, ...]]) -> int:
    """Return the most bytes that the dictionaries of a row group become, of ``columns`` of the file ``path``.

    A column of a struct is given by the names on its path. Raises ValueError, with the reason, if the file is
    malformed or would need more memory than it should, OSError if it cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file).st_size
        end = os.pread(file, 8, max(0, size - 8))
        length = int.from_bytes(end[:4], "little")
        if end[4:] != _MAGIC or length > size - 8:
            raise ValueError("it is cut off, or no parquet file")
        if length > _MAX_FOOTER_BYTES:
            raise ValueError(
                f"its metadata claim {length} bytes, at most {_MAX_FOOTER_BYTES} are read"
            )
        footer = StructReader(os.pread(file, length, size - 8 - length)).struct()
        groups = _structs(footer.get(_GROUPS))
        rows = sum(_natural(group.get(_GROUP_ROWS)) for group in groups)
        if max(rows, _natural(footer.get(_ROWS))) > MAX_ROWS:
            raise ValueError(f"it claims {rows} rows, at most {MAX_ROWS} are read")
        dictionaries = 0
        for group in groups:
            pages = _pages(file, size, group, columns)
            of_group = sum(uncompressed for page, uncompressed in pages if page == _DICTIONARY_PAGE)
            dictionaries = max(dictionaries, of_group)
    return dictionaries


def _pages(
    file: int, size: int, group: Struct, columns: Collection[str | tuple[str, ...]]
) -> Iterator[tuple[int, int]]:
    """Yield type and uncompressed size of each page of ``columns`` in ``group``."""
    paths = [(name,) if isinstance(name, str) else name for name in columns]
    wanted = [[name.encode() for name in path] for path in paths]
    for chunk in _structs(group.get(_CHUNKS)):
        metadata = _struct(chunk.get(_CHUNK_METADATA))
        if metadata.get(_PATH) in wanted:
            yield from _pages_of_chunk(file, size, metadata)


def _pages_of_chunk(file: int, size: int, metadata: Struct) -> Iterator[tuple[int, int]]:
    data, dictionary = (
        _natural(metadata.get(key, 0)) for key in (_DATA_OFFSET, _DICTIONARY_OFFSET)
    )
    position = min(
        filter(None, (data, dictionary)), default=0
    )  # without rows a dictionary may be all
    if not position:
        raise ValueError("its metadata are malformed")
    end = position + _natural(metadata.get(_CHUNK_BYTES))
    if end > size:
        raise ValueError("its columns end outside of it")
    while position < end:
        reader = StructReader(os.pread(file, min(_HEADER_BYTES, end - position), position))
        page = reader.struct()
        uncompressed, compressed = (_natural(page.get(key)) for key in (_UNCOMPRESSED, _COMPRESSED))
        if uncompressed > MAX_EXPANSION * compressed + _FREE_BYTES:
            raise ValueError(f"a page of {compressed} bytes claims to become {uncompressed} bytes")
        for header, encoding in _ENCODINGS:
            if _struct(page.get(header, {})).get(encoding) == _DELTA_BYTE_ARRAY:
                raise ValueError("its encoding DELTA_BYTE_ARRAY is not read; write it as PLAIN")
        yield _natural(page.get(_PAGE_TYPE)), uncompressed
        position += reader.position + compressed


def _structs(value: Any) -> list[Struct]:
    if not isinstance(value, list):
        raise ValueError("its metadata are malformed")
    return [_struct(each) for each in value]


def _struct(value: Any) -> Struct:
    if not isinstance(value, dict):
        raise ValueError("its metadata are malformed")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("its metadata are malformed")
    return value


Struct = dict[int, Any]
"""The fields of a struct by their number; lists are Python's, binaries are bytes."""
MAX_VALUES = 1 << 20
_MAX_DEPTH = 16


@dataclass
class StructReader:
    """A position in ``content``; its methods raise ValueError if that is malformed, cut off or too large."""

    content: bytes
    position: int = 0
    left: int = MAX_VALUES
    """Values that may still be read."""

    def struct(self, depth: int = 0) -> Struct:
        """Return the struct at the position, and move behind it."""
        if depth > _MAX_DEPTH:
            raise ValueError("its metadata are nested too deeply")
        fields, number = Struct(), 0
        while head := self._byte():
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._integer()
            fields[number] = self._value(kind, depth) if kind > 2 else kind == 1
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"its metadata have more than {MAX_VALUES} values")
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (9, 10):
            return self._list(depth)
        reader = self._scalars().get(kind)
        if reader is None:
            raise ValueError("its metadata are malformed")
        return reader()

    def _scalars(self) -> dict[int, Callable[[], Any]]:
        """Return the readers of the types that have no parts; maps do not occur in parquet."""
        return {
            1: self._byte,
            2: self._byte,
            3: self._byte,
            4: self._integer,
            5: self._integer,
            6: self._integer,
            7: lambda: self._take(8),
            8: lambda: self._take(self._natural()),
        }

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count = head >> 4 if head >> 4 != 15 else self._natural()
        return [self._value(head & 15, depth) for _ in range(count)]

    def _integer(self) -> int:
        number = self._natural()
        return (number >> 1) ^ -(number & 1)

    def _natural(self) -> int:
        number = shift = 0
        while shift < 64:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
        raise ValueError("its metadata are malformed")

    def _byte(self) -> int:
        return self._take(1)[0]

    def _take(self, count: int) -> bytes:
        taken = self.content[self.position : self.position + count]
        if len(taken) != count:
            raise ValueError("its metadata are cut off")
        self.position += count
        return taken
