"""What files hold samples: tar, Arrow, Parquet, WebDataset and MLCommons' forms."""
