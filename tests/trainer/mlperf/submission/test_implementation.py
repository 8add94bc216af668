"""A package has what is needed to repeat its runs: scripts that run anywhere, and the facts of the runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trainer.mlperf import good_run
from tests.trainer.mlperf.good_run import NODE, SYSTEM, write_run

from fluxtrain.cli.commands import make_parser
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.mlperf.evidence import Run, read_finished_run
from fluxtrain.mlperf.facts import SOURCE, NodeRecord, source_digest
from fluxtrain.mlperf.implementation import (
    Software,
    Statements,
    fetched_image,
    find_image,
    ran_software,
    write_implementation,
)
from fluxtrain.mlperf.jobs import RAN_JOB_FILE, image_of, ran_job
from fluxtrain.runtime.installed import differences, packages

pytestmark = pytest.mark.slow

IMAGE = f"registry.example.org/fluxtrain/trainer@sha256:{'0a' * 32}"
DESCRIPTION = {**SYSTEM, "system_name": "8xMI300X"}
MICRO: dict[str, Any] = {
    "preset": "micro",
    "schedule": {"global_batch_size": 16},
    "data": {"synthetic": {"classes": 1}},
    "optim": {"learning_rate": 2e-2},
    "flow": {"prompt_dropout": 0.0},
    "evaluation": {"target_loss": 0.586, "every_samples": 320},
    "logging": {"mlperf": {"organization": "example-org", "platform": "8xMI300X"}},
}


def run_of(folder: Path, seed: int = 7, node: NodeRecord = NODE, **changes: Any) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(good_run, "NODE", node)
        return read_finished_run(write_run(folder, seed, 2, **changes))


def with_software(**changes: str) -> NodeRecord:
    return replace(NODE, software={**NODE.software, **changes})


def packaged(folder: Path, runs: list[Run], image: str | None = None) -> Path:
    """Return the folder of the implementation of ``runs``."""
    target = folder / "8xMI300X_fluxtrain"
    target.mkdir()
    write_implementation(runs, DESCRIPTION, Statements(image=image), target)
    return target


def bash(script: Path, *arguments: str, **variables: str) -> str:
    """Return what ``script`` prints with no other variables than these, a path and a home."""
    home = script.parent / "home"
    home.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(home), "OMP_NUM_THREADS": "1", **variables}
    command = [str(script), *arguments]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
@pytest.mark.slow
def test_the_scripts_repeat_a_run_at_micro_size_in_an_empty_environment(tmp_path: Path) -> None:
    logged = [run_of(tmp_path / f"run_{seed}", seed, **MICRO) for seed in (7, 8)]
    folder = packaged(tmp_path, logged)
    assert "all packages of the runs are installed" in bash(folder / "setup.sh")
    assert not (folder / "environment").exists()
    roots = {name: str(tmp_path / name) for name in ("DATAROOT", "MODELROOT", "LOGDIR")}
    assert "nothing is needed" in bash(folder / "init_datasets.sh", **roots)
    options = ("1", "--logging.metrics_port=0")
    output = bash(folder / "run_and_time.sh", *options, PROCESSES="1", **roots)
    assert re.search(r"time from run_start to run_stop: \d+\.\d{3} minutes", output)
    repeated = read_finished_run(tmp_path / "LOGDIR/result_1")
    assert repeated.value("seed") == 8
    assert repeated.samples is not None
    assert (repeated.config or {})["evaluation"]["every_samples"] == 320
    assert "SUCCESS" in output
    assert ran_software([repeated]).source_sha256 == source_digest(folder / "fluxtrain")


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel without contents."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_setup_installs_what_is_missing_into_an_environment_of_its_own(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "a_small_one", "1.0.1")
    node = replace(NODE, packages={"a-small-one": "1.0.1"})
    folder = packaged(tmp_path, [run_of(tmp_path / "run", node=node, **MICRO)])
    options = f"--no-index --find-links={tmp_path / 'wheels'}"
    assert "all packages" in bash(folder / "setup.sh", PIP_OPTIONS=options)
    python = folder / "environment/bin/python"
    program = "import importlib.metadata as m; print(m.version('a-small-one'))"
    version = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == "1.0.1"


def test_the_list_of_packages_is_compared_by_normalised_names() -> None:
    listed = "A_b==1.0\nc.d==2.0\ne==3.0+cpu\n"
    installed = {"a-b": "1.0", "c-d": "2.1"}
    assert differences(listed, installed) == [
        "c.d: needs 2.0, has 2.1",
        "e: needs 3.0+cpu, has none",
    ]
    assert differences("", installed) == []


def md5_manifest(folder: Path, name: str, files: Mapping[str, bytes]) -> None:
    """Write MLCommons' two files for a set, and the set beside them."""
    lines = []
    for path, content in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_bytes(content)
        lines.append(f"{hashlib.md5(content).hexdigest()}  {name}/{path}\n")
    (folder / f"{name}.md5").write_text("".join(lines))


