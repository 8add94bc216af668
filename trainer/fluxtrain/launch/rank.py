"""One rank, started by torchrun: read the config, join the others, run the task, end with its exit code."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from fluxtrain.contract.launch import ENV_CONFIG, ENV_FATAL_ERROR, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.validation import validate
from fluxtrain.distributed import World, end_with_parent, process_group
from fluxtrain.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_USAGE,
    FluxtrainError,
)
from fluxtrain.precompute import preprocess
from fluxtrain.prepare.task import prepare
from fluxtrain.sample.task import sample_prompts
from fluxtrain.train import train

_STORAGE_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}

TASKS: dict[str, Callable[[RunConfig, RunPaths, World], object]] = {
    "train": train,
    "prepare": prepare,
    "preprocess": preprocess,
    "sample": sample_prompts,
}
"""What one rank runs, by ``spec.run.task``."""

FINAL_CODES = (EXIT_USAGE, EXIT_DIVERGED, EXIT_STORAGE)
"""Exit codes that torchrun's restart of the processes in place would only bring again."""


def main() -> int:
    """Run this rank as torchrun's environment says; return the exit code of the contract."""
    end_with_parent()
    places = RunPaths.from_environment(os.environ)
    try:
        text = Path(os.environ[ENV_CONFIG]).read_text()
        config = validate(RunConfig, json.loads(text), "spec.run")
        with process_group() as world:
            TASKS[config.task](config, places, world)
        return EXIT_OK
    except FluxtrainError as error:
        return _report(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in _STORAGE_ERRNO:
            return _report(traceback.format_exc(), EXIT_ERROR)
        where = error.filename or places.output
        return _report(f"{where}: cannot be written or read ({error.strerror})", EXIT_STORAGE)
    except Exception:
        return _report(traceback.format_exc(), EXIT_ERROR)


def _report(message: str, exit_code: int) -> int:
    """Hand ``message`` to the agent that started this process, or print it where there is none."""
    target = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if target is None:
        print(message, file=sys.stderr, flush=True)
        return exit_code
    record = {"message": message, "timestamp": int(time.time())}
    Path(target).write_text(json.dumps(record))
    verdict = os.environ.get(ENV_FATAL_ERROR)
    if verdict is not None and exit_code in FINAL_CODES:
        Path(verdict).write_text(json.dumps({"code": exit_code, "message": message}))
        os.kill(os.getppid(), signal.SIGUSR1)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
