"""WebDataset tars of images and captions: read at random, written, indexed."""
