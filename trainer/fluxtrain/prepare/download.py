"""Downloads the files of a manifest in parallel; each is resumable, and verified before it gets its name.

OUTPUT/path/of/file            complete and verified
OUTPUT/path/of/file.partial    incomplete
OUTPUT/.verified               which files were verified, so that they are not read again

A manifest of MLCommons is ``NAME.uri``, the URL of the files, and ``NAME.md5``, a line for each as
md5sum writes it. It is validated: paths stay inside the output, sizes are bounded, and https does not
lead to http. Files of a data set on the Hub are downloaded by its own client, which resumes, verifies,
and reads ``HF_TOKEN``, ``HF_HOME`` and ``HF_ENDPOINT``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any, Protocol, TextIO, TypeVar
from urllib.parse import quote, urlsplit

from fluxtrain.data.formats.tar import quoted
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.fetch.http import (
    MAX_SMALL_BYTES,
    DownloadError,
    ExhaustedError,
    HttpClient,
    is_url,
)
from fluxtrain.fetch.source import PARTIAL
from fluxtrain.fetch.source import fetch as fetch_file
from fluxtrain.fetch.stores import UNKNOWN, RefusedError, RemoteFile, name_fault
from fluxtrain.runtime.files import exclusive_lock, storage_errors
from fluxtrain.runtime.progress_bar import Advance, ProgressBar

_MAX_FAILURES_SHOWN = 10


def download(
    manifest: str,
    output: Path,
    base: str | None = None,
    connections: int = 8,
    client: HttpClient | None = None,
    verify: bool = False,
    stream: TextIO = sys.stderr,
) -> int:
    """Download the files of ``manifest`` to ``output``; return how many were not verified before.

    With ``verify`` all files are read again. If a file cannot be downloaded, DownloadError is raised after
    all others are. Raises ConfigError or DataError if the manifest is malformed.
    """
    client = client or HttpClient()
    entries = read_manifest(manifest, base, client)
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(output), storage_errors(output):
        verified = _VerifiedFiles(output)
        missing = [entry for entry in entries if verify or not verified.contains(entry)]
        failures = _fetch_all(missing, output, connections, client, verified, stream)
    num_verified = len(entries) - len(failures)
    print(f"{output}: {num_verified} of {len(entries)} files verified", file=stream)
    if failures:
        raise DownloadError(_failure_message(failures, len(entries)))
    return len(missing)


def _fetch_all(
    entries: list[Entry],
    output: Path,
    connections: int,
    client: HttpClient,
    verified: _VerifiedFiles,
    stream: TextIO,
) -> list[str]:
    """Download ``entries``, add them to ``verified``, and return the error messages of those that failed."""
    failures, stop = list[str](), Event()
    pool = ThreadPoolExecutor(connections)
    with ProgressBar("download", stream=stream, unit="B") as bar:

        def advance(count: int) -> None:
            if stop.is_set():
                raise _StoppedError
            bar.advance(count)

        try:
            futures = {
                pool.submit(fetch, entry, output, client, advance): entry for entry in entries
            }
            for future in as_completed(futures):
                try:
                    future.result()
                    verified.add(futures[future])
                except DownloadError as error:
                    failures.append(str(error))
        finally:  # on Ctrl-C or a full disk: start no more, and stop the running ones
            stop.set()
            pool.shutdown(cancel_futures=True)
    return failures


class _StoppedError(Exception):
    """Ends a download thread; the partial file is kept."""


class _VerifiedFiles:
    """The file ``.verified``: a line of MD5, size, modification time and path for each verified file."""

    def __init__(self, output: Path) -> None:
        self._output, self._path = output, output / VERIFIED
        self._lines = (
            set(self._path.read_text("utf-8").splitlines()) if self._path.exists() else set()
        )

    def contains(self, entry: Entry) -> bool:
        """Return whether the file was verified and has not changed since."""
        line = self._line(entry)
        return line is not None and line in self._lines

    def add(self, entry: Entry) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{self._line(entry)}\n")

    def _line(self, entry: Entry) -> str | None:
        try:
            status = (self._output / entry.path).stat()
        except OSError:
            return None
        return f"{entry.digest} {status.st_size} {status.st_mtime_ns} {entry.path}"


def _failure_message(failures: list[str], total: int) -> str:
    lines = [f"{len(failures)} of {total} files could not be downloaded; the same command retries"]
    lines += sorted(failures)[:_MAX_FAILURES_SHOWN]
    if len(failures) > _MAX_FAILURES_SHOWN:
        lines.append(f"... and {len(failures) - _MAX_FAILURES_SHOWN} more")
    return "\n".join(lines)


def fetch(
    entry: Entry, folder: Path, client: HttpClient, advance: Advance = lambda count: None
) -> Path:
    """Return the path of the file of ``entry`` in ``folder``, downloaded unless its checksum matches already.

    ``advance`` gets the number of bytes received. Raises DownloadError if it cannot be downloaded.
    """
    target = folder / entry.path
    hasher = partial(hashlib.new, entry.algorithm, usedforsecurity=False)  # against accidents only
    if target.is_file():
        with target.open("rb") as content:
            if hashlib.file_digest(content, hasher).hexdigest() == entry.digest:
                return target
    file = RemoteFile(entry.path, UNKNOWN, "", f"{entry.algorithm}:{entry.digest}")
    try:
        fetch_file(lambda _, at: client.open(entry.url, at), file, folder, client, advance)
    except (ExhaustedError, RefusedError) as error:
        text = str(error).removeprefix(f"{entry.path}: ")
        raise DownloadError(f"{entry.url}: {text}") from None
    return target


def extract(archive: Path, names: Iterable[str], folder: Path) -> None:
    """Write the members ``names`` below ``folder``, unless they are there with the size of the archive's."""
    try:
        with zipfile.ZipFile(archive) as file:
            for name in names:
                slashed = name.replace("\\", "/")  # some writers on Windows leave that out
                target, size = folder / slashed, file.getinfo(name).file_size
                if target.is_file() and target.stat().st_size == size:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f".{target.name}.{os.getpid()}")
                with file.open(name) as member, partial.open("wb") as out:
                    shutil.copyfileobj(member, out)
                partial.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error, RuntimeError) as error:
        raise DataError(f"{archive}: {error}") from None  # RuntimeError: it has a password


