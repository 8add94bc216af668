"""``python -m fluxtrain_operator``: run the operator, stoppable from the first moment."""

from __future__ import annotations

import os
import signal
import sys

from fluxtrain.runtime import program


def main() -> int:
    """Run the operator; return the exit code."""
    if (
        os.getpid() == 1
    ):  # in a container: the kernel ignores signals without a handler for process 1
        signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(0))
    program.use_utf8()
    return program.run("fluxtrain_operator", "operator", _operate)


def _operate() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        from fluxtrain_operator.options import parse

        parse(None)
    import asyncio

    from fluxtrain_operator import operate  # imports for seconds
    from fluxtrain_operator.base.names import RECURSION_LIMIT

    sys.setrecursionlimit(RECURSION_LIMIT)
    return asyncio.run(operate.main())


if __name__ == "__main__":
    sys.exit(main())
