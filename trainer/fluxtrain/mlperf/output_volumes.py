"""Read the output folders of jobs from their volumes, which have the whole logs also when pods' logs do not.

A pod of the job's own image mounts the volume read-only for as long as that takes; it is deleted afterwards.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fluxtrain.contract.launch import CHAIN_FILE, CONFIG_FILE, MLPERF_FILE, OUTPUT_PATH
from fluxtrain.errors import ConfigError
from fluxtrain.mlperf.kubectl import kubectl

Object = dict[str, Any]
FILES = (MLPERF_FILE, CONFIG_FILE, CHAIN_FILE)
"""What is read of an output folder."""
_PODS_FILE, _TRAINER = "pods.json", "trainer"
_START_SECONDS, _LIFE_SECONDS = 120, 900
_SCRIPT = (
    "import json, pathlib, sys\n"
    "found = {}\n"
    "for folder in sys.argv[2:]:\n"
    "    for name in json.loads(sys.argv[1]):\n"
    "        path = pathlib.Path(folder, name)\n"
    "        if path.is_file():\n"
    "            found.setdefault(folder, {})[name] = path.read_text('latin-1')\n"
    "print(json.dumps(found))\n"
)


def read_outputs(jobs: Sequence[Object], namespace: str | None) -> dict[str, dict[str, str]]:
    """Return the texts of FILES by job and file, for the jobs whose output is a claim.

    A job is missing if its volume has no log, or cannot be read: then its pods' logs are what is left.
    """
    texts: dict[str, dict[str, str]] = {}
    for claim in sorted({name for job in jobs if (name := _claim(job))}):
        of_claim = [job for job in jobs if _claim(job) == claim]
        try:
            texts |= _read_claim(claim, of_claim, namespace)
        except ConfigError as error:
            print(f"{claim}: cannot be read, so pods' logs are ({error})", file=sys.stderr)
    return texts


def reader_pod(name: str, claim: str, trainer: Mapping[str, Any]) -> Object:
    """Return a pod that waits with ``claim`` mounted; image and user are those of the pod ``trainer``."""
    (first, *_) = trainer["containers"]
    container = {
        "name": "reader",
        "image": first["image"],
        "command": ["python3", "-c", f"import time; time.sleep({_LIFE_SECONDS})"],
        "volumeMounts": [{"name": "output", "mountPath": OUTPUT_PATH, "readOnly": True}],
        "resources": {
            "requests": {"cpu": "10m", "memory": "64Mi"},
            "limits": {"memory": "256Mi"},
        },
        **_kept(first, "securityContext", "imagePullPolicy"),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "activeDeadlineSeconds": _LIFE_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "output", "persistentVolumeClaim": {"claimName": claim}}],
            **_kept(trainer, "securityContext", "imagePullSecrets"),
        },
    }


def _read_claim(
    claim: str, jobs: Sequence[Object], namespace: str | None
) -> dict[str, dict[str, str]]:
    folders = {_folder(job): str(job["metadata"]["name"]) for job in jobs}
    with _running(claim, _trainer_spec(jobs[0], namespace), namespace) as pod:
        command = ("python3", "-c", _SCRIPT, json.dumps(FILES), *folders)
        found = json.loads(kubectl(namespace, "exec", pod, "--", *command))
    return {folders[folder]: files for folder, files in found.items() if MLPERF_FILE in files}


@contextmanager
def _running(claim: str, trainer: Mapping[str, Any], namespace: str | None) -> Iterator[str]:
    """Yield the name of a pod that has mounted ``claim``; delete it afterwards."""
    name = f"fluxtrain-read-{secrets.token_hex(4)}"
    manifest = json.dumps(reader_pod(name, claim, trainer))
    kubectl(namespace, "create", "--filename=-", stdin=manifest)
    try:
        ready = ("--for=condition=Ready", f"--timeout={_START_SECONDS}s")
        kubectl(namespace, "wait", f"pod/{name}", *ready)
        yield name
    finally:
        kubectl(namespace, "delete", "pod", name, "--wait=false", "--ignore-not-found")


def _trainer_spec(job: Object, namespace: str | None) -> Mapping[str, Any]:
    """Return the spec of the job's training pods, from the config map of its revision."""
    revision = str(job.get("status", {}).get("revision"))
    found = json.loads(kubectl(namespace, "get", "configmap", revision, "--output=json"))
    specs = json.loads(found["data"][_PODS_FILE])
    spec: Mapping[str, Any] = specs[_TRAINER]
    return spec


def _claim(job: Object) -> str:
    output = job["spec"].get("storage", {}).get("output") or {}
    return str((output.get("persistentVolumeClaim") or {}).get("claimName", ""))


def _folder(job: Object) -> str:
    """Return the folder of ``job`` in its volume, whose root is mounted."""
    storage, metadata = job["spec"].get("storage", {}), job["metadata"]
    own = f"{metadata['namespace']}/{metadata['name']}" if storage.get("isolated") else ""
    return "/".join(filter(None, (OUTPUT_PATH, own, storage.get("outputFolder"))))


def _kept(values: Mapping[str, Any], *names: str) -> Object:
    return {name: values[name] for name in names if name in values}
