"""Whether the weights that adapters change are still those that the run began with.

A checkpoint of adapters has no weights of the model, nor of CLIP. Its run keeps a digest of them in
``base.json``: of names, shapes and the first bytes of each tensor, or of the checksums of one of our
checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fluxtrain.contract.launch import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.distributed import World
from fluxtrain.encode.fingerprint import clip_digest
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.files import atomic_write
from fluxtrain.weights.reader import digest_of, initial_weights

FILE = "base.json"
_DIGEST, _CLIP = "sha256", "clip_sha256"
_OTHERS = "has other weights than when the run began; restore them, or use another --output for another run"


def settle_base(config: RunConfig, paths: RunPaths, world: World, is_new: bool) -> None:
    """Keep which weights the adapters of a run change; ConfigError if one that goes on has others."""
    if not is_new:
        return require_same_base(config, paths.models, paths.output)
    weights = initial_weights(config, paths.models) if config.adapter else None
    if weights is not None and world.is_main:
        content = {"weights": config.initial_weights, _DIGEST: digest_of(weights)}
        if config.trains_clip:
            content[_CLIP] = clip_digest(config.encoders, paths.models)
        with atomic_write(paths.output / FILE) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n")
    return None


def require_same_base(config: RunConfig, models_root: Path, output: Path) -> None:
    """Raise ConfigError if the run in ``output`` began with other weights, of the model or of CLIP.

    DataError if what it keeps of them is damaged. An earlier version kept nothing of CLIP, or of both.
    """
    path = output / FILE
    if config.adapter is None or not path.exists():
        return
    weights = initial_weights(config, models_root)
    before, clip = _read(path)
    if weights is not None and digest_of(weights) != before:
        raise ConfigError("spec.run.initial_weights", config.initial_weights, _OTHERS)
    if config.trains_clip and clip not in (None, clip_digest(config.encoders, models_root)):
        raise ConfigError("spec.run.encoders.clip", config.encoders.clip, _OTHERS)


def require_same_clip(config: RunConfig, models_root: Path, adapters: Iterable[Path]) -> None:
    """Raise ConfigError if the CLIP of ``config`` is another one than that of a run among ``adapters``.

    These are runs, checkpoints and LoRA files, which keep nothing of CLIP. DataError if what a run keeps is
    damaged.
    """
    for path in filter(Path.is_dir, adapters):
        run = path if (path / FILE).exists() else path.parent.parent  # of a checkpoint
        clip = _read(run / FILE)[1] if (run / FILE).exists() else None
        if clip not in (None, clip_digest(config.encoders, models_root)):
            text = f"has other weights than the one whose adapters the run {run} trained"
            raise ConfigError("spec.run.encoders.clip", config.encoders.clip, text)


def _read(path: Path) -> tuple[str, str | None]:
    """Return the digests of the model and of CLIP in ``path``; DataError if it is damaged."""
    try:
        content = json.loads(path.read_text())
        return content[_DIGEST], content.get(_CLIP)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        text = "is damaged; remove it if initial_weights are those that the run began with"
        raise DataError(f"{path}: {text}") from None
