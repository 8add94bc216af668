"""The summary that ``fluxtrain run`` prints at the end: the result and the output files."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.contract.launch import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LOSS_FILE,
    METRICS_FILE,
    MLPERF_FILE,
    SAMPLES_FOLDER,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.mlperf import RULESETS, check
from fluxtrain.report.records import read_records


def print_summary(output: Path, config: RunConfig) -> None:
    """Print the evaluation losses, the output files and the result of the compliance check."""
    records = read_records(output / METRICS_FILE)
    evaluations = [record for record in records if "eval_loss" in record]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        print(
            f"evaluation loss {first['eval_loss']:.4f} (step {first['step']}) → "
            f"{last['eval_loss']:.4f} (step {last['step']})"
        )
    folder = output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output
    rows = [("resolved config", CONFIG_FILE), ("every logged step", METRICS_FILE)]
    rows += [("loss curve", LOSS_FILE)] if (output / LOSS_FILE).exists() else []
    images = sorted((output / SAMPLES_FOLDER).glob("step_*.png"))
    rows += [("images", f"{SAMPLES_FOLDER}/{images[-1].name}")] if images else []
    rows += [("checkpoints", f"{CHECKPOINTS_FOLDER}/"), ("MLPerf log", MLPERF_FILE)]
    for title, name in rows:
        print(f"  {title:<18} {folder}/{name}")
    print(f"  {'MLPerf check':<18} {_check_result(output / MLPERF_FILE)}")


def _check_result(log: Path) -> str:
    """Return the result of the compliance checker in one line, with its first finding."""
    ruleset = RULESETS[-1]
    result = check(log, ruleset)
    if result.success:
        return f"SUCCESS (compliance checker, ruleset {ruleset})"
    reason = result.explanations[0] if result.explanations else "see fluxtrain mlperf check"
    return f"not accepted under ruleset {ruleset}: {reason}"
