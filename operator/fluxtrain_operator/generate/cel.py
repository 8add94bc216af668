"""The CEL validation rules of the resource: rules between fields, and immutable fields.

They are generated from the sections' ``rules`` and ``IMMUTABLE`` fields, so that ``fluxtrain run`` and the
API server reject the same values with the same messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from fluxtrain.contract.describe import is_list, iter_fields, model_of
from fluxtrain.contract.resource.fluxtraining import FluxTraining, Spec
from fluxtrain.contract.run import closed_division, reference_schedule
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.strict_model import Rule, StrictModel

Validation = dict[str, str]
"""One entry of ``x-kubernetes-validations``."""
Rules = dict[str, list[Validation]]
"""Validations by the path of their schema within the resource."""


def rules() -> Rules:
    """Return all rules that the API server evaluates."""
    result = between_fields()
    for path, validations in of_updates().items():
        result.setdefault(path, []).extend(validations)
    result["spec.run"] += _closed_division()
    return result


def between_fields() -> Rules:
    """Return the rules between the fields of a job, without MLPerf's."""
    result = {
        path: [_validation(rule) for rule in section.rules]
        for path, section in (*_sections(FluxTraining), *_sections(RunConfig, "spec.run"))
        if section.rules
    }
    result["spec.run"].append(_METRICS_PORT)
    return result


def of_updates() -> Rules:
    """Return the transition rules, which compare a job with its previous version."""
    return {"spec": [*_transitions(Spec)], "spec.run": [*_transitions(RunConfig)]}


def _sections(model: type[StrictModel], path: str = "") -> Iterator[tuple[str, type[StrictModel]]]:
    """Yield ``model`` and all nested sections with the paths of their schemas."""
    yield path, model
    for name, field in model.model_fields.items():
        below = model_of(field.annotation)
        if below is not None:
            items = ".items" if is_list(field.annotation) else ""
            yield from _sections(below, f"{path}.{field.alias or name}{items}".strip("."))


def _validation(rule: Rule) -> Validation:
    guards = [_has(path) for path in (rule.field, *rule.others) if path]
    checked = f"!({' && '.join(guards)}) || {rule.cel}" if guards else rule.cel
    message = f"{rule.field} {rule.message}".strip()
    return _validation_of(checked, message, rule.field)


def _validation_of(rule: str, message: str, field: str) -> Validation:
    """Return the validation of ``field``; of the whole section if it is empty."""
    return {"rule": rule, "message": message, **({"fieldPath": f".{field}"} if field else {})}


def _has(path: str, root: str = "self") -> str:
    """Return the CEL expression that tests that every part of ``path`` is set."""
    parts = path.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[: n + 1])})" for n in range(len(parts)))


def _transitions(model: type[StrictModel]) -> Iterator[Validation]:
    """Yield a rule per immutable field.

    Rules of whole sections or optional text would exceed the API server's cost limit.
    """
    for facts in iter_fields(model):
        if facts.immutable:
            now, before = _has(facts.path), _has(facts.path, "oldSelf")
            equal = f"self.{facts.path} == oldSelf.{facts.path}"
            yield _validation_of(
                f"({now} && {before}) ? {equal} : ({now}) == ({before})",
                f"{facts.path} stays as it was created; another value is another job",
                facts.path,
            )


def _closed_division() -> Iterator[Validation]:
    """Yield a rule per field that MLPerf's closed division fixes."""
    closed = " && ".join(
        (
            f"self.preset.startsWith('{closed_division.PREFIX}')",
            _is_or_unset("task", "train"),
            _is_or_unset("logging.mlperf.division", "closed"),
        )
    )
    for path, allowed in closed_division.FIXED_VALUES.items():
        equal = "" if allowed is None else f" || self.{path} == {json.dumps(allowed)}"
        message = f"{path}: {closed_division.message(path, allowed)}"
        yield _validation_of(f"!({closed}) || !({_has(path)}){equal}", message, path)
    for path, value in closed_division.FORBIDDEN_VALUES.items():
        message = f"{path}: {closed_division.forbidden_message(path, value)}"
        rule = f"!({closed}) || !({_has(path)}) || self.{path} != {json.dumps(value)}"
        yield _validation_of(rule, message, path)
    given = " && ".join(map(_has, reference_schedule.FIELDS))
    sizes, size = list(reference_schedule.REFERENCE_SCHEDULES), reference_schedule.SIZE
    yield _validation_of(
        f"!({closed}) || !({_has(size)}) || self.{size} in {sizes} || ({given})",
        f"{size}: {reference_schedule.MESSAGE}",
        size,
    )
    division = "logging.mlperf.division"
    yield _validation_of(
        f"!({_has(division)}) || self.{division} != 'closed' || "
        f"self.preset.startsWith('{closed_division.PREFIX}')",
        f"{division}: {closed_division.ONLY_OF_PRESETS}",
        division,
    )


def _is_or_unset(path: str, value: str) -> str:
    return f"(!({_has(path)}) || self.{path} == '{value}')"


_METRICS_PORT = _validation_of(
    f"!({_has('logging.metrics_port')}) || self.logging.metrics_port != 0",
    "logging.metrics_port must not be 0 on a cluster: the operator reads the progress there",
    "logging.metrics_port",
)
