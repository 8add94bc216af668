"""Images drawn from a model: the grid of a training run, and the sample task."""
