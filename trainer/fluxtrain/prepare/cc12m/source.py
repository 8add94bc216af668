"""Sources of raw CC12M tars: a folder, the server of a manifest, or the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.download.file import fetch
from fluxtrain.prepare.download.hub import PREFIX, HubDataset, open_hub
from fluxtrain.prepare.download.manifest import Entry, read_manifest
from fluxtrain.remote.http import HttpClient, is_url

Value = TypeVar("Value")
_FLAG = "--input"


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
            raise ConfigError(_FLAG, str(self.folder), str(error.strerror)) from None
        if not names:
            raise ConfigError(_FLAG, str(self.folder), "it holds no .tar")
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
        """Yield the path of the tar itself."""
        yield self.folder / name


@dataclass(frozen=True)
class ManifestSource:
    """Tars of a manifest, downloaded and verified."""

    entries: dict[str, Entry]
    client: HttpClient = field(default_factory=HttpClient)

    def names(self) -> list[str]:
        """Return the sorted names."""
        return sorted(self.entries)

    def stamp(self, name: str) -> Any:
        """Return the MD5."""
        return self.entries[name].digest

    @contextmanager
    def open(self, name: str, download_dir: Path) -> Iterator[Path]:
        """Download the tar, yield its path, and remove it."""
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
        """Return the sorted names."""
        return sorted(self.files)

    def stamp(self, name: str) -> Any:
        """Return the commit."""
        return self.dataset.commit

    @contextmanager
    def open(self, name: str, download_dir: Path) -> Iterator[Path]:
        """Download the tar, yield its path, and remove it."""
        path = self.dataset.fetch(self.files[name], download_dir / "hub")
        yield path
        path.unlink()


def open_source(given: str, client: HttpClient | None = None) -> Source:
    """Return the source ``given``: a folder, the URL of a manifest, or ``hf://datasets/ORG/NAME[@REVISION]``.

    Raises ConfigError if it is none of these or has no tar.
    """
    if given.startswith(PREFIX):
        name, _, revision = given.removeprefix(PREFIX).partition("@")
        dataset = open_hub(name, revision or "main", _FLAG)
        return HubSource(dataset, _by_name(given, {path: path for path in dataset.files("*.tar")}))
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
        raise ConfigError(_FLAG, given, "it names no .tar")
    if len(by_name) < len(tars):
        raise DataError(f"{given}: two of its tars have the same name")
    return by_name
