"""Grafana dashboards of jobs and the operator, as Python."""
