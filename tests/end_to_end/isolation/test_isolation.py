"""Jobs of one name in two namespaces are isolated, in the network too, without access to the API server."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.kubectl import Manifest
from cluster.layout import BRIDGE_ADDRESS, BRIDGE_HOST, IS_IPV6
from cluster.policies import policy_enforcer
from tests.api_server.client import Kubectl
from tests.end_to_end import stage
from tests.end_to_end.isolation import probes
from tests.end_to_end.isolation.probes import Probe
from tests.end_to_end.stage import RUN, Operator, job, losses, wait_for
from tests.paths import ROOT

from fluxtrain.rendezvous.http_server import host_port

EAST, WEST = "isolation-east", "isolation-west"
NAME = "micro"
"""The name in the golden file."""
GOLDEN = ROOT / "tests" / "operator" / "resources" / "golden" / f"{NAME}.yaml"
KINDS = ("configmap", "service", "networkpolicy", "poddisruptionbudget", "pod")
TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes mounts a pod's credentials."""

HERE = {"ipBlock": {"cidr": f"{BRIDGE_ADDRESS}/{128 if IS_IPV6 else 32}"}}
"""The operator and the name server of the tests."""


def of_namespace(namespace: str, app: str) -> Manifest:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": app}},
    }


OPERATOR = [of_namespace("isolation-system", "fluxtrain-operator"), HERE]
PROMETHEUS = [of_namespace("isolation-monitoring", "prometheus")]
NETWORK = {"operator": OPERATOR, "metricsFrom": PROMETHEUS, "egress": "restricted", "dns": [HERE]}
"""As the chart's value, for these namespaces."""

OF_JOB, NOBODY = {"metrics", "rendezvous", "members", "store"}, set[str]()
PROBES = {
    Probe(EAST, f"{NAME}-rendezvous", exists=True): OF_JOB,
    Probe(EAST, "other-job", labels={"fluxtrain.dev/job": "other"}): NOBODY,
    Probe(EAST, "no-label"): NOBODY,
    Probe(EAST, "forged-label", labels={"fluxtrain.dev/job": NAME}): OF_JOB,
    Probe(WEST, f"{NAME}-0", exists=True): NOBODY,
    Probe(WEST, "labels-of-prometheus", labels={"app.kubernetes.io/name": "prometheus"}): NOBODY,
    Probe("isolation-monitoring", "prometheus", labels={"app.kubernetes.io/name": "prometheus"}): {
        "metrics",
        "members",
    },
    Probe("isolation-monitoring", "grafana", labels={"app.kubernetes.io/name": "grafana"}): NOBODY,
    Probe(
        "isolation-system", "operator", labels={"app.kubernetes.io/name": "fluxtrain-operator"}
    ): {"metrics", "members"},
    Probe("isolation-monitoring", "host-network", host_network=True): NOBODY,
}
"""Who tries to reach the job in EAST, and what of it they reach. Who creates pods there may forge labels."""

LISTENING = """
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
print(*{int(line[1].rpartition(":")[2], 16) for line in lines
        if line[3] == "0A" and not line[1].startswith("0100007F")})
"""
STORE = """
import os, socket
print(socket.getaddrinfo(os.environ["PET_RDZV_ENDPOINT"].rpartition(":")[0], 0)[0][4][0])
"""
REQUESTS = """
import json, ssl, sys, urllib.error, urllib.request
for path in sys.argv[1:]:
    try:
        url = f"https://kubernetes.default.svc{path}"
        urllib.request.urlopen(url, timeout=20, context=ssl._create_unverified_context())
        print(json.dumps([path, 200, ""]))
    except urllib.error.HTTPError as error:
        print(json.dumps([path, error.code, json.loads(error.read())["message"]]))
"""


Reached = Callable[[], dict[Probe, set[str]]]


class Twins:
    """Two namespaces, each with a job of the same name and another seed, and the operator of both."""

    def __init__(self, kubectl: Kubectl, folder: Path) -> None:
        self.kubectl, self.folder = kubectl, folder
        self.operator = Operator(
            kubectl, EAST, folder, others=[WEST], options=[f"--network={json.dumps(NETWORK)}"]
        )

    def output(self, namespace: str) -> Path:
        return self.folder / namespace

    def start(self, namespace: str, seed: int) -> None:
        stage.make_namespace(self.kubectl, namespace)
        stage.make_volumes(self.kubectl, namespace, self.output(namespace))
        run = {**RUN, "seed": seed, "schedule": {"steps": 100_000}}
        twin = job(NAME, run=run, nodes={"min": 1, "max": 1})
        self.kubectl.apply(twin, namespace=namespace)

    def get(self, namespace: str, kind: str) -> dict[str, Manifest]:
        """Return the job's objects of one kind by name."""
        selector = f"--selector=app.kubernetes.io/instance={NAME}"
        items = self.kubectl.get(kind, selector, f"--namespace={namespace}")["items"]
        return {item["metadata"]["name"]: item for item in items}

    def inside(self, namespace: str, *command: str) -> str:
        """Run ``command`` in the training pod; return its output."""
        return self.kubectl(
            "exec", f"{NAME}-0", "--container=trainer", f"--namespace={namespace}", "--", *command
        )

    def wait_for_steps(self, namespace: str, count: int) -> None:
        stage.wait_for_steps(
            self.output(namespace),
            count,
            lambda: f"{self.operator.log()}\n{stage.logs(self.kubectl, namespace, NAME)}",
        )


