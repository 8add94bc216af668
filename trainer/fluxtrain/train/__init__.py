"""The training: its loop, a step, evaluation, and the data sources of a run."""
