"""The launcher around torchrun: starts the trainers of this machine and returns how they ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import torch
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, get_args_parser

from fluxtrain.adapter.initial import initial_parameters
from fluxtrain.compilation import compiles
from fluxtrain.contract.launch import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    ENV_CONFIG,
    ENV_OWN_STORE,
    ENV_SHUTDOWN_SECONDS,
    RunPaths,
)
from fluxtrain.contract.run.closed_division import begins_closed
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.sharding import require_replicas
from fluxtrain.data.images.dataset import ImageDataset
from fluxtrain.data.layouts.detect import SlowRandomAccess
from fluxtrain.data.sources import open_sources
from fluxtrain.encode.encoders import check_files
from fluxtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_STOPPED, DataError, StorageError
from fluxtrain.files import atomic_write, exclusive_lock
from fluxtrain.launch.elastic_agent import ALONE, ElasticAgent, Peers
from fluxtrain.launch.environment import prepare_for_gpus
from fluxtrain.launch.fatal_errors import FatalTrainerError, raise_on_fatal_error
from fluxtrain.launch.process_start import process_start
from fluxtrain.launch.snapshot_volume import local_volume
from fluxtrain.launch.trainer_progress import trainer_progress
from fluxtrain.picture_cache import check_pictures
from fluxtrain.progress import Progress
from fluxtrain.random_seed import with_any_seed
from fluxtrain.report.server import serve
from fluxtrain.report.sinks.packages import require_packages
from fluxtrain.run_state import (
    RunState,
    changed_decay,
    check_continued_run,
    check_same_run,
    latest,
    read_state,
    step_of,
)
from fluxtrain.sample.prompts import check_sampling
from fluxtrain.snapshot_size import takes_snapshots
from fluxtrain.weights.base import require_same_base
from fluxtrain.weights.reader import initial_weights

MALLOC_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc's settings for trainers on CPUs: freed activations stay in the heap for the next step. By default
they are returned to the kernel, which costs 220,000 page faults a step (docs/log.md)."""
_SHUTDOWN_SECONDS = 120
"""How long trainers may take to save a checkpoint after a signal, unless the operator says otherwise."""
_NUM_RECORDED = "2000"
"""Collectives that torch's flight recorder keeps, to tell what a hung rank waits for."""
LOCAL_RESTARTS = 3
"""How often ``fluxtrain run`` restarts trainers that crash, such as out of memory, from memory or storage."""
_LOCK_TIMEOUT_SECONDS = 10.0


def run(config: RunConfig, paths: RunPaths, processes: int) -> tuple[int, str]:
    """Run the task on this machine; return the exit code and a message.

    Raises StorageError if the output cannot be written or is locked by another run.
    """
    check_before_starting(config, paths, [processes])
    with lock_output(paths.output), snapshot_volume(config, paths) as volume:
        path = write_config(config, paths.output)
        prepare_environment(path, replace(paths, snapshots=volume))
        try:
            with TemporaryDirectory() as folder, raise_on_fatal_error(Path(folder) / "error.json"):
                return launch([*_local_arguments(config), f"--nproc-per-node={processes}"], paths)
        except FatalTrainerError as error:
            return error.code, error.message


def snapshot_volume(
    config: RunConfig, paths: RunPaths, node: str = ""
) -> AbstractContextManager[Path | None]:
    """Return the folder for snapshots of ``node`` while the run in ``paths`` runs; None if none are taken."""
    return local_volume(paths.output, node=node) if takes_snapshots(config) else nullcontext()


def prepare_environment(config: Path, paths: RunPaths) -> None:
    """Set what trainers read from the environment, and print the variables for GPUs."""
    paths = replace(paths, started=paths.started or process_start())
    os.environ.update(paths.environment())
    os.environ[ENV_CONFIG] = str(config)
    prepare_for_gpus(os.environ)
    os.environ[ENV_OWN_STORE] = "1"