@pytest.fixture(scope="module")
def twins(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    twins = Twins(kubectl, tmp_path_factory.mktemp("isolation"))
    twins.start(EAST, seed=1)
    twins.start(WEST, seed=2)
    twins.operator.start()
    try:
        for namespace in (EAST, WEST):
            twins.wait_for_steps(namespace, 5)
        yield twins
    finally:
        twins.operator.stop()
        for namespace in (EAST, WEST):
            stage.clear(kubectl, namespace)


def test_jobs_of_one_name_share_no_objects(
    twins: Twins,
) -> None:
    owners = {}
    for namespace in (EAST, WEST):
        manifest = twins.kubectl.get("ft", NAME, f"--namespace={namespace}")
        owners[namespace] = manifest["metadata"]["uid"]
    for kind in KINDS:
        east, west = twins.get(EAST, kind), twins.get(WEST, kind)
        assert kind == "configmap" or east.keys() == west.keys(), (
            "a revision is named by its seed too"
        )
        for namespace, objects in ((EAST, east), (WEST, west)):
            assert {owner_of(item) for item in objects.values()} <= {owners[namespace]}
    revisions = [
        twins.kubectl.get("ft", NAME, f"--namespace={n}")["status"]["revision"]
        for n in (EAST, WEST)
    ]
    configs = [
        twins.get(n, "configmap")[name]["data"]
        for n, name in zip((EAST, WEST), revisions, strict=True)
    ]
    assert [json.loads(data["config.json"])["seed"] for data in configs] == [1, 2]
    assert rendezvous_id(twins, EAST) != rendezvous_id(twins, WEST)
    for namespace in (EAST, WEST):
        store = twins.get(namespace, "pod")[f"{NAME}-rendezvous"]["status"]["podIP"]
        assert twins.inside(namespace, "python3", "-c", STORE).strip() == store
    one, other = (losses(twins.output(namespace)) for namespace in (EAST, WEST))
    assert one[1] != other[1], "each trains with its own seed"


def owner_of(item: Manifest) -> str:
    (owner,) = item["metadata"]["ownerReferences"]
    return str(owner["uid"])


def rendezvous_id(twins: Twins, namespace: str) -> str:
    return twins.inside(namespace, "printenv", "PET_RDZV_ID")


def test_jobs_of_one_name_have_keys_of_their_own(twins: Twins) -> None:
    keys = [twins.get(namespace, "secret") for namespace in (EAST, WEST)]
    for namespace, secrets in zip((EAST, WEST), keys, strict=True):
        (secret,) = secrets.values()
        job = twins.kubectl.get("ft", NAME, f"--namespace={namespace}")
        assert owner_of(secret) == job["metadata"]["uid"]
        assert len(b64decode(secret["data"]["key"])) == 64
    (one,), (other,) = (secrets.values() for secrets in keys)
    assert one["data"] != other["data"]


def test_the_network_policies_are_those_of_the_golden_file(twins: Twins) -> None:
    expected = next(
        m for m in yaml.safe_load_all(GOLDEN.read_text()) if m["kind"] == "NetworkPolicy"
    )
    for namespace in (EAST, WEST):
        (policy,) = twins.get(namespace, "networkpolicy").values()
        assert policy["metadata"]["name"] == expected["metadata"]["name"]
        spec = {key: value for key, value in policy["spec"].items() if key != "egress"}
        first, metrics = expected["spec"]["ingress"]
        ingress = [first, metrics | {"from": OPERATOR + PROMETHEUS}]
        types = {"policyTypes": ["Ingress", "Egress"]}
        assert spec == expected["spec"] | types | {"ingress": ingress}


@pytest.mark.parametrize("pod", [f"{NAME}-0", f"{NAME}-rendezvous"])
def test_a_pod_has_no_credentials_and_the_api_server_refuses_it(twins: Twins, pod: str) -> None:
    spec = twins.get(EAST, "pod")[pod]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert not any("projected" in volume for volume in spec["volumes"])
    (key,) = twins.get(EAST, "secret").values()
    secrets = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    assert secrets == [key["metadata"]["name"]], "the key of the job's rendezvous"
    inside = ("exec", pod, f"--namespace={EAST}", "--")
    assert (
        twins.kubectl(*inside, "sh", "-c", f"ls {TOKENS} 2>&1 || true")
        .strip()
        .endswith("No such file or directory")
    )
    paths = [
        f"/api/v1/namespaces/{EAST}/pods",
        f"/api/v1/namespaces/{EAST}/secrets",
        f"/apis/fluxtrain.dev/v1alpha1/namespaces/{EAST}/fluxtrainings/{NAME}",
        f"/apis/fluxtrain.dev/v1alpha1/namespaces/{WEST}/fluxtrainings/{NAME}",
    ]
    lines = twins.kubectl(*inside, "python3", "-c", REQUESTS, *paths).splitlines()
    responses: list[list[Any]] = [json.loads(line) for line in lines]
    assert [path for path, _, _ in responses] == paths
    for _, code, message in responses:
        assert code in (401, 403), message
        assert 'User "system:anonymous" cannot' in message or message == "Unauthorized"


@pytest.fixture
def reached(twins: Twins) -> Iterator[Reached]:
    """Return a function with which the probes try what they reach of the job in EAST, without any rules."""
    pods = twins.get(EAST, "pod")
    trainer, rendezvous = (
        pods[f"{NAME}-{name}"]["status"]["podIP"] for name in ("0", "rendezvous")
    )
    ports = twins.inside(EAST, "python3", "-c", LISTENING).split()
    store = next(port for port in ports if port != "9464")
    targets = {
        "metrics": host_port(trainer, 9464),
        "store": host_port(trainer, store),
        "rendezvous": host_port(rendezvous, 29500),
        "members": host_port(rendezvous, 9464),
    }
    taken = {pod["spec"]["nodeName"] for pod in pods.values()}
    (node, *_) = sorted(stage.ready_nodes(twins.kubectl) - taken)
    probes.start(twins.kubectl, list(PROBES), node)

    def reach() -> dict[Probe, set[str]]:
        return {
            probe: {name for name, opens in probe.reaches(twins.kubectl, targets).items() if opens}
            for probe in PROBES
        }

    try:
        yield reach
    finally:
        probes.stop(twins.kubectl, list(PROBES))


def test_only_those_whom_the_policy_admits_reach_the_job(twins: Twins, reached: Reached) -> None:
    assert all(names == OF_JOB for names in reached().values()), "no rule is enforced"
    assert policy_enforcer.enforce(twins.kubectl) >= 4 + len(PROBES) - 3
    found = reached()
    for probe, names in found.items():
        row = "  ".join(f"{n}: {'yes' if n in names else 'no'}" for n in sorted(OF_JOB))
        print(f"{probe.namespace + '/' + probe.name:45} {row}")
    assert found == PROBES
    outside = {"api": f"{BRIDGE_HOST}:6443", "names": f"{BRIDGE_HOST}:53"}
    trainer = Probe(EAST, f"{NAME}-0", exists=True)
    assert trainer.reaches(twins.kubectl, outside) == {"api": False, "names": True}
    twins.wait_for_steps(EAST, 5)
    before = stage.step(stage.status(twins.kubectl, EAST, NAME))
    wait_for(
        lambda: stage.step(stage.status(twins.kubectl, EAST, NAME)) > before, twins.operator.log
    )
    twins.operator.stop()  # else it would create the policy again
    twins.kubectl("delete", "networkpolicy", "--all", f"--namespace={EAST}")
    policy_enforcer.enforce(twins.kubectl)
    denied = [probe for probe, names in reached().items() if names != OF_JOB]
    (west,) = (p for p in PROBES if (p.namespace, p.name) == (WEST, f"{NAME}-0"))
    assert denied == [west], "without the policy of EAST only that of WEST is left, of its egress"
    assert trainer.reaches(twins.kubectl, outside) == {"api": True, "names": True}
    twins.operator.start()
    wait_for(lambda: bool(twins.get(EAST, "networkpolicy")), twins.operator.log)
    policy_enforcer.enforce(twins.kubectl)
    assert reached() == PROBES


def test_deleting_a_job_does_not_affect_the_other(
    twins: Twins,
) -> None:
    before = {kind: uids(twins.get(WEST, kind)) for kind in KINDS}
    twins.kubectl("delete", "ft", NAME, f"--namespace={EAST}")
    wait_for(lambda: not any(twins.get(EAST, kind) for kind in KINDS), twins.operator.log)
    twins.wait_for_steps(WEST, 5)
    assert {kind: uids(twins.get(WEST, kind)) for kind in KINDS} == before
    steps = list(losses(twins.output(WEST)))
    assert steps == list(range(1, len(steps) + 1))
    assert stage.status(twins.kubectl, WEST, NAME)["attempt"] == 1


def uids(objects: dict[str, Manifest]) -> dict[str, str]:
    return {name: item["metadata"]["uid"] for name, item in objects.items()}
