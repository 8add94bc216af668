"""Encodes what is at URLs part by part, divided over the ranks: each is fetched, encoded and removed.

A part is a shard, a Parquet file, or some pictures of a folder. What a shard holds is kept in the cache, as
are the records of its pictures, so that a shard whose pictures are encoded is not fetched again, whichever
rank had it. The pictures are known as those that are fetched as a whole are: the samples are the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.pictures.dataset import PictureCache
from fluxtrain.data.pictures.folder import SUFFIXES, Listing, PictureFile, list_pictures
from fluxtrain.data.pictures.picture import mask_files, with_masks
from fluxtrain.data.pictures.subset import (
    TrainingPicture,
    errors_of,
    list_subsets,
    local_subset,
    pictures_of,
    subsets,
)
from fluxtrain.data.pictures.tables import joined, list_shard, read_listing
from fluxtrain.encode.encoders import check_files
from fluxtrain.errors import DataError
from fluxtrain.fetch.source import Advance, Source
from fluxtrain.fetch.stores import RemoteFile
from fluxtrain.parallel.distributed import World
from fluxtrain.picture_cache.encoder import PictureEncoder
from fluxtrain.picture_cache.fetching import (
    Check,
    Fetched,
    bytes_needed,
    entry_key,
    fetch_bar,
    fill_folder,
    kind_of,
    local_folder,
    node_cache,
    parts_of,
    pictures_folder,
)
from fluxtrain.picture_cache.work import is_done

_GROUP_FILES, _GROUP_BYTES = 64, 1 << 26
"""Most pictures of a folder that are one part."""
_PARTS_PER_RANK = 4
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Part:
    """Files that are fetched, encoded and removed together."""

    source: Source
    folder: Path
    """In which its pictures are if all files are fetched: they are known by it."""

    @property
    def is_shard(self) -> bool:
        """Return whether what it holds is not known before it is fetched."""
        return kind_of(self.source.files) != "pictures"


@dataclass
class Streaming:
    """The streamed pictures of a run on one rank."""

    config: RunConfig
    paths: RunPaths
    cache: PictureCache
    fetched: Fetched
    check: Check
    world: World
    _folders: dict[str, Listing] = field(default_factory=dict)
    """Pictures of folders, by URL; on rank 0."""
    _masks: dict[Path, Sequence[PictureFile]] = field(default_factory=dict)

    def list_folders(self) -> None:
        """List the pictures of folders on rank 0, to which their captions are fetched."""
        for source in self.fetched.streamed if self.world.is_main else ():
            if kind_of(source.files) == "pictures":
                self._folders[source.url] = self._list_folder(source)

    def missing(self) -> list[Part]:
        """Return the parts with pictures that are not encoded; rank 0 knows them.

        Raises what would end the run later: folders or encoders that are missing.
        """
        list_subsets(self.config.data, self.paths.data)
        check_files(self.config.encoders, self.paths.models)
        self.cache.make_folders()
        exists = self.cache.existing().__contains__
        return [part for source in self.fetched.streamed for part in self._missing(source, exists)]

    def encode(self, parts: Sequence[Part]) -> None:
        """Encode this rank's share of ``parts``."""
        self._remove_encoded(parts)
        own = parts[self.world.rank :: self.world.size]
        if not own:
            return
        encoder = PictureEncoder(self.config, self.paths, self.world, self.cache)
        with fetch_bar(self.world.is_main, *_summary(own, parts)) as console:

            def shown() -> None:
                self.check()
                console.show()

            def use(part: Part, folder: Path) -> None:
                missing = self._unencoded(part, folder)
                encoder.encode(missing, shown, folder=folder)

            self._each(own, use, shown, console.advance)
        encoder.free()

    def places(self) -> dict[str, Path | Listing]:
        """Return what is at each URL after all parts are encoded; on rank 0."""
        found = {source.url: self._listing(source) for source in self.fetched.streamed}
        return self.fetched.places | found

    def _missing(self, source: Source, exists: Callable[[str], bool]) -> Iterator[Part]:
        folder = pictures_folder(source, self.config.data, self.paths.data)
        if source.url not in self._folders:
            for shard in parts_of(source):
                found = read_listing(self._listing_path(shard))
                listing = joined(folder, [found] if found else [])
                if found is None or self._lacking(source.url, listing, exists):
                    yield Part(shard, folder)
            return
        lacking = self._lacking(source.url, self._folders[source.url], exists)
        names = {picture.file.name for picture in lacking}
        files = [file for file in source.files if file.name in names]
        for group in self._groups(files):
            yield Part(replace(source, files=group), folder)

    def _groups(self, files: Sequence[RemoteFile]) -> Iterator[tuple[RemoteFile, ...]]:
        share = -(-len(files) // (_PARTS_PER_RANK * self.world.size))
        most = min(_GROUP_BYTES, self.config.data.download.max_bytes // _PARTS_PER_RANK)
        group = list[RemoteFile]()
        for file in files:
            size = sum(each.size for each in group) + file.size
            if group and (len(group) >= min(_GROUP_FILES, share) or size > most):
                yield tuple(group)
                group = []
            group.append(file)
        if group:
            yield tuple(group)

    def _unencoded(self, part: Part, folder: Path) -> list[TrainingPicture]:
        if part.is_shard:
            listed = list_shard(folder, self.config.data.caption_encoding)
            listed.write(self._listing_path(part.source))
            listing = joined(part.folder, [listed])
        else:
            files = [PictureFile(file.name, file.size, 0, "") for file in part.source.files]
            listing = Listing(part.folder, files, is_streamed=True)
        return self._lacking(part.source.url, listing, os.path.exists)

    def _lacking(
        self, url: str, listing: Listing, exists: Callable[[str], bool]
    ) -> list[TrainingPicture]:
        return [
            picture
            for subset in subsets(self.config.data, self.paths.data)
            if subset.url == url
            for local in [local_subset(subset, self.fetched.places, listing.folder)]
            for picture in pictures_of(
                local, with_masks(listing, self._mask_files(local.masks), local.masks_place)
            )
            if not is_done(self.config, self.cache, picture, exists)
        ]

    def _mask_files(self, folder: Path | None) -> Sequence[PictureFile] | None:
        if folder is None:
            return None
        if folder not in self._masks:
            self._masks[folder] = mask_files(folder, self.paths.data)
        return self._masks[folder]

    def _list_folder(self, source: Source) -> Listing:
        """Return the pictures of ``source``, of which text and metadata files alone are fetched."""
        data, root = self.config.data, self.paths.data
        pictures = {f.name: f.size for f in source.files if f.name.lower().endswith(SUFFIXES)}
        texts = replace(source, files=tuple(f for f in source.files if f.name not in pictures))
        with (
            local_folder(texts, data, root, self.check, is_shown=bool(texts.files)) as folder,
            errors_of(source.url, folder),
        ):
            hint, encoding = f"; {source}", data.caption_encoding
            listing = list_pictures(folder, hint, absent=pictures, encoding=encoding)
        node_cache(data, root).remove(entry_key(texts, data))
        return replace(listing, folder=pictures_folder(source, data, root), is_streamed=True)

    def _listing(self, source: Source) -> Listing:
        if source.url in self._folders:
            return self._folders[source.url]
        paths = map(self._listing_path, parts_of(source))
        found = [(path, read_listing(path)) for path in paths]
        for path, listing in found:
            if listing is None:
                text = "was removed or damaged while the run started"
                raise DataError(f"{path}: {text}; the same command writes it again")
        folder = pictures_folder(source, self.config.data, self.paths.data)
        return joined(folder, [listing for _, listing in found if listing])

    def _listing_path(self, shard: Source) -> Path:
        return self.cache.listing_path(entry_key(shard, self.config.data))

    def _each(
        self,
        parts: Sequence[Part],
        use: Callable[[Part, Path], object],
        check: Check,
        advance: Advance,
    ) -> None:
        """Call ``use`` for each part with the folder of its files, then remove it.

        The next one is fetched meanwhile. A part whose ``use`` fails stays there for the next start.
        """
        stopped, node = Event(), node_cache(self.config.data, self.paths.data)

        def unless_stopped() -> None:
            if stopped.is_set():
                raise DataError("another part has failed")
            check()

        fetch = partial(self._open, unless_stopped, advance)
        with ThreadPoolExecutor(1, thread_name_prefix="stream") as pool:
            following = pool.submit(fetch, parts[0])
            try:
                for number, part in enumerate(parts):
                    opened, folder = following.result()
                    with opened:
                        if number + 1 < len(parts):
                            following = pool.submit(fetch, parts[number + 1])
                        use(part, folder)
                    node.remove(entry_key(part.source, self.config.data))
            finally:
                stopped.set()
                _close(following)

    def _remove_encoded(self, parts: Sequence[Part]) -> None:
        """Remove shards of this node that are not among ``parts``: a killed run has left them."""
        node, data = node_cache(self.config.data, self.paths.data), self.config.data
        kept = {entry_key(part.source, data) for part in parts}
        every = (part for source in self.fetched.streamed for part in parts_of(source))
        for key in {entry_key(part, data) for part in every} - kept:
            if self.world.local_rank == 0 and node.data_folder(key).exists():
                node.remove(key)

    def _open(self, check: Check, advance: Advance, part: Part) -> tuple[ExitStack, Path]:
        """Fetch ``part``; return its folder, and what holds it there."""
        data, source = self.config.data, part.source
        fill = partial(fill_folder, source, data, check, advance)
        entry = node_cache(data, self.paths.data).entry(
            entry_key(source, data), bytes_needed(source), fill, check, _RoomNote()
        )
        with ExitStack() as stack:
            folder = stack.enter_context(entry)
            return stack.pop_all(), folder / "pictures"


class _RoomNote:
    """Prints once, after a while, that room is waited for."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _PATIENCE_SECONDS

    def __call__(self, lacking: str) -> None:
        if time.monotonic() > self._due:
            self._due = float("inf")
            print(f"fluxtrain: {lacking}; it waits for room", file=sys.stderr, flush=True)


def _close(opened: Future[tuple[ExitStack, Path]]) -> None:
    with suppress(Exception):
        opened.result()[0].close()


def _summary(own: Sequence[Part], every: Sequence[Part]) -> tuple[str, int, int]:
    urls = dict.fromkeys(str(part.source) for part in own)
    files, of = (sum(len(part.source.files) for part in parts) for parts in (own, every))
    share = "" if len(own) == len(every) else f", this rank's share of {of}"
    size = sum(part.source.size for part in own)
    return f"{', '.join(urls)} part by part{share}", files, size