def _local_arguments(config: RunConfig) -> list[str]:
    return [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={uuid4().hex}",
        "--local-addr=127.0.0.1",
        f"--max-restarts={LOCAL_RESTARTS if config.task == 'train' else 0}",
    ]


def check_before_starting(config: RunConfig, paths: RunPaths, rank_counts: Sequence[int]) -> None:
    """Raise the errors that a trainer would only raise after seconds of starting up.

    ``rank_counts`` are the numbers of ranks that can train, ascending.
    """
    # each task's imports take as long as the checks
    if config.task == "preprocess":
        from fluxtrain.precompute import open_outputs

        open_outputs(config, paths.data, paths.models)
    elif config.task == "prepare":
        from fluxtrain.prepare.task import open_task

        open_task(config, paths)
    elif config.task == "sample":
        from fluxtrain.sample.task import check_sample_task

        check_sample_task(config, paths)
    elif config.task == "evaluate":
        from fluxtrain.evaluation_task import check_evaluate_task

        check_evaluate_task(config, paths)
    elif config.task == "benchmark":
        from fluxtrain.benchmark.check import check_benchmark

        check_benchmark(config, paths)
    else:
        _check_training(config, paths, rank_counts)
    stop = serve(
        CollectorRegistry(), Progress(), paths.metrics_address, config.logging.metrics_port
    )
    if stop is not None:
        stop()


def _check_training(config: RunConfig, paths: RunPaths, rank_counts: Sequence[int]) -> None:
    require_packages(config)
    require_replicas(config, rank_counts)
    compiles(config.parallel, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    checkpoints = paths.output / CHECKPOINTS_FOLDER
    check_continued_run(config, checkpoints)
    if note := changed_decay(config, checkpoints):
        print(f"fluxtrain: {note}", file=sys.stderr)
    check_sampling(with_any_seed(config), paths.data, paths.models)
    _check_model(config, paths)
    if begins_closed(config, paths.num_nodes):  # no data before MLPerf's clock
        if config.data.source == "images":
            check_files(config.encoders, paths.models)
        return
    if config.data.images is not None:
        check_pictures(with_any_seed(config), paths)
        return
    sources = open_sources(with_any_seed(config), paths.data)
    if isinstance(sources.train, ImageDataset):
        check_files(config.encoders, paths.models)
    if isinstance(sources.train, SlowRandomAccess):
        folder = paths.data / config.data.train
        print(f"fluxtrain: {folder}: {sources.train.advice}", file=sys.stderr)


def _check_model(config: RunConfig, paths: RunPaths) -> None:
    """Open the weights and adapters that the run begins with; a checkpoint of all weights needs none."""
    if config.adapter is None and latest(paths.output / CHECKPOINTS_FOLDER) is not None:
        return
    initial_weights(config, paths.models)
    if latest(paths.output / CHECKPOINTS_FOLDER) is not None:
        require_same_base(config, paths.models, paths.output)
    initial_parameters(with_any_seed(config), paths.models)


def launch(torchrun_arguments: list[str], paths: RunPaths, peers: Peers = ALONE) -> tuple[int, str]:
    """Run ``fluxtrain.launch.rank`` under torchrun with these arguments and the PET_* environment."""
    with trainer_progress(peers.on_progress) as progress:
        return _launch(
            torchrun_arguments, paths, partial(ElasticAgent, peers=peers, progress=progress)
        )


def _launch(
    torchrun_arguments: list[str], paths: RunPaths, agent: Callable[..., LocalElasticAgent]
) -> tuple[int, str]:
    # the caller reports the errors
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    vars(api)[LocalElasticAgent.__name__] = agent  # the launcher has no argument for it
    parser = get_args_parser()
    if any("--shutdown-timeout" in action.option_strings for action in parser._actions):
        seconds = os.environ.get(ENV_SHUTDOWN_SECONDS, _SHUTDOWN_SECONDS)
        torchrun_arguments = [f"--shutdown-timeout={seconds}", *torchrun_arguments]
    arguments = parser.parse_args([*torchrun_arguments, "-m", "fluxtrain.launch.rank"])
    launch_config, command, command_arguments = config_from_args(arguments)
    _divide_cores(launch_config.nproc_per_node)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _NUM_RECORDED)
    if not torch.cuda.is_available():
        os.environ.update({**MALLOC_SETTINGS, **os.environ})
    before = latest(paths.output / CHECKPOINTS_FOLDER)
    try:
        api.elastic_launch(launch_config, command)(*command_arguments)
        _ignore_stops()
    except ChildFailedError as error:
        return _failure_message(error.get_first_failure()[1])
    except (SignalException, KeyboardInterrupt) as error:
        if not _is_over(paths.output, before):
            signum = error.sigval if isinstance(error, SignalException) else signal.SIGINT
            return EXIT_STOPPED, _stop_message(paths, signum)
        _ignore_stops()
    return EXIT_OK, ""


