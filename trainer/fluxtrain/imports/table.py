"""Go through a trainer's table: the values of ``spec.run``, and what became of every option."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from fluxtrain.contract.model_base import did_you_mean, join_errors
from fluxtrain.contract.resource.document import parse_yaml, read_text
from fluxtrain.contract.run.config import RunConfig, value_at
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError
from fluxtrain.runtime.files import parse_toml

_FLAGS = {"true": True, "false": False}


class NoCounterpartError(Exception):
    """A value of an option is right, but cannot be stated here; the text says why."""


class IgnoredError(NoCounterpartError):
    """A value of an option has no effect in the other trainer beside the other options."""


@dataclass
class Reading:
    """The options that are given, with the defaults of the trainer they are for."""

    given: Mapping[str, object]
    """Values by option; texts may stand for numbers and flags, as on a command line."""
    defaults: Mapping[str, object]
    """Values with which the trainer runs if the option is not given."""
    processes: int = 1
    """Processes, one for each GPU, that the trainer ran with."""
    epoch_samples: int | None = None
    """Samples of an epoch: images times repeats; None: unknown."""
    prompt_file: str | None = None
    """Name of the file for prompts that have options; None: there is none."""
    prompts: list[str] = field(default_factory=list)
    """Lines for the file of prompts, which conversions add."""
    notes: dict[str, str] = field(default_factory=dict)
    """Remarks on single values, by option, which conversions add."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ours that win over the options."""

    def has(self, name: str) -> bool:
        """Return whether ``name`` has a value, given or by default."""
        return self.value(name) is not None

    def value(self, name: str, default: object = None) -> object:
        """Return the value of ``name`` as it is, ``default`` if there is none; those below do so too."""
        value = self.given.get(name, self.defaults.get(name))
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        """Return the value of ``name`` as a finite number."""
        value = self.value(name, default)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "must be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(name, "must be a finite number")
        return number

    def whole(self, name: str, default: int | None = None) -> int:
        """Return the value of ``name`` as a whole number that is not negative."""
        return self._at_least(0, name, default)

    def positive(self, name: str, default: int | None = None) -> int:
        """Return the value of ``name`` as a whole number above 0."""
        return self._at_least(1, name, default)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return the value of ``name`` as true or false."""
        value = self.value(name, default)
        value = _FLAGS.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def is_on(self, name: str) -> bool:
        """Return whether the flag ``name`` is given and true."""
        return self.flag(name, False)

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of ``name`` as text; a number is one too."""
        value = self.value(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
            raise self.wrong(name, "must be text")
        return str(value)

    def word(self, name: str, default: str | None = None) -> str:
        """Return the value of ``name`` as text in lower case."""
        return self.text(name, default).lower()

    def choice(self, name: str, *words: str) -> str:
        """Return the value of ``name``, one of ``words`` in any case."""
        word = self.word(name)
        if word not in words:
            raise self.wrong(name, f"must be {', '.join(words[:-1])} or {words[-1]}")
        return word

    def texts(self, name: str) -> list[str]:
        """Return the value of ``name`` as a list of texts."""
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "must be a list of texts")
        return value

    def pairs(self, name: str) -> dict[str, str]:
        """Return the value of ``name``, a list of texts such as "weight_decay=0.1", as a mapping."""
        if not self.has(name):
            return {}
        found = {}
        for item in self.texts(name):
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise self.wrong(name, f"must be a list of NAME=VALUE, not {item[:40]!r}")
            found[key.strip()] = value.strip()
        return found

    def among(self, name: str, known: Mapping[str, str], why: str) -> str:
        """Return what the value of ``name``, in any case, is in ``known``.

        Raises NoCounterpartError with ``why`` for others.
        """
        word = self.word(name)
        if word not in known:
            raise NoCounterpartError(why)
        return known[word]

    def _at_least(self, least: int, name: str, default: int | None) -> int:
        number = self.number(name, default)
        if number < least or not number.is_integer():
            raise self.wrong(name, f"must be a whole number, {least} or more")
        return int(number)

    def noted(self, name: str, note: str, values: Values | None = None) -> Values:
        """Return ``values`` of the option ``name``, none by default, with the remark ``note``."""
        self.notes[name] = note
        return values or {}

    def wrong(self, name: str, allowed: str) -> ConfigError:
        """Return the error for the value of ``name``."""
        return ConfigError(name, self.value(name), allowed)


