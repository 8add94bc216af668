"""The faults, in the order in which they are done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.faults import encoded_data
from tests.faults.fault import CRASH_STEPS, Fault, Limits
from tests.faults.injections import (
    control_plane,
    machines,
    neighbours,
    network,
    operators,
    pods,
    processes,
    storage,
)
from tests.faults.target import NUM_NODES, RUN

CRASH = Limits(lost_steps=CRASH_STEPS, pause_seconds=90)
PROCESS_CRASH = Limits(lost_steps=CRASH_STEPS, pause_seconds=90, charged=1)
"""torchrun starts the processes again; that they failed is counted as the program's error."""
POD_CRASH = Limits(lost_steps=CRASH_STEPS, pause_seconds=90, charged=1)
"""The pod is replaced; that its program failed is counted."""
STOPPED = Limits(pause_seconds=90)
"""Ranks that are asked to stop save a checkpoint first."""
HANG = Limits(lost_steps=CRASH_STEPS, pause_seconds=150, charged=1)
"""Found by the watchdog, which cannot tell the program's fault from the machine's."""
UNNOTICED = Limits()
SAME: dict[str, Any] = {}
"""As the shared job: for faults that the container would remember."""
SNAPSHOT_STEPS = 5
FIXED_SIZE: dict[str, Any] = {
    "nodes": {"min": NUM_NODES, "max": NUM_NODES},
    "run": {**RUN, "checkpoint": {"every_steps": 0, "memory_every_steps": SNAPSHOT_STEPS}},
}
ONE_NODE: dict[str, Any] = {"nodes": {"min": 1, "max": 1}}
GPUS: dict[str, Any] = {
    "nodes": {"min": 1, "max": NUM_NODES},
    "gpusPerNode": 1,
    "resources": {"requests": {"cpu": "0", "memory": "0"}},  # the machine has two cores
}