def _is_over(output: Path, before: Path | None) -> bool:
    """Return whether a training took its last step since its newest checkpoint was ``before``."""
    newest = latest(output / CHECKPOINTS_FOLDER)
    if newest is None or newest == before:
        return False
    with suppress(DataError, OSError):
        return read_state(newest).status != "running"
    return False


def _ignore_stops() -> None:
    """Let SIGTERM and SIGINT do nothing from now on: torchrun's handlers would raise an error."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: None)


def finished_state(config: RunConfig, output: Path) -> RunState | None:
    """Return the state of the training in ``output`` if ``config`` asks for nothing beyond it, else None.

    A damaged checkpoint finishes nothing; how many steps epochs have is only known by the ranks. Raises
    ConfigError if ``config`` is of another run.
    """
    newest = latest(output / CHECKPOINTS_FOLDER)
    if newest is None or config.task != "train" or config.schedule.epochs is not None:
        return None
    with suppress(DataError):
        state = read_state(newest)
        if state.is_over(config):
            check_same_run(config, newest)
            return state
    return None


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Lock ``output``, which is created; StorageError if that fails or another run holds the lock."""
    lock = output / ".lock"
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise StorageError(f"--output {output}: cannot be written ({error.strerror})") from None
    refusal = f"--output {output}: another run is writing there"
    with exclusive_lock(lock, refusal, _LOCK_TIMEOUT_SECONDS):
        yield


def write_config(config: RunConfig, output: Path) -> Path:
    """Write the resolved ``config`` to the folder ``output`` and return its path, or raise StorageError."""
    path = output / CONFIG_FILE
    try:
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def _divide_cores(processes: int) -> None:
    """Divide the cores among the processes' thread pools; torchrun's default is one thread each."""
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))


def _failure_message(failure: ProcessFailure) -> tuple[int, str]:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return EXIT_ERROR, (
            f"trainer process {failure.pid} (local rank {failure.local_rank}) was ended by "
            f"{name}{hint}; the same command resumes from the newest checkpoint"
        )
    message = str(failure.message)
    if failure.exitcode == EXIT_ERROR:
        message = (
            f"a trainer process failed, which is a fault of fluxtrain or of the machine:\n{message}"
        )
    return failure.exitcode, message


def _stop_message(paths: RunPaths, signum: int) -> str:
    stopped, output = f"stopped by {signal.Signals(signum).name}", paths.output
    task = json.loads(Path(os.environ[ENV_CONFIG]).read_text())["task"]
    if task == "train":
        newest = latest(output / CHECKPOINTS_FOLDER)
        saved = f"a checkpoint of step {step_of(newest)}" if newest else "no checkpoint"
        return f"{stopped}; {output} holds {saved}; the same command resumes"
    if task == "benchmark":
        return f"{stopped}; {output} holds what was measured; the same command goes on"
    return f"{stopped}; the same command goes on"


def default_processes() -> int:
    """Return the number of GPUs, or 1."""
    return torch.cuda.device_count() or 1
