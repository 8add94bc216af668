"""How a checkpoint becomes complete: written to a folder of its start, then renamed, then older ones removed.

    checkpoints/.start_000007                       the newest start of all ranks (run_state.py)
    checkpoints/partial_000007_step_0000000120/     start 7 writes step 120
    checkpoints/removed_1f0c83a2_step_0000000100/   step 100 is being removed
    checkpoints/step_0000000110/                    complete
    checkpoints/damaged_a71c52d0_step_0000000120/   was found damaged: kept for a person, never loaded

A new start renames the partial folders of earlier ones before it looks for the newest checkpoint. So ranks
that were left behind have either committed before it looked, or have nothing left to commit. The file system
must rename folders atomically and create a file only if it does not exist; locks are not needed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fluxtrain.errors import FencedError
from fluxtrain.runtime.files import sync
from fluxtrain.runtime.progress import Alive
from fluxtrain.state.run_state import DONE, Fence, complete, folder_of

_PARTIAL = re.compile(r"partial_(\d+)_step_\d+")
_EXISTS = {errno.EEXIST, errno.ENOTEMPTY}


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of a run's checkpoints, as rank 0 of one start changes it."""

    fence: Fence

    @property
    def path(self) -> Path:
        """Return the folder."""
        return self.fence.folder

    def partial(self, step: int) -> Path:
        """Return the folder that this start writes ``step`` to."""
        return self.path / f"partial_{self.fence.start:06d}_{folder_of(self.path, step).name}"

    def take_over(self) -> None:
        """Rename the partial folders of earlier starts, so that these can no longer commit them."""
        for path in self.path.iterdir():
            partial = _PARTIAL.fullmatch(path.name)
            if partial and int(partial[1]) < self.fence.start:
                self._set_aside(path)

    def begin(self, step: int) -> None:
        """Create the partial folder of ``step``; first remove what earlier starts left.

        Raises FencedError if there is a newer start.
        """
        self.fence.check()
        self.take_over()
        for path in self.path.glob("removed_*"):
            shutil.rmtree(path, ignore_errors=True)
        self.partial(step).mkdir()

    def commit(self, step: int) -> None:
        """Make the partial folder of ``step`` a checkpoint: it is whole and on the disk.

        Raises FencedError, and removes the partial folder, if there is a newer start. A complete checkpoint
        of ``step`` is kept: the state at a step does not depend on the ranks that computed it.
        """
        partial, target = self.partial(step), folder_of(self.path, step)
        sync(partial)
        try:
            self.fence.check()
        except FencedError:
            self._remove(partial)
            raise
        if not _renamed(partial, target):
            if (target / DONE).exists():
                return self._remove(partial)
            self._remove(target)  # of an older version, which wrote in place
            partial.rename(target)
        sync(self.path)

    def keep_newest(self, count: int, alive: Alive) -> None:
        """Remove all but the newest ``count`` checkpoints; ``alive`` is called after each.

        Raises FencedError if there is a newer start.
        """
        self.fence.check()
        for old in complete(self.path)[:-count]:
            self._remove(old)
            alive()

    def keep_damaged(self, checkpoint: Path) -> str:
        """Rename ``checkpoint``, so that it is never chosen again; return its new name.

        Raises FencedError if there is a newer start.
        """
        self.fence.check()
        aside = self._set_aside(checkpoint, "damaged")
        return aside.name if aside else "nothing, as it was removed"

    def _remove(self, path: Path) -> None:
        if (aside := self._set_aside(path)) is not None:
            shutil.rmtree(aside, ignore_errors=True)  # the next save removes what is left

    def _set_aside(self, path: Path, kind: str = "removed") -> Path | None:
        """Rename ``path``, so that it is never seen half removed; None if it is gone already."""
        aside = self.path / f"{kind}_{secrets.token_hex(4)}_{path.name}"
        with suppress(FileNotFoundError):
            return path.rename(aside)
        return None


def damaged(folder: Path) -> list[str]:
    """Return the names of the folders in ``folder`` that `CheckpointFolder.keep_damaged` renamed."""
    return sorted(path.name for path in folder.glob("damaged_*_step_*"))


def _renamed(source: Path, target: Path) -> bool:
    """Rename the folder ``source``; return False if ``target`` is a folder with contents."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in _EXISTS:
            raise
        return False
    return True
