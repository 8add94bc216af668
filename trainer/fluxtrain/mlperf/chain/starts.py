"""What the record of a start of all ranks says: who trains what, from which state, and as whom."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fluxtrain import run_state
from fluxtrain.contract.launch import CHECKPOINTS_FOLDER, ENV_ATTEMPT, ENV_GENERATION, ENV_IMAGE
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.mlperf.chain.chain import Chain
from fluxtrain.mlperf.chain.folder import manifest_digest
from fluxtrain.mlperf.chain.record import CHECKPOINT, WEIGHTS
from fluxtrain.run_state import RunState

_PIECE_BYTES = 1 << 20
_SUFFIX = ".safetensors"


def start_facts(
    config: RunConfig,
    start: int,
    pods: Sequence[str],
    loaded: Mapping[str, object] | None,
    environment: Mapping[str, str],
) -> dict[str, object]:
    """Return the values of a start with number ``start``, whose ranks are in ``pods`` (uids).

    All of it is what the program says of itself: image and attempt are what the pod's environment has.
    """
    values = config.model_dump(mode="json")
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return {
        "start": start,
        "attempt": environment.get(ENV_ATTEMPT),
        "generation": environment.get(ENV_GENERATION),
        "image": environment.get(ENV_IMAGE),
        "pods": list(pods),
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "config": values,
        "loaded": None if loaded is None else dict(loaded),
    }


def loaded_state(output: Path, run: RunState, saved_step: int | None) -> dict[str, object] | None:
    """Return what ``run`` was loaded from, None at step 0: the checkpoint of its step, else memory."""
    if run.step == 0:
        return None
    return {
        "step": run.step,
        "manifest": _manifest(output, run.step) if run.step == saved_step else None,
    }


def checkpoint_saved(chain: Chain, output: Path, step: int) -> None:
    """Append the record of the complete checkpoint of ``step``."""
    chain.append(CHECKPOINT, durable=True, step=step, manifest=_manifest(output, step))


def _manifest(output: Path, step: int) -> str | None:
    try:
        return manifest_digest(run_state.folder_of(output / CHECKPOINTS_FOLDER, step))
    except OSError:  # removed by a newer start
        return None


def hash_weights(chain: Chain, weights: Path, stop: threading.Event) -> None:
    """Append the SHA-256 of each file of the initial ``weights``, unless ``stop`` is set meanwhile.

    For a thread of its own: the files were just loaded, so they are mostly in memory.
    """
    for path in _files(weights):
        try:
            digest = _sha256(path, stop)
            size = path.stat().st_size
        except OSError:
            digest, size = None, None
        if stop.is_set():
            return
        chain.append(WEIGHTS, file=path.name, bytes=size, sha256=digest)


def _files(weights: Path) -> Iterator[Path]:
    if weights.is_file():
        yield weights
    elif weights.is_dir():
        yield from sorted(weights.rglob(f"*{_SUFFIX}"))


def _sha256(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while not stop.is_set() and (piece := file.read(_PIECE_BYTES)):
            digest.update(piece)
    return digest.hexdigest()
