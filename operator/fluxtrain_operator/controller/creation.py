"""Labels and annotations of a job's pod as it was created, from its name and spec.

Whoever may patch pods can change labels and annotations later, but neither name nor spec. Decisions rest on
what cannot be changed; what name and spec do not tell, such as those of other operators, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain_operator import names
from fluxtrain_operator.planner.owner_references import controller_of
from fluxtrain_operator.resources.environment import NODES, RUN_ID
from fluxtrain_operator.resources.pods import ENDED_ARGUMENT, NODES_ARGUMENT
from fluxtrain_operator.resources.volumes import CONFIG_VOLUME

Manifest = Mapping[str, Any]


def job_of(pod: Manifest) -> str | None:
    """Return the name of the job that created ``pod``; None if none did."""
    job, component, _ = _place(pod)
    return job if component else None


def created_labels(pod: Manifest) -> dict[str, str]:
    """Return the labels that name and spec tell; none of a pod that no job has created."""
    job, component, index = _place(pod)
    if not component:
        return {}
    labels = {names.LABEL_JOB: job, names.LABEL_COMPONENT: component}
    if component == names.RENDEZVOUS:
        return labels
    attempt = (_variable(pod, RUN_ID) or "").rpartition("-")[2]
    return labels | {
        names.LABEL_INDEX: index,
        **({names.LABEL_ATTEMPT: attempt} if attempt.isdecimal() else {}),
    }


def created_annotations(pod: Manifest) -> dict[str, str]:
    """Return the annotations that the spec tells; none of a pod that no job has created."""
    job, component, _ = _place(pod)
    if component == names.RENDEZVOUS:
        told = {
            names.ANNOTATION_NODES: _argument(pod, NODES_ARGUMENT),
            names.ANNOTATION_ENDED: _argument(pod, ENDED_ARGUMENT),
        }
    elif component == names.TRAINER:
        config = _config_map(pod)
        told = {
            names.ANNOTATION_NODES: _variable(pod, NODES),
            names.ANNOTATION_REVISION: "" if config == names.legacy_config_map(job) else config,
        }
    else:
        told = {}
    return {key: value for key, value in told.items() if value is not None}


def _place(pod: Manifest) -> tuple[str, str, str]:
    """Return job, component and index of ``pod``, the latter two empty if its name is none of that job's."""
    owner, name = controller_of(pod), str(pod["metadata"].get("name", ""))
    job, (_, _, index) = str(owner.get("name", "")), name.rpartition("-")
    if owner.get("kind") != KIND or not job:
        return job, "", ""
    if names.is_rendezvous(job, name):
        return job, names.RENDEZVOUS, ""
    is_training = index.isdecimal() and name == names.pod(job, int(index))
    return job, names.TRAINER if is_training else "", index


def _variable(pod: Manifest, name: str) -> str | None:
    """Return the value of a variable of the training container, the last one of that name; None without."""
    variables = reversed(_container(pod, names.TRAINER).get("env") or [])
    return next(
        (str(v["value"]) for v in variables if v.get("name") == name and "value" in v), None
    )


def _argument(pod: Manifest, key: str) -> str | None:
    """Return the value of the argument ``key`` of the rendezvous service; None if it has none."""
    arguments: list[str] = _container(pod, names.RENDEZVOUS).get("args") or []
    return next((a.removeprefix(key) for a in arguments if a.startswith(key)), None)


def _config_map(pod: Manifest) -> str | None:
    """Return the name of the config map that is mounted as the config; None if there is none."""
    volumes = (v for v in _items(pod, "volumes") if v.get("name") == CONFIG_VOLUME)
    volume = next(volumes, {})
    return (volume.get("configMap") or {}).get("name")


def _container(pod: Manifest, name: str) -> Mapping[str, Any]:
    containers = (c for c in _items(pod, "containers") if c.get("name") == name)
    return next(containers, {})


def _items(pod: Manifest, key: str) -> Iterator[Mapping[str, Any]]:
    yield from (pod.get("spec") or {}).get(key) or []
