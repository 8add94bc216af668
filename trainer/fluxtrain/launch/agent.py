"""The process of a training pod: torchrun's agent, restarted if the rendezvous store is lost.

Torchrun's agent exits if the store does; kubelet would restart it, but with a growing back-off. The loop
ends with the exit code of the trainers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError

from fluxtrain.contract.launch import ENV_FATAL_ERROR, ENV_GPUS, ENV_TERMINATION_MESSAGE, RunPaths
from fluxtrain.errors import EXIT_STOPPED, FluxtrainError
from fluxtrain.gpus import require_gpus
from fluxtrain.launch import torchrun
from fluxtrain.launch.rendezvous import BACKEND, register_backend, stop_event, wait_for_store
from fluxtrain.report.termination_message import write_termination_log
from fluxtrain.signals import handled

_ENDPOINT = "PET_RDZV_ENDPOINT"
_RETRY_SECONDS = 1.0
"""Between two attempts: a rendezvous that a failed agent closed stays closed until the operator acts."""


class FatalTrainerError(Exception):
    """A trainer of this node failed with an error that a restart in place cannot fix."""

    def __init__(self, code: int, message: str) -> None:
        """Take the trainer's exit ``code`` and ``message``."""
        self.code, self.message = code, message
        super().__init__(message)


def main(termination_log: Path) -> int:
    """Train on this node with torchrun's ``PET_*`` environment; return the exit code.

    Prints the message of a failure, and writes it with the progress of rank 0, if that ran here, to
    ``termination_log``.
    """
    with tempfile.TemporaryDirectory() as folder:
        progress_file = Path(folder) / "progress.json"
        os.environ[ENV_TERMINATION_MESSAGE] = str(progress_file)
        try:
            with _raise_on_sigterm(), _raise_on_fatal_error(Path(folder) / "fatal_error.json"):
                require_gpus(int(os.environ.get(ENV_GPUS, "0")), os.environ)
                code, message = _run_until_done()
        except FluxtrainError as error:
            code, message = error.exit_code, str(error)
        except FatalTrainerError as error:
            code, message = error.code, error.message
        except SignalException as error:
            code, message = EXIT_STOPPED, f"stopped by {error.sigval.name} during the rendezvous"
        write_termination_log(progress_file, message, termination_log)
    if message:
        print(f"fluxtrain: {message}", file=sys.stderr, flush=True)
    return code


def _run_until_done() -> tuple[int, str]:
    paths = RunPaths.from_environment(os.environ)
    register_backend()
    while True:
        with stop_event() as stop:
            if not wait_for_store(os.environ[_ENDPOINT], stop):
                return EXIT_STOPPED, "stopped while waiting for the rendezvous store"
        try:
            return torchrun.launch([f"--rdzv-backend={BACKEND}"], paths)
        except (
            RendezvousError,
            DistError,
        ) as error:  # the store is lost, or a node was lost while joining
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"rendezvous lost ({reason}); joining again", file=sys.stderr, flush=True)
            time.sleep(_RETRY_SECONDS)


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Raise SignalException on SIGTERM, before torchrun installs its own handler.

    The agent is process 1 of its container: the kernel ignores a signal without a handler, so the pod would
    run until the end of its grace period.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        sigval = signal.Signals(signum)
        raise SignalException(f"received {sigval.name}", sigval=sigval)

    with handled(handle, signal.SIGTERM):
        yield


@contextmanager
def _raise_on_fatal_error(path: Path) -> Iterator[None]:
    """Raise FatalTrainerError if a trainer reports one: torchrun would restart it, whatever its exit code."""
    os.environ[ENV_FATAL_ERROR] = str(path)

    def handle(signum: int, frame: FrameType | None) -> None:
        error = json.loads(path.read_text())
        raise FatalTrainerError(error["code"], error["message"])

    with handled(handle, signal.SIGUSR1):
        yield
