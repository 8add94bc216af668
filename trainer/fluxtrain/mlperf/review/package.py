"""Rules on a package: its system description and its files against the logs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from fluxtrain.contract.launch import CONFIG_FILE
from fluxtrain.mlperf.evidence import Result, count_of
from fluxtrain.mlperf.implementation.software import records
from fluxtrain.mlperf.node_records import num_nodes
from fluxtrain.mlperf.review.rule import Rule, rule
from fluxtrain.mlperf.review.settings import batch_faults
from fluxtrain.mlperf.system import STATUSES

_DESCRIPTION = "Correct the system description (--system) and package again."
_SUBMISSION_RULES = ""
_OF_NODES = (
    *("number_of_nodes", "accelerators_per_node", "accelerator_model_name"),
    *("host_processors_per_node", "framework", "operating_system"),
)
"""Fields that the nodes report in the words in which they are described."""


@rule(
    "description-is-enclosed",
    _SUBMISSION_RULES,
    "Describe the system in systems/SYSTEM.json; fluxtrain mlperf package writes it.",
)
def description_is_enclosed(result: Result) -> Iterator[str]:
    """A package has a description of its system."""
    if result.folder is not None and result.description is None:
        system = result.folder.resolve().parent.name
        yield f"the package has no systems/{system}.json"


@rule("description-is-of-the-logs", _SUBMISSION_RULES, _DESCRIPTION)
def description_is_of_the_logs(result: Result) -> Iterator[str]:
    """Submitter, division and status are those of the logs."""
    description = result.description
    if description is None or not result.runs:
        return
    run = result.runs[0]
    status = run.value("submission_status")
    logged = {
        "submitter": run.value("submission_org"),
        "division": run.value("submission_division"),
        "status": STATUSES.get(str(status), status),
    }
    for field, value in logged.items():
        if value is not None and description.get(field) != value:
            yield f"{field} is {description.get(field)!r} in the description, {value!r} in the logs"


@rule("description-is-of-the-nodes", "2.2", _DESCRIPTION)
def description_is_of_the_nodes(result: Result) -> Iterator[str]:
    """Number and kind of nodes, accelerators and software are what the nodes reported."""
    description = result.description
    if description is None or not result.runs:
        return
    for field in _OF_NODES:
        value = result.runs[0].system.get(field)
        if value is not None and description.get(field) != str(value):
            yield f"{field} is {description.get(field)!r} in the description, the nodes reported {value!r}"


@rule("description-is-of-each-node", "2.2", _DESCRIPTION)
def description_is_of_each_node(result: Result) -> Iterator[str]:
    """Every node of every run reported what the description says of a node, and all of them did."""
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


@rule("accelerators-make-the-batch", "9.1", _DESCRIPTION)
def accelerators_make_the_batch(result: Result) -> Iterator[str]:
    """The accelerators of the description can hold the logged micro batches."""
    if result.description is None or not result.runs or result.runs[0].system:
        return
    yield from batch_faults(result.runs[0], result.description, " of the description")


@rule(
    "configuration-is-enclosed",
    _SUBMISSION_RULES,
    "Package the runs with fluxtrain mlperf package.",
)
def configuration_is_enclosed(result: Result) -> Iterator[str]:
    """The file that ``config_filename`` names is with the code."""
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


@rule("code-is-enclosed", _SUBMISSION_RULES, "Package the runs with fluxtrain mlperf package.")
def code_is_enclosed(result: Result) -> Iterator[str]:
    """The package has a README beside the code."""
    if result.description is None and result.folder is None:
        return
    if result.implementation is None:
        yield "the package has no code for this system below benchmarks/flux1/implementations"
    elif not (result.implementation / "README.md").is_file():
        yield f"{result.implementation.name} has no README.md"


RULES: tuple[Rule[Result], ...] = (
    description_is_enclosed,
    description_is_of_the_logs,
    description_is_of_the_nodes,
    description_is_of_each_node,
    accelerators_make_the_batch,
    configuration_is_enclosed,
    code_is_enclosed,
)
