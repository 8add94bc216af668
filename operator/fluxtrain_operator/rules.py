"""The CEL rules of the resource: what must fit together, and what may not change while a job lives.

A rule's path says where it stands; ``self`` is the value there. The same facts are in the pydantic
models, so that ``fluxtrain run`` refuses what the API server refuses.
"""

from __future__ import annotations

from typing import Any

from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.trajectory import FIXED, MAY_CHANGE

Rule = dict[str, str]


def rules() -> dict[str, list[Rule]]:
    """Return the rules by the path, below the resource, of the schema that carries them."""
    found: dict[str, list[Rule]] = {
        "spec.nodes": [_rule("self.min <= self.max", "min must not exceed max", "min")],
        "spec.run.model": _model_rules(),
        "spec.run.data": [
            _rule(
                "!has(self.latent_size) || self.latent_size % 2 == 0",
                "latent_size must be even (2 x 2 patches)",
                "latent_size",
            )
        ],
        "spec.run": [*_fixed_rules(), *_trajectory_rules()],
        "spec": [
            _unchanged("gpusPerNode"),
            _unchanged("gpuResource"),
            _unchanged("storage"),
            _unchanged("managedBy"),
        ],
        "spec.network.env.items": [
            _rule(
                "!self.name.startsWith('PET_') && !self.name.startsWith('FLUXTRAIN_')",
                "PET_* and FLUXTRAIN_* are set by the operator",
                "name",
            )
        ],
    }
    for volume in ("data", "models", "output"):
        found[f"spec.storage.{volume}"] = [_one_volume()]
    return found


def _rule(rule: str, message: str, field: str | None = None) -> Rule:
    where = {"fieldPath": f".{field}"} if field else {}
    return {"rule": rule, "message": message, **where}


def _model_rules() -> list[Rule]:
    head = "has(self.hidden_size) && has(self.num_heads)"
    return [
        _rule(
            f"!({head}) || self.hidden_size % self.num_heads == 0",
            "hidden_size must be a multiple of num_heads",
            "hidden_size",
        ),
        _rule(
            f"!({head} && has(self.axes_dim)) || "
            "self.axes_dim[0] + self.axes_dim[1] + self.axes_dim[2] == self.hidden_size / self.num_heads",
            "axes_dim must add up to hidden_size / num_heads",
            "axes_dim",
        ),
        _rule(
            "!has(self.axes_dim) || self.axes_dim.all(d, d > 0 && d % 2 == 0)",
            "axes_dim must be positive and even",
            "axes_dim",
        ),
        _rule(
            "!has(self.in_channels) || self.in_channels % 4 == 0",
            "in_channels must be a multiple of 4 (2 x 2 patches)",
            "in_channels",
        ),
    ]


def _one_volume() -> Rule:
    kinds = ("persistentVolumeClaim", "hostPath", "emptyDir")
    count = " + ".join(f"(has(self.{kind}) ? 1 : 0)" for kind in kinds)
    return _rule(f"{count} == 1", f"exactly one of {', '.join(kinds)} must be set")


def _unchanged(field: str) -> Rule:
    return _rule(
        f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"{field} cannot change while the job lives",
        field,
    )


def _fixed_rules() -> list[Rule]:
    return [_unchanged(field) for field in FIXED]


def _trajectory_rules() -> list[Rule]:
    found = []
    for section, may_change in MAY_CHANGE.items():
        if not may_change:
            found.append(_unchanged(section))
            continue
        annotation: Any = RunConfig.model_fields[section].annotation
        found += [
            _same(section, name) for name in annotation.model_fields if name not in may_change
        ]
    return found


def _same(section: str, field: str) -> Rule:
    now, before = f"self.?{section}.?{field}", f"oldSelf.?{section}.?{field}"
    return _rule(
        f"{now} == {before}",
        f"{section}.{field} decides the trajectory and cannot change while the job lives",
    )
