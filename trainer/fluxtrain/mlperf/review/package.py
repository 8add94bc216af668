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

from fluxtrain.contract.resource.document import parse_yaml, read_text
from fluxtrain.errors import UNSET, ConfigError, JoinedConfigError, StorageError
from fluxtrain.mlperf.evidence import Result, Run, write_json
from fluxtrain.mlperf.implementation import Statements, write_implementation
from fluxtrain.mlperf.review.result_rules import OF_ALL_RUNS, OF_ONE_RESULT, Finding, Rule

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
        write_json(partial / "systems" / f"{system}.json", description)
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


FIELDS: dict[str, str] = {
    "submitter": "the organisation, as in the logs",
    "division": "closed or open, as in the logs",
    "status": "availability: one of {statuses}",
    "system_name": "name of the system; letters, digits, '.', '_' and '-': it names folders",
    "number_of_nodes": "nodes that trained",
    "host_processors_per_node": "processor sockets of a node",
    "host_processor_model_name": "such as AMD EPYC 9575F",
    "host_processor_core_count": "cores of one processor",
    "host_processor_vcpu_count": "hardware threads of a node",
    "host_processor_frequency": "highest frequency; may be empty",
    "host_processor_caches": "levels and sizes; may be empty",
    "host_processor_interconnect": "between the sockets; may be empty",
    "host_memory_capacity": "memory of a node",
    "host_storage_type": "such as NVMe SSD",
    "host_storage_capacity": "such as 8 x 3.84 TB",
    "host_networking": "such as 8 x 400 GbE RoCE",
    "host_networking_topology": "such as rail-optimised fat tree",
    "host_memory_configuration": "such as 24 x 96 GB DDR5",
    "accelerators_per_node": "accelerators of a node",
    "accelerator_model_name": "such as AMD Instinct MI300X",
    "accelerator_host_interconnect": "such as PCIe Gen5 x16",
    "accelerator_frequency": "may be empty",
    "accelerator_on-chip_memories": "may be empty",
    "accelerator_memory_configuration": "such as HBM3",
    "accelerator_memory_capacity": "memory of one accelerator",
    "accelerator_interconnect": "such as Infinity Fabric",
    "accelerator_interconnect_topology": "such as fully connected; may be empty",
    "cooling": "air or liquid",
    "hw_notes": "anything else; may be empty",
    "framework": "name and version",
    "other_software_stack": "what else matters, with versions",
    "operating_system": "name and version",
    "sw_notes": "anything else; may be empty",
}
"""The 33 fields that MLCommons' checker requires, each with its description."""

STATUSES = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
"""The values of ``logging.mlperf.status``, each with the one that the checker accepts."""
_NUMBERS = (
    "number_of_nodes",
    "host_processors_per_node",
    "host_processor_core_count",
    "accelerators_per_node",
)
"""Strings of digits: MLCommons' summarizer multiplies some of them, and crashes on other strings."""
_MAY_BE_EMPTY = {name for name, description in FIELDS.items() if "may be empty" in description}


def describe(known: Mapping[str, str], answers: Mapping[str, object]) -> dict[str, str]:
    """Return the complete description; ``answers`` override the ``known`` fields.

    Raises ConfigError naming every field that is missing (null), unknown or has a wrong value.
    """
    errors = [
        ConfigError(name, UNSET, "no field of a system description")
        for name in answers
        if name not in FIELDS
    ]
    description: dict[str, str] = {}
    for name in FIELDS:
        given = answers.get(name)
        value = known.get(name) if given is None else given
        if error := _error(name, value):
            errors.append(error)
        else:
            description[name] = str(value)
    if errors:
        raise errors[0] if len(errors) == 1 else JoinedConfigError(errors, most=len(FIELDS))
    return description


def read_answers(path: Path) -> dict[str, object]:
    """Return the fields in the YAML or JSON file at ``path``; null is a missing value."""
    answers = parse_yaml(read_text(path), f"--system {path}")
    if not isinstance(answers, dict):
        raise ConfigError("--system", str(path), "must be a YAML mapping of fields")
    return {str(name): value for name, value in answers.items()}


def is_complete(answers: Mapping[str, object]) -> bool:
    return all(answers.get(name) is not None for name in FIELDS)


def template(known: Mapping[str, str]) -> str:
    """Return a YAML file with every field and its description; fields that are not ``known`` are null."""
    lines = [
        "# The system description of an MLPerf submission. Fields logged by the nodes are filled in;",
        '# replace each null; "" is allowed if a field may be empty.',
    ]
    for name in FIELDS:
        value = json.dumps(known[name]) if name in known else "null"
        lines.append(f"{name}: {value} # {_description(name)}")
    return "\n".join(lines) + "\n"


def _description(name: str) -> str:
    return FIELDS[name].format(statuses=" | ".join(STATUSES.values()))


def _error(name: str, value: object) -> ConfigError | None:
    if value is None:
        return ConfigError(name, UNSET, f"missing: {_description(name)}")
    if not isinstance(value, str) and not (isinstance(value, int) and name != "system_name"):
        return ConfigError(name, value, "must be a string")
    text = str(value)
    if not text.strip() and name not in _MAY_BE_EMPTY:
        return ConfigError(name, text, f"must not be empty: {_description(name)}")
    if name in _NUMBERS and not text.isdecimal():
        return ConfigError(name, text, "must be a whole number")
    if name == "status" and text not in STATUSES.values():
        return ConfigError(name, text, f"must be one of {', '.join(STATUSES.values())}")
    return None
