"""The fence of a run: only the newest start of all its ranks may write to the output.

Each start has a number and a file, ``checkpoints/.start_NUMBER``. The next start creates its own and removes
the older ones. So ranks that were left behind, as their node was cut off or they were frozen, find it gone.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.errors import FencedError, StorageError

_NAME = ".start_{:06d}"
_PATTERN = re.compile(r"\.start_(\d+)")


@dataclass(frozen=True)
class Fence:
    """The number of a start, and the folder of checkpoints that its file is in."""

    folder: Path
    start: int

    @property
    def path(self) -> Path:
        """Return the file that exists until the next start."""
        return self.folder / _NAME.format(self.start)

    def check(self) -> None:
        """Raise FencedError if there is a newer start."""
        try:
            os.close(os.open(self.path, os.O_RDONLY))  # NFS asks the server when a file is opened
        except FileNotFoundError:
            raise _fenced(self) from None


def claim(folder: Path, after: int = 0) -> Fence:
    """Return the fence of a new start in ``folder``, with a number above ``after``; all others are fenced.

    Raises FencedError if another start began meanwhile, StorageError if ``folder`` cannot be written.
    """
    try:
        return _claim(folder, after)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror})") from None


def _claim(folder: Path, after: int) -> Fence:
    folder.mkdir(parents=True, exist_ok=True)
    fence = Fence(folder, max([after, *_starts(folder)]) + 1)
    while not _created(fence.path):  # this node does not see a start that another one has created
        fence = Fence(folder, fence.start + 1)
    for start in _starts(folder):
        if start > fence.start:
            fence.path.unlink(missing_ok=True)
            raise _fenced(fence)
        if start < fence.start:
            Fence(folder, start).path.unlink(missing_ok=True)
    return fence


def _starts(folder: Path) -> list[int]:
    """Return the numbers of the starts in ``folder``, the newest first."""
    names = (_PATTERN.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def _created(path: Path) -> bool:
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        return True
    return False


def _fenced(fence: Fence) -> FencedError:
    text = f"a newer start of this run writes here, and start {fence.start} ends"
    return FencedError(f"{fence.folder.parent}: {text}")
