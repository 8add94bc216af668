"""Ranks together: the process group, FSDP2, compilation, what they send, and the preflight."""
