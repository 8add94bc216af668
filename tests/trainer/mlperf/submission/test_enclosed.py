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
from tests.trainer.mlperf.submission.finished_runs import answers, ten_runs

from fluxtrain.cli import main
from fluxtrain.errors import EXIT_OK
from fluxtrain.mlperf.review.package_rules import RULES
from fluxtrain.mlperf.review.review import all_rule_findings, result_findings
from fluxtrain.mlperf.review.tree import read_results

pytestmark = pytest.mark.slow

CODE = "benchmarks/flux1/implementations/8xMI300X_fluxtrain"
RESULTS = "results/8xMI300X/flux1"
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


BROKEN: list[tuple[str, Break, str]] = [
    (
        "a source was edited",
        added(f"{CODE}/fluxtrain/model/loss.py", "#"),
        "sources-are-those-that-ran",
    ),
    (
        "a source was added",
        added(f"{CODE}/fluxtrain/faster.py", ""),
        "sources-are-those-that-ran",
    ),
    ("a source is gone", gone(f"{CODE}/fluxtrain/model/loss.py"), "sources-are-those-that-ran"),
    ("the sources are gone", gone(f"{CODE}/fluxtrain"), "sources-are-those-that-ran"),
    (
        "one run of other sources",
        text(f"{RESULTS}/result_3.txt", '"revision": "0123abcd"', '"revision": "4567"'),
        "same-software",
    ),
    (
        "one run of another torch",
        text(f"{RESULTS}/result_3.txt", '"torch": "', '"torch": "9.'),
        "same-software",
    ),
    (
        "one run that does not tell its software",
        text(f"{RESULTS}/result_3.txt", "fluxtrain_software", "software"),
        "same-software",
    ),
    (
        "another torch is required",
        text(f"{CODE}/requirements.txt", "torch==", "torch==1"),
        "requirements-are-those-that-ran",
    ),
    (
        "a package more",
        added(f"{CODE}/requirements.txt", "faster==1.0\n"),
        "requirements-are-those-that-ran",
    ),
    (
        "an option of pip",
        added(f"{CODE}/requirements.txt", "--pre\n"),
        "requirements-are-those-that-ran",
    ),
    ("no requirements", gone(f"{CODE}/requirements.txt"), "requirements-are-those-that-ran"),
    (
        "a driver that was not there",
        text(f"{CODE}/nodes.json", "amdgpu 6.12.12", "amdgpu 7.0"),
        "nodes-are-those-of-the-logs",
    ),
    (
        "a run without nodes",
        values(f"{CODE}/nodes.json", lambda nodes: nodes.pop("result_9")),
        "nodes-are-those-of-the-logs",
    ),
    ("no nodes", gone(f"{CODE}/nodes.json"), "nodes-are-those-of-the-logs"),
    (
        "a job with another rate",
        run_field("job_4.yaml", {"optim": {"learning_rate": 1e-3}}),
        "jobs-are-of-the-configuration",
    ),
    (
        "a job with the seed of another run",
        run_field("job_4.yaml", {"seed": 105}),
        "jobs-are-of-the-configuration",
    ),
    (
        "a job on more nodes",
        values(f"{CODE}/job_4.yaml", lambda job: job["spec"].update(nodes={"min": 4, "max": 4})),
        "jobs-are-of-the-configuration",
    ),
    (
        "a job with fewer GPUs",
        values(f"{CODE}/job_4.yaml", lambda job: job["spec"].update(gpusPerNode=4)),
        "jobs-are-of-the-configuration",
    ),
    (
        "a job of no kind",
        values(f"{CODE}/job_4.yaml", lambda job: job.pop("kind")),
        "jobs-are-of-the-configuration",
    ),
    ("no job", gone(f"{CODE}/job_4.yaml"), "jobs-are-of-the-configuration"),
    (
        "another configuration",
        values(f"{CODE}/config_4.json", lambda config: config["data"].update(num_workers=3)),
        "jobs-are-of-the-configuration",
    ),
    (
        "a configuration that is none",
        values(f"{CODE}/config_4.json", lambda config: config["optim"].update(beta1="high")),
        "configuration-is-valid",
    ),
    (
        "a script that does more",
        added(f"{CODE}/run_and_time.sh", "echo done\n"),
        "scripts-are-those-that-ran",
    ),
    ("no setup", gone(f"{CODE}/setup.sh"), "scripts-are-those-that-ran"),
    (
        "other data sets",
        text(f"{CODE}/init_datasets.sh", "cc12m", "cc3m"),
        "scripts-are-those-that-ran",
    ),
    (
        "another base image",
        text(f"{CODE}/Dockerfile", "FROM python", "FROM example.org/python"),
        "scripts-are-those-that-ran",
    ),
    (
        "another precision is told",
        values(
            f"{CODE}/8xMI300X_fluxtrain.json",
            lambda told: told.update(weight_data_type="float64"),
        ),
        "implementation-is-as-described",
    ),
    (
        "nothing is told",
        gone(f"{CODE}/8xMI300X_fluxtrain.json"),
        "implementation-is-as-described",
    ),
    (
        "a deviation is left out",
        lambda folder: text(
            f"{CODE}/deviations.md",
            next(
                line
                for line in (folder / CODE / "deviations.md").read_text().splitlines()
                if line.startswith("| prompt dropout")
            ),
            "",
        )(folder),
        "deviations-are-stated",
    ),
    ("no deviations", gone(f"{CODE}/deviations.md"), "deviations-are-stated"),
    (
        "a factor of 1",
        values(f"{RESULTS}/scaling.json", lambda told: told.update(scaling_factor=1.0)),
        "scaling-is-of-the-logs",
    ),
    (
        "a factor below 1",
        values(f"{RESULTS}/scaling.json", lambda told: told.update(scaling_factor=0.9)),
        "scaling-is-of-the-logs",
    ),
    (
        "a factor in words",
        values(f"{RESULTS}/scaling.json", lambda told: told.update(scaling_factor="1")),
        "scaling-is-of-the-logs",
    ),
    ("no factor", gone(f"{RESULTS}/scaling.json"), "scaling-is-of-the-logs"),
    (
        "one node of another kind",
        text(
            f"{RESULTS}/result_3.txt",
            '"nodes": "0-1", "accelerators_per_node": "8"',
            '"nodes": "0-1", "accelerators_per_node": "4"',
        ),
        "description-is-of-each-node",
    ),
    (
        "a node more",
        text(f"{RESULTS}/result_3.txt", '"nodes": "0-1"', '"nodes": "0-1,5"'),
        "description-is-of-each-node",
    ),
    ("no description", gone("systems/8xMI300X.json"), "description-is-enclosed"),
    ("no code", gone(CODE), "code-is-enclosed"),
]


def test_a_package_has_no_findings(packaged: Path) -> None:
    assert json.loads((packaged / RESULTS / "scaling.json").read_text())["scaling_factor"] > 1
    assert rules_of(packaged) == set()


@pytest.mark.parametrize(("what", "change", "rule"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_changed_package_is_found_by_its_rule(
    what: str, change: Break, rule: str, packaged: Path, tmp_path: Path
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
    assert {rule.name for rule in RULES} - {row[2] for row in BROKEN} == others


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
