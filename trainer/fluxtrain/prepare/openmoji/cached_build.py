"""Builds a file or folder unless it was built before with the same settings.

The settings of ``train`` are in ``train.prepared.json``, which is written last.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from fluxtrain.files import atomic_write
from fluxtrain.prepare.progress import Advance, progress_bar

Settings = dict[str, object]
Build = Callable[[Path, Advance], None]
"""Takes the path to write to and the function to call with the units done."""


def build_cached(
    name: str,
    output: Path,
    settings: Settings,
    total: int,
    build: Build,
    force: bool = False,
    stream: TextIO = sys.stderr,
) -> None:
    """Call ``build`` to write ``output``, ``total`` units of work, unless it is cached and not ``force``."""
    if not force and is_cached(output, settings):
        print(f"{name}: already made", file=stream, flush=True)
        return
    begin = time.perf_counter()
    with progress_bar(name, total, stream) as advance:
        _build_and_replace(output, settings, lambda partial: build(partial, advance))
    print(f"{name}: {time.perf_counter() - begin:.1f} s", file=stream, flush=True)


def is_cached(output: Path, settings: Settings) -> bool:
    """Return whether ``output`` is complete and was built with exactly these ``settings``."""
    try:
        return output.exists() and json.loads(_settings_file(output).read_text()) == settings
    except (OSError, ValueError):
        return False


def _build_and_replace(output: Path, settings: Settings, build: Callable[[Path], None]) -> None:
    """Build beside ``output``, then replace it; its settings file is removed first and written last."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    _remove(partial)
    build(partial)
    _settings_file(output).unlink(missing_ok=True)
    _remove(output)
    partial.replace(output)
    with atomic_write(_settings_file(output)) as file:
        file.write_text(json.dumps(settings, indent=1, ensure_ascii=False))


def _settings_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.prepared.json")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
