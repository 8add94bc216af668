"""Environment variables, ports, mount paths and file names shared by launcher, trainer and operator."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast, get_args

ENV_CONFIG = "FLUXTRAIN_CONFIG"
"""JSON file with the resolved RunConfig. Set by ``fluxtrain run`` or the pod, read by the trainer."""
ENV_OUTPUT = "FLUXTRAIN_OUTPUT"
"""Output folder of the run. Set by ``fluxtrain run`` or the pod, read by the trainer."""
ENV_DATA = "FLUXTRAIN_DATA"
"""Root of relative data paths. Set by ``fluxtrain run`` or the pod, read by the trainer."""
ENV_MODELS = "FLUXTRAIN_MODELS"
"""Root of relative model paths. Set by ``fluxtrain run`` or the pod, read by the trainer."""
ENV_ADDRESS = "FLUXTRAIN_METRICS_ADDRESS"
"""Address that /metrics listens on: 127.0.0.1 for ``fluxtrain run``, the pod's IP in a cluster."""
ENV_STARTED = "FLUXTRAIN_STARTED"
"""Unix time at which the launcher started. Set by the launcher, read by the trainer for the MLPerf log."""

ENV_PROCESS_RESTARTS = "FLUXTRAIN_PROCESS_RESTARTS"
"""Process restarts of the job before this pod. Set by the operator; the trainer adds torchrun's
(``TORCHELASTIC_RESTART_COUNT``) and reports the sum as ``processRestarts`` in /progress."""

ENV_SHUTDOWN_SECONDS = "FLUXTRAIN_SHUTDOWN_SECONDS"
"""How long trainers may take to save a checkpoint after a signal. Set by the operator from the size of a
checkpoint, read by the launcher."""

ENV_GPUS = "FLUXTRAIN_GPUS"
"""GPUs that the pod requests (``spec.gpusPerNode``); unset without GPUs. Set by the operator; the agent
refuses to train on fewer."""

ENV_IMAGE = "FLUXTRAIN_RUN_IMAGE"
"""Image of the pod, as its spec names it. Set by the operator; the chain of the MLPerf log has it."""
ENV_POD_UID = "FLUXTRAIN_POD_UID"
"""Uid of the pod, which begins the name of its agent. Set by the operator, read by the agent."""
ENV_TOPOLOGY = "FLUXTRAIN_TOPOLOGY"
"""The pod's value of the label ``spec.scheduling.topology``, which few labels of nodes are copied to; ranks
of nodes whose place the operator has not told are ordered by it first. Set by the operator for a job with
that field, read by the agent."""
ENV_NODE = "FLUXTRAIN_NODE"
"""Name of the pod's node; ranks of the same place are ordered by it. Set like ``FLUXTRAIN_TOPOLOGY``, but
not in Kueue's queues."""
ENV_NODE_NAME = "FLUXTRAIN_NODE_NAME"
"""Name of the pod's node; the rendezvous service finds its place by it. Set like ``FLUXTRAIN_TOPOLOGY``."""

ENV_SNAPSHOTS = "FLUXTRAIN_SNAPSHOTS"
"""Folder in memory for snapshots of the training state; unset: none are taken. Set by ``fluxtrain run`` or
the pod, emptied by the launcher at the end, read and written by the trainer."""

ENV_FLUSHED = "FLUXTRAIN_CACHES_FLUSHED"
"""File with the Unix time at which the pod's node emptied its page cache; it is missing if that failed. Set
by the operator where the administrator allows it, read by the trainer for the MLPerf log."""

ENV_RENDEZVOUS_KEY = "FLUXTRAIN_RENDEZVOUS_KEY"
"""File with the key that signs the messages between agents and the rendezvous service of the job."""

