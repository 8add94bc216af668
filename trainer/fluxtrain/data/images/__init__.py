"""Image data sets: WebDataset tars or Arrow streams of images and captions."""
