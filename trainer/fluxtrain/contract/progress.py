"""What a trainer says at /progress, on local rank 0 of every node, and as its last words.

Beside the numbers of the run it tells, from the moment that it can be asked:

| key | value |
|---|---|
| ``rank`` | its rank in the run |
| ``numNodes`` | nodes of the run as it is now |
| ``phase`` | one of the phases below |
| ``aliveTime`` | Unix time of the newest sign of progress, of whatever kind |

A sign of progress is something that got done: a weight loaded, a batch read, a step given to the device, a
batch evaluated, an Euler step or a picture drawn, bytes of a checkpoint or a shard written, a phase begun.
That the process lives is none.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["loading", "running", "evaluating", "saving", "sampling", "finishing", "complete"]
"""What a trainer is at. Written by the trainer, read by the operator."""

LOADING: Phase = "loading"
"""Encoders, weights or a checkpoint are read, or other ranks are waited for that do."""
RUNNING: Phase = "running"
"""The task itself: steps of a training, shards of a preprocessing, tars of a preparation."""
EVALUATING: Phase = "evaluating"
"""The validation set is gone through."""
SAVING: Phase = "saving"
"""A checkpoint is waited for; one that is written beside the steps is no phase."""
SAMPLING: Phase = "sampling"
"""Images are drawn."""
FINISHING: Phase = "finishing"
"""Its own part is done: last files are written, other ranks are waited for."""
COMPLETE: Phase = "complete"
"""Everything is done and written; it leaves as soon as all ranks are here."""
