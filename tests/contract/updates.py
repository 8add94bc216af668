"""Allowed and forbidden updates of an existing job, for the API server and the models."""

from __future__ import annotations

from typing import Any

from tests.contract.bad_specs import MISSING, Manifest

LIVING: Manifest = {
    "apiVersion": "fluxtrain.dev/v1alpha1",
    "kind": "FluxTraining",
    "metadata": {"name": "living"},
    "spec": {
        "image": "registry.example.com/fluxtrain:1",
        "nodes": {"min": 2, "max": 4},
        "gpusPerNode": 8,
        "run": {
            "preset": "micro",
            "seed": 7,
            "initial_weights": "flux1.safetensors",
            "model": {"depth": 2},
            "data": {"source": "synthetic", "train": "train", "synthetic": {"classes": 8}},
            "encoders": {"latent_shift": 0.1},
            "flow": {"shift": 2.0},
            "optim": {"learning_rate": 1e-3, "beta1": 0.9},
            "schedule": {"steps": 100, "global_batch_size": 16, "decay": "cosine"},
            "precision": {"compute": "float32"},
            "sampling": {"guidance": 3.5, "num_steps": 8},
        },
        "storage": {
            "data": {"persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
            "output": {"emptyDir": {"sizeLimit": "1Gi"}},
        },
        "lifecycle": {"suspend": True},
        "scheduling": {"gang": "None", "queueName": "team"},
        "managedBy": "example.com/another",
    },
}
"""A job with a value in every section; suspended and of another operator, so that nothing starts."""

FORBIDDEN: list[tuple[str, Any]] = [
    ("spec.gpusPerNode", 4),
    ("spec.gpusPerNode", MISSING),  # the default, 0, is another value
    ("spec.gpuResource", "amd.com/cpx_nps4"),
    ("spec.managedBy", "fluxtrain.dev/operator"),
    ("spec.scheduling.gang", "Volcano"),
    ("spec.storage.data.persistentVolumeClaim.claimName", "other"),
    ("spec.storage.data.persistentVolumeClaim.readOnly", False),
    ("spec.storage.output.emptyDir.sizeLimit", "2Gi"),
    ("spec.storage.output.emptyDir.sizeLimit", MISSING),
    ("spec.storage.models.persistentVolumeClaim.claimName", "models"),
    ("spec.run.preset", "openmoji"),
    ("spec.run.task", "preprocess"),
    ("spec.run.seed", 8),
    ("spec.run.precision.fp8", "rowwise"),
    ("spec.run.seed", MISSING),
    ("spec.run.initial_weights", "other.safetensors"),
    ("spec.run.initial_weights", MISSING),
    ("spec.run.model.depth", 3),
    ("spec.run.model.depth_single_blocks", 2),  # was the preset's
    ("spec.run.model.axes_dim", [4, 4, 8]),
    ("spec.run.data.source", "encoded"),
    ("spec.run.data.image_size", 64),
    ("spec.run.data.synthetic.classes", 4),
    ("spec.run.encoders.latent_shift", 0.2),
    ("spec.run.encoders.text", "minilm"),
    ("spec.run.flow.shift", 3.0),
    ("spec.run.flow.timestep_sampling", "logit_normal"),
    ("spec.run.optim.learning_rate", 1e-4),
    ("spec.run.optim.beta1", 0.8),
    ("spec.run.schedule.global_batch_size", 32),
    ("spec.run.schedule.warmup_steps", 10),
    ("spec.run.schedule.decay", "constant"),
    ("spec.run.precision.compute", "bfloat16"),
    ("spec.run.sampling.guidance", 4.0),
    ("spec.run.adapter.rank", 8),
]
"""Fields of LIVING with another value, or without one: each would make another job."""

ALLOWED: list[tuple[str, Any]] = [
    ("spec.image", "registry.example.com/fluxtrain:2"),
    ("spec.nodes", {"min": 1, "max": 8}),
    ("spec.run.data.train", "elsewhere/train"),
    ("spec.run.data.num_workers", 2),
    ("spec.run.schedule.steps", 200),
    ("spec.run.parallel.micro_batch_size", 8),
    ("spec.run.parallel.dp_replicate", "per-node"),
    ("spec.run.evaluation.every_samples", 0),
    ("spec.run.checkpoint.keep", 5),
    ("spec.run.sampling.num_steps", 4),
    ("spec.run.logging.every_steps", 1),
    ("spec.restart.maxRestarts", 20),
    ("spec.lifecycle.suspend", False),
    ("spec.lifecycle.activeDeadlineSeconds", 3600),
    ("spec.scheduling.queueName", "other"),
    ("spec.scheduling.nodeSelector", {"zone": "a"}),
    ("spec.resources.requests.cpu", "4"),
    ("spec.resources.sharedMemory", "8Gi"),
    ("spec.network.env", [{"name": "NCCL_DEBUG", "value": "WARN"}]),
    ("spec.podTemplate.spec.priorityClassName", "high"),
]
"""Fields of LIVING that may change from one attempt to the next."""
