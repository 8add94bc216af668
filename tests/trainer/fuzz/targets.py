"""What is fuzzed: each reader of files and messages from outside, with small valid inputs to begin from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save
from tests.trainer.bombs import tables, texts
from tests.trainer.data.formats.tar_files import TAR_FORMATS, tar
from tests.trainer.fuzz import answers, models, pictures
from tests.trainer.fuzz.target import Read, Target, texts_of
from tests.trainer.picture_cache.folders import file_of

from fluxtrain.contract.process import read_ranks
from fluxtrain.contract.resource.document import load_job
from fluxtrain.data import images as tar_images
from fluxtrain.data.formats import mlcommons
from fluxtrain.data.pictures import picture
from fluxtrain.data.pictures.folder import read_caption
from fluxtrain.mlperf.log_lines import read_lines
from fluxtrain.rendezvous.messages import Heartbeat, Reply
from fluxtrain.runtime.safetensors import read_header
from fluxtrain_operator.base.reports import MembersReport, Progress, read_termination_message


def _images() -> list[bytes]:
    kinds = (
        *(("RGB", "PNG"), ("P", "PNG"), ("RGBA", "WEBP"), ("RGB", "JPEG"), ("CMYK", "JPEG")),
        *(("P", "GIF"), ("RGB", "BMP"), ("RGB", "TIFF"), ("I;16", "PNG"), ("LA", "PNG")),
    )
    return [file_of(Image.new(mode, (9, 7)), kind) for mode, kind in kinds]


def _tars() -> list[bytes]:
    names = ("a.png", "a.txt", "a.json", "é" * 40 + ".txt")
    return [tar(*((name, b"12345") for name in names), form=form) for form in TAR_FORMATS]


def _made(*makes: Callable[[Path], Path]) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        with tempfile.TemporaryDirectory() as folder:
            return [make(Path(folder)).read_bytes() for make in makes]

    return seeds


def _parquet(folder: Path) -> Path:
    pq.write_table(pa.table(tables.columns()), folder / "a.parquet", write_page_checksum=False)
    return folder / "a.parquet"


def _images_stream(folder: Path) -> Path:
    table = pa.table({"png": pa.array([b"1", b"2"]), "txt": ["a", "b"], "__key__": ["a", "b"]})
    return tables.write_stream(folder, table)


def _tensors() -> list[bytes]:
    pair = {
        "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(1, 8),
        "transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(8, 1),
    }
    return [save(pair, {"lora_alpha": "1"}), save({"txt": torch.ones(2, 3)})]


def _cells() -> list[bytes]:
    return [
        tables.cell(2, 3),
        mlcommons.to_bytes(torch.ones(4)),
        mlcommons.to_bytes(torch.ones(2, 2).half()),
    ]


_JOB = """apiVersion: fluxtrain.dev/v1alpha1
kind: FluxTraining
metadata: {name: micro, labels: {a: b}}
spec:
  nodes: {min: 1, max: 2}
  run: {preset: dev-lora, seed: 1, optim: {learning_rate: 1e-4}, data: {image_size: 512}}
  podTemplate: {spec: {containers: [{name: trainer, env: [{name: A, value: !!str 1}]}]}}
