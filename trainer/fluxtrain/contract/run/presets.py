"""Presets: named RunConfigs, given by the fields that differ from the defaults."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

MLPERF_EVALUATION_SAMPLES = 262_144
"""Training samples between two evaluations, in MLPerf's benchmark flux1."""
MLPERF_TARGET_LOSS = 0.586
"""Evaluation loss that completes a run of MLPerf's benchmark flux1."""
MLPERF_TRAINING_SET = 1_099_776
"""Training samples of MLPerf's benchmark flux1."""
MLPERF_VALIDATION_SET = 29_696
"""Validation samples of MLPerf's benchmark flux1."""
FLOAT32_EPS = 2.0**-23
"""float32's smallest relative difference, which MLPerf's reference adds in the norms of queries and keys."""

_ENCODED: Values = {
    "train": "cc12m_preprocessed",
    "validation": "coco_preprocessed",
    "empty_encodings": "empty_encodings",
}
_DEV: Values = {
    "model": {"guidance_embed": True},
    "data": {"latent_size": 128, "image_size": 1024, "text_length": 512, "validation": None},
    "schedule": {"steps": 2000, "global_batch_size": 8, "warmup_steps": 100},
    "evaluation": {"every_samples": 0},
    "sampling": {"num_steps": 28, "time_shift": "dev", "cfg_scale": 1.0},
}
_LORA: Values = {
    "adapter": {"kind": "lora", "rank": 16, "alpha": 16.0},
    "flow": {"timestep_sampling": "sigmoid", "guidance": 1.0},
    "optim": {"learning_rate": 1e-4, "weight_decay": 0.01},
    "checkpoint": {"every_steps": 250},
}
_CLOSED_DATA: Values = {"order": "sequential", "max_bad_fraction": 0.0}
_SCHNELL: Values = {
    "seed": "random",
    "model": {"qk_norm_eps": FLOAT32_EPS},
    "flow": {"reference_rounding": True},
    "logging": {"mlperf": {"division": "closed"}},
    "sampling": {"num_steps": 4, "cfg_scale": 1.0},
    "optim": {"learning_rate": 2e-4},
    "schedule": {"steps": 30_000, "global_batch_size": 512, "warmup_steps": 1600},
    "parallel": {"micro_batch_size": 32},
    "evaluation": {"target_loss": MLPERF_TARGET_LOSS},
}

PRESETS: dict[str, Values] = {
    "mlperf-schnell": {**_SCHNELL, "data": {**_ENCODED, **_CLOSED_DATA}},
    "mlperf-schnell-raw": {
        **_SCHNELL,
        "data": {
            **_CLOSED_DATA,
            "source": "images",
            "train": "cc12m_disk",
            "validation": "coco",
        },
        "preprocess": _ENCODED,
    },
    "dev-finetune": {
        **_DEV,
        "initial_weights": "flux1-dev.safetensors",
        "flow": {"guidance": 1.0},
        "optim": {"learning_rate": 1e-5, "weight_decay": 0.01},
    },
    "dev-lora": {**_DEV, **_LORA, "initial_weights": "flux1-dev.safetensors"},
    "schnell-lora": {
        **_DEV,
        **_LORA,
        "model": {"guidance_embed": False},
        "initial_weights": "flux1-schnell.safetensors",
        "data": {**_DEV["data"], "text_length": 256},
        "sampling": {"num_steps": 4, "cfg_scale": 1.0},
    },
    # AMD's FluxBenchmark: FLUX.1 dev, all weights trained, encodings at hand, nothing recomputed
    "benchmark": {
        "task": "benchmark",
        "model": {"guidance_embed": True},
        "data": {
            "source": "synthetic",
            "image_size": 512,
            "latent_size": 64,
            "text_length": 512,
            "num_workers": 1,
        },
        "parallel": {"micro_batch_size": 8},
        "evaluation": {"every_samples": 0},
        "logging": {"mlperf": {"status": "research"}},
    },
    "openmoji": {
        "model": {
            "hidden_size": 128,
            "num_heads": 4,
            "depth": 2,
            "depth_single_blocks": 4,
            "axes_dim": (8, 12, 12),
            "vec_in_dim": 384,
            "context_in_dim": 384,
        },
        "data": {
            "train": "openmoji/train",
            "validation": "openmoji/validation",
            "empty_encodings": "openmoji/empty.safetensors",
            "image_size": 64,
            "latent_size": 8,
            "text_length": 12,
            "num_workers": 1,
        },
        "encoders": {
            "text": "minilm",
            "autoencoder": "openmoji/autoencoder.safetensors",
            "autoencoder_kind": "patch",
            "latent_shift": 0.0,
            "latent_scale": 1.0,
            "precision": "float32",
        },
        "optim": {"learning_rate": 6e-3},
        "schedule": {
            "steps": 5000,
            "global_batch_size": 32,
            "warmup_steps": 50,
            "decay": "cosine",
            "decay_fraction": 0.5,
        },
        "parallel": {"micro_batch_size": 32, "compile": False},  # it would take longer than the run
        "precision": {"compute": "float32"},
        "evaluation": {"every_samples": 8192, "batch_size": 64, "at_start": True, "at_end": True},
        "checkpoint": {"every_steps": 200},
        "sampling": {"every_steps": 500, "at_end": True},
        "logging": {"every_steps": 20, "mlperf": {"status": "research"}},
    },
    "micro": {
        "model": {
            "in_channels": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "depth": 1,
            "depth_single_blocks": 1,
            "axes_dim": (4, 6, 6),
            "vec_in_dim": 16,
            "context_in_dim": 16,
        },
        "data": {
            "source": "synthetic",
            "image_size": 32,
            "latent_size": 4,
            "text_length": 4,
            "num_workers": 0,
        },
        "encoders": {"latent_shift": 0.0, "latent_scale": 1.0},
        "optim": {"learning_rate": 1e-2},
        "schedule": {"steps": 100, "global_batch_size": 16, "warmup_steps": 5},
        "parallel": {"micro_batch_size": 16, "compile": False},
        "precision": {"compute": "float32"},
        "evaluation": {"every_samples": 512, "batch_size": 64, "at_end": True},
        "checkpoint": {"every_steps": 25},
    },
}
