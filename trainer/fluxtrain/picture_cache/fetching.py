"""Brings the data of URLs, and of WebDataset shards, to each node before its pictures are looked at.

Rank 0 lists what there is and pins it in the run's output: a run that is continued has the same data, or ends
with an error. Each node fetches it once, however many ranks and jobs it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any
from urllib.parse import quote

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.data import UTF_8, DataConfig, TableConfig
from fluxtrain.data.pictures.dataset import FILE
from fluxtrain.data.pictures.encodings import EXTENSIONS
from fluxtrain.data.pictures.folder import METADATA, SUFFIXES, Listing, is_hidden
from fluxtrain.data.pictures.subset import Places, remote_sources, streamed_urls, subsets
from fluxtrain.data.pictures.tables import SHARD, TABLE, files_of_split, unpack, write_out
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.fetch.http import RetryPolicy
from fluxtrain.fetch.node_cache import NodeCache, gib
from fluxtrain.fetch.source import Advance, Source, fetch_source, list_source
from fluxtrain.fetch.stores import RemoteFile
from fluxtrain.parallel.distributed import Channel, World
from fluxtrain.runtime.files import atomic_write
from fluxtrain.runtime.progress_bar import ProgressBar

PINS = "sources.json"
"""File of the run's output: which versions of remote files it has."""
_CONFIGURATION = "configuration"
_FETCHED, _PICTURES = "fetched", "pictures"
Check = Callable[[], object]


@dataclass(frozen=True)
class Fetched:
    """What the URLs of a run hold."""

    places: dict[str, Path | Listing]
    """Folders of what is on this node, by URL."""
    streamed: list[Source]
    """What is not fetched yet, as it is streamed."""
    channel: Channel
    """For the ranks to wait for each other."""


@contextmanager
def fetched_pictures(
    data: DataConfig, paths: RunPaths, world: World, check: Check
) -> Iterator[Fetched | None]:
    """Yield what the run's URLs hold, which is fetched to this node unless it is streamed; None without URLs.

    Every rank must call this. Raises ConfigError, DataError or DownloadError, naming the field, and what
    ``check`` raises: what was fetched is kept.
    """
    if not remote_sources(data, paths.data):
        yield None
        return
    sources = world.from_main(lambda: pinned_sources(data, paths, check, is_written=True))
    streamed, fetched = divided(sources, data, paths)
    channel = Channel(world, has_timeout=False)
    with ExitStack() as held:
        places: dict[str, Path | Listing] = {
            source.url: held.enter_context(
                local_folder(source, data, paths.data, check, is_shown=world.node == 0)
            )
            for source in fetched
        }
        channel.wait_for_all(check)
        yield Fetched(places, streamed, channel)


def divided(
    sources: Sequence[Source], data: DataConfig, paths: RunPaths
) -> tuple[list[Source], list[Source]]:
    """Return those of ``sources`` that are streamed, and those that each node fetches as a whole."""
    urls = streamed_urls(data, paths.data)
    streamed = [source for source in sources if source.url in urls]
    return streamed, [source for source in sources if source.url not in urls]


@contextmanager
def local_pictures(
    data: DataConfig, paths: RunPaths, check: Check, is_shown: bool
) -> Iterator[Places]:
    """Yield the folders of remote pictures by URL, as `fetched_pictures` does, for one process alone.

    Nothing is streamed. Raises DataError if all of them do not fit.
    """
    sources = pinned_sources(data, paths, check)
    most, size = data.download.max_bytes, sum(map(bytes_needed, sources))
    if data.download.stream and size > most:
        text = f"{gib(most)} do not hold {gib(size)} of data; a run streams them, but this command"
        raise DataError(f"spec.run.data.download.max_bytes: {text} fetches all")
    with ExitStack() as held:
        yield {
            source.url: held.enter_context(local_folder(source, data, paths.data, check, is_shown))
            for source in sources
        }


def pinned_sources(
    data: DataConfig, paths: RunPaths, check: Check = lambda: None, is_written: bool = False
) -> list[Source]:
    """Return what the run's URLs hold; ConfigError if that is not what the run in the output began with."""
    path = paths.output / PINS
    pins = _read_pins(path)
    policy = RetryPolicy(data.download.attempts, check=check)
    listed = [
        list_source(field, url, is_wanted, policy, pins.get(url, {}).get("pinned", ""))
        for field, url in remote_sources(data, paths.data)
    ]
    for note in filter(None, map(unread, [] if is_written else listed)):
        print(f"fluxtrain: {note}", file=sys.stderr, flush=True)
    sources = [read_files(source, data.table) for source in listed]
    require_room(sources, data, paths)
    if (paths.output / FILE).exists():  # the run has begun
        for source in sources:
            _require_pinned(source, pins.get(source.url))
    if is_written:
        entries: dict[str, object] = {source.url: _pin(source) for source in sources}
        if not (paths.output / FILE).exists():
            entries[_CONFIGURATION] = _configuration(data, paths)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial_file:
            partial_file.write_text(json.dumps(pins | entries, indent=1) + "\n", encoding="utf-8")
    return sources


