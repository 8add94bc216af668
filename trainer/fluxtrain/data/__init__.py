"""From shards on disk to the batches of a run."""
