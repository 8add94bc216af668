"""The launcher around torchrun: starts the trainers of this machine, and returns how they ended.

Stacks of a stall are printed by the trainers themselves, at a signal whose handler needs neither their
main thread nor Python's lock.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from getpass import getuser
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from uuid import uuid4

import torch
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api
from torch.distributed.run import config_from_args, get_args_parser

from fluxtrain.adapter.opening import initial_parameters
from fluxtrain.contract.process import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    ENV_CONFIG,
    ENV_FATAL_ERROR,
    ENV_GENERATION,
    ENV_NODE_PROGRESS,
    ENV_OWN_STORE,
    ENV_SHUTDOWN_SECONDS,
    PROCESS_FAILED,
    PROCESS_KILLED,
    PROCESS_OUT_OF_MEMORY,
    STACKS_SECONDS,
    STACKS_SIGNAL,
    RunPaths,
)
from fluxtrain.contract.run.closed_division import begins_closed
from fluxtrain.contract.run.config import RunConfig, require_replicas
from fluxtrain.data.sources import open_sources
from fluxtrain.encode.encoders import check_files, missing_models, next_step
from fluxtrain.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STOPPED,
    DataError,
    StorageError,
)
from fluxtrain.launch.environment import local_volume, prepare_for_gpus, process_start
from fluxtrain.launch.rank import TASKS
from fluxtrain.parallel.compile import resolve_kernels
from fluxtrain.parallel.node_memory import takes_snapshots
from fluxtrain.report.endpoint import serve
from fluxtrain.report.progress import LATE, RankProgress, read_ranks
from fluxtrain.report.sinks import require_packages
from fluxtrain.runtime.files import atomic_write, exclusive_lock, writing
from fluxtrain.runtime.program import without_interrupts
from fluxtrain.runtime.progress import Progress, handled
from fluxtrain.sample.prompts import check_sampling
from fluxtrain.state.free_memory import out_of_memory_kills
from fluxtrain.state.random_seed import with_any_seed
from fluxtrain.state.run_state import (
    RunState,
    changed_decay,
    check_continued_run,
    check_same_run,
    latest,
    read_state,
    step_of,
)
from fluxtrain.train.sources import CHECK_PICTURES
from fluxtrain.weights.reader import initial_weights, require_same_base


class FatalTrainerError(Exception):
    """A trainer of this node failed with an error that a restart in place cannot fix."""

    def __init__(self, code: int, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)


@contextmanager
def raise_on_fatal_error(path: Path) -> Iterator[None]:
    """Raise FatalTrainerError if a trainer reports one: torchrun would restart it, whatever its exit code."""
    os.environ[ENV_FATAL_ERROR] = str(path)

    def handle(signum: int, frame: FrameType | None) -> None:
        error = json.loads(path.read_text(encoding="utf-8"))
        raise FatalTrainerError(error["code"], error["message"])

    with handled(handle, signal.SIGUSR1):
        yield


def restart_cause(exit_codes: Collection[int], out_of_memory: bool) -> str:
    """Return the cause of a restart after trainers ended with ``exit_codes``, negative for signals.

    ``out_of_memory`` is whether the kernel has killed a process of the container for its memory meanwhile.
    """
    if out_of_memory and -signal.SIGKILL in exit_codes:
        return PROCESS_OUT_OF_MEMORY
    return PROCESS_KILLED if any(code < 0 for code in exit_codes) else PROCESS_FAILED


def num_out_of_memory_kills(root: Path = Path("/")) -> int:
    """Return how many processes of this container the kernel has killed for its memory; 0 if unknown."""
    return max(out_of_memory_kills(root), default=0)


_POLL_SECONDS = 1.0
_STALLED = 0.5
"""Stacks are printed after this fraction of the time without progress after which the operator restarts."""


class TrainerProgress:
    """The progress of the ranks of this node."""

    def __init__(self, on_progress: Callable[[Sequence[RankProgress]], None]) -> None:
        """Call ``on_progress`` with the progress of the ranks at each poll."""
        self._on_progress = on_progress
        self._has_printed = False  # since the last progress
        self._lock = threading.Lock()

    def poll(self) -> None:
        """Report the progress, and print the stacks of all ranks once if none makes any."""
        ranks = read_ranks()
        self._on_progress(ranks)
        self._print_if_stalled(ranks, _STALLED)

    def print_if_stalled(self) -> None:
        """Print the stacks of all ranks if all are late; called before they are stopped."""
        self._print_if_stalled(read_ranks(), LATE)

    def _print_if_stalled(self, ranks: Sequence[RankProgress], fraction: float) -> None:
        with self._lock:
            stalled = are_stalled(ranks, time.monotonic(), fraction)
            if stalled and not self._has_printed:
                print_stacks(ranks)
            self._has_printed = stalled


def are_stalled(ranks: Sequence[RankProgress], now: float, fraction: float) -> bool:
    """Return whether no rank has made progress for ``fraction`` of its time; False without ranks."""
    return bool(ranks) and all(
        rank.seconds_since_progress(now) >= fraction * rank.stall_seconds() for rank in ranks
    )


def print_stacks(ranks: Sequence[RankProgress]) -> None:
    """Make ``ranks`` print the stacks of their threads, one after the other."""
    for rank in ranks:
        seconds = rank.seconds_since_progress(time.monotonic())
        where = f": {rank.stack}" if rank.stack else ""
        text = f"no progress for {seconds:.0f} s in phase {rank.phase}, step {rank.step}{where}"
        print(f"fluxtrain: rank {rank.rank}: {text}", file=sys.stderr, flush=True)
        with suppress(OSError):  # it has just ended
            os.kill(rank.pid, STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)


@contextmanager
def trainer_progress(
    on_progress: Callable[[Sequence[RankProgress]], None],
) -> Iterator[TrainerProgress]:
    """Make the trainers started meanwhile write their progress, and poll it once a second."""
    progress, stopped = TrainerProgress(on_progress), threading.Event()

    def poll() -> None:
        while not stopped.wait(_POLL_SECONDS):
            progress.poll()

    with tempfile.TemporaryDirectory(prefix="fluxtrain-", ignore_cleanup_errors=True) as folder:
        os.environ[ENV_NODE_PROGRESS] = folder
        thread = threading.Thread(target=poll, name="progress", daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            stopped.set()
            thread.join()
            del os.environ[ENV_NODE_PROGRESS]


_RESTART_SECONDS = 30
"""From SIGTERM to SIGKILL of trainers that start again: torchrun's default."""
_EXIT_BARRIER_SECONDS = 10
"""How long an agent waits for the other agents after its trainers succeeded; usually milliseconds.

Trainers end together (see `process_group`), so an agent that does not arrive is lost. Torchrun's default
is five minutes."""


