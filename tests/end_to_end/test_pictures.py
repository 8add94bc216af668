"""From a folder of pictures on a volume to the file of a LoRA, on two nodes; a pod is evicted on the way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.reference_model import random_model
from cluster import images, volumes
from cluster.kubectl import Manifest
from safetensors.torch import load_file
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.jobs import Jobs
from tests.end_to_end.stage import is_complete, job, losses
from tests.trainer.commands import fluxtrain
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
        for path in (tmp_path / name, *(tmp_path / name).rglob("*")):
            shutil.chown(path, images.USER_ID, images.USER_ID)
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
