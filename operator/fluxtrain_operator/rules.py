"""The CEL rules of the resource: what must fit together, and what may not change while a job lives.

They follow from the models: ``rules`` of a section and its ``FIXED`` fields, so that ``fluxtrain run``
and the API server refuse the same things in the same words.
"""

from __future__ import annotations

from collections.abc import Iterator

from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.describe import leaf_type, section_of, walk
from fluxtrain.contract.resource import FluxTraining, Spec
from fluxtrain.contract.section import Rule, Section

Validation = dict[str, str]
"""One entry of ``x-kubernetes-validations``."""


def rules() -> dict[str, list[Validation]]:
    """Return the rules by the path, below the resource, of the schema that carries them."""
    found = {
        path: [_validation(rule) for rule in section.rules]
        for path, section in (*_sections(FluxTraining), *_sections(RunConfig, "spec.run"))
        if section.rules
    }
    for path, model in (("spec", Spec), ("spec.run", RunConfig)):
        found.setdefault(path, []).extend(_transitions(model))
    return found


def _sections(model: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield ``model`` and every section below it with the path of its schema."""
    yield path, model
    for name, field in model.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            listed = ".items" if leaf_type(field) == "array" else ""
            yield from _sections(below, f"{path}.{field.alias or name}{listed}".strip("."))


def _validation(rule: Rule) -> Validation:
    guards = [_given(path) for path in (rule.field, *rule.others) if path]
    checked = f"!({' && '.join(guards)}) || {rule.cel}" if guards else rule.cel
    message = f"{rule.field} {rule.sentence}".strip()
    place = {"fieldPath": f".{rule.field}"} if rule.field else {}
    return {"rule": checked, "message": message, **place}


def _given(path: str, root: str = "self") -> str:
    """Return the CEL that says whether every part of ``path`` is there."""
    parts = path.split(".")
    return " && ".join(f"has({root}.{'.'.join(parts[: n + 1])})" for n in range(len(parts)))


def _transitions(model: type[Section]) -> Iterator[Validation]:
    """Yield a rule per fixed field.

    Whole sections, and optionals of text, have no size that the server could bound the cost by.
    """
    for facts in walk(model):
        if facts.fixed:
            now, before = _given(facts.path), _given(facts.path, "oldSelf")
            equal = f"self.{facts.path} == oldSelf.{facts.path}"
            yield {
                "rule": f"({now} && {before}) ? {equal} : ({now}) == ({before})",
                "message": f"{facts.path} stays as it was created; another value is another job",
            }
