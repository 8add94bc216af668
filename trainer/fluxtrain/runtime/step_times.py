"""What one rank spends its steps on by itself: data, forward passes, backward passes, the optimizer.

All ranks end a step together, so the length of a step does not tell which of them is slow: the others wait
for it in collectives, and the slowest waits least. What counts is the time between collectives:

* a forward pass without the waits where FSDP2 gathers the weights of a block;
* a backward pass without such waits, and without what comes between the gradients of a block's inputs and
  the next block, where FSDP2 reduces gradients. What follows the last block is not counted, as ranks wait
  there too;
* the optimizer step, which begins when the norm of the gradients of all ranks is known.

A slow network makes a collective longer on all ranks alike, so none of these times shows it.

On a GPU these are times of the device: an event is recorded where a span begins and ends, in the stream that
computes. So a wait of the host is not counted if the device had work meanwhile, and nothing is synchronised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Mark = float | torch.cuda.Event
"""A point in time: seconds of the host's clock, or an event in a stream of the device."""


@dataclass(frozen=True)
class RankTimes:
    """The own time of one rank per step, in seconds."""

    compute: float
    """Computing the forward passes of one step."""
    data: float
    """Waiting for data, on average."""
    backward: float = 0.0
    """Computing the backward passes of one step."""
    optimizer: float = 0.0


class StepTimes:
    """The own time of this rank in its steps since `take` was last called."""

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], Mark] = (
            record_event if device.type == "cuda" else time.perf_counter
        )
        self._data, self._forward, self._gather = Spans(), Spans(), Spans()
        self._backward, self._optimizer = Spans(), Spans()
        self._num_steps = 0
        self._in_forward = self._in_backward = False
        self.is_measured = False
        """Whether more than the wait for data is measured in this step."""
        self._gather_began: Mark | None = None
        self._computes_from: Mark | None = None
        self._computes_until: Mark | None = None

    def begin_step(self, is_measured: bool) -> None:
        """Begin a step; all of it is measured if ``is_measured``, which is one step until `take`."""
        self._num_steps += 1
        self.is_measured = is_measured
        self._data.add_up()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        begin = self._mark()
        yield
        self._data.add(begin, self._mark())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count the time inside as computing, but for waits between `gather_begins` and `gather_ends`."""
        if not self.is_measured:
            yield
            return
        self._in_forward, begin = True, self._mark()
        yield
        self._in_forward = False
        self._forward.add(begin, self._mark())

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count the time inside as computing gradients, but for waits, as the module says."""
        if not self.is_measured:
            yield
            return
        self._in_backward, self._computes_from = True, self._mark()
        yield
        self._pause()
        self._in_backward = False

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Count the time inside as the optimizer step."""
        if not self.is_measured:
            yield
            return
        begin = self._mark()
        yield
        self._optimizer.add(begin, self._mark())

    def gather_begins(self) -> None:
        """Begin a wait for weights of other ranks."""
        if self._in_forward:
            self._gather_began = self._mark()
        elif self._in_backward:
            self._pause()

    def gather_ends(self) -> None:
        """End a wait for weights of other ranks."""
        if self._in_forward and self._gather_began is not None:
            self._gather.add(self._gather_began, self._mark())
        elif self._in_backward:
            self._computes_from = self._mark()

    def gradient_ends(self) -> None:
        """The gradient of one of a block's inputs is known; after the last one ranks wait for each other."""
        if self._in_backward:
            self._computes_until = self._mark()

    def _pause(self) -> None:
        """Stop counting a backward pass, from when the gradients of a block's inputs were known."""
        if self._computes_from is not None:
            until = self._mark() if self._computes_until is None else self._computes_until
            self._backward.add(self._computes_from, until)
        self._computes_from = self._computes_until = None

    def take(self) -> RankTimes:
        """Return the times of the steps so far, and start anew.

        On a GPU call it where the host has waited for the device anyway.
        """
        compute = self._forward.take() - self._gather.take()
        data = self._data.take() / max(1, self._num_steps)
        self._num_steps = 0
        return RankTimes(max(0.0, compute), data, self._backward.take(), self._optimizer.take())


class Spans:
    """The total length of spans of time."""

    def __init__(self) -> None:
        self._seconds, self._pending = 0.0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def add(self, begin: Mark, end: Mark) -> None:
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._pending.append((begin, end))
        elif isinstance(begin, float) and isinstance(end, float):
            self._seconds += end - begin

    def add_up(self) -> None:
        """Add up the spans that the device has passed, so that only a few events are kept."""
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._pending.pop(0)
            self._seconds += begin.elapsed_time(end) / 1000

    def take(self) -> float:
        """Wait for the device, return the total in seconds, and start anew from 0."""
        if self._pending:
            self._pending[-1][1].synchronize()
        return self.take_passed()

    def take_passed(self) -> float:
        """Return the total of the spans that the device has passed, and start anew from 0."""
        self.add_up()
        total, self._seconds = self._seconds, 0.0
        return total


def record_event() -> torch.cuda.Event:
    """Return an event at this point of the GPU's present stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
