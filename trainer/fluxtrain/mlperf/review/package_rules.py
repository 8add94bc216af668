"""Rules on a package: its system description and its files against the logs.

What it encloses to repeat its runs is compared in packages of fluxtrain, whose logs say which software
ran.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fluxtrain.contract.process import CONFIG_FILE
from fluxtrain.contract.resource.document import load_job
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.errors import FluxtrainError
from fluxtrain.mlperf.evidence import Result, Run, count_of, read_object
from fluxtrain.mlperf.facts import SOURCE, num_nodes, source_digest
from fluxtrain.mlperf.implementation import (
    DEVIATIONS_FILE,
    NODES_FILE,
    Software,
    dockerfile,
    implementation_json,
    init_datasets,
    ran_software,
    records,
    reported_nodes,
    row_of,
    run_deviations,
)
from fluxtrain.mlperf.rcp import compare_with_reference
from fluxtrain.mlperf.review.package import FIELDS, STATUSES
from fluxtrain.mlperf.review.result_rules import Rule, is_unnamed, rule, rules_in
from fluxtrain.mlperf.review.run_rules import batch_faults
from fluxtrain.runtime.progress import first_of

_DESCRIPTION = (
    "Correct the system description, with package by --system, or the logs' own statement."
)
_SUBMISSION_RULES = ""
_OF_NODES = (
    *("number_of_nodes", "accelerators_per_node", "accelerator_model_name"),
    *("host_processors_per_node", "framework", "operating_system"),
)
"""Fields that the nodes report in the words in which they are described."""
_TEXTS = (
    *("submitter", "system_name", "host_processor_model_name", "host_processor_core_count"),
    *("accelerator_model_name", "accelerators_per_node", "framework"),
)
"""Fields that MLCommons' checker joins: it crashes on a number."""


@rule(
    _SUBMISSION_RULES,
    "Describe the system in systems/SYSTEM.json; fluxtrain mlperf package writes it.",
)
def description_is_enclosed(result: Result) -> Iterator[str]:
    """A package has `systems/SYSTEM.json`, as MLCommons' checkers can read it: all fields, in texts."""
    if result.folder is None:
        return
    path, description = f"systems/{result.folder.resolve().parent.name}.json", result.description
    if description is None:
        yield f"the package has no {path}"
        return
    if missing := [name for name in FIELDS if name not in description]:
        yield f"{path} has no {first_of(missing, _MAX_SHOWN)}"
    for name in _TEXTS:
        if not isinstance(value := description.get(name, ""), str):
            yield f"{name} is {value!r} in {path}; needed: a text in quotes"
    known = [*STATUSES.values()]
    if (status := description.get("status", known[0])) not in known:
        yield f"status is {status!r} in {path}; allowed: {'; '.join(known)}"


@rule(_SUBMISSION_RULES, _DESCRIPTION)
def description_is_of_the_logs(result: Result) -> Iterator[str]:
    """Submitter, division and status are those of the logs, the division also that of the folder."""
    description = result.description
    above = "" if result.folder is None else result.folder.resolve().parents[3].name
    if not result.runs:
        return
    run = result.runs[0]
    stated, status = run.value("submission_division"), run.value("submission_status")
    if above in ("closed", "open") and stated != above:
        yield f"the folder is of the division {above}, the logs are of {stated!r}"
    if description is None:
        return
    logged = {
        "submitter": run.value("submission_org"),
        "division": stated,
        "status": STATUSES.get(str(status), status),
    }
    for field, value in logged.items():
        if not is_unnamed(value) and description.get(field) != value:
            yield f"{field} is {description.get(field)!r} in the description, {value!r} in the logs"
    for field in ("number_of_nodes", "accelerators_per_node"):
        if description.get(field) is not None and count_of(description, field) is None:
            yield f"{field} is {description[field]!r} in the description; needed: a whole number"


