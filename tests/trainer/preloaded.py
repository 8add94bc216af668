"""Imports all that ranks, commands and their test modules use, once, in the fork server."""

import gc
import tempfile
from pathlib import Path

import pytest  # noqa: F401
import torch
import transformers.models.clip.modeling_clip
import transformers.models.t5.modeling_t5  # noqa: F401

import fluxtrain.cli.run
import fluxtrain.launch.agent
import fluxtrain.launch.rank
import fluxtrain.mlperf.log
import fluxtrain.prepare.preprocess
import fluxtrain.prepare.task
import fluxtrain.sample.task
import fluxtrain.train.loop  # noqa: F401
from fluxtrain.report.curve import save_loss_curve

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder:  # fills matplotlib's caches of fonts and formulas
    points = [{"samples": n, "train_loss": 1.0 / n, "eval_loss": 1.5} for n in (1, 2)]
    save_loss_curve(Path(folder) / "loss.png", points, 1.0)
gc.collect()
gc.freeze()  # collections of the children would copy the memory that they share
