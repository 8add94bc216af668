"""Where an encoder comes from: a folder, an MLCommons manifest, or a model on the Hugging Face Hub."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Protocol

from fluxtrain.errors import ConfigError, DataError
from fluxtrain.prepare.download.download import download
from fluxtrain.prepare.encoders.hub_model import open_hub_model

HUB = "hf://"
_HUB_NAME = re.compile(
    r"hf://(?P<name>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w.-]+))?(?:/(?P<folder>[\w./-]+?))?/?"
)
_ALLOWED = "a folder, a manifest that ends in .md5 or .uri, or hf://ORG/NAME[@REVISION][/FOLDER]"


class Base(Protocol):
    """Something that has files in folders."""

    def copy(self, folder: str, patterns: tuple[str, ...], target: Path) -> None:
        """Copy the files directly in ``folder`` that match one of ``patterns`` to ``target``."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine, or of a volume."""

    path: Path

    def copy(self, folder: str, patterns: tuple[str, ...], target: Path) -> None:
        """Copy the files directly in ``folder`` that match one of ``patterns`` to ``target``."""
        source = self.path / folder
        for path in sorted(source.iterdir()) if source.is_dir() else ():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
                shutil.copyfile(path, target / path.name)


@dataclass(frozen=True)
class Place:
    """A folder of a base; ``text`` is what the user gave."""

    text: str
    open: Callable[[], Base]
    folder: str = ""

    def below(self, folder: str) -> Place:
        """Return the place of a folder in this one."""
        return Place(self.text, self.open, f"{self.folder}/{folder}".strip("/"))

    def copy(self, patterns: tuple[str, ...], target: Path) -> None:
        """Copy the files that match one of ``patterns`` to ``target``; raise DataError if there are none."""
        before = set(target.iterdir())
        self.open().copy(self.folder, patterns, target)
        if not {path for path in target.iterdir() if path.is_file()} - before:
            where = f", folder {self.folder}" if self.folder else ""
            raise DataError(f"{self.text}{where}: has no file {' or '.join(patterns)}")


def parse_place(text: str, scratch: Path, flag: str) -> Place:
    """Return the place that ``text`` names; files are downloaded to ``scratch``, later.

    Raises ConfigError, naming ``flag``, if it names none.
    """
    if text.startswith(HUB):
        match = _HUB_NAME.fullmatch(text)
        if match is None:
            raise ConfigError(flag, text, f"allowed: {_ALLOWED}")
        name, revision = match["name"], match["revision"] or "main"
        return Place(
            text, cache(lambda: open_hub_model(name, revision, scratch)), match["folder"] or ""
        )
    if text.endswith((".md5", ".uri")):
        return Place(text, cache(lambda: _downloaded(text, scratch)))
    if not Path(text).is_dir():
        raise ConfigError(flag, text, f"no such folder; allowed: {_ALLOWED}")
    return Place(text, lambda: LocalFolder(Path(text)))


def _downloaded(manifest: str, scratch: Path) -> LocalFolder:
    """Download the files of ``manifest``, each verified by its MD5, unless that was done before."""
    download(manifest, scratch, stream=sys.stderr)
    return LocalFolder(scratch)
