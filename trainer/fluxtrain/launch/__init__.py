"""Processes of a run: torchrun's agent, the rendezvous, and the entry of one rank."""
