"""Optimizers of other trainers: which of ours is the same, and the settings that they have by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fluxtrain.other_trainers import common
from fluxtrain.other_trainers.option import Convert, Values
from fluxtrain.other_trainers.reading import NoCounterpartError, Reading

_ADAMW: Values = {
    "optim.weight_decay": 0.01,
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "optim.epsilon": 1e-8,
}
_LION: Values = {"optim.weight_decay": 0.0, "optim.beta1": 0.9, "optim.beta2": 0.99}
_UNDECAYED: Values = {**_ADAMW, "optim.weight_decay": 0.0}
DEFAULTS: Mapping[str, Values] = {
    "adamw": _ADAMW,
    "adamw_8bit": _ADAMW,
    "lion": _LION,
    "prodigy": _UNDECAYED,
    "adafactor": {"optim.weight_decay": 0.0},
    "schedule_free_adamw": _UNDECAYED,
}
"""Settings that the optimizers' packages have, by our names."""
FIELDS = ("optim.name", *_ADAMW)
"""The fields that the choice of an optimizer sets."""


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of one trainer."""

    option: str
    """The option that names one."""
    known: Mapping[str, str]
    """Ours by the trainer's names, in small letters."""
    over: Values = field(default_factory=dict)
    """Settings that the trainer has instead of the packages'."""
    refuse: Callable[[Reading, str], str] = lambda reading, name: ""
    """Returns why ours, by its name, is not the same beside other options; empty: it is."""

    def ours(self, reading: Reading) -> str | None:
        """Return the name of our optimizer; None if there is no counterpart."""
        name = self.known.get(reading.word(self.option))
        return None if name is None or self.refuse(reading, name) else name

    def convert(self, reading: Reading, option: str) -> Values:
        """Return the optimizer with its settings."""
        word = reading.word(option)
        name = self.known.get(word)
        why = self.refuse(reading, name) if name else "has no counterpart"
        if name is None or why:
            raise NoCounterpartError(f"{why}; here adamw, with the preset's learning rate")
        if word.replace("_", "") != name.replace("_", ""):
            states = "of 8 bits" if name == "adamw_8bit" else "float32"
            reading.notes[option] = f"the same update; its states are {states} here"
        defaults = DEFAULTS[name]
        over = {path: value for path, value in self.over.items() if path in defaults}
        return {"optim.name": name, **defaults, **over}

    def setting(
        self, path: str, *only: str, read: Callable[[Reading, str], object] = Reading.number
    ) -> Convert:
        """Return the conversion of a setting of the optimizer in use, of the optimizers ``only`` if any."""

        def convert(reading: Reading, option: str) -> Values:
            self._require(reading, option, only)
            return {path: read(reading, option)}

        return convert

    def betas(self, reading: Reading, option: str) -> Values:
        """Return the decay rates, two numbers."""
        self._require(reading, option, ("adamw", "lion", "prodigy", "schedule_free_adamw"))
        first, second = common.two_numbers(reading, option)
        return {"optim.beta1": first, "optim.beta2": second}

    def _require(self, reading: Reading, option: str, only: tuple[str, ...]) -> None:
        """Raise NoCounterpartError unless the optimizer in use is here, and one of ``only`` if any."""
        name = self.ours(reading)
        if name is None:
            raise NoCounterpartError(f"is a setting of {reading.text(self.option)}")
        if only and name.removesuffix("_8bit") not in only:
            raise NoCounterpartError(f"{reading.text(self.option)} has no such setting here")


def ema(flag: str) -> Convert:
    """Return the conversion of the decay of an average of the weights, which ``flag`` switches on."""

    def convert(reading: Reading, option: str) -> Values:
        decay = reading.number(option)
        if reading.is_on(flag):
            return {"optim.ema_decay": decay}
        reading.notes[option] = f"only with {flag}"
        return {}

    return convert
