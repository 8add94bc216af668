"""What a command leaves behind in its process, which ends with it, must not reach the next test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Give each test the same variables and signal handlers; Ctrl-C is heard even in the background."""
    environment = dict(os.environ)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = {signal.SIGINT: before, signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
