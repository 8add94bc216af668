"""What the launcher and the trainer agree on: environment, ports, mount paths, file names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENV_CONFIG = "FLUXTRAIN_CONFIG"
"""The resolved RunConfig, a JSON file. From ``fluxtrain run`` or the config map, read by the trainer."""
ENV_OUTPUT = "FLUXTRAIN_OUTPUT"
"""Folder of the run's output. Set by ``fluxtrain run`` or the pod, read by the trainer."""
ENV_DATA = "FLUXTRAIN_DATA"
"""Root of relative data paths. Set by ``fluxtrain run`` or the pod, read by the trainer."""
ENV_MODELS = "FLUXTRAIN_MODELS"
"""Root of relative model paths. Set by ``fluxtrain run`` or the pod, read by the trainer."""
ENV_ADDRESS = "FLUXTRAIN_METRICS_ADDRESS"
"""Address that /metrics listens on: 127.0.0.1 on a laptop, the pod's own in a cluster."""
ENV_STARTED = "FLUXTRAIN_STARTED"
"""Unix time at which the launcher began. Set by the launcher, read by the trainer for the MLPerf log."""

ENV_PROCESS_RESTARTS = "FLUXTRAIN_PROCESS_RESTARTS"
"""Process restarts of the job before this pod. Set by the operator; the trainer adds torchrun's own
(``TORCHELASTIC_RESTART_COUNT``) and tells the sum as ``processRestarts`` in /progress."""

ENV_GPUS = "FLUXTRAIN_GPUS"
"""GPUs that the pod asked for (``spec.gpusPerNode``), left out for none. Set by the operator; the agent
refuses to train on fewer."""

ENV_FATAL_ERROR = "FLUXTRAIN_VERDICT"
"""File for the exit code and message of a trainer that no restart in place can help; it then calls its
agent with SIGUSR1. Set by the agent, read by the trainer."""
ENV_TERMINATION_MESSAGE = "FLUXTRAIN_LAST_WORDS"
"""File for the progress of a trainer that ends. Set by the agent, read by local rank 0."""
TERMINATION_LOG = "/dev/termination-log"
"""What kubelet puts into the pod's status, as JSON: the keys of /progress, and ``message``. Written by the
agent, read by the operator."""

METRICS_PORT = 9464
"""Port of /metrics and /progress, on local rank 0 of each node. Read by Prometheus and the operator."""
RENDEZVOUS_PORT = 29500
"""Port of the rendezvous store; torchrun's own default. Held by its pod, dialled by every agent."""

DATA_PATH = "/data"
MODELS_PATH = "/models"
OUTPUT_PATH = "/output"

CONFIG_FILE = "config.json"
MLPERF_FILE = "mlperf.log"
METRICS_FILE = "metrics.jsonl"
LOSS_FILE = "loss.png"
SAMPLES_FOLDER = "samples"
LEDGER_FOLDER = "ledger"
CHECKPOINTS_FOLDER = "checkpoints"


_RESTARTS = (ENV_PROCESS_RESTARTS, "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class RunPaths:
    """Where a run reads and writes."""

    output: Path
    data: Path
    models: Path
    metrics_address: str = "127.0.0.1"
    started: float | None = None
    """Unix time at which the launcher began; the MLPerf log's init starts then."""
    process_restarts: int = 0
    """How often processes were started anew inside pods that lived on."""

    def environment(self) -> dict[str, str]:
        """Return the environment that tells a trainer these places."""
        return {
            ENV_OUTPUT: str(self.output),
            ENV_DATA: str(self.data),
            ENV_MODELS: str(self.models),
            ENV_ADDRESS: self.metrics_address,
            ENV_STARTED: repr(self.started or time.time()),
        }

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> RunPaths:
        """Return the places that :meth:`environment` described; a pod's mounts where nothing is set."""
        return RunPaths(
            output=Path(environment.get(ENV_OUTPUT, OUTPUT_PATH)),
            data=Path(environment.get(ENV_DATA, DATA_PATH)),
            models=Path(environment.get(ENV_MODELS, MODELS_PATH)),
            metrics_address=environment.get(ENV_ADDRESS, "127.0.0.1"),
            started=float(environment.get(ENV_STARTED, time.time())),
            process_restarts=sum(int(environment.get(name, "0")) for name in _RESTARTS),
        )
