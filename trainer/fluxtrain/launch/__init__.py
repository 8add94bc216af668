"""Processes of a run: torchrun's agent, the rendezvous store, and the entry point of one rank."""
