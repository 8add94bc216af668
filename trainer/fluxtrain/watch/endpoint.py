"""What a process is watched by: /metrics and /progress, and its last words."""

from __future__ import annotations

import time
from contextlib import ExitStack

from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.launch import Places
from fluxtrain.watch.last_words import leave
from fluxtrain.watch.metrics import Metrics, Progress
from fluxtrain.watch.server import serve


class Endpoint:
    """The metrics and the progress of a process; served once it is opened."""

    def __init__(self, config: RunConfig, places: Places) -> None:
        """Prepare to serve where ``config`` and ``places`` say."""
        self.metrics, self.progress = Metrics(), Progress()
        self._port, self._address = config.logging.metrics_port, places.metrics_address

    def open(self, stack: ExitStack) -> None:
        """Serve until ``stack`` is closed, which leaves the last words for the agent."""
        stack.callback(leave, self.progress)
        stop = serve(self.metrics, self.progress, self._address, self._port)
        if stop is not None:
            stack.callback(stop)

    def alive(self, **values: object) -> None:
        """Note that something was done, with its ``values``: a watcher would else think that it hangs."""
        now = time.time()
        self.metrics.last_progress.set(now)
        self.progress.stepped(now, **values)
