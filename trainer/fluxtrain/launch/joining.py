"""What agents in pods and on nodes without Kubernetes share: heartbeats, lost rendezvous, SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

from fluxtrain.launch.elastic_agent import Peers
from fluxtrain.launch.rendezvous import MembershipRendezvous, register
from fluxtrain.signals import handled

RETRY_SECONDS = 1.0
"""Between two attempts to join: a rendezvous that another agent closed stays closed until somebody acts."""


@contextmanager
def joined(rendezvous: MembershipRendezvous) -> Iterator[Peers]:
    """Send heartbeats until the end, and report that the agent leaves; yield what the agent asks."""
    register(rendezvous)
    rendezvous.client.start()
    try:
        yield Peers(
            rendezvous.stop_seconds,
            rendezvous.was_interrupted,
            rendezvous.report_progress,
            rendezvous.trainers_failed,
            lambda: rendezvous.generation,
        )
    finally:
        rendezvous.client.stop(leaving=True)


def print_lost(error: Exception) -> None:
    """Print that the rendezvous was lost by ``error`` and is joined again."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    print(f"rendezvous lost ({reason}); joining again", file=sys.stderr, flush=True)


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise SignalException on the first SIGTERM, before torchrun installs its own handler.

    The agent may be process 1 of its container: the kernel ignores a signal without a handler, so the pod
    would run until the end of its grace period.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_IGN)  # the end that has begun must not be interrupted
        sigval = signal.Signals(signum)
        raise SignalException(f"received {sigval.name}", sigval=sigval)

    with handled(handle, signal.SIGTERM):
        yield
