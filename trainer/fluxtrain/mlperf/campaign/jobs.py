"""The FluxTrainings of a campaign: equal but for name, seed and output folder, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.contract.resource.fluxtraining import FluxTraining
from fluxtrain.contract.run.config import RANDOM_SEED
from fluxtrain.contract.run.lost_nulls import require_no_lost_nulls
from fluxtrain.contract.run.resolve import merge, resolve
from fluxtrain.contract.validation import validate
from fluxtrain.errors import UNSET, ConfigError

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
    """Return the name of a run's job."""
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
