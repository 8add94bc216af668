"""Estimate the memory, time and disk space of a job."""

from fluxtrain.plan.estimate import Plan, make_plan
from fluxtrain.plan.measured import MeasuredSpeeds
from fluxtrain.plan.table import render

__all__ = ["MeasuredSpeeds", "Plan", "make_plan", "render"]
