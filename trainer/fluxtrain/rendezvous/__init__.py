"""The rendezvous of a job: membership of its agents, decided by a service of its own; without torch."""
