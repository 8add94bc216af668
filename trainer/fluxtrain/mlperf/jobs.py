"""Jobs of a cluster and their outputs, by kubectl with the user's own configuration.

Output folders are read from their volumes, which have the whole logs also when pods' logs do not: a pod
of the job's own image mounts the volume read-only for as long as that takes, and is deleted afterwards.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluxtrain.contract.process import CHAIN_FILE, CONFIG_FILE, MLPERF_FILE, OUTPUT_PATH
from fluxtrain.contract.resource.pod_template import TRAINER
from fluxtrain.errors import UNSET, ConfigError, DataError
from fluxtrain.mlperf.chain_verify import Head, read_heads

_TIMEOUT_SECONDS = 180.0


def kubectl(namespace: str | None, *arguments: str, stdin: str = "") -> str:
    """Return the output of kubectl in ``namespace`` (None: its default); ConfigError if it fails."""
    if (program := shutil.which("kubectl")) is None:
        raise ConfigError("kubectl", UNSET, "needs kubectl on the PATH")
    options = [] if namespace is None else [f"--namespace={namespace}"]
    verb, *rest = arguments
    try:
        completed = subprocess.run(
            [program, verb, *options, *rest],
            input=stdin.encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"kubectl timed out after {_TIMEOUT_SECONDS:.0f} seconds"
        raise ConfigError("kubectl", " ".join(arguments), text) from None
    if completed.returncode:
        text = completed.stderr.decode("utf-8", "replace").strip()
        if "localhost:8080" in text:  # where kubectl looks if nothing is set
            raise ConfigError(
                "kubectl", UNSET, "has no kubeconfig, so no API server; set KUBECONFIG"
            )
        raise ConfigError("kubectl", " ".join(arguments), text)
    return completed.stdout.decode("utf-8", "replace")


def items(kind: str, selector: str, namespace: str | None) -> list[dict[str, Any]]:
    """Return the objects of a kind with the labels ``selector``, by name; ConfigError for an empty one."""
    if not selector.strip():  # of all objects
        raise ConfigError("--selector", selector, "must not be empty, such as campaign=NAME")
    text = kubectl(namespace, "get", kind, f"--selector={selector}", "--output=json")
    found: list[dict[str, Any]] = json.loads(text)["items"]
    return sorted(found, key=lambda item: str(item["metadata"]["name"]))


def jobs_of(selector: str, namespace: str | None) -> list[dict[str, Any]]:
    """Return the FluxTrainings with the labels ``selector``; ConfigError without any."""
    if not (jobs := items("fluxtrainings", selector, namespace)):
        raise ConfigError("--selector", selector, "no FluxTraining has these labels")
    return jobs


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
            folders = {_folder(job): str(job["metadata"]["name"]) for job in of_claim}
            with _running(claim, _trainer_spec(of_claim[0], namespace), namespace) as pod:
                command = ("python3", "-c", _SCRIPT, json.dumps(FILES), *folders)
                found = json.loads(kubectl(namespace, "exec", pod, "--", *command))
            texts |= {
                folders[folder]: files for folder, files in found.items() if MLPERF_FILE in files
            }
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


RAN_JOB_FILE = "job.json"
"""In the folder of a fetched run."""
_HEADS = "logHeads"
_DIGEST = "@sha256:"


def ran_job(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spec of ``job``, with the image of its ``pods`` by its digest, and its heads."""
    spec = dict(job["spec"])
    if (image := image_of(pods)) is not None:
        spec["image"] = image
    status = _kept(job.get("status", {}), _HEADS)
    return {"apiVersion": job["apiVersion"], "kind": job["kind"], "spec": spec, "status": status}


def image_of(pods: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the image that the kubelets started, by its digest; None if pods are gone, or differ."""
    images = {
        str(status.get("imageID", "")).rpartition("://")[2]
        for pod in pods
        for status in pod.get("status", {}).get("containerStatuses") or ()
        if status.get("name") == TRAINER
    }
    has_digest = all(_DIGEST in image for image in images)  # REPOSITORY@sha256:DIGEST
    return images.pop() if len(images) == 1 and has_digest else None


def read_ran_job(folder: Path) -> dict[str, Any] | None:
    """Return the job of a fetched run in ``folder``, None without one; raise DataError if it is damaged."""
    path = folder / RAN_JOB_FILE
    try:
        job = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if not isinstance(job, dict) or not isinstance(job.get("spec"), dict):
        raise DataError(f"{path}: is not a FluxTraining")
    return job


def heads_of_job(folder: Path) -> list[Head] | None:
    """Return the heads in the status of the job of a fetched run in ``folder``, None without any."""
    job = read_ran_job(folder) or {}
    status = job.get("status")
    return read_heads(job) if isinstance(status, dict) and status.get(_HEADS) else None
