"""Where the raw CC12M tars are: a folder, a manifest's server or the Hub; each is brought in its turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.download.file import fetch
from fluxtrain.prepare.download.http import HttpClient, is_url
from fluxtrain.prepare.download.hub import PREFIX, HubDataset, open_hub
from fluxtrain.prepare.download.manifest import Entry, read_manifest

Value = TypeVar("Value")
_FLAG = "--input"


class Source(Protocol):
    """Raw tars by name; sent to worker processes."""

    def names(self) -> list[str]:
        """Return the names of the tars, in the order of the set."""
        ...

    def stamp(self, name: str) -> Any:
        """Return, as JSON, what tells this version of the tar ``name`` from others."""
        ...

    def open(self, name: str, spool: Path) -> AbstractContextManager[Path]:
        """Lend the tar ``name``, brought to the folder ``spool`` where it is not at hand."""
        ...


@dataclass(frozen=True)
class FolderSource:
    """Tars in a folder, a mounted volume for instance; they are left there."""

    folder: Path

    def names(self) -> list[str]:
        """Return the names, sorted; ConfigError where the folder is none or holds no tar."""
        try:
            names = sorted(path.name for path in self.folder.iterdir() if path.suffix == ".tar")
        except OSError as error:
            raise ConfigError(_FLAG, str(self.folder), str(error.strerror)) from None
        if not names:
            raise ConfigError(_FLAG, str(self.folder), "it holds no .tar")
        return names

    def stamp(self, name: str) -> Any:
        """Return size and time of change."""
        try:
            status = (self.folder / name).stat()
        except OSError as error:
            raise DataError(f"{self.folder / name}: {error.strerror}") from None
        return [status.st_size, status.st_mtime_ns]

    @contextmanager
    def open(self, name: str, spool: Path) -> Iterator[Path]:
        """Lend the tar itself."""
        yield self.folder / name


@dataclass(frozen=True)
class ManifestSource:
    """Tars that a manifest names; each is downloaded, verified, and removed after use."""

    entries: dict[str, Entry]
    link: HttpClient = field(default_factory=HttpClient)

    def names(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self.entries)

    def stamp(self, name: str) -> Any:
        """Return the MD5."""
        return self.entries[name].md5

    @contextmanager
    def open(self, name: str, spool: Path) -> Iterator[Path]:
        """Lend the tar while it lies in ``spool``."""
        entry = self.entries[name]
        path = fetch(Entry(f"{name}.raw", entry.url, entry.md5), spool, self.link)
        yield path
        path.unlink()


@dataclass(frozen=True)
class HubSource:
    """Tars of a data set on the Hub; each is brought by its client, and removed after use."""

    dataset: HubDataset
    files: dict[str, str]

    def names(self) -> list[str]:
        """Return the names, sorted."""
        return sorted(self.files)

    def stamp(self, name: str) -> Any:
        """Return the commit."""
        return self.dataset.commit

    @contextmanager
    def open(self, name: str, spool: Path) -> Iterator[Path]:
        """Lend the tar while it lies in ``spool``."""
        path = self.dataset.fetch(self.files[name], spool / "hub")
        yield path
        path.unlink()


def open_source(given: str, link: HttpClient | None = None) -> Source:
    """Return the source ``given``: a folder, the URL of a manifest, or ``hf://datasets/ORG/NAME[@REVISION]``.

    Raises ConfigError where it is none of these or holds no tar.
    """
    if given.startswith(PREFIX):
        name, _, revision = given.removeprefix(PREFIX).partition("@")
        dataset = open_hub(name, revision or "main")
        return HubSource(dataset, _by_name(given, {path: path for path in dataset.files("*.tar")}))
    if is_url(given):
        link = link or HttpClient()
        entries = {entry.path: entry for entry in read_manifest(given, None, link)}
        return ManifestSource(_by_name(given, entries), link)
    return FolderSource(Path(given))


def _by_name(given: str, by_path: dict[str, Value]) -> dict[str, Value]:
    """Return the tars of ``by_path`` by their last part alone, which must tell them apart."""
    tars = {path: value for path, value in by_path.items() if path.endswith(".tar")}
    named = {PurePosixPath(path).name: value for path, value in tars.items()}
    if not named:
        raise ConfigError(_FLAG, given, "it names no .tar")
    if len(named) < len(tars):
        raise DataError(f"{given}: two of its tars have the same name")
    return named
