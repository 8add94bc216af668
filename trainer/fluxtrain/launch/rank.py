"""One rank, started by torchrun: read the config, join the process group, run the task."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.process import ENV_CONFIG, ENV_FATAL_ERROR, STACKS_SIGNAL, RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import (
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_UNFIT,
    EXIT_USAGE,
    FluxtrainError,
)
from fluxtrain.report.endpoint import serve
from fluxtrain.report.progress import publish
from fluxtrain.report.sinks import require_packages
from fluxtrain.runtime.devices import bind_near_gpu
from fluxtrain.runtime.program import importing, missing_package, write_any_text
from fluxtrain.runtime.progress import Progress

_STORAGE_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


class Task(NamedTuple):
    """The functions of a task, as ``module:name``; only those of the task that runs are imported."""

    run: str
    """Runs the task on each rank; it takes the config, the paths and the world."""
    check: str | None
    """Raises, before any rank starts, what a rank would only raise after seconds; takes config and paths."""
    uses_gpus: bool = True


TASKS = {
    "train": Task("fluxtrain.train.loop:train", None),  # its check needs the numbers of ranks
    "prepare": Task("fluxtrain.prepare.task:prepare", "fluxtrain.prepare.task:open_task"),
    "preprocess": Task(
        "fluxtrain.prepare.preprocess:preprocess",
        "fluxtrain.prepare.preprocess_output:open_outputs",
    ),
    "evaluate": Task(
        "fluxtrain.train.evaluation_task:evaluate_model",
        "fluxtrain.train.evaluation_task:check_evaluate_task",
    ),
    "sample": Task(
        "fluxtrain.sample.task:sample_prompts", "fluxtrain.sample.task:check_sample_task"
    ),
    # it leaves all memory of the GPUs to the processes that it starts
    "benchmark": Task(
        "fluxtrain.benchmark.task:benchmark", "fluxtrain.benchmark.task:check_benchmark", False
    ),
}
"""The tasks by ``spec.run.task``. A wing enters its tasks here: launch imports none."""

FINAL_CODES = (EXIT_USAGE, EXIT_DIVERGED, EXIT_STORAGE, EXIT_UNFIT)
"""Exit codes of errors that a restart by torchrun would only repeat."""


def main() -> int:
    """Run this rank with torchrun's environment; return its exit code."""
    write_any_text()
    _print_stacks_on_signal()
    paths = RunPaths.from_environment(os.environ)
    try:
        text = Path(os.environ[ENV_CONFIG]).read_text(encoding="utf-8")
        config = validate(RunConfig, json.loads(text), "spec.run")
        require_packages(config)
        paths.output.mkdir(parents=True, exist_ok=True)
        bind_near_gpu(int(os.environ.get("LOCAL_RANK", 0)))
        _run_task(config, paths)
        return EXIT_OK
    except FluxtrainError as error:
        return _report(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in _STORAGE_ERRNO:
            return _report(traceback.format_exc(), EXIT_ERROR)
        path = error.filename or paths.output
        return _report(f"{path}: cannot be written or read ({error.strerror})", EXIT_STORAGE)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (text := missing_package(error)):
            return _report(text, EXIT_USAGE)
        return _report(traceback.format_exc(), EXIT_ERROR)


def _run_task(config: RunConfig, paths: RunPaths) -> None:
    """Import the task, join the process group and run the task; from the start /progress is served."""
    progress = Progress()
    publish(progress)
    with ExitStack() as stack:
        with _serving(progress, config, paths):  # until the task serves its metrics too
            with importing():
                from fluxtrain.parallel import distributed

                distributed.end_with_parent()
                from fluxtrain.state.random_seed import with_seed

                task = TASKS[config.task]
                run = resolve_name(task.run)
            connects = distributed.connects_at_start(config)
            group = distributed.process_group(progress, task.uses_gpus, connects)
            world = stack.enter_context(group)
            if config.task == "train":
                from fluxtrain.parallel.compile import resolve_kernels
                from fluxtrain.train.memory import settle_resharding_of
                from fluxtrain.train.micro_batch import require_memory_of, settle_micro_batch_of

                require_memory_of(world, config)
                config = settle_micro_batch_of(world, config, paths.output)
                config = resolve_kernels(settle_resharding_of(world, config), world.device)
            config = with_seed(config, paths.output, world)
        run(config, paths, world)


@contextmanager
def _serving(progress: Progress, config: RunConfig, paths: RunPaths) -> Iterator[None]:
    """Serve /progress on local rank 0, without metrics: those of the task count the starts of processes."""
    progress.update(
        rank=int(os.environ.get("RANK", "0")),
        numNodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        processRestarts=paths.process_restarts,
    )
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    port = config.logging.metrics_port if is_first else 0
    stop = serve(CollectorRegistry(), progress, paths.metrics_address, port)
    try:
        yield
    finally:
        if stop is not None:
            stop()


def _print_stacks_on_signal() -> None:
    """Print the stacks of all threads to stderr on STACKS_SIGNAL and on a crash; nothing is interrupted."""
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def _report(message: str, exit_code: int) -> int:
    """Write ``message`` for the agent that started this process, or print it if there is none."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        print(message, file=sys.stderr, flush=True)
        return exit_code
    record = {"message": message, "timestamp": int(time.time())}
    Path(error_file).write_text(json.dumps(record), encoding="utf-8")
    fatal_error_file = os.environ.get(ENV_FATAL_ERROR)
    if fatal_error_file is not None and exit_code in FINAL_CODES:
        Path(fatal_error_file).write_text(
            json.dumps({"code": exit_code, "message": message}), encoding="utf-8"
        )
        os.kill(os.getppid(), signal.SIGUSR1)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
