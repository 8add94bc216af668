"""The training state: checkpoints, snapshots in memory, and what a run continues from."""
