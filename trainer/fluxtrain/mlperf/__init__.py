"""The MLPerf log: writing it, going on with it after a restart, and asking MLCommons' checker about it."""

from fluxtrain.mlperf.compliance import RULESETS, Verdict, check, render
from fluxtrain.mlperf.facts import RunFacts
from fluxtrain.mlperf.log import MLPerfLog

__all__ = ["RULESETS", "MLPerfLog", "RunFacts", "Verdict", "check", "render"]