@rule("2.2", _DESCRIPTION)
def description_is_of_the_nodes(result: Result) -> Iterator[str]:
    """Number and kind of nodes and accelerators, and the software, are what the nodes reported."""
    description = result.description
    if description is None or not result.runs:
        return
    for field in _OF_NODES:
        value = result.runs[0].system.get(field)
        if value is not None and description.get(field) != str(value):
            yield f"{field} is {description.get(field)!r} in the description, the nodes reported {value!r}"


@rule("2.2", _DESCRIPTION)
def description_is_of_each_node(result: Result) -> Iterator[str]:
    """Each node of each run reported what the description says of a node, and all nodes did."""
    description = result.description
    if description is None:
        return
    for run in result.runs:
        found = records(run)
        for record in found:
            for field in _OF_NODES:
                told, value = description.get(field), record.hardware.get(field)
                if value is not None and told != value:
                    nodes = f"nodes {record.nodes} of {run.name}"
                    yield f"{field} is {told!r} in the description, {nodes} reported {value!r}"
        count = sum(map(num_nodes, found))
        if found and (stated := count_of(description, "number_of_nodes")) not in (None, count):
            yield f"the description has {stated} nodes, {count} reported in {run.name}"


@rule("9.1", _DESCRIPTION)
def accelerators_make_the_batch(result: Result) -> Iterator[str]:
    """The accelerators of the description can hold the micro batches of the log."""
    if result.description is None or not result.runs or result.runs[0].system:
        return
    yield from batch_faults(result.runs[0], result.description, " of the description")


@rule(_SUBMISSION_RULES, "Enclose the configuration of each run beside the code.")
def configuration_is_enclosed(result: Result) -> Iterator[str]:
    """The file that `config_filename` names is with the code."""
    if result.implementation is None:
        return
    enclosed = {path.name for path in result.implementation.rglob("*")}
    for name in sorted({str(run.value("config_filename")) for run in result.runs}):
        if name not in ("None", CONFIG_FILE) and PurePosixPath(name).name not in enclosed:
            yield f"config_filename is {name!r}, which is not in {result.implementation.name}"
    if any(run.value("config_filename") == CONFIG_FILE for run in result.runs):
        for run in result.runs:
            if run.config is None:
                yield f"{run.name}: its configuration is not in {result.implementation.name}"


@rule(
    _SUBMISSION_RULES,
    "Enclose the code, with a README.md, in benchmarks/flux1/implementations/SYSTEM.",
)
def code_is_enclosed(result: Result) -> Iterator[str]:
    """A package has the code and its README."""
    if result.description is None and result.folder is None:
        return
    own = "; fluxtrain mlperf package writes both" if any(map(records, result.runs)) else ""
    if result.implementation is None:
        yield f"the package has no code for this system below benchmarks/flux1{own}"
    elif not (result.implementation / "README.md").is_file():
        yield f"{result.implementation.name} has no README.md{own}"


SCALING_FILE = "scaling.json"
"""Of MLCommons' package checker, beside the logs."""
_FACTOR, _TOLERANCE = "scaling_factor", 1e-6
_AGAIN = "Package the runs with fluxtrain mlperf package, and change nothing in the package."
_SAME = "Give runs of one result: the same software on all nodes of all runs."
_TEMPLATES = "fluxtrain/mlperf/templates"
_MAX_SHOWN = 4


@rule("2.2", _SAME)
def same_software(result: Result) -> Iterator[str]:
    """All nodes of all runs reported the same Python, packages and sources."""
    if any(map(records, result.runs)):
        try:
            ran_software(result.runs)
        except FluxtrainError as error:
            yield str(error)


