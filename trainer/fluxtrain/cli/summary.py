"""The summary that ``fluxtrain run`` prints at the end: the result and the output files."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.contract.launch import (
    ADAPTERS_FOLDER,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    GALLERY_FILE,
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
    for title, name in _files(output, config):
        print(f"  {title:<18} {folder}/{name}")
    if config.initial_weights is None:  # an MLPerf run starts from random ones
        print(f"  {'MLPerf check':<18} {_check_result(output / MLPERF_FILE)}")


def _files(output: Path, config: RunConfig) -> list[tuple[str, str]]:
    """Return titles and names of the files in ``output``, what is used elsewhere first."""
    images = sorted((output / SAMPLES_FOLDER).glob("step_*.png"))
    rows = [
        ("adapter", f"{ADAPTERS_FOLDER}/{config.adapter_file.name}.safetensors"),
        ("page", GALLERY_FILE),
        ("images", f"{SAMPLES_FOLDER}/{images[-1].name if images else ''}"),
        ("loss curve", LOSS_FILE),
        ("resolved config", CONFIG_FILE),
        ("every logged step", METRICS_FILE),
        ("checkpoints", f"{CHECKPOINTS_FOLDER}/"),
        ("MLPerf log", MLPERF_FILE),
    ]
    return [(title, name) for title, name in rows if (output / name).exists()]


def _check_result(log: Path) -> str:
    """Return the result of the compliance checker in one line, with its first finding."""
    ruleset = RULESETS[-1]
    result = check(log, ruleset)
    if result.success:
        return f"SUCCESS (compliance checker, ruleset {ruleset})"
    reason = result.explanations[0] if result.explanations else "see fluxtrain mlperf check"
    return f"not accepted under ruleset {ruleset}: {reason}"
