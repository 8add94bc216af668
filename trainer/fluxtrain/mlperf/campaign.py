"""Fetch logs and configs of finished FluxTrainings with kubectl.

`fluxtrain mlperf package` needs the complete MLPerf log: that in the output volume, or of the last rank-0
pod, which has it too after restarts, if no log was rotated. The resolved config is in the job's config map.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from statistics import pstdev
from typing import Any, Literal

from fluxtrain.contract.model_base import validate
from fluxtrain.contract.process import CHAIN_FILE, CONFIG_FILE, MLPERF_FILE
from fluxtrain.contract.resource.fluxtraining import LABEL_JOB, FluxTraining
from fluxtrain.contract.run.config import RANDOM_SEED
from fluxtrain.contract.run.presets import MLPERF_TARGET_LOSS
from fluxtrain.contract.run.resolve import merge, require_no_lost_nulls, resolve
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.mlperf import rcp
from fluxtrain.mlperf.compliance import best_fit, describe_fit, fit, sanitize
from fluxtrain.mlperf.evidence import FailedRun, Run, read_run
from fluxtrain.mlperf.facts import DIVISION_KEY
from fluxtrain.mlperf.jobs import RAN_JOB_FILE, items, jobs_of, kubectl, ran_job, read_outputs
from fluxtrain.mlperf.log_lines import NO_TARGET, TOKEN, Outcome, month_of, target_of
from fluxtrain.mlperf.rcp import median_window
from fluxtrain.report.records import EvaluationPoint, samples_to_target
from fluxtrain.runtime.progress import counted

_END = '"run_stop"'
_NOT_OVER = ("waiting", "training")


@dataclass(frozen=True)
class Collected:
    """The runs of some jobs."""

    folders: list[Path]
    """Output folders of those that ended."""
    failed: list[FailedRun]


def collect(selector: str, namespace: str | None, folder: Path) -> Collected:
    """Write log, config and spec of the jobs with the labels ``selector`` into folders below ``folder``.

    A Failed job whose log has an end is a run like those that are Complete. Raises ConfigError if kubectl is
    missing or fails, if a job is not over, or if neither the volume nor a pod of a Complete one has its log.
    """
    jobs = jobs_of(selector, namespace)
    for job in jobs:
        phase = job.get("status", {}).get("phase")
        if phase not in ("Complete", "Failed"):
            text = "must be Complete or Failed: all runs are in the record"
            raise ConfigError(str(job["metadata"]["name"]), phase or "no phase yet", text)
    volumes = read_outputs(jobs, namespace)
    collected = Collected([], [])
    for job in jobs:
        if (failed := _failed(job, namespace, volumes, folder)) is not None:
            collected.failed.append(failed)
        else:
            collected.folders.append(_fetch(job, namespace, volumes, folder))
    return collected


def log_of_pods(name: str, namespace: str | None) -> str:
    """Return the MLPerf log of a job, of the pod that has most of it; empty if none has any."""
    logs = []
    for pod in items("pods", f"{LABEL_JOB}={name}", namespace):
        try:
            text = kubectl(namespace, "logs", str(pod["metadata"]["name"]))
        except ConfigError:  # its container has not started, or is gone
            continue
        lines = [line for line in text.splitlines() if TOKEN in line]
        if any(_END in line for line in lines):
            return "\n".join(lines) + "\n"
        logs.append("".join(f"{line}\n" for line in lines))
    return max(logs, key=len, default="")


def _failed(
    job: dict[str, Any],
    namespace: str | None,
    volumes: Mapping[str, Mapping[str, str]],
    folder: Path,
) -> FailedRun | None:
    name, status = str(job["metadata"]["name"]), job["status"]
    if status["phase"] != "Failed":
        return None
    log = volumes.get(name, {}).get(MLPERF_FILE) or log_of_pods(name, namespace)
    if _END in log:
        return None
    told = [each for each in status.get("conditions", ()) if each["type"] == "Failed"]
    reason = ": ".join(str(each[key]) for each in told for key in ("reason", "message"))
    run = None
    if log:
        path = folder / f"{name}.log"
        path.write_text(log, encoding="utf-8")
        run = read_run(path)
    return FailedRun(name, reason, status.get("exitCode"), run)


def _fetch(
    job: dict[str, Any],
    namespace: str | None,
    volumes: Mapping[str, Mapping[str, str]],
    folder: Path,
) -> Path:
    name = str(job["metadata"]["name"])
    output = folder / name
    output.mkdir()
    found = volumes.get(name, {})
    log = found.get(MLPERF_FILE, "")
    if _END not in log and _END not in (log := log_of_pods(name, namespace)):
        text = (
            "neither its output volume nor a pod has its MLPerf log; keep the pods "
            "(spec.lifecycle.cleanPods: Running or None), or give the output folders instead"
        )
        raise ConfigError(name, UNSET, text)
    (output / MLPERF_FILE).write_text(log, encoding="utf-8")
    if CHAIN_FILE in found:
        (output / CHAIN_FILE).write_text(found[CHAIN_FILE], encoding="utf-8")
    pods = items("pods", f"{LABEL_JOB}={name}", namespace)
    (output / RAN_JOB_FILE).write_text(json.dumps(ran_job(job, pods)), encoding="utf-8")
    (output / CONFIG_FILE).write_text(
        found.get(CONFIG_FILE) or _config(job, namespace), encoding="utf-8"
    )
    return output


def _config(job: dict[str, Any], namespace: str | None) -> str:
    """Return the resolved config, from the config map of the job's revision."""
    revision = str(job["status"].get("revision"))
    text = kubectl(namespace, "get", "configmap", revision, "--ignore-not-found", "--output=json")
    data = json.loads(text).get("data", {}) if text.strip() else {}
    if CONFIG_FILE not in data:
        raise ConfigError(str(job["metadata"]["name"]), UNSET, "its config map is gone")
    return str(data[CONFIG_FILE])


