"""The folder of a package with what is needed to repeat its runs.

SYSTEM_fluxtrain/
  README.md                        what ran, and how to repeat it
  config_0.json ... job_0.json ... each run's configuration, alone and as a job
  fluxtrain/ requirements.txt      source and packages
  deviations.md                    each difference from the reference, with its reason
  waivers.json                     the review's findings that the submitter knows of
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

from fluxtrain import __version__
from fluxtrain.contract.run.deviations import ACCUMULATION, Deviation, deviations
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.mlperf.deviations_file import DEVIATIONS_FILE, require_used, statement
from fluxtrain.mlperf.review.evidence import WAIVERS_FILE, Run

_SOURCE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Statements:
    """What the submitter states: reasons for findings of the review, and for changes of the benchmark."""

    waivers: Mapping[str, str] = field(default_factory=dict)
    """By rule of the review."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By field of the configuration, or by section."""


def run_deviations(run: Run, reasons: Mapping[str, str]) -> list[Deviation]:
    """Return how ``run`` differs from the reference; raise ConfigError for a reason without a difference."""
    config = resolve(run.config or {})
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
    """Write the ``folder`` of ``runs``, which have equal settings."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    shutil.copytree(_SOURCE, folder / "fluxtrain", ignore=ignored)
    for index, run in enumerate(runs):
        config = dict(run.config or {})
        _write_json(folder / f"config_{index}.json", config)
        job = {
            "apiVersion": "fluxtrain.dev/v1alpha1",
            "kind": "FluxTraining",
            "metadata": {"name": f"result-{index}"},
            "spec": {"run": config},
        }
        _write_json(folder / f"job_{index}.json", job)
    packages = {f"{package.name}=={package.version}" for package in distributions() if package.name}
    (folder / "requirements.txt").write_text("\n".join(sorted(packages)) + "\n")
    if statements.waivers:
        _write_json(folder / WAIVERS_FILE, dict(statements.waivers))
    found = run_deviations(runs[0], statements.reasons)
    (folder / DEVIATIONS_FILE).write_text(statement(found))
    (folder / "README.md").write_text(_readme(runs, description, statements.waivers))


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _readme(runs: Sequence[Run], description: Mapping[str, str], waivers: Mapping[str, str]) -> str:
    known = [f"- {rule}: {reason}" for rule, reason in waivers.items()]
    rows = [
        f"| result_{index}.txt | {run.value('seed')} | {run.samples or 'did not converge'} |"
        for index, run in enumerate(runs)
    ]
    return "\n".join(
        [
            f"# FLUX.1 on {description['system_name']} with fluxtrain {__version__}",
            "",
            f"{description['number_of_nodes']} nodes, {description['accelerators_per_node']} x "
            f"{description['accelerator_model_name']} each, {description['framework']}. "
            "`fluxtrain/` is the code, `requirements.txt` lists the installed packages, config_N.json is the",
            f"config.json of result_N.txt. `{DEVIATIONS_FILE}` lists each difference from the reference.",
            "",
            "To reproduce result N: prepare the data (`fluxtrain prepare --help`), then",
            "`fluxtrain run job_N.json --output OUTPUT`; or `kubectl apply -f job_N.json` after adding nodes",
            "and storage.",
            "",
            "| log | seed | samples to convergence |",
            "|---|---|---|",
            *rows,
            "",
            *(
                ["Findings of `fluxtrain mlperf review` that are waived:", "", *known, ""]
                if known
                else []
            ),
        ]
    )
