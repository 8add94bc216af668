"""``init_datasets.sh`` of a package: the commands that prepare the data sets of its runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.presets import MLPERF_TRAINING_SET, MLPERF_VALIDATION_SET
from fluxtrain.mlperf.evidence import Run

_HEAD = """\
#!/usr/bin/env bash
# Once: the data sets of the runs. It can be stopped and started again.
#   DATAROOT, MODELROOT   folders of the data sets, and of weights
{more}set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
python=${{ENVIRONMENT:-$here/environment}}/bin/python
[ -x "$python" ] || python=${{PYTHON:-python3}}
export PYTHONPATH=$here
prepare() {{ "$python" -m fluxtrain.cli prepare "$@"; }}

"""
_MANIFESTS = {
    "train": "flux-1-cc12m-preprocessed",
    "validation": "flux-1-coco-preprocessed",
    "empty_encodings": "flux-1-empty-encodings",
}
"""Names of MLCommons' manifests, by the fields of ``data``."""


def init_datasets(run: Run, config: RunConfig) -> str:
    """Return the script for ``run``: MLCommons' sets if it has their sizes, else what its source needs."""
    is_benchmark = (run.number("train_samples"), run.number("eval_samples")) == (
        MLPERF_TRAINING_SET,
        MLPERF_VALIDATION_SET,
    )
    if config.data.source == "synthetic":
        lines = ['echo "init_datasets: the runs generate their samples; nothing is needed"']
        return _script("", lines)
    if config.preset == "openmoji":
        return _script("", ['prepare openmoji --data "$DATAROOT" --models "$MODELROOT"'])
    if is_benchmark and config.data.source == "encoded":
        text = "#   METADATA              folder or URL of MLCommons' manifests\n"
        return _script(text, list(_downloads(config)))
    if is_benchmark and config.preset == "mlperf-schnell-raw":
        text = "#   COCO                  folder or URL of COCO's two archives of 2014\n"
        text += "#   CC12M, FLUX           the raw training set; the encoders, as published\n"
        return _script(text, list(_from_raw(config)))
    return _script("", list(_own(config)))


def _downloads(config: RunConfig) -> Iterator[str]:
    """Yield the downloads of MLCommons' sets; each file is verified by its MD5."""
    yield "METADATA=${METADATA:-https://training.mlcommons-storage.org/metadata}"
    for field, name in _MANIFESTS.items():
        folder = _at("DATAROOT", getattr(config.data, field))
        yield f'prepare download --manifest "$METADATA/{name}.uri" --output {folder}'


def _from_raw(config: RunConfig) -> Iterator[str]:
    """Yield what prepares the raw sets and the encoders; each verifies what it reads."""
    yield "CC12M=${CC12M:-hf://datasets/pixparse/cc12m-wds}"
    yield "FLUX=${FLUX:-hf://black-forest-labs/FLUX.1-schnell}"
    yield f'prepare cc12m --input "$CC12M" --output {_at("DATAROOT", config.data.train)}'
    assert config.data.validation is not None, "a benchmark evaluates"
    yield f'prepare coco --archives "$COCO" --output {_at("DATAROOT", config.data.validation)}'
    yield 'prepare encoders --from "$FLUX" --output "$MODELROOT"'


def _own(config: RunConfig) -> Iterator[str]:
    """Yield commands that look for data sets which only the submitter can give."""
    yield "missing=0"
    fields = ["train" if config.data.images is None else "images"]
    if config.data.validation is not None:
        fields.append("validation")
    if config.data.source == "encoded" and config.data.images is None:
        fields.append("empty_encodings")
    for field in fields:
        path = _at("DATAROOT", getattr(config.data, field))
        text = f'echo "init_datasets: data.{field} is missing: "{path} >&2; missing=1;'
        yield f"[ -e {path} ] || {{ {text} }}"
    yield 'exit "$missing"'


def _at(root: str, path: str) -> str:
    """Return ``path`` as a word of the shell, relative ones below the folder in the variable ``root``."""
    quoted = shlex.quote(path)
    return quoted if PurePosixPath(path).is_absolute() else f'"${root}"/{quoted}'


def _script(more: str, lines: list[str]) -> str:
    return _HEAD.format(more=more) + "\n".join(lines) + "\n"
