"""Metrics and progress of a process: /metrics, /progress and the termination message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.progress import LOAD, Phase
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.report.gallery.progress_page import progress_page
from fluxtrain.report.metrics import Metrics
from fluxtrain.report.server import serve
from fluxtrain.report.termination_message import write_progress


class Endpoint:
    """The metrics and the progress of a process, served after `start`."""

    def __init__(self, config: RunConfig, paths: RunPaths, world: World) -> None:
        """Create the metrics of this rank of ``world``; the phase load begins."""
        self.metrics, self.progress = Metrics(world.progress), world.progress
        self._port, self._address = config.logging.metrics_port, paths.metrics_address
        self._world_stack = world.exit_stack
        self._title = paths.output.name
        self._page: Callable[[Mapping[str, Any]], str] | None = None
        self.progress.update(
            rank=world.rank,
            numNodes=world.num_nodes,
            processRestarts=paths.process_restarts,
        )
        self.progress.enter(LOAD)

    def start(self, stack: ExitStack) -> None:
        """Serve until all ranks are done; write the progress for the agent when ``stack`` is closed."""
        stop = serve(self.metrics.registry, self.progress, self._address, self._port, self._html)
        if stop is not None:
            self._world_stack.callback(stop)
        stack.callback(write_progress, self.progress)

    def show(self, page: Callable[[Mapping[str, Any]], str]) -> None:
        """Serve at / what ``page`` returns for the values of /progress, from now on."""
        self._page = page

    def _html(self) -> str:
        page = self._page or partial(progress_page, self._title)
        return page(self.progress.read())

    def alive(self) -> None:
        """Record a sign of progress, so that the operator does not report a hang; thread-safe."""
        self.progress.alive()

    def step_done(self, **values: object) -> None:
        """Record a finished step of the task and update ``values``."""
        self.metrics.last_progress.set(time.time())
        self.progress.step_done(**values)

    def set_phase(self, phase: Phase) -> None:
        """Record that ``phase`` begins."""
        self.progress.enter(phase)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Set ``phase`` and afterwards the previous one, which an error does not restore."""
        before = self.progress.phase
        self.set_phase(phase)
        yield
        self.set_phase(before)
