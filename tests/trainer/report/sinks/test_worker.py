"""Training neither waits for a sink nor fails with it; what a sink has already is not given again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from fluxtrain.report import sinks
from fluxtrain.report.records import Record
from fluxtrain.report.sinks import SinkWorker


class ListSink:
    """Keeps what it is given."""

    def __init__(self, last: int = -1, on_write: Callable[[], object] = lambda: None) -> None:
        self.last, self._on_write = last, on_write
        self.got = list[object]()

    def write(self, record: Record) -> None:
        self._on_write()
        self.got.append(record["samples"])

    def show(self, samples: int, image: Path) -> None:
        self.got.append(image.name)

    def close(self) -> None:
        self.got.append("closed")


def record(samples: int) -> tuple[int, Record]:
    return samples, {"samples": samples}


def test_a_sink_gets_what_it_lacks_of_the_history_and_then_what_is_logged() -> None:
    sink, said = ListSink(last=32), list[str]()
    history = [record(16), record(32), (32, Path("a.png")), record(48), (48, Path("b.png"))]
    thread = SinkWorker("a sink", lambda: sink, history, said.append)
    for samples in (64, 80):
        thread.put(*record(samples))
    thread.put(80, Path("c.png"))
    thread.close()
    assert sink.got == [48, "b.png", 64, 80, "c.png", "closed"]
    assert said == []


def test_steps_that_a_crash_repeats_are_not_given_again() -> None:
    """The server of a resumed run has more than the checkpoint."""
    sink = ListSink(last=64)
    thread = SinkWorker("a sink", lambda: sink, [record(16), record(32)], print)
    for samples in (48, 64, 80):
        thread.put(*record(samples))
    thread.close()
    assert sink.got == [80, "closed"]


def fail() -> ListSink:
    raise ValueError("no such team")


def test_a_sink_that_does_not_open_is_reported() -> None:
    said = list[str]()
    thread = SinkWorker("a sink", fail, [], said.append)
    thread.put(*record(1))
    thread.close()
    assert said == ["a sink is no longer updated: no such team"]


def test_a_sink_that_fails_later_is_reported_once() -> None:
    said = list[str]()
    thread = SinkWorker("a sink", lambda: ListSink(on_write=fail), [], said.append)
    for samples in (1, 2, 3):
        thread.put(*record(samples))
    thread.close()
    assert said == ["a sink is no longer updated: no such team"]


def test_nobody_waits_long_for_a_sink_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "OPEN_SECONDS", 0.1)
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.1)
    said, ends = list[str](), Event()

    def hang() -> ListSink:
        ends.wait(30)
        return ListSink()

    begin = time.monotonic()
    thread = SinkWorker("a sink", hang, [], said.append)
    thread.put(*record(1))
    thread.close()
    assert time.monotonic() - begin < 5
    ends.set()
    (text,) = said
    assert text.startswith("a sink: not done after ")
