"""Limit: a condition of the values at one path of a job, for the operator and, as CEL, for the API server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fluxtrain.contract.resource.pod_template import TRAINER
from fluxtrain_operator.base.errors import NotPermittedError
from fluxtrain_operator.base.settings import JobPolicy

_ITEMS = "[]"
_KEYS = "{}"


@dataclass(frozen=True)
class Limit:
    """What the values at a path must be; values that are not set are not checked."""

    at: str
    """Path from the resource; ``[]`` stands for each item of a list, ``{}`` for each key of a mapping."""
    allowed: str
    """What is allowed, for people."""
    holds: Callable[[Any, JobPolicy], bool]
    """Returns whether a value is allowed."""
    cel: str
    """The same condition in CEL: ``@`` is the value, ``variables`` has the lists of the policy."""

    def violations(
        self, manifest: Mapping[str, Any], policy: JobPolicy
    ) -> Iterator[tuple[str, Any]]:
        """Yield path and value of what ``manifest`` has at the path and is not allowed."""
        for path, value in _values(manifest, _parts(self.at), ""):
            if not self._holds(value, policy):
                yield path, value

    def _holds(self, value: Any, policy: JobPolicy) -> bool:
        """Return whether ``value`` is allowed; one of another type than Kubernetes' is not."""
        try:
            return self.holds(value, policy)
        except (AttributeError, KeyError, TypeError):
            return False

    @property
    def expression(self) -> str:
        return _expression("object", _parts(self.at), self.cel, 0)


def fields(at: str, *names: str) -> Limit:
    """Return the limit that a mapping has no other fields than ``names``."""
    listed = ", ".join(names)
    return Limit(
        at,
        f"may only set {listed}" if names else "must be left out",
        lambda value, policy: isinstance(value, Mapping) and set(value) <= set(names),
        f"type(@) == map && @.all(k, k in {_cel(names)})",
    )


def one_of(at: str, *values: str | bool) -> Limit:
    listed = " or ".join(json.dumps(value) if value != "" else "empty" for value in values)
    return Limit(
        at,
        f"must be {listed}",
        lambda value, policy: any(value == one and type(value) is type(one) for one in values),
        f"@ in {_cel(values)}",
    )


def listed(at: str, name: str, key: str = "") -> Limit:
    """Return the limit that the list ``name`` of the policy allows a value, or its field ``key``."""
    value, patterns = f"@.?{key}.orValue('')" if key else "@", f"variables.{name}"
    allowed = f"{patterns}.exists(p, !p.startsWith('!') && {_matches(value, 'p')})"
    excluded = f"{patterns}.exists(p, p.startsWith('!') && {_matches(value, 'p.substring(1)')})"
    every = f"'*' in {patterns} && !{patterns}.exists(p, p.startsWith('!'))"

    def holds(given: Any, policy: JobPolicy) -> bool:
        return policy.allows(name, given.get(key, "") if key else given)

    return Limit(
        at,
        f"must be allowed by jobs.{name}, a setting of the operator",
        holds,
        f"({value} == '' ? ({every}) : ({allowed} && !{excluded}))",
    )


def _matches(value: str, pattern: str) -> str:
    """Return CEL for whether ``value`` matches ``pattern``."""
    begin = f"{pattern}.substring(0, {pattern}.size() - 1)"
    return f"({pattern}.endsWith('*') ? {value}.startsWith({begin}) : {value} == {pattern})"


def _cel(values: tuple[str | bool, ...]) -> str:
    """Return a CEL list; texts are single-quoted, as the expressions are YAML texts."""
    return f"[{', '.join(json.dumps(value).replace(chr(34), chr(39)) for value in values)}]"


def _parts(path: str) -> list[str]:
    """Return the fields of ``path``, with [] and {} by themselves."""
    return path.replace(_ITEMS, f".{_ITEMS}").replace(_KEYS, f".{_KEYS}").split(".")