@dataclass(frozen=True)
class Peers:
    """What an agent asks about the other nodes of a run, and tells them; by default there are none."""

    stop_seconds: Callable[[], int | None] = lambda: None
    """Returns the seconds from SIGTERM to SIGKILL of the trainers; torchrun's if it returns None."""
    were_interrupted: Callable[[], bool] = lambda: False
    """Returns whether the generation before lost a node, or was ended by the operator."""
    on_progress: Callable[[Sequence[RankProgress]], None] = lambda ranks: None
    """Called once a second with the progress of this node's trainers."""
    on_failure: Callable[[str], None] = lambda cause: None
    """Called with the cause when trainers failed that will be started again; not if they were stopped."""
    generation: Callable[[], int] = lambda: 0
    """Returns the generation that the trainers run in; 0 on a single machine."""


ALONE = Peers()
"""Of a run on a single machine."""


class ElasticAgent(LocalElasticAgent):
    """torchrun's agent; trainers whose peers are lost end within seconds.

    That uses no restart, nor do trainers that a peer's agent stopped: all ranks stop together.
    """

    def __init__(
        self, *arguments: Any, peers: Peers, progress: TrainerProgress, **options: Any
    ) -> None:
        """Take what torchrun's agent takes; ``progress`` prints the stacks of stalled trainers."""
        options["exit_barrier_timeout"] = _EXIT_BARRIER_SECONDS
        super().__init__(*arguments, **options)
        self._shutdown_timeout = int(os.environ.get(ENV_SHUTDOWN_SECONDS, _SHUTDOWN_SECONDS))
        self._peers, self._progress = peers, progress
        self._has_failed = False  # the trainers before the present rendezvous
        self._were_stopped = False
        self._result = RunResult(WorkerState.INIT)
        self._num_kills = 0  # out of memory, before the present trainers started

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        if isinstance(sys.exception(), SignalException):
            # Slurm signals every process of a step, and some twice: the end must not be interrupted
            _ignore_stops()
            death_sig = signal.SIGTERM  # trainers do not hear SIGINT
        if death_sig != signal.SIGKILL:
            self._progress.print_if_stalled()
        if self._pcontext is not None:  # torch's own method takes the seconds from 2.12 on
            self._pcontext.close(death_sig, self._shutdown_timeout if timeout is None else timeout)
        super()._shutdown(death_sig)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        seconds = self._peers.stop_seconds()
        death_sig = signal.SIGKILL if seconds == 0 else signal.SIGTERM
        self._shutdown(death_sig, seconds or _RESTART_SECONDS)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._result = super()._monitor_workers(worker_group)
        return self._result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._has_failed = worker_group.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        codes = [failure.exitcode for failure in self._result.failures.values()]
        self._were_stopped = bool(codes) and set(codes) == {EXIT_STOPPED}
        if self._has_failed and not self._were_stopped:
            self._peers.on_failure(
                restart_cause(codes, num_out_of_memory_kills() > self._num_kills)
            )
        super()._restart_workers(worker_group)
        self._has_failed = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the trainers, and keep their number of restarts for the agent's termination message."""
        restarts = worker_group.spec.max_restarts - self._remaining_restarts
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        self._num_kills = num_out_of_memory_kills()
        os.environ[ENV_GENERATION] = str(self._peers.generation())
        ignored = [each for each in _STOPS if signal.getsignal(each) is signal.SIG_IGN]
        with without_interrupts():  # in trainers too, which SIGTERM stops: its end is no traceback
            ids: dict[int, Any] = super()._start_workers(worker_group)
            for signum in ignored:  # by nohup, or in the background of a script: torch handles all
                signal.signal(signum, signal.SIG_IGN)
        return ids

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Join the next generation; trainers of one that was interrupted use no restart if they failed."""
        super()._rendezvous(worker_group)
        if self._has_failed and (self._were_stopped or self._peers.were_interrupted()):
            self._remaining_restarts += 1


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
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that stop a run, with a checkpoint. A terminal that closes sends SIGHUP, often twice."""


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
    """Set what trainers and torchrun read from the environment, and print the variables for GPUs."""
    paths = replace(paths, started=paths.started or process_start())
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # an option of torchrun for another world, as in Kubeflow's pods
    os.environ.update(paths.environment())
    os.environ[ENV_CONFIG] = str(config)
    prepare_for_gpus(os.environ)
    try:
        getuser()
    except (KeyError, OSError):  # a uid without a passwd entry; torch before 2.13 asks to compile
        os.environ["USER"] = f"uid_{os.getuid()}"
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
    try:
        if (check := TASKS[config.task].check) is not None:
            resolve_name(check)(config, paths)  # its imports take as long as the check
        else:
            _check_training(config, paths, rank_counts)
    except DataError as error:
        if not (missing := missing_models(config, paths.models)):
            raise
        text = f"not in {paths.models}: {', '.join(missing)}; {next_step(config)}"
        raise DataError(f"{error}; {text}") from None
    stop = serve(
        CollectorRegistry(), Progress(), paths.metrics_address, config.logging.metrics_port
    )
    if stop is not None:
        stop()