def is_configured_alike(data: DataConfig, paths: RunPaths) -> bool:
    """Return whether ``data``, and its data set config, are those that the run in the output began with."""
    return _read_pins(paths.output / PINS).get(_CONFIGURATION) == _configuration(data, paths)


@contextmanager
def local_folder(
    source: Source, data: DataConfig, data_root: Path, check: Check, is_shown: bool
) -> Iterator[Path]:
    """Yield the folder of this node with the pictures of ``source``, fetched and unpacked."""

    def fill(folder: Path) -> None:
        with fetch_bar(is_shown, str(source), len(source.files), source.size) as console:

            def shown() -> None:
                check()
                console.show()

            fill_folder(source, data, shown, console.advance, folder)

    key, cache = entry_key(source, data), node_cache(data, data_root)
    with cache.entry(key, bytes_needed(source), fill, check) as folder:
        yield folder / _PICTURES


def parts_of(source: Source) -> list[Source]:
    """Return each file of ``source`` that holds pictures as a source of its own."""
    holds = SUFFIXES if kind_of(source.files) == "pictures" else (SHARD, TABLE)
    files = (file for file in source.files if file.name.lower().endswith(holds))
    return [replace(source, files=(file,)) for file in files]


def require_room(sources: Sequence[Source], data: DataConfig, paths: RunPaths) -> None:
    """Raise DataError if the folder of the node does not hold the largest shard that is streamed."""
    streamed, fetched = divided(sources, data, paths)
    parts = [part for source in streamed for part in parts_of(source)]
    if not parts:
        return
    largest, beside = max(parts, key=bytes_needed), sum(map(bytes_needed, fetched))
    most = data.download.max_bytes
    if bytes_needed(largest) + beside > most:
        raise DataError(
            f"spec.run.data.download.max_bytes: {gib(most)} do not hold {largest.files[0].name} of "
            f"{largest}, which takes {gib(bytes_needed(largest))}"
            + f" beside {gib(beside)} of masks"
            * bool(beside)
        )


def node_cache(data: DataConfig, data_root: Path) -> NodeCache:
    """Return the bounded folder of this node."""
    name = data.download.folder
    usual = Path(tempfile.gettempdir()) / f"fluxtrain-{os.getuid()}"
    return NodeCache(usual if name is None else data_root / name, data.download.max_bytes)


def entry_key(source: Source, data: DataConfig) -> str:
    """Return the key of ``source`` in the folder of the node."""
    kind, encoding = kind_of(source.files), data.caption_encoding
    columns = f" {data.table}" if kind == "tables" else ""
    codec = f" {encoding}" if kind != "pictures" and encoding != UTF_8 else ""
    if not columns + codec:
        return source.key
    text = f"{source.key}{columns}{codec}"
    return hashlib.sha256(text.encode()).hexdigest()[: len(source.key)]


def bytes_needed(source: Source) -> int:
    """Return the most bytes that ``source`` takes in the folder of the node, fetched and unpacked."""
    is_unpacked = kind_of(source.files) != "pictures"
    return source.size * (is_unpacked + (source.local_folder is None))


def pictures_folder(source: Source, data: DataConfig, data_root: Path) -> Path:
    """Return the folder in which the pictures of ``source`` are if it is fetched."""
    return node_cache(data, data_root).data_folder(entry_key(source, data)) / _PICTURES


def is_wanted(name: str) -> bool:
    """Return whether a file of a source belongs to pictures; hidden ones and those of a NAS do not."""
    *_, last = parts = name.split("/")
    suffix = Path(last).suffix.lower()
    known = suffix in (*SUFFIXES, *EXTENSIONS, SHARD, TABLE) or last in METADATA
    return known and not any(map(is_hidden, parts))


def kind_of(files: Sequence[RemoteFile]) -> str:
    """Return whether a source is of ``pictures``, ``shards`` or ``tables``; the first that there is."""
    suffixes = {Path(file.name).suffix.lower() for file in files if not _is_metadata(file)}
    if SHARD in suffixes and suffixes.isdisjoint(SUFFIXES):
        return "shards"
    return "tables" if TABLE in suffixes and suffixes.isdisjoint(SUFFIXES) else "pictures"


