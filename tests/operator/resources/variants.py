"""Valid jobs of every kind, named after their difference to the smallest one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml
from tests.paths import EXAMPLES

from fluxtrain.contract.run.presets import PRESETS
from fluxtrain.contract.run.resolve import merge

Manifest = dict[str, Any]

BASE = "micro"
"""The variant with a complete golden, to which the others are diffs."""
PARTITIONS = ("spx_nps1", "dpx_nps1", "dpx_nps2", "qpx_nps1", "cpx_nps1", "cpx_nps2", "cpx_nps4")
"""Resource names of AMD's device plugin with ``-resource_naming_strategy=mixed``."""
LONGEST = "l" + "ong" * 20 + "er"
"""A name of 63 letters, the maximum of a label."""


@dataclass(frozen=True)
class Variant:
    """A valid job, and the strictest Pod Security level that admits its pods."""

    spec: Manifest
    """Merged into the spec of the example."""
    level: str = "restricted"
    refused_for: str = ""
    """Part of the message of a stricter level."""
    name: str = ""
    """Name of the job; empty: that of the example."""
    example: str = BASE
    like: str = BASE
    """The variant to which its golden is a diff."""
    rendezvous_image: str = ""
    """Of the operator."""
    pod_defaults: Manifest = field(default_factory=dict)
    """Of the operator."""
    network: Manifest = field(default_factory=dict)
    """Of the operator."""

    def manifest(self) -> Manifest:
        """Return the FluxTraining."""
        path = EXAMPLES / f"{self.example}.yaml"
        manifest: Manifest = yaml.load(path.read_text(), yaml.CSafeLoader)
        manifest["spec"] = merge(manifest["spec"], self.spec)
        if self.name:
            manifest["metadata"]["name"] = self.name
        return manifest


def _of_namespace(name: str, app: str) -> Manifest:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": app}},
    }


_NETWORK: Manifest = {
    "operator": [_of_namespace("fluxtrain-system", "fluxtrain-operator")],
    "metricsFrom": [_of_namespace("monitoring", "prometheus")],
}


def _pod(**spec: Any) -> Variant:
    return Variant({"podTemplate": {"spec": spec}})


def _trainer(**fields: Any) -> Manifest:
    return {"containers": [{"name": "trainer", **fields}]}


def _gpus(resource: str = "amd.com/gpu", count: int = 8, like: str = "gpus") -> Variant:
    return Variant({"gpusPerNode": count, "gpuResource": resource}, like=like)


def _on_gpus(level: str = "restricted", refused_for: str = "", **spec: Any) -> Variant:
    return Variant({"gpusPerNode": 8, **spec}, level, refused_for, like="gpus")


def _elastic(**scheduling: Any) -> Variant:
    return Variant({"nodes": {"min": 2, "max": 4}, "scheduling": scheduling}, like="elastic")


