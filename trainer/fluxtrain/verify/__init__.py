"""Verify a plan: one real step on fake tensors, in a process group of any size that does nothing."""

from fluxtrain.verify.comparison import Comparison, verify
from fluxtrain.verify.table import render

__all__ = ["Comparison", "render", "verify"]