Values: TypeAlias = Mapping[str, object]
"""Values of fields by their paths below ``spec.run``."""
Convert: TypeAlias = Callable[[Reading, str], Values]
"""Returns what an option, by its name, becomes; raises ConfigError if its value is wrong there, and
NoCounterpartError if it is right, but cannot be stated here."""


class Disposition(Enum):
    """How an option is mapped; the value is the heading in reports."""

    WRITTEN = "written"
    OUTSIDE = "not part of the file"
    AUTOMATIC = "nothing to set"
    IGNORED = "does nothing there either"
    MISSING = "no counterpart"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Option:
    """One option of another trainer."""

    disposition: Disposition
    """How it is mapped; WRITTEN unless ``convert`` finds no counterpart of the value."""
    fields: tuple[str, ...] = ()
    """The fields that it sets, for the documentation."""
    note: str = ""
    """What differs, or the reason of the disposition."""
    convert: Convert | None = None
    """Conversion of the value, with the disposition WRITTEN."""
    default: object = None
    """Value with which the trainer runs if the option is not given, to be converted too; None: none."""
    off: tuple[object, ...] = ()
    """Values with which an option without a counterpart asks for nothing."""
    is_secret: bool = False
    """Whether its value is never shown."""


def to(path: str, read: Callable[[Reading, str], object]) -> Convert:
    """Return the conversion of a value, as ``read``, to that of the field at ``path``."""
    return lambda reading, name: {path: read(reading, name)}


def only_if(applies: Callable[[Reading], bool], why: str, convert: Convert | None) -> Convert:
    """Return ``convert`` of an option that does nothing there, by the reason ``why``, unless ``applies``."""
    assert convert is not None

    def only(reading: Reading, name: str) -> Values:
        if not applies(reading):
            raise IgnoredError(why)
        return convert(reading, name)

    return only


def field_option(
    path: str, read: Callable[[Reading, str], object], default: object = None, note: str = ""
) -> Option:
    """Return the row of an option whose value, as ``read``, is that of the field at ``path``."""
    return fields([path], to(path, read), default, note)


def fields(
    paths: Iterable[str], convert: Convert, default: object = None, note: str = ""
) -> Option:
    """Return the row of an option that ``convert`` turns into values of fields at ``paths``."""
    return Option(Disposition.WRITTEN, tuple(paths), note, convert, default)


def saved(network: str, every: Convert, default: object = None, note: str = "") -> Option:
    """Return the row of the steps between files: of adapters; checkpoints, without options of ``network``."""
    paths = ("adapter_file.every_steps", "checkpoint.every_steps")

    def convert(reading: Reading, name: str) -> Values:
        (steps,) = every(reading, name).values()
        is_adapter = reading.has(network) or any(it.startswith(network) for it in reading.given)
        if is_adapter or not steps:
            return {paths[0]: steps}
        return reading.noted(name, "checkpoint.keep are kept", {paths[1]: steps})

    return fields(paths, convert, default, note)


def set_outside(note: str, is_secret: bool = False) -> Option:
    """Return the row of an option that is stated outside the file."""
    return Option(Disposition.OUTSIDE, note=note, is_secret=is_secret)


def automatic(note: str) -> Option:
    """Return the row of an option that needs no counterpart."""
    return Option(Disposition.AUTOMATIC, note=note)


def ignored(note: str) -> Option:
    """Return the row of an option that the other trainer accepts without an effect on FLUX.1."""
    return Option(Disposition.IGNORED, note=note)


def missing(note: str, *off: object) -> Option:
    """Return the row of an option without a counterpart, of which the values ``off`` ask for nothing."""
    return Option(Disposition.MISSING, note=note, off=(False, *off))


def each(names: str, row: Option) -> dict[str, Option]:
    """Return ``row`` for each of ``names``, which blanks separate."""
    return dict.fromkeys(names.split(), row)


