"""Errors of a trainer that a restart by torchrun would only repeat."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fluxtrain.contract.launch import ENV_FATAL_ERROR
from fluxtrain.signals import handled


class FatalTrainerError(Exception):
    """A trainer of this node failed with an error that a restart in place cannot fix."""

    def __init__(self, code: int, message: str) -> None:
        """Take the trainer's exit ``code`` and ``message``."""
        self.code, self.message = code, message
        super().__init__(message)


@contextmanager
def raise_on_fatal_error(path: Path) -> Iterator[None]:
    """Raise FatalTrainerError if a trainer reports one: torchrun would restart it, whatever its exit code."""
    os.environ[ENV_FATAL_ERROR] = str(path)

    def handle(signum: int, frame: FrameType | None) -> None:
        error = json.loads(path.read_text())
        raise FatalTrainerError(error["code"], error["message"])

    with handled(handle, signal.SIGUSR1):
        yield
