"""Grafana dashboards as Python: what a job and the operator look like while they work."""
