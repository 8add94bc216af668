"""Create the folder of an MLCommons submission from ten finished runs: logs, system, code, configurations.

ORGANISATION/
  systems/SYSTEM.json
  results/SYSTEM/flux1/result_0.txt ... result_9.txt
  benchmarks/flux1/implementations/SYSTEM_fluxtrain/   to repeat the runs: see implementation/folder.py
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError, StorageError
from fluxtrain.mlperf.evidence import Result, Run
from fluxtrain.mlperf.implementation import Statements, write_implementation
from fluxtrain.mlperf.review.rule import Finding, Rule
from fluxtrain.mlperf.review.runs import OF_ALL_RUNS, OF_ONE_RESULT
from fluxtrain.mlperf.system import STATUSES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def require_one_result(runs: Sequence[Run], result: Result, waivers: Mapping[str, str]) -> None:
    """Raise ConfigError naming every reason, but for ``waivers``, why ``result``, of ``runs``, is none."""
    found = [*_findings(OF_ONE_RESULT, result), *_findings(OF_ALL_RUNS, replace(result, runs=runs))]
    errors = [
        ConfigError(each.rule, UNSET, f"{each.text}. {each.fix}")
        for each in found
        if each.rule not in waivers
    ]
    if errors:
        raise errors[0] if len(errors) == 1 else JoinedConfigError(errors)


def _findings(rules: Iterable[Rule[Result]], result: Result) -> Iterator[Finding]:
    for rule in rules:
        yield from rule.findings(result, "", result.closed)


def known_fields(runs: Sequence[Run]) -> dict[str, str]:
    """Return the submitter's and system's fields in the logs, without those that differ between runs."""
    first = runs[0]
    known = {
        "submitter": str(first.value("submission_org") or ""),
        "division": str(first.value("submission_division") or ""),
        "system_name": str(first.value("submission_platform") or ""),
    }
    if (status := STATUSES.get(str(first.value("submission_status")))) is not None:
        known["status"] = status
    for name, value in first.system.items():
        if all(run.system.get(name) == value for run in runs):
            known[str(name)] = str(value)
    return {name: value for name, value in known.items() if value}


def write_package(
    runs: Sequence[Run],
    description: Mapping[str, str],
    output: Path,
    statements: Statements,
) -> tuple[Path, str]:
    """Write the tree of one result below ``output``; return the organisation's folder and the system's name.

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
        write_implementation(runs, description, statements, partial / implementation)
        shutil.rmtree(organisation / implementation, ignore_errors=True)  # of an unfinished attempt
        for part in (implementation, f"systems/{system}.json", f"results/{system}/flux1"):
            (organisation / part).parent.mkdir(parents=True, exist_ok=True)
            (partial / part).replace(organisation / part)
    except OSError as error:
        raise StorageError(f"{output}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return organisation, system


def _folder_name(field: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        text = "names a folder: letters, digits, '.', '_' and '-' only"
        raise ConfigError(field, name, text)
    return name


def _write_json(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")
