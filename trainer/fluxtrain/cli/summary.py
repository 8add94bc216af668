"""What ``fluxtrain run`` says at the end: what came out, and where to look."""

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


def say_where_to_look(output: Path, config: RunConfig) -> None:
    """Print the run's result and its files on stdout's own lines."""
    records = read_records(output / METRICS_FILE)
    evaluations = [record for record in records if "eval_loss" in record]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        print(
            f"evaluation loss {first['eval_loss']:.4f} (step {first['step']}) → "
            f"{last['eval_loss']:.4f} (step {last['step']})"
        )
    shown = _shortened(output)
    rows = [("resolved config", CONFIG_FILE), ("every logged step", METRICS_FILE)]
    rows += [("loss curve", LOSS_FILE)] if (output / LOSS_FILE).exists() else []
    pictures = sorted((output / SAMPLES_FOLDER).glob("step_*.png"))
    rows += [("pictures", f"{SAMPLES_FOLDER}/{pictures[-1].name}")] if pictures else []
    rows += [("checkpoints", f"{CHECKPOINTS_FOLDER}/"), ("MLPerf log", MLPERF_FILE)]
    for title, name in rows:
        print(f"  {title:<18} {shown}/{name}")
    print(f"  {'MLCommons says':<18} {_verdict(output / MLPERF_FILE)}")


def _verdict(log: Path) -> str:
    """Return one line: accepted by which ruleset, or the first reason why not."""
    ruleset = RULESETS[-1]
    verdict = check(log, ruleset)
    if verdict.success:
        return f"SUCCESS (compliance checker, ruleset {ruleset})"
    reason = verdict.explanations[0] if verdict.explanations else "see fluxtrain mlperf check"
    return f"not accepted under ruleset {ruleset}: {reason}"


def _shortened(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
