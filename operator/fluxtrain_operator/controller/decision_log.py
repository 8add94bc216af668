"""The log of decisions: one record for each plan that changes more than progress, with its reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fluxtrain.contract.resource.fluxtraining import KIND
from fluxtrain.contract.resource.status import Condition, Status
from fluxtrain_operator.planner.plan import Plan

LOG = logging.getLogger(__name__)
_MAX_NAMES = 16
"""Names of objects in one record; more are counted."""


def log_decision(manifest: Mapping[str, Any], before: Status, plan: Plan) -> None:
    """Log the decision of ``plan`` for the job in ``manifest``, unless it changes progress only."""
    fields = decision_fields(manifest, before, plan)
    if fields is not None:
        text = "%(namespace)s/%(job)s: %(action)s, %(reason)s: %(detail)s"
        LOG.info(text % fields, extra={"fields": fields})


def decision_fields(
    manifest: Mapping[str, Any], before: Status, plan: Plan
) -> dict[str, Any] | None:
    """Return the keys of the record; None if ``plan`` changes progress only."""
    changed = _changed_conditions(before, plan.status)
    acts = bool(plan.delete or plan.create or plan.events)
    if not (acts or changed or plan.status.phase != before.phase):
        return None
    reason, message = _reason(plan, changed)
    deleted = [f"{deletion.kind}/{deletion.name}" for deletion in plan.delete]
    created = [f"{desired['kind']}/{desired['metadata']['name']}" for desired in plan.create]
    metadata = manifest["metadata"]
    return {
        "namespace": metadata.get("namespace", ""),
        "job": metadata["name"],
        "uid": metadata.get("uid", ""),
        "attempt": plan.status.attempt,
        "phase": plan.status.phase,
        "action": _action(plan),
        "reason": reason,
        "detail": message,
        **({"delete": _bounded(deleted)} if deleted else {}),
        **({"create": _bounded(created)} if created else {}),
        **({"conditions": [_condition(c) for c in changed]} if changed else {}),
    }


def _action(plan: Plan) -> str:
    if plan.decision is not None and plan.decision.in_place_restart is not None:
        return "restart in place"
    if plan.decision is not None and plan.decision.pod_replacement is not None:
        return "replace"
    if plan.decision is not None:
        return plan.decision.action
    return "clean up" if plan.delete else "report"


def _reason(plan: Plan, changed: list[Condition]) -> tuple[str, str]:
    """Return reason and message: the decision's, or an event's, or a condition's."""
    if plan.decision is not None and plan.decision.reason:
        return plan.decision.reason, plan.decision.message
    if plan.events:
        return plan.events[0].reason, plan.events[0].message
    if any(deletion.kind == KIND for deletion in plan.delete):
        return "Expired", "spec.lifecycle.ttlSecondsAfterFinished is over"
    if plan.decision is None and plan.delete:
        return "CleanPods", "spec.lifecycle.cleanPods of a finished job"
    if changed:
        return changed[0].reason, changed[0].message
    return "Desired", "objects differ from what the spec asks for"


def _changed_conditions(before: Status, after: Status) -> list[Condition]:
    known = {(c.type, c.status, c.reason) for c in before.conditions}
    return [c for c in after.conditions if (c.type, c.status, c.reason) not in known]


def _condition(condition: Condition) -> str:
    return f"{condition.type}={condition.status} {condition.reason}"


def _bounded(names: Iterable[str]) -> list[str]:
    """Return the first ``names``, and how many more there are."""
    listed = list(names)
    rest = len(listed) - _MAX_NAMES
    return listed if rest <= 0 else [*listed[:_MAX_NAMES], f"and {rest} more"]
