"""The CustomResourceDefinition, generated from the models of the contract."""

from __future__ import annotations

from typing import Any

from fluxtrain.contract.resource.api_model import GROUP
from fluxtrain.contract.resource.fluxtraining import (
    KIND,
    PLURAL,
    SHORT_NAME,
    SINGULAR,
    VERSION,
    FluxTraining,
)
from fluxtrain.contract.run.config import RunConfig
from fluxtrain_operator.generate.cel import rules
from fluxtrain_operator.generate.schema import Schema, structural

Manifest = dict[str, Any]

_COLUMNS = (
    ("Phase", "string", ".status.phase", "One word for where the job is."),
    ("Nodes", "integer", ".status.nodes.ready", "Nodes that train."),
    ("Step", "integer", ".status.progress.step", "Optimizer steps done."),
    ("Loss", "number", ".status.progress.trainLoss", "Training loss."),
    ("Eval", "number", ".status.progress.evalLoss", "Evaluation loss."),
    ("Samples/s", "number", ".status.progress.samplesPerSecond", "Throughput."),
    ("ETA", "string", ".status.eta", "Estimated time to the last step."),
    ("Restarts", "integer", ".status.restarts.charged", "Restarts after errors of the program."),
    ("Faults", "integer", ".status.restarts.free", "Interruptions by the infrastructure."),
    ("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
)


def custom_resource_definition() -> Manifest:
    """Return the CRD as the object that ``kubectl apply`` takes."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["fluxtrain"],
            },
            "versions": [_version()],
        },
    }


def _version() -> Manifest:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": resource_schema()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.nodes.max",
                "statusReplicasPath": ".status.nodes.ready",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text}
            for name, kind, path, text in _COLUMNS
        ],
    }


def resource_schema() -> Schema:
    """Return the schema of the whole resource, with its validation rules.

    Fields of ``spec.run`` have no defaults: those of the API server would override the preset's values.
    """
    schema = structural(FluxTraining, defaults=True)
    properties = schema["properties"]
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string"}
    name = properties["metadata"]["properties"]["name"]
    properties["metadata"] = {"type": "object", "properties": {"name": name}}
    schema["required"] = ["spec"]
    spec = properties["spec"]
    text = spec["properties"]["run"].get("description", "")
    run = {**structural(RunConfig, defaults=False), "required": ["preset"], "description": text}
    spec["properties"]["run"] = run
    for path, validations in rules().items():
        _at(schema, path).setdefault("x-kubernetes-validations", []).extend(validations)
    conditions = properties["status"]["properties"]["conditions"]
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return schema


def _at(schema: Schema, path: str) -> Schema:
    for part in path.split(".") if path else ():
        schema = schema["items"] if part == "items" else schema["properties"][part]
    return schema
