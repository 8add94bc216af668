"""A LoRA of a folder of pictures, killed at random moments: the same files to the last byte.

``KILLS=20 pytest -s tests/trainer/picture_cache/test_killed.py`` tries more moments.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from time import monotonic

import pytest
from benchmarks.reference_model import random_model
from tests.trainer import ranks
from tests.trainer.picture_cache.folders import config, write_pictures
from tests.trainer.tiny_model import save_flux

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig

KILLS, STEPS, PICTURES = int(os.environ.get("KILLS", "3")), 12, 9
LORA = {
    "initial_weights": "weights.safetensors",
    "adapter": {"rank": 4, "dropout": 0.1},
    "adapter_file": {"every_steps": 4},
    "schedule": {"steps": STEPS},
    "checkpoint": {"every_steps": 3, "memory_every_steps": 0},
}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory, models: Path) -> RunPaths:
    """Return roots with pictures, encoders and the weights of a random model."""
    root = tmp_path_factory.mktemp("roots")
    write_pictures(root / "data/pictures", PICTURES)
    save_flux(random_model(lora(root / "out").model), models)
    return RunPaths(root / "out", root / "data", models)


def lora(output: Path) -> RunConfig:
    """Return a run that keeps its encodings in ``output``."""
    return config(**LORA, data={"cache": str(output / "cache")})


def train(roots: RunPaths, output: Path, seconds: float | None = None) -> bool:
    """Train in ``output``; kill the process after ``seconds``. Return whether it ended by itself."""
    paths = RunPaths(output, roots.data, roots.models)
    (process,) = ranks.start(ranks.train_alone, lora(output), paths)
    process.join(seconds or 300)
    if seconds is not None:
        process.kill()
        process.join()
    assert process.exitcode in ((0,) if seconds is None else (0, -9)), ranks.output_of(paths)
    return process.exitcode == 0


def adapters(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (output / "adapters").glob("*.safetensors")}


@pytest.mark.proof
@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_same_files(roots: RunPaths, tmp_path: Path) -> None:
    train(roots, tmp_path / "first")  # the fork server imports everything
    begin = monotonic()
    train(roots, tmp_path / "whole")
    whole, expected = monotonic() - begin, adapters(tmp_path / "whole")
    assert sorted(expected) == [f"lora-{step:06d}.safetensors" for step in (4, 8)] + [
        "lora.safetensors"
    ]
    assert adapters(tmp_path / "first") == expected
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    killed = 0
    for number in range(KILLS):
        output = tmp_path / f"killed-{number}"
        after = moments.uniform(0.05, 0.98) * whole
        has_ended = train(roots, output, after)
        found = sorted(path.name for path in output.glob("checkpoints/step_*"))
        print(f"seed {seed}: killed after {after:.2f} of {whole:.2f} s, checkpoints {found}")
        killed += not has_ended
        train(roots, output)
        assert adapters(output) == expected
    assert killed
