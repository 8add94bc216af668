"""Opens a model with the adapters that are added to it: LoRA files, or runs and checkpoints of adapters."""

from __future__ import annotations

from pathlib import Path

from fluxtrain.adapter.file import AdapterFile, read_adapter
from fluxtrain.adapter.merge import MergedWeights
from fluxtrain.adapter.trained import read_checkpoint
from fluxtrain.adapter.training_files import run_metadata
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import DataError
from fluxtrain.run_state import DONE, latest, read_config, read_state
from fluxtrain.weights.reader import Weights, open_weights, require_complete


def open_adapter(source: Path) -> AdapterFile:
    """Return the adapter in ``source``: a LoRA file of any layout, a run or a checkpoint of adapters.

    Raises DataError if it is none of these.
    """
    if not source.is_dir():
        return read_adapter(source)
    adapter, config = read_checkpoint(source)
    step = read_state(latest(source / CHECKPOINTS_FOLDER) or source).step
    return AdapterFile(source, adapter, run_metadata(config, step))


def open_model(path: Path, models_root: Path) -> Weights:
    """Return the weights at ``path``; of a run or a checkpoint of adapters, those of its model with them.

    The model of adapters is where the run had it, below ``models_root`` if that is relative. Raises DataError
    if a file is missing or the layout is unknown.
    """
    checkpoint = checkpoint_of(path)
    config = read_config(checkpoint) if checkpoint else {}
    if config.get("adapter") is None:
        return open_weights(path)
    base = models_root / str(config.get("initial_weights"))
    if not base.exists():
        raise DataError(f"{path}: its adapters are for {base}, which is missing; see --models")
    return MergedWeights(open_weights(base), [(open_adapter(path), 1.0)])


def checkpoint_of(path: Path) -> Path | None:
    """Return the newest checkpoint of the run at ``path``, or ``path`` if it is one; else None."""
    return latest(path / CHECKPOINTS_FOLDER) or (path if (path / DONE).exists() else None)


def model_of(config: RunConfig, models_root: Path) -> Weights | None:
    """Return ``initial_weights`` with ``added_adapters``; None if the initialization is random.

    Raises DataError if a file is missing, damaged or of another model. Checksums of weights are not verified
    yet.
    """
    if config.initial_weights is None:
        return None
    weights = open_model(models_root / config.initial_weights, models_root)
    added = [
        (open_adapter(models_root / each.path), each.strength) for each in config.added_adapters
    ]
    if added:
        weights = MergedWeights(weights, added)
    require_complete(weights, config.model)
    return weights