@rule("2.2", _AGAIN)
def sources_are_those_that_ran(result: Result) -> Iterator[str]:
    """The digest of the enclosed sources is the one that the nodes reported."""
    if (software := _software(result)) is None or (folder := result.implementation) is None:
        return
    if not (folder / "fluxtrain").is_dir():
        yield f"{folder.name} has no fluxtrain/, the sources"
    elif (digest := source_digest(folder / "fluxtrain")) != software.source_sha256:
        yield f"fluxtrain/ has the digest {digest}, the nodes ran {software.source_sha256}"


@rule("2.2", _AGAIN)
def requirements_are_those_that_ran(result: Result) -> Iterator[str]:
    """`requirements.txt` has the packages that the nodes reported, and no more."""
    if (software := _software(result)) is None:
        return
    listed = (_text(result, "requirements.txt") or "").splitlines()
    ran = software.requirements.splitlines()
    for text, lines in (
        ("is not in requirements.txt", [line for line in ran if line not in listed]),
        ("did not run, but is in requirements.txt", [line for line in listed if line not in ran]),
    ):
        if lines:
            yield f"{first_of(lines, _MAX_SHOWN)} {text}"


@rule("2.2", _AGAIN)
def nodes_are_those_of_the_logs(result: Result) -> Iterator[str]:
    """`nodes.json` has what the nodes reported in the logs."""
    if _software(result) is None or result.implementation is None:
        return
    told, reported = read_object(result.implementation / NODES_FILE), reported_nodes(result.runs)
    if told is None:
        yield f"{result.implementation.name} has no {NODES_FILE}"
    elif differ := _different(told, reported):
        yield f"{NODES_FILE} differs from the logs in {first_of(differ, _MAX_SHOWN)}"


@rule("9.1", _AGAIN)
def jobs_are_of_the_configuration(result: Result) -> Iterator[str]:
    """Each `job_N.yaml` has the fields of `config_N.json`, and seed, nodes, GPUs and image of its run."""
    if _software(result) is None or (folder := result.implementation) is None:
        return
    image = (_about(result) or {}).get("image")
    for run in result.runs:
        path = folder / f"job_{run.log.stem.removeprefix('result_')}.yaml"
        try:
            found = list(_job_faults(run, path, image))
        except FluxtrainError as error:
            found = [str(error)]
        if found:
            yield f"{path.name}: {first_of(found, _MAX_SHOWN)}"


@rule("9.1", _AGAIN)
def scripts_are_those_that_ran(result: Result) -> Iterator[str]:
    """The scripts and the Dockerfile are those that the enclosed sources write for these runs."""
    if (software := _software(result)) is None or (folder := result.implementation) is None:
        return
    scripts = sorted((folder / _TEMPLATES).glob("*.sh"))
    expected = {path.name: path.read_text(encoding="utf-8") for path in scripts}
    if _is_ours(software) and (config := _config(result.runs[0])) is not None:
        image = (_about(result) or {}).get("image")
        expected["Dockerfile"] = dockerfile(software, image)
        expected["init_datasets.sh"] = init_datasets(result.runs[0], config)
    for name, text in expected.items():
        if _text(result, name) != text:
            yield f"{name} is not the one that fluxtrain writes for these runs"


@rule(_SUBMISSION_RULES, _AGAIN)
def implementation_is_as_described(result: Result) -> Iterator[str]:
    """`SYSTEM_fluxtrain.json` has the values of the logs and of the configuration."""
    if (software := _software(result)) is None or (folder := result.implementation) is None:
        return
    told, config = _about(result), _config(result.runs[0])
    if told is None:
        yield f"{folder.name} has no {folder.name}.json"
    elif _is_ours(software) and config is not None:
        about = (software, told.get("image"), folder.name)
        expected = implementation_json(result.runs[0], config, *about)
        if differ := _different(told, expected):
            yield f"{folder.name}.json differs from the runs in {first_of(differ, _MAX_SHOWN)}"