FAULTS = [
    Fault("SIGKILL of a rank", processes.rank_killed, PROCESS_CRASH),
    Fault("SIGKILL of an agent, process 1 of a container", processes.agent_killed, CRASH),
    Fault("`kubectl delete pod` of rank 0's pod", pods.pod_deleted, STOPPED),
    Fault("a pod is evicted by the Eviction API", pods.evicted, STOPPED),
    Fault("the rendezvous pod is deleted", pods.rendezvous_deleted, UNNOTICED),
    Fault("the rendezvous pod gets no packets", network.rendezvous_cut, UNNOTICED),
    Fault("a node is cut off and reconnected", network.node_cut, CRASH, spread=True),
    Fault(
        "the rendezvous pod's node is cut off and reconnected",
        network.rendezvous_node_cut,
        CRASH,
        spread=True,
    ),
    Fault("no name resolves for 20 s", network.dns_lost, UNNOTICED),
    Fault(
        "a node loses power", machines.power_off, replace(CRASH, replaced_seconds=20), spread=True
    ),
    Fault("a kubelet is down until its node is not ready", machines.kubelet_stopped, UNNOTICED),
    Fault("containerd is down until its node is not ready", machines.containerd_stopped, UNNOTICED),
    Fault("no kubelet sends heartbeats for 2 min", machines.all_unknown, UNNOTICED),
    Fault("the API server is down for 10 s", control_plane.api_server_restarted, UNNOTICED),
    Fault("etcd is down for 10 s", control_plane.etcd_restarted, UNNOTICED),
    Fault("the only operator is killed, then a pod deleted", operators.operator_killed, STOPPED),
    Fault(
        "the leader is stopped, a pod deleted, the leader continued",
        operators.leader_frozen,
        STOPPED,
    ),
    Fault(
        "the operator is rolled back, upgraded and rolled back; a pod is lost",
        operators.operator_upgraded,
        STOPPED,
    ),
    Fault("a pod is deleted while a quota forbids a new one", control_plane.quota_shrunk, STOPPED),
    Fault("`kubectl scale` to 2, 5 and 3 pods", control_plane.scaled, STOPPED),
    Fault(
        "the job is suspended until all pods are gone",
        control_plane.suspended,
        Limits(pause_seconds=60),
    ),
    Fault(
        "each fsync takes 2 s during three checkpoints", storage.slow_disk, Limits(pause_seconds=30)
    ),
    Fault(
        "the output's file system is full until the job reports it",
        storage.disk_full,
        Limits(CRASH_STEPS, pause_seconds=60, charged=1),
    ),
    Fault("a pod's wall clock is set an hour ahead, and back", storage.clock_stepped, UNNOTICED),
    Fault("a node is drained and uncordoned", neighbours.drained, STOPPED, spread=True),
    Fault(
        "a node has a NoExecute taint until its pod is replaced",
        neighbours.tainted,
        STOPPED,
        spread=True,
    ),
    Fault(
        "a pod is deleted while a quota demands missing limits",
        control_plane.limits_demanded,
        STOPPED,
    ),
    Fault(
        "the rendezvous pod is deleted; its image is missing for 40 steps",
        neighbours.rendezvous_image_missing,
        UNNOTICED,
    ),
    Fault(
        "a policy engine changes recommended labels of all pods", neighbours.relabelled, UNNOTICED
    ),
    Fault("a second release watches the same namespace", neighbours.second_release, UNNOTICED),
    Fault("the operator has no rights while a pod is deleted", neighbours.role_lost, STOPPED),
    Fault("SIGSTOP of a rank", processes.rank_frozen, HANG),
    Fault("packets between two ranks are dropped", network.collective_hangs, HANG),
    Fault("a rank is killed for memory", processes.rank_out_of_memory, PROCESS_CRASH, own_job=SAME),
    Fault(
        "process 1 of a container is killed for memory",
        processes.container_out_of_memory,
        POD_CRASH,
        own_job=SAME,
    ),
    Fault(
        "the same in a job of three fixed nodes, without checkpoints",
        processes.container_out_of_memory,
        Limits(lost_steps=2 * SNAPSHOT_STEPS, pause_seconds=90, charged=1),
        own_job=FIXED_SIZE,
        other_name="container-out-of-memory-fixed-size",
    ),
    Fault(
        "a pod exceeds the sizeLimit of its emptyDir",
        neighbours.limit_exceeded,
        POD_CRASH,
        own_job=neighbours.with_trainer(),
    ),
    Fault(
        "the liveness probe of a pod fails",
        neighbours.probe_failed,
        POD_CRASH,
        own_job=neighbours.with_trainer(livenessProbe=neighbours.UNWELL_WITH_FILE),
    ),
    Fault(
        "a pod of higher priority takes all GPUs of a node",
        neighbours.preempted,
        STOPPED,
        own_job=GPUS,
    ),
    Fault(
        "the CRD and all jobs are deleted and applied again",
        neighbours.crd_recreated,
        STOPPED,
        own_job=SAME,
    ),
    Fault(
        "all nodes are labelled as having unhealthy GPUs",
        machines.gpus_unhealthy,
        UNNOTICED,
        own_job=GPUS,
    ),
    Fault(
        "the newest checkpoint is cut in half, and the job resumed",
        storage.checkpoint_truncated,
        Limits(CRASH_STEPS, pause_seconds=90),
        own_job=ONE_NODE,
    ),
    Fault(
        "a sample of a shard is damaged",
        storage.shard_corrupt,
        UNNOTICED,
        own_job={**ONE_NODE, "run": encoded_data.ENCODED_RUN},
        prepare=encoded_data.write,
    ),
    Fault("SIGSTOP of the only rank of a job", processes.only_rank_frozen, HANG, own_job=ONE_NODE),
    Fault(
        "a gradient is not finite; the job is created again",
        storage.nan_gradient,
        Limits(CRASH_STEPS, pause_seconds=90),
        own_job=ONE_NODE,
    ),
]
NOTES = """\
## How some faults are made

- The nodes are network namespaces of one machine and share its clock and disks. `node-cut`, `power-off`,
  `drained` and `tainted` use a node without the rendezvous pod.
- `clock-stepped` changes the wall clock that one pod's Python processes read, `slow-disk` their fsync calls.
- `gpus-unhealthy` sets the labels of AMD's metrics exporter. The GPUs are simulated.
- A pause is mostly the start of three processes that import torch on shared cores.
"""
