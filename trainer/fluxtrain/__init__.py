"""fluxtrain: train FLUX.1, from a laptop to a cluster."""

__version__ = "0.1.0"
