"""What a process is watched by: /metrics and /progress, and its last words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import Phase
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.report.metrics import Metrics, Progress
from fluxtrain.report.server import serve
from fluxtrain.report.termination_message import leave


class Endpoint:
    """The metrics and the progress of a process; served once it is opened."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World) -> None:
        """Prepare to serve where ``config`` and ``paths`` say, as this rank of ``world``."""
        self.metrics, self.progress = Metrics(), Progress()
        self._port, self._address = config.logging.metrics_port, paths.metrics_address
        self._leaving = world.leaving
        self.progress.update(
            rank=world.rank,
            numNodes=world.num_nodes,
            processRestarts=paths.process_restarts,
            aliveTime=time.time(),
        )

    def open(self, stack: ExitStack) -> None:
        """Serve until all ranks leave; when ``stack`` is closed the last words are left for the agent."""
        stop = serve(self.metrics, self.progress, self._address, self._port)
        if stop is not None:
            self._leaving.callback(stop)
        stack.callback(leave, self.progress)

    def alive(self) -> None:
        """Note a sign of progress: a watcher would else think that this process hangs."""
        self.progress.update(aliveTime=time.time())

    def stepped(self, **values: object) -> None:
        """Note a step of the task, with its ``values``."""
        now = time.time()
        self.metrics.last_progress.set(now)
        self.progress.stepped(now, **values)

    def enter(self, phase: Phase) -> None:
        """Note that ``phase`` begins."""
        self.progress.enter(phase, time.time())

    @contextmanager
    def inside(self, phase: Phase) -> Iterator[None]:
        """Be in ``phase``, then in the one before again; an error leaves the phase that it came in."""
        before = self.progress.read()["phase"]
        self.enter(phase)
        yield
        self.enter(before)
