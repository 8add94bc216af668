"""Snapshots of the training state in memory that outlives the processes, and in a second node's memory."""
