"""Fetch logs and configurations of finished FluxTrainings with the user's kubectl.

A submission needs the log of the last rank-0 pod, which is the complete MLPerf log also after restarts, and
the job's config map, which has the resolved configuration.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from fluxtrain.contract.launch import CONFIG_FILE, MLPERF_FILE
from fluxtrain.contract.resource.fluxtraining import LABEL_JOB
from fluxtrain.errors import UNSET, ConfigError
from fluxtrain.mlperf.lines import TOKEN

_TIMEOUT_SECONDS = 120.0


def collect(selector: str, namespace: str | None, folder: Path) -> list[Path]:
    """Write log and config of each Complete job with the labels ``selector`` and return their folders.

    Raises ConfigError if kubectl is missing or fails, if a job is not Complete, or if its rank-0 pod is gone.
    """
    jobs = _list("fluxtrainings", selector, namespace)
    if not jobs:
        raise ConfigError("--selector", selector, "no FluxTraining has these labels")
    return [_fetch(job, namespace, folder) for job in jobs]


def _fetch(job: dict[str, Any], namespace: str | None, folder: Path) -> Path:
    name = str(job["metadata"]["name"])
    phase = job.get("status", {}).get("phase")
    if phase != "Complete":
        raise ConfigError(name, phase or "no phase yet", "must be Complete")
    output = folder / name
    output.mkdir()
    (output / MLPERF_FILE).write_text(_log(name, namespace))
    (output / CONFIG_FILE).write_text(_config(job, namespace))
    return output


def _config(job: dict[str, Any], namespace: str | None) -> str:
    """Return the resolved config, from the config map of the job's revision."""
    name, revision = str(job["metadata"]["name"]), job["status"].get("revision")
    if revision:
        text = _kubectl(
            namespace, "get", "configmap", revision, "--ignore-not-found", "--output=json"
        )
        maps = [json.loads(text)] if text.strip() else []
    else:  # of an operator without revisions
        maps = _list("configmaps", f"{LABEL_JOB}={name}", namespace)
    for each in maps:
        if CONFIG_FILE in each.get("data", {}):
            return str(each["data"][CONFIG_FILE])
    raise ConfigError(name, UNSET, "its config map is gone")


def _log(name: str, namespace: str | None) -> str:
    """Return the complete MLPerf log; any of the pods may have been rank 0 at the end."""
    for pod in _list("pods", f"{LABEL_JOB}={name}", namespace):
        text = _kubectl(namespace, "logs", str(pod["metadata"]["name"]))
        lines = [line for line in text.splitlines() if TOKEN in line]
        if any('"run_stop"' in line for line in lines):
            return "\n".join(lines) + "\n"
    raise ConfigError(
        name,
        UNSET,
        "no pod has its MLPerf log; keep the pods (spec.lifecycle.cleanPods: Running or None), "
        "or give the output folders instead",
    )


def _list(kind: str, selector: str, namespace: str | None) -> list[dict[str, Any]]:
    result = json.loads(_kubectl(namespace, "get", kind, f"--selector={selector}", "--output=json"))
    return sorted(result["items"], key=lambda item: str(item["metadata"]["name"]))


def _kubectl(namespace: str | None, *arguments: str) -> str:
    if (program := shutil.which("kubectl")) is None:
        raise ConfigError("--selector", UNSET, "needs kubectl on the PATH")
    options = [] if namespace is None else [f"--namespace={namespace}"]
    try:
        completed = subprocess.run(
            [program, *arguments, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"kubectl timed out after {_TIMEOUT_SECONDS:.0f} seconds"
        raise ConfigError("--selector", UNSET, text) from None
    if completed.returncode:
        raise ConfigError(
            "kubectl", " ".join(arguments), completed.stderr.decode("utf-8", "replace").strip()
        )
    return completed.stdout.decode("utf-8", "replace")