LABEL = "campaign"
"""Label of the jobs of a campaign, with its name. Set by `fluxtrain mlperf campaign`, read by selectors."""
MOST_RUNS = 100
_MOST_NAME = 59  # with a number and in pods' names
_OF_ALL = ("namespace", "annotations")
"""Of the metadata: what else is there is of one object of a cluster."""
_NO_RESUME = {"every_steps": 0, "memory_every_steps": 0}


def campaign_jobs(file: Mapping[str, Any], runs: int, parallel: int) -> list[dict[str, Any]]:
    """Return the jobs of ``runs`` runs of ``file``, a FluxTraining; ``parallel`` of them train at a time.

    Each has a random seed and an output folder of its own, and starts over rather than resume. Raises
    ConfigError naming what a run of a result must not have, or must have, and nulls that kubectl would drop.
    """
    if not 1 <= runs <= MOST_RUNS:
        raise ConfigError("--runs", runs, f"must be between 1 and {MOST_RUNS}")
    if not 1 <= parallel <= runs:
        raise ConfigError("--parallel", parallel, f"must be between 1 and --runs, {runs}")
    _require_campaign(file)
    jobs = [_job(file, number, parallel) for number in range(runs)]
    for job in jobs:
        run = validate(FluxTraining, job, "").spec.run
        resolve(run)
        require_no_lost_nulls(run)
    return jobs


def run_name(file: Mapping[str, Any], number: int) -> str:
    return f"{file['metadata']['name']}-{number:02}"


