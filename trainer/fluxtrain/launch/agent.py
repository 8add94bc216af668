"""The process of a training pod: torchrun's agent, and heartbeats to the job's rendezvous service.

Torchrun's agent exits if a generation's store is lost while ranks are exchanged; the loop joins again. It
ends with the exit code of the trainers.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from uuid import uuid4

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from fluxtrain.contract.process import (
    ENV_GPUS,
    ENV_MLPERF_STDOUT,
    ENV_NODE_NAME,
    ENV_POD_UID,
    ENV_RENDEZVOUS_KEY,
    ENV_STARTED,
    ENV_TERMINATION_MESSAGE,
    RunPaths,
    agent_name,
)
from fluxtrain.errors import EXIT_STOPPED, FluxtrainError
from fluxtrain.launch import torchrun
from fluxtrain.launch.environment import emptied, prepare_for_gpus, process_start
from fluxtrain.launch.rendezvous_handler import BACKEND, MembershipRendezvous, register
from fluxtrain.launch.torchrun import FatalTrainerError, Peers, raise_on_fatal_error
from fluxtrain.rendezvous.client import Client
from fluxtrain.rendezvous.messages import Heartbeat, Key, rank_order_key
from fluxtrain.report.progress import write_termination_log
from fluxtrain.runtime.devices import require_gpus
from fluxtrain.runtime.progress import handled

_ENDPOINT, _RUN_ID = "PET_RDZV_ENDPOINT", "PET_RDZV_ID"


def main(termination_log: Path) -> int:
    """Train on this node with torchrun's ``PET_*`` environment; return the exit code.

    Prints the message of a failure, and writes it with the progress of rank 0, if that ran here, to
    ``termination_log``.
    """
    os.environ.setdefault(ENV_STARTED, repr(process_start()))
    os.environ[ENV_MLPERF_STDOUT] = "1"
    with tempfile.TemporaryDirectory() as folder:
        progress_file = Path(folder) / "progress.json"
        os.environ[ENV_TERMINATION_MESSAGE] = str(progress_file)
        try:
            with raise_on_sigterm(), raise_on_fatal_error(Path(folder) / "fatal_error.json"):
                require_gpus(int(os.environ.get(ENV_GPUS, "0")), os.environ)
                prepare_for_gpus(os.environ)
                code, message = _run_until_done()
        except FluxtrainError as error:
            code, message = error.exit_code, str(error)
        except FatalTrainerError as error:
            code, message = error.code, error.message
        except SignalException as error:
            code, message = EXIT_STOPPED, f"stopped by {error.sigval.name} during the rendezvous"
        restarts = RunPaths.from_environment(os.environ).process_restarts
        write_termination_log(progress_file, message, restarts, termination_log)
    if message:
        print(f"fluxtrain: {message}", file=sys.stderr, flush=True)
    return code


def _run_until_done() -> tuple[int, str]:
    paths = RunPaths.from_environment(os.environ)
    with emptied(paths.snapshots), joined(_rendezvous(paths.metrics_address)) as peers:
        return launch_until_done([f"--rdzv-backend={BACKEND}"], paths, peers, ends_if_closed=False)


def launch_until_done(
    arguments: list[str], paths: RunPaths, peers: Peers, *, ends_if_closed: bool
) -> tuple[int, str]:
    """Run the trainers, and join again if a node is lost while this one joins.

    A closed attempt is joined again too, or raises RendezvousClosedError if ``ends_if_closed``.
    """
    while True:
        try:
            return torchrun.launch(arguments, paths, peers)
        except (RendezvousError, DistError) as error:
            if ends_if_closed and isinstance(error, RendezvousClosedError):
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"rendezvous lost ({reason}); joining again", file=sys.stderr, flush=True)
            time.sleep(_RETRY_SECONDS)


def _rendezvous(address: str) -> MembershipRendezvous:
    """Return the job's rendezvous; ``address`` is that of this node."""
    host, _, port = os.environ[_ENDPOINT].rpartition(":")
    file = Path(os.environ[ENV_RENDEZVOUS_KEY])
    key = Key(file.read_bytes(), file)
    hostname = socket.gethostname()
    agent = agent_name(os.environ.get(ENV_POD_UID, hostname), f"{os.getpid()}-{uuid4().hex[:12]}")
    _, _, attempt = os.environ[_RUN_ID].rpartition("-")
    node = rank_order_key(os.environ, hostname)
    beat = Heartbeat(
        sequence=0,
        attempt=int(attempt),
        agent=agent,
        node=node,
        node_name=os.environ.get(ENV_NODE_NAME, ""),
    )
    return MembershipRendezvous(Client(host, int(port), key, beat), agent, address)


_RETRY_SECONDS = 1.0
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
