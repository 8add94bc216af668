"""From pictures to the file of a LoRA: on two nodes, one of which is evicted; with models that a pod fetches;
and from a guide's variables, in a container that is interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.reference_model import random_model
from cluster.kubectl import Manifest
from cluster.nodes import images, volumes
from safetensors import safe_open
from safetensors.torch import load_file
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.jobs import Jobs
from tests.end_to_end.stage import condition, is_complete, job, losses, wait_for
from tests.trainer.commands import fluxtrain
from tests.trainer.fetch import guide
from tests.trainer.picture_cache.folders import RUN, config, write_pictures
from tests.trainer.tiny_encoders import write_encoders
from tests.trainer.tiny_model import save_flux

from fluxtrain.contract.run.resolve import merge

NAMESPACE, JOB, NO_PORT = "pictures", "style", "--logging.metrics_port=0"
PICTURES, STEPS, TOLERANCE = 23, 60, 1e-4
LORA: Manifest = merge(
    RUN,
    {
        "data": {"validation": "none"},
        "initial_weights": "weights.safetensors",
        "adapter": {"rank": 4, "alpha": 8.0},
        "adapter_file": {"name": JOB, "every_steps": 20, "dtype": "float32"},
        "optim": {"learning_rate": 1e-3},
        "schedule": {"steps": STEPS},
        "logging": {"metrics_port": 9464},
    },
)


@pytest.fixture
def jobs(kubectl: Kubectl, tmp_path: Path) -> Iterator[Jobs]:
    """Return the jobs of a namespace with pictures, encoders and a model on volumes, and its operator."""
    write_pictures(tmp_path / "data" / "pictures", PICTURES)
    (tmp_path / "models").mkdir()
    save_flux(random_model(config().model), write_encoders(tmp_path / "models"))
    jobs = Jobs(kubectl, tmp_path, NAMESPACE)
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, jobs.output)
    for name in ("data", "models"):
        give(tmp_path / name)
        manifests = volumes.host_folder(name, tmp_path / name, NAMESPACE, read_only=True)
        kubectl.apply(*manifests, namespace=NAMESPACE)
    jobs.output.chmod(0o777)  # the kubelet gives the folder of a job the mode of the volume
    jobs.output = jobs.output / NAMESPACE / JOB
    jobs.operator.start()
    try:
        yield jobs
    finally:
        jobs.operator.stop()
        stage.clear(kubectl, NAMESPACE)


def give(folder: Path) -> None:
    """Let pods read and write what is in ``folder``."""
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, images.USER_ID, images.USER_ID)


def storage() -> Manifest:
    """Return claims of which the pods can only write their own folder of the output."""
    claims = {
        name: {"persistentVolumeClaim": {"claimName": name, "readOnly": name != "output"}}
        for name in ("data", "models", "output")
    }
    return {**claims, "isolated": True}


def evict(jobs: Jobs, pod: str) -> None:
    """Evict ``pod`` as `kubectl drain` does."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    response = jobs.kubectl.server.create(path, eviction, dry_run=False)
    assert response.accepted, response.message


def test_pictures_on_a_volume_become_a_lora_although_a_pod_is_evicted(
    jobs: Jobs, tmp_path: Path
) -> None:
    jobs.apply(JOB, nodes={"min": 2, "max": 2}, run=LORA, storage=storage())
    jobs.wait_for_steps(JOB, 5, "applied")
    victim = next(name for name in sorted(jobs.pods(JOB)) if name.endswith("-1"))
    before = jobs.uids(JOB)[victim]
    evict(jobs, victim)
    jobs.wait_for_steps(JOB, 5, "evicted")
    assert jobs.uids(JOB)[victim] != before
    jobs.wait(JOB, is_complete)

    (tmp_path / "job.json").write_text(json.dumps(job(JOB, run=LORA)))
    roots = [f"--{name}={tmp_path / name}" for name in ("data", "models")]
    alone = tmp_path / "alone"
    done = fluxtrain("run", str(tmp_path / "job.json"), *roots, f"--output={alone}", NO_PORT)
    assert done.returncode == 0, done.stderr
    assert list(losses(jobs.output)) == list(range(1, STEPS + 1))
    ours, expected = (
        load_file(output / "adapters" / f"{JOB}.safetensors") for output in (jobs.output, alone)
    )
    assert ours.keys() == expected.keys()
    worst = max(float((ours[name] - expected[name]).abs().max()) for name in expected)
    print(f"{PICTURES} pictures, 2 nodes: {len(ours)} tensors within {worst:.1e} of one rank's")
    assert worst < TOLERANCE
    assert max(float(value.abs().max()) for name, value in ours.items() if "up" in name) > 1e-3


NOBODY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": images.USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(name: str, command: list[str], mounts: dict[str, str], **env: str) -> Manifest:
    """Return a pod of the trainer's image with ``mounts``, paths by the names of claims."""
    mounts = {"packages": volumes.SITE_PACKAGES, **mounts}
    container = {
        "name": "main",
        "image": stage.IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "securityContext": NOBODY,
        "volumeMounts": [{"name": claim, "mountPath": path} for claim, path in mounts.items()],
    }
    claims = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in mounts]
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {**spec, "containers": [container], "volumes": claims},
    }


def phase(jobs: Jobs, name: str) -> tuple[str, str]:
    """Return phase and address of a pod."""
    status = jobs.kubectl.get("pod", name, jobs.here)["status"]
    return status["phase"], status.get("podIP", "")