ENV_NODES = "PET_NNODES"
"""torchrun's variable with ``min:max`` of the nodes. Set by the operator and ``fluxtrain run --nodes``; the
MLPerf log of a run whose nodes are not fixed is open."""
ENV_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Torch's variable: if set, rank 0 opens the store of the process group. It is empty after each restart, and
losing the first agent does not take it along. Set by ``fluxtrain run`` and the operator."""

ENV_ATTEMPT = "PET_RDZV_ID"
"""torchrun's id of the world: in a cluster the job's uid and the attempt. Set by the operator."""
ENV_GENERATION = "FLUXTRAIN_GENERATION"
"""Generation that the trainers run in. Set by the agent, reported by every rank at /progress."""

ENV_FATAL_ERROR = "FLUXTRAIN_FATAL_ERROR"
"""File for the exit code and message of a trainer whose error a process restart does not fix; the trainer
then sends SIGUSR1 to its agent. Set by the agent, read by the trainer."""
ENV_TERMINATION_MESSAGE = "FLUXTRAIN_TERMINATION_MESSAGE"
"""File for the final progress of a trainer that exits. Set by the agent, read by local rank 0."""
ENV_MLPERF_STDOUT = "FLUXTRAIN_MLPERF_STDOUT"
"""If set, rank 0 writes the MLPerf log to stdout too, so that the pod's log has it. Set by the agent."""
ENV_REVISION = "FLUXTRAIN_REVISION"
"""Commit of fluxtrain's sources. Set in the trainer image when it is built; the MLPerf log states it."""
ENV_NODE_PROGRESS = "FLUXTRAIN_NODE_PROGRESS"
"""Folder with the progress of each rank of the node. Set by the launcher, written by every rank, read by
local rank 0 for /progress and by the launcher."""
TERMINATION_LOG = "/dev/termination-log"
"""File that the kubelet copies to the pod's status: JSON with the keys of /progress, and ``message``.
Written by the agent, read by the operator."""

STACKS_SIGNAL = signal.SIGUSR2
"""A trainer that gets it prints the stacks of all its threads to stderr, and continues."""

METRICS_PORT = 9464
"""Port of /metrics and /progress, on local rank 0 of each node. Read by Prometheus and the operator."""

RENDEZVOUS_PORT = 29500
"""Port of the rendezvous service, torchrun's default."""

LOST_SECONDS = 6.0
"""An agent is lost without a heartbeat, and without a step of its generation, for this long, or for three
heartbeats in a world of more than 2,000 agents."""

DATA_PATH = "/data"
MODELS_PATH = "/models"
OUTPUT_PATH = "/output"
SNAPSHOTS_PATH = "/snapshots"
"""Mount path of a volume in memory, of one pod."""

FLUSHED_PATH = "/flushed"
"""Mount path of the volume with the time of the flush."""

CONFIG_FILE = "config.json"
MLPERF_FILE = "mlperf.log"
CHAIN_FILE = "mlperf.chain.jsonl"
"""The hashes of the lines of the MLPerf log, each of which depends on those before it."""
MLPERF_TOKEN = ":::MLLOG "
"""Begins each event of the MLPerf log, in the file and on stdout."""
METRICS_FILE = "metrics.jsonl"
LOSS_FILE = "loss.png"
GALLERY_FILE = "gallery.html"
EVALUATION_FILE = "evaluation.json"
"""What the evaluate task found."""
ADAPTERS_FOLDER = "adapters"
"""Folder in the output with the files of trained adapters."""
SAMPLES_FOLDER = "samples"
LEDGER_FOLDER = "ledger"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_FOLDER = "wandb"
"""Weights & Biases' own name below the folder that it is given."""
COMPILED_FOLDER = "compiled"
"""Code of compiled blocks, for the pods of a job."""

