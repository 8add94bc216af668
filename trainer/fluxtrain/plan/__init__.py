"""Estimate the memory, time and disk space of a job, and verify it on fake tensors."""