def log(jobs: Jobs, name: str) -> str:
    return jobs.kubectl("logs", name, jobs.here)


def web_server(jobs: Jobs, claim: str) -> str:
    """Start a pod that serves the volume ``claim``; return its URL."""
    command = ["python3", "-m", "http.server", "8000", "--directory", "/served"]
    jobs.kubectl.apply(pod("web", command, {claim: "/served"}), namespace=NAMESPACE)
    wait_for(lambda: phase(jobs, "web")[0] == "Running", "the web server does not start")
    return f"http://{phase(jobs, 'web')[1]}:8000"


def make_claim(jobs: Jobs, name: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    give(folder)
    manifests = volumes.host_folder(name, folder, NAMESPACE, read_only=False)
    jobs.kubectl.apply(*manifests, namespace=NAMESPACE)


def publish(models: Path) -> None:
    """Lay the encoders out as FLUX.1's publisher does, beside themselves."""
    for name, weights, tokenizer in (
        ("t5", "text_encoder_2", "tokenizer_2"), ("clip", "text_encoder", "tokenizer")
    ):  # fmt: skip
        for path in (models / name).iterdir():
            folder = models / (tokenizer if "token" in path.name else weights)
            folder.mkdir(exist_ok=True)
            shutil.copy(path, folder)
    shutil.copy(models / "autoencoder/ae.safetensors", models)
    give(models)


@pytest.mark.proof
def test_the_first_pod_fetches_the_models_and_says_what_it_cannot(
    jobs: Jobs, tmp_path: Path
) -> None:
    publish(tmp_path / "models")
    make_claim(jobs, "empty", tmp_path / "empty")
    url = web_server(jobs, "models")
    models = {"persistentVolumeClaim": {"claimName": "empty"}, "fetch": f"{url}/nothing"}
    short = merge(LORA, {"schedule": {"steps": 6}})
    limits = {"nodes": {"min": 2, "max": 2}, "restart": {"maxRestarts": 0}}
    jobs.apply("wrong", run=short, storage={**storage(), "models": models}, **limits)
    wait_for(lambda: jobs.status("wrong").get("phase") == "Failed", "it does not fail", seconds=240)
    failed = condition(jobs.status("wrong"), "Failed")
    assert "init container fetch-models failed" in failed["message"], failed
    assert f"{url}/nothing has no such files: put them there" in failed["message"], failed
    jobs.kubectl("delete", "ft/wrong", jobs.here)

    models["fetch"] = url
    jobs.apply(JOB, run=short, storage={**storage(), "models": models}, **limits)
    jobs.wait(JOB, is_complete)
    assert (tmp_path / "empty/weights.safetensors").is_file()
    assert max(losses(jobs.output)) == 6
    (container,) = jobs.kubectl.get("pod", f"{JOB}-0", jobs.here)["spec"]["initContainers"]
    assert {m["name"]: m.get("readOnly", False) for m in container["volumeMounts"]}[
        "models"
    ] is False


@pytest.mark.proof
def test_a_guides_container_goes_on_after_a_spot_interruption(jobs: Jobs, tmp_path: Path) -> None:
    served, workspace = tmp_path / "served", tmp_path / "workspace"
    served.mkdir()
    guide.published(served)
    archive = served / "api/v1/datasets/download" / guide.NAME
    archive.parent.mkdir(parents=True)
    archive.write_bytes(guide.archive())
    make_claim(jobs, "served", served)
    make_claim(jobs, "workspace", workspace)
    guide.write_files(workspace, "/workspace/dataset/images")
    url = web_server(jobs, "served")
    command = ["fluxtrain", "from-env", "--cpu", f"--from={url}", *guide.SMALL]
    files = {
        "DATASET_CONFIG": "/workspace/dataset.json",
        "SAMPLE_PROMPTS": "/workspace/prompts.txt",
    }
    places = {"DATASET_HOST": f"{url}/api/v1/datasets/download", "OMP_NUM_THREADS": "1"}
    variables = guide.variables(**files, **places, STEP_SECONDS="0.5", OUTPUT_NAME="cars")
    spot = pod("spot", command, {"workspace": "/workspace"}, **variables)
    jobs.kubectl.apply(spot, namespace=NAMESPACE)
    checkpoints = workspace / "output/checkpoints"
    wait_for(
        lambda: phase(jobs, "spot")[0] == "Failed" or len(list(checkpoints.glob("step_*"))) > 1,
        lambda: log(jobs, "spot"),
        seconds=300,
    )
    assert phase(jobs, "spot")[0] == "Running", log(jobs, "spot")
    jobs.kubectl("delete", "pod", "spot", jobs.here)
    stopped = max(int(path.name.removeprefix("step_")) for path in checkpoints.glob("step_*"))

    jobs.kubectl.apply(spot, namespace=NAMESPACE)
    wait_for(
        lambda: phase(jobs, "spot")[0] in ("Failed", "Succeeded"), "it does not end", seconds=300
    )
    text = log(jobs, "spot")
    assert phase(jobs, "spot")[0] == "Succeeded", text
    assert 0 < stopped < guide.STEPS
    assert f"resumed after step {stopped}" in text
    with safe_open(workspace / "output/cars.safetensors", "pt") as file:
        metadata = file.metadata()
    assert (metadata["ss_output_name"], metadata["ss_network_dim"]) == ("cars", "4")
    assert metadata["ss_steps"] == str(guide.STEPS)
    print(f"stopped at step {stopped}, went on to {guide.STEPS} in a second pod")
