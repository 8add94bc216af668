"""Reads structs of Thrift's compact protocol, in which parquet's metadata are, within a budget of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