def test_the_data_sets_of_the_benchmark_are_downloaded_and_verified(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    folder = packaged(tmp_path, [run])
    script = (folder / "init_datasets.sh").read_text()
    for name, target in {
        "flux-1-cc12m-preprocessed": "cc12m_preprocessed",
        "flux-1-coco-preprocessed": "coco_preprocessed",
        "flux-1-empty-encodings": "empty_encodings",
    }.items():
        line = f'prepare download --manifest "$METADATA/{name}.uri" --output "$DATAROOT"/{target}'
        assert line in script
        md5_manifest(tmp_path / "metadata", name, {"part-0": name.encode()})
    (folder / "init_datasets.sh").write_text(script.replace(".uri", ".md5"))  # of local folders
    roots = {"DATAROOT": str(tmp_path / "data"), "METADATA": str(tmp_path / "metadata")}
    bash(folder / "init_datasets.sh", **roots)
    found = sorted(path.name for path in (tmp_path / "data").rglob("part-0"))
    assert len(found) == 3


def test_raw_sets_and_encoders_are_prepared_by_commands_that_exist(tmp_path: Path) -> None:
    folder = packaged(tmp_path, [run_of(tmp_path / "run", preset="mlperf-schnell-raw")])
    variables = {"$CC12M": "raw", "$COCO": "coco", "$FLUX": "flux", "$MODELROOT": "models"}
    lines = (folder / "init_datasets.sh").read_text().splitlines()
    commands = [line for line in lines if line.startswith("prepare ")]
    assert [line.split()[1] for line in commands] == ["cc12m", "coco", "encoders"]
    for line in commands:
        words = [variables.get(word, word) for word in shlex.split(line)]
        assert not make_parser().parse_known_args(words)[1]


def test_missing_sets_of_the_submitter_are_named(tmp_path: Path) -> None:
    changes = {**MICRO, "data": {"source": "encoded", "train": "a set", "validation": "/b"}}
    run_of(tmp_path / "run", **changes)
    log = tmp_path / "run/mlperf.log"
    log.write_text(log.read_text().replace('"value": 1099776', '"value": 5000'))
    folder = packaged(tmp_path, [read_finished_run(tmp_path / "run")])
    (tmp_path / "data" / "empty.safetensors").mkdir(parents=True)
    environment = {"PATH": "/usr/bin:/bin", "DATAROOT": str(tmp_path / "data")}
    script = [str(folder / "init_datasets.sh")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"init_datasets: data.train is missing: {tmp_path}/data/a set",
        "init_datasets: data.validation is missing: /b",
    ]


def test_the_facts_are_those_of_the_runs_and_not_of_this_machine(tmp_path: Path) -> None:
    other = replace(NODE, packages={"torch": "2.9.0+rocm7.1", "fluxtrain": "0.1.0"})
    runs = [run_of(tmp_path / f"run_{seed}", seed, other) for seed in (7, 8)]
    folder = packaged(tmp_path, runs, IMAGE)
    assert (folder / "requirements.txt").read_text() == "torch==2.9.0+rocm7.1\n"
    dockerfile = (folder / "Dockerfile").read_text()
    assert f"FROM {IMAGE}\n" in dockerfile
    assert "revision=0123abcd" in dockerfile
    about = json.loads((folder / "8xMI300X_fluxtrain.json").read_text())
    assert about["source"]["commit"] == "0123abcd"
    assert about["source"]["sha256"] == source_digest(SOURCE)
    assert about["image"] == IMAGE
    nodes = json.loads((folder / "nodes.json").read_text())
    assert nodes["result_1"][0]["hardware"]["accelerator_driver"] == "amdgpu 6.12.12"
    job = yaml.safe_load((folder / "job_1.yaml").read_text())
    assert job["spec"]["nodes"] == {"min": 2, "max": 2}
    assert (job["spec"]["gpusPerNode"], job["spec"]["image"]) == (8, IMAGE)
    assert resolve(job["spec"]["run"]) == resolve(runs[1].config or {})
    assert load_job(folder / "job_1.yaml").spec.run["seed"] == 8
    readme = (folder / "README.md").read_text()
    assert "run_and_time.sh N" in readme
    assert f"`{IMAGE}`" in readme


def pod(image: str, container: str = "trainer") -> dict[str, Any]:
    return {"status": {"containerStatuses": [{"name": container, "imageID": image}]}}


@pytest.mark.parametrize(
    ("pods", "found"),
    [
        ([pod(IMAGE), pod(IMAGE), pod("other@sha256:0", "sidecar")], IMAGE),
        ([pod(f"docker-pullable://{IMAGE}")], IMAGE),
        ([pod(IMAGE), pod(IMAGE.replace("0a", "0b"))], None),
        ([pod("sha256:0a")], None),
        ([pod(IMAGE, "sidecar"), {"status": {}}], None),
        ([], None),
    ],
)
def test_the_image_is_the_one_that_the_kubelets_started(
    pods: list[dict[str, Any]], found: str | None
) -> None:
    assert image_of(pods) == found


def test_a_job_that_was_fetched_is_packaged_with_its_own_spec(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    storage = {"output": {"persistentVolumeClaim": {"claimName": "results"}}}
    spec = {
        "nodes": {"min": 2, "max": 2},
        "gpusPerNode": 8,
        "image": "trainer:0.1.0",
        "network": {"mode": "Host"},
        "storage": storage,
        "lifecycle": {
            "startAfter": ["the-one-before"],
            "startWhen": "Ended",
            "cleanPods": "None",
        },
        "run": {"preset": "mlperf-schnell"},
    }
    told = {"apiVersion": "fluxtrain.dev/v1alpha1", "kind": "FluxTraining", "spec": spec}
    (tmp_path / "run" / RAN_JOB_FILE).write_text(json.dumps(ran_job(told, [pod(IMAGE)])))
    image = fetched_image([run])
    assert image == IMAGE
    folder = packaged(tmp_path, [run], image)
    job = load_job(folder / "job_0.yaml")
    assert job.spec.run["seed"] == 7
    assert resolve(job.spec.run) == resolve({**(run.config or {}), "seed": 7})
    packaged_spec = yaml.safe_load((folder / "job_0.yaml").read_text())["spec"]
    assert packaged_spec["lifecycle"] == {"cleanPods": "None"}
    assert (packaged_spec["storage"], packaged_spec["network"]) == (storage, {"mode": "Host"})
    assert packaged_spec["image"] == IMAGE


def test_runs_in_different_images_are_refused(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, seed) for name, seed in (("one", 7), ("two", 8))]
    for name, digit in (("one", "0a"), ("two", "0b")):
        job = {"spec": {"image": IMAGE.replace("0a", digit)}}
        (tmp_path / name / RAN_JOB_FILE).write_text(json.dumps(job))
    with pytest.raises(ConfigError, match="the runs were in different images"):
        fetched_image(runs)
    (tmp_path / "two" / RAN_JOB_FILE).write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        fetched_image(runs)


def test_the_sources_are_enclosed_as_they_ran(tmp_path: Path) -> None:
    folder = packaged(tmp_path, [run_of(tmp_path / "run")])
    assert source_digest(folder / "fluxtrain") == source_digest(SOURCE)
    assert os.access(folder / "run_and_time.sh", os.X_OK)
    assert f"FROM python:{NODE.software['python']}-slim" in (folder / "Dockerfile").read_text()
    shutil.rmtree(folder)
    edited = with_software(source_sha256="0" * 64, revision="deadbeef")
    with pytest.raises(ConfigError, match=r"not the sources that ran \(deadbeef\)"):
        packaged(tmp_path, [run_of(tmp_path / "edited", node=edited)])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (replace(NODE, software={}), "does not say which software ran"),
        (with_software(python="3.9.1"), "python 3.9.1 instead of"),
        (with_software(revision=""), "revision unknown instead of 0123abcd"),
        (replace(NODE, packages={**NODE.packages, "torch": "1.0"}), "torch 1.0 instead of"),
        (replace(NODE, packages={}), "does not say which software ran"),
    ],
)
def test_runs_of_other_software_are_no_result(
    tmp_path: Path, node: NodeRecord, message: str
) -> None:
    runs = [run_of(tmp_path / "one"), run_of(tmp_path / "two", 8, node)]
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "two"))) as raised:
        ran_software(runs)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("given", "in_container", "closed", "found"),
    [
        (None, False, True, None),
        (None, True, False, None),
        (IMAGE, False, True, IMAGE),
        (f"docker-pullable://{IMAGE}", True, True, IMAGE),
    ],
)
def test_the_image_is_given_by_its_digest(
    given: str | None, in_container: bool, closed: bool, found: str | None
) -> None:
    software = Software("3.12", "0.1.0", "", "", in_container, packages())
    assert find_image(given, software, closed) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "--image: missing: the runs were in a container"),
        ("fluxtrain/trainer:0.1.0", "must be REPOSITORY@sha256:DIGEST, as tags can be moved"),
        ("trainer@sha256:0", "must be REPOSITORY@sha256:DIGEST"),
    ],
)
def test_a_closed_result_of_containers_needs_an_image_by_digest(
    given: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_image(given, Software("3.12", "0.1.0", "", "", True, {}), True)
