"""The trainer's image of the tests on a real cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

from cluster.nodes import images
from tests.end_to_end.stage import IMAGE
from tests.paths import ROOT

HERE = Path(__file__).parent
FILES = {
    "bin/fluxtrain": '#!/bin/sh\nexec /usr/bin/python3 -m fluxtrain.cli "$@"\n',
    "slow_steps-1.dist-info/entry_points.txt": "[torch.backends]\nslow = slow_steps:install\n",
}


def build(folder: Path) -> Path:
    """Return the archive of `stage.IMAGE`, built in the empty ``folder``."""
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "trainer" / "fluxtrain", folder / "fluxtrain", ignore=without_caches)
    shutil.copy(HERE / "slow_steps.py", folder)
    write(folder, FILES)
    dockerfile = HERE / "trainer.Dockerfile"
    return images.build(IMAGE, dockerfile, folder, {"BASE": images.BASE_IMAGE})


def write(folder: Path, files: dict[str, str]) -> None:
    """Write ``files``, texts by path, executable."""
    for path, text in files.items():
        (folder / path).parent.mkdir()
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
