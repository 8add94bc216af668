"""Reads the members of untrusted tars from their 512-byte headers; nothing is unpacked.

``tarfile`` parses single headers; its iteration is not used, because it trusts declared sizes and takes a
damaged header for the end of the archive. A tar that is not whole raises DataError; unusable members have a
fault.
Formats: POSIX.1-1988 ustar, POSIX.1-2001 pax (``path`` and ``size``), GNU long names.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fluxtrain.errors import DataError, has_controls

MAX_MEMBER_BYTES = 1 << 28
MAX_MEMBERS = 10_000_000
MAX_NAME_LENGTH = 1024
_MAX_EXTENSION_BYTES = 1 << 20
_BLOCK = 512
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_EXTENSIONS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)
_LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_WITHOUT_DATA = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.DIRTYPE: "a folder",
}
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class Member:
    """One file inside a tar; ``offset`` counts from the start of the tar; ``fault`` is why it is unusable."""

    name: str
    offset: int
    size: int
    fault: str | None = None


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Yield a descriptor of ``path``; OSError if it is missing, ValueError if it is not a regular file."""
    # O_NONBLOCK: opening a named pipe would otherwise block forever.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("not a regular file")
        yield file
    finally:
        os.close(file)


def read_members(path: Path, max_members: int = MAX_MEMBERS) -> Iterator[Member]:
    """Yield the files in the tar ``path``, in its order; DataError if it is not a whole tar.

    Folders are left out; links, devices, sparse files, huge files and invalid names have a fault.
    """
    try:
        with open_regular(path) as file:
            yield from _HeaderReader(file, os.fstat(file).st_size, max_members).members()
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (OSError, ValueError, tarfile.HeaderError) as error:
        raise DataError(f"{path}: not a whole tar ({error})") from None


def name_fault(name: str) -> str | None:
    """Return why ``name`` is not a valid member name, or None; names are printed, never opened."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        return f"its name has {len(name)} characters"
    if has_controls(name):
        return "its name has control characters or is not UTF-8"
    if name.startswith("/") or ".." in name.split("/"):
        return "its name leads out of the tar"
    return None


@dataclass
class _Extension:
    """The values of extension headers for the member that follows them."""

    name: str | None = None
    size: int | None = None
    sparse: bool = False


@dataclass
class _HeaderReader:
    """Reads the headers of the tar that is open as ``file``."""

    file: int
    end: int
    max_members: int
    position: int = 0
    pending: _Extension = field(default_factory=_Extension)

    def members(self) -> Iterator[Member]:
        """Yield the members up to the end mark; ValueError or HeaderError if the tar is damaged."""
        if not self.end:
            raise ValueError("it is empty")
        start = os.pread(self.file, 8, 0)
        for magic, name in _COMPRESSED.items():
            if start.startswith(magic):
                raise ValueError(
                    f"it is compressed with {name}; shards are read at random, unpack it"
                )
        for _ in range(self.max_members):
            block = self._take(_BLOCK, "it is cut off before its end mark")
            if not any(block):
                return
            yield from self._member(self._header(block), block)
            if self.position > self.end:  # after a member over the size limit
                return
        raise ValueError(f"more than {self.max_members} members")

    def _member(self, header: tarfile.TarInfo, block: bytes) -> Iterator[Member]:
        """Yield the member of ``header``, if it has one, and move on to the next header."""
        if header.type in _EXTENSIONS or header.type in _LONG_NAMES:
            self._read_extension(header)
            return
        pending, self.pending = self.pending, _Extension()
        if header.type == tarfile.GNUTYPE_SPARSE:
            pending.sparse = True
            more = bool(block[482])  # GNU's isextended; the blocks that follow have it at byte 504
            while more:
                more = bool(self._take(_BLOCK, "it is cut off in a sparse file's map")[504])
        # "tar c ." writes ./path for path.
        name = (header.name if pending.name is None else pending.name).removeprefix("./")
        size = header.size if pending.size is None else pending.size
        kind = tarfile.DIRTYPE if header.isdir() else header.type
        # A link may give the size of its target, but no data follow.
        member = Member(name, self.position, 0 if kind in _WITHOUT_DATA else size)
        fault = self._fault(member, kind, pending.sparse)
        self.position += _padded(member.size)
        if kind != tarfile.DIRTYPE:
            yield Member(name, member.offset, member.size, fault)

    def _fault(self, member: Member, kind: bytes, sparse: bool) -> str | None:
        """Return why ``member`` cannot be used, or None; ValueError if the tar ends inside it."""
        end = member.offset + _padded(member.size)
        if member.size > MAX_MEMBER_BYTES:
            lost = "; nothing after it can be read" if end > self.end else ""
            return f"it claims {member.size} bytes, at most {MAX_MEMBER_BYTES} are read{lost}"
        if end > self.end:
            raise ValueError(
                f"member {quoted(member.name)} ends at byte {end} of {self.end}: cut off"
            )
        if sparse:
            return "it is a sparse file"
        if kind not in _REGULAR:
            return f"it is {_WITHOUT_DATA.get(kind, 'of an unknown kind')}"
        return name_fault(member.name)

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise ValueError(f"its header at byte {self.position - _BLOCK}: {error}") from None
        if header.size < 0:
            raise ValueError(f"its header at byte {self.position - _BLOCK}: a negative size")
        return header

    def _read_extension(self, header: tarfile.TarInfo) -> None:
        """Read an extension header; global ones do not apply to single members and are ignored."""
        if header.size > _MAX_EXTENSION_BYTES:
            raise ValueError(f"an extension header claims {header.size} bytes")
        content = self._take(_padded(header.size), "it is cut off in an extension header")
        if header.type == tarfile.GNUTYPE_LONGNAME:
            self.pending.name = _text(content.partition(b"\0")[0])
        elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            records = _pax_records(content[: header.size])
            if "path" in records:
                self.pending.name = records["path"]
            if "size" in records:
                self.pending.size = _natural(records["size"])
            self.pending.sparse |= any(name.startswith("GNU.sparse.") for name in records)

    def _take(self, size: int, message: str) -> bytes:
        """Return the next ``size`` bytes; ValueError with ``message`` if there are fewer."""
        content = os.pread(self.file, size, self.position)
        if len(content) != size:
            raise ValueError(message)
        self.position += size
        return content


def quoted(name: str) -> str:
    """Return ``name`` quoted, escaped and shortened for messages."""
    text = repr(name[:100])
    return text if len(name) <= 100 and len(text) <= 200 else f"{text[:200]}..."


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _natural(digits: str) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise ValueError(f"a pax header gives the size {quoted(digits)}")
    return int(digits)


def _pax_records(content: bytes) -> dict[str, str]:
    """Return the records ``length key=value`` of a pax header; ValueError if one is malformed."""
    records, start = {}, 0
    while start < len(content):
        space = content.find(b" ", start, start + 9)
        length = content[start : max(start, space)]
        end = start + (int(length) if length.isdigit() else 0)
        # Each record must end after its own space, or this loop would not terminate.
        if not start < space < end <= len(content) or content[end - 1 : end] != b"\n":
            raise ValueError("a pax header is malformed")
        record = content[space + 1 : end]
        name, _, value = record[:-1].partition(b"=")
        records[_text(name)] = _text(value)
        start = end
    return records
