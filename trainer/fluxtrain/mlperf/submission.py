"""Create the folder of an MLCommons submission from ten finished runs: logs, system, code, configurations.

ORGANISATION/
  systems/SYSTEM.json
  results/SYSTEM/flux1/result_0.txt ... result_9.txt
  benchmarks/flux1/implementations/SYSTEM_fluxtrain/   README.md, config_0.json ..., our source
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from math import inf
from pathlib import Path
from typing import Any

from fluxtrain import __version__
from fluxtrain.contract.launch import CONFIG_FILE, MLPERF_FILE
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError, StorageError
from fluxtrain.mlperf.facts import SYSTEM_KEY
from fluxtrain.mlperf.lines import LogLine, read_lines
from fluxtrain.mlperf.rcp import NUM_RUNS
from fluxtrain.mlperf.review.evidence import WAIVERS_FILE
from fluxtrain.mlperf.system import STATUSES

_SOURCE = Path(__file__).parents[1]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_EQUAL_KEYS = (
    "submission_org",
    "submission_platform",
    "submission_division",
    "submission_status",
    "global_batch_size",
)
"""Keys whose values must be equal in all logs."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its log and its configuration."""

    name: str
    log: Path
    config: Path
    values: Mapping[str, Any]  # the first value of each key
    samples: int | None  # to convergence; None if the run did not reach its target
    ended: bool
    minutes: float  # from run_start to run_stop; infinite if the run did not reach its target

    @staticmethod
    def read(folder: Path) -> FinishedRun:
        """Return the run whose output is ``folder``; raise ConfigError if it has no log or config."""
        log, config = folder / MLPERF_FILE, folder / CONFIG_FILE
        for path in (log, config):
            if not path.is_file():
                text = f"has no {path.name}: give output folders of fluxtrain run"
                raise ConfigError("RUN", str(folder), text)
        lines = [line for line in read_lines(log) if not line.fault]
        values: dict[str, Any] = {}
        for line in lines:
            values.setdefault(line.key, line.value)
        stop = next((line for line in lines if line.key == "run_stop"), None)
        samples = _samples(lines, stop)
        minutes = inf if samples is None else _minutes(lines)
        return FinishedRun(str(folder), log, config, values, samples, stop is not None, minutes)

    @property
    def closed(self) -> bool:
        """Return whether the log is of the closed division."""
        return bool(self.values.get("submission_division") == "closed")


def require_one_result(runs: Sequence[FinishedRun]) -> None:
    """Raise ConfigError naming every reason why ``runs`` are not one result."""
    errors = []
    if len(runs) != NUM_RUNS:
        errors.append(ConfigError("RUN ...", len(runs), f"must be {NUM_RUNS} runs"))
    errors += [
        ConfigError(run.name, UNSET, "the run is not over: its log has no run_stop")
        for run in runs
        if not run.ended
    ]
    lost = [run.name for run in runs if run.samples is None]
    if len(lost) > 1:
        text = f"did not reach the target: {', '.join(lost)}; one run at most may be dropped"
        errors.append(ConfigError("RUN ...", UNSET, text))
    for key in _EQUAL_KEYS:
        values = sorted({str(run.values.get(key)) for run in runs})
        if len(values) > 1:
            errors.append(ConfigError(key, ", ".join(values), "must be the same in all runs"))
    seeds = Counter(run.values.get("seed") for run in runs)
    if repeated := [seed for seed, count in seeds.items() if count > 1]:
        errors.append(ConfigError("seed", repeated[0], "must differ from run to run"))
    if errors:
        raise errors[0] if len(errors) == 1 else JoinedConfigError(errors)


