"""Values that are missing or null, files that are missing, and the profiles of distributions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.objects import (
    CHART,
    EARLIER,
    MONITORING,
    Manifest,
    Program,
    Template,
    by_kind,
    one,
)

from fluxtrain_operator.options import parse

pytestmark = pytest.mark.slow

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
PEOPLES = ("annotations", "labels", "resources")
"""Mappings whose keys people choose: what is missing in one is meant."""


def paths(values: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key whose default comes back if it is missing."""
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict) and name not in PEOPLES:
            yield from paths(value, *above, name)


def changed(path: tuple[str, ...], *, is_null: bool) -> dict[str, Any]:
    """Return the chart's values without that at ``path``, or with null there."""
    values = deepcopy(VALUES)
    owner = values
    for name in path[:-1]:
        owner = owner[name]
    if is_null:
        owner[path[-1]] = None
    else:
        del owner[path[-1]]
    return values


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHART, tmp_path / "chart"))


def rendered(helm: Program, chart: Path, *options: str) -> list[Manifest]:
    """Return the objects; the chart may be another than at the last call."""
    name, namespace = "fluxtrain-operator", "--namespace=fluxtrain-system"
    apis = f"--api-versions={MONITORING[0]}"
    text = helm("template", name, chart, namespace, apis, *options).stdout
    return [manifest for manifest in yaml.load_all(text, yaml.CSafeLoader) if manifest]


@pytest.mark.parametrize("path", [*paths(VALUES)], ids=".".join)
@pytest.mark.parametrize(
    "is_null", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["missing", "null"]
)
def test_a_value_that_is_missing_or_null_has_its_default(
    path: tuple[str, ...], is_null: bool, helm: Program, template: Template, chart: Path
) -> None:
    """``--reuse-values`` replaces the chart's values.yaml by that of the installed chart."""
    (chart / "values.yaml").write_text(yaml.safe_dump(changed(path, is_null=is_null)))
    assert rendered(helm, chart) == template(apis=MONITORING)


@pytest.mark.parametrize("values", ["{}", EARLIER], ids=["none", "earlier"])
def test_the_values_of_an_earlier_chart_render(
    values: str, helm: Program, template: Template, chart: Path
) -> None:
    (chart / "values.yaml").write_text(values)
    assert rendered(helm, chart) == template(apis=MONITORING)


def test_values_that_are_false_or_empty_are_no_missing_ones(template: Template) -> None:
    deployment = one(template("nodes.watch=false", "jobs.images=[]"), "Deployment")
    env = {v["name"]: v.get("value") for v in container_of(deployment)["env"]}
    assert env["FLUXTRAIN_WATCH_NODES"] == "false"
    assert json.loads(env["FLUXTRAIN_JOB_POLICY"])["images"] == []
    assert not by_kind(template("crds.install=false"), "CustomResourceDefinition")


def test_a_chart_that_depends_on_this_one_can_switch_it_off(helm: Program, tmp_path: Path) -> None:
    """Helm hands the value that a dependency's condition names on to the dependency."""
    name = CHART.name
    shutil.copytree(CHART, tmp_path / "charts" / name)
    dependency = {"name": name, "version": "*", "condition": f"{name}.enabled"}
    chart = {
        "apiVersion": "v2",
        "name": "platform",
        "version": "1.0.0",
        "dependencies": [dependency],
    }
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    for enabled in (True, False):
        (tmp_path / "values.yaml").write_text(yaml.safe_dump({name: {"enabled": enabled}}))
        assert bool(by_kind(rendered(helm, tmp_path), "Deployment")) == enabled


def test_keys_that_people_choose_can_be_removed(template: Template) -> None:
    deployment = one(template("resources.limits=null"), "Deployment")
    assert container_of(deployment)["resources"].keys() == {"requests"}
    value = "dashboards.labels.grafana_dashboard=null"
    for manifest in by_kind(template(value, apis=MONITORING), "ConfigMap"):
        assert "grafana_dashboard" not in manifest["metadata"]["labels"]


@pytest.mark.parametrize("name", ["crd", "defaults", "job-limits", "alerts"])
@pytest.mark.parametrize("empty", [False, True], ids=["missing", "empty"])
def test_a_chart_without_one_of_its_files_is_refused(
    name: str, empty: bool, helm: Program, chart: Path
) -> None:
    file = chart / "files" / f"{name}.yaml"
    if empty:
        file.write_text("")
    else:
        file.unlink()
    done = helm("template", "x", chart, f"--api-versions={MONITORING[0]}", check=False)
    assert done.returncode != 0
    assert f"files/{name}.yaml of the chart is missing or empty" in done.stderr


def test_no_file_of_the_chart_is_a_link() -> None:
    """Flux leaves links out of what it takes from Git."""
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]


def container_of(deployment: Manifest) -> Manifest:
    container: Manifest = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def pods(manifests: list[Manifest]) -> list[Manifest]:
    """Return the specs of the operator's pod and of that of ``helm test``."""
    deployment = one(manifests, "Deployment")
    return [deployment["spec"]["template"]["spec"], one(manifests, "Pod")["spec"]]


