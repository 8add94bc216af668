"""Fetch logs and configs of finished FluxTrainings with kubectl.

`fluxtrain mlperf package` needs the complete MLPerf log: that in the output volume, or of the last rank-0
pod, which has it too after restarts, if no log was rotated. The resolved config is in the job's config map.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxtrain.contract.launch import CHAIN_FILE, CONFIG_FILE, MLPERF_FILE
from fluxtrain.contract.resource.fluxtraining import LABEL_JOB
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.mlperf.kubectl import items, kubectl
from fluxtrain.mlperf.lines import TOKEN
from fluxtrain.mlperf.output_volumes import read_outputs
from fluxtrain.mlperf.ran_job import RAN_JOB_FILE, ran_job
from fluxtrain.mlperf.review import FailedRun, read_run

_END = '"run_stop"'


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
    jobs = items("fluxtrainings", selector, namespace)
    if not jobs:
        raise ConfigError("--selector", selector, "no FluxTraining has these labels")
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
    """Return the run of ``job`` if it failed before its end, with what there is of its log."""
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
        path.write_text(log)
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
    if _END not in log:
        log = _log(name, namespace)
    (output / MLPERF_FILE).write_text(log)
    if CHAIN_FILE in found:
        (output / CHAIN_FILE).write_text(found[CHAIN_FILE])
    pods = items("pods", f"{LABEL_JOB}={name}", namespace)
    (output / RAN_JOB_FILE).write_text(json.dumps(ran_job(job, pods)))
    (output / CONFIG_FILE).write_text(found.get(CONFIG_FILE) or _config(job, namespace))
    return output


def _config(job: dict[str, Any], namespace: str | None) -> str:
    """Return the resolved config, from the config map of the job's revision."""
    name, revision = str(job["metadata"]["name"]), job["status"].get("revision")
    if revision:
        text = kubectl(
            namespace, "get", "configmap", revision, "--ignore-not-found", "--output=json"
        )
        maps = [json.loads(text)] if text.strip() else []
    else:  # of an operator without revisions
        maps = items("configmaps", f"{LABEL_JOB}={name}", namespace)
    for each in maps:
        if CONFIG_FILE in each.get("data", {}):
            return str(each["data"][CONFIG_FILE])
    raise ConfigError(name, UNSET, "its config map is gone")


def _log(name: str, namespace: str | None) -> str:
    """Return the complete MLPerf log; any of the pods may have been rank 0 at the end."""
    text = log_of_pods(name, namespace)
    if _END in text:
        return text
    raise ConfigError(
        name,
        UNSET,
        "neither its output volume nor a pod has its MLPerf log; keep the pods (spec.lifecycle.cleanPods: "
        "Running or None), or give the output folders instead",
    )
