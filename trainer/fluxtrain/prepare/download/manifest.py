"""MLCommons' manifests: ``NAME.uri`` holds the URL of the files, ``NAME.md5`` beside it their MD5s and paths.

A line of the second is ``<32 hexadecimal digits>  <path>``, as md5sum writes it. Manifests are validated:
paths stay inside the output, sizes are bounded, and https does not lead to http.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urlsplit

from fluxtrain.data.tar.members import quoted
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.remote.http import MAX_SMALL_BYTES, HttpClient, is_url

MAX_ENTRIES = 1_000_000
PARTIAL, VERIFIED = ".partial", ".verified"
_MAX_PATH = 1024
_LINE = re.compile(r"([0-9a-fA-F]{32})\s+\*?(?:\./)?(\S.*)")
_FLAG = "--manifest"


@dataclass(frozen=True)
class Entry:
    """One file: its path below the output, its URL and its checksum."""

    path: str
    url: str
    digest: str
    """In hexadecimal."""
    algorithm: str = "md5"
    """As `hashlib` names it: MLCommons has chosen MD5, COCO's archives have a SHA-1."""


def read_manifest(given: str, base: str | None, client: HttpClient) -> list[Entry]:
    """Return the entries of the manifest ``given``, the URL or path of a ``.uri`` or ``.md5`` file.

    ``base`` is the URL or folder of the files; for an ``.md5`` it defaults to the folder that holds it.
    Raises ConfigError if ``given`` cannot be a manifest, DataError if its content is malformed.
    """
    if given.endswith(".uri"):
        base = base or _read_base(given, client)
        given = f"{given.removesuffix('.uri')}.md5"
    elif not given.endswith(".md5"):
        raise ConfigError(_FLAG, given, "allowed: a URL or a file that ends in .uri or .md5")
    base = base or given.rpartition("/")[0] or "."
    _require_no_downgrade(given, base)
    return parse(given, _read_text(given, client), base)


def parse(name: str, text: str, base: str) -> list[Entry]:
    """Return the entries of the MD5 list ``text``; DataError, naming ``name`` and line, if one is bad."""
    entries = dict[str, Entry]()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        path = match[2] if match else ""
        fault = path_fault(path) if match else "not an MD5 and a path"
        if path in entries or len(entries) >= MAX_ENTRIES:
            fault = "listed twice" if path in entries else f"more than {MAX_ENTRIES} files"
        if match is None or fault:
            raise DataError(f"{name}: line {number}: {quoted(path or line)}: {fault}")
        entries[path] = Entry(path, _join(base, path), match[1].lower())
    if not entries:
        raise DataError(f"{name}: lists no files")
    _require_no_nesting(name, entries)
    return list(entries.values())


def path_fault(path: str) -> str | None:
    """Return why ``path`` must not be written below the output, or None."""
    if not path.isprintable() or len(path) > _MAX_PATH:
        return "control characters, or too long"
    if path.startswith("/") or "\\" in path or any(p in ("", ".", "..") for p in path.split("/")):
        return "leads out of the output"
    if path == VERIFIED or any(part.endswith(PARTIAL) for part in path.split("/")):
        return "a reserved name"
    return None


def _read_base(given: str, client: HttpClient) -> str:
    text = _read_text(given, client).strip()
    if not is_url(text) or "\n" in text or len(text) > _MAX_PATH:
        raise DataError(f"{given}: not one URL: {quoted(text)}")
    return text


def _read_text(given: str, client: HttpClient) -> str:
    read: Callable[[str], bytes] = client.read_small if is_url(given) else _read_file
    try:
        return read(given).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{given}: not UTF-8") from None


def _read_file(given: str) -> bytes:
    try:
        with Path(given).open("rb") as file:
            content = file.read(MAX_SMALL_BYTES + 1)
    except OSError as error:
        raise ConfigError(_FLAG, given, str(error.strerror)) from None
    if len(content) > MAX_SMALL_BYTES:
        raise DataError(f"{given}: more than {MAX_SMALL_BYTES} bytes")
    return content


def _join(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{quote(path)}" if is_url(base) else f"{base.rstrip('/')}/{path}"


def _require_no_downgrade(given: str, base: str) -> None:
    if given.startswith("https:") and urlsplit(base).scheme != "https":
        raise DataError(f"{given}: came over https and redirects to {quoted(base)}")


def _require_no_nesting(name: str, entries: dict[str, Entry]) -> None:
    for path in entries:
        for parent in PurePosixPath(path).parents:
            if str(parent) in entries:
                raise DataError(f"{name}: {quoted(str(parent))} is both a file and a folder")
