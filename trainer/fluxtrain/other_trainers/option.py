"""Option: a row of a table, one option of another trainer and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from fluxtrain.other_trainers.reading import Reading

Values: TypeAlias = Mapping[str, object]
"""Values of fields by their paths below ``spec.run``."""
Convert: TypeAlias = Callable[[Reading, str], Values]
"""Returns what an option, by its name, becomes; raises ConfigError if its value is wrong there, and
NoCounterpartError if it is right, but cannot be stated here."""


class Fate(Enum):
    """What becomes of an option; the value is the heading in reports."""

    WRITTEN = "written"
    ELSEWHERE = "not part of the file"
    AUTOMATIC = "nothing to set"
    INERT = "does nothing there either"
    MISSING = "no counterpart"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Option:
    """One option of another trainer."""

    fate: Fate
    """What becomes of it; WRITTEN unless ``convert`` finds no counterpart of the value."""
    fields: tuple[str, ...] = ()
    """The fields that it sets, for the documentation."""
    note: str = ""
    """What differs, or the reason of the fate."""
    convert: Convert | None = None
    """Conversion of the value, with the fate WRITTEN."""
    default: object = None
    """Value with which the trainer runs if the option is not given, to be converted too; None: none."""
    off: tuple[object, ...] = ()
    """Values with which an option without a counterpart asks for nothing."""
    is_secret: bool = False
    """Whether its value is never shown."""


def field(
    path: str, read: Callable[[Reading, str], object], default: object = None, note: str = ""
) -> Option:
    """Return the row of an option whose value, as ``read``, is that of the field at ``path``."""
    return Option(
        Fate.WRITTEN, (path,), note, lambda reading, name: {path: read(reading, name)}, default
    )


def fields(
    paths: Iterable[str], convert: Convert, default: object = None, note: str = ""
) -> Option:
    """Return the row of an option that ``convert`` turns into values of fields at ``paths``."""
    return Option(Fate.WRITTEN, tuple(paths), note, convert, default)


def elsewhere(note: str, is_secret: bool = False) -> Option:
    """Return the row of an option that is stated outside the file."""
    return Option(Fate.ELSEWHERE, note=note, is_secret=is_secret)


def automatic(note: str) -> Option:
    """Return the row of an option that needs no counterpart."""
    return Option(Fate.AUTOMATIC, note=note)


def inert(note: str) -> Option:
    """Return the row of an option that the other trainer accepts without an effect on FLUX.1."""
    return Option(Fate.INERT, note=note)


def missing(note: str, *off: object) -> Option:
    """Return the row of an option without a counterpart, of which the values ``off`` ask for nothing."""
    return Option(Fate.MISSING, note=note, off=(False, *off))


def each(names: str, row: Option) -> dict[str, Option]:
    """Return ``row`` for each of ``names``, which blanks separate."""
    return dict.fromkeys(names.split(), row)