def _require_campaign(file: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``file``, a valid FluxTraining, cannot be run several times for one result."""
    spec = validate(FluxTraining, file, "").spec
    if len(name := file["metadata"]["name"]) > _MOST_NAME:
        text = f"must have at most {_MOST_NAME} characters: each run appends its number"
        raise ConfigError("metadata.name", name, text)
    if spec.nodes.min != spec.nodes.max:
        text = f"must be equal to max, {spec.nodes.max}: a result's runs are of the same nodes"
        raise ConfigError("spec.nodes.min", spec.nodes.min, text)
    labels = file["metadata"].get("labels")
    if labels is not None and not isinstance(labels, Mapping):
        raise ConfigError("metadata.labels", labels, "must be a mapping of names to strings")
    if (seconds := spec.lifecycle.ttl_seconds_after_finished) is not None:
        text = "must be left out: each run, a failed one too, stays in the record"
        raise ConfigError("spec.lifecycle.ttlSecondsAfterFinished", seconds, text)
    if (seed := spec.run.get("seed", RANDOM_SEED)) != RANDOM_SEED:
        text = f"must be {RANDOM_SEED}, or left out: each run draws its own"
        raise ConfigError("spec.run.seed", seed, text)
    if resolve(spec.run).task != "train":
        raise ConfigError("spec.run.task", spec.run.get("task"), "must be train")
    output = spec.storage.output
    if output is None or output.empty_dir is not None:
        text = "must be given, and not be an emptyDir, which is lost with its pod"
        raise ConfigError("spec.storage.output", UNSET, text)


def _job(file: Mapping[str, Any], number: int, parallel: int) -> dict[str, Any]:
    name, metadata, spec = run_name(file, number), file["metadata"], file["spec"]
    campaign = metadata["name"]
    folder = spec.get("storage", {}).get("outputFolder") or campaign
    own = {
        "run": {"seed": RANDOM_SEED, "checkpoint": _NO_RESUME},
        "storage": {"outputFolder": f"{folder}/{name}"},
        "restart": {"maxRestarts": 0},
    }
    if number >= parallel:
        before = run_name(file, number - parallel)
        own["lifecycle"] = {"startAfter": [before], "startWhen": "Ended"}
    labels = {**(metadata.get("labels") or {}), LABEL: campaign}
    kept = {key: metadata[key] for key in _OF_ALL if metadata.get(key) is not None}
    return {
        "apiVersion": file["apiVersion"],
        "kind": file["kind"],
        "metadata": {"name": name, **kept, "labels": labels},
        "spec": merge(spec, own),
    }


State = Outcome | Literal["failed"]


@dataclass(frozen=True)
class ObservedRun:
    """A run of a campaign; ``phase`` is that of its job, empty if only its log is known."""

    name: str
    log: Run | None
    phase: str = ""

    @property
    def state(self) -> State:
        """Return what the log says of the run; it failed if its job did before the log's end."""
        state = "waiting" if self.log is None else self.log.outcome
        return "failed" if state in _NOT_OVER and self.phase == "Failed" else state

    @property
    def is_over(self) -> bool:
        return self.state not in _NOT_OVER

    @cached_property
    def evaluations(self) -> list[EvaluationPoint]:
        """Return the training samples and the loss of each evaluation that has one."""
        lines = [] if self.log is None else self.log.all("eval_accuracy")
        return [
            (line.samples, line.measured)
            for line in lines
            if line.samples is not None and line.measured is not None
        ]

    @property
    def forecast(self) -> int | None:
        """Return the samples at which the run reached its target, or will; None if it did not, or unknown."""
        if self.is_over or self.log is None:
            return None if self.log is None else self.log.samples
        target, every = target_of(self.log.lines), self.log.number("evaluation_frequency")
        return samples_to_target(self.evaluations, target, every or 0)


def runs_of(logs: Sequence[Path]) -> list[ObservedRun]:
    """Return the runs of a result's logs, each named by the last parts of its path that no other has.

    Raises ConfigError for a log that cannot be read, and what is no log of this benchmark.
    """
    ends = [
        (log.parent if log.name == MLPERF_FILE else log.with_suffix("")).absolute().parts
        for log in logs
    ]
    most = max(map(len, ends))
    length = next((n for n in range(1, most) if len({end[-n:] for end in ends}) == len(ends)), most)
    return [
        ObservedRun("/".join(end[-length:]), read_run(log))
        for end, log in zip(ends, logs, strict=True)
    ]


def runs_of_jobs(selector: str, namespace: str | None, folder: Path) -> list[ObservedRun]:
    """Return the runs of the FluxTrainings with the labels ``selector``; their logs are kept in ``folder``.

    Raises ConfigError if kubectl fails, or no job has the labels.
    """
    found = []
    for job in jobs_of(selector, namespace):
        name, phase = str(job["metadata"]["name"]), str(job.get("status", {}).get("phase", ""))
        log = None
        if text := log_of_pods(name, namespace):
            path = folder / f"{name}.log"
            path.write_text(text, encoding="utf-8")
            log = read_run(path)
        found.append(ObservedRun(name, log, phase))
    return found


_MOST_ROWS = 12
_BAR = 30


def report(runs: Sequence[ObservedRun], given: str | None) -> str:
    """Return the report on ``runs``, for a terminal; without a ruleset, by the one that the logs fit."""
    logs = [run.log.lines for run in runs if run.log is not None]
    needed, month = fit(logs), month_of(logs)
    ruleset = given or best_fit(needed, month)
    names = max(len(sanitize(run.name)) for run in runs)
    states = max(len("not converged"), *(len(_state(run)) for run in runs))
    lines = [
        f"{'RUN':<{names}}  {'STATE':<{states}}  EVALS     SAMPLES     LOSS    TO TARGET  MINUTES"
    ]
    lines += [_row(run, names, states) for run in runs]
    lines += ["", *_curve(runs), "", *_verdict(runs, ruleset)]
    if given is None and any(run.log for run in runs):
        lines.append(f"ruleset {ruleset}: {describe_fit(needed, False, month)}")
    return "\n".join(lines)


def _row(run: ObservedRun, names: int, states: int) -> str:
    samples, loss = run.evaluations[-1] if run.evaluations else (0, None)
    to_target = "-" if run.forecast is None else f"{'' if run.is_over else '~'}{run.forecast:,}"
    minutes = run.log.minutes if run.log is not None else float("inf")
    return (
        f"{sanitize(run.name):<{names}}  {_state(run):<{states}}  {len(run.evaluations):>5}  {samples:>10,}  "
        f"{'-' if loss is None else f'{loss:.4f}':>7}  {to_target:>11}  "
        f"{f'{minutes:.2f}' if isfinite(minutes) else '-':>7}"
    )


def _state(run: ObservedRun) -> str:
    resumed = run.log is not None and run.log.first("run_resumed") is not None
    return f"{run.state}*" if resumed else run.state


def _curve(runs: Sequence[ObservedRun]) -> Iterator[str]:
    """Yield the mean loss of all runs at some evaluations, with the least and the greatest."""
    losses: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for samples, loss in run.evaluations:
            losses[samples].append(loss)
    if not losses:
        yield "no evaluation yet"
        return
    every = -(-len(losses) // _MOST_ROWS)
    shown = sorted(losses)[::-1][::every][::-1]
    most = max(max(losses[samples]) for samples in shown)
    yield "evaluation loss: mean, least and greatest of the runs"
    for samples in shown:
        values = losses[samples]
        mean = sum(values) / len(values)
        bar = "#" * round(_BAR * (mean / most)) if isfinite(mean) and 0 < most < inf else ""
        yield (
            f"{samples:>12,}  {mean:.4f}  {min(values):.4f} .. {max(values):.4f}  "
            f"{len(values):>3} {'run ' if len(values) == 1 else 'runs'}  {bar}"
        )


def _verdict(runs: Sequence[ObservedRun], ruleset: str) -> Iterator[str]:
    """Yield how many runs converged, their spread, and what the comparison with the reference says so far."""
    yield f"{counted(len(runs), 'run')}: {_ended(runs)}"
    if own := [sanitize(run.name) for run in runs if _has_own_target(run)]:
        yield f"{', '.join(own)}: by a target of their own, not MLPerf's {MLPERF_TARGET_LOSS}"
    if any(run.log is not None and run.log.first("run_resumed") for run in runs):
        yield "* the run was interrupted and resumed: the rules leave open whether it counts"
    if failed := [sanitize(run.name) for run in runs if run.state == "failed"]:
        yield f"{', '.join(failed)} failed: no run of a result, but in its record; --runs adds runs"
    for run in runs:
        if run.log is not None and run.log.closed and run.log.first(DIVISION_KEY) is not None:
            yield f"{sanitize(run.name)} left the closed division: no result of it has this run"
    found = [run.log for run in runs if run.log is not None]
    logs = [log for log in found if log.first("submission_division") is not None]
    if not logs or not logs[0].closed:
        yield "open division: no comparison with the reference" if logs else "no log yet"
        return
    size = logs[0].number("global_batch_size")
    if size is not None:
        yield from _comparison(runs, size, ruleset)


def _ended(runs: Sequence[ObservedRun]) -> str:
    ended, without = sum(run.is_over for run in runs), sum(run.state == NO_TARGET for run in runs)
    if 0 < ended == without:
        return f"{ended} {NO_TARGET}"
    converged = [run.log.samples for run in runs if run.log and run.log.samples is not None]
    text = f"{ended} ended, {len(converged)} reached the target"
    if converged:
        text += (
            f" after {min(converged):,} to {max(converged):,} samples"
            f" (standard deviation {pstdev(converged):,.0f})"
        )
    return f"{text}; {without} {NO_TARGET}" if without else text


def _has_own_target(run: ObservedRun) -> bool:
    target = None if run.log is None else target_of(run.log.lines)
    return target not in (None, MLPERF_TARGET_LOSS)


def _comparison(runs: Sequence[ObservedRun], size: int, ruleset: str) -> Iterator[str]:
    point = rcp.reference_point(size, ruleset)
    if point is not None:
        low, high = point.band
        yield (
            f"the reference's runs at global batch size {size} need {low:,.0f} to {high:,.0f} samples; "
            f"a mean of {point.minimum:,.0f} is accepted"
        )
        for run in runs:
            if run.forecast is not None and run.forecast < low:
                name = sanitize(run.name)
                yield f"{name} is faster than the reference's runs: look for a difference from it"
    logs = [run.log for run in runs if run.log is not None and run.state != "failed"]
    if all(run.is_over for run in runs) and len(logs) >= rcp.NUM_RUNS:
        yield _judged([log.samples for log in median_window(logs)], size, ruleset)
        return
    counts = [run.forecast for run in runs if run.state != "failed"][: rcp.NUM_RUNS]
    if len(counts) < rcp.NUM_RUNS:
        yield f"a result needs {rcp.NUM_RUNS} runs"
    elif sum(count is None for count in counts) <= 1:
        yield f"if the runs need what is forecast: {_judged(counts, size, ruleset)}"


def _judged(samples: Sequence[int | None], size: int, ruleset: str) -> str:
    return rcp.explain(rcp.compare_with_reference(samples, size, ruleset), size, ruleset)
