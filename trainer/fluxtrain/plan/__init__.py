"""Estimate the memory, time and disk space of a job."""

from fluxtrain.plan.estimate import Plan, assumed_gpu, make_plan
from fluxtrain.plan.measured import MeasuredSpeeds
from fluxtrain.plan.pictures import plan_pictures
from fluxtrain.plan.table import render

__all__ = ["MeasuredSpeeds", "Plan", "assumed_gpu", "make_plan", "plan_pictures", "render"]
