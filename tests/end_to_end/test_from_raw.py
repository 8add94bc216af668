"""From MLPerf's raw sets to a trained model: the four jobs of the example, small, applied at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.kubectl import Manifest
from cluster.nodes import images, volumes
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.jobs import Jobs
from tests.end_to_end.stage import is_complete, losses
from tests.paths import ROOT
from tests.trainer.commands import fluxtrain
from tests.trainer.prepare.raw_sets.raw_cc12m import write_raw_cc12m
from tests.trainer.prepare.raw_sets.raw_coco import write_raw_coco
from tests.trainer.ranks import made_in
from tests.trainer.tiny_encoders import TOKENS, write_encoders

from fluxtrain.contract.run.presets import PRESETS
from fluxtrain.contract.run.resolve import merge
from fluxtrain.mlperf import check

pytestmark = pytest.mark.proof

NAMESPACE = "from-raw"
STEPS = 12
SMALL: dict[str, dict[str, Any]] = {
    "mlperf-cc12m": {"prepare": {"input": "cc12m_raw", "samples": 0, "workers": 2}},
    "mlperf-coco": {"prepare": {"samples": 24, "workers": 2}},
    "mlperf-preprocess": {
        "model": PRESETS["micro"]["model"],
        "data": {"text_length": TOKENS, "num_workers": 0},
        "encoders": {"precision": "float32"},
        "preprocess": {"shard_size": 4, "batch_size": 4},
    },
    "mlperf-train": {
        "seed": 7,
        "model": PRESETS["micro"]["model"],
        "data": {"text_length": TOKENS, "num_workers": 0},
        "precision": {"compute": "float32"},
        "parallel": {"compile": False, "micro_batch_size": 4},
        "schedule": {"steps": STEPS, "global_batch_size": 8, "warmup_steps": 2},
        "evaluation": {"every_samples": 48},
        "logging": {"every_steps": 1, "mlperf": {"division": "open"}},
    },
}
"""Changes to each job of the example, by its name."""
OUTPUTS = ("cc12m_disk", "coco", "cc12m_preprocessed", "coco_preprocessed", "empty_encodings")


def jobs() -> list[Manifest]:
    """Return the example's four jobs for pods without GPUs, whose packages come from a volume."""
    manifests: list[Manifest] = []
    for path in sorted((ROOT / "examples" / "mlperf-from-raw").glob("*.yaml")):
        manifest = yaml.safe_load(path.read_text())
        spec, name = manifest["spec"], manifest["metadata"]["name"]
        pod = stage.job(name)["spec"]["podTemplate"]
        nodes = {"min": 1, "max": 2} if "nodes" in spec else {"min": 1, "max": 1}
        run = merge(spec["run"], SMALL[name])
        manifest["spec"] = {
            **spec,
            "gpusPerNode": 0,
            "nodes": nodes,
            "run": run,
            "podTemplate": pod,
        }
        manifests.append(manifest)
    return manifests


def write_raw(folder: Path) -> None:
    """Write both raw sets and the encoders below ``folder``, in the layout of the example's volumes."""
    write_raw_cc12m(folder / "data" / "cc12m_raw")
    write_raw_coco(folder / "data" / "coco_raw")
    (folder / "models").mkdir()
    write_encoders(folder / "models")


@pytest.fixture
def folder(kubectl: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """Return the folder whose `data`, `models` and `output` are the volumes."""
    write_raw(tmp_path)
    shutil.copytree(tmp_path / "data", tmp_path / "laptop" / "data")
    stage.make_namespace(kubectl, NAMESPACE)
    stage.make_volumes(kubectl, NAMESPACE, tmp_path / "output")
    names = {"data": False, "models": True, "output": False}
    for name, read_only in names.items():
        path = tmp_path / name
        for each in (path, *path.rglob("*")):
            shutil.chown(each, images.USER_ID, images.USER_ID)
        manifests = volumes.host_folder(f"mlperf-{name}", path, NAMESPACE, read_only=read_only)
        kubectl.apply(*manifests, namespace=NAMESPACE)
    yield tmp_path
    stage.clear(kubectl, NAMESPACE)


def on_this_machine(folder: Path) -> Path:
    """Run the same four files in order; return the output of the last."""
    output = folder / "laptop" / "output"
    for manifest in jobs():
        file = folder / "laptop" / f"{manifest['metadata']['name']}.json"
        file.write_text(json.dumps(manifest))
        paths = ["--data", str(folder / "laptop" / "data"), "--models", str(folder / "models")]
        last = manifest["spec"]["run"].get("task") is None
        paths += ["--output", str(output if last else file.with_suffix(""))]
        done = fluxtrain("run", str(file), *paths)
        assert done.returncode == 0, done.stderr
    return output


def bytes_of(data: Path) -> dict[str, bytes]:
    """Return all output files below ``data``."""
    return {f"{name}/{path}": b for name in OUTPUTS for path, b in made_in(data / name).items()}


def test_four_jobs_applied_at_once_produce_a_checked_log_from_raw_images(
    kubectl: Kubectl, folder: Path
) -> None:
    applied = Jobs(kubectl, folder, NAMESPACE)
    applied.operator.start()
    try:
        submitted = jobs()
        kubectl.apply(*submitted, namespace=NAMESPACE)
        names = [manifest["metadata"]["name"] for manifest in submitted]
        waiting = applied.wait(names[-1], lambda s: s.get("phase") == "Pending")
        assert "mlperf-preprocess" in json.dumps(waiting["conditions"])
        ended = {name: applied.wait(name, is_complete) for name in names}
    finally:
        applied.operator.stop()
    for name, before in (
        ("mlperf-preprocess", ("mlperf-cc12m", "mlperf-coco")),
        ("mlperf-train", ("mlperf-preprocess",)),
    ):
        assert all(ended[b]["completionTime"] <= ended[name]["startTime"] for b in before), ended
    assert ended["mlperf-coco"].get("progress", {}).get("step") == 24, ended["mlperf-coco"]
    assert sorted(losses(folder / "output")) == list(range(1, STEPS + 1))

    alone = on_this_machine(folder)
    assert bytes_of(folder / "data") == bytes_of(folder / "laptop" / "data") != {}
    assert losses(folder / "output") == pytest.approx(losses(alone), rel=1e-4)
    verdicts = [check(path / "mlperf.log") for path in (folder / "output", alone)]
    assert verdicts[0].success == verdicts[1].success
    print(f"the checker: {verdicts[0].explanations or 'accepts the log'}")
