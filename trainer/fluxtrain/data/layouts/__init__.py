"""Layouts of encoded samples: MLCommons' Arrow, parquet and WebDataset beside our own shards."""
