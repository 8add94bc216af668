"""`kubectl apply -k manifests/` creates the same objects as the chart."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.chart.objects import Manifest, Program, Template, one
from tests.paths import ROOT

HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")
HELM_ANNOTATIONS = ("helm.sh/resource-policy",)


def comparable(manifest: Manifest) -> Manifest:
    """Return ``manifest`` without Helm's labels and annotations."""
    metadata = dict(manifest["metadata"])
    for part, helm in (("labels", HELM_LABELS), ("annotations", HELM_ANNOTATIONS)):
        others = {k: v for k, v in (metadata.pop(part, None) or {}).items() if k not in helm}
        if others:
            metadata[part] = others
    if manifest["kind"] == "CustomResourceDefinition":
        metadata.pop("labels", None)  # only kustomize labels it
    if manifest["kind"].startswith("ValidatingAdmissionPolicy"):
        metadata.pop("namespace", None)  # set by kustomize, dropped by the API server: it has none
    return {**manifest, "metadata": metadata}


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    result = {(m["kind"], m["metadata"]["name"]): comparable(m) for m in manifests}
    assert len(result) == len(manifests)
    return result


@pytest.mark.slow
def test_kustomize_renders_the_same_objects_as_the_chart(
    kubectl: Program, template: Template
) -> None:
    plain = by_name(list(yaml.safe_load_all(kubectl("kustomize", ROOT / "manifests").stdout)))
    chart = by_name([m for m in template() if "helm.sh/hook" not in str(m["metadata"])])
    namespace = plain.pop(("Namespace", "fluxtrain-system"))
    assert plain.keys() == chart.keys()
    for name, manifest in chart.items():
        assert plain[name] == manifest, name
    enforced = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "restricted"


def test_the_kustomization_lists_every_manifest() -> None:
    folder = ROOT / "manifests"
    resources = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert {*resources, "prometheus.yaml"} == files


def relabelings(rules: list[Manifest]) -> set[tuple[str, str]]:
    """Return source and target labels of the relabeling rules of Prometheus or its operator."""
    result: set[tuple[str, str]] = set()
    for rule in rules:
        target = rule.get("target_label") or rule.get("targetLabel")
        sources = rule.get("source_labels") or rule.get("sourceLabels") or []
        if target:
            result.add((",".join(sources), target))
    return result


@pytest.fixture(scope="module")
def scrape() -> dict[str, Manifest]:
    config = yaml.safe_load((ROOT / "manifests" / "prometheus.yaml").read_text())
    return {job["job_name"]: job for job in config["scrape_configs"]}


def test_a_prometheus_without_its_operator_sets_the_same_labels(
    scrape: dict[str, Manifest], template: Template
) -> None:
    monitor = one(template("podMonitor.enabled=true"), "PodMonitor")
    expected = relabelings(monitor["spec"]["podMetricsEndpoints"][0]["relabelings"])
    assert expected
    assert expected <= relabelings(scrape["fluxtrain-trainers"]["relabel_configs"])


def test_the_prometheus_configuration_is_valid(
    scrape: dict[str, Manifest], promtool: Program, tmp_path: Path
) -> None:
    """Debian's Prometheus has no service discovery for Kubernetes, so that part is left out."""
    jobs = [
        {k: v for k, v in job.items() if k != "kubernetes_sd_configs"} for job in scrape.values()
    ]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump({"scrape_configs": jobs}))
    promtool("check", "config", file)
