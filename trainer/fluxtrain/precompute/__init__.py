"""The preprocess task: encodes images and captions into shards, each exactly once, on any number of ranks.

A shard is a fixed range of the input's samples, encoded in batches that start with the range. Its content
depends only on the input and the settings, not on the number of ranks or on restarts. A shard that exists is
finished; there is no other state, and ranks do not wait for each other in collectives.
"""

from fluxtrain.precompute.output import EncodedOutput, open_outputs
from fluxtrain.precompute.task import preprocess

__all__ = ["EncodedOutput", "open_outputs", "preprocess"]
