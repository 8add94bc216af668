"""What jobs ask for, and which of the profiles permit it: the rows of a table in docs/operator.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.paths import ROOT

from fluxtrain_operator.base.settings import JobPolicy

Manifest = dict[str, Any]
CHART = ROOT / "charts" / "fluxtrain-operator"
PROFILES = ("hard-multitenant", "default", "trusted")
_CAREFUL = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def values_file(profile: str) -> Path:
    """Return the file with the chart's values of ``profile``."""
    return CHART / "values.yaml" if profile == "default" else CHART / f"profiles/{profile}.yaml"


@cache
def policy_of(profile: str) -> JobPolicy:
    return JobPolicy.model_validate(yaml.safe_load(values_file(profile).read_text())["jobs"])


@dataclass(frozen=True)
class Row:
    """A job's spec, and what it asks for."""

    what: str
    """As in the table of the docs; rows with the same words belong together."""
    permitted: tuple[str, ...]
    """The profiles that permit it."""
    spec: Manifest
    at: str = ""
    """The path that a refusal names."""


def _pod(**spec: Any) -> Manifest:
    return {"podTemplate": {"spec": spec}}


def _trainer(**fields: Any) -> Manifest:
    return _pod(containers=[{"name": "trainer", **fields}])


def _security(**fields: Any) -> Manifest:
    return _trainer(securityContext=fields)


def _sidecar(**fields: Any) -> Manifest:
    return _pod(containers=[{"name": "logs", "image": "logs:1", **fields}])


def _volume(**source: Any) -> Manifest:
    return _pod(volumes=[{"name": "more", **source}])


def _node_affinity(key: str) -> Manifest:
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return _pod(affinity={"nodeAffinity": required})


def _anti_affinity(**more: Any) -> Manifest:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, **more}
    terms = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return _pod(affinity={"podAntiAffinity": terms})


def _toleration(key: str) -> Manifest:
    return {"key": key, "operator": "Exists"}


