"""The runs of one result from one file: their jobs, how far they are, and the ten that count."""
