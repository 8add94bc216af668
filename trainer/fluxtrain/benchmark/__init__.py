"""The benchmark task: the largest micro batch that fits, and the speed of real training steps."""
