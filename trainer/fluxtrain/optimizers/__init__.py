"""Optimizers on this rank's parts of sharded parameters, equal to their authors' on whole ones."""
