"""The main job in a short form: the example file itself, a hundred of its pictures, few and small steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from cluster import volumes
from cluster.kubectl import Manifest
from tests.end_to_end.stage import ROOT

from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.tar.dataset import TarImages
from fluxtrain.encode.patch import save_patch_autoencoder
from fluxtrain.prepare.openmoji.build import (
    _draw,
    _encode,
    _encode_empty,
    _svg_folder,
    _text_encoder,
)
from fluxtrain.prepare.openmoji.catalogue import read_catalogue
from fluxtrain.prepare.openmoji.fit_autoencoder import FitSettings, fit_patch_autoencoder

NUM_TRAIN, NUM_VALIDATION = 48, 16
STEPS = 30
SHORT = {
    "schedule": {"steps": STEPS, "global_batch_size": 16, "warmup_steps": 10},
    "parallel": {"micro_batch_size": 8},
    "evaluation": {"every_samples": 160, "batch_size": 16},
    "checkpoint": {"every_steps": 10},
    "sampling": {"every_steps": 15, "num_steps": 4, "num_prompts": 2},
    "logging": {"every_steps": 1},
}
"""What the short form has beside the file's own fields and its preset."""


def prepare(folder: Path) -> None:
    """Make below ``folder`` what `fluxtrain prepare openmoji` makes, of few pictures, in seconds."""
    config = resolve({"preset": "openmoji"})
    emoji = read_catalogue(_svg_folder())[: NUM_TRAIN + NUM_VALIDATION]
    parts = {"train": emoji[:NUM_TRAIN], "validation": emoji[NUM_TRAIN:]}
    images = folder / "images"
    _draw(images, _unheard, parts, config.data.image_size)
    drawn = TarImages(images / "train")
    pixels = torch.stack([drawn.image(index) for index in range(len(drawn))])
    autoencoder = folder / config.encoders.autoencoder
    autoencoder.parent.mkdir(parents=True)
    save_patch_autoencoder(autoencoder, fit_patch_autoencoder(pixels, FitSettings(steps=20)))
    text = _text_encoder(config)
    places = {"train": config.data.train, "validation": config.data.validation}
    for part, place in places.items():
        _encode(images / part, autoencoder, text, folder / place, _unheard)
    _encode_empty(text, folder / config.data.empty_encodings, _unheard)


def short_job() -> Manifest:
    """Return examples/openmoji.yaml on two nodes, short; the packages come from a volume."""
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
    subprocess.run(
        [
            *(sys.executable, "-m", "fluxtrain.cli", "run", str(folder / "job.json")),
            *("--data", str(demo), "--models", str(demo), "--output", str(output)),
            "--logging.metrics_port=0",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return output


def _merged(run: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    sections = {name: {**run.get(name, {}), **fields} for name, fields in more.items()}
    return {**run, **sections}


_unheard = partial(lambda done: None)
