"""What a place with files can do: list them, and send one from an offset on.

Folders of buckets are read through Arrow's file systems, which hold the clients of AWS, Google and Azure.
fsspec's interface to them is not used: its ``find`` takes a folder that cannot be listed for an empty one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from fluxtrain.errors import has_controls, redacted
from fluxtrain.fetch.http import ByteStream, DownloadError, HttpClient, RetryableError

MAX_NAME = 1024


class RefusedError(Exception):
    """The store has no such file, or does not give it: another attempt would not help."""


class NothingThereError(RefusedError):
    """The store has nothing of this name."""


class ChangedError(Exception):
    """The file is another one than that which was listed."""


UNKNOWN = -1


@dataclass(frozen=True)
class RemoteFile:
    """One file of a store."""

    name: str
    """Path below the source, with slashes."""
    size: int
    """Bytes; UNKNOWN if only the response to a request tells it."""
    version: str = ""
    """ETag, hash or time of modification; "" if the store tells none."""
    digest: str = ""
    """A hash of the content, if it is known: ``git:``, or hashlib's name of it, and hexadecimal digits."""


class Store(Protocol):
    """The files of one source."""

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names; RefusedError or RetryableError."""
        ...

    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[ByteStream]:
        """Yield the bytes of ``file`` from ``offset`` on, or from 0 if the store cannot skip any.

        Raises RefusedError, ChangedError or RetryableError.
        """
        ...


def name_fault(name: str) -> str | None:
    """Return why ``name`` must not be written below a folder, or None."""
    if has_controls(name) or len(name) > MAX_NAME:
        return "its name has control characters, or is too long"
    parts = PurePosixPath(name).parts
    if name.startswith("/") or "\\" in name or ".." in parts or not parts:
        return "its name leads out of the folder"
    return None


READ_BYTES = 8 << 20
"""Bytes of one request."""
_AWS = re.compile(r"\bAWS Error (\w+)(?: \(HTTP status (\d{3})\))?")
_DENIED = (
    *("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH"),
    *("UNRECOGNIZED_CLIENT", "INVALID_CLIENT_TOKEN_ID"),
)
_UNKNOWN = ("NO_SUCH_KEY", "NO_SUCH_BUCKET", "RESOURCE_NOT_FOUND")
_OTHERS_DENY = re.compile(r"PERMISSION_DENIED|UNAUTHENTICATED|Authenti\w+Failed|Authorization\w+")
_HTTP = re.compile(r"(\d{3}) .*")


@contextmanager
def client_errors() -> Iterator[None]:
    """Raise errors of a library as RefusedError if another attempt would not help, else RetryableError."""
    try:
        yield
    except (RefusedError, ChangedError, RetryableError):
        raise
    except Exception as error:  # of whatever HTTP library the client uses
        refused = refusal(error)
        if refused is not None:
            raise RefusedError(refused) from None
        raise RetryableError(_reason(error)) from None


@contextmanager
def stream_of(opened: Any, offset: int, size: int) -> Iterator[ByteStream]:
    """Yield the bytes of the file ``opened``, of ``size`` bytes, from ``offset`` on; then close it."""
    try:
        with client_errors():
            opened.seek(offset)
        yield ByteStream(_Blocks(opened), offset, size)
    finally:
        with suppress(Exception):
            opened.close()


def refusal(error: BaseException) -> str | None:
    """Return why another attempt would not help after ``error``, or None if it may."""
    status, aws = _status(error), _AWS.search(str(error))
    if status in (401, 403) or (aws and aws[1] in _DENIED) or _OTHERS_DENY.search(str(error)):
        return "access is denied, or it does not exist; credentials come from the environment"
    if status == 404 or isinstance(error, FileNotFoundError) or (aws and aws[1] in _UNKNOWN):
        return "there is nothing of this name"
    return None


@dataclass(frozen=True)
class _Blocks:
    opened: Any

    def read1(self, size: int, /) -> bytes:
        with client_errors():
            content: bytes = self.opened.read(max(size, READ_BYTES))
            return content


def _reason(error: BaseException) -> str:
    text = redacted(" ".join(str(error).split()))[:300]
    return text if text and text.isprintable() else type(error).__name__


def _status(error: BaseException) -> int | None:
    """Return the status of the response in ``error``, or with which its text begins, or which AWS tells."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(code, int):
        return code
    found, aws = _HTTP.fullmatch(str(error)), _AWS.search(str(error))
    digits = found[1] if found else (aws[2] if aws else None)
    return int(digits) if digits else None


