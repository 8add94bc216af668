"""The rendered chart: goldens, validity for Kubernetes, and what must not change with a version."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from tests.chart.objects import CHART, MONITORING, Manifest, Program, Template, by_kind, one
from tests.kubernetes_schemas import require_valid
from tests.paths import ROOT

from fluxtrain.contract.resource.fluxtraining import Toleration
from fluxtrain_operator.base import names
from fluxtrain_operator.base.settings import NO_DEFAULTS, NetworkRules, Peer, PodDefaults
from fluxtrain_operator.options import parse

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden"
NEVER = tuple(
    f"{kind}.enabled=false"
    for kind in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
)

FILES = ("CustomResourceDefinition", "PrometheusRule", "ValidatingAdmissionPolicy")
"""Kinds of the objects that hold a generated or tested file."""
PROFILES = ("openshift", "gke-autopilot", "eks")
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "namespaces": (
        (
            'watchNamespaces=["team-a","true"]',
            "replicas=1",
            'gangs={"volcano":false,"native":false}',
            "rbac.aggregate=false",
        ),
        (),
    ),
    "no-rights-on-the-cluster": (
        (
            'watchNamespaces=["team-a"]',
            *("rbac.userRoles=false", "rbac.aggregate=false", "nodes.watch=false"),
            *("admissionPolicy.enabled=false", "crds.install=false"),
        ),
        (),
    ),
    "everything": (
        (
            'image={"repository":"example.com/operator","tag":"v2","pullPolicy":"Always"}',
            'trainerImage={"repository":"example.com:5000/trainer","tag":"v2"}',
            'imagePullSecrets=["pull"]',
            'podDefaults={"supplementalGroups":[44,109,1000600000],"imagePullSecrets":["pull"],'
            '"nodeSelector":{"pool":"training"},"env":[{"name":"NCCL_IB_GID_INDEX","value":"3"}],'
            '"tolerations":[{"key":"amd.com/gpu","operator":"Exists"}],'
            '"rendezvous":{"resources":{"requests":{"cpu":"100m"},"limits":{"cpu":"1","memory":"1Gi"}}}}',
            "disruptionPercent=25",
            'network={"egress":"restricted","egressTo":[{"ipBlock":{"cidr":"10.20.0.0/16"},"ports":[443]}]}',
            'nodeHealth={"nodes":{"conditions":["KernelReady=False"]},"gpus":{"labels":["gpu.*.bad"]},'
            '"ignored":["FrequentKubeletRestart"]}',
            'nodeSelector={"kubernetes.io/os":"linux"}',
            'tolerations=[{"key":"system","operator":"Exists"}]',
            'podLabels={"team":"ml"}',
            'podAnnotations={"example.com/cost":"ml"}',
            'serviceAccount.annotations={"eks.amazonaws.com/role-arn":"arn:aws:iam::1:role/a"}',
            'extraEnv=[{"name":"HTTPS_PROXY","value":"http://proxy:3128"}]',
            'extraVolumes=[{"name":"ca","configMap":{"name":"ca"}}]',
            'extraVolumeMounts=[{"name":"ca","mountPath":"/ca","readOnly":true}]',
            'podSecurityContext={"runAsNonRoot":true,"seccompProfile":{"type":"RuntimeDefault"}}',
            "securityContext=null",
            "podDefaults.securityContext=null",
            'topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"topology.kubernetes.io/zone",'
            '"whenUnsatisfiable":"ScheduleAnyway"}]',
            'priorityClassName="system-cluster-critical"',
            'podMonitor.labels={"release":"prometheus"}',
            "crds.install=false",
        ),
        MONITORING,
    ),
}


def key(manifest: Manifest) -> tuple[str, str, str]:
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace", ""), metadata["name"]


def is_file(manifest: Manifest) -> bool:
    """Return whether ``manifest`` contains a file of the chart, which has its own tests."""
    dashboard = manifest["metadata"]["name"].startswith("fluxtrain-dashboard-")
    return dashboard or manifest["kind"] in FILES


@pytest.mark.parametrize("variant", [*VARIANTS, *PROFILES])
def test_the_chart_renders_as_its_golden(variant: str, template: Template) -> None:
    values, apis = VARIANTS.get(variant, ((), ()))
    profile = variant if variant in PROFILES else ""
    rendered = [m for m in template(*values, apis=apis, profile=profile) if not is_file(m)]
    if profile:  # a profile changes these alone
        rendered = [m for m in rendered if m["kind"] in ("Deployment", "Pod", "ServiceAccount")]
    text = yaml.safe_dump_all(sorted(rendered, key=key), sort_keys=False, width=110)
    golden = GOLDEN / f"{variant}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text, "run make chart and read the diff"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_is_valid_for_kubernetes(variant: str, template: Template) -> None:
    values, apis = VARIANTS[variant]
    rendered = [m for m in template(*values, apis=apis) if m["apiVersion"] not in MONITORING]
    assert rendered
    for manifest in rendered:
        require_valid(manifest, "1.34")


def test_monitoring_objects_are_rendered_if_the_cluster_serves_them_or_on_request(
    template: Template,
) -> None:
    kinds = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    default, served = template(), template(apis=MONITORING)
    enabled = template("serviceMonitor.enabled=true", "dashboards.enabled=true")
    disabled = template(*NEVER, apis=MONITORING)
    assert not kinds & {m["kind"] for m in default}
    assert not by_kind(default, "ConfigMap")
    assert kinds <= {m["kind"] for m in served}
    assert len(by_kind(served, "ConfigMap")) == 2
    assert kinds & {m["kind"] for m in enabled} == {"ServiceMonitor"}
    assert len(by_kind(enabled, "ConfigMap")) == 2
    assert {key(m) for m in disabled} == {key(m) for m in default}


def test_the_definition_is_the_generated_one_and_is_kept_when_the_release_is_deleted(
    template: Template,
) -> None:
    definition = one(template(), "CustomResourceDefinition")
    generated = yaml.load((ROOT / "manifests" / "crd.yaml").read_text(), yaml.CSafeLoader)
    generated["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    assert definition == generated
    assert not by_kind(template("crds.install=false"), "CustomResourceDefinition")


def test_the_alerts_are_those_that_are_tested(template: Template) -> None:
    rule = one(template(apis=MONITORING), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())


@pytest.mark.parametrize(
    "page", ["https://wiki/x?page=operator", "http://docs.example/operator.md"]
)
def test_alerts_link_to_the_page_that_the_values_name(template: Template, page: str) -> None:
    rule = one(template(f'prometheusRule.runbookUrl="{page}"', apis=MONITORING), "PrometheusRule")
    for alert in (alert for group in rule["spec"]["groups"] for alert in group["rules"]):
        link = f"{page}#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == link


def test_the_dashboards_are_those_that_are_tested(template: Template) -> None:
    for manifest in by_kind(template(apis=MONITORING), "ConfigMap"):
        ((name, text),) = manifest["data"].items()
        file = CHART / "files" / "dashboards" / name.removeprefix("fluxtrain-")
        assert text.strip() == file.read_text().strip()
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"


def newer_chart(folder: Path, *fields: str) -> Path:
    """Return a copy of the chart in which ``fields`` are 9.9.9."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    text = (chart / "Chart.yaml").read_text()
    for field in fields:
        text = text.replace(f"{field}: 0.1.0", f"{field}: 9.9.9")
    (chart / "Chart.yaml").write_text(text)
    return chart


