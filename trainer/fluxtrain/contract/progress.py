"""Phases of a trainer, as reported at /progress by local rank 0 of every node and in the termination log.

Besides the numbers of the run, the report always has:

| key | value |
|---|---|
| ``rank`` | rank of the process |
| ``numNodes`` | current number of nodes of the run |
| ``phase`` | one of the phases below |
| ``aliveTime`` | Unix time of the last progress of any kind |

Progress is: a weight loaded, a batch read, a step launched on the device, a batch evaluated, an Euler step or
an image completed, bytes of a checkpoint or a shard written, a new phase. A running process alone is not.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["loading", "running", "evaluating", "saving", "sampling", "finishing", "complete"]
"""Phase of a trainer. Written by the trainer, read by the operator."""

LOADING: Phase = "loading"
"""Loading encoders, weights or a checkpoint, or waiting for other ranks that do."""
RUNNING: Phase = "running"
"""The task itself: training steps, shards of the preprocess task, tars of the prepare task."""
EVALUATING: Phase = "evaluating"
"""Evaluating the validation set."""
SAVING: Phase = "saving"
"""Waiting for a checkpoint; one that is written asynchronously is not a phase."""
SAMPLING: Phase = "sampling"
"""Sampling images."""
FINISHING: Phase = "finishing"
"""Writing the last files, or waiting for other ranks."""
COMPLETE: Phase = "complete"
"""Everything is written; the process exits once all ranks are here."""
