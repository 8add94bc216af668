"""Data sets that a command makes."""
