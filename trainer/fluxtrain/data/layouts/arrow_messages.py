"""Looks at the messages of an Arrow stream without decoding them: whether anything in it is compressed.

Arrow itself decompresses a batch as it is read, to whatever size the batch claims.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

# Fields of the flatbuffers in Arrow's Message.fbs, by their number.
_MESSAGE_HEADER, _DICTIONARY_DATA, _COMPRESSION = 2, 1, 3


def require_uncompressed(stream: Any) -> None:
    """Raise ValueError if a batch of the mapped ``stream`` is compressed, or its message is malformed."""
    for message in pa.ipc.MessageReader.open_stream(stream):
        if message.type not in ("record batch", "dictionary"):
            continue
        try:
            if _is_compressed(memoryview(message.metadata), message.type == "dictionary"):
                raise ValueError("its cells are compressed; save it with datasets' save_to_disk")
        except struct.error:
            raise ValueError("a message is malformed") from None


def _is_compressed(content: memoryview, is_dictionary: bool) -> bool:
    """Return whether the batch of the message ``content`` names a compression."""
    batch = _table(content, _table_at(content, 0), _MESSAGE_HEADER)
    if is_dictionary and batch is not None:
        batch = _table(content, batch, _DICTIONARY_DATA)
    return batch is not None and _field(content, batch, _COMPRESSION) is not None


def _table(content: memoryview, table: int, number: int) -> int | None:
    """Return where the table in field ``number`` of ``table`` begins, None if the field is not set."""
    place = _field(content, table, number)
    return None if place is None else _table_at(content, place)


def _table_at(content: memoryview, place: int) -> int:
    return place + _number("<I", content, place)


def _field(content: memoryview, table: int, number: int) -> int | None:
    """Return the place of field ``number`` of ``table``, None if it is not set."""
    names = table - _number("<i", content, table)
    entry = 4 + 2 * number
    if entry + 2 > _number("<H", content, names):
        return None
    offset = _number("<H", content, names + entry)
    return table + offset if offset else None


def _number(kind: str, content: memoryview, place: int) -> int:
    if place < 0:
        raise struct.error
    (number,) = struct.unpack_from(kind, content, place)
    return int(number)
