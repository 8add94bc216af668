"""Which fields decide what is computed: they stay as they are while a run lives.

A resume with other values would be another run, so checkpoints refuse it and the API server refuses
the change (a CEL rule per section).
"""

from __future__ import annotations

FIXED = ("preset", "task", "seed")
"""Fields of RunConfig itself that never change."""

MAY_CHANGE: dict[str, frozenset[str]] = {
    "model": frozenset(),
    "data": frozenset(
        {
            "train",
            "validation",
            "empty_encodings",
            "num_workers",
            "prefetch",
            "verify_checksums",
            "max_bad_fraction",
        }
    ),
    "encoders": frozenset({"t5", "clip", "autoencoder"}),
    "flow": frozenset(),
    "optim": frozenset(),
    "schedule": frozenset({"steps"}),
    "precision": frozenset(),
}
"""Sections that decide the trajectory, each with the fields that do not: places and resources."""