_RESOLVING = [name for name in PRESETS if name != BASE]
_CAREFUL = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_RDMA = {
    "rdmaResource": "rdma/hca",
    "rdmaDevices": ["bnxt_re0", "bnxt_re1:1"],
    "gidIndex": 3,
    "trafficClass": 104,
}
_POD_DEFAULTS = {
    "imagePullSecrets": ["registry", "mirror"],
    "tolerations": [
        {"key": "amd.com/gpu", "operator": "Exists"},
        {"key": "pool", "value": "training", "effect": "NoSchedule"},
    ],
    "nodeSelector": {"pool": "training", "zone": "a"},
    "env": [
        {"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"},
        {"name": "NCCL_IB_GID_INDEX", "value": "1"},
        {"name": "NCCL_CROSS_NIC", "value": "2"},
    ],
    "supplementalGroups": [44, 109],
}
_TENANT_POOL = {"key": "pool", "operator": "In", "values": ["a", "shared"]}
_SECRET = {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
_PLACE = {"volumeMounts": [{"name": "site", "mountPath": "/site", "readOnly": True}]}

VARIANTS: dict[str, Variant] = {
    "micro": Variant({}),
    "mlperf-schnell": Variant({}, example="mlperf-schnell"),
    **{f"preset-{name}": Variant({"run": {"preset": name}}) for name in _RESOLVING},
    "run-changed": Variant({"run": {"optim": {"learning_rate": 1e-3}, "schedule": {"steps": 7}}}),
    "prepare": Variant({"run": {"preset": "mlperf-schnell-raw", "task": "prepare"}}),
    "no-snapshots": Variant({"run": {"checkpoint": {"memory_every_steps": 0}}}),
    "metrics-port": Variant({"run": {"logging": {"metrics_port": 9999}}}),
    "image": Variant({"image": "registry.example.com/fluxtrain@sha256:" + "0" * 64}),
    "two-nodes": Variant({"nodes": {"min": 2, "max": 2}}),
    "elastic": Variant({"nodes": {"min": 2, "max": 4}}),
    "one-gpu": _gpus(count=1),
    "gpus": _gpus(like=BASE),
    **{f"gpus-{name.replace('_', '-')}": _gpus(f"amd.com/{name}") for name in PARTITIONS},
    "partitions-of-a-node": _gpus("amd.com/cpx_nps4", 64),
    "nvidia": _gpus("nvidia.com/gpu"),
    "storage-claims": Variant(
        {
            "storage": {
                "data": {"persistentVolumeClaim": {"claimName": "data.v2", "readOnly": True}},
                "models": {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
                "output": {"persistentVolumeClaim": {"claimName": "output"}},
            }
        }
    ),
    "storage-folder": Variant({"storage": {"outputFolder": "july/run-03"}}),
    "storage-isolated": Variant({"storage": {"isolated": True, "outputFolder": "run-03"}}),
    "storage-scratch": Variant({"storage": {"output": {"emptyDir": {"sizeLimit": "50Gi"}}}}),
    "storage-of-the-node": Variant(
        {"storage": {"data": {"hostPath": {"path": "/mnt/data"}}}},
        "privileged",
        "hostPath",
    ),
    "restart": Variant(
        {"restart": {"maxRestarts": 3, "noProgressSeconds": 900, "onExitCodes": [1]}}
    ),
    "lifecycle": Variant(
        {
            "lifecycle": {
                "suspend": True,
                "startAfter": ["prepare", "encode"],
                "activeDeadlineSeconds": 86_400,
                "ttlSecondsAfterFinished": 0,
                "cleanPods": "All",
            }
        }
    ),
    "network-of-the-pod": _on_gpus(network=_RDMA),
    "network-of-the-node": _on_gpus("privileged", "host namespaces", network={"mode": "Host"}),
    "network-of-the-node-rdma": _on_gpus(
        "privileged", "host namespaces", network={"mode": "Host", **_RDMA}
    ),
    "network-env": _on_gpus(
        network={
            "env": [
                {"name": "NCCL_SOCKET_IFNAME", "value": "bond0"},
                {"name": "NCCL_PXN_DISABLE", "value": "1"},
                {"name": "RCCL_MSCCL_ENABLE", "value": "1"},
            ]
        }
    ),
    "network-env-over-fields": _on_gpus(
        network={"gidIndex": 3, "env": [{"name": "NCCL_IB_GID_INDEX", "value": "5"}]}
    ),
    "resources": _on_gpus(
        resources={
            "requests": {"cpu": "96", "memory": "1Ti"},
            "limits": {"memory": "2Ti"},
            "sharedMemory": "100Gi",
        }
    ),
    "resources-limited": _on_gpus(resources={"limits": {"cpu": "12", "memory": "40Gi"}}),
    "resources-without-requests": _on_gpus(resources={"requests": {"cpu": "0", "memory": "0"}}),
    "resources-without-gpus": Variant({"resources": {"requests": {"memory": "500M"}}}),
    "rendezvous-image": Variant({}, rendezvous_image="fluxtrain/operator:0.1.0"),
    "rendezvous-image-template": Variant(
        {
            "podTemplate": {
                "spec": {
                    **_trainer(env=[{"name": "PYTHONPATH", "value": "/site"}], **_PLACE),
                    "volumes": [{"name": "site", "persistentVolumeClaim": {"claimName": "site"}}],
                    "imagePullSecrets": [{"name": "registry"}],
                }
            }
        },
        rendezvous_image="fluxtrain/operator:0.1.0",
        like="template-volume",
    ),
    "pod-defaults": Variant({"gpusPerNode": 8}, pod_defaults=_POD_DEFAULTS, like="gpus"),
    "flush-caches": Variant(
        {},
        "privileged",
        "must not set securityContext.privileged=true",
        example="mlperf-schnell",
        pod_defaults={"flushCaches": True},
        like="mlperf-schnell",
    ),
    "pod-defaults-without-gpus": Variant({}, pod_defaults=_POD_DEFAULTS),
    "rendezvous-place": Variant(
        {
            "gpusPerNode": 8,
            "resources": {"rendezvous": {"limits": {"cpu": "500m", "memory": "1Gi"}}},
            "scheduling": {
                "nodeSelector": {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
            },
            "podTemplate": {
                "spec": {
                    "nodeSelector": {"tenant": "a"},
                    "priorityClassName": "system-cluster-critical",
                    "schedulerName": "own",
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {
                                "nodeSelectorTerms": [{"matchExpressions": [_TENANT_POOL]}]
                            },
                            "preferredDuringSchedulingIgnoredDuringExecution": [
                                {"weight": 1, "preference": {"matchExpressions": [_TENANT_POOL]}}
                            ],
                        }
                    },
                }
            },
        },
        pod_defaults={"rendezvous": {"resources": {"requests": {"cpu": "100m"}}}},
        like="gpus",
    ),
    "pod-defaults-overridden": Variant(
        {
            "gpusPerNode": 8,
            "network": {
                "gidIndex": 3,
                "env": [{"name": "NCCL_CROSS_NIC", "value": "1"}],
            },
            "scheduling": {
                "nodeSelector": {"zone": "b"},
                "tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}],
            },
            "podTemplate": {
                "spec": {
                    **_trainer(env=[{"name": "HTTPS_PROXY", "value": ""}]),
                    "securityContext": {"supplementalGroups": [7]},
                    "imagePullSecrets": [{"name": "registry"}, {"name": "own"}],
                    "tolerations": [{"key": "spot", "operator": "Exists"}],
                }
            },
        },
        pod_defaults=_POD_DEFAULTS,
        like="pod-defaults",
    ),
    "network-rules": Variant({}, network=_NETWORK),
    "network-rules-with-restricted-egress": Variant(
        {},
        network={
            **_NETWORK,
            "egress": "restricted",
            "egressTo": [
                {"ipBlock": {"cidr": "10.20.0.0/16", "except": ["10.20.9.0/24"]}, "ports": [443]},
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "minio"}}},
            ],
        },
        like="network-rules",
    ),
    "network-rules-without-names": Variant(
        {}, network={"operator": _NETWORK["operator"], "egress": "restricted", "dns": []}
    ),
    "kueue": _elastic(queueName="team"),
    "kueue-required-topology": _elastic(
        queueName="team", requiredTopology="example.com/block", topology="example.com/rack"
    ),
    "kueue-topology": _elastic(queueName="team", topology="example.com/rack"),
    "topology": _elastic(topology="topology.kubernetes.io/zone"),
    "required-topology": _elastic(requiredTopology="example.com/block"),
    "both-topologies": _elastic(requiredTopology="example.com/block", topology="example.com/rack"),
    "gang-coscheduling": _elastic(gang="Coscheduling"),
    "gang-volcano": _elastic(gang="Volcano"),
    "gang-volcano-queue": _elastic(gang="Volcano", queueName="team"),
    "gang-volcano-priority": _elastic(gang="Volcano", priorityClassName="high"),
    "gang-native": _elastic(gang="Native"),
    "priority": Variant({"scheduling": {"priorityClassName": "high"}}),
    "node-selector": _on_gpus(
        scheduling={
            "nodeSelector": {
                "amd.com/gpu.device-id": "74a1",
                "amd.com/gpu.compute-memory-partition": "spx_nps1",
                "empty": "",
            }
        }
    ),
    "tolerations": Variant(
        {
            "scheduling": {
                "tolerations": [
                    {"key": "amd.com/gpu", "operator": "Exists"},
                    {"key": "team", "value": "vision", "effect": "NoSchedule"},
                    {
                        "key": "node.kubernetes.io/unreachable",
                        "operator": "Exists",
                        "effect": "NoExecute",
                        "tolerationSeconds": 30,
                    },
                    {"operator": "Exists", "effect": "PreferNoSchedule"},
                ]
            }
        }
    ),
    "template-metadata": Variant(
        {
            "podTemplate": {
                "metadata": {
                    "labels": {"team": "vision", "example.com/cost-centre": "42"},
                    "annotations": {"example.com/note": "two words, freely"},
                }
            }
        }
    ),
    "template-pull-secrets": _pod(imagePullSecrets=[{"name": "registry"}]),
    "template-groups": _pod(securityContext={"supplementalGroups": [44, 109]}),
    "template-service-account": _pod(serviceAccountName="site"),
    "template-runtime-class": _pod(runtimeClassName="site"),
    "template-scheduler": _pod(schedulerName="site"),
    "template-gate": _pod(schedulingGates=[{"name": "example.com/wait"}]),
    "template-grace": _pod(terminationGracePeriodSeconds=600),
    "template-tolerations": _pod(tolerations=[{"key": "spot", "operator": "Exists"}]),
    "template-spread": _pod(
        topologySpreadConstraints=[
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"fluxtrain.dev/job": "micro"}},
            }
        ]
    ),
    "template-affinity": _pod(
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "example.com/gpu", "operator": "Exists"}]}
                    ]
                }
            }
        }
    ),
    "template-dns": _pod(
        dnsConfig={"options": [{"name": "ndots", "value": "2"}]},
        hostAliases=[{"ip": "192.0.2.7", "hostnames": ["store.example.com"]}],
    ),
    "template-resources": _pod(
        **_trainer(resources={"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"cpu": "8"}})
    ),
    "template-env": _pod(
        **_trainer(
            env=[
                {"name": "HF_TOKEN", **_SECRET},
                {"name": "HOME", "value": "/site"},
                {"name": "USER", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            ],
            envFrom=[{"configMapRef": {"name": "site"}}],
        )
    ),
    "template-secret-volume": _pod(
        **_trainer(**_PLACE), volumes=[{"name": "site", "secret": {"secretName": "site"}}]
    ),
    "credentials": Variant({"credentials": ["hugging-face", "s3"]}),
    "credentials-and-template": Variant(
        {
            "credentials": ["hugging-face"],
            "podTemplate": {"spec": _trainer(envFrom=[{"configMapRef": {"name": "site"}}])},
        },
        like="credentials",
    ),
    "template-volume": _pod(
        **_trainer(**_PLACE),
        volumes=[{"name": "site", "persistentVolumeClaim": {"claimName": "site"}}],
    ),
    "template-our-volumes": _pod(
        volumes=[
            {"name": "shm", "emptyDir": {"sizeLimit": "64Gi"}},
            {"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}},
        ]
    ),
    "models-fetched": Variant(
        {
            "storage": {
                "models": {
                    "persistentVolumeClaim": {"claimName": "models"},
                    "fetch": "hf://black-forest-labs/FLUX.1-dev@main",
                }
            },
            "credentials": ["hugging-face"],
        }
    ),
    "template-init-container": _pod(
        initContainers=[
            {"name": "fetch", "image": "fetch:1", "args": ["/data"], "securityContext": _CAREFUL}
        ]
    ),
    "template-sidecar": _pod(
        containers=[
            {
                "name": "logs",
                "image": "logs:1",
                "command": ["tail", "-F", "/output/mlperf.log"],
                "ports": [{"containerPort": 8080}],
                "securityContext": _CAREFUL,
            }
        ]
    ),
    "template-careless-sidecar": Variant(
        {"podTemplate": {"spec": {"containers": [{"name": "logs", "image": "logs:1"}]}}},
        "baseline",
        "allowPrivilegeEscalation != false",
    ),
    "template-root": Variant(
        {"podTemplate": {"spec": {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}}},
        "baseline",
        "runAsNonRoot != true",
    ),
    "template-locked-memory": Variant(
        {
            "podTemplate": {
                "spec": _trainer(securityContext={"capabilities": {"add": ["IPC_LOCK"]}})
            }
        },
        "privileged",
        'must not include "IPC_LOCK" in securityContext.capabilities.add',
    ),
    "longest-name": Variant({}, name=LONGEST),
    "longest-name-in-a-gang": Variant(
        {
            "nodes": {"min": 2, "max": 4},
            "scheduling": {"gang": "Native", "queueName": LONGEST, "priorityClassName": "high"},
        },
        name=LONGEST,
        like="gang-native",
    ),
    "name-of-digits": Variant({}, name="2026-11"),
}
