"""Packages that were changed after they were made, or made of other things than ran, are found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trainer.mlperf.good_run import by_rule
from tests.trainer.mlperf.submission.finished_runs import answers, ten_runs

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK
from fluxtrain.mlperf.review.package_rules import RULES
from fluxtrain.mlperf.review.review import all_rule_findings, result_findings
from fluxtrain.mlperf.review.tree import read_results

pytestmark = pytest.mark.slow

CODE = "benchmarks/flux1/implementations/8xMI300X_fluxtrain"
RESULTS = "results/8xMI300X/flux1"
DESCRIPTION = "systems/8xMI300X.json"
FASTER = (26, 27, 27, 27, 27, 28, 28, 28, 28, 29)
"""Evaluations of ten runs that need fewer samples than the reference: their score is scaled."""
Break = Callable[[Path], object]
Values = dict[str, Any]


def make(folder: Path, *more: str, **runs: Any) -> Path:
    """Return the organisation's folder of a package."""
    folders = ten_runs(folder / "runs", **runs)
    options = ["--system", str(answers(folder)), "--output", str(folder / "out"), *more]
    assert main(["mlperf", "package", *folders, *options]) == EXIT_OK
    return folder / "out/example-org"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("enclosed"), counts=FASTER)


def rules_of(organisation: Path) -> set[str]:
    (result,) = read_results([organisation])
    return {finding.rule for finding in all_rule_findings(result)}


def text(name: str, old: str, new: str) -> Break:
    """Return a change of a text in the file ``name`` of the package."""

    def change(organisation: Path) -> None:
        path = organisation / name
        assert old in path.read_text(), path
        path.write_text(path.read_text().replace(old, new))

    return change