def _values(value: Any, parts: list[str], path: str) -> Iterator[tuple[str, Any]]:
    """Yield all values at ``parts`` below ``value`` with their paths; what has another type as it is.

    Null is no value, but in a security context: there it removes the operator's.
    """
    if value is None and ".securityContext." not in path:
        return
    if not parts:
        yield path, value
        return
    first, rest = parts[0], parts[1:]
    if first == _ITEMS and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _values(item, rest, f"{path}[{number}]")
    elif first == _KEYS and isinstance(value, Mapping):
        for key in value:
            yield from _values(key, rest, f"{path}.{key}")
    elif first in (_ITEMS, _KEYS) or not isinstance(value, Mapping):
        yield path, value  # refused, as no limit of what is below allows it
    elif first in value:
        yield from _values(value[first], rest, f"{path}.{first}".lstrip("."))


def _expression(value: str, parts: list[str], cel: str, depth: int) -> str:
    """Return CEL for whether ``cel`` holds for all values at ``parts`` below ``value``."""
    names = parts[: next((n for n, part in enumerate(parts) if part in (_ITEMS, _KEYS)), None)]
    rest = parts[len(names) :]
    optional, given = ".?".join([value, *names]), ".".join([value, *names])
    removes = "securityContext" in names[:-1]
    unset = f"!{optional}.hasValue()" if removes else f"{optional}.orValue(null) == null"
    if not rest:
        inner = cel.replace("@", given)
        return f"{unset} || {inner}" if names else inner
    item = f"x{depth}"
    inner = _expression(item, rest[1:], cel, depth + 1)
    empty = "[]" if rest[0] == _ITEMS else "{}"
    items = f"({unset} ? {empty} : {given})" if names else value
    return f"{items}.all({item}, {inner})"