def test_a_new_version_of_the_chart_alone_restarts_no_pod(
    template: Template, tmp_path: Path
) -> None:
    newer = newer_chart(tmp_path, "version", "appVersion")
    pinned = ('image.tag="0.1.0"', 'trainerImage.tag="0.1.0"')
    before = one(template(*pinned), "Deployment")
    after = one(template(*pinned, chart=newer), "Deployment")
    assert before["metadata"]["labels"] != after["metadata"]["labels"]
    assert before["spec"] == after["spec"]


def test_images_may_be_named_by_digest(template: Template) -> None:
    digest = f"sha256:{'0' * 64}"
    rendered = template(f'image.digest="{digest}"', f'trainerImage.digest="{digest}"')
    container = pod_of(rendered)["containers"][0]
    assert container["image"] == f"fluxtrain/operator@{digest}"
    expected = {"name": "FLUXTRAIN_IMAGE", "value": f"fluxtrain/trainer@{digest}"}
    assert expected in container["env"]


def test_a_new_version_has_new_images(template: Template, tmp_path: Path) -> None:
    rendered = template(chart=newer_chart(tmp_path, "appVersion"))
    container = pod_of(rendered)["containers"][0]
    assert container["image"] == "fluxtrain/operator:9.9.9"
    for variable, image in (("IMAGE", "trainer"), ("RENDEZVOUS_IMAGE", "operator")):
        expected = {"name": f"FLUXTRAIN_{variable}", "value": f"fluxtrain/{image}:9.9.9"}
        assert expected in container["env"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operator_reads_the_environment_of_its_container(
    variant: str, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, apis = VARIANTS[variant]
    container = pod_of(template(*values, apis=apis))["containers"][0]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", ""))
    options = parse([])
    assert options.rendezvous_image == container["image"]
    assert (options.pod_defaults == NO_DEFAULTS) == (variant != "everything")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operator_knows_its_own_pods(
    variant: str, template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, apis = VARIANTS[variant]
    rendered = template(*values, apis=apis)
    (text,) = (
        variable["value"]
        for variable in pod_of(rendered)["containers"][0]["env"]
        if variable["name"] == "FLUXTRAIN_NETWORK"
    )
    monkeypatch.setenv("FLUXTRAIN_NETWORK", text)
    rules = parse(["--image=a"]).network_rules
    assert rules.operator is not None
    ((peer,),) = (rules.operator,)
    deployment = one(rendered, "Deployment")
    assert peer.namespace_selector is not None
    assert peer.namespace_selector.match_labels == {
        "kubernetes.io/metadata.name": deployment["metadata"]["namespace"]
    }
    assert peer.pod_selector is not None
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert peer.pod_selector.match_labels.items() <= labels.items()
    assert (rules.egress == "any") == (variant != "everything")


def test_the_schema_of_the_network_has_the_fields_that_the_operator_reads() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())["network"]
    fields = set(NetworkRules.attributes()) - {"operator"}
    assert set(schema["properties"]["network"]["properties"]) == set(values) == fields
    peers, destinations = (
        schema["definitions"][name]["items"] for name in ("peers", "destinations")
    )
    assert set(peers["properties"]) == set(Peer.attributes())
    assert set(destinations["properties"]) == {*Peer.attributes(), "ports"}
    assert peers["oneOf"] == destinations["oneOf"]


@pytest.mark.parametrize(
    "value",
    [
        'network.metricsFrom=[{"ipBlock":{"cidr":"10.0.0.0"}}]',
        'network.egressTo=[{"ipBlock":{"cidr":"10.0.0.0/33"}}]',
        'network.egressTo=[{"ipBlock":{"cidr":"999.1.1.0/24"}}]',
        'network.egressTo=[{"ipBlock":{"cidr":"fd00::/129"}}]',
        'network.metricsFrom=[{"ipBlock":{"cidr":"10.0.0.0/8"},"podSelector":{}}]',
        "network.metricsFrom=[{}]",
        'network.metricsFrom=[{"podSelector":{"matchExpressions":[]}}]',
        'network.egress="none"',
        'network.egressTo=[{"ipBlock":{"cidr":"10.0.0.0/8"},"ports":[0]}]',
        "network.ingress=any",
    ],
)
def test_values_of_the_network_that_the_operator_would_refuse_are_refused(
    value: str, template: Template
) -> None:
    with pytest.raises(AssertionError, match="network"):
        template(value)


def test_one_default_of_the_pods_is_set_without_the_others(template: Template) -> None:
    container = pod_of(template("podDefaults.supplementalGroups=[1000600000]"))["containers"][0]
    expected = {"name": "FLUXTRAIN_POD_DEFAULTS", "value": '{"supplementalGroups":[1000600000]}'}
    assert expected in container["env"]


def test_references_to_variables_are_left_to_the_pods_of_the_jobs(template: Template) -> None:
    value = 'podDefaults.env=[{"name":"NO_PROXY","value":"$(POD_NAME)"}]'
    (text,) = (
        variable["value"]
        for variable in pod_of(template(value))["containers"][0]["env"]
        if variable["name"] == "FLUXTRAIN_POD_DEFAULTS"
    )
    assert text == '{"env":[{"name":"NO_PROXY","value":"$$(POD_NAME)"}]}'


def test_the_schema_of_the_pod_defaults_has_the_fields_that_the_operator_reads() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]["podDefaults"]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["podDefaults"]
    fields = set(PodDefaults.attributes())
    unset = {"securityContext"}  # null is a value of it: Helm drops null where there is a default
    assert set(schema["properties"]) == set(defaults) | unset == fields
    toleration = schema["properties"]["tolerations"]["items"]["properties"]
    assert set(toleration) == set(Toleration.attributes())


def test_the_operators_pods_have_no_labels_of_a_job(template: Template) -> None:
    labels = one(template(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels.get(names.LABEL_MANAGED_BY) != names.FIELD_MANAGER
    assert names.LABEL_JOB not in labels


def test_selectors_match_the_operators_pods_and_no_test_pod(template: Template) -> None:
    rendered = template(apis=MONITORING)
    labels = one(rendered, "Deployment")["spec"]["template"]["metadata"]["labels"]
    test_labels = one(rendered, "Pod")["metadata"]["labels"]
    service = one(rendered, "Service")
    selectors = [
        one(rendered, "Deployment")["spec"]["selector"]["matchLabels"],
        one(rendered, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= test_labels.items()
    monitored = one(rendered, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= service["metadata"]["labels"].items()


def test_the_pod_monitor_selects_trainers_by_the_operators_labels(
    template: Template,
) -> None:
    monitor = one(template(apis=MONITORING), "PodMonitor")["spec"]
    trainer = names.labels("job", names.TRAINER)
    assert monitor["selector"]["matchLabels"].items() <= trainer.items()
    source = monitor["podMetricsEndpoints"][0]["relabelings"][0]["sourceLabels"][0]
    meta = "".join(c if c.isalnum() else "_" for c in names.LABEL_JOB)
    assert source == f"__meta_kubernetes_pod_label_{meta}"


def pod_of(rendered: list[Manifest]) -> Manifest:
    spec: Manifest = one(rendered, "Deployment")["spec"]["template"]["spec"]
    return spec


def test_every_pod_meets_the_restricted_pod_security_standard(template: Template) -> None:
    rendered = template()
    for spec in (pod_of(rendered), one(rendered, "Pod")["spec"]):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()


BAD_VALUES = [  # one of each field at a time, as Helm reports them together
    [
        *("replica=2", "replicas=0", 'watchNamespaces="team"', 'image.repository=""'),
        *(
            'prometheusRule.runbookUrl="docs/operator.md"',
            'prometheusRule.runbookUrl="https://a#b"',
        ),
        *('trainerImage.pullPolicy="Always"', 'crds.install="yes"', "gangs.kueue=true"),
        *('podMonitor.enabled="sometimes"', "resources.requests.cpu=-1"),
        'podDefaults.env=[{"name":"PET_NNODES","value":"1"}]',
    ],
    [
        *('replicas="2"', 'watchNamespaces=["Team"]', 'image.tag="a b"', "crds.keep=true"),
        'image.digest="sha256:1"',
        *('podMonitor.interval="15"', "resources.claims=[]"),
        "podDefaults.supplementalGroups=[2147483648]",
        'podDefaults.rendezvous.resources.limits.cpu="one"',
        'trainerImage.repository="reg.example.com:5000/trainer:1.0"',
    ],
    [
        'podDefaults.labels={"a":"b"}',
        'watchNamespaces=["a","a"]',
        'image.pullPolicy="Sometimes"',
        "podMonitor.labels.release=1",
        'logFormat="xml"',
    ],
]


@pytest.mark.parametrize("values", BAD_VALUES, ids=["first", "second", "third"])
def test_an_invalid_value_is_rejected_with_its_name(values: list[str], helm: Program) -> None:
    done = helm("template", "x", CHART, *(f"--set-json={value}" for value in values), check=False)
    assert done.returncode != 0
    for value in values:
        field = re.split(r"[.=]", value)[0]
        assert re.search(rf"at '/{field}\b|at '': additional properties '{field}'", done.stderr)


def test_every_value_has_a_comment_and_a_schema() -> None:
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert values.keys() <= schema["properties"].keys()
    lines = text.splitlines()
    for name in values:
        above = lines[lines.index(next(x for x in lines if x.startswith(f"{name}:"))) - 1]
        nested = isinstance(values[name], dict) and values[name]
        assert above.startswith("#") or nested, f"{name} has no comment above it"


def test_helm_lint_has_no_complaints(helm: Program) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART).stdout
