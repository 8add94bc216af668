"""The MLPerf log: writing it, resuming it after a restart, and checking it with MLCommons' checker."""

from fluxtrain.mlperf.compliance import RULESETS, CheckResult, check, render
from fluxtrain.mlperf.facts import RunFacts
from fluxtrain.mlperf.log import MLPerfLog

__all__ = ["RULESETS", "CheckResult", "MLPerfLog", "RunFacts", "check", "render"]