_TEMPLATE = "spec.podTemplate"
_POD = f"{_TEMPLATE}.spec"
_CONTAINERS = (f"{_POD}.containers[]", f"{_POD}.initContainers[]")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/"
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SECCOMP = ("RuntimeDefault", "Localhost")
_SYSCTLS = (
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"),
    *("net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time"),
    *("net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes"),
    *("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
)
"""The sysctls of Pod Security's baseline: those of the pod's own namespaces."""
_CONTAINER_FIELDS = (
    *("name", "image", "imagePullPolicy", "command", "args", "workingDir", "env", "envFrom"),
    *("ports", "resources", "resizePolicy", "restartPolicy", "volumeMounts", "volumeDevices"),
    *("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "securityContext"),
    *("terminationMessagePath", "terminationMessagePolicy", "stdin", "stdinOnce", "tty"),
)
_POD_FIELDS = (
    *("containers", "initContainers", "volumes", "imagePullSecrets", "securityContext"),
    *("serviceAccountName", "serviceAccount", "automountServiceAccountToken", "hostUsers"),
    *("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "schedulerName"),
    *("schedulingGates", "priorityClassName", "preemptionPolicy", "runtimeClassName"),
    *("resources", "resourceClaims", "terminationGracePeriodSeconds", "enableServiceLinks"),
    *("dnsConfig", "dnsPolicy", "hostAliases", "setHostnameAsFQDN", "shareProcessNamespace"),
    *("readinessGates", "activeDeadlineSeconds"),
)
_VOLUME_FIELDS = (  # the volumes of Pod Security's level restricted
    *("name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
)
_DETOURS, _DOTS = ("//", "/./", "/../"), ("/.", "/..")
_SECRET_SOURCES = (
    "secret.secretName",
    "projected.sources[].secret.name",
    "csi.nodePublishSecretRef.name",
)


def _cel_any(test: str, texts: tuple[str, ...]) -> str:
    return " || ".join(f"{test}('{text}')" for text in texts)


def _security(at: str) -> Iterator[Limit]:
    """Yield the limits of what the security contexts of pods and containers have in common."""
    yield Limit(
        f"{at}.runAsUser",
        "must be a number other than 0, or null for the cluster's choice",
        lambda value, policy: value is None or (type(value) in (int, float) and value != 0),
        "@ == null || ((type(@) == int || type(@) == double) && @ != 0)",
    )
    yield one_of(f"{at}.runAsNonRoot", True)
    for profile in ("seccompProfile", "appArmorProfile"):
        yield fields(f"{at}.{profile}", "type", "localhostProfile")  # not null
        yield one_of(f"{at}.{profile}.type", *_SECCOMP)
    yield fields(f"{at}.seLinuxOptions", "type", "level")
    yield one_of(f"{at}.seLinuxOptions.type", *_SELINUX_TYPES)


def _container(at: str) -> Iterator[Limit]:
    security = f"{at}.securityContext"
    yield fields(at, *_CONTAINER_FIELDS)
    yield fields(f"{at}.ports[]", "name", "containerPort", "protocol")
    yield fields(
        f"{at}.volumeMounts[]",
        *("name", "mountPath", "subPath", "subPathExpr", "readOnly", "recursiveReadOnly"),
    )
    yield fields(
        security,
        *("allowPrivilegeEscalation", "capabilities", "privileged", "procMount", "runAsUser"),
        *("runAsGroup", "runAsNonRoot", "readOnlyRootFilesystem", "seLinuxOptions"),
        *("seccompProfile", "appArmorProfile"),
    )
    yield one_of(f"{security}.allowPrivilegeEscalation", False)
    yield one_of(f"{security}.privileged", False)
    yield one_of(f"{security}.procMount", "Default")
    yield fields(f"{security}.capabilities", "add", "drop")
    yield one_of(f"{security}.capabilities.add[]", "NET_BIND_SERVICE")
    yield Limit(
        f"{security}.capabilities.drop",
        "must contain ALL",
        lambda value, policy: isinstance(value, list) and "ALL" in value,
        "type(@) == list && 'ALL' in @",
    )
    yield from _security(security)
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        yield from _probe(f"{at}.{probe}")
    for hook in ("postStart", "preStop"):
        yield from _probe(f"{at}.lifecycle.{hook}")


def _probe(at: str) -> Iterator[Limit]:
    """Yield the limits that a probe reaches the pod only: the kubelet sends it from the node."""
    yield fields(f"{at}.httpGet", "path", "port", "scheme", "httpHeaders")
    yield fields(f"{at}.tcpSocket", "port")


def _is_restricted(value: Any, policy: JobPolicy) -> bool:
    if value.get("name") == TRAINER:
        return True  # merged into the operator's, which is restricted
    security = value["securityContext"]
    dropped = security["capabilities"]["drop"]
    return (
        security["allowPrivilegeEscalation"] is False
        and isinstance(dropped, list)
        and "ALL" in dropped
    )


def _own_container(at: str) -> Limit:
    """Return the limit that a sidecar or init container states what level restricted asks for."""
    context = "@.?securityContext.?"
    return Limit(
        at,
        "must have securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}",
        _is_restricted,
        f"@.name == '{TRAINER}' || ({context}allowPrivilegeEscalation.orValue(true) == false && "
        f"'ALL' in {context}capabilities.?drop.orValue([]))",
    )


def _pod_affinity(kind: str) -> Iterator[Limit]:
    """Yield the limits that a pod's affinity looks at pods of its own namespace only."""
    names = ("labelSelector", "topologyKey", "matchLabelKeys", "mismatchLabelKeys")
    yield fields(f"{_POD}.affinity.{kind}.{_REQUIRED}[]", *names)
    yield fields(f"{_POD}.affinity.{kind}.{_PREFERRED}[].podAffinityTerm", *names)


def _is_plain(path: Any, policy: JobPolicy) -> bool:
    return (
        isinstance(path, str)
        and not any(part in path for part in _DETOURS)
        and not path.endswith(_DOTS)
    )


NO_TEMPLATE = (fields(_TEMPLATE),)

RESTRICTED = (
    Limit(
        f"{_TEMPLATE}.metadata.annotations{{}}",
        "must be left out: set securityContext.appArmorProfile",
        lambda key, policy: isinstance(key, str) and not key.startswith(_APP_ARMOR),
        f"!@.startsWith('{_APP_ARMOR}')",
    ),
    fields(_POD, *_POD_FIELDS),
    one_of(f"{_POD}.automountServiceAccountToken", False),
    fields(f"{_POD}.volumes[]", *_VOLUME_FIELDS),
    fields(f"{_POD}.volumes[].projected.sources[]", "configMap", "downwardAPI", "secret"),
    fields(
        f"{_POD}.securityContext",
        *("runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "fsGroupChangePolicy"),
        *("supplementalGroups", "supplementalGroupsPolicy", "seLinuxOptions", "sysctls"),
        *("seLinuxChangePolicy", "seccompProfile", "appArmorProfile"),
    ),
    *_security(f"{_POD}.securityContext"),
    one_of(f"{_POD}.securityContext.sysctls[].name", *_SYSCTLS),
    *(limit for at in _CONTAINERS for limit in _container(at)),
    *(_own_container(at) for at in _CONTAINERS),
    *_pod_affinity("podAffinity"),
    *_pod_affinity("podAntiAffinity"),
)
"""Against what Pod Security's level restricted refuses, a service account's token, and affinities to pods of
other namespaces."""

_NODE_AFFINITY = f"{_POD}.affinity.nodeAffinity"
_NODE_TERMS = (
    f"{_NODE_AFFINITY}.{_REQUIRED}.nodeSelectorTerms[]",
    f"{_NODE_AFFINITY}.{_PREFERRED}[].preference",
)
LISTED = (
    listed("spec.image", "images"),
    *(listed(f"{at}.image", "images") for at in _CONTAINERS),
    Limit(
        "spec.network.mode",
        "must be Pod: jobs.hostNetwork, a setting of the operator, is off",
        lambda value, policy: value != "Host" or policy.host_network,
        "@ != 'Host' || variables.hostNetwork",
    ),
    *(
        listed(f"spec.storage.{name}.hostPath.path", "hostPaths")
        for name in ("data", "models", "output")
    ),
    listed(f"{_POD}.volumes[].hostPath.path", "hostPaths"),
    Limit(
        f"{_POD}.volumes[].hostPath.path",
        "must not contain //, /./ or /../, which patterns do not see through",
        _is_plain,
        f"!({_cel_any('@.contains', _DETOURS)} || {_cel_any('@.endsWith', _DOTS)})",
    ),
    listed("spec.credentials[]", "secrets"),
    *(listed(f"{_POD}.volumes[].{at}", "secrets") for at in _SECRET_SOURCES),
    *(
        listed(f"{at}.{field}", "secrets")
        for at in _CONTAINERS
        for field in ("env[].valueFrom.secretKeyRef.name", "envFrom[].secretRef.name")
    ),
    listed(f"{_POD}.serviceAccountName", "serviceAccounts"),
    listed(f"{_POD}.serviceAccount", "serviceAccounts"),
    listed("spec.scheduling.priorityClassName", "priorityClasses"),
    listed(f"{_POD}.priorityClassName", "priorityClasses"),
    listed("spec.scheduling.nodeSelector{}", "nodeSelectors"),
    listed(f"{_POD}.nodeSelector{{}}", "nodeSelectors"),
    *(
        listed(f"{at}.{kind}[].key", "nodeSelectors")
        for at in _NODE_TERMS
        for kind in ("matchExpressions", "matchFields")
    ),
    listed("spec.scheduling.tolerations[]", "tolerations", "key"),
    listed(f"{_POD}.tolerations[]", "tolerations", "key"),
)
"""What the lists of the policy allow, with any level of the template."""


def limits_of(policy: JobPolicy) -> tuple[Limit, ...]:
    of_template = {"none": NO_TEMPLATE, "restricted": RESTRICTED, "any": ()}
    return (*of_template[policy.pod_template], *LISTED)


def require_permitted(manifest: Mapping[str, Any], policy: JobPolicy) -> None:
    """Raise NotPermittedError, with the path, for the first value that ``policy`` does not permit."""
    for limit in limits_of(policy):
        for path, value in limit.violations(manifest, policy):
            raise NotPermittedError(path, value, limit.allowed)