@rule(_SUBMISSION_RULES, _AGAIN)
def deviations_are_stated(result: Result) -> Iterator[str]:
    """`deviations.md` has each difference of the configuration from the reference."""
    if (software := _software(result)) is None or _config(result.runs[0]) is None:
        return
    text = _text(result, DEVIATIONS_FILE)
    if text is None:
        yield f"the package has no {DEVIATIONS_FILE}"
    elif _is_ours(software):
        found = run_deviations(result.runs[0], {})
        if missing := [each.topic for each in found if row_of(each, "") not in text]:
            yield f"{DEVIATIONS_FILE} does not state {first_of(missing, _MAX_SHOWN)}"


@rule("13", "Let MLCommons' package checker write it, from the logs.")
def scaling_is_of_the_logs(result: Result) -> Iterator[str]:
    """`scaling.json` has the factor that follows from the logs; without the file it is 1."""
    if result.folder is None:
        return
    path = result.folder / SCALING_FILE
    told = read_object(path)
    expected = _scaling(result)
    factor = 1.0 if told is None else told.get(_FACTOR)
    if not isinstance(factor, int | float) or not math.isclose(
        factor, expected, rel_tol=_TOLERANCE
    ):
        given = "is missing" if told is None else f"has the factor {factor!r}"
        yield (
            f"{SCALING_FILE} {given}; by the logs and ruleset {result.ruleset} it is {expected:.6f}"
        )


RULES: tuple[Rule[Result], ...] = rules_in(globals())


def _software(result: Result) -> Software | None:
    """Return what the nodes ran; None outside of packages, without reports, and if they differ."""
    if result.folder is None or result.implementation is None or not any(map(records, result.runs)):
        return None
    try:
        return ran_software(result.runs)
    except FluxtrainError:  # same-software finds it
        return None


def _config(run: Run) -> RunConfig | None:
    """Return the configuration of ``run``, None if there is none, or it is no configuration."""
    try:
        return None if run.config is None else run.resolved
    except FluxtrainError:  # configuration-is-valid finds it
        return None


def _is_ours(software: Software) -> bool:
    """Return whether the runs were of the sources of this program, which can write their files again."""
    return source_digest(SOURCE) == software.source_sha256


def _job_faults(run: Run, path: Path, image: object) -> Iterator[str]:
    if (config := _config(run)) is None:
        return
    spec = load_job(path).spec
    seed = run.number("seed")
    expected = config if seed is None else config.model_copy(update={"seed": seed})
    run_of_job, of_run = resolve(spec.run).model_dump(), expected.model_dump()
    yield from (f"run.{name} differs" for name in _different(run_of_job, of_run))
    nodes = count_of(run.system, "number_of_nodes")
    if nodes is not None and (spec.nodes.min, spec.nodes.max) != (nodes, nodes):
        yield f"nodes are {spec.nodes.min} to {spec.nodes.max}, the run had {nodes}"
    gpus = count_of(run.system, "accelerators_per_node")
    if gpus and spec.gpus_per_node != gpus:
        yield f"GPUs of a node are {spec.gpus_per_node}, the run had {gpus}"
    if image is not None and spec.image != image:
        yield f"the image is {spec.image}, not {image}"


def _about(result: Result) -> Mapping[str, Any] | None:
    folder = result.implementation
    return None if folder is None else read_object(folder / f"{folder.name}.json")


def _text(result: Result, name: str) -> str | None:
    try:
        folder = result.implementation
        return None if folder is None else (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _scaling(result: Result) -> float:
    """Return the factor of the score that MLCommons' comparison with the reference gives."""
    size = result.runs[0].number("global_batch_size") if result.runs else None
    if not result.closed or size is None or len(result.runs) < 3:
        return 1.0
    samples = [run.samples for run in result.runs]
    compared = compare_with_reference(samples, size, result.ruleset)
    return compared.scaling_factor if compared.accepted else 1.0


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose values differ, as JSON has them."""
    names = sorted({*one, *other})
    return [name for name in names if _json(one.get(name)) != _json(other.get(name))]


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
