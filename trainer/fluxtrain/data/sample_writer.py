"""The base of the writers of encoded data sets: samples go into files of equal length.

Axes: l text tokens, d text width, v pooled width, ch h w latent image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxtyping import Float
from torch import Tensor


@dataclass
class Sample:
    """One encoded sample."""

    key: str
    caption: str
    txt: Float[Tensor, "l d"]
    vec: Float[Tensor, " v"]
    mean: Float[Tensor, "ch h w"]
    logvar: Float[Tensor, "ch h w"]
    timestep: int | None = None


class SampleWriter(ABC):
    """Writes samples to files of ``shard_size``; each file appears whole or not at all."""

    def __init__(self, folder: Path, shard_size: int) -> None:
        """Create ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_size = folder, shard_size
        self._in_file = 0  # samples added to the current file

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the last file and write the listing; discard the last file if an exception was raised."""
        if kind is not None:
            self._discard_file()
            return
        self._finish_file()
        self._write_listing()

    def add(self, sample: Sample) -> None:
        """Append ``sample``."""
        self._append(sample)
        self._in_file += 1
        if self._in_file == self.shard_size:
            self._finish_file()

    def add_all(self, samples: Iterable[Sample]) -> None:
        """Append all ``samples``."""
        for sample in samples:
            self.add(sample)

    def _finish_file(self) -> None:
        if self._in_file:
            self._close_file()
        self._in_file = 0

    @abstractmethod
    def _append(self, sample: Sample) -> None:
        """Append ``sample`` to the current file."""

    @abstractmethod
    def _close_file(self) -> None:
        """Write what is pending and give the current file its name."""

    @abstractmethod
    def _discard_file(self) -> None:
        """Release the current file."""

    @abstractmethod
    def _write_listing(self) -> None:
        """Write the files that list the others."""


class StreamWriter(SampleWriter):
    """Writes batches of samples to an open file, which is renamed when it is closed."""

    batch_size: ClassVar[int] = 1

    def __init__(self, folder: Path, shard_size: int) -> None:
        """Create ``folder``."""
        super().__init__(folder, shard_size)
        self.names, self._pending = list[str](), list[Sample]()
        self._file: Any = None

    def _append(self, sample: Sample) -> None:
        self._pending.append(sample)
        if len(self._pending) == self.batch_size:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            self.names.append(self._file_name(len(self.names)))
            self._file = self._open(self._partial)
        self._write(self._file, self._pending)
        self._pending = []

    @property
    def _partial(self) -> Path:
        return self.folder / f"{self.names[-1]}.partial"

    def _close_file(self) -> None:
        self._flush()
        self._discard_file()
        self._partial.replace(self.folder / self.names[-1])

    def _discard_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    @abstractmethod
    def _file_name(self, number: int) -> str:
        """Return the name of file ``number``, from 0."""

    @abstractmethod
    def _open(self, path: Path) -> Any:
        """Return a new file at ``path`` that has a method ``close``."""

    @abstractmethod
    def _write(self, file: Any, samples: list[Sample]) -> None:
        """Append ``samples`` to ``file``."""