def values(name: str, change: Callable[[Values], object]) -> Break:
    """Return a change of the values in the file ``name`` of the package, in JSON or YAML."""

    def apply(organisation: Path) -> None:
        path = organisation / name
        read = json.loads if path.suffix == ".json" else yaml.safe_load
        found = read(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return apply


def added(name: str, content: str) -> Break:
    def change(organisation: Path) -> None:
        path = organisation / name
        path.write_text((path.read_text() if path.exists() else "") + content)

    return change


def gone(name: str) -> Break:
    def change(organisation: Path) -> None:
        path = organisation / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def run_field(name: str, given: Mapping[str, Any]) -> Break:
    return values(f"{CODE}/{name}", lambda job: job["spec"]["run"].update(given))


BROKEN: dict[str, dict[str, Break]] = {
    "sources-are-those-that-ran": {
        "a source was edited": added(f"{CODE}/fluxtrain/model/loss.py", "#"),
        "a source was added": added(f"{CODE}/fluxtrain/faster.py", ""),
        "a source is gone": gone(f"{CODE}/fluxtrain/model/loss.py"),
        "the sources are gone": gone(f"{CODE}/fluxtrain"),
    },
    "same-software": {
        "one run of other sources": text(
            f"{RESULTS}/result_3.txt", '"revision": "0123abcd"', '"revision": "4567"'
        ),
        "one run of another torch": text(f"{RESULTS}/result_3.txt", '"torch": "', '"torch": "9.'),
        "one run that does not tell its software": text(
            f"{RESULTS}/result_3.txt", "fluxtrain_software", "software"
        ),
    },
    "requirements-are-those-that-ran": {
        "another torch is required": text(f"{CODE}/requirements.txt", "torch==", "torch==1"),
        "a package more": added(f"{CODE}/requirements.txt", "faster==1.0\n"),
        "an option of pip": added(f"{CODE}/requirements.txt", "--pre\n"),
        "no requirements": gone(f"{CODE}/requirements.txt"),
    },
    "nodes-are-those-of-the-logs": {
        "a driver that was not there": text(f"{CODE}/nodes.json", "amdgpu 6.12.12", "amdgpu 7.0"),
        "a run without nodes": values(f"{CODE}/nodes.json", lambda nodes: nodes.pop("result_9")),
        "no nodes": gone(f"{CODE}/nodes.json"),
    },
    "jobs-are-of-the-configuration": {
        "a job with another rate": run_field("job_4.yaml", {"optim": {"learning_rate": 1e-3}}),
        "a job with the seed of another run": run_field("job_4.yaml", {"seed": 105}),
        "a job on more nodes": values(
            f"{CODE}/job_4.yaml", lambda job: job["spec"].update(nodes={"min": 4, "max": 4})
        ),
        "a job with fewer GPUs": values(
            f"{CODE}/job_4.yaml", lambda job: job["spec"].update(gpusPerNode=4)
        ),
        "a job of no kind": values(f"{CODE}/job_4.yaml", lambda job: job.pop("kind")),
        "no job": gone(f"{CODE}/job_4.yaml"),
        "another configuration": values(
            f"{CODE}/config_4.json", lambda config: config["data"].update(num_workers=3)
        ),
    },
    "configuration-is-valid": {
        "a configuration that is none": values(
            f"{CODE}/config_4.json", lambda config: config["optim"].update(beta1="high")
        ),
    },
    "scripts-are-those-that-ran": {
        "a script that does more": added(f"{CODE}/run_and_time.sh", "echo done\n"),
        "no setup": gone(f"{CODE}/setup.sh"),
        "other data sets": text(f"{CODE}/init_datasets.sh", "cc12m", "cc3m"),
        "another base image": text(f"{CODE}/Dockerfile", "FROM python", "FROM example.org/python"),
    },
    "implementation-is-as-described": {
        "another precision is told": values(
            f"{CODE}/8xMI300X_fluxtrain.json",
            lambda told: told.update(weight_data_type="float64"),
        ),
        "nothing is told": gone(f"{CODE}/8xMI300X_fluxtrain.json"),
    },
    "deviations-are-stated": {
        "a deviation is left out": lambda folder: text(
            f"{CODE}/deviations.md",
            next(
                line
                for line in (folder / CODE / "deviations.md").read_text().splitlines()
                if line.startswith("| prompt dropout")
            ),
            "",
        )(folder),
        "no deviations": gone(f"{CODE}/deviations.md"),
    },
    "scaling-is-of-the-logs": {
        "a factor of 1": values(
            f"{RESULTS}/scaling.json", lambda told: told.update(scaling_factor=1.0)
        ),
        "a factor below 1": values(
            f"{RESULTS}/scaling.json", lambda told: told.update(scaling_factor=0.9)
        ),
        "a factor in words": values(
            f"{RESULTS}/scaling.json", lambda told: told.update(scaling_factor="1")
        ),
        "no factor": gone(f"{RESULTS}/scaling.json"),
    },
    "description-is-of-each-node": {
        "one node of another kind": text(
            f"{RESULTS}/result_3.txt",
            '"nodes": "0-1", "accelerators_per_node": "8"',
            '"nodes": "0-1", "accelerators_per_node": "4"',
        ),
        "a node more": text(f"{RESULTS}/result_3.txt", '"nodes": "0-1"', '"nodes": "0-1,5"'),
    },
    "description-is-enclosed": {
        "no description": gone(DESCRIPTION),
        "a field less": values(DESCRIPTION, lambda told: told.pop("cooling")),
        "a number": values(DESCRIPTION, lambda told: told.update(accelerators_per_node=8)),
        "a status of the log": values(DESCRIPTION, lambda told: told.update(status="onprem")),
        "a status of null": values(DESCRIPTION, lambda told: told.update(status=None)),
    },
    "code-is-enclosed": {"no code": gone(CODE)},
}


def test_a_package_has_no_findings(packaged: Path) -> None:
    assert json.loads((packaged / RESULTS / "scaling.json").read_text())["scaling_factor"] > 1
    assert rules_of(packaged) == set()


@pytest.mark.parametrize(("change", "rule"), by_rule(BROKEN))
def test_a_changed_package_is_found_by_its_rule(
    change: Break, rule: str, packaged: Path, tmp_path: Path
) -> None:
    organisation = shutil.copytree(packaged, tmp_path / "org")
    change(organisation)
    (result,) = read_results([organisation])
    findings = chain(result_findings(result), all_rule_findings(result))  # most are of the first
    assert any(finding.rule == rule for finding in findings), rules_of(organisation)


def test_every_rule_on_what_is_enclosed_is_in_the_table() -> None:
    """But for those on a description and on file names, which `test_review` breaks."""
    others = {"description-is-of-the-logs", "description-is-of-the-nodes"}
    others |= {"accelerators-make-the-batch", "configuration-is-enclosed"}
    assert {rule.name for rule in RULES} - set(BROKEN) == others


def test_an_open_package_in_an_image_has_no_findings(tmp_path: Path) -> None:
    image = f"registry.example.org/trainer@sha256:{'0a' * 32}"
    changes = {"preset": "micro", "logging": {"mlperf": {"division": "open"}}}
    options = (f"--image={image}", "--answer=division=open", "--reason=model=a smaller one")
    organisation = make(tmp_path, *options, **changes)
    assert rules_of(organisation) == set()
    for name in ("Dockerfile", "job_2.yaml"):
        changed = shutil.copytree(organisation, tmp_path / name)
        text(f"{CODE}/{name}", "0a0a", "0b0b")(changed)
        assert len(rules_of(changed)) == 1


def test_logs_outside_a_package_are_compared_with_no_package(
    packaged: Path, tmp_path: Path
) -> None:
    logs = shutil.copytree(packaged / RESULTS, tmp_path / "logs")
    assert rules_of(logs) == set()
