"""The main example job in a short form: few images, few and small steps."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from cluster.kubectl import Manifest
from cluster.nodes import volumes
from tests.paths import ROOT
from tests.trainer.commands import fluxtrain

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.images import TarImages
from fluxtrain.encode.codec import save_patch_autoencoder
from fluxtrain.prepare.figures import choose
from fluxtrain.prepare.fit_autoencoder import FitSettings, fit_patch_autoencoder
from fluxtrain.prepare.openmoji import _draw, _encode, _encode_empty, _text_encoder

NUM_ALL, NUM_TRAIN, NUM_VALIDATION = 200, 48, 16
STEPS = 30
SHORT = {
    "schedule": {"steps": STEPS, "global_batch_size": 16, "warmup_steps": 10},
    "parallel": {"micro_batch_size": 8},
    "evaluation": {"every_samples": 160, "batch_size": 16},
    "checkpoint": {"every_steps": 10},
    "sampling": {"every_steps": 15, "num_steps": 4, "num_prompts": 2},
    "logging": {"every_steps": 1},
}
"""Changes to the example's fields."""


def prepare(folder: Path) -> None:
    """Write the output of `fluxtrain prepare openmoji` to ``folder``, of few images."""
    torch.set_num_threads(1)  # more would wait for each other while pods use the cores
    config = resolve({"preset": "openmoji"})
    chosen = choose(NUM_ALL, NUM_VALIDATION)
    parts = {"train": chosen["train"][:NUM_TRAIN], "validation": chosen["validation"]}
    images = folder / "images"
    _draw(images, _no_progress, parts, config.data.image_size)
    dataset = TarImages(images / "train")
    pixels = torch.stack([dataset.image(index) for index in range(len(dataset))])
    autoencoder = folder / config.encoders.autoencoder
    autoencoder.parent.mkdir(parents=True)
    save_patch_autoencoder(
        autoencoder, fit_patch_autoencoder(pixels, FitSettings(steps=4, decoder_steps=4))
    )
    text = _text_encoder(config)
    folders = {"train": config.data.train, "validation": config.data.validation}
    for part, name in folders.items():
        _encode(images / part, autoencoder, text, folder / name, _no_progress)
    _encode_empty(text, folder / config.data.empty_encodings, _no_progress)


def short_job() -> Manifest:
    """Return examples/openmoji.yaml, short, on two nodes; the packages come from a volume."""
    job: Manifest = yaml.safe_load((ROOT / "examples" / "openmoji.yaml").read_text())
    mount = {"name": "packages", "mountPath": volumes.SITE_PACKAGES, "readOnly": True}
    claim = {"name": "packages", "persistentVolumeClaim": {"claimName": "packages"}}
    threads = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    container = {"name": "trainer", "volumeMounts": [mount], "env": threads}
    demo = {"persistentVolumeClaim": {"claimName": "demo", "readOnly": True}}
    job["spec"] |= {
        "nodes": {"min": 2, "max": 2},
        "run": _merged(job["spec"]["run"], SHORT),
        "storage": {
            "data": demo,
            "models": demo,
            "output": {"persistentVolumeClaim": {"claimName": "output"}},
        },
        "podTemplate": {"spec": {"volumes": [claim], "containers": [container]}},
    }
    return job


def laptop(folder: Path) -> Path:
    """Run the same file on this machine, with the data in ``folder/demo``; return its output."""
    (folder / "job.json").write_text(json.dumps(short_job()))
    output, demo = folder / "laptop", folder / "demo"
    folders = ("--data", str(demo), "--models", str(demo), "--output", str(output))
    done = fluxtrain("run", str(folder / "job.json"), *folders, "--logging.metrics_port=0")
    assert done.returncode == 0, done.stderr
    return output


def _merged(run: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    sections = {name: {**run.get(name, {}), **fields} for name, fields in more.items()}
    return {**run, **sections}


_no_progress = partial(lambda done: None)
