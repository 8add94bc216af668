"""Whether a checkpoint is whole: its files against the checksums in DONE, read by all ranks together.

Ranks read blocks in the order of the files, so that most ranks verify what they load next, and the system
still has it in memory. Who reads the weights only verifies the blocks that hold them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path

from fluxtrain.errors import ConfigError, DataError, StorageError
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime import files as checksums
from fluxtrain.runtime.files import Block, FileSums
from fluxtrain.runtime.progress import Alive
from fluxtrain.runtime.safetensors import ALL_DTYPES, read_header
from fluxtrain.state.run_state import (
    DONE,
    kind_of_result,
    read_checksums,
    read_config,
    read_state,
)

_SUFFIX = ".safetensors"
_NUM_THREADS = 8
"""Reads at the same time, so that the storage is as busy as in a load."""
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}
"""Errors of files that a later start would find again; EIO is what a broken medium returns."""


def find_damage(checkpoint: Path, world: World, alive: Alive, weights_only: bool = False) -> str:
    """Return what is wrong with ``checkpoint``, an empty text if it is whole; every rank must call this.

    Of the tensors only those that are the run's result are verified if ``weights_only``. ``alive`` is called
    after each block. Raises StorageError if the storage cannot be read at present.
    """
    damage, blocks = world.from_main(lambda: _inspect(checkpoint, weights_only))
    if damage:
        return damage
    begin, end = (len(blocks) * rank // world.size for rank in (world.rank, world.rank + 1))
    own = blocks[begin:end]
    damages = world.all_gather(_damaged_blocks(checkpoint, own, alive)[:1])
    return next(iter(damages), "")


def require_whole_weights(checkpoint: Path, world: World, alive: Alive) -> None:
    """Raise DataError, with the file, if the weights in ``checkpoint`` are damaged; every rank must call it.

    ``alive`` is called after each block. Raises StorageError if the storage cannot be read at present.
    """
    if damage := find_damage(checkpoint, world, alive, weights_only=True):
        raise DataError(f"{checkpoint}: damaged ({damage})")


def _inspect(checkpoint: Path, weights_only: bool) -> tuple[str, list[Block]]:
    """Return what is wrong with all but the contents of the tensors, and the blocks to verify."""
    try:
        with _storage_errors(checkpoint):
            read_state(checkpoint)
            config = read_config(checkpoint)
            files = read_checksums(checkpoint)
            if not files:
                raise DataError(f"{checkpoint / DONE}: no checksums")
            _check_sizes(checkpoint, files)
            blocks = checksums.blocks_of(files)
            if weights_only:
                blocks = _with_weights(checkpoint, blocks, kind_of_result(config))
            return "", blocks
    except (DataError, ConfigError) as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _DAMAGE:
            raise StorageError(str(error)) from None
        return str(error).removeprefix(f"{checkpoint}{os.sep}"), []


def _with_weights(checkpoint: Path, blocks: Sequence[Block], kind: str) -> list[Block]:
    """Return those of ``blocks`` that hold the header of a file or a tensor of ``kind``."""
    ranges = {
        name: _ranges_of_weights(checkpoint / name, kind) for name in {b.file for b in blocks}
    }
    overlaps = (
        any(begin < block.offset + block.size and block.offset < end for begin, end in spans)
        for block in blocks
        for spans in (ranges[block.file],)
    )
    return list(compress(blocks, overlaps))


def _ranges_of_weights(path: Path, kind: str) -> list[tuple[int, int]]:
    """Return the bytes of the header and of ``kind`` in ``path``: all bytes of a file without tensors."""
    if path.suffix != _SUFFIX:
        return [(0, path.stat().st_size)]
    spans = read_header(path, ALL_DTYPES)  # also those of an optimizer
    header = min((span.offset for span in spans.values()), default=path.stat().st_size)
    weights = [span for name, span in spans.items() if _kind(name) == kind]
    return [(0, header), *((span.offset, span.offset + span.num_bytes) for span in weights)]


def _check_sizes(checkpoint: Path, files: Mapping[str, FileSums]) -> None:
    for name, sums in sorted(files.items()):
        size = _size(checkpoint / name)
        if size != sums.size:
            has = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{checkpoint / name}: {has}, should have {sums.size} bytes")
    for path in sorted(checkpoint.glob(f"*{_SUFFIX}")):
        if path.name not in files:
            raise DataError(f"{path}: not a file of this checkpoint")


def _size(path: Path) -> int | None:
    """Return the size of the file ``path``, None if there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = path.stat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _kind(name: str) -> str:
    """Return the part of a tensor's name before the parameter's: model, or optimizer and its state."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "optimizer" else parts[0]


def _damaged_blocks(checkpoint: Path, blocks: Sequence[Block], alive: Alive) -> list[str]:
    def damage(block: Block) -> str:
        with _storage_errors(checkpoint):
            try:
                return "" if block.is_whole_in(checkpoint) else _changed(block)
            except DataError as error:
                return str(error)

    found = list[str]()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for text in pool.map(damage, blocks):
            found += [text] if text else []
            alive()
    return found


def _changed(block: Block) -> str:
    end = block.offset + block.size
    return f"{block.file}: wrong checksum of bytes {block.offset} to {end}"


@contextmanager
def _storage_errors(checkpoint: Path) -> Iterator[None]:
    """Raise DataError for a medium that is broken, StorageError for other errors of the storage."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename or checkpoint}: cannot be read ({error.strerror})"
        raise (DataError if error.errno == errno.EIO else StorageError)(text) from None
