"""``python -m fluxtrain_operator``: heed a stop from the start, then operate."""

from __future__ import annotations

import asyncio
import os
import signal
import sys


def main() -> int:
    """Operate as the command line says; return the exit code."""
    if os.getpid() == 1:  # a container's first process: the kernel drops what it has no handler for
        signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(0))
    from fluxtrain_operator import operate  # takes seconds
    from fluxtrain_operator.bounds import DECODED_DEPTH

    sys.setrecursionlimit(DECODED_DEPTH)
    return asyncio.run(operate.main())


if __name__ == "__main__":
    sys.exit(main())
