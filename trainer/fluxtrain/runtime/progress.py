"""What a process reports at /progress: values of the run, its phase, and the time since its last progress."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fluxtrain.contract.process import IMPORT, STEP, Phase

Alive = Callable[[], None]
"""Is called after each sign of progress."""


class Progress:
    """The newest values of /progress, by key, and the time spent in each phase; thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start in phase ``import``; ``now`` is a monotonic clock in seconds."""
        self._now, self._lock = now, threading.Lock()
        self._values: dict[str, Any] = {}
        self._phase: Phase = IMPORT
        self._began = self._progressed = now()
        self._spent: dict[Phase, float] = {}  # in phases that have ended
        self._stepped: float | None = None
        self._num_steps, self._step_seconds = 0, 0.0

    @property
    def phase(self) -> Phase:
        return self._phase

    def update(self, **values: object) -> None:
        """Replace the given values and keep the others."""
        with self._lock:
            self._values = {**self._values, **values}

    def alive(self) -> None:
        """Record progress."""
        with self._lock:
            self._progressed = self._now()

    def enter(self, phase: Phase) -> None:
        """Record that ``phase`` begins; the same phase again is progress in it."""
        with self._lock:
            now = self._progressed = self._now()
            if phase != self._phase:
                self._spent[self._phase] = self._seconds_in(self._phase, now)
                self._phase, self._began = phase, now

    def step_done(self, **values: object) -> None:
        """Record that a step ended, and replace the given values."""
        with self._lock:
            self._progressed = self._stepped = self._now()
            if self._phase == STEP:
                self._num_steps += 1
                self._step_seconds = self._seconds_in(STEP, self._progressed) / self._num_steps
            now = time.time()
            before = {"firstStepTime": now, **self._values}
            self._values = {**before, **values, "lastStepTime": now}

    def read(self) -> dict[str, Any]:
        """Return all values, with the seconds until now."""
        with self._lock:
            now = self._now()
            spent = {**self._spent, self._phase: self._seconds_in(self._phase, now)}
            since_step = None if self._stepped is None else round(now - self._stepped, 3)
            return {
                **self._values,
                "phase": self._phase,
                "secondsInPhase": round(now - self._began, 3),
                "secondsSinceProgress": round(now - self._progressed, 3),
                "phaseSeconds": {phase: round(seconds, 3) for phase, seconds in spent.items()},
                **({} if since_step is None else {"secondsSinceStep": since_step}),
                **({"stepSeconds": round(self._step_seconds, 6)} if self._num_steps else {}),
            }

    def _seconds_in(self, phase: Phase, now: float) -> float:
        present = now - self._began if phase == self._phase else 0.0
        return self._spent.get(phase, 0.0) + present


Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def handled(handler: Handler, *signums: signal.Signals) -> Iterator[None]:
    """Handle ``signums`` with ``handler``; afterwards restore the previous handlers."""
    before = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, previous in before.items():
            signal.signal(signum, previous)


_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def binary(num_bytes: int) -> str:
    """Return ``num_bytes`` in MiB or GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:,.1f} MiB"
    return f"{num_bytes / 2**30:,.2f} GiB"


def counted(count: float, noun: str, plural: str = "") -> str:
    """Return ``count``, a float with four digits, with its ``noun``, in the ``plural`` unless it is 1."""
    shown = f"{count:,}" if isinstance(count, int) else f"{count:.4g}"
    return f"{shown} {noun if count == 1 else plural or f'{noun}s'}"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` of ``names``, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def decimal(number: float, unit: str) -> str:
    """Return ``number`` with four digits and a decimal prefix of ``unit``."""
    power = 0
    while number >= 1000 and power < len(_DECIMAL) - 1:
        number, power = number / 1000, power + 1
    return f"{number:,.4g} {_DECIMAL[power]}{unit}"