ARCHIVE = "dataset.zip"
"""Name of an archive in the folder in which it is unpacked."""


def fetch_archive(url: str, folder: Path) -> None:
    """Fetch the zip at ``url`` to ``folder`` and unpack it there, unless both are done; each is continued.

    Raises DownloadError if it cannot be downloaded, DataError if it is no whole zip, or a name leads outside.
    """
    archive, done = folder / ARCHIVE, folder / f".{ARCHIVE}.unpacked"
    client, step = HttpClient(), f"or put the pictures into {folder} yourself"
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder, wait_seconds=60.0), storage_errors(folder):
        if done.exists():
            return
        try:
            if not archive.is_file():
                with ProgressBar(ARCHIVE, unit="B") as bar:
                    file = RemoteFile(ARCHIVE, UNKNOWN)
                    fetch_file(
                        lambda _, at: client.open(url, at), file, folder, client, bar.advance
                    )
        except (ExhaustedError, DownloadError) as error:
            raise DownloadError(f"{url}: {error}; try again, {step}") from None
        if not zipfile.is_zipfile(archive):
            archive.unlink()
            raise DataError(f"{url}: sends no zip archive; it may want a login: {step}")
        try:
            with zipfile.ZipFile(archive) as opened:
                names = [each.filename for each in opened.infolist() if not each.is_dir()]
            for each in names:
                if fault := name_fault(each.replace("\\", "/")):
                    raise DataError(f"{archive}: {each[:80]!r}: {fault}")
            extract(archive, names, folder)
        except DataError as error:
            archive.unlink()
            raise DataError(f"{error}; the same command fetches it again, {step}") from None
        print(f"{folder}: {len(names)} files of {url}", file=sys.stderr, flush=True)
        done.touch()


