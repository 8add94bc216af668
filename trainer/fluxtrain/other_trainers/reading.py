"""Reading: the options of one file or environment, and their values as the types that they must have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluxtrain.errors import ConfigError

_FLAGS = {"true": True, "false": False}


class NoCounterpartError(Exception):
    """A value of an option is right, but cannot be stated here; the text says why."""


class InertError(NoCounterpartError):
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

    def value(self, name: str) -> object:
        """Return the value of ``name`` as it is; None if there is none."""
        return self.given[name] if name in self.given else self.defaults.get(name)

    def number(self, name: str) -> float:
        """Return the value of ``name`` as a finite number."""
        value = self.value(name)
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

    def whole(self, name: str) -> int:
        """Return the value of ``name`` as a whole number that is not negative."""
        return self._at_least(0, name)

    def positive(self, name: str) -> int:
        """Return the value of ``name`` as a whole number above 0."""
        return self._at_least(1, name)

    def flag(self, name: str) -> bool:
        """Return the value of ``name`` as true or false."""
        value = self.value(name)
        value = _FLAGS.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def is_on(self, name: str) -> bool:
        """Return whether the flag ``name`` is given and true."""
        return self.has(name) and self.flag(name)

    def text(self, name: str) -> str:
        """Return the value of ``name`` as text; a number is one too."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
            raise self.wrong(name, "must be text")
        return str(value)

    def word(self, name: str) -> str:
        """Return the value of ``name`` as text in lower case."""
        return self.text(name).lower()

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

    def _at_least(self, least: int, name: str) -> int:
        number = self.number(name)
        if number < least or not number.is_integer():
            raise self.wrong(name, f"must be a whole number, {least} or more")
        return int(number)

    def wrong(self, name: str, allowed: str) -> ConfigError:
        """Return the error for the value of ``name``."""
        return ConfigError(name, self.value(name), allowed)