@dataclass(frozen=True)
class Kind:
    """A kind of training without a counterpart, and the option that asks for it."""

    text: str
    """What it is called, as the object of a sentence."""
    option: str
    """Pattern of the whole names of its options."""
    asks: Callable[[Reading, str], bool] = lambda reading, name: is_on(reading.value(name))
    """Returns whether the option, by its name, asks for it."""
    unless: str = ""
    """Field of ours which, if it is given, says what is trained instead; empty: none."""


def is_on(value: object) -> bool:
    """Return whether ``value`` asks for something: a flag, a number, a name or a list of any."""
    return value is not None and not _is_off(value, (False, 0, "", "0", "no", "null"))


def says(pattern: str) -> Callable[[Reading, str], bool]:
    """Return whether an option that asks for something has the ``pattern``, in small letters."""

    def asks(reading: Reading, name: str) -> bool:
        value = reading.value(name)
        return is_on(value) and re.search(pattern, str(value).strip().lower()) is not None

    return asks


_TRAINED = (
    "here FLUX.1 dev and schnell learn pictures from text, and Kontext and Fill from pictures too, by LoRA, "
    "LoKr or all weights"
)


def _other_kinds(trainer: Trainer, reading: Reading) -> list[ConfigError]:
    """Return an error for each option that asks for one of the trainer's other kinds of training."""
    found: dict[str, ConfigError] = {}
    any_kind = re.compile("|".join(f"(?:{kind.option})" for kind in trainer.kinds))
    for name in filter(any_kind.fullmatch, reading.given):
        for kind in trainer.kinds:
            is_stated = kind.unless and value_at(reading.overrides, kind.unless) is not None
            if is_stated or not re.fullmatch(kind.option, name) or not kind.asks(reading, name):
                continue
            step = f"; --{kind.unless}=... says what is trained instead" if kind.unless else ""
            found.setdefault(
                kind.text, reading.wrong(name, f"asks for {kind.text}; {_TRAINED}{step}")
            )
            break
    return list(found.values())


@dataclass(frozen=True)
class Trainer:
    """Another trainer, by the table of its options."""

    name: str
    """How reports call it."""
    options: Mapping[str, Option]
    """Its options, in the order of reports; a later row wins over an earlier one's field."""
    base: Callable[[Reading], Values]
    """Returns the preset and what else follows from no single option."""
    prepare: Callable[[Reading], Mapping[str, object]] = lambda reading: reading.given
    """Returns the options with lists of settings taken apart: an option for each."""
    kinds: tuple[Kind, ...] = ()
    """Other kinds of training, which are refused; of those of one option, the first counts."""

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
    lines: Mapping[Disposition, list[Line]]
    prompts: tuple[str, ...] = ()
    """Lines of the file of prompts that ``run`` names, if one was asked for."""


