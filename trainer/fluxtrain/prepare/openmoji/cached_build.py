"""Stages of a preparation: each result appears whole, with its settings beside it, and is kept.

Beside an output ``train`` stands ``train.prepared.json``, written last: the settings it was made with.
A stage whose settings are found there has nothing to do.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from fluxtrain.files import atomic_write

Settings = dict[str, object]
Advance = Callable[[int], None]
Make = Callable[[Path, Advance], None]
Follow = Callable[[int, int], None]
_LINE_SECONDS = 10.0


def build_cached(
    name: str,
    output: Path,
    settings: Settings,
    total: int,
    make: Make,
    force: bool = False,
    stream: TextIO = sys.stderr,
) -> None:
    """Let ``make`` write ``output``, unless it is there with equal ``settings`` and not ``force``.

    ``make`` gets a path to write to, file or folder, and what to call with the units done of ``total``.
    """
    if not force and is_cached(output, settings):
        print(f"{name}: already made", file=stream, flush=True)
        return
    begin = time.perf_counter()
    with progress(name, total, stream) as advance:
        _replace(output, settings, lambda partial: make(partial, advance))
    print(f"{name}: {time.perf_counter() - begin:.1f} s", file=stream, flush=True)


def is_cached(output: Path, settings: Settings) -> bool:
    """Return whether ``output`` was made, whole, with exactly these ``settings``."""
    try:
        return output.exists() and json.loads(_stamp(output).read_text()) == settings
    except (OSError, ValueError):
        return False


def _replace(output: Path, settings: Settings, write: Callable[[Path], None]) -> None:
    """Write beside ``output``, then put it in place; the stamp goes first and comes back last."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    _remove(partial)
    write(partial)
    _stamp(output).unlink(missing_ok=True)
    _remove(output)
    partial.replace(output)
    with atomic_write(_stamp(output)) as stamp:
        stamp.write_text(json.dumps(settings, indent=1, ensure_ascii=False))


def _stamp(output: Path) -> Path:
    return output.with_name(f"{output.name}.prepared.json")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def progress(
    name: str, total: int, stream: TextIO, follow: Follow | None = None
) -> Iterator[Advance]:
    """Yield what to call with units done: a bar on a terminal, a line every ten seconds elsewhere.

    ``follow`` is called each time with the units done so far and ``total``.
    """
    done, said = 0, time.monotonic()
    with tqdm(total=total, desc=name, file=stream, leave=False, disable=not stream.isatty()) as bar:

        def advance(more: int) -> None:
            nonlocal done, said
            done += more
            bar.update(more)
            if follow is not None:
                follow(done, total)
            if bar.disable and time.monotonic() > said + _LINE_SECONDS:
                said = time.monotonic()
                print(f"{name}: {done:,} of {total:,}", file=stream, flush=True)

        yield advance
