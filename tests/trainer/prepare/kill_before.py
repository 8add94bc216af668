"""Runs ``fluxtrain`` and kills it just before an event: ``kill_before.py EVENT FRAGMENT ARGUMENTS``.

EVENT is one of Python's audit events, FRAGMENT a part of its first argument.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from fluxtrain.cli import main


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == sys.argv[1] and sys.argv[2] in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.addaudithook(hook)
    sys.exit(main(sys.argv[3:]))
