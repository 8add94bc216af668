"""Data sets on disk and the batches that a run reads from them."""
