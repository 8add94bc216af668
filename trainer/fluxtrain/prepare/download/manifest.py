"""MLCommons' manifests: ``NAME.uri`` says where the files are, ``NAME.md5`` beside it which, with MD5s.

A line of the second is ``<32 hexadecimal digits>  <path>``, as md5sum writes it. Nothing in them is trusted:
paths stay inside the output, sizes are bounded, and https is not left for http.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urlsplit

from fluxtrain.data.tar.members import shown
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.download.http import HttpClient, is_url

MAX_BYTES = 1 << 26
MAX_ENTRIES = 1_000_000
PARTIAL, VERIFIED = ".partial", ".verified"
_MAX_PATH = 1024
_LINE = re.compile(r"([0-9a-fA-F]{32})\s+\*?(?:\./)?(\S.*)")
_FLAG = "--manifest"


@dataclass(frozen=True)
class Entry:
    """One file: where it goes below the output, where it comes from, and its MD5."""

    path: str
    url: str
    md5: str


def read_manifest(given: str, base: str | None, link: HttpClient) -> list[Entry]:
    """Return the files of the manifest ``given``: a ``.uri`` or an ``.md5``, a URL or a file.

    ``base``, a URL or a folder, is where the files are; for an ``.md5`` it is the folder that holds it
    unless said. Raises ConfigError where ``given`` is none, DataError where its content is malformed.
    """
    if given.endswith(".uri"):
        base = base or _base(given, link)
        given = f"{given.removesuffix('.uri')}.md5"
    elif not given.endswith(".md5"):
        raise ConfigError(_FLAG, given, "allowed: a URL or a file that ends in .uri or .md5")
    base = base or given.rpartition("/")[0] or "."
    _refuse_downgrade(given, base)
    return parse(given, _text(given, link), base)


def parse(name: str, text: str, base: str) -> list[Entry]:
    """Return the entries of the MD5 list ``text``; DataError, naming ``name`` and line, if one is bad."""
    entries = dict[str, Entry]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line.strip())
        path = found[2] if found else ""
        fault = "not an MD5 and a path" if not found else path_fault(path)
        if path in entries or len(entries) >= MAX_ENTRIES:
            fault = "given twice" if path in entries else f"more than {MAX_ENTRIES} files"
        if found is None or fault:
            raise DataError(f"{name}: line {number}: {shown(path or line)}: {fault}")
        entries[path] = Entry(path, _joined(base, path), found[1].lower())
    if not entries:
        raise DataError(f"{name}: names no files")
    _refuse_nested(name, entries)
    return list(entries.values())


def path_fault(path: str) -> str | None:
    """Return why ``path`` may not be written below the output, or None."""
    if not path.isprintable() or len(path) > _MAX_PATH:
        return "control characters, or too long"
    if path.startswith("/") or "\\" in path or any(p in ("", ".", "..") for p in path.split("/")):
        return "it leads out of the output"
    if path == VERIFIED or any(part.endswith(PARTIAL) for part in path.split("/")):
        return "a name that is kept for our own files"
    return None


def _base(given: str, link: HttpClient) -> str:
    text = _text(given, link).strip()
    if not is_url(text) or "\n" in text or len(text) > _MAX_PATH:
        raise DataError(f"{given}: not one URL: {shown(text)}")
    return text


def _text(given: str, link: HttpClient) -> str:
    read: Callable[[str], bytes] = link.read_small if is_url(given) else _content
    try:
        return read(given).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{given}: not UTF-8") from None


def _content(given: str) -> bytes:
    try:
        with Path(given).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(_FLAG, given, str(error.strerror)) from None
    if len(content) > MAX_BYTES:
        raise DataError(f"{given}: more than {MAX_BYTES} bytes")
    return content


def _joined(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{quote(path)}" if is_url(base) else f"{base.rstrip('/')}/{path}"


def _refuse_downgrade(given: str, base: str) -> None:
    if given.startswith("https:") and urlsplit(base).scheme != "https":
        raise DataError(f"{given}: came by https and sends to {shown(base)}")


def _refuse_nested(name: str, entries: dict[str, Entry]) -> None:
    for path in entries:
        for parent in PurePosixPath(path).parents:
            if str(parent) in entries:
                raise DataError(f"{name}: {shown(str(parent))} is a file and a folder")
