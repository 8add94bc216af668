"""Reporting of a run: metrics, records, loss curve, terminal."""
