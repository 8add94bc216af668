"""The chart's objects: what the tests select from them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from tests.paths import ROOT

CHART = ROOT / "charts" / "fluxtrain-operator"
MONITORING = ("monitoring.coreos.com/v1",)
"""API versions, with which monitoring objects are rendered."""
EARLIER = """
replicas: 2
image: {repository: fluxtrain/operator, tag: "", pullPolicy: IfNotPresent}
trainerImage: {repository: fluxtrain/trainer, tag: ""}
podDefaults: {imagePullSecrets: [], tolerations: [], nodeSelector: {}, env: [], supplementalGroups: []}
logFormat: json
imagePullSecrets: []
watchNamespaces: []
crds: {install: true}
gangs: {coscheduling: true, volcano: true}
rbac: {userRoles: true, aggregate: true}
resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {memory: 1Gi}}
nodeSelector: {}
tolerations: []
affinity: {}
priorityClassName: ""
"""
"""Values of a chart before nodes.watch, jobs, network and nodeHealth."""
Manifest = dict[str, Any]
Template = Callable[..., list[Manifest]]
"""Renders the chart: ``template("replicas=1", apis=(…,))`` returns its objects, which all tests share."""
Program = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs a program with arguments in the repository; fails unless it exits with 0 or ``check`` is false."""


def by_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def one(manifests: list[Manifest], kind: str) -> Manifest:
    """Return the only object of ``kind``."""
    (manifest,) = by_kind(manifests, kind)
    return manifest
