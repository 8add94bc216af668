"""Encoded data sets: exact round trips; unreadable samples have weight 0; malformed files are refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.small_runs import ENCODED_RUN, merge_all, write_encoded
from torch import Tensor

from fluxtrain.contract.process import RunPaths
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.contract.run.resolve import resolve
from fluxtrain.data.dataset import Batch, Encodings
from fluxtrain.data.shard_dataset import ShardDataset
from fluxtrain.data.shards import Sample, ShardWriter, save_aligned
from fluxtrain.data.sources import open_sources
from fluxtrain.errors import ConfigError, DataError
from fluxtrain.parallel.distributed import World
from fluxtrain.runtime.draws import Draw
from fluxtrain.runtime.files import OpenFiles
from fluxtrain.runtime.safetensors import read_header
from fluxtrain.train.sources import index_digests, shared_sources

SHAPES = {"txt": (3, 5), "vec": (6,), "mean": (4, 2, 2), "logvar": (4, 2, 2)}
EMPTY = (torch.full((3, 5), -1.0), torch.full((6,), -2.0))


def sample(i: int, **replaced: Tensor) -> Sample:
    rng = torch.Generator().manual_seed(i)
    drawn = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
    return Sample(f"key-{i}", f"Prompt {i} ☃", **{**drawn, **replaced}, timestep=7 - i % 8)


def write(folder: Path, count: int = 7, dtype: torch.dtype = torch.float32) -> Path:
    with ShardWriter(folder, shard_size=3, dtype=dtype) as writer:
        writer.add_all(sample(i) for i in range(count))
    return folder


def read(
    dataset: ShardDataset, indices: list[int], skip: bool = False
) -> tuple[Encodings, list[Any]]:
    out = Encodings.empty(len(indices), dataset.shape)
    skips = np.full(len(indices), skip)
    return out, dataset.read(np.array(indices), out, skips)


@pytest.fixture
def dataset(tmp_path: Path) -> ShardDataset:
    return ShardDataset(write(tmp_path))


def batch(dataset: ShardDataset, indices: list[int], dropped: tuple[int, ...] = ()) -> Batch:
    noise = np.zeros(dataset.shape.latent, dtype=np.float32)
    chosen = [Draw(0.5, index in dropped, noise, noise, key=0) for index in indices]
    return dataset.batch(np.array(indices), chosen, EMPTY)


def overwrite(dataset: ShardDataset, index: int, field: str, content: bytes) -> None:
    """Put ``content`` where ``field`` of sample ``index`` starts."""
    number, record = dataset._place(index)
    shard = dataset._shards[number]
    span = shard.spans[field]
    with shard.path.open("r+b") as file:
        file.seek(span.offset + record * span.row_bytes)
        file.write(content)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_samples_are_read_back_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    dataset = ShardDataset(write(tmp_path, dtype=dtype), verify=True)
    order = [6, 0, 3, 2, 5, 1, 4, 4]
    out, faults = read(dataset, order)
    assert faults == [None] * len(order)
    for row, index in enumerate(order):
        for name in SHAPES:
            expected = getattr(sample(index), name).to(dtype)
            assert torch.equal(getattr(out, name)[row], expected)
    assert [dataset.caption(i) for i in range(7)] == [f"Prompt {i} ☃" for i in range(7)]
    assert [dataset.key(i) for i in (0, 6)] == ["key-0", "key-6"]
    assert dataset.timesteps(np.array(order)).tolist() == [7 - i % 8 for i in order]


def test_without_stored_timesteps_the_index_gives_them(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        for i in range(10):
            one = sample(i)
            one.timestep = None
            writer.add(one)
    steps = ShardDataset(tmp_path).timesteps(np.arange(10))
    assert steps.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]


def test_each_shard_has_its_own_timesteps_or_none(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, shard_size=2) as writer:
        for i in range(6):
            one = sample(i)
            one.timestep = None if i in (2, 3) else 7
            writer.add(one)
    dataset = ShardDataset(tmp_path)
    assert dataset.timesteps(np.array([5, 2, 0, 3, 1, 4])).tolist() == [7, 2, 7, 3, 7, 7]
    assert dataset.stored_timesteps is None


def test_an_interrupted_writer_leaves_no_data_set(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path, shard_size=2) as writer:
            writer.add_all(sample(i) for i in range(5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(DataError, match="no encoded data set is here"):
        ShardDataset(tmp_path)


NAN, INF = np.float32("nan").tobytes(), np.float32("inf").tobytes()


BAD_VALUES = [
    *((field, NAN, False, "not finite") for field in ("vec", "mean", "logvar")),
    *((field, INF, False, "not finite") for field in ("vec", "mean", "logvar")),
    *((field, b"\x01", True, "CRC-32 differs") for field in SHAPES),
]


@pytest.mark.parametrize(("field", "value", "verify", "reason"), BAD_VALUES)
def test_a_bad_sample_is_named_and_has_weight_0(
    tmp_path: Path, field: str, value: bytes, verify: bool, reason: str
) -> None:
    dataset = ShardDataset(write(tmp_path), verify)
    overwrite(dataset, 4, field, value)
    got = batch(dataset, [3, 4, 5])
    assert got.weights.tolist() == [1, 0, 1]
    assert len(got.faults) == 1
    for part in ("shard_000001.safetensors", "record 1", "'key-4'", reason):
        assert part in got.faults[0]
    assert torch.equal(got.txt[1], EMPTY[0])
    assert torch.equal(got.vec[1], EMPTY[1])
    assert not got.mean[1].any()
    assert not got.logvar[1].any()
    for row, index in ((0, 3), (2, 5)):
        for name in SHAPES:
            assert torch.equal(getattr(got, name)[row], getattr(sample(index), name))


def test_the_checksum_is_verified_if_the_prompt_is_dropped_too(tmp_path: Path) -> None:
    dataset = ShardDataset(write(tmp_path), verify=True)
    overwrite(dataset, 1, "mean", b"\x01")
    got = batch(dataset, [0, 1], dropped=(0, 1))
    assert got.weights.tolist() == [1, 0]


def test_a_bad_text_is_ignored_if_the_prompt_is_dropped(dataset: ShardDataset) -> None:
    overwrite(dataset, 1, "vec", NAN)
    got = batch(dataset, [0, 1], dropped=(1,))
    assert got.weights.tolist() == [1, 1]
    assert torch.equal(got.vec[1], EMPTY[1])


def test_samples_of_a_shard_cut_off_while_in_use_have_weight_0(dataset: ShardDataset) -> None:
    read(dataset, [0])
    shard = dataset._shards[0]
    last = shard.spans["txt"]  # kept: one record and a part of the next
    os.truncate(shard.path, last.offset + last.row_bytes + 8)
    whole = batch(dataset, [3, 4, 5])
    assert whole.weights.tolist() == [1, 1, 1]
    got = batch(dataset, [0, 1, 2, 3])
    assert got.weights.tolist()[1:] == [0, 0, 1]
    assert all("cut off" in fault for fault in got.faults)


def test_a_shard_removed_after_opening_is_named(dataset: ShardDataset) -> None:
    dataset._shards[1].path.unlink()
    got = batch(dataset, [0, 3])
    assert got.weights.tolist() == [1, 0]
    assert "No such file" in got.faults[0]


def test_every_sample_of_a_batch_may_be_bad(dataset: ShardDataset) -> None:
    for index in range(3):
        overwrite(dataset, index, "mean", NAN)
    got = batch(dataset, [0, 1, 2])
    assert not got.weights.any()
    assert len(got.faults) == 3
    assert torch.isfinite(got.mean).all()


def test_more_shards_than_open_files_are_read(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, shard_size=1) as writer:
        writer.add_all(sample(i) for i in range(40))
    dataset = ShardDataset(tmp_path)
    dataset._files = OpenFiles([shard.path for shard in dataset._shards], max_open=8)
    before = len(os.listdir("/proc/self/fd"))
    _, faults = read(dataset, [*range(40), *range(40)])
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    assert faults == [None] * 80


@pytest.mark.parametrize(
    "metadata",
    [None, b"", b"{", b"[]", b'{"keys": 3, "captions": null, "crc32": "x"}', b"[" * 200_000],
)
def test_without_metadata_samples_are_read_and_have_no_keys(
    tmp_path: Path, metadata: bytes | None
) -> None:
    write(tmp_path)
    path = tmp_path / "shard_000000.json"
    path.unlink() if metadata is None else path.write_bytes(metadata)
    dataset = ShardDataset(tmp_path)
    assert batch(dataset, [0, 1]).weights.tolist() == [1, 1]
    assert dataset.caption(0) == ""
    strict = batch(ShardDataset(tmp_path, verify=True), [0, 3])
    assert strict.weights.tolist() == [0, 1]
    assert "no CRC-32 is stored" in strict.faults[0]


def listing(folder: Path, **replaced: Any) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **replaced}))


def entry(file: Any = "shard_000000.safetensors", samples: Any = 3) -> dict[str, Any]:
    return {"shards": [{"file": file, "samples": samples}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, this version reads 1"),
        ({"format": None}, "format None"),
        ({"shards": []}, "lists no shards"),
        ({"shards": {"file": "x"}}, "lists no shards"),
        ({"shards": ["shard_000000.safetensors"]}, "names no file"),
        (entry("../outside/shard_000000.safetensors"), "is outside the folder"),
        (entry("/etc/passwd"), "is outside the folder"),
        (entry(".."), "is outside the folder"),
        (entry(""), "is outside the folder"),
        (entry("a\0b"), "not a whole safetensors file"),
        (entry("shard_000009.safetensors"), r"shard_000009\.safetensors: missing"),
        (entry("dataset.json"), "not a whole safetensors file"),
        (entry(samples=4), r"shard_000000\.safetensors: tensor 'txt' does not hold 4 samples"),
        (entry(samples=-3), "does not hold -3 samples"),
        (entry(samples="3"), "does not hold 3 samples"),
        (entry(samples=None), "does not hold None samples"),
    ],
)
def test_an_invalid_listing_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write(tmp_path / "outside")
    listing(write(tmp_path / "set"), **change)
    with pytest.raises(DataError, match=message):
        ShardDataset(tmp_path / "set")


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff\xfe", b"[" * 200_000, b'{"format"'])
def test_a_malformed_listing_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "dataset.json").write_bytes(content)
    with pytest.raises(DataError, match=r"dataset\.json: not the listing"):
        ShardDataset(tmp_path)


def safetensors(header: object, payload: int = 4096) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * payload


def tensor(dtype: Any = "F32", shape: Any = (3, 3, 5), offsets: Any = (0, 180)) -> dict[str, Any]:
    return {"txt": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2 << 20) + b" " * (3 << 20),
        safetensors(b"{"),
        safetensors(b"\xff\xff\xff"),
        safetensors(b"[" * 200_000),
        safetensors([]),
        safetensors({"txt": 3}),
        safetensors(tensor(dtype="F64")),
        safetensors(tensor(dtype=["F32"])),
        safetensors(tensor(shape=[3, -3, -5])),
        safetensors(tensor(shape=[1.5])),
        safetensors(tensor(shape=[True])),
        safetensors(tensor(shape="333")),
        safetensors(tensor(shape=[1] * 9, offsets=[0, 4])),
        safetensors(tensor(shape=[1 << 40, 1 << 40])),
        safetensors(b'{"txt": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}'),
        safetensors(b'{"txt": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}"),
        safetensors(tensor(offsets=[-180, 0])),
        safetensors(tensor(offsets=[0, 184])),
        safetensors(tensor(offsets=[180, 0])),
        safetensors(tensor(offsets=[0])),
        safetensors(tensor(offsets=[8000, 8180])),
        safetensors(tensor(), payload=179),
        safetensors({}),
        safetensors(tensor()),  # whole, but the other tensors are missing
    ],
)
def test_a_shard_with_an_invalid_header_is_refused(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "shard_000001.safetensors").write_bytes(content)
    with pytest.raises(DataError, match=r"shard_000001\.safetensors: "):
        ShardDataset(tmp_path)


@pytest.mark.parametrize(
    ("create", "message"), [(os.mkfifo, "not a regular file"), (Path.mkdir, "")]
)
def test_a_pipe_or_a_folder_instead_of_a_shard_is_refused(
    tmp_path: Path, create: Callable[[Path], None], message: str
) -> None:
    path = write(tmp_path) / "shard_000001.safetensors"
    path.unlink()
    create(path)
    with pytest.raises(DataError, match=rf"shard_000001\.safetensors: .*{message}"):
        ShardDataset(tmp_path)


@pytest.mark.parametrize("part", [0, 0.01, 0.2, 0.9, 0.999])
def test_a_shard_cut_off_before_opening_is_refused(tmp_path: Path, part: float) -> None:
    path = write(tmp_path) / "shard_000000.safetensors"
    os.truncate(path, int(part * path.stat().st_size))
    with pytest.raises(DataError, match=r"shard_000000\.safetensors: not a whole"):
        ShardDataset(tmp_path)


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"mean": torch.zeros(8, 2, 2), "logvar": torch.zeros(8, 2, 2)}, "differ in shape"),
        ({"txt": torch.zeros(4, 5)}, "differ in shape"),
    ],
)
def test_shards_of_different_shapes_are_refused(
    tmp_path: Path, replaced: dict[str, Tensor], message: str
) -> None:
    with ShardWriter(tmp_path, shard_size=3) as writer:
        writer.add_all([*(sample(i) for i in range(3)), *(sample(i, **replaced) for i in range(3))])
    with pytest.raises(DataError, match=rf"shard_000001\.safetensors: .*{message}"):
        ShardDataset(tmp_path)


@pytest.mark.parametrize("replaced", [{"logvar": torch.zeros(3)}, {"vec": torch.zeros(2, 3)}])
def test_shapes_that_are_not_those_of_encodings_are_refused(
    tmp_path: Path, replaced: dict[str, Tensor]
) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.add(sample(0, **replaced))
    with pytest.raises(DataError, match="not those of encoded samples"):
        ShardDataset(tmp_path)


def test_a_timestep_out_of_range_is_refused(dataset: ShardDataset) -> None:
    overwrite(dataset, 4, "timestep", struct.pack("<i", 8))
    assert dataset.timesteps(np.arange(3)).tolist() == [7, 6, 5], "other files are not read"
    with pytest.raises(DataError, match=r"shard_000001\.safetensors: a timestep"):
        dataset.timesteps(np.arange(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_safetensors_library_reads_what_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "txt": torch.randn(3, 5, 7).to(dtype),
        "timestep": torch.arange(3, dtype=torch.int32),
    }
    save_aligned(tmp_path / "file.safetensors", tensors)
    loaded = load_file(tmp_path / "file.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert read_header(tmp_path / "file.safetensors")["txt"].offset % 64 == 0


def make_config(**data: Any) -> RunConfig:
    return resolve(merge_all(ENCODED_RUN, {"data": data}))


def digests(root: Path, **data: Any) -> dict[str, str]:
    return index_digests(open_sources(make_config(**data), root))


@pytest.mark.parametrize("change", [list.pop, list.reverse])
def test_the_digest_is_that_of_files_and_samples(tmp_path: Path, change: Any) -> None:
    write_encoded(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = digests(tmp_path / "one"), digests(tmp_path / "two")
    assert one == two
    assert len(set(one.values()) | {len(one["train"])}) >= 2
    shards = json.loads((tmp_path / "two/train/dataset.json").read_text())["shards"]
    change(shards)
    listing(tmp_path / "two/train", shards=shards)
    changed = digests(tmp_path / "two")
    assert changed["train"] != one["train"]
    assert changed["validation"] == one["validation"]


def test_synthetic_data_have_one_by_their_number() -> None:
    first, same, other = (
        index_digests(
            open_sources(resolve({"preset": "micro", "data": {"synthetic": size}}), Path())
        )
        for size in ({}, {}, {"train_samples": 17})
    )
    assert first == same
    assert (first["train"] != other["train"], first["validation"]) == (True, other["validation"])


def test_a_set_with_another_digest_than_the_configs_is_refused(tmp_path: Path) -> None:
    write_encoded(tmp_path)
    paths, found = RunPaths(tmp_path, tmp_path, tmp_path), digests(tmp_path)
    config = make_config(train_digest=found["train"], validation_digest=found["validation"])
    assert shared_sources(config, paths, World.alone()).digests == found
    for part in found:
        config = make_config(**{f"{part}_digest": "0" * 64})
        with pytest.raises(
            ConfigError, match=f"{part}_digest: .*; the index in {part} is {found[part]}"
        ):
            shared_sources(config, paths, World.alone())
