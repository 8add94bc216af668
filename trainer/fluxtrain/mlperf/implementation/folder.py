"""Writes the folder of a package with what is needed to repeat its runs.

SYSTEM_fluxtrain/
  README.md                        what ran, and the steps to repeat it
  SYSTEM_fluxtrain.json            the implementation on this system, as data
  Dockerfile                       the image that ran, by its digest
  setup.sh init_datasets.sh run_and_time.sh
  config_0.json ... job_0.yaml ... each run's configuration, alone and as a job
  chain_0.jsonl ...                the chain of each run's log
  fluxtrain/ requirements.txt      the sources and packages that ran
  nodes.json                       what each node of each run reported of itself
  deviations.md                    each difference from the reference, with its reason
  other_runs/                      the logs of runs that do not count: of more than ten, and failed ones
  failed_runs.json                 why the failed ones failed
  waivers.json                     the review's findings that the submitter knows of
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fluxtrain.contract.run.deviations import ACCUMULATION, Deviation, deviations
from fluxtrain.mlperf.evidence import OTHERS_FOLDER, WAIVERS_FILE, FailedRun, Run, is_file
from fluxtrain.mlperf.failed_runs import write_failed
from fluxtrain.mlperf.implementation.datasets import init_datasets
from fluxtrain.mlperf.implementation.description import implementation_json
from fluxtrain.mlperf.implementation.deviations import DEVIATIONS_FILE, require_used, statement
from fluxtrain.mlperf.implementation.image import dockerfile
from fluxtrain.mlperf.implementation.job import job_text
from fluxtrain.mlperf.implementation.readme import readme
from fluxtrain.mlperf.implementation.software import (
    NODES_FILE,
    Software,
    ran_software,
    reported_nodes,
    require_sources,
)
from fluxtrain.mlperf.review.chained import chain_of, enclosed_name
from fluxtrain.mlperf.software import SOURCE, is_source

_TEMPLATES = Path(__file__).parent / "templates"
_EXECUTABLE = 0o755


@dataclass(frozen=True)
class Statements:
    """What the submitter states: reasons for findings of the review and for changes, and the image."""

    waivers: Mapping[str, str] = field(default_factory=dict)
    """By rule of the review."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By field of the configuration, or by section."""
    image: str | None = None
    """By its digest; None if the runs were in none."""
    others: Sequence[Run] = ()
    """Of more than ten runs, those that do not count."""
    failed: Sequence[FailedRun] = ()
    """Runs that failed before their end."""


def run_deviations(run: Run, reasons: Mapping[str, str]) -> list[Deviation]:
    """Return how ``run`` differs from the reference; raise ConfigError for a reason without a difference."""
    config = run.resolved
    require_used(config, reasons)
    found = list(deviations(config, reasons))
    steps = run.number("gradient_accumulation_steps") or 1
    return [*found, ACCUMULATION] if steps > 1 else found


def write_implementation(
    runs: Sequence[Run],
    description: Mapping[str, str],
    statements: Statements,
    folder: Path,
) -> None:
    """Write the ``folder`` of ``runs``, which have equal settings.

    Raises ConfigError if they ran different software, or other sources than this program's.
    """
    software, config = ran_software(runs), runs[0].resolved
    _copy_sources(software, folder / "fluxtrain")
    for index, run in enumerate(runs):
        _write_json(folder / f"config_{index}.json", dict(run.config or {}))
        if (chain := chain_of(run)) is not None and is_file(chain):
            shutil.copyfile(chain, folder / enclosed_name(index))
        job = job_text(run, f"result-{index}", statements.image)
        (folder / f"job_{index}.yaml").write_text(job)
    (folder / "requirements.txt").write_text(software.requirements)
    (folder / "Dockerfile").write_text(dockerfile(software, statements.image))
    _write_script(folder / "init_datasets.sh", init_datasets(runs[0], config))
    for script in sorted(_TEMPLATES.glob("*.sh")):
        _write_script(folder / script.name, script.read_text())
    _write_json(folder / NODES_FILE, reported_nodes(runs))
    for index, run in enumerate(statements.others):
        (folder / OTHERS_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(run.log, folder / OTHERS_FOLDER / f"run_{index:02}.txt")
    write_failed(statements.failed, folder)
    if statements.waivers:
        _write_json(folder / WAIVERS_FILE, dict(statements.waivers))
    found = run_deviations(runs[0], statements.reasons)
    (folder / DEVIATIONS_FILE).write_text(statement(found))
    about = implementation_json(runs[0], config, software, statements.image, folder.name)
    _write_json(folder / f"{folder.name}.json", about)
    facts = (software, statements.image, statements.waivers, statements.others, statements.failed)
    text = readme(runs, description, *facts)
    (folder / "README.md").write_text(text)


def _copy_sources(software: Software, target: Path) -> None:
    """Copy the sources that ran to ``target``; raise ConfigError if this program's are others."""
    require_sources(software)
    for path in sorted(SOURCE.rglob("*")):
        relative = path.relative_to(SOURCE)
        if path.is_file() and is_source(relative):
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(_EXECUTABLE)
