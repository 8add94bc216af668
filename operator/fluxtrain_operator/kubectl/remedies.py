"""What to do about each reason of a condition, or of a pod that does not run.

Reasons whose message says it already are left out.
"""

from __future__ import annotations

from string import Template

_REMEDIES = {
    # the API server refuses objects
    "PredecessorTerminating": (
        "Nothing needs to be done; `kubectl get pods -n $namespace -l fluxtrain.dev/job=$job` shows what "
        "is left of the earlier job."
    ),
    "PredecessorKept": (
        "Whoever set the finalizers must remove them: `kubectl patch KIND NAME -n $namespace --type=merge "
        """-p '{"metadata":{"finalizers":null}}'`."""
    ),
    "QuotaExceeded": "Raise the quota or free resources: `kubectl describe quota -n $namespace`.",
    "PodSecurity": (
        "Change what the message names, usually in spec.podTemplate, spec.storage or spec.network."
    ),
    # the job itself
    "InvalidSpec": "Correct the field; a job that has failed must be deleted and created again.",
    "NotPermitted": (
        "Leave the field out, and create the job again; the administrator sets the chart's value jobs."
    ),
    "WaitingForJobs": "It starts when those jobs are complete.",
    "CyclicDependency": "Take one of these jobs out of the spec.lifecycle.startAfter of the one before it.",
    "SchedulingGated": "Whoever set the gate must remove it; the operator never does.",
    "DeadlineExceeded": "Raise spec.lifecycle.activeDeadlineSeconds, and create the job again.",
    "RestartsExhausted": (
        "Fix the error, and create the job again; it resumes from its newest checkpoint. "
        "spec.restart.maxRestarts is the limit."
    ),
    # the program
    "InvalidJob": "A restart does not help: correct what the message names, and create the job again.",
    "Diverged": "Lower the learning rate or lengthen the warm-up, and create the job again.",
    "StorageError": "Make the output writable: is the volume full or read-only?",
    "OOMKilled": (
        "Raise the container's memory limit, or lower the micro batch size or the number of loader workers."
    ),
    "InitContainerFailed": (
        "Correct spec.podTemplate.spec.initContainers; with terminationMessagePolicy: FallbackToLogsOnError "
        "the message has the last line of the log."
    ),
    "StartError": (
        "If other pods run, check the node's devices and container runtime: `kubectl describe node`; "
        "otherwise check that spec.image contains fluxtrain."
    ),
    "ProgramError": "`kubectl fluxtrain logs $job -n $namespace` shows the log.",
    "NoProgress": (
        "The operator restarts it; `kubectl fluxtrain stacks $job -n $namespace` shows where ranks wait."
    ),
    "NoAnswer": (
        "No restart is counted for this. Check that network policies, a firewall or a service mesh let the "
        "operator reach the port of /progress."
    ),
    # nodes
    "NodeLost": "The operator replaces its pod; check the node: `kubectl describe node`.",
    "GroupWaits": (
        "Kueue frees the place once the node is back or removed (`kubectl delete node`); "
        "otherwise the job is queued again."
    ),
    "NodeNotReady": "The job trains on; check the node: `kubectl describe node`.",
    "DisruptionLimited": "A part of all pods is replaced per minute; the others follow.",
    "NodesUnknown": "Check the control plane and its network: it receives no heartbeats from most nodes.",
    "UnfitNode": (
        "The operator replaces the pod; the message tells whether the device or the link to other nodes is "
        "slow. If the node is as it should be, raise spec.run.preflight.factor."
    ),
    "UnhealthyGPU": "The operator replaces the pod; drain or repair the node.",
    "UnhealthyNode": "The operator replaces the pod; drain or repair the node.",
    "UnhealthyNodes": "Check who marks the nodes: most of the cluster's nodes are.",
    "UnhealthyGPUs": "Check the GPU exporter, which reports most GPU nodes as unhealthy.",
    "KeptByFinalizers": (
        "Whoever set the finalizers must remove them: `kubectl patch pod NAME -n $namespace --type=merge "
        """-p '{"metadata":{"finalizers":null}}'`."""
    ),
    "Degraded": "The job trains on fewer nodes until the others' pods run.",
    # pods
    "UnexpectedAdmissionError": (
        "The operator tries again, at most every five minutes; `kubectl describe node` and the device "
        "plugin's log show why the kubelet rejects the pod."
    ),
    "Unschedulable": "Free or add nodes that meet this, or lower spec.nodes.min.",
    "NotScheduled": "If this lasts, the scheduler that the pod names is not running.",
    "NoReport": "If this lasts, check the node: `kubectl describe node`.",
    "ErrImagePull": "Check spec.image and the pull secrets (spec.podTemplate.spec.imagePullSecrets).",
    "ImagePullBackOff": "Check spec.image and the pull secrets (spec.podTemplate.spec.imagePullSecrets).",
    "InvalidImageName": "Correct spec.image.",
    "Pulling": "Large images take minutes on a node that has not used them.",
    "CreateContainerConfigError": (
        "Create the secret or config map that the message names, or correct spec.podTemplate."
    ),
    "FailedMount": "Check that the volume, its claim or secret exists and can be mounted on that node.",
    "FailedAttachVolume": "Check that the volume can be attached there: is it in use on another node?",
    "CrashLoopBackOff": "`kubectl logs -n $namespace $pod --previous` shows why it ended.",
    "Terminating": "Check the node; if it is gone for good, delete its Node object.",
}
_REFUSED = "Follow the message of the API server or webhook; the operator tries again every minute."


def remedy(reason: str, job: str, namespace: str, pod: str = "") -> str:
    """Return what to do about ``reason``; empty if that is not known."""
    text = _REMEDIES.get(reason, _REFUSED if reason.endswith("Refused") else "")
    return Template(text).substitute(job=job, namespace=namespace, pod=pod)