_RESTARTS = (ENV_PROCESS_RESTARTS, "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class RunPaths:
    """Input and output folders of a run, and how it was started."""

    output: Path
    data: Path
    models: Path
    metrics_address: str = "127.0.0.1"
    started: float | None = None
    """Unix time at which the launcher started; start of the MLPerf log's init."""
    process_restarts: int = 0
    """Restarts of the processes inside running pods."""
    snapshots: Path | None = None
    """Folder in memory for snapshots; None: none are taken."""
    num_nodes: tuple[int, int] = (1, 1)
    """The fewest and the most nodes that the run may have."""
    mlperf_on_stdout: bool = False
    """Whether the MLPerf log is written to stdout too, as in pods."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables of these settings for a trainer."""
        return {
            ENV_OUTPUT: str(self.output),
            ENV_DATA: str(self.data),
            ENV_MODELS: str(self.models),
            ENV_ADDRESS: self.metrics_address,
            ENV_STARTED: repr(self.started or time.time()),
            **({ENV_SNAPSHOTS: str(self.snapshots)} if self.snapshots else {}),
            **({ENV_MLPERF_STDOUT: "1"} if self.mlperf_on_stdout else {}),
            **({ENV_NODES: "{}:{}".format(*self.num_nodes)} if self.num_nodes[1] > 1 else {}),
        }

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> RunPaths:
        """Return the settings from :meth:`environment`; the defaults are a pod's mount paths."""
        fewest, _, most = environment.get(ENV_NODES, "1").partition(":")
        return RunPaths(
            output=Path(environment.get(ENV_OUTPUT, OUTPUT_PATH)),
            data=Path(environment.get(ENV_DATA, DATA_PATH)),
            models=Path(environment.get(ENV_MODELS, MODELS_PATH)),
            metrics_address=environment.get(ENV_ADDRESS, "127.0.0.1"),
            started=float(environment.get(ENV_STARTED, time.time())),
            process_restarts=sum(int(environment.get(name, "0")) for name in _RESTARTS),
            snapshots=Path(environment[ENV_SNAPSHOTS]) if ENV_SNAPSHOTS in environment else None,
            num_nodes=(int(fewest), int(most or fewest)),
            mlperf_on_stdout=ENV_MLPERF_STDOUT in environment,
        )


# Phases of a trainer, as local rank 0 of every node reports them at /progress and in the termination
# log; docs/operator.md has the keys. The rendezvous service answers at /progress too, with ``ranks``
# only, as their agents report them, and their ``pod``: it has an answer when a trainer is frozen.
#
# The slowdown of a straggler is its time over the median of all ranks for ``compute`` and
# ``backward``, the time of a step over that without what this rank takes longer for the rest.
#
# All seconds are measured by the trainer's monotonic clock until the response, so a reader on
# another machine compares no clocks: it adds the time since it received the response.


PROGRESS_PATH = "/progress"

Phase = Literal["import", "load", "compile", "step", "evaluate", "save", "sample", "finish"]
"""Phase of a trainer. Written by the trainer, read by the agent and the operator."""

IMPORT: Phase = "import"
"""Importing modules and joining the process group."""
LOAD: Phase = "load"
"""Loading encoders, weights or a checkpoint, or waiting for other ranks that do."""
COMPILE: Phase = "compile"
"""Compiling the model before training, or a first pass through it."""
STEP: Phase = "step"
"""The task itself: training steps, shards of the preprocess task, tars of the prepare task."""
EVALUATE: Phase = "evaluate"
"""Evaluating the validation set."""
SAVE: Phase = "save"
"""Waiting for a checkpoint; one that is written asynchronously is not a phase."""
SAMPLE: Phase = "sample"
"""Sampling images."""
FINISH: Phase = "finish"
"""Writing the last files, and waiting for other ranks."""

Cause = Literal["compute", "data", "backward", "optimizer"]
"""Why a rank is a straggler. Written by the trainer, read by the operator."""

COMPUTE: Cause = "compute"
"""Its forward passes take longer than those of other ranks."""
DATA: Cause = "data"
"""It waits for data."""
BACKWARD: Cause = "backward"
"""Its backward passes take longer than those of other ranks."""
OPTIMIZER: Cause = "optimizer"
"""Its optimizer step takes longer than that of other ranks."""

STRAGGLER_TEXTS: dict[Cause, str] = {
    COMPUTE: "computes forward passes {} as the median rank",
    BACKWARD: "computes backward passes {} as the median rank",
    OPTIMIZER: "makes steps {} by its optimizer step",
    DATA: "makes steps {} by waiting for data",
}
"""What a rank does, to be formatted with "N times as long"."""

PHASE_SECONDS: dict[Phase, float] = {
    IMPORT: 1200.0,  # joining the process group fails by itself after ten minutes
    LOAD: 1800.0,  # between two tensors, on storage that is slow to answer
    COMPILE: 3600.0,  # torch reports nothing while it compiles
    STEP: 1800.0,  # before the first step
    EVALUATE: 1800.0,  # between two batches
    SAVE: 3600.0,  # between two writes, on storage that is slow to acknowledge them
    SAMPLE: 1800.0,  # between two Euler steps, of which the first compiles
    FINISH: 1800.0,
}
"""Seconds without progress after which a process counts as stalled, by phase."""
_STEPS, _MIN_STEP_SECONDS, _MAX_STEP_SECONDS = 10.0, 60.0, 3600.0


def phase_of(name: object) -> Phase | None:
    return cast(Phase, name) if name in get_args(Phase) else None


def stall_seconds(phase: Phase, step_seconds: float | None) -> float:
    """Return the seconds without progress after which a process in ``phase`` counts as stalled.

    In phase ``step`` a minute and ten steps, for a slow disk or a data loader that is behind;
    ``step_seconds`` is None before the first step.
    """
    if phase != STEP or step_seconds is None:
        return PHASE_SECONDS[phase]
    return min(_MAX_STEP_SECONDS, _MIN_STEP_SECONDS + _STEPS * step_seconds)


# What the rendezvous service of a job reports at /members, read by the operator.
#
# attempt        of the agents, 0 before the first heartbeat
# generation     number of the newest world
# world          agents of that world in the order of their ranks
# alive          agents that send heartbeats, or whose world makes steps
# lostSeconds    seconds since the last heartbeat of each agent that is lost
# restarts       generation, cause and agent of the newest restarts
#
# The name of an agent begins with the uid of its pod. A restart is a generation that ended because
# trainers failed; it is one, however many agents report it.


MEMBERS_PATH = "/members"
PROCESS_FAILED = "ProcessFailed"
"""Cause of a restart: a trainer exited with an error. That may be the consequence of another's end."""
PROCESS_KILLED = "ProcessKilled"
"""A trainer was killed by a signal."""
PROCESS_OUT_OF_MEMORY = "ProcessOutOfMemory"
"""The kernel killed a trainer because its container was out of memory."""
_CAUSES = (PROCESS_FAILED, PROCESS_KILLED, PROCESS_OUT_OF_MEMORY)
MAX_RESTARTS = 64
"""Restarts that are told at once."""
_SEPARATOR = "."


def agent_name(pod: str, process: str) -> str:
    """Return the name of the agent that is ``process`` of the pod with uid ``pod``."""
    return f"{pod}{_SEPARATOR}{process}"


def pod_of(agent: str) -> str:
    """Return the uid of the pod of ``agent``."""
    return agent.partition(_SEPARATOR)[0]


def root_cause(causes: Iterable[str]) -> str:
    """Return the cause of a restart of which agents tell ``causes``; unknown ones count as `PROCESS_FAILED`.

    A trainer that lost its peer exits with an error, so a kill is the cause, and not the consequence.
    """
    known = (_CAUSES.index(cause) for cause in causes if cause in _CAUSES)
    return _CAUSES[max(known, default=0)]


# What ``fluxtrain stacks`` prints for each rank of a pod, read by ``kubectl fluxtrain stacks``.
#
# The stacks themselves are in the pod's log: those of one rank between its ``time`` and that of the
# next.


STACKS_COMMAND = ("fluxtrain", "stacks")
"""Command that makes all ranks of a pod print their stacks. Run in the pod by the plugin of kubectl."""
STACKS_SECONDS = 0.3
"""How long a rank has for printing its stacks, before the next one is asked; it takes milliseconds."""


@dataclass(frozen=True)
class RankProcess:
    """A rank's process, and whether it was asked for its stacks."""

    rank: int
    pid: int
    state: str
    """One letter, as in /proc/PID/stat: R, S, D (waits for a device or storage), T (stopped), Z (ended)."""
    time: float
    """Unix time of the node at which it was asked."""
    asked: bool = True
    """False before it has a handler of the signal, which would end it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return ascending ``numbers`` as texts; consecutive ones are one text, such as 0-3."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def read_ranks(text: str) -> list[RankProcess]:
    """Return the ranks in the output ``text`` of the command; lines that are none are skipped."""
    ranks = list[RankProcess]()
    for line in text.splitlines():
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            values = json.loads(line)
            ranks.append(
                RankProcess(
                    rank=int(values["rank"]),
                    pid=int(values["pid"]),
                    state=str(values["state"]),
                    time=float(values["time"]),
                    asked=bool(values["asked"]),
                )
            )
    return ranks


# Places of nodes, such as racks, as the operator tells them to the rendezvous service: one
# argument.
#
# Whoever may read a job's pods need not know the cluster's nodes and their labels. So the argument
# only has the digests of nodes' names, ``DIGEST,DIGEST;DIGEST``: those of one place, then those of
# the next one.


MAX_BYTES = 96 << 10
"""Of the argument; Linux allows 128 KiB."""
_DIGITS = 12
_ARGUMENT = re.compile(rf"(?:[0-9a-f]{{{_DIGITS}}}(?:[,;](?=[0-9a-f])|$))*")


def write_places(places: Mapping[str, str]) -> str:
    """Return the argument with the order of nodes' places, which are given by the nodes' names.

    Nodes without a place are left out, and the last ones if there are too many.
    """
    digests_of = dict[str, list[str]]()
    located = [(node, place) for node, place in places.items() if place]
    for node, place in located[: MAX_BYTES // (_DIGITS + 1)]:
        digests_of.setdefault(place, []).append(_digest(node))
    return ";".join(",".join(digests_of[place]) for place in sorted(digests_of, key=natural))


def read_places(text: str) -> dict[str, int]:
    """Return the numbers of nodes' places, by digest; ValueError if ``text`` is not from `write_places`."""
    if len(text) > MAX_BYTES or not _ARGUMENT.fullmatch(text):
        raise ValueError(f"got {text[:100]!r}; must be at most {MAX_BYTES} bytes of digests")
    groups = enumerate(text.split(";"))
    return {digest: number for number, group in groups for digest in group.split(",") if digest}


def place_of(node: str, places: Mapping[str, int]) -> int | None:
    """Return the number of the place of ``node``; None if it is not known."""
    return places.get(_digest(node)) if places else None


def natural(text: str) -> list[str | int]:
    """Return ``text`` as it sorts: numbers by their value, so that job-2 precedes job-10."""
    parts = re.split("([0-9]+)", text)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def _digest(node: str) -> str:
    return hashlib.sha256(node.encode()).hexdigest()[:_DIGITS]


# Environment variables for GPUs: the operator's pods and ``fluxtrain run`` have the same defaults.
#
# Left out of others' recipes: what TransformerEngine alone reads, a site's NICs, and channel counts
# that suit only a whole MI300X.


@dataclass(frozen=True)
class GpuVariable:
    """A variable that GPUs, collectives or torch read, and what others set it to; None: nothing."""

    name: str
    effect: str
    ours: str | None = None
    entry: str | None = None
    """In config_MI325X_08x08x32.sh of AMD's FLUX.1 entry in MLPerf Training v6.0."""
    primus: str | None = None
    """In runner/helpers/envs/base_env.sh of AMD's Primus."""
    fluxbenchmark: str | None = None
    """In the published commands of AMD's FluxBenchmark."""
    for_all: bool = False
    """Whether it is set for GPUs of other vendors too."""

    @property
    def sources(self) -> str:
        """Return who sets it to what, for people."""
        of_amd = {
            "MLPerf v6.0": self.entry,
            "Primus": self.primus,
            "FluxBenchmark": self.fluxbenchmark,
        }
        return ", ".join(f"{name} {value}" for name, value in of_amd.items() if value) or "our own"


GPU_VARIABLES = (
    GpuVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS", "1 delays FSDP2's reduce-scatters", primus="1", for_all=True
    ),
    GpuVariable(
        "GPU_MAX_HW_QUEUES", "queues of a GPU; ROCm has 4", primus="2", fluxbenchmark="8"
    ),
    GpuVariable("HSA_NO_SCRATCH_RECLAIM", "a queue keeps its scratch memory", "1", "1", "0"),
    GpuVariable("NCCL_CROSS_NIC", "each GPU uses the NIC of its rail", "0", primus="0"),
    GpuVariable("NCCL_PXN_DISABLE", "0: messages may take another GPU's NIC", "0", "0", "1"),
    GpuVariable("TORCH_BLAS_PREFER_HIPBLASLT", "products by hipBLASLt", "1", "1"),
    GpuVariable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "a hung collective leaves a record", "1", for_all=True
    ),
    GpuVariable(
        "TORCH_NCCL_HIGH_PRIORITY", "collectives precede waiting compute", "1",
        primus="1", fluxbenchmark="0", for_all=True,
    ),
    GpuVariable("ROCBLAS_USE_HIPBLASLT", "rocBLAS passes products on", fluxbenchmark="1"),
    GpuVariable("DISABLE_ADDMM_CUDA_LT", "addmm by hipBLASLt; torch does", fluxbenchmark="0"),
    GpuVariable("HIP_FORCE_DEV_KERNARG", "kernels' arguments lie in the GPU", fluxbenchmark="1"),
)  # fmt: skip
"""Where AMD's recipes differ, ours follow its FLUX.1 entry, the fastest that is published for MI325X."""


def gpu_environment(is_amd: bool) -> dict[str, str]:
    """Return the variables for GPUs of AMD, or of another vendor; a user's values override them."""
    return {
        each.name: each.ours
        for each in GPU_VARIABLES
        if each.ours is not None and (is_amd or each.for_all)
    }
