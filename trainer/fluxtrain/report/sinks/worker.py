"""The thread of a sink: training neither waits for it nor fails with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from fluxtrain.report.records import Record
from fluxtrain.report.sinks.sink import Sink

OPEN_SECONDS = 10.0
"""How long a start waits at most for a sink: usually a second or two."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits at most, such as for an upload."""

Entry = tuple[int, Record | Path]
"""Training samples, and a record or the file of the sample images there."""


class SinkWorker:
    """Hands entries to a sink, in a thread of its own."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        history: Iterable[Entry],
        report: Callable[[str], object],
    ) -> None:
        """Open the sink, which first gets what it lacks of ``history``, and wait for it, but not for long.

        ``report`` is called with what went wrong.
        """
        self._name, self._open_sink, self._report = name, open_sink, report
        self._history = history
        self._entries = SimpleQueue[Entry | None]()
        self._is_open, self._is_off = Event(), False
        self._thread = Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()
        self._is_open.wait(OPEN_SECONDS)

    def put(self, samples: int, content: Record | Path) -> None:
        """Hand over a record or sample images; returns at once."""
        if not self._is_off:
            self._entries.put((samples, content))

    def close(self) -> None:
        """Wait until the sink has everything, but not for long."""
        self._entries.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._report(f"{self._name}: not done after {CLOSE_SECONDS:.0f} s; the run goes on")

    def _work(self) -> None:
        try:
            sink = self._open_sink()
            self._is_open.set()
            for samples, content in self._history:
                _give(sink, samples, content)
            while (entry := self._entries.get()) is not None:
                _give(sink, *entry)
            sink.close()
        except Exception as error:
            self._is_off = True
            self._report(f"{self._name} gets nothing more: {error}")
        finally:
            self._is_open.set()


def _give(sink: Sink, samples: int, content: Record | Path) -> None:
    if samples <= sink.last:
        return
    if isinstance(content, Path):
        sink.show(samples, content)
    else:
        sink.write(content)
