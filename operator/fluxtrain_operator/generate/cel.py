"""The CEL rules of the resource: what must fit together, and what may not change while a job lives.

They follow from the models: ``rules`` of a section and its ``IMMUTABLE`` fields, so that ``fluxtrain run``
and the API server refuse the same things in the same words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from fluxtrain.contract.describe import is_list, iter_fields, model_of
from fluxtrain.contract.resource.fluxtraining import FluxTraining, Spec
from fluxtrain.contract.run import closed_division
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import ANY_VALUE, NOT_IMPLEMENTED
from fluxtrain.contract.strict_model import Rule, StrictModel

Validation = dict[str, str]
"""One entry of ``x-kubernetes-validations``."""
Rules = dict[str, list[Validation]]
"""Validations by the path, below the resource, of the schema that carries them."""


def rules() -> Rules:
    """Return everything that the API server evaluates."""
    found = between_fields()
    for path, listed in of_updates().items():
        found.setdefault(path, []).extend(listed)
    found["spec.run"] += _closed_division()
    return found


def between_fields() -> Rules:
    """Return the rules of one job by itself, MLPerf's aside."""
    found = {
        path: [_validation(rule) for rule in section.rules]
        for path, section in (*_sections(FluxTraining), *_sections(RunConfig, "spec.run"))
        if section.rules
    }
    found["spec.run"] += [*_not_yet(), _ON_A_CLUSTER]
    return found


def of_updates() -> Rules:
    """Return the rules of a job and what it was before."""
    return {"spec": [*_transitions(Spec)], "spec.run": [*_transitions(RunConfig)]}


def _sections(model: type[StrictModel], path: str = "") -> Iterator[tuple[str, type[StrictModel]]]:
    """Yield ``model`` and every section below it with the path of its schema."""
    yield path, model
    for name, field in model.model_fields.items():
        below = model_of(field.annotation)
        if below is not None:
            listed = ".items" if is_list(field) else ""
            yield from _sections(below, f"{path}.{field.alias or name}{listed}".strip("."))


def _validation(rule: Rule) -> Validation:
    guards = [_given(path) for path in (rule.field, *rule.others) if path]
    checked = f"!({' && '.join(guards)}) || {rule.cel}" if guards else rule.cel
    message = f"{rule.field} {rule.message}".strip()
    return _refusal(checked, message, rule.field)


def _refusal(rule: str, message: str, field: str) -> Validation:
    """Return the validation whose message names ``field``; the section itself where that is empty."""
    return {"rule": rule, "message": message, **({"fieldPath": f".{field}"} if field else {})}


def _given(path: str, root: str = "self") -> str:
    """Return the CEL that says whether every part of ``path`` is there."""
    parts = path.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[: n + 1])})" for n in range(len(parts)))


def _transitions(model: type[StrictModel]) -> Iterator[Validation]:
    """Yield a rule per immutable field.

    Whole sections, and optionals of text, have no size that the server could bound the cost by.
    """
    for facts in iter_fields(model):
        if facts.immutable:
            now, before = _given(facts.path), _given(facts.path, "oldSelf")
            equal = f"self.{facts.path} == oldSelf.{facts.path}"
            yield _refusal(
                f"({now} && {before}) ? {equal} : ({now}) == ({before})",
                f"{facts.path} stays as it was created; another value is another job",
                facts.path,
            )


def _closed_division() -> Iterator[Validation]:
    """Yield a rule per field of a run that means to be MLPerf's, as the file writes it."""
    closed = " && ".join(
        (
            f"self.preset.startsWith('{closed_division.PREFIX}')",
            _unless_given("task", "train"),
            _unless_given("logging.mlperf.division", "closed"),
        )
    )
    for path, allowed in closed_division.FIXED_VALUES.items():
        kept = f"!({_given(path)})" + (
            "" if allowed is None else f" || self.{path} == {_cel(allowed)}"
        )
        yield _refusal(
            f"!({closed}) || {kept}", f"{path}: {closed_division.message(allowed)}", path
        )


def _unless_given(path: str, value: str) -> str:
    return f"(!({_given(path)}) || self.{path} == '{value}')"


def _not_yet() -> Iterator[Validation]:
    """Yield a rule per value that the schema knows and this version refuses."""
    for (path, value), feature in NOT_IMPLEMENTED.items():
        anything = value is ANY_VALUE
        others = "false" if anything else f"self.{path} != {_cel(value)}"
        yield _refusal(
            f"!({_given(path)}) || {others}",
            f"{path if anything else f'{path} {value}'}: not yet: {feature} comes in a later version",
            path,
        )


def _cel(value: object) -> str:
    """Return ``value`` as CEL writes it, which is JSON."""
    return json.dumps(value)


_ON_A_CLUSTER = _refusal(
    f"!({_given('logging.metrics_port')}) || self.logging.metrics_port != 0",
    "logging.metrics_port must not be 0 on a cluster: the operator reads the progress there",
    "logging.metrics_port",
)
