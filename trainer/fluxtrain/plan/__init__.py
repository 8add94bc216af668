"""What a job will need and take, worked out before any GPU is asked for."""

from fluxtrain.plan.estimate import Plan, make_plan
from fluxtrain.plan.table import render

__all__ = ["Plan", "make_plan", "render"]
