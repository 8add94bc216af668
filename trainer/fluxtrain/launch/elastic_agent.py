"""torchrun's agent of one node, which knows of the other nodes by `Peers`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException

from fluxtrain.contract.launch import ENV_GENERATION
from fluxtrain.errors import EXIT_STOPPED
from fluxtrain.launch.restart_cause import num_out_of_memory_kills, restart_cause
from fluxtrain.launch.trainer_progress import TrainerProgress
from fluxtrain.report.node_progress import RankProgress

_RESTART_SECONDS = 30
"""From SIGTERM to SIGKILL of trainers that start again: torchrun's default."""
_EXIT_BARRIER_SECONDS = 10
"""How long an agent waits for the other agents after its trainers succeeded; usually milliseconds.

Trainers end together (see `process_group`), so an agent that does not arrive is lost. Torchrun's default
is five minutes."""


@dataclass(frozen=True)
class Peers:
    """What an agent asks about the other nodes of a run, and tells them; by default there are none."""

    stop_seconds: Callable[[], int | None] = lambda: None
    """Returns the seconds from SIGTERM to SIGKILL of the trainers; torchrun's if it returns None."""
    were_interrupted: Callable[[], bool] = lambda: False
    """Returns whether the generation before lost a node, or was ended by the operator."""
    on_progress: Callable[[Sequence[RankProgress]], None] = lambda ranks: None
    """Called once a second with the progress of this node's trainers."""
    on_failure: Callable[[str], None] = lambda cause: None
    """Called with the cause when trainers failed that will be started again; not if they were stopped."""
    generation: Callable[[], int] = lambda: 0
    """Returns the generation that the trainers run in; 0 on a single machine."""


ALONE = Peers()
"""Of a run on a single machine."""


class ElasticAgent(LocalElasticAgent):
    """torchrun's agent; trainers whose peers are lost end within seconds.

    That uses no restart, nor do trainers that a peer's agent stopped: all ranks stop together.
    """

    def __init__(
        self, *arguments: Any, peers: Peers, progress: TrainerProgress, **options: Any
    ) -> None:
        """Take what torchrun's agent takes; ``progress`` prints the stacks of stalled trainers."""
        options["exit_barrier_timeout"] = _EXIT_BARRIER_SECONDS
        super().__init__(*arguments, **options)
        self._peers, self._progress = peers, progress
        self._has_failed = False  # the trainers before the present rendezvous
        self._were_stopped = False
        self._result = RunResult(WorkerState.INIT)
        self._num_kills = 0  # out of memory, before the present trainers started

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _RESTART_SECONDS
    ) -> None:
        if isinstance(sys.exception(), SignalException):
            # Slurm signals every process of a step, and some twice: the end must not be interrupted
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if death_sig != signal.SIGKILL:
            self._progress.print_if_stalled()
        super()._shutdown(death_sig, timeout)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        seconds = self._peers.stop_seconds()
        if seconds is None:
            super()._stop_workers(worker_group)
        elif seconds == 0:
            self._shutdown(signal.SIGKILL)
        else:
            self._shutdown(signal.SIGTERM, seconds)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._result = super()._monitor_workers(worker_group)
        return self._result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._has_failed = worker_group.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        codes = [failure.exitcode for failure in self._result.failures.values()]
        self._were_stopped = bool(codes) and set(codes) == {EXIT_STOPPED}
        if self._has_failed and not self._were_stopped:
            self._peers.on_failure(
                restart_cause(codes, num_out_of_memory_kills() > self._num_kills)
            )
        super()._restart_workers(worker_group)
        self._has_failed = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the trainers, and keep their number of restarts for the agent's termination message."""
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        self._num_kills = num_out_of_memory_kills()
        os.environ[ENV_GENERATION] = str(self._peers.generation())
        ids: dict[int, Any] = super()._start_workers(worker_group)
        return ids

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next generation; trainers of one that was interrupted use no restart if they failed."""
        super()._rendezvous(worker_group)
        if self._has_failed and (self._were_stopped or self._peers.were_interrupted()):
            self._remaining_restarts += 1