ALL, TWO, ONE = PROFILES, PROFILES[1:], PROFILES[2:]
_SPEC, _C0 = "spec.podTemplate.spec", "spec.podTemplate.spec.containers[0]"
_TOKEN = {"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
_OWN_FIELDS = "the fields of the spec, claims as storage, GPUs, RDMA devices"
_PLAIN = "labels, annotations, resources, ports, variables, mounts, groups of devices"
_HARMLESS = "sidecars and init containers that state level restricted"
_VOLUMES = "config maps, secrets, claims, emptyDirs, CSI and projected volumes"
_SECRETS = "content of Secrets (spec.credentials)"
_PLACES = "selectors of nodes, tolerations of taints by key"
_CONTROL = "tolerations of all taints, of control planes, of cordoned nodes"
_ROOT = "root, added capabilities, privilege escalation, privileged containers"
_SECCOMP = "unconfined seccomp or AppArmor, other SELinux types, sysctls of the node"
_HOST = "the node's processes, IPC, ports, device files, unmasked /proc"
_PATHS = "folders of the node"
_DETOUR = "folders of the node by a path with //, /./ or /../"
_NETWORK = "the node's network (spec.network.mode: Host)"
_TOKENS = "a service account's token"
_ACCOUNTS = "other service accounts than default"
_SYSTEM = "priority classes system-*"
_OTHERS = "affinities to pods of other namespaces"
_UNKNOWN = "fields of pods that the operator does not know"

ROWS = (
    Row(_OWN_FIELDS, ALL, {"gpusPerNode": 8, "network": {"rdmaResource": "rdma/hca"}}),
    Row(_OWN_FIELDS, ALL, {"storage": {"data": {"persistentVolumeClaim": {"claimName": "data"}}}}),
    Row(_OWN_FIELDS, ALL, {"podTemplate": {}}),
    Row(_OWN_FIELDS, ALL, {  # as templates write what nobody has set
        "image": None, "scheduling": {"priorityClassName": None},
        "storage": {"data": {"hostPath": None, "emptyDir": {}}, "models": None}}),
    Row(_SECRETS, TWO, {"credentials": ["wandb"]}, "spec.credentials[0]"),
    Row(_SECRETS, TWO, _trainer(envFrom=[{"secretRef": {"name": "a"}}])),
    Row(_SECRETS, TWO, _trainer(env=[
        {"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}])),
    Row(_PLAIN, TWO, {"podTemplate": {"metadata": {"labels": {"team": "a"}}}}, "spec.podTemplate"),
    Row(_PLAIN, TWO, {"podTemplate": {"metadata": {"annotations": None}, "spec": None}}),
    Row(_PLAIN, TWO, _pod(**dict.fromkeys(("affinity", "nodeSelector", "tolerations", "volumes")),
        serviceAccountName=None, automountServiceAccountToken=None)),
    Row(_PLAIN, TWO, _trainer(
        env=[{"name": "A", "value": "1", "valueFrom": None}], envFrom=None, ports=None, livenessProbe=None)),
    Row(_PLAIN, TWO, _pod(  # the operator's stay
        securityContext=None, containers=[{"name": "trainer", "securityContext": None}])),
    Row(_PLAIN, TWO, {"podTemplate": {"metadata": {"annotations": {"a": "b"}}}}),
    Row(_PLAIN, TWO, _trainer(env=[{"name": "A", "value": "b"}], ports=[{"containerPort": 80}])),
    Row(_PLAIN, TWO, _trainer(resources={"requests": {"cpu": "1"}})),
    Row(_PLAIN, TWO, _pod(securityContext={"supplementalGroups": [44, 109], "runAsUser": 1001})),
    Row(_PLAIN, TWO, _pod(hostAliases=[{"ip": "192.0.2.1", "hostnames": ["a"]}])),
    Row(_PLAIN, TWO, _pod(schedulerName="own", runtimeClassName="own", dnsPolicy="ClusterFirst")),
    Row(_PLAIN, TWO, _trainer(livenessProbe={"httpGet": {"path": "/", "port": 80}})),
    Row(_HARMLESS, TWO, _sidecar(securityContext=_CAREFUL)),
    Row(_HARMLESS, TWO, _pod(initContainers=[{"name": "a", "image": "b", "securityContext": _CAREFUL}])),
    Row("other sidecars", ONE, _sidecar(), _C0),
    Row("other sidecars", ONE, _sidecar(securityContext=None), _C0),
    Row("other sidecars", ONE, _sidecar(securityContext={"allowPrivilegeEscalation": False}), _C0),
    Row("other sidecars", ONE, _pod(initContainers=[{"name": "a", "image": "b"}])),
    *(
        Row(_VOLUMES, TWO, _volume(**source))
        for source in (
            {"configMap": {"name": "a"}},
            {"secret": {"secretName": "a"}},
            {"persistentVolumeClaim": {"claimName": "a"}},
            {"emptyDir": {}},
            {"csi": {"driver": "a"}},
            {"projected": {"sources": [{"configMap": {"name": "a"}}]}},
        )
    ),
    *(
        Row("other volumes", ONE, _volume(**source), f"{_SPEC}.volumes[0]")
        for source in (
            {"nfs": {"server": "a", "path": "/"}},
            {"iscsi": {"targetPortal": "a", "iqn": "a", "lun": 0}},
            {"image": {"reference": "a"}},
        )
    ),
    Row(_PLACES, TWO, _node_affinity("example.com/pool")),
    Row(_PLACES, TWO, {"scheduling": {"nodeSelector": {"example.com/pool": "a"}}}),
    Row(_PLACES, TWO, {"scheduling": {"tolerations": [_toleration("amd.com/gpu")]}}),
    Row(_PLACES, TWO, _pod(tolerations=[_toleration("amd.com/gpu")])),
    Row(_CONTROL, ONE, {"scheduling": {"tolerations": [{"operator": "Exists"}]}},
        "spec.scheduling.tolerations[0]"),
    Row(_CONTROL, ONE, _pod(tolerations=[{"operator": "Exists"}]), f"{_SPEC}.tolerations[0]"),
    Row(_CONTROL, ONE, _pod(tolerations=[{"key": "", "operator": "Exists"}])),
    Row(_CONTROL, ONE, _pod(tolerations=[_toleration("node-role.kubernetes.io/control-plane")])),
    Row(_CONTROL, ONE, _pod(tolerations=[_toleration("node.kubernetes.io/unschedulable")])),
    Row(_ROOT, ONE, _pod(securityContext={"runAsNonRoot": False}),
        f"{_SPEC}.securityContext.runAsNonRoot"),
    Row(_PLAIN, TWO, _pod(securityContext={"runAsUser": None, "runAsGroup": None, "fsGroup": None})),
    Row(_ROOT, ONE, _pod(securityContext={"runAsNonRoot": None}),
        f"{_SPEC}.securityContext.runAsNonRoot"),
    Row(_ROOT, ONE, _security(capabilities=None), f"{_C0}.securityContext.capabilities"),
    Row(_ROOT, ONE, _security(allowPrivilegeEscalation=None),
        f"{_C0}.securityContext.allowPrivilegeEscalation"),
    Row(_SECCOMP, ONE, _pod(securityContext={"seccompProfile": None}),
        f"{_SPEC}.securityContext.seccompProfile"),
    Row(_ROOT, ONE, _pod(securityContext={"runAsUser": 0}), f"{_SPEC}.securityContext.runAsUser"),
    Row(_ROOT, ONE, _security(runAsUser=0), f"{_C0}.securityContext.runAsUser"),
    Row(_ROOT, ONE, _security(runAsNonRoot=False)),
    Row(_ROOT, ONE, _security(privileged=True), f"{_C0}.securityContext.privileged"),
    Row(_ROOT, ONE, _security(allowPrivilegeEscalation=True)),
    Row(_ROOT, ONE, _security(capabilities={"add": ["IPC_LOCK"]}),
        f"{_C0}.securityContext.capabilities.add[0]"),
    Row(_ROOT, ONE, _security(capabilities={"drop": ["NET_RAW"]})),
    Row(_ROOT, ONE, _security(capabilities={"drop": []})),
    Row(_ROOT, ONE, _pod(initContainers=[
        {"name": "a", "image": "b", "securityContext": {**_CAREFUL, "privileged": True}}])),
    Row(_SECCOMP, ONE, _pod(securityContext={"seccompProfile": {"type": "Unconfined"}})),
    Row(_SECCOMP, ONE, _security(seccompProfile={"type": "Unconfined"})),
    Row(_SECCOMP, ONE, _security(appArmorProfile={"type": "Unconfined"})),
    Row(_SECCOMP, ONE, {"podTemplate": {"metadata": {"annotations": {
        "container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}}}}),
    Row(_SECCOMP, ONE, _security(seLinuxOptions={"type": "spc_t"})),
    Row(_SECCOMP, ONE, _security(seLinuxOptions={"user": "root"})),
    Row(_SECCOMP, ONE, _pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]})),
    Row(_HOST, ONE, _pod(hostPID=True), _SPEC),
    Row(_HOST, ONE, _pod(hostIPC=True)),
    Row(_HOST, ONE, _trainer(ports=[{"containerPort": 80, "hostPort": 80}]), f"{_C0}.ports[0]"),
    Row(_HOST, ONE, _security(procMount="Unmasked")),
    Row(_HOST, ONE, _pod(securityContext={"windowsOptions": {"hostProcess": True}})),
    Row(_HOST, ONE, _trainer(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 80}})),
    Row(_HOST, ONE, _trainer(lifecycle={"preStop": {"tcpSocket": {"host": "a", "port": 80}}})),
    Row(_HOST, ONE, _trainer(volumeMounts=[
        {"name": "tmp", "mountPath": "/x", "mountPropagation": "Bidirectional"}])),
    Row(_PATHS, ONE, _volume(hostPath={"path": "/"}), f"{_SPEC}.volumes[0]"),
    *(
        Row(_PATHS, ONE, {"storage": {name: {"hostPath": {"path": "/"}}}},
            f"spec.storage.{name}.hostPath.path")
        for name in ("data", "models", "output")
    ),
    Row(_DETOUR, (), _volume(hostPath={"path": "/data//own"})),
    Row(_DETOUR, (), _volume(hostPath={"path": "/data/./own"})),
    Row(_DETOUR, (), _volume(hostPath={"path": "/data/.."})),
    Row(_NETWORK, ONE, {"network": {"mode": "Host"}}, "spec.network.mode"),
    Row(_TOKENS, ONE, _pod(automountServiceAccountToken=True)),
    Row(_TOKENS, ONE, _volume(**_TOKEN), f"{_SPEC}.volumes[0].projected.sources[0]"),
    Row(_ACCOUNTS, ONE, _pod(serviceAccountName="admin"), f"{_SPEC}.serviceAccountName"),
    Row(_ACCOUNTS, ONE, _pod(serviceAccount="admin"), f"{_SPEC}.serviceAccount"),
    Row("other priority classes", TWO, {"scheduling": {"priorityClassName": "high"}}),
    Row("other priority classes", TWO, _pod(priorityClassName="high")),
    Row(_SYSTEM, ONE, {"scheduling": {"priorityClassName": "system-node-critical"}},
        "spec.scheduling.priorityClassName"),
    Row(_SYSTEM, ONE, _pod(priorityClassName="system-cluster-critical")),
    Row("affinities to pods of the namespace", TWO, _anti_affinity()),
    Row(_OTHERS, ONE, _anti_affinity(namespaceSelector={})),
    Row(_OTHERS, ONE, _anti_affinity(namespaces=["kube-system"])),
    Row("another image than the operator's", TWO, {"image": "example.com/own:1"}, "spec.image"),
    Row(_UNKNOWN, ONE, _pod(priority=2_000_000_000)),
    Row(_UNKNOWN, ONE, _pod(somethingNew={"a": 1})),
    Row(_UNKNOWN, ONE, _trainer(somethingNew=True)),
    Row(_UNKNOWN, ONE, _security(somethingNew=True)),
)  # fmt: skip