def read_files(source: Source, table: TableConfig) -> Source:
    """Return ``source`` with those of its files that are read; ConfigError if it has no such split."""
    _require_different_folders(source)
    kind = kind_of(source.files)
    if kind == "pictures":
        packed = set(_packed(source, (SHARD, TABLE)))
        return replace(source, files=tuple(f for f in source.files if f not in packed))
    kept = _packed(source, SHARD if kind == "shards" else TABLE)
    if kind == "tables":
        chosen = files_of_split([file.name for file in kept], table.split)
        kept = [file for file in kept if file.name in chosen]
    return replace(source, files=tuple(kept))


def _require_different_folders(source: Source) -> None:
    names = dict[str, str]()
    for file in source.files if kind_of(source.files) != "pictures" else ():
        if other := names.get(_folder_of(file.name)):
            text = f"{other} and {file.name} differ in their suffix only; rename one"
            raise ConfigError(source.field, source.url, text)
        names[_folder_of(file.name)] = file.name


def unread(source: Source) -> str:
    """Return that shards or Parquet files beside what is read are not, else ""; of all that was listed."""
    kind = kind_of(source.files)
    ignored = {"pictures": (SHARD, TABLE), "shards": (TABLE,), "tables": ()}[kind]
    files = _packed(source, ignored)
    if not files:
        return ""
    more = f" and {len(files) - 1} more files are" if len(files) > 1 else " is"
    return f"{source}: {files[0].name}{more} not read, as there are {kind} too"


def _packed(source: Source, suffixes: str | tuple[str, ...]) -> list[RemoteFile]:
    """Return those files of ``source`` with ``suffixes`` that hold pictures."""
    files = (file for file in source.files if file.name.lower().endswith(suffixes))
    return [file for file in files if not _is_metadata(file)]


def _is_metadata(file: RemoteFile) -> bool:
    return file.name.rpartition("/")[2] in METADATA


def fill_folder(
    source: Source, data: DataConfig, check: Check, advance: Advance, folder: Path
) -> None:
    """Fetch ``source`` into ``folder``; each shard is unpacked as soon as it is there."""
    pictures, is_unpacked = folder / _PICTURES, kind_of(source.files) != "pictures"
    target = source.local_folder or (folder / _FETCHED if is_unpacked else pictures)
    pictures.mkdir(exist_ok=True)
    wanted = tuple(
        f for f in source.files if not (is_unpacked and (pictures / _folder_of(f.name)).is_dir())
    )

    unpacking = Lock()  # one at a time: a row group of a table is in memory meanwhile

    def use(file: RemoteFile, check: Check) -> None:
        if is_unpacked:
            place = pictures / _folder_of(file.name)
            with unpacking:
                _unpack(source, target / file.name, place, data, check)

    if source.local_folder is None:
        policy = RetryPolicy(data.download.attempts, check=check)
        missing = replace(source, files=wanted)
        fetch_source(missing, target, data.download.connections, policy, advance, use)
        return
    for file in wanted:
        use(file, check)


def _unpack(source: Source, path: Path, folder: Path, data: DataConfig, check: Check) -> None:
    try:
        if path.suffix.lower() == SHARD:
            unpack(path, folder, check, data.caption_encoding)
        else:
            write_out(path, folder, data.table, check, data.caption_encoding)
    except DataError as error:
        text = str(error).replace(f"{path.parent}/", "")
        raise ConfigError(source.field, source.url, text) from None
    if source.local_folder is None:
        path.unlink()


def _folder_of(name: str) -> str:
    return quote(str(PurePosixPath(name).with_suffix("")), safe=" ")


def _configuration(data: DataConfig, paths: RunPaths) -> str:
    """Return a hash of the folders with their settings, and of which parts of tables are read."""
    read = (subsets(data, paths.data), data.table)
    codec = "" if data.caption_encoding == UTF_8 else data.caption_encoding
    return hashlib.sha256(f"{read!r}{codec}".encode()).hexdigest()


def _pin(source: Source) -> dict[str, object]:
    return {
        "pinned": source.pinned,
        "files": len(source.files),
        "bytes": source.size,
        "key": source.key,
    }


def _read_pins(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _require_pinned(source: Source, pin: Mapping[str, object] | None) -> None:
    if pin is not None and pin.get("key") != source.key:
        text = (
            f"has changed since the run began, with {pin.get('files')} files of {pin.get('bytes')} bytes; "
            f"now {len(source.files)} of {source.size}; start a run in another --output"
        )
        raise ConfigError(source.field, source.url, text)


def fetch_bar(is_shown: bool, url: str, files: int, size: int) -> ProgressBar:
    """Return the bar of ``size`` bytes to fetch; print what there is to fetch."""
    if is_shown:
        text = f"fetch {files} files, {size / (1 << 20):,.1f} MiB, from {url}"
        print(text, file=sys.stderr, flush=True)
    return ProgressBar("fetch", size, unit="B", is_shown=is_shown)