"""
_PROGRESS = {
    **{"rank": 0, "phase": "train", "step": 3, "samples": 12, "trainLoss": 0.5, "mfu": 0.4},
    "lastStepTime": "2026-01-02T03:04:05Z",
    "secondsSinceStep": 1.5,
    "phaseSeconds": {"train": 3.0},
    "ranks": [{"rank": 0, "phase": "train", "step": 3, "secondsSinceProgress": 0.1}],
}
_BEAT = {"sequence": 1, "attempt": 1, "agent": "a", "node": "n", "world": ["a", "b"], "step": 2}
_KOHYA = 'pretrained_model_name_or_path = "flux"\n[network]\nnetwork_dim = 4\na.b.c = [1, 2]\n'
_SETS = '[general]\nresolution = 512\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\n'
_LOG = ':::MLLOG {"time_ms": 1, "key": "eval_accuracy", "value": 0.5, "metadata": {"a": 1}}\n'
_LISTING = '{"format": 1, "shards": [{"file": "a.safetensors", "samples": 2}], "provenance": {}}'


def _json_of(parse: Callable[[object], object]) -> Read:
    """Return what decodes JSON as the operator does, and gives it to ``parse``."""

    def read(path: Path) -> object:
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return None
        return parse(values)

    return read


def _log(path: Path) -> object:
    return [(line.key, line.samples, line.measured, line.fault) for line in read_lines(path)]


def _decode(path: Path) -> object:
    return tar_images.decode(path.read_bytes())


def _decode_picture(path: Path) -> object:
    content = path.read_bytes()
    return picture.picture_size(content), picture.decode(content, at_least=(2, 2))


def _message(model: type[Heartbeat] | type[Reply]) -> Read:
    return lambda path: model.model_validate_json(path.read_bytes())


@cache
def targets() -> dict[str, Target]:
    """Return all targets by name."""
    yaml, toml = texts_of(_JOB), texts_of(_KOHYA)
    return {
        "image": Target("a.png", _decode, _images, True),
        "picture": Target("a.png", _decode_picture, _images, True),
        "tar": Target("a.tar", texts.tar, _tars),
        "arrow": Target("a.arrow", tables.open_set, _made(tables.stream())),
        "arrow-images": Target("a.arrow", tables.open_images, _made(_images_stream)),
        "state": Target(
            "state.json", texts.saved, texts_of('{"_data_files": [{"filename": "a"}]}')
        ),
        "parquet": Target("a.parquet", tables.open_set, _made(_parquet)),
        "parquet-captions": Target(
            "metadata.parquet",
            tables.captions,
            _made(tables.metadata_parquet(lambda: pa.array(["a b", "c"]))),
        ),
        "jsonl": Target(
            "metadata.jsonl", tables.captions, texts_of('{"file_name": "a.png", "text": "b"}\n')
        ),
        "csv": Target("metadata.csv", tables.captions, texts_of('file_name,text\na.png,"b, c"\n')),
        "caption": Target("a.txt", read_caption, texts_of("a cat", "\ufeffa"), True),
        "npy": Target("a.npy", lambda path: mlcommons.to_tensor(path.read_bytes()), _cells, True),
        "safetensors": Target("a.safetensors", read_header, _tensors),
        "lora": Target("a.safetensors", tables.adapter, _tensors),
        "listing": Target("dataset.json", texts.listed, texts_of(_LISTING)),
        "yaml": Target("a.yaml", load_job, yaml),
        "options-yaml": Target("a.yaml", texts.options, yaml),
        "options-toml": Target("a.toml", texts.options, toml),
        "dataset-config": Target("a.toml", texts.dataset_config, texts_of(_SETS)),
        "prompts": Target("a.txt", texts.prompts, texts_of("# a\na cat --w 512 --d 1 --n no\n")),
        "mlperf-log": Target("a.log", _log, texts_of(_LOG)),
        "heartbeat": Target("a", _message(Heartbeat), texts_of(json.dumps(_BEAT)), True),
        "reply": Target("a", _message(Reply), texts_of('{"boot": "a", "world": ["b"]}'), True),
        "progress": Target("a", _json_of(Progress.from_json), texts_of(json.dumps(_PROGRESS))),
        "agents": Target("a", _json_of(Progress.from_agents), texts_of(json.dumps(_PROGRESS))),
        "members": Target(
            "a", _json_of(MembersReport.from_json), texts_of('{"agents": {"a": {}}}')
        ),
        "termination": Target(
            "a",
            lambda path: read_termination_message(path.read_text(errors="replace")),
            texts_of(json.dumps(_PROGRESS)),
        ),
        "stacks": Target(
            "a", lambda path: read_ranks(path.read_text(errors="replace")), texts_of('{"rank": 1}')
        ),
        **pictures.targets(),
        **models.targets(),
        **answers.targets(),
    }
