"""Brings the data of URLs, and of WebDataset shards, to each node before its pictures are looked at.

Rank 0 lists what there is and pins it in the run's output: a run that is continued has the same data, or ends
with an error. Each node fetches it once, however many ranks and jobs it has.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.data import DataConfig
from fluxtrain.data.pictures.captions import EXTENSIONS, METADATA
from fluxtrain.data.pictures.folder import SUFFIXES
from fluxtrain.data.pictures.shards import SHARD, unpack
from fluxtrain.data.pictures.subset import Places, remote_sources
from fluxtrain.data.pictures.training_set import FILE
from fluxtrain.distributed import Channel, StopRequest, World
from fluxtrain.errors import ConfigError, DataError, StoppedError
from fluxtrain.files import atomic_write
from fluxtrain.picture_cache.fetch_console import FetchConsole
from fluxtrain.progress import Alive
from fluxtrain.remote.node_cache import NodeCache
from fluxtrain.remote.source import Source, fetch_source, list_source, patience_of

PINS = "sources.json"
"""File of the run's output: which versions of remote files it has."""
_FETCHED, _PICTURES = "fetched", "pictures"
Check = Callable[[], object]


@contextmanager
def fetched_pictures(
    data: DataConfig, paths: RunPaths, world: World, stop: StopRequest, alive: Alive
) -> Iterator[Places]:
    """Yield the folders of the run's remote pictures by URL; every rank must call this.

    Raises ConfigError, DataError or DownloadError, naming the field, StoppedError after a stop request: what
    was fetched is kept.
    """
    if not remote_sources(data, paths.data):
        yield {}
        return

    def check() -> None:
        alive()
        if stop.requested:
            raise StoppedError("stopped; what is fetched is kept, the same command resumes")

    sources = world.from_main(lambda: pinned_sources(data, paths, check, is_written=True))
    channel = Channel(world, has_timeout=False)
    with ExitStack() as held:
        places = {
            source.url: held.enter_context(
                local_folder(source, data, paths.data, check, world.is_main)
            )
            for source in sources
        }
        channel.wait_for_all(check)
        yield places


def pinned_sources(
    data: DataConfig, paths: RunPaths, check: Check = lambda: None, is_written: bool = False
) -> list[Source]:
    """Return what the run's URLs hold; ConfigError if that is not what the run in the output began with."""
    path = paths.output / PINS
    pins = _read_pins(path)
    patience = patience_of(data.download, check)
    sources = [
        list_source(field, url, is_wanted, patience, pins.get(url, {}).get("pinned", ""))
        for field, url in remote_sources(data, paths.data)
    ]
    if (paths.output / FILE).exists():  # the run has begun
        for source in sources:
            _require_pinned(source, pins.get(source.url))
    if is_written:
        entries = {source.url: _pin(source) for source in sources}
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial_file:
            partial_file.write_text(json.dumps(pins | entries, indent=1) + "\n")
    return sources


@contextmanager
def local_folder(
    source: Source, data: DataConfig, data_root: Path, check: Check, is_shown: bool
) -> Iterator[Path]:
    """Yield the folder of this node with the pictures of ``source``, fetched and unpacked."""
    cache = NodeCache(download_folder(data, data_root), data.download.max_bytes)
    size = source.size * (2 if _is_sharded(source) else 1)
    fill = partial(_fill, source, data, check, is_shown)
    with cache.entry(source.key, size, fill, check) as folder:
        yield folder / _PICTURES


def download_folder(data: DataConfig, data_root: Path) -> Path:
    """Return the folder of the node for fetched data."""
    if data.download.folder is not None:
        return data_root / data.download.folder
    return Path(tempfile.gettempdir()) / f"fluxtrain-{os.getuid()}"


def is_wanted(name: str) -> bool:
    """Return whether a file of a source belongs to pictures; names that begin with a dot do not."""
    *_, last = parts = name.split("/")
    suffix = Path(last).suffix.lower()
    known = suffix in (*SUFFIXES, *EXTENSIONS, SHARD) or last in METADATA
    return known and not any(part.startswith(".") for part in parts)


def _is_sharded(source: Source) -> bool:
    """Return whether ``source`` is of tars; they are not looked at beside pictures."""
    suffixes = {Path(file.name).suffix.lower() for file in source.files}
    return SHARD in suffixes and suffixes.isdisjoint(SUFFIXES)


def _fill(source: Source, data: DataConfig, check: Check, is_shown: bool, folder: Path) -> None:
    pictures = folder / _PICTURES
    target = folder / _FETCHED if _is_sharded(source) else pictures
    pictures.mkdir(exist_ok=True)
    with FetchConsole(is_shown, str(source), len(source.files), source.size) as console:

        def shown() -> None:
            check()
            console.show()

        patience = patience_of(data.download, shown)
        wanted = [f for f in source.files if not (pictures / _folder_of(f.name)).is_dir()]
        missing = Source(source.field, source.url, source.pinned, tuple(wanted))
        fetch_source(missing, target, data.download.connections, patience, console.advance)
        if _is_sharded(source):
            for file in wanted:
                if file.name.endswith(SHARD):
                    _unpack(source, target / file.name, pictures / _folder_of(file.name), shown)


def _unpack(source: Source, tar: Path, folder: Path, check: Check) -> None:
    try:
        unpack(tar, folder, check)
    except DataError as error:
        text = str(error).replace(f"{tar.parent}/", "")
        raise ConfigError(source.field, source.url, text) from None
    tar.unlink()


def _folder_of(name: str) -> str:
    """Return the folder below the pictures of the shard ``name``."""
    return name.removesuffix(SHARD).replace("/", "_")


def _pin(source: Source) -> dict[str, object]:
    return {
        "pinned": source.pinned,
        "files": len(source.files),
        "bytes": source.size,
        "key": source.key,
    }


def _read_pins(path: Path) -> dict[str, Mapping[str, str]]:
    try:
        content = json.loads(path.read_text())
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
