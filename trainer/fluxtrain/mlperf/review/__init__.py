"""Review of MLPerf runs, results and packages by the rules that MLCommons' tools do not check."""

from fluxtrain.mlperf.evidence import (
    FAILED_FILE,
    WAIVERS_FILE,
    FailedRun,
    Result,
    Run,
    is_file,
    read_finished_run,
    read_run,
)
from fluxtrain.mlperf.review.results import read_results
from fluxtrain.mlperf.review.review import (
    RULES,
    all_rule_findings,
    render,
    review,
    rule_findings,
    split,
    tool_findings,
)
from fluxtrain.mlperf.review.rule import Finding
from fluxtrain.mlperf.review.waivers import parse as parse_waivers

__all__ = [
    "FAILED_FILE",
    "RULES",
    "WAIVERS_FILE",
    "FailedRun",
    "Finding",
    "Result",
    "Run",
    "all_rule_findings",
    "is_file",
    "parse_waivers",
    "read_finished_run",
    "read_results",
    "read_run",
    "render",
    "review",
    "rule_findings",
    "split",
    "tool_findings",
]