def known_fields(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """Return the submitter's and system's fields in the logs, without those that differ between runs."""
    values = runs[0].values
    known = {
        "submitter": str(values.get("submission_org", "")),
        "division": str(values.get("submission_division", "")),
        "system_name": str(values.get("submission_platform", "")),
    }
    if (status := STATUSES.get(str(values.get("submission_status")))) is not None:
        known["status"] = status
    systems = [run.values.get(SYSTEM_KEY) or {} for run in runs]
    for name, value in systems[0].items():
        if all(isinstance(system, dict) and system.get(name) == value for system in systems):
            known[str(name)] = str(value)
    return {name: value for name, value in known.items() if value}


def write_package(
    runs: Sequence[FinishedRun],
    description: Mapping[str, str],
    output: Path,
    waivers: Mapping[str, str],
) -> tuple[Path, str]:
    """Write the tree of one result below ``output``; return the organisation's folder and the system's name.

    ``waivers`` has the reason for each rule of the review whose findings the submitter knows of.

    Raises ConfigError if a name is not a valid folder name or the result exists, StorageError if it cannot be
    written. The result is written completely or not at all.
    """
    organisation = output / _folder_name("submitter", description["submitter"])
    system = _folder_name("system_name", description["system_name"])
    result = organisation / "results" / system / "flux1"
    if result.exists():
        raise ConfigError("--output", str(output), f"{result} exists already; remove it first")
    partial = output / f".{system}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        logs = partial / "results" / system / "flux1"
        logs.mkdir(parents=True)
        for index, run in enumerate(runs):
            shutil.copyfile(run.log, logs / f"result_{index}.txt")
        _write_json(partial / "systems" / f"{system}.json", description)
        implementation = Path("benchmarks/flux1/implementations") / f"{system}_fluxtrain"
        _write_implementation(runs, description, waivers, partial / implementation)
        shutil.rmtree(organisation / implementation, ignore_errors=True)  # of an unfinished attempt
        for part in (implementation, f"systems/{system}.json", f"results/{system}/flux1"):
            (organisation / part).parent.mkdir(parents=True, exist_ok=True)
            (partial / part).replace(organisation / part)
    except OSError as error:
        raise StorageError(f"{output}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return organisation, system


def _samples(lines: Sequence[LogLine], stop: LogLine | None) -> int | None:
    """Return the samples at the last evaluation of a successful run, None for other runs."""
    if stop is None or stop.fields["metadata"].get("status") != "success":
        return None
    counted = [line.samples for line in lines if line.key == "eval_accuracy"]
    return counted[-1] if counted else None


def _minutes(lines: Sequence[LogLine]) -> float:
    times = {line.key: float(line.fields["time_ms"]) for line in lines}
    return (times["run_stop"] - times.get("run_start", -inf)) / 60_000


def _folder_name(field: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        text = "names a folder: letters, digits, '.', '_' and '-' only"
        raise ConfigError(field, name, text)
    return name


def _write_implementation(
    runs: Sequence[FinishedRun],
    description: Mapping[str, str],
    waivers: Mapping[str, str],
    folder: Path,
) -> None:
    """Write what is needed to reproduce the runs (code, packages, configurations), and the waivers."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    shutil.copytree(_SOURCE, folder / "fluxtrain", ignore=ignored)
    for index, run in enumerate(runs):
        config = json.loads(run.config.read_text())
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
    if waivers:
        _write_json(folder / WAIVERS_FILE, dict(waivers))
    (folder / "README.md").write_text(_readme(runs, description, waivers))


def _write_json(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def _readme(
    runs: Sequence[FinishedRun], description: Mapping[str, str], waivers: Mapping[str, str]
) -> str:
    known = [f"- {rule}: {reason}" for rule, reason in waivers.items()]
    rows = [
        f"| result_{index}.txt | {run.values.get('seed')} | {run.samples or 'did not converge'} |"
        for index, run in enumerate(runs)
    ]
    return "\n".join(
        [
            f"# FLUX.1 on {description['system_name']} with fluxtrain {__version__}",
            "",
            f"{description['number_of_nodes']} nodes, {description['accelerators_per_node']} x "
            f"{description['accelerator_model_name']} each, {description['framework']}. "
            "`fluxtrain/` is the code, `requirements.txt` lists the installed packages, config_N.json is the",
            "config.json of result_N.txt.",
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
