"""Environment variables, ports, mount paths and file names shared by launcher, trainer and operator."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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

    def environment(self) -> dict[str, str]:
        """Return the environment variables of these settings for a trainer."""
        return {
            ENV_OUTPUT: str(self.output),
            ENV_DATA: str(self.data),
            ENV_MODELS: str(self.models),
            ENV_ADDRESS: self.metrics_address,
            ENV_STARTED: repr(self.started or time.time()),
            **({ENV_SNAPSHOTS: str(self.snapshots)} if self.snapshots else {}),
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
        )
