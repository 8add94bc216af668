"""Phases of a trainer, as reported at /progress by local rank 0 of every node and in the termination log.

The rendezvous service of a job answers at /progress too, with ``ranks`` only, as their agents report them: it
has an answer when a trainer is frozen. Each of these entries also has ``pod``, the uid of the rank's pod.

Besides the numbers of the run, the report always has:

| key | value |
|---|---|
| ``rank`` | rank of the process |
| ``numNodes`` | current number of nodes of the run |
| ``phase`` | one of the phases below |
| ``secondsInPhase`` | seconds since the phase began |
| ``secondsSinceProgress`` | seconds since the last progress of any kind |
| ``secondsSinceStep`` | seconds since the last step; after the first |
| ``phaseSeconds`` | seconds that the process has spent in each phase, by phase |
| ``stepSeconds`` | mean seconds of a step in phase ``step``; after the first |
| ``straggler`` | the slowest rank, see below; absent or null if there is none |
| ``ranks`` | only at /progress: those of each rank of the node, ``generation``, ``stack``, ``frozen`` |

A rank has a ``stack`` if it stalls. It is ``frozen`` if its process has not written its progress, as a thread
does once a second, for ten seconds.

A straggler is an object with ``rank``, ``host``, ``pod`` (its uid), ``cause`` and ``slowdown``: its time over
the median of all ranks for ``compute`` and ``backward``, the time of a step over that without what this rank
takes longer than the median for ``data`` and ``optimizer``.

All seconds are measured by the trainer's monotonic clock until the response, so a reader on another machine
compares no clocks: it adds the time since it received the response.

Progress is: a weight loaded, a batch read, a step launched on the device, a batch evaluated, an Euler step or
an image completed, bytes of a checkpoint or a shard written, a new phase. A running process alone is not.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

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

_OLD_NAMES: dict[str, Phase] = {
    "loading": LOAD,
    "running": STEP,
    "evaluating": EVALUATE,
    "saving": SAVE,
    "sampling": SAMPLE,
    "finishing": FINISH,
    "complete": FINISH,
}
"""Names in the first trainers of 0.1.0, which run on while the operator is upgraded."""

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
    """Return the phase with ``name``, which may be an old one; None if it is no phase."""
    if name in get_args(Phase):
        return cast(Phase, name)
    return _OLD_NAMES.get(name) if isinstance(name, str) else None


def stall_seconds(phase: Phase, step_seconds: float | None) -> float:
    """Return the seconds without progress after which a process in ``phase`` counts as stalled.

    In phase ``step`` a minute and ten steps, for a slow disk or a data loader that is behind;
    ``step_seconds`` is None before the first step.
    """
    if phase != STEP or step_seconds is None:
        return PHASE_SECONDS[phase]
    return min(_MAX_STEP_SECONDS, _MIN_STEP_SECONDS + _STEPS * step_seconds)