def test_security_contexts_can_be_none(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = template(
        *("podSecurityContext=null", "securityContext=null", "podDefaults.securityContext=null")
    )
    for spec in pods(manifests):
        assert "securityContext" not in spec
        assert "securityContext" not in spec["containers"][0]
    defaults = pod_defaults(manifests, monkeypatch)
    assert defaults.security_context is None


def test_a_security_context_replaces_the_default_as_a_whole(template: Template) -> None:
    given = {"runAsNonRoot": True}
    for spec in pods(template(f"podSecurityContext={json.dumps(given)}")):
        assert spec["securityContext"] == given


def pod_defaults(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the defaults of the pods of jobs, as the operator reads them."""
    for variable in container_of(one(manifests, "Deployment"))["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", ""))
    return parse([]).pod_defaults


def test_the_operators_pod_gets_what_the_cluster_adds(template: Template) -> None:
    manifests = template(
        'podLabels={"team":"ml"}',
        'podAnnotations={"example.com/scrape":"true"}',
        'serviceAccount.annotations={"eks.amazonaws.com/role-arn":"arn:aws:iam::1:role/a"}',
        'extraEnv=[{"name":"HTTPS_PROXY","value":"http://proxy:3128"}]',
        'extraVolumes=[{"name":"ca","configMap":{"name":"ca"}}]',
        'extraVolumeMounts=[{"name":"ca","mountPath":"/ca"}]',
        'topologySpreadConstraints=[{"maxSkew":2,"topologyKey":"zone",'
        '"whenUnsatisfiable":"DoNotSchedule"}]',
    )
    template_ = one(manifests, "Deployment")["spec"]["template"]
    spec = template_["spec"]
    (container,) = spec["containers"]
    assert template_["metadata"]["labels"]["team"] == "ml"
    assert template_["metadata"]["annotations"]["example.com/scrape"] == "true"
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert container["volumeMounts"] == [{"name": "ca", "mountPath": "/ca"}]
    assert spec["volumes"] == [{"name": "ca", "configMap": {"name": "ca"}}]
    assert [c["topologyKey"] for c in spec["topologySpreadConstraints"]] == ["zone"]
    account = one(manifests, "ServiceAccount")["metadata"]["annotations"]
    assert account == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}


@pytest.mark.parametrize(
    "value",
    [
        'podLabels={"app.kubernetes.io/name":"a"}',
        'podLabels={"fluxtrain.dev/job":"a"}',
        'podAnnotations={"kubectl.kubernetes.io/default-container":"a"}',
        'extraEnv=[{"name":"FLUXTRAIN_IMAGE","value":"a"}]',
        'extraEnv=[{"name":"POD_NAME","value":"a"}]',
        'podSecurityContext={"runAsUsr":1}',
        'podDefaults.securityContext={"capabilities":{}}',
        'securityContext={"fsGroup":1}',
        'serviceAccount={"create":false}',
    ],
)
def test_what_belongs_to_the_operator_cannot_be_replaced(value: str, template: Template) -> None:
    with pytest.raises(AssertionError, match=value.split("=")[0].split(".")[0]):
        template(value)


def test_no_pod_names_a_user_on_openshift(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """restricted-v2 takes users and groups from the namespace's range, and refuses others."""
    manifests = template(profile="openshift")
    contexts = [pod_defaults(manifests, monkeypatch).security_context]
    for spec in pods(manifests):
        contexts += [spec["securityContext"], *(c["securityContext"] for c in spec["containers"])]
    for context in contexts:
        assert {"runAsUser", "runAsGroup", "fsGroup", "seLinuxOptions"}.isdisjoint(context)
    for spec in pods(manifests):
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_every_pod_states_its_requests_and_nothing_of_the_node_on_autopilot(
    template: Template,
) -> None:
    for spec in pods(template(profile="gke-autopilot")):
        assert {"hostNetwork", "hostPID", "hostIPC", "hostPath"}.isdisjoint(spec)
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "privileged" not in container["securityContext"]


def test_the_operators_pods_spread_over_zones_on_eks(template: Template) -> None:
    deployment = one(template(profile="eks"), "Deployment")["spec"]
    constraints = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert [c["labelSelector"] for c in constraints] == [deployment["selector"]] * 2
    keys = [c["topologyKey"] for c in constraints]
    assert keys == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]


def test_a_spread_counts_the_releases_pods_unless_it_selects_others(template: Template) -> None:
    spread = '{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"%s}'
    other = spread % ',"labelSelector":{"matchLabels":{"app":"other"}}'
    for value in ("[]", f"[{spread % ''}]", f"[{other},{spread % ''}]"):
        rendered = one(template(f"topologySpreadConstraints={value}"), "Deployment")["spec"]
        constraints = rendered["template"]["spec"]["topologySpreadConstraints"]
        assert constraints[-1]["labelSelector"] == rendered["selector"]
        assert [c["labelSelector"] for c in constraints[:-1]] in (
            [],
            [{"matchLabels": {"app": "other"}}],
        )
