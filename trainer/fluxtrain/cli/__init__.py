"""``fluxtrain``: the command line interface, stoppable from the first moment."""

from __future__ import annotations

import os
import signal
import sys

from fluxtrain.runtime import program


def main(arguments: list[str] | None = None) -> int:
    """Run the command in ``arguments`` (default: sys.argv) and return its exit code."""
    if arguments is None:
        program.use_utf8()
    is_run = (sys.argv[1:] if arguments is None else arguments)[:1] == ["run"]

    def run_command() -> int:
        from fluxtrain.errors import EXIT_STOPPED, UNSET, ConfigError

        # A run that is stopped before its launcher has a handler made no step. The kernel drops signals
        # without a handler for a container's first process.
        if os.getpid() == 1 or is_run:
            signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(EXIT_STOPPED))
        try:
            os.getcwd()  # paths and torch need it
        except FileNotFoundError:
            text = "was removed; change to one that exists"
            raise ConfigError("current folder", UNSET, text) from None
        from fluxtrain.cli import commands  # imports for a second

        return commands.run_command(arguments)

    return program.run("fluxtrain", "trainer", run_command)
