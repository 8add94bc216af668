"""Go through a trainer's table: the values of ``spec.run``, and what became of every option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.immutable_fields import value_at
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.contract.validation import did_you_mean, join_errors
from fluxtrain.errors import ConfigError, JoinedConfigError
from fluxtrain.other_trainers.option import Fate, Option, Values
from fluxtrain.other_trainers.reading import InertError, NoCounterpartError, Reading


@dataclass(frozen=True)
class Trainer:
    """Another trainer, by the table of its options."""

    name: str
    """How reports call it."""
    options: Mapping[str, Option]
    """What becomes of its options, in the order of reports; a later row wins over an earlier one's field."""
    base: Callable[[Reading], Values]
    """Returns the preset and what else follows from no single option."""
    prepare: Callable[[Reading], Mapping[str, object]] = lambda reading: reading.given
    """Returns the options with lists of settings taken apart: an option for each."""

    @property
    def defaults(self) -> Mapping[str, object]:
        """Return the values of options that are not given."""
        return {n: row.default for n, row in self.options.items() if row.default is not None}


@dataclass(frozen=True)
class Line:
    """What became of one option."""

    option: str
    value: object
    """Its value as given, or by default; None: one that is never shown."""
    is_given: bool
    values: Values = field(default_factory=dict)
    """Values of fields of ``spec.run``, if it was written."""
    note: str = ""


@dataclass(frozen=True)
class Imported:
    """The values of a run, and what became of every option."""

    trainer: str
    run: Mapping[str, Any]
    """``spec.run``: a preset and the fields that were written."""
    config: RunConfig
    """What ``run`` resolves to."""
    lines: Mapping[Fate, list[Line]]
    prompts: tuple[str, ...] = ()
    """Lines of the file of prompts that ``run`` names, if one was asked for."""


def import_options(trainer: Trainer, reading: Reading, overrides: Mapping[str, Any]) -> Imported:
    """Return ``spec.run`` for the options of ``reading``; ``overrides``, fields of ours, win over them.

    Raises ConfigError with the options whose values are wrong: there, or in the field that they become.
    """
    reading.defaults, reading.overrides = trainer.defaults, overrides
    reading.given = trainer.prepare(reading)
    lines: dict[Fate, list[Line]] = {fate: [] for fate in Fate}
    errors = []
    for name, row in trainer.options.items():
        if not reading.has(name):
            continue
        try:
            fate, line = _line(reading, name, row)
        except ConfigError as error:
            errors.append(error)
        else:
            if line.is_given or fate not in (Fate.AUTOMATIC, Fate.INERT):
                lines[fate].append(line)
    errors += _misplaced(trainer, reading)
    for name in reading.given.keys() - trainer.options.keys():
        hint = did_you_mean(name, trainer.options) if len(name) < 80 else ""
        hint = hint if hint.startswith("; did") else ""
        shown = None if _SECRET.search(name) else reading.value(name)
        line = Line(name, shown, True, note=f"no option that is known here{hint}")
        lines[Fate.UNKNOWN].append(line)
    lines[Fate.UNKNOWN].sort(key=lambda line: line.option)
    if errors:
        raise join_errors(errors)
    run = merge(_nested(trainer.base(reading)), {})
    for line in lines[Fate.WRITTEN]:
        run = merge(run, _nested(line.values))
    sources = {
        f"spec.run.{path}": line
        for line in lines[Fate.WRITTEN]
        for path in line.values
        if value_at(overrides, path) is None
    }
    run = merge(run, overrides)
    return Imported(trainer.name, run, _resolved(run, sources), lines, tuple(reading.prompts))


def _misplaced(trainer: Trainer, reading: Reading) -> Iterator[ConfigError]:
    """Yield the error for each mapping that is given for an option, and each value for a mapping."""
    sections = {name.rpartition(".")[0] for name in trainer.options}
    for name in reading.given.keys() - trainer.options.keys():
        above, _, below = name.rpartition(".")
        value = reading.given[name]
        if above in trainer.options and above not in reading.given:
            yield ConfigError(above, {below: value}, "must not be a mapping")
        if name in sections and value != {}:
            yield ConfigError(name, value, "must be a mapping of options")


def _line(reading: Reading, name: str, row: Option) -> tuple[Fate, Line]:
    """Return what becomes of the option ``name``."""
    value, is_given = reading.value(name), name in reading.given
    shown = None if row.is_secret or _SECRET.search(name) else value
    if row.fate is Fate.MISSING and _is_off(value, row.off):
        return Fate.AUTOMATIC, Line(name, shown, is_given, note="off here too")
    if row.convert is None:
        return row.fate, Line(name, shown, is_given, note=row.note)
    try:
        values = row.convert(reading, name)
    except InertError as error:
        return Fate.INERT, Line(name, shown, is_given, note=str(error))
    except NoCounterpartError as error:
        return Fate.MISSING, Line(name, shown, is_given, note=str(error))
    note = reading.notes.get(name, row.note)
    if not values:
        return Fate.AUTOMATIC, Line(name, shown, is_given, note=note)
    return Fate.WRITTEN, Line(name, shown, is_given, values, note)


_SECRET = re.compile(r"(?i)(?:token|secret|password|passwd|api_?key|webhook\w*)$")
"""In the names of options whose values are never shown, known or not."""


def _is_off(value: object, off: tuple[object, ...]) -> bool:
    """Return whether ``value`` asks for nothing: empty, or one of ``off``, of which 1 is not true."""
    word = value.lower() if isinstance(value, str) else value
    return word in ("false", "none", [], {}) or (value is not True and value in off)


def _nested(values: Values) -> dict[str, Any]:
    """Return ``values``, by paths with dots, as nested mappings."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, last = path.split(".")
        below = nested
        for section in sections:
            below = below.setdefault(section, {})
        below[last] = value
    return nested


def _resolved(run: Mapping[str, Any], sources: Mapping[str, Line]) -> RunConfig:
    """Return what ``run`` resolves to; errors name the one of ``sources`` that a wrong field came from."""
    try:
        return resolve(run)
    except ConfigError as error:
        found = error.errors if isinstance(error, JoinedConfigError) else [error]
        raise join_errors(_with_sources(found, sources)) from None


def _with_sources(errors: list[ConfigError], sources: Mapping[str, Line]) -> Iterator[ConfigError]:
    for error in errors:
        line = sources.get(error.path)
        if line is None:
            yield error
        else:
            path = error.path.removeprefix("spec.run.")
            yield ConfigError(line.option, line.value, f"{path} {error.allowed}")