PREFIX = "hf://datasets/"


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hub, at one commit."""

    name: str
    commit: str

    def files(self) -> list[str]:
        from huggingface_hub import HfApi

        with hub_errors(self.name):
            return HfApi().list_repo_files(self.name, repo_type="dataset", revision=self.commit)

    def fetch(self, path: str, folder: Path) -> Path:
        """Download the file ``path`` to ``folder``; return where it is."""
        from huggingface_hub import hf_hub_download

        with hub_errors(self.name):
            local = hf_hub_download(
                self.name, path, repo_type="dataset", revision=self.commit, local_dir=folder
            )
        return Path(local)

    def fetch_all(self, pattern: str, folder: Path, connections: int) -> None:
        """Download every file that matches ``pattern`` to ``folder``."""
        from huggingface_hub import snapshot_download

        with hub_errors(self.name):
            snapshot_download(
                self.name,
                repo_type="dataset",
                revision=self.commit,
                local_dir=folder,
                allow_patterns=pattern,
                max_workers=connections,
            )


def open_hub(name: str, revision: str = "main", flag: str = "--hub") -> HubDataset:
    """Return the data set ``ORG/NAME``, the value of ``flag``, at the current commit of ``revision``.

    Raises DownloadError if the Hub cannot be reached, DataError if it has no such data set.
    """
    if name.count("/") != 1 or not all(name.split("/")):
        raise ConfigError(flag, name, "allowed: ORG/NAME of a data set")
    with hub_errors(name):
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(name, revision=revision).sha
    return HubDataset(name, commit or revision)


class LicenceError(DataError):
    """The Hub gives the files only to accounts that accepted their licence."""


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Raise the client's errors as DownloadError or DataError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        text = f"accept its licence at https://huggingface.co/{name}, then set HF_TOKEN"
        raise LicenceError(f"{name}: {text} or run `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise DataError(f"{name}: {_one_line(error)}") from None
    except Exception as error:  # of the HTTP library that the client uses
        if getattr(getattr(error, "response", None), "status_code", 0) == 401:
            text = "the Hub refuses the token of HF_TOKEN or `hf auth login`: renew or unset it"
            raise DataError(f"{name}: {text}") from None
        start = "the Hub cannot be reached, by network, proxy or HF_ENDPOINT: "
        start = start if getattr(error, "response", None) is None else ""
        text = f"{start}{_one_line(error)}; the same command resumes"
        raise DownloadError(f"{name}: {text}") from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__


MAX_ENTRIES = 1_000_000
VERIFIED = ".verified"
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
        url = f"{base.rstrip('/')}/{quote(path) if is_url(base) else path}"
        entries[path] = Entry(path, url, match[1].lower())
    if not entries:
        raise DataError(f"{name}: lists no files")
    for path in entries:
        for parent in PurePosixPath(path).parents:
            if str(parent) in entries:
                raise DataError(f"{name}: {quoted(str(parent))} is both a file and a folder")
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


def _require_no_downgrade(given: str, base: str) -> None:
    if given.startswith("https:") and urlsplit(base).scheme != "https":
        raise DataError(f"{given}: came over https and redirects to {quoted(base)}")


Value = TypeVar("Value")
_INPUT_FLAG = "--input"


class Source(Protocol):
    """Raw tars by name; pickled to worker processes."""

    def names(self) -> list[str]:
        """Return the names of the tars, sorted; ConfigError if there are none."""
        ...

    def stamp(self, name: str) -> Any:
        """Return the version of the tar ``name`` as JSON: it changes with the content."""
        ...

    def open(self, name: str, download_dir: Path) -> AbstractContextManager[Path]:
        """Yield the path of the tar ``name``; a remote one is downloaded to ``download_dir`` and removed."""
        ...


@dataclass(frozen=True)
class FolderSource:
    """Tars in a folder, such as a mounted volume."""

    folder: Path

    def names(self) -> list[str]:
        """Return the sorted names; ConfigError if the folder cannot be read or has no tar."""
        try:
            names = sorted(path.name for path in self.folder.iterdir() if path.suffix == ".tar")
        except OSError as error:
            raise ConfigError(_INPUT_FLAG, str(self.folder), str(error.strerror)) from None
        if not names:
            raise ConfigError(_INPUT_FLAG, str(self.folder), "it holds no .tar")
        return names

    def stamp(self, name: str) -> Any:
        """Return size and modification time."""
        try:
            status = (self.folder / name).stat()
        except OSError as error:
            raise DataError(f"{self.folder / name}: {error.strerror}") from None
        return [status.st_size, status.st_mtime_ns]

    @contextmanager
    def open(self, name: str, download_dir: Path) -> Iterator[Path]:
        yield self.folder / name


@dataclass(frozen=True)
class ManifestSource:
    """Tars of a manifest, downloaded and verified."""

    entries: dict[str, Entry]
    client: HttpClient = field(default_factory=HttpClient)

    def names(self) -> list[str]:
        return sorted(self.entries)

    def stamp(self, name: str) -> Any:
        return self.entries[name].digest

    @contextmanager
    def open(self, name: str, download_dir: Path) -> Iterator[Path]:
        entry = self.entries[name]
        path = fetch(Entry(f"{name}.raw", entry.url, entry.digest), download_dir, self.client)
        yield path
        path.unlink()


@dataclass(frozen=True)
class HubSource:
    """Tars of a data set on the Hub, downloaded by its client."""

    dataset: HubDataset
    files: dict[str, str]

    def names(self) -> list[str]:
        return sorted(self.files)

    def stamp(self, name: str) -> Any:
        return self.dataset.commit

    @contextmanager
    def open(self, name: str, download_dir: Path) -> Iterator[Path]:
        path = self.dataset.fetch(self.files[name], download_dir / "hub")
        yield path
        path.unlink()


def open_source(given: str, client: HttpClient | None = None) -> Source:
    """Return the source ``given``: a folder, the URL of a manifest, or ``hf://datasets/ORG/NAME[@REVISION]``.

    Raises ConfigError if it is none of these or has no tar.
    """
    if given.startswith(PREFIX):
        name, _, revision = given.removeprefix(PREFIX).partition("@")
        dataset = open_hub(name, revision or "main", _INPUT_FLAG)
        return HubSource(dataset, _by_name(given, {path: path for path in dataset.files()}))
    if is_url(given):
        client = client or HttpClient()
        entries = {entry.path: entry for entry in read_manifest(given, None, client)}
        return ManifestSource(_by_name(given, entries), client)
    return FolderSource(Path(given))


def _by_name(given: str, by_path: dict[str, Value]) -> dict[str, Value]:
    """Return the tars of ``by_path`` by file name; DataError if two have the same one."""
    tars = {path: value for path, value in by_path.items() if path.endswith(".tar")}
    by_name = {PurePosixPath(path).name: value for path, value in tars.items()}
    if not by_name:
        raise ConfigError(_INPUT_FLAG, given, "it names no .tar")
    if len(by_name) < len(tars):
        raise DataError(f"{given}: two of its tars have the same name")
    return by_name
