"""The chain beside an MLPerf log: each hash depends on all lines before, so a later change shows."""

from fluxtrain.mlperf.chain.chain import Chain
from fluxtrain.mlperf.chain.verdict import Verdict
from fluxtrain.mlperf.chain.verify import Head, read_heads, verify

__all__ = ["Chain", "Head", "Verdict", "read_heads", "verify"]
