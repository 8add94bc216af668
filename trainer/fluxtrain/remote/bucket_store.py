"""Folders of S3 buckets as stores, through Arrow's file system, which holds AWS' own client.

fsspec's interface to it is not used: its ``find`` takes a folder that cannot be listed for an empty one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.remote.client_errors import client_errors, stream_of
from fluxtrain.remote.http import ByteStream
from fluxtrain.remote.store import ChangedError, RemoteFile

_CONNECT_SECONDS, _REQUEST_SECONDS = 10.0, 60.0
_KEYS = (
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""Variables of the environment by which AWS' client finds credentials."""


@dataclass(frozen=True)
class BucketStore:
    """The files at ``root``, a folder or a file, of a file system of Arrow."""

    filesystem: Any
    root: str

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names."""
        from pyarrow.fs import FileSelector  # takes a while to import

        with client_errors():
            selector = FileSelector(self.root, recursive=True, allow_not_found=True)
            found = [info for info in self.filesystem.get_file_info(selector) if info.is_file]
            if not found and "/" in self.root:
                found = [i for i in self.filesystem.get_file_info([self.root]) if i.is_file]
        return sorted((self._file(info) for info in found), key=lambda file: file.name)

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[ByteStream]:
        """Yield the bytes of ``file`` from ``offset`` on; ChangedError if it is not as it was listed."""
        path = self.root if self.root.endswith(f"/{file.name}") else f"{self.root}/{file.name}"
        with client_errors():
            (info,) = self.filesystem.get_file_info([path])
            if not info.is_file or self._file(info) != file:
                raise ChangedError("it has changed since it was listed")
            opened = self.filesystem.open_input_file(path)
        with stream_of(opened, offset, file.size) as stream:
            yield stream

    def _file(self, info: Any) -> RemoteFile:
        below = info.path.removeprefix(f"{self.root}/")
        name = below if info.path != self.root else info.base_name
        return RemoteFile(name, info.size, str(info.mtime_ns))


def open_bucket(path: str) -> BucketStore:
    """Return the store of ``path``, a bucket and the path in it, with AWS' variables of the environment.

    Without credentials requests are not signed: the bucket must be public.
    """
    from pyarrow import fs

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    with client_errors():
        if region is None and endpoint is None:
            region = fs.resolve_s3_region(path.partition("/")[0])
        filesystem = fs.S3FileSystem(
            anonymous=not _has_credentials(),
            region=region,
            endpoint_override=endpoint,
            connect_timeout=_CONNECT_SECONDS,
            request_timeout=_REQUEST_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        )
    return BucketStore(filesystem, path.rstrip("/"))


def _has_credentials() -> bool:
    files = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return any(os.environ.get(key) for key in _KEYS) or Path(files).expanduser().is_file()
