"""Files of web servers as a store; a server lists nothing, so each file has its URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fluxtrain.remote.client_errors import refusal
from fluxtrain.remote.http import ByteStream, DownloadError, HttpClient
from fluxtrain.remote.store import ChangedError, RefusedError, RemoteFile


@dataclass(frozen=True)
class HttpStore:
    """The files at ``urls``."""

    urls: tuple[str, ...]
    client: HttpClient

    def files(self) -> list[RemoteFile]:
        """Return all files, in the order of their URLs; RefusedError if one cannot be had."""
        if any(not _name(url) for url in self.urls):
            raise RefusedError("a web server lists no folders: name its .tar files")
        return [self._file(url) for url in self.urls]

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[ByteStream]:
        """Yield the bytes of ``file`` from ``offset`` on; ChangedError if it is not as it was listed."""
        url = next(url for url in self.urls if _name(url) == file.name)
        with self._open(url, offset, file.version) as stream:
            if (stream.total, stream.version) != (file.size, file.version):
                raise ChangedError("it has changed since it was listed")
            yield stream

    def _file(self, url: str) -> RemoteFile:
        with self._open(url, 0, "") as stream:
            if stream.total is None:
                raise RefusedError("the server does not tell its size")
            return RemoteFile(_name(url), stream.total, stream.version)

    @contextmanager
    def _open(self, url: str, offset: int, version: str) -> Iterator[ByteStream]:
        try:
            with self.client.open(url, offset, version) as stream:
                yield stream
        except DownloadError as error:
            text = str(error).rpartition(": ")[2]
            refused = refusal(RefusedError(text)) or f"the server answers: {text}"
            raise RefusedError(f"{_name(url)}: {refused}") from None


def _name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]
