"""What a task other than training is watched by: /metrics and /progress, and its last words."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.launch import Places
from fluxtrain.watch.last_words import leave
from fluxtrain.watch.metrics import Metrics, Progress
from fluxtrain.watch.server import serve


class Endpoint:
    """The metrics and the progress of a process, served while the context is open."""

    def __init__(self, config: RunConfig, places: Places) -> None:
        """Prepare to serve where ``config`` and ``places`` say."""
        self.metrics, self.progress = Metrics(), Progress()
        self._port, self._address = config.logging.metrics_port, places.metrics_address
        self._closing = ExitStack()

    def __enter__(self) -> Endpoint:
        """Serve from here on."""
        self._closing.callback(leave, self.progress)
        stop = serve(self.metrics, self.progress, self._address, self._port)
        if stop is not None:
            self._closing.callback(stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop serving, and leave the last words for the agent."""
        self._closing.close()

    def alive(self, now: float) -> None:
        """Note that something was done: a watcher would else think that this process hangs."""
        self.metrics.last_progress.set(now)
        self.progress.stepped(now)
