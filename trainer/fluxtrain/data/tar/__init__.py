"""WebDataset tars of images and captions: indexed, read at random, written."""
