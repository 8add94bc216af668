"""The demo's data: OpenMoji's pictures and their names, an autoencoder fitted to them, and the encodings.

    data/openmoji/images/{train,validation}/*.tar     pictures and captions, with ATTRIBUTION.txt
    models/openmoji/autoencoder.safetensors           the patch autoencoder
    data/openmoji/{train,validation}/                 what training reads
    data/openmoji/empty.safetensors                   the empty prompt's encodings

The pictures are OpenMoji's (https://openmoji.org), CC BY-SA 4.0; so is what is derived from them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from fluxtrain.contract.config import RunConfig
from fluxtrain.contract.resolve import resolve
from fluxtrain.data.encoded import EncodedWriter, Sample, write_empty_text
from fluxtrain.data.tars import ImageDataset, TarWriter
from fluxtrain.encode.patch import load_patch_autoencoder, save_patch_autoencoder
from fluxtrain.encode.text import TextEncoder, load_text_encoder
from fluxtrain.errors import DataError
from fluxtrain.prepare.catalogue import Emoji, read_catalogue, split
from fluxtrain.prepare.fit import FitSettings, fit, to_images
from fluxtrain.prepare.stages import Advance, Settings, run_stage

PARTS = ("train", "validation")
NUM_VALIDATION_BASES = 192
NUM_SKIN_TONES = 2
"""Most toned variants of one emoji; all five would make half of the pictures near-duplicates."""
NUM_TIMESTEPS = 8
_BATCH = 128
