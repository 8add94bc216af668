"""Read and write weights of the transformer: BFL's files, diffusers' folders, our own checkpoints."""

from fluxtrain.weights.reader import Weights, open_weights
from fluxtrain.weights.writer import LAYOUTS, write_weights

__all__ = ["LAYOUTS", "Weights", "open_weights", "write_weights"]
