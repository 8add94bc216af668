"""Logs and configurations of finished FluxTrainings, fetched with the user's own kubectl.

The log of the pod that ended as rank 0 is one whole MLPerf log whatever restarts lie between, and the
config map that the pods read holds the resolved configuration: they are all that a submission needs.
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
    """Write log and config of each Complete job with the labels ``selector``; return their folders.

    Raises ConfigError where kubectl is missing or refuses, where a job is not Complete, or where its
    rank-0 pod is gone.
    """
    found = _list("fluxtrainings", selector, namespace)
    if not found:
        raise ConfigError("--selector", selector, "no FluxTraining has these labels")
    return [_fetch(job, namespace, folder) for job in found]


def _fetch(job: dict[str, Any], namespace: str | None, folder: Path) -> Path:
    name = str(job["metadata"]["name"])
    phase = job.get("status", {}).get("phase")
    if phase != "Complete":
        raise ConfigError(name, phase or "no phase yet", "must be Complete")
    place = folder / name
    place.mkdir()
    (place / MLPERF_FILE).write_text(_log(name, namespace))
    maps = _list("configmaps", f"{LABEL_JOB}={name}", namespace)
    config = next((m["data"][CONFIG_FILE] for m in maps if CONFIG_FILE in m.get("data", {})), None)
    if config is None:
        raise ConfigError(name, UNSET, "its config map is gone")
    (place / CONFIG_FILE).write_text(config)
    return place


def _log(name: str, namespace: str | None) -> str:
    """Return the whole MLPerf log among the pods' logs: any pod may have ended as rank 0."""
    for pod in _list("pods", f"{LABEL_JOB}={name}", namespace):
        said = _kubectl(namespace, "logs", str(pod["metadata"]["name"]))
        lines = [line for line in said.splitlines() if TOKEN in line]
        if any('"run_stop"' in line for line in lines):
            return "\n".join(lines) + "\n"
    raise ConfigError(
        name,
        UNSET,
        "no pod has its MLPerf log; keep the pods (spec.lifecycle.cleanPods: Running or None), "
        "or give the output folders instead",
    )


def _list(kind: str, selector: str, namespace: str | None) -> list[dict[str, Any]]:
    found = json.loads(_kubectl(namespace, "get", kind, f"--selector={selector}", "--output=json"))
    return sorted(found["items"], key=lambda item: str(item["metadata"]["name"]))


def _kubectl(namespace: str | None, *arguments: str) -> str:
    if (program := shutil.which("kubectl")) is None:
        raise ConfigError("--selector", UNSET, "needs kubectl on the PATH")
    place = [] if namespace is None else [f"--namespace={namespace}"]
    try:
        done = subprocess.run(
            [program, *arguments, *place],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"kubectl was not done after {_TIMEOUT_SECONDS:.0f} seconds"
        raise ConfigError("--selector", UNSET, text) from None
    if done.returncode:
        raise ConfigError(
            "kubectl", " ".join(arguments), done.stderr.decode("utf-8", "replace").strip()
        )
    return done.stdout.decode("utf-8", "replace")
