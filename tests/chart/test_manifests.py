"""`kubectl apply -k manifests/` brings what the chart brings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.paths import ROOT

Manifest = dict[str, Any]
Template = Callable[..., list[Manifest]]

HELMS_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")
HELMS_ANNOTATIONS = ("helm.sh/resource-policy",)


def comparable(manifest: Manifest) -> Manifest:
    """Return ``manifest`` without what only Helm reads or writes."""
    metadata = dict(manifest["metadata"])
    for part, theirs in (("labels", HELMS_LABELS), ("annotations", HELMS_ANNOTATIONS)):
        kept = {k: v for k, v in (metadata.pop(part, None) or {}).items() if k not in theirs}
        if kept:
            metadata[part] = kept
    if manifest["kind"] == "CustomResourceDefinition":
        metadata.pop("labels", None)  # kustomize labels it, the chart leaves it as generated
    return {**manifest, "metadata": metadata}


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    found = {(m["kind"], m["metadata"]["name"]): comparable(m) for m in manifests}
    assert len(found) == len(manifests)
    return found


def test_kustomize_brings_the_same_objects_as_the_chart(
    kubectl: Callable[..., Any], template: Template
) -> None:
    plain = by_name(list(yaml.safe_load_all(kubectl("kustomize", ROOT / "manifests").stdout)))
    chart = by_name([m for m in template() if "helm.sh/hook" not in str(m["metadata"])])
    namespace = plain.pop(("Namespace", "fluxtrain-system"))
    assert plain.keys() == chart.keys()
    for name, manifest in chart.items():
        assert plain[name] == manifest, name
    enforced = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "restricted"


def test_the_kustomization_names_every_manifest() -> None:
    folder = ROOT / "manifests"
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert {*named, "prometheus.yaml"} == there


def relabelings(rules: list[Manifest]) -> set[tuple[str, str]]:
    """Return which meta labels become which label, in either spelling of the keys."""
    found: set[tuple[str, str]] = set()
    for rule in rules:
        target = rule.get("target_label") or rule.get("targetLabel")
        sources = rule.get("source_labels") or rule.get("sourceLabels") or []
        if target:
            found.add((",".join(sources), target))
    return found


@pytest.fixture(scope="module")
def scrape() -> dict[str, Manifest]:
    config = yaml.safe_load((ROOT / "manifests" / "prometheus.yaml").read_text())
    return {job["job_name"]: job for job in config["scrape_configs"]}


def test_a_prometheus_without_its_operator_sets_the_same_labels(
    scrape: dict[str, Manifest], template: Template
) -> None:
    rendered = template("podMonitor.enabled=true")
    monitor = next(m for m in rendered if m["kind"] == "PodMonitor")
    theirs = relabelings(monitor["spec"]["podMetricsEndpoints"][0]["relabelings"])
    assert theirs
    assert theirs <= relabelings(scrape["fluxtrain-trainers"]["relabel_configs"])


def test_prometheus_reads_its_configuration(
    scrape: dict[str, Manifest], promtool: Callable[..., Any], tmp_path: Path
) -> None:
    """Debian's Prometheus is built without the discovery of Kubernetes: all but that is checked."""
    jobs = [
        {k: v for k, v in job.items() if k != "kubernetes_sd_configs"} for job in scrape.values()
    ]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump({"scrape_configs": jobs}))
    promtool("check", "config", file)
