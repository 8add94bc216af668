"""A training pod's process: torchrun's agent in a loop that outlives the loss of the rendezvous store.

Without it every agent dies with the store; kubelet would restart them, but with a growing back-off
(design D4). The trainer's own exit ends the loop with its code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousError

from fluxtrain.contract.launch import ENV_FATAL_ERROR, ENV_GPUS, ENV_TERMINATION_MESSAGE, RunPaths
from fluxtrain.errors import EXIT_STOPPED, FluxtrainError
from fluxtrain.gpus import require_gpus
from fluxtrain.launch import torchrun as runner
from fluxtrain.launch.rendezvous import BACKEND, register, stopping, wait_for_store
from fluxtrain.report.termination_message import forward_termination_message
from fluxtrain.signals import handled

_ENDPOINT = "PET_RDZV_ENDPOINT"
_PAUSE_SECONDS = 1.0
"""Between two attempts: a rendezvous that a failed agent closed stays closed until the operator acts."""


class FatalTrainerError(Exception):
    """A trainer of this node says that no restart in place can help."""

    def __init__(self, code: int, message: str) -> None:
        """Keep the exit ``code`` and the ``message``."""
        self.code, self.message = code, message
        super().__init__(message)


def serve_node(environment: Mapping[str, str], termination_log: Path) -> tuple[int, str]:
    """Train on this node as torchrun's ``PET_*`` environment says; return exit code and what to say.

    The same, and the progress of rank 0 where it was on this node, goes to ``termination_log``.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "last_words.json"
        os.environ[ENV_TERMINATION_MESSAGE] = str(words)
        try:
            with _heeding_stops(), _verdicts(Path(folder) / "verdict.json"):
                require_gpus(int(environment.get(ENV_GPUS, "0")), environment)
                code, message = _join_until_over(environment)
        except FluxtrainError as error:
            code, message = error.exit_code, str(error)
        except FatalTrainerError as verdict:
            code, message = verdict.code, verdict.message
        except SignalException as stop:
            code, message = EXIT_STOPPED, f"stopped by {stop.sigval.name} between two meetings"
        forward_termination_message(words, message, termination_log)
        return code, message


def _join_until_over(environment: Mapping[str, str]) -> tuple[int, str]:
    paths = RunPaths.from_environment(environment)
    register()
    while True:
        with stopping() as over:
            if not wait_for_store(environment[_ENDPOINT], over):
                return EXIT_STOPPED, "stopped while waiting for the rendezvous store"
        try:
            return runner.launch([f"--rdzv-backend={BACKEND}"], paths)
        except (RendezvousError, DistError) as error:  # no store, or a node died while it joined
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"rendezvous lost ({reason}); joining again", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_SECONDS)


@contextmanager
def _heeding_stops() -> Iterator[None]:
    """Heed SIGTERM from the start, as torchrun does from its first trainers on.

    Until then the kernel would drop it, for an agent is the first process of its container, and the pod
    would stay for the whole of its grace.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum)
        raise SignalException(f"asked to stop by {name.name}", sigval=name)

    with handled(stop, signal.SIGTERM):
        yield


@contextmanager
def _verdicts(path: Path) -> Iterator[None]:
    """Let trainers end the agent: torchrun by itself would start them again, whatever their code."""
    os.environ[ENV_FATAL_ERROR] = str(path)

    def heed(signum: int, frame: FrameType | None) -> None:
        verdict = json.loads(path.read_text())
        raise FatalTrainerError(verdict["code"], verdict["message"])

    with handled(heed, signal.SIGUSR1):
        yield


def main(termination_log: Path) -> int:
    """Run this pod's agent."""
    code, message = serve_node(os.environ, termination_log)
    if message:
        print(f"fluxtrain: {message}", file=sys.stderr, flush=True)
    return code