def _check_training(config: RunConfig, paths: RunPaths, rank_counts: Sequence[int]) -> None:
    require_packages(config)
    require_replicas(config, rank_counts)
    as_written(config)
    checkpoints = paths.output / CHECKPOINTS_FOLDER
    check_continued_run(config, checkpoints)
    if note := changed_decay(config, checkpoints):
        print(f"fluxtrain: {note}", file=sys.stderr)
    check_sampling(with_any_seed(config), paths.data, paths.models)
    _check_model(config, paths)
    if begins_closed(config, paths.num_nodes):  # no data before MLPerf's clock
        if config.data.source == "images":
            check_files(config.encoders, paths.models)
        for given in filter(None, (config.data.train, config.data.validation)):
            if not (part := paths.data / given).is_dir():  # which reads no data
                raise DataError(f"{part}: missing; docs/data.md says how to get the set")
        return
    if config.data.images is not None:
        resolve_name(CHECK_PICTURES)(with_any_seed(config), paths)
        return
    sources = open_sources(with_any_seed(config), paths.data)
    if sources.empty_text is None:
        check_files(config.encoders, paths.models)
    if sources.train.advice:
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
    elastic = logging.getLogger("torch.distributed.elastic")  # its modules' loggers have own levels
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    vars(api)[LocalElasticAgent.__name__] = agent  # the launcher has no argument for it
    arguments = get_args_parser().parse_args([*torchrun_arguments, "-m", "fluxtrain.launch.rank"])
    launch_config, command, command_arguments = config_from_args(arguments)
    # torchrun's default is one thread for each process
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // launch_config.nproc_per_node)))
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
            return _stopped(paths, signum)
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
    """Let signals that stop a run do nothing from now on: torchrun's handlers would raise an error."""
    for signum in _STOPS:
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
    path, config = output / CONFIG_FILE, as_written(config)
    with writing(path), atomic_write(path) as partial:
        partial.write_text(
            json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8"
        )
    return path


def as_written(config: RunConfig) -> RunConfig:
    """Return ``config`` with the kernels of a training on this machine; ConfigError if it lacks one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return resolve_kernels(config, device) if config.task == "train" else config


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


def _stopped(paths: RunPaths, signum: int) -> tuple[int, str]:
    text, resumes = f"stopped by {signal.Signals(signum).name}", "continues"
    task = json.loads(Path(os.environ[ENV_CONFIG]).read_text(encoding="utf-8"))["task"]
    is_kept = task not in ("sample", "evaluate")  # these start again
    if task == "train":
        is_kept = (newest := latest(paths.output / CHECKPOINTS_FOLDER)) is not None
        saved = f"a checkpoint of step {step_of(newest)}" if newest else "no checkpoint"
        text, resumes = f"{text}; {paths.output} holds {saved}", "resumes"
    elif task == "benchmark":
        text += f"; {paths.output} holds what was measured"
    code = EXIT_STOPPED if is_kept or signum != signal.SIGINT else EXIT_INTERRUPTED
    return code, f"{text}; the same command {resumes}"


def default_processes() -> int:
    """Return the number of GPUs, or 1."""
    return torch.cuda.device_count() or 1
