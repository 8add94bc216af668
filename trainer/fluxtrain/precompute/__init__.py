"""The preprocess task: pictures and captions to encoded shards, each made once, by whatever ranks there are.

A shard is a range of the input's samples, encoded in batches that begin with it. So what it holds is
decided by the input and the settings alone; ranks, restarts and their moments change nothing. A shard that
is there is done. There is no other state, and no rank waits for another inside a collective.
"""

from fluxtrain.precompute.target import Target, open_targets
from fluxtrain.precompute.task import preprocess

__all__ = ["Target", "open_targets", "preprocess"]
