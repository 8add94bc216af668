"""A reader that is fuzzed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Read = Callable[[Path], object]


@dataclass(frozen=True)
class Target:
    """One reader."""

    file: str
    """The name of the file that is damaged."""
    read: Read
    seeds: Callable[[], list[bytes]]
    """Makes valid contents."""
    raises_value_errors: bool = False
    """Whether its callers turn a ValueError, whose text they show, into an error with the file's name."""


def texts_of(*given: str) -> Callable[[], list[bytes]]:
    """Return what makes ``given`` as contents."""
    return lambda: [text.encode() for text in given]
