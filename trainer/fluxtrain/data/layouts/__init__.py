"""The layouts of encoded data sets: our shards, and MLCommons' Arrow, parquet and WebDataset."""