def import_options(trainer: Trainer, reading: Reading, overrides: Mapping[str, Any]) -> Imported:
    """Return ``spec.run`` for the options of ``reading``; ``overrides``, fields of ours, win over them.

    Raises ConfigError with the options that ask for another kind of training; else with those whose values
    are wrong: there, or in the field that they become.
    """
    reading.defaults, reading.overrides = trainer.defaults, overrides
    reading.given = trainer.prepare(reading)
    if others := _other_kinds(trainer, reading):
        raise join_errors(others)
    lines: dict[Disposition, list[Line]] = {disposition: [] for disposition in Disposition}
    errors = []
    for name, row in trainer.options.items():
        if not reading.has(name):
            continue
        try:
            disposition, line = _line(reading, name, row)
        except ConfigError as error:
            errors.append(error)
        else:
            if line.is_given or disposition not in (Disposition.AUTOMATIC, Disposition.IGNORED):
                lines[disposition].append(line)
    errors += _misplaced(trainer, reading)
    for name in reading.given.keys() - trainer.options.keys():
        hint = did_you_mean(name, trainer.options) if len(name) < 80 else ""
        hint = hint if hint.startswith("; did") else ""
        shown = None if _SECRET.search(name) else reading.value(name)
        line = Line(name, shown, True, note=f"no option that is known here{hint}")
        lines[Disposition.UNKNOWN].append(line)
    lines[Disposition.UNKNOWN].sort(key=lambda line: line.option)
    if errors:
        raise join_errors(errors)
    run = merge(_nested(trainer.base(reading)), {})
    for line in lines[Disposition.WRITTEN]:
        run = merge(run, _nested(line.values))
    sources = {
        f"spec.run.{path}": line
        for line in lines[Disposition.WRITTEN]
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


def _line(reading: Reading, name: str, row: Option) -> tuple[Disposition, Line]:
    value, is_given = reading.value(name), name in reading.given
    shown = None if row.is_secret or _SECRET.search(name) else value
    if row.disposition is Disposition.MISSING and _is_off(value, row.off):
        return Disposition.AUTOMATIC, Line(name, shown, is_given, note="off here too")
    if row.convert is None:
        return row.disposition, Line(name, shown, is_given, note=row.note)
    try:
        values = row.convert(reading, name)
    except IgnoredError as error:
        return Disposition.IGNORED, Line(name, shown, is_given, note=str(error))
    except NoCounterpartError as error:
        return Disposition.MISSING, Line(name, shown, is_given, note=str(error))
    note = reading.notes.get(name, row.note)
    for path, text in values.items():
        is_path = isinstance(text, str) and _OF_WINDOWS.match(text)
        if is_path and value_at(reading.overrides, path) is None:
            here = f"a path of Windows; --{path}=PATH names the one of this machine"
            note = f"{note}; {here}" if note else here
    if not values:
        return Disposition.AUTOMATIC, Line(name, shown, is_given, note=note)
    return Disposition.WRITTEN, Line(name, shown, is_given, values, note)


_SECRET = re.compile(r"(?i)(?:token|secret|password|passwd|api_?key|webhook\w*)$")
"""In the names of options whose values are never shown, known or not."""


_OF_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
"""The start of a path there: a drive or a share."""


def _is_off(value: object, off: tuple[object, ...]) -> bool:
    """Return whether ``value`` asks for nothing: empty, or one of ``off``, of which 1 is not true."""
    word = value.lower() if isinstance(value, str) else value
    return word in ("false", "none", [], {}) or (value is not True and value in off)


def _nested(values: Values) -> dict[str, Any]:
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

    def with_source(error: ConfigError) -> ConfigError:
        if (line := sources.get(error.path)) is None:
            return error
        path = error.path.removeprefix("spec.run.")
        return ConfigError(line.option, line.value, f"{path} {error.allowed}")

    try:
        return resolve(run)
    except ConfigError as error:
        raise changed(error, with_source) from None


def changed(error: ConfigError, change: Callable[[ConfigError], ConfigError]) -> ConfigError:
    """Return ``error``, of which ``change`` is made to each of the errors that it joins."""
    return join_errors(
        map(change, error.errors if isinstance(error, JoinedConfigError) else [error])
    )


_DEEPEST = 32


def read_document(path: Path, others: Sequence[str] = ()) -> object:
    """Return what ``path`` holds, which is small; files with the suffixes ``others`` are read elsewhere.

    Raises ConfigError if it cannot be read, is malformed or too deep.
    """
    readers = {".toml": _toml, ".json": _json, ".yaml": parse_yaml, ".yml": parse_yaml}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise ConfigError(str(path), UNSET, f"must end in one of {', '.join([*readers, *others])}")
    document = read(read_text(path), str(path))
    level = [document]  # without recursion
    for _ in range(_DEEPEST):
        lists = (list(it.values()) if isinstance(it, dict) else it for it in level)
        level = [below for it in lists if isinstance(it, list) for below in it]
    if level:
        raise ConfigError(str(path), UNSET, f"is nested more than {_DEEPEST} levels deep")
    return document


def _toml(text: str, source: str) -> object:
    try:
        return parse_toml(text)
    except ValueError as error:  # TOMLDecodeError is one
        raise ConfigError(source, UNSET, f"invalid TOML: {_reason(error)}") from None


def _json(text: str, source: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        raise ConfigError(source, UNSET, f"invalid JSON: {_reason(error)}") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key[:60]!r}")
        found[key] = value
    return found


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a number of JSON")


def _reason(error: Exception) -> str:
    is_deep = isinstance(error, RecursionError)
    return "nested too deeply" if is_deep else str(error).splitlines()[0][:200]