@dataclass(frozen=True)
class LocalStore:
    """The files below the folder ``root``."""

    root: Path

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names; RefusedError if there is no such folder."""
        if not self.root.is_dir():
            raise RefusedError(f"{self.root} is missing")
        paths = sorted(path for path in self.root.rglob("*") if path.is_file())
        return [self._file(path) for path in paths]

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[ByteStream]:
        path = self.root / file.name
        with path.open("rb") as opened:
            if self._file(path) != file:
                raise ChangedError("it has changed since it was listed")
            yield ByteStream(opened, opened.seek(offset), file.size)

    def _file(self, path: Path) -> RemoteFile:
        status = path.stat()
        name = path.relative_to(self.root).as_posix()
        return RemoteFile(name, status.st_size, str(status.st_mtime_ns))


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
            kind = NothingThereError if text.startswith("404 ") else RefusedError
            raise kind(f"{_name(url)}: {refused}") from None


def _name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


@dataclass(frozen=True)
class HubStore:
    """The files at ``root``, such as ``datasets/owner/name@commit/folder``; they do not change."""

    filesystem: Any
    root: str

    def files(self) -> list[RemoteFile]:
        with client_errors():
            found = self.filesystem.find(self.root, detail=True, refresh=True)
            if found == {self.root: {}}:  # of a single file older fsspec has no details
                found = {self.root: self.filesystem.info(self.root)}
        files = [self._file(path, info) for path, info in found.items()]
        return sorted(files, key=lambda file: file.name)

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[ByteStream]:
        path = self.root if self.root.endswith(f"/{file.name}") else f"{self.root}/{file.name}"
        with client_errors():  # with its size, the client asks for no details of each file
            opened = self.filesystem.open(path, "rb", block_size=READ_BYTES, size=file.size)
        with stream_of(opened, offset, file.size) as stream:
            yield stream

    def _file(self, path: str, info: Mapping[str, Any]) -> RemoteFile:
        name = path.removeprefix(f"{self.root}/") if path != self.root else path.rpartition("/")[2]
        lfs, blob = info.get("lfs"), info.get("blob_id")
        digest = f"sha256:{lfs['sha256']}" if lfs else (f"git:{blob}" if blob else "")
        return RemoteFile(name, int(info["size"]), digest, digest)


def open_hub(path: str) -> HubStore:
    """Return the store of ``path``, ``datasets/owner/name@revision/folder``, at one commit.

    Without a revision, or with the name of a branch, it is the commit that there is now. Reads HF_TOKEN,
    HF_ENDPOINT and the client's other variables.
    """
    from huggingface_hub import HfApi, HfFileSystem

    kind, owner, rest = path.split("/", 2)
    given, _, below = rest.partition("/")
    name, _, revision = given.partition("@")
    with client_errors():
        commit = HfApi().dataset_info(f"{owner}/{name}", revision=revision or None).sha
        filesystem = HfFileSystem(skip_instance_cache=True)
    return HubStore(filesystem, f"{kind}/{owner}/{name}@{commit}/{below}".rstrip("/"))


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
        from pyarrow.fs import FileSelector  # takes a while to import

        with client_errors():
            selector = FileSelector(self.root, recursive=True, allow_not_found=True)
            found = [info for info in self.filesystem.get_file_info(selector) if info.is_file]
            if not found and "/" in self.root:
                found = [i for i in self.filesystem.get_file_info([self.root]) if i.is_file]
        return sorted((self._file(info) for info in found), key=lambda file: file.name)

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[ByteStream]:
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


def open_bucket(scheme: str, path: str) -> BucketStore:
    """Return the store of ``path``, a bucket and the path in it, by the usual variables of the environment.

    ``scheme`` is s3, gs (Google) or az (Azure). Without credentials requests to S3 and to Google are not
    signed: the bucket must be public.
    """
    with client_errors():
        open_scheme = {"s3": _amazon, "gs": _google, "az": _azure}[scheme]
        return BucketStore(open_scheme(path.partition("/")[0]), path.rstrip("/"))


def _amazon(bucket: str) -> Any:
    from pyarrow import fs

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        anonymous=not _has_credentials(),
        region=region,
        endpoint_override=endpoint,
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
    )


_GOOGLE = "~/.config/gcloud/application_default_credentials.json"


def _google(bucket: str) -> Any:
    from pyarrow import fs

    scheme, _, host = os.environ.get("STORAGE_EMULATOR_HOST", "").rpartition("://")
    names = ("GOOGLE_APPLICATION_CREDENTIALS", "GCE_METADATA_HOST")
    is_known = any(map(os.environ.get, names)) or Path(_GOOGLE).expanduser().is_file()
    return fs.GcsFileSystem(
        anonymous=bool(host) or not is_known,
        scheme=scheme or ("http" if host else "https"),
        endpoint_override=host or None,
        retry_time_limit=timedelta(seconds=_REQUEST_SECONDS),
    )


def _azure(bucket: str) -> Any:
    from pyarrow import fs

    words = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    stated = {name: value for name, _, value in (word.partition("=") for word in words)}
    account = os.environ.get("AZURE_STORAGE_ACCOUNT") or stated.get("AccountName")
    if account is None:
        text = (
            "AZURE_STORAGE_ACCOUNT, or AZURE_STORAGE_CONNECTION_STRING, names its account: set one"
        )
        raise RefusedError(text)
    key = os.environ.get("AZURE_STORAGE_KEY") or stated.get("AccountKey")
    token = os.environ.get("AZURE_STORAGE_SAS_TOKEN") or stated.get("SharedAccessSignature")
    scheme, _, rest = stated.get("BlobEndpoint", "").partition("://")
    host = {f"{kind}_storage_authority": rest.partition("/")[0] for kind in ("blob", "dfs") if rest}
    kinds = {f"{kind}_storage_scheme": scheme for kind in ("blob", "dfs") if rest}
    return fs.AzureFileSystem(
        account, account_key=key, sas_token=None if key else token, **host, **kinds
    )


def _has_credentials() -> bool:
    files = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return any(os.environ.get(key) for key in _KEYS) or Path(files).expanduser().is_file()


MAX_FILES = 100_000
_RANGE = re.compile(r"\{(-?\d{1,20})\.\.(-?\d{1,20})")


def expanded(url: str) -> list[str]:
    """Return all that ``url`` stands for, as shells expand braces; RefusedError if it is malformed."""
    ranges = [abs(int(last) - int(first)) + 1 for first, last in _RANGE.findall(url)]
    if max(ranges, default=1) > MAX_FILES:  # the library makes all of a range at once
        raise _too_many()
    from braceexpand import braceexpand  # comes with webdataset

    try:
        found = list(islice(braceexpand(url), MAX_FILES + 1))
    except ValueError:
        raise RefusedError("its braces are not balanced") from None
    if len(found) > MAX_FILES:
        raise _too_many()
    return found


def folder_of(url: str) -> str:
    """Return the folder that holds all that ``url`` stands for."""
    return url.partition("{")[0].rpartition("/")[0]


def _too_many() -> RefusedError:
    return RefusedError(f"it stands for more than {MAX_FILES:,} files")


@dataclass(frozen=True)
class ChosenFiles:
    """Those of the files of ``store`` that have one of ``names``."""

    store: Store
    names: tuple[str, ...]

    def files(self) -> list[RemoteFile]:
        """Return all files in the order of their names; RefusedError if some are missing."""
        there = {file.name: file for file in self.store.files()}
        missing = [name for name in self.names if name not in there]
        if missing:
            more = f", and so are {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RefusedError(f"{missing[0]} is missing{more}")
        return [there[name] for name in sorted(set(self.names))]

    def open(self, file: RemoteFile, offset: int) -> AbstractContextManager[ByteStream]:
        return self.store.open(file, offset)
